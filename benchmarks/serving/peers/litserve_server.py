"""LitServe: a FastAPI front and a worker process that batches."""

from __future__ import annotations

import os
from typing import Any

import litserve as ls

from benchmarks.serving.peers.classifier import PORT, PeerClassifier

SUB_BATCH = int(os.environ.get("SUB_BATCH", "0")) or None
MAX_BATCH = int(os.environ.get("MAX_BATCH", "32"))


class Classify(ls.LitAPI):
    """One route answers single texts and lists of them."""

    def setup(self, device: str) -> None:
        """Load the model in the worker."""
        self.classifier = PeerClassifier(sub_batch=SUB_BATCH)

    def decode_request(self, request):  # noqa: ANN001, ANN201 (LitServe takes annotations for a schema)
        """Leave the JSON as it is; LitServe wants the parameter to have this name."""
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Leave a batch as a list of requests."""
        return inputs

    def predict(self, x: list[dict[str, Any]]) -> list[Any]:
        """Answer the requests of one batch."""
        return self.classifier.answer(x)

    def unbatch(self, output: list[Any]) -> list[Any]:
        """Hand each request its own answer."""
        return output

    def encode_response(self, output):  # noqa: ANN001, ANN201
        """Leave the answer as it is."""
        return output


if __name__ == "__main__":
    api = Classify(max_batch_size=MAX_BATCH, batch_timeout=0.005)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(port=PORT, host="127.0.0.1", num_api_servers=1, generate_client_file=False, log_level="error")
