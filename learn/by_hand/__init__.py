"""Parallelism by hand, to read: what the libraries do, written with collectives that you can count."""
