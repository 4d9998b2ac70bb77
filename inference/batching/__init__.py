"""Texts in, futures out: a fair queue, and forward passes on threads."""
