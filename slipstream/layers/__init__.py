"""The building blocks of the models; they know the kernels' table, and neither scheduling nor files."""
