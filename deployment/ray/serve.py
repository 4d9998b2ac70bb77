"""Serve a model on a Ray cluster: python deployment/ray/serve.py --model FOLDER [--replicas 1..4]."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started by path: the imports below need the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from common.errors import OneLineParser, UserError, positive, run_command
from common.ray_cluster import check_room, connect

if TYPE_CHECKING:
    from ray.serve.schema import ServeStatus

_KEEP_ALIVE_SECONDS = 65  # as inference/serve.py
_PROXY_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployment.ray.proxy_layer.layers"
}


def main() -> None:
    options = _parse()
    if not options.model.exists():
        raise UserError(
            f"--model {options.model}: there is no such folder; train one, or give its path",
            code="model-not-found",
        )
    is_local = connect(options.address, environment=_PROXY_ENVIRONMENT)
    if is_local:
        least, _ = options.replicas
        check_room(f"--replicas {least}", {"CPU": least * options.cpus_per_replica})
    else:
        _refuse_running_serve()
    # Set before the start, so that a SIGTERM while replicas load is remembered, and ends the
    # application in good order once it is up.
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _start(options)
    print(f"serving {options.model} at http://{options.host}:{options.port}", flush=True)
    stop.wait()
    _stop()


def _refuse_running_serve() -> None:
    """Refuse to attach to an existing Serve: shutting it down would stop other applications."""
    from ray import serve

    status = serve.status()
    if status.proxies or status.applications:
        what = ", ".join(sorted(status.applications)) or "no application yet"
        raise UserError(
            f"--address: Serve is already running on that cluster ({what}); add this application "
            "to its configuration "
            "(deployment/ray/serve.yaml) and use serve deploy",
            code="ray-serve-running",
        )


def _start(options: argparse.Namespace) -> None:
    from ray import serve

    from deployment.ray.replica import QUIET, build
    from inference.errors import SettingsError

    least, most = options.replicas
    fields = {
        "model": options.model.absolute(),
        "min_replicas": least,
        "max_replicas": most,
        "cpus_per_replica": options.cpus_per_replica,
    }
    try:
        application = build(fields)
    except SettingsError as error:
        raise UserError(str(error), code=error.code) from None
    # Before serve.run, which would start the HTTP proxy with its own defaults.
    serve.start(
        http_options={
            "host": options.host,
            "port": options.port,
            "keep_alive_timeout_s": _KEEP_ALIVE_SECONDS,
        },
        logging_config=QUIET,
    )
    try:
        serve.run(application, name="distrinews")
    except RuntimeError as error:
        reason = _reason(serve.status(), str(error))
        _stop()
        raise UserError(reason, code="ray-serve-failed") from None


def _stop() -> None:
    import ray
    from ray import serve

    serve.delete("distrinews")
    # If somebody has added an application meanwhile, Serve is theirs now.
    if not serve.status().applications:
        serve.shutdown()
    ray.shutdown()


def _reason(status: ServeStatus, otherwise: str) -> str:
    """Extract a replica's own error from Serve's message: a traceback within a traceback."""
    told = [
        it.message
        for application in status.applications.values()
        for it in application.deployments.values()
    ]
    said = re.findall(r"RuntimeError: (?!Traceback)(.+)", "\n".join(told))
    return said[-1] if said else otherwise.strip().splitlines()[0]


def _parse() -> argparse.Namespace:
    parser = OneLineParser(
        description=__doc__,
        epilog="Everything else is set by environment variables, which docs/serving.md lists.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model folder, where all machines find it")
    add(
        "--replicas",
        type=_range,
        default=(1, 1),
        metavar="N|N..M",
        help="how many, or the fewest and the most (1)",
    )
    add("--cpus_per_replica", type=positive, default=1, metavar="N", help="cores for each (1)")
    add(
        "--address",
        help="the cluster, auto for this machine's (default: RAY_ADDRESS, else a new one)",
    )
    add("--host", default="0.0.0.0", help="address to listen on (0.0.0.0)")
    add("--port", type=int, default=7860, help="port to listen on (7860)")
    return parser.parse_args()


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("..")
    found = positive(least), positive(most or least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text}: {least} is more than {most}")
    return found


if __name__ == "__main__":
    run_command(main)
