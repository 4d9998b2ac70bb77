"""Distributed training for learners: a run in twelve visible steps, and each idea written out by hand."""
