"""Inference: from a model folder to answers, in Python, in the terminal and over HTTP."""

__version__ = "0.1.0"
