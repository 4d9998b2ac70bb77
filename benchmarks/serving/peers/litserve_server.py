"""LitServe: a FastAPI front and a worker process that batches."""

from __future__ import annotations

import os
from typing import Any

import litserve as ls

from benchmarks.serving.peers.classifier import PORT, PeerClassifier

SUB_BATCH = int(os.environ.get("SUB_BATCH", "0")) or None
MAX_BATCH = int(os.environ.get("MAX_BATCH", "32"))


class Classify(ls.LitAPI):
    """One route answers single texts and lists."""

    def setup(self, device: str) -> None:
        self.classifier = PeerClassifier(sub_batch=SUB_BATCH)

    def decode_request(self, request):  # noqa: ANN001, ANN201 (LitServe reads annotations as a schema)
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return inputs

    def predict(self, x: list[dict[str, Any]]) -> list[Any]:
        return self.classifier.answer(x)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output):  # noqa: ANN001, ANN201
        return output


if __name__ == "__main__":
    api = Classify(max_batch_size=MAX_BATCH, batch_timeout=0.005)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(
        port=PORT,
        host="127.0.0.1",
        num_api_servers=1,
        generate_client_file=False,
        log_level="error",
    )
