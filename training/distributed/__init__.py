"""The processes of a run: ranks, their group, their launcher, and what they say when they fail."""
