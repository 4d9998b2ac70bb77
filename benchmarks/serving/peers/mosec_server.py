"""mosec: a Rust front that batches for a Python worker; `SUB_BATCH` and `WAIT_MS` choose between stock and tuned."""

from __future__ import annotations

import os
from typing import Any

from mosec import Server, Worker

from benchmarks.serving.peers.classifier import PeerClassifier

SUB_BATCH = int(os.environ.get("SUB_BATCH", "0")) or None
MAX_BATCH = int(os.environ.get("MAX_BATCH", "32"))
WAIT_MS = int(os.environ.get("WAIT_MS", "10"))


class Classify(Worker):
    def __init__(self) -> None:
        self.classifier = PeerClassifier(sub_batch=SUB_BATCH)

    def forward(self, data: list[dict[str, Any]]) -> list[Any]:
        return self.classifier.answer(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Classify,
        num=1,
        max_batch_size=MAX_BATCH,
        max_wait_time=WAIT_MS,
        route=["/predict", "/predict/batch"],
    )
    server.run()
