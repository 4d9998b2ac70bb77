"""Resilience: what keeps a run alive, and what ends it in time when it cannot go on."""
