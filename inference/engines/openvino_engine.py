"""OpenVINO as the runtime: static int8 on x86, for processors that our kernels do not support."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from inference.engines.base import CPU_BATCH_TOKENS, PASSES_AT_ONCE, TokenBatch

FILE_NAME = "model.xml"
# The plugin keeps memory for every shape it has seen. With arbitrary lengths, DistilBERT-base grows
# from 190 to 780 MB within minutes; with lengths rounded up to 16 tokens it stays at 330 MB.
LENGTH_STEP = 16


class OpenVinoEngine:
    """Runs the graph that `exporting.openvino_writer` wrote; see `engines.base.Engine`."""

    name = "openvino int8"
    batch_tokens = CPU_BATCH_TOKENS
    pads = True
    survives_fork = False

    def __init__(self, folder: Path, config: Mapping[str, Any], threads: int) -> None:
        """Read `FILE_NAME` from a folder and compile it, to run on so many threads.

        Raises:
            RuntimeError: The files are damaged or need a newer runtime.
        """
        self._pad_id: int = config.get("pad_token_id") or 0
        self._longest: int = config.get("max_position_embeddings") or np.iinfo(np.int32).max
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            # The default is bfloat16 if the processor has it.
            "INFERENCE_PRECISION_HINT": "f32",
        }
        core = openvino.Core()
        # By default weights are mapped: overwriting the file would change answers, and truncating
        # it kill the process.
        core.set_property({"ENABLE_MMAP": False})
        self._model = core.compile_model(folder / FILE_NAME, "CPU", options)
        self._free_requests: list[openvino.InferRequest] = []
        # They share the threads; while one is between two steps, or its result is read, another
        # keeps them busy.
        self.num_slots = min(threads, PASSES_AT_ONCE)

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        input_ids, attention_mask = batch.padded(self._pad_id)
        # Rounded up to a step (see above), but not beyond the model's table of positions.
        length = input_ids.shape[1]
        missing = min(-length % LENGTH_STEP, max(0, self._longest - length))
        more = ((0, 0), (0, missing))
        inputs = [
            np.pad(input_ids, more, constant_values=self._pad_id),
            np.pad(attention_mask, more),
        ]
        try:
            request = self._free_requests.pop()
        except IndexError:
            request = self._model.create_infer_request()
        logits = request.infer(inputs)[0].copy()
        self._free_requests.append(request)
        return logits
