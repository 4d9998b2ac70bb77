"""One run: the loop, its state, and what it leaves behind."""
