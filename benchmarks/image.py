"""What the served image weighs, how soon it is ready, and how much memory it takes.

Each model gets an image, built with buildah as `make image` builds it, and is run in its own read-only root by the
image's own command, with files in the page cache. Arguments after `--` are the builder's.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import containers
from benchmarks.containers import Container
from benchmarks.processes import end_with_children
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, spread, write_table
from common.errors import TrainingFailure, UserError, positive, run_command
from deployment.build_image import build, serving_image
from deployment.image_context import exported_artefacts

MODULE = "benchmarks.image"
BASE = "docker.io/library/python:3.11-slim"
PARTS = {"packages": "opt/venv", "model": "app/model", "sources": "app/inference"}
ANSWERS = 20
LONGEST = 120  # seconds that a start may take
PORT = 18_760
MB = 1e6

PAGE = """# The served image

Written by `python -m {module}`. *MB*: the files of the unpacked image, in millions of bytes; *beside*: without the base
image and the model. *ready*: seconds from the start of the container to the first 200 of `/readyz`, the median of
{rounds} starts, and from the shortest to the longest. *memory*: resident after {answers} answers. Goals: at most 350 MB
beside, ready within 2 s on 2 cores, at most 600 MB of memory.

{facts}
## Size

{sizes}
## Start and memory

{starts}"""


def main() -> None:
    """Build an image for each model, measure all of them, and write the page."""
    options = _parse()
    end_with_children()
    facts, sizes, starts = circumstances(MODULE, ()), [], []
    with ExitStack() as stack:
        base = stack.enter_context(containers.opened(BASE))
        for model in options.models:
            container = stack.enter_context(containers.opened(_built(model, options.flags)))
            python = container.run("python", "--version").stdout.strip()
            facts["Base"] = _described_base(container)
            facts["Versions"] = f"{python}, the packages of deployment/requirements.txt"
            sizes.append(_size_row(model.name, container, base))
            starts += [_start_row(model, container, engine, options.rounds) for engine in exported_artefacts(model)]
    write_table(options.output, render(facts, sizes, starts, options.rounds))
    print(f"Written: {options.output}", flush=True)


def render(facts: dict[str, str], sizes: Sequence[Sequence[str]], starts: Sequence[Sequence[str]], rounds: int) -> str:
    """The page of a measurement."""
    return PAGE.format(
        module=MODULE,
        rounds=rounds,
        answers=ANSWERS,
        facts=fact_list(facts),
        sizes=markdown_table(["image, MB", "all", "base", *PARTS, "beside"], sizes),
        starts=markdown_table(["model, engine", "ready, s", "of all starts", "memory, MB"], starts),
    )


def _described_base(container: containers.Container) -> str:
    """The base as it lies here, seen from an image on it: a stand-in may have its name."""
    code = "import platform, sys; print(platform.freedesktop_os_release()['PRETTY_NAME'], sys.base_prefix)"
    system, _, prefix = container.run("python", "-c", code).stdout.strip().rpartition(" ")
    return f"{BASE}, here {system} with Python in {prefix}"


def _built(model: Path, flags: list[str]) -> str:
    tag = f"localhost/distrinews-benchmark:{model.name}"
    if build("buildah", serving_image(model, tag), flags):
        raise TrainingFailure(f"{model}: its image is not built, the lines above say why", code="benchmark-failed")
    return tag


def _size_row(name: str, container: Container, base: Container) -> list[str]:
    whole, below = _num_bytes(container.root), _num_bytes(base.root)
    parts = {part: _num_bytes(container.root / folder) for part, folder in PARTS.items()}
    figures = [whole, below, *parts.values(), whole - below - parts["model"]]
    return [name, *(f"{figure / MB:.1f}" for figure in figures)]


def _num_bytes(folder: Path) -> int:
    files = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum(status.st_size for status in files)


def _start_row(model: Path, container: Container, engine: str, rounds: int) -> list[str]:
    name = f"{model.name}, {engine}"
    _start(container, engine)  # reads everything once
    seconds, memory = zip(*(_start(container, engine) for _ in range(rounds)), strict=True)
    print(f"{name}: ready in {median(seconds):.2f} s", flush=True)
    return [name, f"{median(seconds):.2f}", spread(seconds, 2), f"{median(memory) / MB:.0f}"]


def _start(container: Container, engine: str) -> tuple[float, int]:
    """Start the server and stop it; return the seconds until it was ready, and its memory after some answers."""
    command = container.command(PORT=str(PORT), ENGINE=engine, LOG_LEVEL="error", DRAIN_SECONDS="0")
    started = time.perf_counter()
    server = subprocess.Popen(command)
    try:
        while not _asked("/readyz"):
            if server.poll() is not None or time.perf_counter() - started > LONGEST:
                raise TrainingFailure(
                    f"{engine}: not ready within {LONGEST} s; the lines above say why", code="benchmark-failed"
                )
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        for _ in range(ANSWERS):
            _asked("/predict", b'{"text": "Shares of the software maker fall after it warns of lower sales"}')
        return seconds, containers.resident_bytes(server)
    finally:
        containers.stop(server)


def _asked(path: str, body: bytes | None = None) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", body, timeout=60) as answer:
            return answer.status == 200
    except OSError:  # not listening yet, or a 503
        return False


def _parse() -> Namespace:
    parser = Parser(MODULE, str(__doc__).split("\n")[0])
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="model folders, exported")
    parser.add_argument("--rounds", type=positive, default=9, help="starts of each (default: 9)")
    parser.add_argument("--output", type=Path, default=HERE / "image.md", help="default: benchmarks/image.md")
    parser.add_argument("flags", nargs="*", help="after --: the builder's")
    options = parser.parse_args()
    if reason := containers.why_not():
        raise UserError(f"{MODULE}: {reason}", code="benchmark-failed")
    if not containers.has_image(BASE):
        raise UserError(f"{MODULE}: {BASE} is not there; buildah pull {BASE}", code="benchmark-failed")
    return options


if __name__ == "__main__":
    run_command(main)
