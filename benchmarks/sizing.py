"""How many texts per second does a server answer on one core and on more, with how much memory?

What a container is sized by: a server has some cores to itself, as in a container with that limit;
the client takes the others, and shares them only when the server has all. Writes the page and, next
to it, the rounds as JSON, after every round. The page has a section for each instruction set that
was measured.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.processes import on_cores
from benchmarks.serving.client import Load
from benchmarks.serving.page import TITLES
from benchmarks.serving.running import started
from benchmarks.serving.servers import SERVERS
from benchmarks.serving.workload import read_workload
from common.errors import UserError
from common.hardware import usable_cpus
from deployment.launchers import usable_cores
from inference.engines.native.library import instruction_sets

MODULE = "benchmarks.sizing"
PACKAGES = ("fastapi", "uvicorn", "tokenizers", "numpy", "onnxruntime")
ENGINES = {"native": SERVERS["ours_native"], "onnx": SERVERS["ours_onnx"]}
CLIENTS = 64
STEADY_SHARE = 0.7
MB = 1e6
INTRODUCTION = f"""
The rounds are in the JSON file next to this page. A server has its cores to itself and is sent single texts by
{CLIENTS} clients, which run on the other cores (if the server has all cores, the clients share them). *texts/s*: the
rate at which it answers them. *p50, p99*: latency in milliseconds if texts are sent evenly at {STEADY_SHARE:.0%} of
that rate. *memory*: resident memory after load. *CPU-s*: CPU seconds of the server per 1,000 texts. *$*: dollars per
million texts if the server is kept busy; one that is idle half the time costs twice as much per text. Figures are
medians over the rounds.

`minilm_widened` is `minilm_agnews` with twice its width, and `bert_base` also has the 12 blocks of BERT-base
(DistilBERT-base has 6, which `--blocks 6` gives). They stand for the time, the memory and the cost of such a model;
repeated blocks answer nothing useful:

```
python -m benchmarks.serving.widen checkpoints/minilm_agnews checkpoints/minilm_widened
python -m benchmarks.serving.widen checkpoints/minilm_agnews checkpoints/bert_base --blocks 12
python -m inference.export checkpoints/bert_base --limit 100 --max_drop 100                  # and with --engine onnx
```
"""
Case = tuple[Path, str, int]  # model, engine, cores


def main() -> None:
    options = _parse()
    workloads = {model: read_workload(model, options.texts) for model in options.models}
    cases = {
        f"{model.name}, {engine}, cores: {cores}": (model, engine, cores)
        for model in options.models
        for engine in ENGINES
        for cores in options.cores
        # A model may be exported for one engine alone.
        if ENGINES[engine].folder(model).is_dir()
    }
    sizes = {model.name: found.facts["size"] for model, found in workloads.items()}
    models = ", ".join(
        f"{name} has {size['n_layers']} blocks of {size['dim']}" for name, size in sizes.items()
    )
    run: dict[str, Any] = {
        "facts": harness.measurement_facts(MODULE, PACKAGES) | {"Models": models},
        "seconds": options.seconds,
        "dollars_per_core_hour": options.dollars_per_core_hour,
        "cases": [
            {"model": model.name, "engine": engine, "cores": cores, "rounds": []}
            for model, engine, cores in cases.values()
        ],
    }

    def measure(case: Case, number: int) -> dict[str, float]:
        return measure_server(*case, workloads[case[0]].texts, options.seconds)

    # The other sections were measured on other machines and cannot be repeated here.
    sections = harness.read_results(options.output.with_suffix(".json"))
    sections[instruction_sets()[0]] = run
    for found in harness.run_rounds(
        cases, options.rounds, measure, lambda one: f"{one['texts_per_second']:.1f} texts/s"
    ):
        for case, figures in zip(run["cases"], found.values(), strict=True):
            case["rounds"].append(figures)
        harness.write_page(options.output, render(sections), sections)


def measure_server(
    model: Path, engine: str, cores: int, texts: list[str], seconds: float
) -> dict[str, float]:
    """Start a server on its cores, and load it from the others."""
    server, numbers = ENGINES[engine], usable_cores()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bodies-"))
        bodies = Path(folder) / "singles.jsonl"
        server.write_bodies(bodies, texts, 1)
        # The server inherits the first cores when it starts, the client the others when it starts.
        with on_cores(numbers[:cores]):
            running = stack.enter_context(started(server, model, sys.executable))
        stack.enter_context(on_cores(numbers[cores:]))
        # A second that is not counted: first calls allocate, and threads are still starting.
        running.apply(Load(str(bodies), running.port, "/predict", 1, 1.0, clients=CLIENTS))
        full = running.apply(
            Load(str(bodies), running.port, "/predict", 1, seconds, clients=CLIENTS)
        )
        # Of what this very server just reached: a fixed rate would overload one core and bore two.
        rate = STEADY_SHARE * full["texts_per_second"]
        steady = running.apply(Load(str(bodies), running.port, "/predict", 1, seconds, rate=rate))[
            "latency"
        ]["200"]
        return {
            "texts_per_second": full["texts_per_second"],
            "p50_ms": steady["p50"] * 1e3,
            "p99_ms": steady["p99"] * 1e3,
            "memory_mb": running.tree.pss_bytes() / MB,
            "cpu_s_per_1000": full["server_cpu_s"] / full["texts_answered"] * 1e3,
        }


def render(sections: dict[str, dict[str, Any]]) -> str:
    """The page: a section for each instruction set."""
    parts = [
        f"## {title}\n\n{_section(sections[name])}"
        for name, title in TITLES.items()
        if name in sections
    ]
    return harness.introduction(MODULE, "Sizing a server", INTRODUCTION) + "\n".join(parts)


def _section(run: dict[str, Any]) -> str:
    def middle(figure: str, digits: int) -> Callable[[dict[str, Any]], str]:
        return lambda case: f"{median(found[figure] for found in case['rounds']):.{digits}f}"

    def dollars(case: dict[str, Any]) -> str:
        texts_per_hour = 3600 * median(found["texts_per_second"] for found in case["rounds"])
        return f"{1e6 * case['cores'] * run['dollars_per_core_hour'] / texts_per_hour:.2f}"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "model, engine": lambda case: f"{case['model']}, {case['engine']}",
        "cores": lambda case: str(case["cores"]),
        "texts/s": middle("texts_per_second", 1),
        "p50 ms": middle("p50_ms", 0),
        "p99 ms": middle("p99_ms", 0),
        "memory, MB": middle("memory_mb", 0),
        "CPU-s": middle("cpu_s_per_1000", 1),
        "$": dollars,
    }
    facts = run["facts"] | {
        "Rounds": f"{len(run['cases'][0]['rounds'])}, {run['seconds']:g} s per load",
        "Price": f"{run['dollars_per_core_hour']:.2f} dollars per core per hour (an assumption: "
        "`--dollars_per_core_hour`)",
    }
    return f"{harness.fact_list(facts)}\n{harness.table(columns, run['cases'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__, page="sizing.md", rounds=5)
    add = parser.add_argument
    add("models", type=Path, nargs="+", help="model folders with their artefacts")
    add(
        "--texts",
        default="data/ag_news",
        help="a folder in AG News' layout (default: data/ag_news)",
    )
    counts = list(range(1, usable_cpus() + 1))
    add(
        "--cores",
        type=int,
        nargs="+",
        choices=counts,
        default=counts,
        help="of a server (default: all)",
    )
    add("--seconds", type=harness.seconds, default=5.0, help="of a load (default: 5)")
    add("--dollars_per_core_hour", type=float, default=0.05, help="default: 0.05")
    options = parser.parse_args()
    for model in options.models:
        if not any(server.folder(model).is_dir() for server in ENGINES.values()):
            message = f"{model}: has no exported artefact; run python -m inference.export {model}"
            raise UserError(message, code="artefact-missing")
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
