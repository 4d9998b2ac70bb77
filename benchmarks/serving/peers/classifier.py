"""How every peer with an int8 artefact classifies texts: cleaning, tokens, weights and answers are the same as ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.text import TextTokenizer

FOLDER = Path(os.environ.get("SERVED_FOLDER", "."))
PORT = int(os.environ.get("SERVED_PORT", "8000"))
THREADS = len(os.sched_getaffinity(0))
Run = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


class PeerClassifier:
    """An int8 artefact run by its own runtime.

    ``sub_batch``: texts of near lengths per forward pass; None: all of a call in one pass, in their
    order.
    """

    def __init__(self, folder: Path = FOLDER, sub_batch: int | None = None) -> None:
        config = json.loads((folder / "config.json").read_text())
        tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
        self._labels = [config["id2label"][str(i)] for i in range(len(config["id2label"]))]
        self._tokenizer = TextTokenizer.from_file(
            folder / "tokenizer.json", tokenizer_config["model_max_length"]
        )
        self._run = _load(folder)
        self._sub_batch = sub_batch
        self.classify(["The first pass is the slowest one."])

    def answer(self, requests: Sequence[dict[str, Any]]) -> list[Any]:
        """Answer requests of one text (``text``: an object) or several (``texts``: a list) together."""
        texts = [
            request["texts"] if "texts" in request else [request["text"]] for request in requests
        ]
        # The texts of all requests are classified together and dealt out again in their order: a
        # framework that has collected a batch must not see it run request by request.
        answers = iter(self.classify([text for group in texts for text in group]))
        return [
            [next(answers) for _ in group] if "texts" in request else next(answers)
            for request, group in zip(requests, texts, strict=True)
        ]

    def classify(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        ids = [encoded.ids for encoded in self._tokenizer.encode(texts)]
        # Sorted by length, texts of a sub-batch are hardly padded; the answers go back to their
        # texts' places.
        order = (
            sorted(range(len(ids)), key=lambda i: len(ids[i]))
            if self._sub_batch
            else range(len(ids))
        )
        step = self._sub_batch or len(ids)
        answers: list[dict[str, Any]] = [{}] * len(ids)
        for start in range(0, len(ids), step):
            chosen = order[start : start + step]
            for i, row in zip(chosen, self._probabilities([ids[i] for i in chosen]), strict=True):
                answers[i] = self._answer(row)
        return answers

    def _probabilities(self, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        # Padded to the longest of this call and not to the model's limit: (texts, longest) each.
        longest = max(map(len, ids))
        input_ids = np.zeros((len(ids), longest), dtype=np.int64)
        mask = np.zeros_like(input_ids)
        for row, one in enumerate(ids):
            input_ids[row, : len(one)] = one
            mask[row, : len(one)] = 1
        logits = self._run(input_ids, mask)
        # Less the row's largest logit, or a large one would overflow; the softmax is the same.
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    def _answer(self, row: NDArray[np.float32]) -> dict[str, Any]:
        values = row.tolist()
        best = int(row.argmax())
        probabilities = dict(zip(self._labels, values, strict=True))
        return {
            "label": self._labels[best],
            "confidence": values[best],
            "probabilities": probabilities,
        }


def _load(folder: Path) -> Run:
    """OpenVINO or onnxruntime, as the artefact needs; all cores, one pass at a time, tuned for latency."""
    if found := list(folder.glob("*.xml")):
        import openvino as ov

        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": THREADS,
        }
        request = ov.Core().compile_model(found[0], "CPU", settings).create_infer_request()
        return lambda ids, mask: request.infer({"input_ids": ids, "attention_mask": mask})[0]
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(
        next(folder.glob("*.onnx")), options, providers=["CPUExecutionProvider"]
    )
    return lambda ids, mask: session.run(["logits"], {"input_ids": ids, "attention_mask": mask})[0]
