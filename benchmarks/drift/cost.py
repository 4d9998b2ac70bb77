"""What does a server under load pay for observing?"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.drift.switched_server import TURNS
from benchmarks.serving.client import Load
from benchmarks.serving.running import started
from benchmarks.serving.servers import SERVERS
from training.data.dataset import load_data

CLIENTS = 64
SLICE_S = 0.5
ON, KEEPING = "`OBSERVE=1`", "also `KEEP_TEXTS=7d`"
_CASES = {ON: {"OBSERVE": "1"}, KEEPING: {"OBSERVE": "1", "KEEP_TEXTS": "7d"}}
_COMMAND = ("-m", "benchmarks.drift.switched_server", "{port}", str(SLICE_S))
_MOST_TEXTS = 60_000


def measure(options: Namespace) -> Iterator[dict[str, Any]]:
    # Of the training rows, which are enough for every text to be a new one.
    texts = load_data(str(options.dataset)).train.texts[:_MOST_TEXTS]
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder, "bodies.jsonl")
        SERVERS["ours"].write_bodies(bodies, texts, 1)

        def load(environment: dict[str, str], number: int) -> list[dict[str, float]]:
            slices = Path(folder, f"slices-{len(environment)}-{number}.jsonl")
            # One process, as only its own slices can be compared. Its working directory, where
            # OBSERVE=1 has its file, is a new folder each time.
            server = replace(
                SERVERS["ours"],
                command=(*_COMMAND, str(slices)),
                environment=environment | {"WORKERS": "1"},
            )
            with started(server, options.model, sys.executable) as running:
                to = str(bodies), running.port, server.paths[0], 1
                running.apply(Load(*to, options.seconds, clients=CLIENTS))
            return compared([json.loads(line) for line in slices.read_text().splitlines()])

        for found in harness.run_rounds(
            _CASES, options.rounds, load, lambda fours: f"{len(fours)} times four slices"
        ):
            rounds.append(found)
            yield {
                "cases": {name: [four for one in rounds for four in one[name]] for name in _CASES},
                "clients": CLIENTS,
                "seconds": options.seconds,
                "starts": len(rounds),
                "slice_s": SLICE_S,
            }


def compared(slices: list[list[float]]) -> list[dict[str, float]]:
    """Of each four slices (off, on, on, off) the texts per second, and CPU milliseconds per text,
    without observing and with it.

    ``slices``: of each, as the server notes them, whether it observed, seconds, texts, CPU seconds,
    and those of the observer's own thread.
    """
    # What the observer does belongs to all texts that it counted, whenever it did it.
    counted = sum(num_texts for is_on, _, num_texts, *_ in slices if is_on)
    observer_ms = 1e3 * sum(one[4] for one in slices) / counted
    found = []
    for first in range(1, len(slices) - len(TURNS) + 1, len(TURNS)):  # before 1 no turn had begun
        four = slices[first : first + len(TURNS)]
        if not all(one[2] for one in four):
            continue  # there was no load, or not in all of them
        sums = {
            is_on: [sum(column) for column in zip(*(x for x in four if x[0] == is_on), strict=True)]
            for is_on in (False, True)
        }
        found.append(
            {
                "off": sums[False][2] / sums[False][1],
                "on": sums[True][2] / sums[True][1],
                "off_cpu_ms": 1e3 * sums[False][3] / sums[False][2],
                "on_cpu_ms": 1e3 * sums[True][3] / sums[True][2] + observer_ms,
            }
        )
    return found[1:-1]  # the load began in the first and ended in the last
