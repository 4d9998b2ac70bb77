"""The server: `uvicorn inference.app:app`, or `python -m inference.serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from inference.batching.served_model import LoadModel
from inference.engines.model_loader import ModelLoader
from inference.errors import SettingsError
from inference.http.connections import ConnectionKeeper
from inference.http.early_refusals import EarlyRefusals
from inference.http.error_responses import add_error_handlers
from inference.http.lifecycle import server_of_process
from inference.http.request_gate import RequestGate
from inference.http.request_log import configure_logging
from inference.http.routes import (
    explain,
    feedback,
    gateways,
    hub,
    models,
    open_inference,
    operations,
    pages,
    predict,
)
from inference.http.routes.json_route import JsonRoute, ShortCut
from inference.http.server_parts import Parts
from inference.http.telemetry import TraceMiddleware, Tracing
from inference.http.workers import SupervisorLine
from inference.settings import Settings, keep_tokenizer_on_one_thread

# Seconds between two looks at whether the model is dead.
_DEAD_CHECK_S = 0.5

_GROUPS = (predict, explain, feedback, hub, gateways, open_inference, models, operations, pages)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    parts: Parts = app.state.parts
    configure_logging(parts.settings.log_level, logging.getLogger("inference"))
    # Its lines contain client addresses, which ours leave out, and repeat the rest.
    logging.getLogger("uvicorn.access").handlers.clear()
    logging.getLogger("uvicorn.access").propagate = False
    keep_tokenizer_on_one_thread()
    server = server_of_process()
    tasks: set[asyncio.Task[None]] = set()

    if parts.line is not None:
        await parts.line.connect()  # before the load, which reports on it

    def load() -> None:
        task = asyncio.create_task(_load_once_started(server, parts))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    if parts.observer is not None:
        parts.observer.start()
    if parts.line is not None and parts.line.has_model:
        await parts.models.load_or_log()
    else:
        # The port opens immediately: /health reports honestly while the model loads in the
        # background.
        load()
    # A reload is for all workers or none, so one that is asked for it passes that on.
    parts.lifecycle.take_signals(
        reload=load if parts.line is None else partial(os.kill, os.getppid(), signal.SIGHUP)
    )
    settings = parts.settings
    keeper = ConnectionKeeper(
        settings.max_connections,
        settings.request_timeout_s,
        settings.max_connection_age_s,
        app.state.early_refusals.answer_to,
    )
    if parts.line is not None:
        leave = partial(parts.lifecycle.leave, server)
        follow = parts.line.follow(parts.metrics.snapshot, parts.limits.take_elsewhere, leave)
        following = asyncio.create_task(follow)
    ending = asyncio.create_task(_end_once_dead(server, parts)) if server is not None else None
    async with keeper.watching(server):
        parts.in_progress.most = keeper.most_requests
        yield
    parts.lifecycle.is_draining = True
    if ending is not None:
        ending.cancel()
    await _abandon(tasks, server, parts)
    await parts.models.close()
    for one in (parts.feedback, parts.observer):  # now that all is answered
        if one is not None:
            await asyncio.to_thread(one.close)
    parts.log.write_refused()
    if parts.line is not None:
        following.cancel()
        # The supervisor goes on counting them: without the counts of an ended worker, the sums of
        # all would fall.
        parts.line.say_counts(parts.metrics.snapshot())
    parts.lifecycle.end()


async def _abandon(loads: set[asyncio.Task[None]], server: Any, parts: Parts) -> None:
    """Give up loads that still run: they load a model that nobody will use."""
    if not loads and not parts.models.is_changing:  # also while a candidate is loaded for shadow
        return
    # Their threads cannot be stopped, and Python would free what they still use; so the process
    # ends at once, without the interpreter's own end.
    if server is not None and server.started and parts.lifecycle.exit_code is None:
        parts.lifecycle.exit_code = 0
    for task in loads:
        task.cancel()
    await asyncio.gather(*loads, return_exceptions=True)


async def _end_once_dead(server: Any, parts: Parts) -> None:
    # An orchestrator may ask /livez and act. A composition, a plain container, or a worker among
    # several has only its exit code.
    while (reason := parts.dead) is None:
        await asyncio.sleep(_DEAD_CHECK_S)
    if not parts.lifecycle.is_draining:
        parts.lifecycle.die(server, reason)


async def _load_once_started(server: Any, parts: Parts) -> None:
    # Messages about the model come after uvicorn's own, and a port that is in use is noticed before
    # anything is loaded.
    while server is not None and not server.started:
        if parts.lifecycle.is_draining:
            return
        await asyncio.sleep(0.01)
    await parts.models.load_or_log()
    if parts.line is not None and parts.served_model.current is not None:
        parts.line.say_loaded()


def create_app(
    settings: Settings | None = None,
    load_model: LoadModel | None = None,
    line: SupervisorLine | None = None,
) -> FastAPI:
    """Build the server, by default for the settings in the environment; ``line`` if it is one of
    several workers.

    Raises:
        SettingsError: an environment variable has an invalid value, or asks for something that is
            not installed.
    """
    settings = settings or Settings.from_environment()
    parts = Parts.of(settings, load_model or partial(ModelLoader, hardware=settings.hardware), line)
    app = FastAPI(
        title="DistriNews",
        description="Classifies texts.",
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        # It would redirect to an absolute address; `error_responses` does it relatively.
        redirect_slashes=False,
        # It looks at the environment on every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.parts = parts
    routes = [
        route for group in _GROUPS for route in group.router.routes if isinstance(route, Route)
    ]
    json_routes = [route for route in routes if isinstance(route, JsonRoute)]
    app.state.early_refusals = EarlyRefusals(parts, json_routes)
    # The layer that is added last is the outermost. A request passes: CORS, traces, the gate, the
    # short cut, FastAPI. So the gate, which is around every answer, counts those of both ways.
    # Before all of them, `EarlyRefusals` answers most of what a full queue has no room for.
    app.add_middleware(ShortCut, routes=json_routes, handlers=app.exception_handlers)
    app.add_middleware(RequestGate, parts=parts, routes=routes)
    if settings.otel_endpoint:
        app.add_middleware(TraceMiddleware, tracing=Tracing(settings.otel_endpoint))
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-API-Key", "X-Request-ID"],
            expose_headers=["Retry-After", "Server-Timing", "X-Request-ID"],
        )
    add_error_handlers(app)
    for group in _GROUPS:
        app.include_router(group.router)
    if parts.api_keys.is_set:
        pages.document_api_key(app)
    return app


def __getattr__(name: str) -> FastAPI:
    # `app` is built when uvicorn asks for it, and not for those who import `create_app`.
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return globals().setdefault("app", create_app())
    except SettingsError as error:
        # One line says more than the traceback of an import.
        error.say()
        sys.exit(2)
