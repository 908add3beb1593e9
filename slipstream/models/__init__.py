"""Model definitions and their weights; knows neither scheduling nor transport."""
