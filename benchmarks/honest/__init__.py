"""The parts of `benchmarks/honest_answers.py`."""
