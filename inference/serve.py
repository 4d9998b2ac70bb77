"""Serve a model over HTTP.

MODEL_CHECKPOINT, LISTEN_HOST and PORT are environment variables, as is everything else that can be
set: docs/serving.md lists them with their defaults.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import os
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import uvicorn

from common.errors import OneLineParser, UserError, run_command
from inference.batching.served_model import LoadModel
from inference.batching.served_models import paths_of
from inference.engines.model_loader import ModelLoader
from inference.http.request_log import configure_logging
from inference.http.workers import Supervisor, SupervisorLine, num_workers, share_of
from inference.settings import Settings, keep_tokenizer_on_one_thread

if TYPE_CHECKING:
    from fastapi import FastAPI

# Longer than the idle timeout of usual proxies (60 s), so that the proxy closes a connection and
# never finds it closed.
_KEEP_ALIVE_SECONDS = 65


def main(arguments: list[str] | None = None, load_model: LoadModel | None = None) -> None:
    options = _parse_arguments(arguments, Settings.from_environment())
    options.host = options.host.strip("[]")  # as an IPv6 address is written before a port
    _refuse_unusable_address(options.host, options.port)
    os.environ["MODEL_CHECKPOINT"] = options.model  # read by inference.app
    settings = Settings.from_environment()
    configure_logging(settings.log_level, logging.getLogger())
    workers = num_workers(settings)
    with suppress(KeyboardInterrupt):  # Ctrl-C, once everything in progress is answered
        if workers == 1:
            load_model = load_model or _load_from_now_on(settings)
            app = _application().create_app(settings, load_model)
            uvicorn.Server(_config(settings, app, host=options.host, port=options.port)).run()
        else:
            # Refuses invalid settings once, not in each worker.
            _application().create_app(settings)
            load_model = load_model or partial(
                ModelLoader, hardware=share_of(settings, workers).hardware
            )
            Supervisor(settings, workers, load_model, _serve_as_worker).run(
                options.host, options.port
            )


def _parse_arguments(arguments: list[str] | None, settings: Settings) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m inference.serve",
        description=__doc__,
        epilog="example: python -m inference.serve --model checkpoints/sample --port 7860",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        default=str(settings.model_checkpoint),
        help="model folder, .pt file or exported artefact, or several with commas between them "
        "(variable MODEL_CHECKPOINT; now %(default)s)",
    )
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        default=settings.listen_host,
        help="address to listen on (variable LISTEN_HOST; now %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=settings.port,
        help="port to listen on, 0 for a free one (variable PORT; now %(default)s)",
    )
    return parser.parse_args(arguments)


def _refuse_unusable_address(host: str, port: int) -> None:
    """uvicorn would only mention it between its other lines."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            # As the server will: without it, a port whose last connections are still closing would
            # be refused.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        line = f"--host {host}, --port {port}: cannot listen there ({reason})"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            remedy, code = "give another --port, or stop the program that uses it", "port-in-use"
        elif isinstance(error, OverflowError | PermissionError):
            remedy, code = "give another --port, from 1024 to 65535", "flag-value"
        else:
            remedy = "give an address of this machine, such as 127.0.0.1, 0.0.0.0 (all) or ::1"
            code = "flag-value"
        raise UserError(f"{line}; {remedy}", code=code) from None


def _load_from_now_on(settings: Settings) -> LoadModel:
    """Load the model while this thread imports the application, which takes as long."""
    keep_tokenizer_on_one_thread()
    first: Future[ModelLoader] = Future()

    def load() -> None:
        try:
            first.set_result(ModelLoader(paths_of(settings)[0], settings.engine, settings.hardware))
        except BaseException as error:  # raised where the result is asked for
            first.set_exception(error)

    # The application's first load gets this model, or the reason why there is none; a reload, and
    # the others of several models, are loaded from the disk.
    threading.Thread(target=load, daemon=True).start()
    waiting = [first]

    def load_model(path: Path, engine: str) -> ModelLoader:
        return waiting.pop().result() if waiting else ModelLoader(path, engine, settings.hardware)

    return load_model


def _application() -> ModuleType:
    # Slow, so not before what can be refused at once.
    return importlib.import_module("inference.app")


def _serve_as_worker(
    settings: Settings, load_model: LoadModel, line: SupervisorLine, listening: socket.socket
) -> None:
    app = _application().create_app(settings, load_model, line)
    # The supervisor says where all of them listen.
    config = _config(
        settings, app, log_level="warning" if settings.log_level == "info" else settings.log_level
    )
    uvicorn.Server(config).run(sockets=[listening])


def _config(settings: Settings, app: FastAPI, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # Its messages go through the root logger as JSON; its access log would repeat ours, with
        # full paths.
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=True,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.grace_seconds,
        # No route speaks WebSocket.
        ws="none",
        **({"log_level": settings.log_level} | more),
    )


if __name__ == "__main__":
    run_command(main)
