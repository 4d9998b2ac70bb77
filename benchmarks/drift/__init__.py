"""The parts of `benchmarks/observing.py`."""
