"""The card that shares the rows out over the ranks."""
