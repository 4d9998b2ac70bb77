"""Inference: from a model folder to answers, in Python, in the terminal and over HTTP."""

import os

__version__ = "0.1.0"

# ONNX Runtime sends telemetry from its import on, unless this is set.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
