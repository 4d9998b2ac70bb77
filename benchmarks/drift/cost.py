"""What does a server under load pay for observing?"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.serving.client import Load
from benchmarks.serving.running import started
from benchmarks.serving.servers import SERVERS
from benchmarks.serving.workload import read_workload

CLIENTS = 64
OFF, ON, KEEPING = "off", "`OBSERVE=1`", "also `KEEP_TEXTS=7d`"
_CASES = {OFF: {}, ON: {"OBSERVE": "1"}, KEEPING: {"OBSERVE": "1", "KEEP_TEXTS": "7d"}}


def measure(options: Namespace) -> Iterator[dict[str, Any]]:
    texts = read_workload(options.model, str(options.dataset)).texts
    ours, rounds = SERVERS["ours"], []
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder, "bodies.jsonl")
        ours.write_bodies(bodies, texts, 1)

        def load(environment: dict[str, str], number: int) -> dict[str, float]:
            # Its working directory, where OBSERVE=1 has its file, is a new folder each time.
            server = replace(ours, environment=environment)
            with started(server, options.model, sys.executable) as running:

                def send(seconds: float, first: int) -> dict[str, Any]:
                    to = str(bodies), running.port, server.paths[0], 1
                    return running.apply(Load(*to, seconds, clients=CLIENTS, first=first))

                # A second that counts nowhere, with other texts: connections open, buffers grow.
                send(1, number * 1009 + len(texts) // 2)
                found = send(options.seconds, number * 1009)
            return {
                "texts_per_second": found["texts_per_second"],
                "cpu_ms": 1e3 * found["server_cpu_s"] / found["texts_answered"],
            }

        for found in harness.run_rounds(
            _CASES, options.rounds, load, lambda one: f"{one['texts_per_second']:,.0f} texts/s"
        ):
            rounds.append(found)
            yield {"rounds": rounds, "clients": CLIENTS, "seconds": options.seconds}
