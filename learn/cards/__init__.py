"""Data parallelism in twelve cards: each a step of the pipeline that runs on real ranks and can be looked at."""
