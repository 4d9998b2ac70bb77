"""What does a distilled student keep of its teacher's accuracy, and how much faster does it answer?

One student keeps three of the teacher's blocks, another is the starter, which is also trained on labels only. Every
model then answers files with ``python -m inference.score``, as a user would.
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
from statistics import mean
from typing import Any

from benchmarks import harness
from benchmarks.training_run import run_program, train_as_a_user
from common.errors import UserError, positive
from common.hardware import usable_cpus
from training.data.dataset import NewsData, load_news

MODULE = "benchmarks.distillation"
EVERY_STUDENT = ("--max_length", "96", "--validation_fraction", "0.02", "--epochs", "2", "--export")
# Of MiniLM's six blocks the first, the third and the last.
THREE_BLOCKS = ("--layers", "3", "--batch_size", "16", "--learning_rate", "1.5e-4", "--ema", "0.999")
STARTER = ("--model", "starter", "--batch_size", "32", "--learning_rate", "6e-4", "--ema", "0.998")
INTRODUCTION = """
The teacher is `{teacher}`. Each student is trained by `training/run_ddp.sh {processes} --dataset {name}
{flags}`
and the flags of its row, once per seed. *Accuracy* is on all {tests:,} test rows, as each model is served, with
{seeds}. *Rows per second* is what `python -m inference.score` prints for {speed_rows:,}
training texts in a CSV file: the models of the first seed take turns, for {rounds} rounds. *Speed* is against the
teacher in PyTorch at fp32, by the median of the ratios within a round.
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
        "flags": {},
        "accuracy": {},
        "bytes": {},
        "rows_per_second": {},
    }
    run["facts"]["Data"] = harness.rows_of(run["name"], len(data.train), len(data.test))
    teacher = str(options.teacher)
    students = {
        "three of its blocks, distilled": ("--model", teacher, *THREE_BLOCKS, "--distill", teacher),
        "starter, distilled": (*STARTER, "--distill", teacher),
        "starter, labels only": STARTER,
    }
    with tempfile.TemporaryDirectory(prefix="distillation-") as name:
        folder = Path(name)
        write_texts(folder / "test.csv", data.test.texts)
        write_texts(folder / "speed.csv", data.train.texts[: options.speed_rows])
        models: dict[str, tuple[Path, str]] = {}  # folder and engine; of each student the first seed's

        def add(case: str, model: tuple[Path, str]) -> None:
            run["accuracy"].setdefault(case, []).append(accuracy(model, data, folder))
            run["bytes"][case] = served_bytes(model[0])
            models.setdefault(case, model)
            harness.report(f"{case}: {100 * run['accuracy'][case][-1]:.2f}%")

        add("teacher, PyTorch fp32", (options.teacher, "torch"))
        add("teacher, int8", (exported, "auto"))
        for seed in range(options.seeds):
            for number, (case, flags) in enumerate(students.items()):
                trained = folder / f"student_{number}_{seed}"
                train_as_a_user(("--dataset", options.dataset, *EVERY_STUDENT, *flags, "--seed", str(seed)), trained)
                add(f"{case}, int8", (trained / "native", "auto"))
                run["flags"][f"{case}, int8"] = " ".join(flags).replace(teacher, "TEACHER")
            for turn in range(0 if seed else options.rounds):  # the seed does not change the speed
                for case in harness.in_turns(list(models), turn):
                    speed = score(models[case], folder / "speed.csv", folder)[1]
                    run["rows_per_second"].setdefault(case, []).append(speed)
                    harness.report(f"round {turn + 1}/{options.rounds}, {case}: {speed:,.0f} rows per second")
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
    cases = list(run["accuracy"])
    speeds, seeds = run["rows_per_second"], len(run["accuracy"][cases[-1]])

    def accuracy(case: str) -> str:
        found = [100 * value for value in run["accuracy"][case]]
        return f"{mean(found):.2f} ({harness.spread(found, 2)})" if len(found) > 1 else f"{found[0]:.2f}"

    columns = {
        "model": lambda case: case,
        "accuracy, %": accuracy,
        "rows per second": lambda case: harness.median_and_spread(speeds[case], 0),
        "speed": lambda case: f"{harness.median_ratio(speeds[case], speeds[cases[0]]):.1f} x",
        "MB": lambda case: f"{run['bytes'][case] / 1e6:.1f}",
        "flags": lambda case: f"`{run['flags'][case]}`" if case in run["flags"] else "",
    }
    text = INTRODUCTION.format(
        **{key: run[key] for key in ("teacher", "name", "tests", "speed_rows")},
        processes=usable_cpus(),
        flags=" ".join(EVERY_STUDENT),
        seeds=f"the mean and range of {seeds} seeds" if seeds > 1 else "one seed per student",
        rounds=len(speeds[cases[0]]),
    )
    page = harness.introduction(MODULE, "A teacher and its students", text)
    return f"{page}{harness.table(columns, cases)}\n{harness.fact_list(run['facts'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="distillation.md", rounds=5)
    parser.add_argument("--dataset", default=str(harness.ROOT / "data" / "ag_news"), help="as for training")
    parser.add_argument("--teacher", type=Path, required=True, help="the folder of a trained and exported model")
    parser.add_argument("--seeds", type=positive, default=3, help="trainings of each student")
    parser.add_argument("--speed_rows", type=positive, default=8000, help="rows to measure the speed with")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
