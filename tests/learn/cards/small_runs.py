"""Runs of the cards that are over soon, and a server of their page."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml

from learn.cards.pipeline import DEFAULT_PIPELINE, Pipeline, read_pipeline
from learn.cards.serve import create_app
from learn.cards.session import Session

WAIT_SECONDS = 120


def small_pipeline(folder: Path, workers: int = 2, batch_size: int = 120, epochs: int = 1, **strategy: Any) -> Pipeline:
    """150 rows of three classes; as it comes, the training loop has a single pass over all 120 training rows."""
    data = folder / "rows.csv"
    rows = [f"{row % 7},{row % 5},{row // 50},{row % 3},class {row // 50}" for row in range(150)]
    data.write_text("\n".join(["a,b,c,d,kind", *rows]))
    pipeline = read_pipeline(DEFAULT_PIPELINE).configured("load", source_url=str(data), target_column="kind")
    pipeline = pipeline.configured("shard", num_workers=workers)
    pipeline = pipeline.configured("prepare", batch_size=batch_size).configured("save", epoch=epochs)
    return pipeline.configured("strategy", **strategy)


OWN_CARD = """
from pydantic import Field
from learn.cards.base import BaseCard, CardConfig

class Config(CardConfig):
    factor: float = Field(0.5, gt=0, description="of the gradients")

class HalveGradients(BaseCard[Config]):
    display_name = "Halve gradients"
    execution_mode = "distributed"
    in_training_loop = True
    held = ("gradients", {"before": "before", "after": "after"})
    config_schema = Config
    input_schema = {"synced_gradients": "synced_gradients"}
    output_schema = {"synced_gradients": "synced_gradients"}

    def execute(self, config, inputs, storage):
        for parameter in storage.live["model"].parameters():
            parameter.grad.mul_(config.factor)
        return dict(inputs)

    def get_output_preview(self, outputs, storage):
        return self.preview(["rank"], [[rank] for rank in storage.ranks()])
"""


def with_own_card(folder: Path, pipeline: Pipeline, code: str = OWN_CARD, **config: Any) -> Pipeline:
    """The pipeline with a card of one's own, from a module beside its file, between the all-reduce and the step."""
    module = f"own_{folder.name}".replace("-", "_")  # imported once per process, so each test has its own
    (folder / f"{module}.py").write_text(code)
    nodes = [
        {
            "id": node.id,
            "card": node.card.card_type,
            "config": node.config.model_dump(),
            "inputs": {name: str(source) for name, source in node.inputs.items()},
        }
        for node in pipeline.nodes
    ]
    next(node for node in nodes if node["id"] == "step")["inputs"] = {"synced_gradients": "own.synced_gradients"}
    own = {"id": "own", "card": f"{module}:HalveGradients", "config": config}
    nodes.append(own | {"inputs": {"synced_gradients": "allreduce.synced_gradients"}})
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({"nodes": nodes}))
    return read_pipeline(path)


@contextmanager
def served(folder: Path, pipeline: Pipeline | None = None, **options: Any) -> Iterator[tuple[Session, httpx.Client]]:
    """A server of a session of a pipeline, a small one when not given, and a client of it."""
    with (
        Session(pipeline or small_pipeline(folder, **options), folder / "runs") as session,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        server = uvicorn.Server(uvicorn.Config(create_app(session), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
                yield session, client
        finally:
            server.should_exit = True
            session.end()
            thread.join()


def state_when(client: httpx.Client, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first state of the server's events of which something holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    with client.stream("GET", "/api/events") as events:
        for line in events.iter_lines():  # there is one every few seconds, be it empty
            assert time.monotonic() < deadline, "no such state came"
            if line.startswith("data:") and holds(state := json.loads(line.removeprefix("data:"))):
                return state
    raise AssertionError("the events ended")


def is_idle(state: dict[str, Any]) -> bool:
    return not state["busy"]


def step(client: httpx.Client) -> dict[str, Any]:
    """Run the next card, and wait for its end."""
    client.post("/api/step").raise_for_status()
    return state_when(client, is_idle)


def step_to(client: httpx.Client, node: str) -> None:
    """Run until a card is next."""
    while step(client)["next"] != node:
        pass
