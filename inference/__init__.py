"""Inference: from a model folder to answers, in Python, in the terminal and over HTTP."""

import os

from common.version import version

__version__ = version()

# ONNX Runtime sends telemetry from its import on, unless this is set.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
