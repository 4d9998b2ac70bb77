"""Serve a model over HTTP.

MODEL_CHECKPOINT, LISTEN_HOST and PORT are environment variables, as is all else that can be set: docs/serving.md lists
them with their defaults.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from contextlib import suppress

import uvicorn

from common.errors import OneLineParser, UserError, run_command
from inference.http.request_log import configure_logging
from inference.settings import Settings

# Longer than the idle timeout of usual proxies (60 s), so that the proxy closes a connection and never finds it closed.
_KEEP_ALIVE_SECONDS = 65


def main(arguments: list[str] | None = None) -> None:
    settings = Settings.from_environment()
    options = _parse_arguments(arguments, settings)
    _refuse_taken_port(options.host, options.port)
    os.environ["MODEL_CHECKPOINT"] = options.model  # read by inference.app, which uvicorn imports
    _serve(settings, options.host, options.port)


def _parse_arguments(arguments: list[str] | None, settings: Settings) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m inference.serve",
        description=__doc__,
        epilog="example: python -m inference.serve --model checkpoints/tiny --port 7860",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        default=str(settings.model_checkpoint),
        help="model folder, .pt file or exported artefact (variable MODEL_CHECKPOINT; now %(default)s)",
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


def _refuse_taken_port(host: str, port: int) -> None:
    """uvicorn would only mention it between its other lines."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        line = f"--host {host}, --port {port}: cannot listen there ({reason}); give another --port, or stop what has it"
        raise UserError(line, code="port-in-use") from None


def _serve(settings: Settings, host: str, port: int) -> None:
    configure_logging(settings.log_level, logging.getLogger())
    config = uvicorn.Config(
        "inference.app:app",
        host=host,
        port=port,
        # Its messages go through the root logger as JSON; its access log would repeat ours, with full paths.
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        proxy_headers=True,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.grace_seconds,
        ws="none",
    )
    with suppress(KeyboardInterrupt):  # Ctrl-C, once everything in progress is answered
        uvicorn.Server(config).run()


if __name__ == "__main__":
    run_command(main)
