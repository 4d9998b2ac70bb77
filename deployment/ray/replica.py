"""The server as a Ray Serve application: each replica is the whole of it, engine and queue, in a process of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.schema import LoggingConfig

from inference.app import create_app
from inference.batching.served_model import LoadModel
from inference.engines.model_loader import ModelLoader
from inference.settings import Settings

# Beyond what a replica's own queue takes of usual texts, so that it refuses by tokens, with its
# measured Retry-After; Serve's own limit stands behind it and bounds the proxy's memory.
_MOST_ONGOING_REQUESTS = 1000
_MOST_REQUESTS_WAITING_IN_THE_PROXY = 1000
# A few forward passes' worth: more wait longer than they would on another replica.
_ONGOING_REQUESTS_TO_SCALE_AT = 16
# After three failures in a row Serve starts another replica; a process that is gone it sees at the
# next check. One that does not respond is so replaced after about half a minute. The first check,
# which waits for the model, belongs to the start and has no limit.
_SECONDS_BETWEEN_HEALTH_CHECKS = 2
_SECONDS_FOR_A_HEALTH_CHECK = 10
_ATTEMPTS_TO_START = 3

# What log files have is one line a request from the server itself; Serve's would repeat it, with
# paths in full.
QUIET = LoggingConfig(encoding="JSON", log_level="WARNING", enable_access_log=False)


class Arguments(BaseModel):
    """An application's arguments; everything else comes from the replicas' environment (docs/serving.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path = Field(
        description="The model folder, on every machine or on storage that all share."
    )
    min_replicas: int = Field(default=1, ge=1, description="Replicas without load.")
    max_replicas: int = Field(
        default=1,
        ge=1,
        description="Most replicas under load; the same as min_replicas: no scaling.",
    )
    cpus_per_replica: int = Field(default=1, ge=1, description="Cores that a replica computes on.")

    @model_validator(mode="after")
    def _check_order(self) -> Arguments:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is less than min_replicas {self.min_replicas}"
            )
        return self


@serve.ingress()
class Server:
    """One replica: the application of inference/app.py with its lifespan, limits and routes."""

    def __init__(self, model: str, num_cores: int) -> None:
        settings = Settings.from_environment().model_copy(update={"model_checkpoint": Path(model)})
        self.app_of_server = create_app(settings, _loading_for(num_cores))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook."""
        return self.app_of_server

    async def check_health(self) -> None:
        """Fail while no text can be classified: Serve then sends requests elsewhere and starts another replica."""
        parts = self.app_of_server.state.parts
        # Serve's first check has no limit, so waiting here is what makes a replica start only when
        # its model is loaded. A later model that loads beside a current one keeps nobody waiting.
        while parts.served_model.is_loading and parts.served_model.current is None:
            await asyncio.sleep(0.05)
        if parts.unready is not None:
            raise RuntimeError(parts.unready)


def build(fields: dict[str, Any]) -> serve.Application:
    """Build the application, for the command line or as a Serve configuration's ``import_path``.

    Raises:
        SettingsError: a variable of the environment has an invalid value.
    """
    arguments = Arguments.model_validate(fields)
    settings = Settings.from_environment()
    scaling = {
        "min_replicas": arguments.min_replicas,
        "max_replicas": arguments.max_replicas,
        "target_ongoing_requests": _ONGOING_REQUESTS_TO_SCALE_AT,
        "upscale_delay_s": 5,
    }
    is_fixed = arguments.min_replicas == arguments.max_replicas
    deployment = serve.deployment(
        Server,
        name="distrinews",
        **{"num_replicas": arguments.min_replicas} if is_fixed else {"autoscaling_config": scaling},
        ray_actor_options={"num_cpus": arguments.cpus_per_replica},
        max_ongoing_requests=_MOST_ONGOING_REQUESTS,
        max_queued_requests=_MOST_REQUESTS_WAITING_IN_THE_PROXY,
        graceful_shutdown_timeout_s=settings.grace_seconds,
        graceful_shutdown_wait_loop_s=settings.drain_seconds,
        health_check_period_s=_SECONDS_BETWEEN_HEALTH_CHECKS,
        health_check_timeout_s=_SECONDS_FOR_A_HEALTH_CHECK,
        max_constructor_retry_count=_ATTEMPTS_TO_START,
        logging_config=QUIET,
    )
    return deployment.bind(str(arguments.model), arguments.cpus_per_replica)


def _loading_for(num_cores: int) -> LoadModel:
    """Load models for this many cores: Ray counts cores but does not pin processes, and an engine uses all it sees."""

    def load(path: Path, engine: str) -> ModelLoader:
        with _sees_only(num_cores):
            return ModelLoader(path, engine)

    return load


@contextmanager
def _sees_only(num_cores: int) -> Iterator[None]:
    """Pin this thread, and those that it starts meanwhile; afterwards all may run on any core."""
    # The engine counts the cores that it may use while it loads, and keeps that many threads. The
    # pin is only for that count: which cores the replicas then share is the kernel's business, and
    # replicas that were all pinned to the first cores would leave the others idle.
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:num_cores])
    try:
        yield
    finally:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), allowed)
