"""Data paths, one per file."""
