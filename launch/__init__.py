"""Starts and places the processes of a deployment."""
