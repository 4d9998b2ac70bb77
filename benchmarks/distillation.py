"""What does a distilled student keep of its teacher's accuracy, and how much faster does it answer?

The student is trained twice with the same flags, once with the teacher's answers and once with labels only. Every model
then answers files with ``python -m inference.score``, as a user would.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import harness
from benchmarks.training_run import run_program, train_as_a_user
from common.errors import UserError, positive
from common.hardware import usable_cpus
from training.data.dataset import NewsData, load_news

MODULE = "benchmarks.distillation"
STUDENT = (
    *("--model", "starter", "--epochs", "3", "--batch_size", "32", "--learning_rate", "6e-4", "--max_length", "96"),
    *("--validation_fraction", "0.02", "--ema", "0.998", "--export"),
)
INTRODUCTION = """
The teacher is a fine-tuned {teacher}. Its student is trained by `training/run_ddp.sh {processes} --dataset {name}
{flags}`, with `--distill` for the teacher's answers or without for labels only, and with another seed in each round.
*Accuracy* is on all {tests:,} test rows, as each model is served, mean and range of {rounds} rounds. *Rows per second*
is what `python -m inference.score` prints for {speed_rows:,} training texts in a CSV file; the models take turns in
each round. *Speed* is against the teacher in PyTorch at fp32, by the median of the ratios within a round.
"""


def main() -> None:
    options = _parse()
    exported = options.teacher / "native"
    if not exported.is_dir():
        raise UserError(
            f"--teacher {options.teacher}: is not exported; run python -m inference.export {options.teacher}",
            code="benchmark-failed",
        )
    data = load_news(options.dataset)
    run: dict[str, Any] = {
        "facts": harness.measurement_facts(MODULE),
        "name": Path(data.name).name,
        "teacher": options.teacher.name,
        "tests": len(data.test),
        "speed_rows": options.speed_rows,
        "rounds": [],
    }
    with tempfile.TemporaryDirectory(prefix="distillation-") as name:
        folder = Path(name)
        write_texts(folder / "test.csv", data.test.texts)
        write_texts(folder / "speed.csv", data.train.texts[: options.speed_rows])
        for seed in range(options.rounds):
            students = {}
            for what, more in (("distilled", ("--distill", str(options.teacher))), ("labels only", ())):
                students[what] = folder / f"{what.replace(' ', '_')}_{seed}"
                flags = ("--dataset", options.dataset, *STUDENT, *more, "--seed", str(seed))
                train_as_a_user(flags, students[what])
                harness.report(f"seed {seed}: the student ({what}) is trained")
            models = {
                "teacher, PyTorch fp32": (options.teacher, "torch"),
                "teacher, int8": (exported, "auto"),
                **{f"student, {what}, int8": (path / "native", "auto") for what, path in students.items()},
            }
            found = {case: {"accuracy": accuracy(model, data, folder)} for case, model in models.items()}
            for case in harness.in_turns(list(models), seed):
                found[case]["rows_per_second"] = score(models[case], folder / "speed.csv", folder)[1]
                found[case]["bytes"] = served_bytes(models[case][0])
                harness.report(f"round {seed + 1}/{options.rounds}, {case}: {found[case]}")
            run["rounds"].append(found)
            harness.write_page(options.output, render(run), run)


def write_texts(path: Path, texts: Sequence[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([text] for text in texts)


def score(model: tuple[Path, str], source: Path, folder: Path) -> tuple[list[str], float]:
    """The labels that the model gives, and rows per second."""
    path, engine = model
    out = folder / "answers.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "inference.score", str(source), str(out)]
    printed = run_program([*command, "--model", str(path), "--engine", engine])
    speeds = re.findall(r"([\d,]+) rows per second", printed)
    labels = [json.loads(line)["label"] for line in out.read_text(encoding="utf-8").splitlines()]
    return labels, float(speeds[-1].replace(",", ""))


def accuracy(model: tuple[Path, str], data: NewsData, folder: Path) -> float:
    labels, _ = score(model, folder / "test.csv", folder)
    right = [data.label_names[truth] == label for truth, label in zip(data.test.labels, labels, strict=True)]
    return mean(right)


def served_bytes(path: Path) -> int:
    """Of the files that the server reads."""
    names = ("config.json", "tokenizer.json", "*.safetensors")
    return sum(file.stat().st_size for name in names for file in path.glob(name))


def render(run: Mapping[str, Any]) -> str:
    """The page of a run."""
    rounds = run["rounds"]
    cases = list(rounds[0])

    def values(case: str, key: str) -> list[float]:
        return [found[case][key] for found in rounds]

    def speed(case: str) -> str:
        return f"{harness.median_ratio(values(case, 'rows_per_second'), values(cases[0], 'rows_per_second')):.1f} x"

    def accuracy(case: str) -> str:
        found = [100 * value for value in values(case, "accuracy")]
        return f"{mean(found):.2f} ({harness.spread(found, 2)})"

    columns = {
        "model": lambda case: case,
        "accuracy, %": accuracy,
        "rows per second": lambda case: harness.median_and_spread(values(case, "rows_per_second"), 0),
        "speed": speed,
        "MB": lambda case: f"{median(values(case, 'bytes')) / 1e6:.1f}",
    }
    text = INTRODUCTION.format(
        **{key: run[key] for key in ("teacher", "name", "tests", "speed_rows")},
        processes=usable_cpus(),
        flags=" ".join(STUDENT),
        rounds=len(rounds),
    )
    page = harness.introduction(MODULE, "A teacher and its student", text)
    return f"{page}{harness.table(columns, cases)}\n{harness.fact_list(run['facts'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="distillation.md", rounds=3)
    parser.add_argument("--dataset", default=str(harness.ROOT / "data" / "ag_news"), help="as for training")
    parser.add_argument("--teacher", type=Path, required=True, help="the folder of a trained and exported model")
    parser.add_argument("--speed_rows", type=positive, default=8000, help="rows to measure the speed with")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
