"""Data parallelism in twelve cards: each is a step that runs on real ranks and can be looked at."""
