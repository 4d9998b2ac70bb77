"""How large is the served image, how soon is it ready, and how much memory does it take?

Each model gets an image, built with buildah as `make image` builds it, and is run in its own
read-only root by the image's own command, with files in the page cache. Arguments after `--` are
the builder's.
"""

from __future__ import annotations

import re
import subprocess
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks import containers, harness
from benchmarks.containers import Container
from benchmarks.harness import markdown_table
from common.errors import TrainingFailure, UserError
from deployment.build_image import build, serving_image
from deployment.client import fetch
from deployment.image_context import DOCKERFILE, exported_artefacts

MODULE = "benchmarks.image"
PARTS = {"packages": "opt/venv", "model": "app/model", "sources": "app/inference"}
NUM_ANSWERS = 20
START_TIMEOUT = 120  # seconds
PORT = 18_760
TEXT = "Shares of the software maker fall after it warns of lower sales"
MB = 1e6
INTRODUCTION = """
*MB*: the files of the unpacked image, in millions of bytes. *ready*: seconds from the start of the container to the
first 200 from `/readyz`, the median of {rounds} starts, with the shortest and the longest. *memory*: resident memory
after {answers} answers. The image drops what its base has for installing packages, so the parts add up to more than
the whole. Goals: at most 350 MB without the base image and the model, ready within 2 s on 2 cores, at most 600 MB of
memory.
"""


def main() -> None:
    options = _parse()
    facts, sizes, starts = harness.measurement_facts(MODULE, ()), [], []
    with ExitStack() as stack:
        base_name = _base(options.flags)
        # The base is measured too: its size is not ours to change, and is subtracted below.
        base = stack.enter_context(containers.opened(base_name))
        for model in options.models:
            container = stack.enter_context(containers.opened(_built(model, options.flags)))
            python = container.run("python", "--version").stdout.strip()
            facts["Base"] = f"{base_name}, here {_described_base(container)}"
            facts["Versions"] = f"{python}, the packages of deployment/requirements.txt"
            sizes.append(_size_row(model.name, container, base))
            starts += [
                _start_row(model, container, engine, options.rounds)
                for engine in dict.fromkeys(
                    one.engine for one in exported_artefacts(model).values()
                )
            ]
    about = INTRODUCTION.format(rounds=options.rounds, answers=NUM_ANSWERS)
    size_table = markdown_table(
        ["image, MB", "all", "base", *PARTS, "all without base and model"], sizes
    )
    start_table = markdown_table(["model, engine", "ready, s", "range", "memory, MB"], starts)
    text = harness.introduction(MODULE, "The served image", about) + harness.fact_list(facts)
    harness.write_page(
        options.output, f"{text}\n## Size\n\n{size_table}\n## Start and memory\n\n{start_table}"
    )


def _base(flags: list[str]) -> str:
    """The base that the builder is told, else the one that the Dockerfile pins."""
    told = re.findall(r"BASE=(\S+)", " ".join(flags)) or re.findall(
        r"^ARG BASE=(\S+)", DOCKERFILE.read_text(), re.M
    )
    return told[-1]


def _described_base(container: containers.Container) -> str:
    """The base as an image on it sees it: another system may have been tagged with its name."""
    code = (
        "import platform, sys; print(platform.freedesktop_os_release()['PRETTY_NAME'], "
        "sys.base_prefix)"
    )
    system, _, prefix = container.run("python", "-c", code).stdout.strip().rpartition(" ")
    return f"{system} with Python in {prefix}"


def _built(model: Path, flags: list[str]) -> str:
    tag = f"localhost/distrinews-benchmark:{model.name}"
    if build("buildah", serving_image(model, tag), flags):
        raise TrainingFailure(
            f"{model}: its image is not built, the lines above say why", code="benchmark-failed"
        )
    return tag


def _size_row(name: str, container: Container, base: Container) -> list[str]:
    whole, below = _num_bytes(container.root), _num_bytes(base.root)
    parts = {part: _num_bytes(container.root / folder) for part, folder in PARTS.items()}
    figures = [whole, below, *parts.values(), whole - below - parts["model"]]
    return [name, *(f"{figure / MB:.1f}" for figure in figures)]


def _num_bytes(folder: Path) -> int:
    # Links count as links: followed, a file would be counted once per name, or one outside the
    # image.
    files = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum(status.st_size for status in files)


def _start_row(model: Path, container: Container, engine: str, rounds: int) -> list[str]:
    name = f"{model.name}, {engine}"
    _start(container, engine)  # brings all files into the page cache
    seconds, memory = zip(*(_start(container, engine) for _ in range(rounds)), strict=True)
    harness.report(f"{name}: ready in {median(seconds):.2f} s")
    return [
        name,
        f"{median(seconds):.2f}",
        harness.spread(seconds, 2),
        f"{median(memory) / MB:.0f}",
    ]


def _start(container: Container, engine: str) -> tuple[float, int]:
    """Start the server and stop it; return the seconds until it was ready, and its memory after some answers."""
    # Draining is off, so that stopping takes no time; it is no part of what is measured.
    command = container.command(PORT=str(PORT), ENGINE=engine, LOG_LEVEL="error", DRAIN_SECONDS="0")
    started = time.perf_counter()
    server = subprocess.Popen(command)
    try:
        while not _is_answered("/readyz"):
            if server.poll() is not None or time.perf_counter() - started > START_TIMEOUT:
                message = f"{engine}: not ready within {START_TIMEOUT} s; the lines above say why"
                raise TrainingFailure(message, code="benchmark-failed")
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        for _ in range(NUM_ANSWERS):
            # Memory after some answers, because buffers of the forward pass are allocated by the
            # first ones.
            _is_answered("/predict", {"text": TEXT})
        return seconds, containers.resident_bytes(server)
    finally:
        containers.stop(server)


def _is_answered(path: str, body: dict[str, str] | None = None) -> bool:
    try:
        fetch(f"http://127.0.0.1:{PORT}{path}", body, timeout=60)
    except OSError:  # not listening yet, or a 503
        return False
    return True


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__, page="image.md", rounds=9)
    parser.add_argument(
        "--models", type=Path, nargs="+", required=True, help="model folders, exported"
    )
    parser.add_argument("flags", nargs="*", help="after --: the builder's")
    options = parser.parse_args()
    if reason := containers.why_not():
        raise UserError(f"{MODULE}: {reason}", code="benchmark-failed")
    if not containers.has_image(base := _base(options.flags)):
        raise UserError(
            f"{MODULE}: {base} is not there; buildah pull {base}", code="benchmark-failed"
        )
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
