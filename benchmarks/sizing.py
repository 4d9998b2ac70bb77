"""How many texts a second a server answers on one core and on more, with how much memory: what a container is sized by.

A server has some cores to itself, as in a container with that limit; the client takes the others, and shares them only
where the server has all. Writes the page and, beside it, the rounds as JSON, after every round.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import end_with_children, on_cores
from benchmarks.serving.load import Load
from benchmarks.serving.running import Running, started
from benchmarks.serving.servers import SERVERS
from benchmarks.serving.workload import read_workload
from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, write_table
from common.errors import UserError, positive, run_command
from common.hardware import usable_cpus
from deployment.launchers import usable_cores

MODULE = "benchmarks.sizing"
PACKAGES = ("fastapi", "uvicorn", "tokenizers", "numpy", "onnxruntime")
ENGINES = {"native": SERVERS["ours_native"], "onnx": SERVERS["ours_onnx"]}
CLIENTS = 64
STEADY_SHARE = 0.7
WARM_UP_SECONDS = 1.0
MB = 1e6
Figures = dict[str, float]

PAGE = """# Sizing a server

Written by `python -m {module}`; the rounds behind it are in the JSON file beside it. A server has so many cores to
itself and is asked for single texts by {clients} clients on the others (where the server has all, the client shares
them). *texts/s*: what it answers then. *p50, p99*: milliseconds at {share:.0%} of that, sent evenly. *memory*: resident
after load. *CPU-s*: of the server, per 1,000 texts. *$*: per million texts, at {dollars:.2f} dollars a core and hour
(an assumption: `--dollars_per_core_hour`), kept busy; a server that idles half of the time costs twice as much a text.
Figures are medians over {rounds} rounds of {seconds:g} s a load.

{facts}
{table}"""


def main() -> None:
    """Measure every model with every engine on every number of cores, and write the page after every round."""
    options = _parse()
    end_with_children()
    texts = {model.name: read_workload(model, options.texts).texts for model in options.models}
    cases = [
        (model, engine, cores)
        for model in options.models
        for engine in ENGINES
        for cores in range(1, usable_cpus() + 1)
        if ENGINES[engine].folder(model).is_dir()
    ]
    run = _new_run(options, cases)
    for number in range(1, options.rounds + 1):
        for case, (model, engine, cores) in zip(run["cases"], cases, strict=True):
            figures = _measure(model, engine, cores, texts[model.name], options.seconds)
            case["rounds"].append(figures)
            title = f"round {number}/{options.rounds}, {model.name}, {engine}, cores: {cores}"
            print(f"{title}: {figures['texts_per_second']:.1f} texts/s", flush=True)
        write_table(options.output.with_suffix(".json"), json.dumps(run, indent=1) + "\n")
        write_table(options.output, render(run))
    print(f"Written: {options.output}", flush=True)


def _new_run(options: Namespace, cases: Sequence[tuple[Path, str, int]]) -> dict[str, Any]:
    return {
        "facts": circumstances(MODULE, PACKAGES),
        "seconds": options.seconds,
        "dollars_per_core_hour": options.dollars_per_core_hour,
        "cases": [
            {"model": model.name, "engine": engine, "cores": cores, "rounds": []} for model, engine, cores in cases
        ],
    }


def render(run: dict[str, Any]) -> str:
    """The page of a run."""
    header = ["model, engine", "cores", "texts/s", "p50 ms", "p99 ms", "memory, MB", "CPU-s", "$"]
    rows = [
        [
            f"{case['model']}, {case['engine']}",
            str(case["cores"]),
            _median(case, "texts_per_second", "{:.1f}"),
            _median(case, "p50_ms", "{:.0f}"),
            _median(case, "p99_ms", "{:.0f}"),
            _median(case, "memory_mb", "{:.0f}"),
            _median(case, "cpu_s_per_1000", "{:.1f}"),
            f"{_dollars(case, run['dollars_per_core_hour']):.2f}",
        ]
        for case in run["cases"]
    ]
    return PAGE.format(
        module=MODULE,
        clients=CLIENTS,
        share=STEADY_SHARE,
        rounds=len(run["cases"][0]["rounds"]),
        seconds=run["seconds"],
        dollars=run["dollars_per_core_hour"],
        facts=fact_list(run["facts"]),
        table=markdown_table(header, rows),
    )


def _median(case: dict[str, Any], name: str, shape: str) -> str:
    return shape.format(median(figures[name] for figures in case["rounds"]))


def _dollars(case: dict[str, Any], per_core_hour: float) -> float:
    """Dollars per million texts."""
    texts_per_hour = 3600 * median(figures["texts_per_second"] for figures in case["rounds"])
    return 1e6 * case["cores"] * per_core_hour / texts_per_hour


def _measure(model: Path, engine: str, cores: int, texts: Sequence[str], seconds: float) -> Figures:
    own, others = usable_cores()[:cores], usable_cores()[cores:]
    with tempfile.TemporaryDirectory(prefix="sizing-") as folder:
        bodies = Path(folder) / "bodies.jsonl"
        ENGINES[engine].write_bodies(bodies, texts, 1)
        with contextlib.ExitStack() as stack:
            with on_cores(own):
                running = stack.enter_context(started(ENGINES[engine], model, sys.executable))
            with on_cores(others):
                return _load(running, str(bodies), seconds)


def _load(running: Running, bodies: str, seconds: float) -> Figures:
    apply, port = running.apply, running.port
    apply(Load(bodies, port, "/predict", 1, WARM_UP_SECONDS, clients=CLIENTS))
    full = apply(Load(bodies, port, "/predict", 1, seconds, clients=CLIENTS))
    rate = full["texts_per_second"]
    steady = apply(Load(bodies, port, "/predict", 1, seconds, rate=STEADY_SHARE * rate))["latency"]["200"]
    return {
        "texts_per_second": rate,
        "p50_ms": steady["p50"] * 1e3,
        "p99_ms": steady["p99"] * 1e3,
        "memory_mb": running.tree.pss_bytes() / MB,
        "cpu_s_per_1000": full["server_cpu_s"] / full["texts_answered"] * 1e3,
    }


def _parse() -> Namespace:
    parser = Parser(MODULE, str(__doc__).split("\n")[0])
    parser.add_argument("models", type=Path, nargs="+", help="model folders, their artefacts in them")
    parser.add_argument("--texts", default="data/ag_news", help="a folder in AG News' layout (default: data/ag_news)")
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    parser.add_argument("--seconds", type=positive, default=5, help="of a load (default: 5)")
    parser.add_argument("--dollars_per_core_hour", type=float, default=0.05, help="default: 0.05")
    parser.add_argument("--output", type=Path, default=HERE / "sizing.md", help="default: benchmarks/sizing.md")
    options = parser.parse_args()
    for model in options.models:
        if not any(server.folder(model).is_dir() for server in ENGINES.values()):
            raise UserError(
                f"{model}: has no exported artefact; run python -m inference.export {model}", code="artefact-missing"
            )
    return options


if __name__ == "__main__":
    run_command(main)
