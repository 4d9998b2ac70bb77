"""Ray Serve: one replica with its batching decorator, behind its HTTP proxy."""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.serving.peers.classifier import PORT, PeerClassifier


# Ray only keeps books of its CPUs and holds no process to them: the replica computes on all cores,
# because the classifier counts those that it may use.
@serve.deployment(num_replicas=1, max_ongoing_requests=512, ray_actor_options={"num_cpus": 1})
class Classify:
    def __init__(self) -> None:
        self.classifier = PeerClassifier()

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def answer(self, requests: list[dict[str, Any]]) -> list[Any]:
        return self.classifier.answer(requests)

    async def __call__(self, request: Request) -> Any:
        return await self.answer(await request.json())


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(
        http_options={"host": "127.0.0.1", "port": PORT},
        logging_config={"enable_access_log": False},
    )
    serve.run(Classify.bind(), route_prefix="/")
    threading.Event().wait()
