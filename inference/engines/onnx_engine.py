"""ONNX Runtime as the runtime: the portable engine, fast on processors with int8 instructions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from inference.engines.base import CPU_BATCH_TOKENS, PASSES_AT_ONCE, TokenBatch

FILE_NAME = "model.onnx"


class OnnxEngine:
    """Runs the graph that `exporting.onnx_writer` wrote; see `engines.base.Engine`."""

    batch_tokens = CPU_BATCH_TOKENS
    pads = True
    survives_fork = False

    def __init__(
        self, folder: Path, config: Mapping[str, Any], threads: int, precision: str = "int8"
    ) -> None:
        """Read `FILE_NAME` from a folder, to run it on so many threads; ``precision`` is for the
        engine's name.

        Raises:
            Exception: The runtime's own errors, if the file is damaged or needs a newer runtime.
        """
        options = onnxruntime.SessionOptions()
        # The default counts the host's cores, whatever the container's quota.
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Waiting threads that spin would compete with the event loop for cores, also in the middle
        # of a pass.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # A memory pattern is kept for every shape ever seen, and hardly any two batches have the
        # same shape.
        options.enable_mem_pattern = False
        # Only fatal errors: others are raised, and need not be printed too.
        onnxruntime.set_default_logger_severity(4)
        self.name = f"onnx {precision}"
        # They share the threads; while one is between two steps, or its result is read, another
        # keeps them busy.
        self.num_slots = min(threads, PASSES_AT_ONCE)
        self._pad_id: int = config.get("pad_token_id") or 0
        self._session = onnxruntime.InferenceSession(
            folder / FILE_NAME, options, providers=["CPUExecutionProvider"]
        )

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        input_ids, attention_mask = batch.padded(self._pad_id)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}  # (texts, longest)
        return self._session.run(None, inputs)[0]
