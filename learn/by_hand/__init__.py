"""Parallelism by hand: what the libraries do, written with collectives that you can count."""
