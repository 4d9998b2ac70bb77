"""The parts of `benchmarks/cascade.py`."""
