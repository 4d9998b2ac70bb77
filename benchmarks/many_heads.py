"""What do many models cost that share one encoder, each with a head of its own?

Every figure comes from a process of its own (`benchmarks.serving.heads`), which loads the models as a
server does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.harness import Goal
from benchmarks.serving.heads import BATCH
from benchmarks.serving.workload import read_workload
from common.errors import UserError
from common.model_folder import FAMILIARITY_FILE

MODULE = "benchmarks.many_heads"
PACKAGES = ("numpy", "tokenizers")
NUM_TEXTS = 64
INTRODUCTION = """
{heads} models on one encoder: {given} artefacts that were trained with `--method head` on the same base{copies}
*memory*: resident memory of the process after load, without a web server. *ms/text*: one thread, a forward pass for the
first model only, and one for all models, in turn over {texts} texts of {dataset}: one text per pass, or {batch}.
Tokenizing is not in it, and happens once for all. *Equal*: for these texts, every model's scores have the bits that it
gave on its own, in the pass for all and in a pass for it only; for some texts, its calibrated answers and their
familiarity were compared too. The table for the familiarity takes {table} per model here; it grows with the training
texts, up to 256 KiB and a byte per token. A figure is the median of {rounds} rounds, with the smallest and the largest.
"""


def main() -> None:
    parser = harness.Parser(MODULE, __doc__, page="many_heads.md", rounds=5)
    parser.add_argument(
        "models", type=Path, nargs="+", help="exported model folders with one encoder"
    )
    parser.add_argument("--heads", type=int, default=50, help="default: %(default)s")
    parser.add_argument(
        "--texts", default="data/ag_news", help="texts to read (default: %(default)s)"
    )
    options = parser.parse_args()
    artefacts = [path / "native" for path in options.models]
    texts = read_workload(options.models[0], options.texts).texts[:NUM_TEXTS]

    def measure(heads: int, number: int) -> dict[str, Any]:
        return measure_process(artefacts, heads, texts)

    cases = {"1 model": 1, f"{options.heads} models": options.heads}
    rounds = list(
        harness.run_rounds(
            cases, options.rounds, measure, lambda found: f"{found['memory']:.0f} MB"
        )
    )
    files = [path / FAMILIARITY_FILE for path in artefacts if (path / FAMILIARITY_FILE).is_file()]
    table = sum(file.stat().st_size for file in files) / len(artefacts) / 1024
    given, times = len(artefacts), -(-options.heads // len(artefacts))
    note = f",\nused up to {times} times each, with the numbers of its head times 1.001, 1.002 and so on."
    text = INTRODUCTION.format(
        heads=options.heads,
        given=given,
        copies=note if times > 1 else ".",
        texts=len(texts),
        dataset=options.texts,
        batch=BATCH,
        table=f"{table:.0f} KiB",
        rounds=options.rounds,
    )
    harness.write_page(
        options.output, render(text, {name: [one[name] for one in rounds] for name in cases})
    )


def measure_process(artefacts: list[Path], heads: int, texts: list[str]) -> dict[str, Any]:
    """What one process measures.

    Raises:
        UserError: the models do not load, or do not share an encoder.
    """
    given = json.dumps({"artefacts": list(map(str, artefacts)), "heads": heads, "texts": texts})
    command = [sys.executable, "-m", "benchmarks.serving.heads"]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip().splitlines()[-1], code="benchmark-failed")
    return json.loads(done.stdout)


def render(text: str, found: dict[str, list[dict[str, Any]]]) -> str:
    one, many = found.values()

    def series(case: str, key: str) -> list[float]:
        return [measured[key] for measured in found[case]]

    def ratio(name: str) -> float:
        return harness.median_ratio(
            [measured[f"{name}_all"] for measured in many],
            [measured[f"{name}_one"] for measured in many],
        )

    memory = median(each["memory"] for each in many) / median(each["memory"] for each in one)
    equal = sum(each["equal"] for each in many)
    goals = [
        Goal("memory, all models ÷ one", memory, "at most", 1.2, "{:.2f}"),
        Goal("ms/text, one text per pass, all ÷ one", ratio("single"), "at most", 1.1, "{:.3f}"),
        Goal(
            f"ms/text, {BATCH} texts per pass, all ÷ one", ratio("batch"), "at most", 1.1, "{:.3f}"
        ),
        Goal("rounds in which all models are equal", equal, "at least", len(many), "{:.0f}"),
    ]
    columns = {
        "": str,
        "labels": lambda case: str(found[case][0]["labels"]),
        "memory, MB": lambda case: harness.median_and_spread(series(case, "memory")),
    }
    for shown, name in (("one text", "single"), (f"{BATCH} texts", "batch")):
        for who in ("one", "all"):
            columns[f"ms/text, {shown}, {who}"] = lambda case, key=f"{name}_{who}": (
                harness.median_and_spread(series(case, key), 3)
            )
    page = harness.introduction(MODULE, "Many heads on one encoder", text)
    page += harness.fact_list(harness.measurement_facts(MODULE, PACKAGES)) + "\n"
    return f"{page}{harness.goals_table(goals)}\n{harness.table(columns, found)}"


if __name__ == "__main__":
    harness.run_benchmark(main)
