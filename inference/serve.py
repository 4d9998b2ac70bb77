"""Serve from the terminal: `python -m inference.serve [--host ADDRESS] [--port PORT]`; all else is environment."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import suppress

import uvicorn

from inference.errors import SettingsError
from inference.request_log import configure_logging
from inference.settings import Settings

# Longer than the idle time of usual proxies (60 s): the proxy ends a connection, never the server under its hands.
_KEEP_ALIVE_SECONDS = 65


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code: 0, or 2 after one line on standard error."""
    try:
        settings = Settings.from_environment()
        options = _parse_arguments(arguments, settings)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _serve(settings, options.host, options.port)
    return 0


def _parse_arguments(arguments: list[str] | None, settings: Settings) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m inference.serve", description=__doc__)
    parser.add_argument("--host", default=settings.listen_host, help="address to listen on (default: LISTEN_HOST)")
    parser.add_argument("--port", type=int, default=settings.port, help="port to listen on (default: PORT)")
    return parser.parse_args(arguments)


def _serve(settings: Settings, host: str, port: int) -> None:
    configure_logging(settings.log_level, logging.getLogger())
    config = uvicorn.Config(
        "inference.app:app",
        host=host,
        port=port,
        # Its lines go through the root logger, as JSON; its access log would repeat ours, with paths in full.
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
    sys.exit(main())
