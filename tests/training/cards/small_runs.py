"""Runs of the cards that are over soon, and a server of their page."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from training.cards.serve import create_app
from training.cards.session import Session
from training.cards.wiring import DEFAULT_PIPELINE, Pipeline, read_pipeline


def small_pipeline(workers: int = 2, batch_size: int = 120, epochs: int = 1, **strategy: Any) -> Pipeline:
    """The irises; as it comes, the training loop has a single pass over all 120 training rows."""
    pipeline = read_pipeline(DEFAULT_PIPELINE).configured("shard", num_workers=workers)
    pipeline = pipeline.configured("prepare", batch_size=batch_size).configured("save", epoch=epochs)
    return pipeline.configured("strategy", **strategy)


@contextmanager
def served(pipeline: Pipeline, folder: Path) -> Iterator[tuple[Session, httpx.Client]]:
    """A server of a session, and a client of it."""
    with Session(pipeline, folder) as session, socket.create_server(("127.0.0.1", 0)) as listener:
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
    with client.stream("GET", "/api/events") as events:
        for line in events.iter_lines():
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
