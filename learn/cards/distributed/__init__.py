"""Cards that run on every rank: the process group, and the four of the training loop."""
