"""Parallelism written out by hand, for readers: what the libraries do, in collectives that can be counted."""
