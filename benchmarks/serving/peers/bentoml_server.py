"""BentoML: its adaptive batcher for single texts, a plain call for lists."""

from __future__ import annotations

from typing import Any

import bentoml

from benchmarks.serving.peers.classifier import PeerClassifier


@bentoml.service(
    workers=1,
    traffic={"timeout": 60},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Classify:
    def __init__(self) -> None:
        self.classifier = PeerClassifier()

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=60_000)
    def predict(self, texts: list[str]) -> list[dict[str, Any]]:
        """Classify the texts of several requests at once; each sends a list of one."""
        return self.classifier.classify(texts)

    @bentoml.api(route="/predict/batch")
    def predict_batch(self, texts: list[str]) -> list[dict[str, Any]]:
        return self.classifier.classify(texts)
