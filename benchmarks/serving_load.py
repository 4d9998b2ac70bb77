"""How fast is our server, compared with others under the same load, with the same weights, in the
same run?

Writes a page of tables, and next to it the rounds as JSON, after every round: if a run is cut
short, the page of the finished rounds remains. The page has a section for each instruction set that
was measured. A server takes about eight loads' time per round: three rounds of seven servers take a
quarter of an hour with `--seconds 4`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import report
from benchmarks.serving.measure import MANY, Plan, measure
from benchmarks.serving.page import MODULE, render
from benchmarks.serving.running import ServerFailure, bare_rate, compiled
from benchmarks.serving.servers import DEFAULT, SERVERS, package_versions
from benchmarks.serving.workload import Workload, read_workload
from common.errors import UserError
from common.hardware import usable_cpus
from inference.engines.native.architecture import EncoderShape
from inference.engines.native.library import instruction_sets

PACKAGES = ("fastapi", "uvicorn", "tokenizers", "numpy", "openvino", "onnxruntime", "torch")


def main() -> None:
    options = _parse()
    workload = read_workload(options.model, options.texts)
    run = new_run(options, workload)
    sections = harness.read_results(options.output.with_suffix(".json"))
    # The library stays until the last round, because each server loads it when it starts.
    with tempfile.TemporaryDirectory(prefix="hide-") as folder:
        preload = ""
        if options.avx2_only:
            preload = str(compiled("hide_instructions.c", Path(folder), "-shared", "-fPIC"))
        plan = Plan(
            options.model,
            workload.texts,
            _pythons(options),
            options.seconds,
            options.poisson,
            preload,
        )
        _measure_rounds(options, run, plan, sections)


def _measure_rounds(
    options: Namespace, run: dict[str, Any], plan: Plan, sections: dict[str, Any]
) -> None:
    # Only the section of this instruction set is replaced: the others were measured on other
    # machines and cannot be repeated here.
    sections[run["instruction_set"]] = run
    failed: dict[str, str] = {}

    def measure_server(name: str, number: int) -> dict[str, Any]:
        """Figures of one server; one that fails is left out of this and the later rounds, with the reason."""
        if name not in failed:
            with tempfile.TemporaryDirectory(prefix="bodies-") as bodies:
                try:
                    return measure(SERVERS[name], plan, Path(bodies), number)
                except ServerFailure as failure:
                    failed[name] = str(failure)
        return {"failed": failed[name]}

    def describe(found: dict[str, Any]) -> str:
        return (
            f"left out: {found['failed']}"
            if "failed" in found
            else f"{found[MANY]['texts_per_second']:.1f} texts/s"
        )

    servers = {name: name for name in run["servers"]}
    for found in harness.run_rounds(servers, options.rounds, measure_server, describe):
        run["rounds"].append(found)
        harness.write_page(options.output, render(sections), sections)


def new_run(options: Namespace, workload: Workload) -> dict[str, Any]:
    """What the page needs to know, with no rounds yet."""
    pythons = _pythons(options)
    left_out = _left_out(options, pythons)
    servers = [name for name in options.servers if name not in left_out]
    for name, why in left_out.items():
        report(f"{name}: left out: {why}")
    if not servers:
        raise UserError(
            "--servers: none of them can be measured, see above", code="benchmark-failed"
        )
    # The library that hides the newer instructions is loaded by the servers and not by this
    # process, which would still see them.
    instruction_set = "avx2" if options.avx2_only else instruction_sets()[0]
    facts = harness.measurement_facts(MODULE, PACKAGES)
    if options.avx2_only:
        facts["Held to AVX2"] = (
            "everything newer is hidden from all servers (`benchmarks/serving/hide_instructions.c`)"
        )
    return {
        "facts": facts,
        "instruction_set": instruction_set,
        # The loop runs before the first round, when no server takes cores from it.
        "bare_operations_per_second": bare_rate(instruction_set, usable_cpus()),
        "operations_per_text": _int8_operations(options.model, workload.facts["tokens_mean"]),
        "model": options.model.name,
        "workload": workload.facts,
        "servers": servers,
        "left_out": left_out,
        "versions": {
            name: package_versions(pythons[SERVERS[name].python], SERVERS[name].packages)
            for name in servers
        },
        "accuracy_model": options.accuracy_model.name,
        "accuracy": _accuracies(options.accuracy_model),
        "dollars_per_hour": options.dollars_per_hour,
        "seconds": options.seconds,
        "poisson": options.poisson,
        "wanted_rounds": options.rounds,
        "rounds": [],
    }


def _accuracies(model: Path) -> dict[str, dict[str, Any]]:
    """Of each artefact of a model, what its manifest says of precision, accuracy and size."""
    found = {}
    for path in sorted(model.glob("*/manifest.json")):
        manifest = json.loads(path.read_text())
        found[path.parent.name] = {key: manifest[key] for key in ("precision", "accuracy", "size")}
    return found


def _left_out(options: Namespace, pythons: dict[str, str]) -> dict[str, str]:
    """The servers that cannot run here, and why."""
    why = {}
    for name in options.servers:
        server = SERVERS[name]
        if server.python not in pythons:
            why[name] = f"no --{server.python}_python was given"
        elif not server.folder(options.model).is_dir():
            remedy = "`python -m inference.export` writes it"
            why[name] = f"the model has no {server.artefact} artefact: {remedy}"
    return why


def _int8_operations(model: Path, tokens: float) -> float:
    """Operations of the int8 products of one text; a multiplication and an addition are two."""
    shape = EncoderShape.of(json.loads((model / "config.json").read_text()))
    width, wide = shape.hidden_size, shape.intermediate_size
    block = 4 * width * width + 2 * width * wide
    # The last block has keys and values for all tokens, and the rest for the first one.
    products = tokens * ((shape.num_layers - 1) * block + 2 * width * width) + 2 * width * (
        width + wide
    )
    return 2 * products


def _pythons(options: Namespace) -> dict[str, str]:
    given = {
        "own": sys.executable,
        "peer": options.peer_python,
        "infinity": options.infinity_python,
    }
    # Not resolved: a virtual environment's Python is a link, and finds its packages by the link's
    # location.
    return {kind: str(Path(path).absolute()) for kind, path in given.items() if path}


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__, page="serving.md", rounds=5)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a model folder with its artefacts")
    add(
        "--texts",
        default="data/ag_news",
        help="a folder in AG News' layout (default: data/ag_news)",
    )
    add(
        "--servers",
        type=lambda text: text.split(","),
        default=DEFAULT,
        metavar="NAME,...",
        help=f"of {', '.join(SERVERS)} (default: {','.join(DEFAULT)})",
    )
    add("--seconds", type=harness.seconds, default=10.0, help="of a load (default: 10)")
    add(
        "--avx2_only",
        action="store_true",
        help="hide what the processor has beyond AVX2 from all servers (Linux)",
    )
    add(
        "--poisson",
        action="store_true",
        help="random gaps in the open loops, instead of equal ones",
    )
    add("--peer_python", help="the Python that has the peers (default: they are left out)")
    add("--infinity_python", help="the Python that has Infinity (default: it is left out)")
    add(
        "--accuracy_model",
        type=Path,
        metavar="FOLDER",
        help="its artefacts give the accuracies (default: --model)",
    )
    add(
        "--dollars_per_hour",
        type=float,
        default=0.10,
        help="cost of such a machine (default: 0.10)",
    )
    options = parser.parse_args()
    unknown = [name for name in options.servers if name not in SERVERS]
    if unknown:
        raise UserError(
            f"--servers {unknown[0]}: no such server; there are {', '.join(SERVERS)}",
            code="flag-value",
        )
    options.accuracy_model = options.accuracy_model or options.model
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
