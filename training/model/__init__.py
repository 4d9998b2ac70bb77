"""The classifier, and the numbers it computes in."""
