"""Distributed training to learn from: a run in twelve steps, and each idea written by hand."""
