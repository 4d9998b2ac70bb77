"""ONNX Runtime as the runtime: the portable engine, fast wherever the processor multiplies int8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from inference.engines.base import CPU_BATCH_TOKENS, TokenBatch

FILE_NAME = "model.onnx"


class OnnxEngine:
    """Runs the graph that `inference.exporting.onnx_writer` wrote; see `inference.engines.base.Engine`."""

    num_slots = 1
    batch_tokens = CPU_BATCH_TOKENS
    pads = True

    def __init__(self, folder: Path, config: Mapping[str, Any], threads: int, precision: str = "int8") -> None:
        """Read the graph.

        Args:
            folder: Holds `FILE_NAME`.
            config: The contents of the model's ``config.json``.
            threads: Processors that the engine may use.
            precision: Of the graph, for the engine's name.

        Raises:
            Exception: The runtime's own errors, when the file is damaged or needs a newer runtime.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads  # the default counts the host's cores, whatever the container's quota
        options.inter_op_num_threads = 1
        # Waiting threads that spin take the core from the event loop, and lose it back in the middle of a pass.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Patterns are kept for every shape that was ever seen, and hardly two batches have the same.
        options.enable_mem_pattern = False
        onnxruntime.set_default_logger_severity(4)  # what fails is raised, and need not be printed too
        self.name = f"onnx {precision}"
        self._pad_id: int = config.get("pad_token_id") or 0
        self._session = onnxruntime.InferenceSession(folder / FILE_NAME, options, providers=["CPUExecutionProvider"])

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        """Run one forward pass; see `inference.engines.base.Engine`."""
        input_ids, attention_mask = batch.padded(self._pad_id)
        return self._session.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})[0]
