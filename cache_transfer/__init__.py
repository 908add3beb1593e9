"""Moves a request's state between ranks; knows no model."""
