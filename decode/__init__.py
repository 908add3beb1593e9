"""The decode half: loads a prompt's state and continues it."""
