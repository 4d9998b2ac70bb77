"""Set our server beside others under the same load, with the same weights, in the same run.

Writes a page of tables, and beside it the rounds as JSON, after every round: a run that is cut short leaves the page of
the rounds that ended. A server takes about eight loads' time a round: three rounds of seven servers are done in a
quarter of an hour at `--seconds 4`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.processes import ROOT, end_with_children
from benchmarks.serving.measure import Plan, measure
from benchmarks.serving.page import MODULE, render
from benchmarks.serving.running import ServerFailure
from benchmarks.serving.servers import DEFAULT, SERVERS, package_versions
from benchmarks.serving.workload import Workload, read_workload
from benchmarks.tables import HERE, Parser, circumstances, write_table
from common.errors import UserError, positive, run_command
from common.hardware import cpu_flags, usable_cpus

PACKAGES = ("fastapi", "uvicorn", "tokenizers", "numpy", "openvino", "onnxruntime", "torch")
SECONDS_AT_LIMIT = 1.0


def main() -> None:
    """Measure the servers that were asked for and write the page after every round."""
    options = _parse()
    end_with_children()
    workload = read_workload(options.model, options.texts)
    run = new_run(options, workload)
    plan = Plan(options.model, workload.texts, _pythons(options), options.seconds, options.poisson)
    for number in range(1, options.rounds + 1):
        measure_round(run, plan, workload, f"round {number}/{options.rounds}")
        write_table(options.output.with_suffix(".json"), json.dumps(run, indent=1) + "\n")
        write_table(options.output, render(run))
        say(f"Written: {options.output}")


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def measure_round(run: dict[str, Any], plan: Plan, workload: Workload, title: str) -> None:
    """Measure the limit and every server once, each round in another order; adds the round to the run."""
    number = len(run["rounds"])
    limit = measure_limit(workload)
    run["limits"].append(limit)
    say(f"{title}, int8 limit: {max(rate for one in limit.values() for rate in one.values()) / 1e9:.0f} Gop/s")
    names = [name for name in run["servers"] if not any("failed" in one.get(name, {}) for one in run["rounds"])]
    turn = number * max(1, len(names) // 3) % max(1, len(names))
    measured = {}
    for place, name in enumerate([*names[turn:], *names[:turn]], start=1):
        measured[name] = measure_server(name, plan, number, f"{title}, {place}/{len(names)} {name}")
    run["rounds"].append(measured)


def measure_server(name: str, plan: Plan, number: int, title: str) -> dict[str, Any]:
    """Measure one server; one that fails is left out, with the reason."""
    with tempfile.TemporaryDirectory(prefix="bodies-") as bodies:
        try:
            return measure(SERVERS[name], plan, Path(bodies), number, lambda line: say(f"{title}: {line}"))
        except ServerFailure as failure:
            say(f"{title}: left out: {failure}")
            return {"failed": str(failure)}


def measure_limit(workload: Workload) -> dict[str, dict[str, float]]:
    """The machine's int8 rate, in a process of its own."""
    numbers = (workload.size.dim, workload.size.hidden_dim, usable_cpus(), SECONDS_AT_LIMIT)
    command = [sys.executable, "-m", "benchmarks.serving.limit", *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"benchmarks.serving.limit failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}",
            code="benchmark-failed",
        )
    return json.loads(done.stdout)


def new_run(options: Namespace, workload: Workload) -> dict[str, Any]:
    """What the page needs to know, with no rounds yet."""
    pythons = _pythons(options)
    left_out: dict[str, str] = {}
    for name in options.servers:
        server = SERVERS[name]
        if server.python not in pythons:
            left_out[name] = f"no --{server.python}_python was given"
        elif not server.folder(options.model).is_dir():
            left_out[name] = f"the model has no {server.artefact} artefact: `python -m inference.export` writes it"
    servers = [name for name in options.servers if name not in left_out]
    for name, why in left_out.items():
        say(f"{name}: left out: {why}")
    if not servers:
        raise UserError("--servers: none of them can be measured, see above", code="benchmark-failed")
    return {
        "facts": circumstances(MODULE, PACKAGES) | {"int8 instructions": _int8_instructions()},
        "model": options.model.name,
        "workload": workload.facts(),
        "servers": servers,
        "left_out": left_out,
        "versions": {name: package_versions(pythons[SERVERS[name].python], SERVERS[name].packages) for name in servers},
        "accuracy_model": options.accuracy_model.name,
        "accuracy": read_manifests(options.accuracy_model),
        "dollars_per_hour": options.dollars_per_hour,
        "seconds": options.seconds,
        "poisson": options.poisson,
        "wanted_rounds": options.rounds,
        "limits": [],
        "rounds": [],
    }


def read_manifests(model: Path) -> dict[str, Any]:
    """What the model's artefacts say of themselves, by their folder's name."""
    found = {}
    for path in sorted(model.glob("*/manifest.json")):
        manifest = json.loads(path.read_text())
        found[path.parent.name] = {name: manifest[name] for name in ("precision", "accuracy", "size")}
    return found


def _int8_instructions() -> str:
    found = sorted(flag for flag in cpu_flags() if "vnni" in flag or flag == "amx_int8")
    return ", ".join(found) or "none that this benchmark knows"


def _pythons(options: Namespace) -> dict[str, str]:
    given = {"own": sys.executable, "peer": options.peer_python, "infinity": options.infinity_python}
    # Not resolved: a virtual environment's Python is a link, and knows its packages by where the link is.
    return {kind: str(Path(path).absolute()) for kind, path in given.items() if path}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.5 <= seconds <= 600:
        raise UserError(f"--seconds {text}: must be between 0.5 and 600", code="flag-value")
    return seconds


def _parse() -> Namespace:
    parser = Parser(MODULE, str(__doc__).split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a model folder, its artefacts in it")
    parser.add_argument("--texts", default="data/ag_news", help="a folder in AG News' layout (default: data/ag_news)")
    parser.add_argument(
        "--servers",
        type=lambda text: text.split(","),
        default=DEFAULT,
        metavar="NAME,...",
        help=f"of {', '.join(SERVERS)} (default: {','.join(DEFAULT)})",
    )
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--seconds", type=_seconds, default=10.0, help="of a load (default: 10)")
    parser.add_argument("--poisson", action="store_true", help="random gaps in the open loops, instead of equal ones")
    parser.add_argument("--peer_python", help="the Python that has the peers (default: they are left out)")
    parser.add_argument("--infinity_python", help="the Python that has Infinity (default: it is left out)")
    parser.add_argument(
        "--accuracy_model",
        type=Path,
        metavar="FOLDER",
        help="the model whose artefacts tell the accuracy (default: --model)",
    )
    parser.add_argument(
        "--dollars_per_hour", type=float, default=0.10, help="what such a machine costs (default: 0.10)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "serving.md",
        help="the page (default: benchmarks/serving.md)",
    )
    options = parser.parse_args()
    unknown = [name for name in options.servers if name not in SERVERS]
    if unknown:
        raise UserError(f"--servers {unknown[0]}: no such server; there are {', '.join(SERVERS)}", code="flag-value")
    if options.output.suffix != ".md":
        raise UserError(f"--output {options.output}: must end in .md", code="flag-value")
    options.accuracy_model = options.accuracy_model or options.model
    return options


if __name__ == "__main__":
    run_command(main)
