"""What do calibration, and what is asked for beside the answer, cost per text over HTTP?"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.serving.client import Load
from benchmarks.serving.running import Running, started
from benchmarks.serving.servers import SERVERS
from benchmarks.serving.workload import read_workload
from common.model_folder import MANIFEST_FILE

ASKED = {"coverage": 0.95, "max_error": 0.02, "familiarity": True}
PLAIN, CALIBRATED, ALL = "not calibrated", "calibrated", "calibrated, all asked for"
# Texts per request, and connections.
LOADS = {1: 8, 32: 2}
_OURS = SERVERS["ours"]


def _asking(texts: Sequence[str], batch: bool) -> dict[str, Any]:
    return _OURS.body(texts, batch) | ASKED


BODIES = {PLAIN: _OURS, CALIBRATED: _OURS, ALL: replace(_OURS, body=_asking)}


def measure(options: Namespace) -> list[dict[str, dict[str, Any]]]:
    """Rounds: of each case, by texts per request, texts per second and CPU microseconds per text."""
    texts = read_workload(options.model, str(options.dataset)).texts
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="honest-")))
        models = {PLAIN: without_calibration(options.model, folder / "plain"), ALL: options.model}
        # Both wait all the time for a request, which costs nothing, and take turns within a round.
        running = {
            case: stack.enter_context(started(_OURS, model, sys.executable))
            for case, model in models.items()
        }
        running[CALIBRATED] = running[ALL]
        files = _write_bodies(folder, texts)

        def measure_case(case: str, number: int) -> dict[str, Any]:
            return {
                str(size): _load(running[case], files[case, size], size, number, options.seconds)
                for size in LOADS
            }

        for case in BODIES:  # the first requests let buffers grow, and count nowhere
            measure_case(case, 0)
        cases = {case: case for case in BODIES}
        return list(harness.run_rounds(cases, options.rounds, measure_case, _describe))


def without_calibration(model: Path, folder: Path) -> Path:
    """A copy of an artefact as it would be if its export had had no rows."""
    shutil.copytree(model, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    del manifest["calibration"]
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def _write_bodies(folder: Path, texts: Sequence[str]) -> dict[tuple[str, int], Path]:
    files = {}
    for number, (case, server) in enumerate(BODIES.items()):
        for size in LOADS:
            files[case, size] = folder / f"bodies_{number}_{size}"
            server.write_bodies(files[case, size], texts, size)
    return files


def _load(running: Running, bodies: Path, size: int, number: int, seconds: float) -> dict[str, Any]:
    path, first = _OURS.paths[size > 1], number * 1009 // size
    load = Load(str(bodies), running.port, path, size, seconds, clients=LOADS[size], first=first)
    found = running.apply(load)
    harness.report(f"  {size}: {found['outcomes']}")
    return {
        "texts_per_second": found["texts_per_second"],
        "cpu_us": 1e6 * found["server_cpu_s"] / max(1, found["texts_answered"]),
        "p50_ms": 1e3 * found["latency"]["200"]["p50"],
        "others": found["others_share"] + found["stolen_share"],
        "failed": sum(count for status, count in found["outcomes"].items() if status != "200"),
    }


def _describe(found: dict[str, Any]) -> str:
    return ", ".join(
        f"{one['texts_per_second']:,.0f} texts/s in requests of {size}"
        for size, one in found.items()
    )
