"""What does a distilled student keep of its teacher's accuracy, and how much faster does it answer?

One student keeps three of the teacher's blocks, another is the starter, which is also trained on
labels only. Every model then answers files with ``python -m inference.score``, as a user would.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks import harness, studies
from benchmarks.studies import Flags, Row, Run
from benchmarks.training_run import run_program, train_as_a_user
from common.errors import UserError
from training.data.dataset import TextData, load_data

EVERY_STUDENT = ("--max_length", "96", "--validation_fraction", "0.02", "--epochs", "2", "--export")
# Of MiniLM's six blocks the first, the third and the last.
THREE_BLOCKS = (
    "--layers",
    "3",
    "--batch_size",
    "16",
    "--learning_rate",
    "1.5e-4",
    "--ema",
    "0.999",
)
STARTER = ("--model", "starter", "--batch_size", "32", "--learning_rate", "6e-4", "--ema", "0.998")
INTRODUCTION = """
The teacher is `{teacher}`. Each student is trained by `training/run_ddp.sh {processes} --dataset {name}
{flags}`
and the flags of its row, once per seed. *Accuracy* is on all {tests:,} test rows, as each model is served, with
{seeds}. *Rows per second* is what `python -m inference.score` prints for {speed_rows:,}
training texts in a CSV file: the models of the first seed take turns, for {rounds} rounds. *Speed* is against the
teacher in PyTorch at fp32, by the median of the ratios within a round.
"""
Model = tuple[Path, str]  # folder and engine


def variants(options: Namespace) -> dict[str, Flags]:
    teacher = str(options.teacher)
    return {
        "three of its blocks, distilled, int8": (
            "--model",
            teacher,
            *THREE_BLOCKS,
            "--distill",
            teacher,
        ),
        "starter, distilled, int8": (*STARTER, "--distill", teacher),
        "starter, labels only, int8": STARTER,
    }


def main() -> None:
    options = STUDY.parse()
    data = load_data(options.dataset)
    run = STUDY.begin(options, data)
    with tempfile.TemporaryDirectory(prefix="distillation-") as name:
        folder = Path(name)
        write_texts(folder / "test.csv", data.test.texts)
        write_texts(folder / "speed.csv", data.train.texts[: options.speed_rows])
        # Accuracy needs every seed. Speed does not depend on the values of the weights, so one
        # model of each kind takes part in the rounds.
        models: dict[str, Model] = {}  # of each student the first seed's

        def add(case: str, model: Model) -> None:
            labels, _ = score(model, folder / "test.csv", folder)
            right = [
                data.label_names[truth] == label
                for truth, label in zip(data.test.labels, labels, strict=True)
            ]
            run["accuracy"].setdefault(case, []).append(mean(right))
            run["bytes"][case] = served_bytes(model[0])
            models.setdefault(case, model)
            harness.report(f"{case}: {100 * mean(right):.2f}%")

        def speed(model: Model, number: int) -> float:
            return score(model, folder / "speed.csv", folder)[1]

        add("teacher, PyTorch fp32", (options.teacher, "torch"))
        add("teacher, int8", (options.teacher / "native", "auto"))
        for seed in range(options.seeds):
            for number, (case, flags) in enumerate(variants(options).items()):
                trained = folder / f"student_{number}_{seed}"
                train_as_a_user(
                    ("--dataset", options.dataset, *EVERY_STUDENT, *flags, "--seed", str(seed)),
                    trained,
                )
                add(case, (trained / "native", "auto"))
            rounds = 0 if seed else options.rounds  # the seed does not change the speed
            for found in harness.run_rounds(
                models, rounds, speed, lambda speed: f"{speed:,.0f} rows per second"
            ):
                for case, rows_per_second in found.items():
                    run["rows_per_second"].setdefault(case, []).append(rows_per_second)
            harness.write_page(options.output, STUDY.page(run), run)


def write_texts(path: Path, texts: Sequence[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([text] for text in texts)


def score(model: Model, source: Path, folder: Path) -> tuple[list[str], float]:
    """The labels that the model gives, and rows per second."""
    path, engine = model
    out = folder / "answers.jsonl"
    # Scoring resumes what it finds, and would otherwise have nothing to do the second time.
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "inference.score", str(source), str(out)]
    printed = run_program([*command, "--model", str(path), "--engine", engine])
    # The last line is the summary; those before it are progress.
    speeds = re.findall(r"([\d,]+) rows per second", printed)
    labels = [json.loads(line)["label"] for line in out.read_text(encoding="utf-8").splitlines()]
    return labels, float(speeds[-1].replace(",", ""))


def served_bytes(path: Path) -> int:
    """Of the files that the server reads."""
    names = ("config.json", "tokenizer.json", "*.safetensors")
    return sum(file.stat().st_size for name in names for file in path.glob(name))


def about(options: Namespace, data: TextData) -> Run:
    teacher = options.teacher
    if not (teacher / "native").is_dir():
        message = f"--teacher {teacher}: is not exported; run python -m inference.export {teacher}"
        raise UserError(message, code="benchmark-failed")
    flags = {
        case: " ".join(flags).replace(str(teacher), "TEACHER")
        for case, flags in variants(options).items()
    }
    return {
        "teacher": teacher.name,
        "flags": flags,
        "accuracy": {},
        "bytes": {},
        "rows_per_second": {},
    }


def words(run: Run) -> dict[str, str | int]:
    *_, accuracies = run["accuracy"].values()
    seeds = (
        f"the mean and range of {len(accuracies)} seeds"
        if len(accuracies) > 1
        else "one seed per student"
    )
    first, *_ = run["rows_per_second"].values()
    return {"flags": " ".join(EVERY_STUDENT), "seeds": seeds, "rounds": len(first)}


def accuracy(row: Row) -> str:
    return harness.mean_and_spread([100 * value for value in row.run["accuracy"][row.name]], 2)


def times_teacher(row: Row) -> str:
    speeds = row.run["rows_per_second"]
    return f"{harness.median_ratio(speeds[row.name], speeds['teacher, PyTorch fp32']):.1f} x"


STUDY = studies.Study(
    "distillation",
    __doc__,
    "A teacher and its students",
    INTRODUCTION,
    variants=variants,
    flags={
        "dataset": studies.dataset(),
        "teacher": {
            "type": Path,
            "required": True,
            "help": "the folder of a trained and exported model",
        },
        "speed_rows": studies.number(8000, "rows to measure the speed with"),
    },
    rounds=5,
    about=about,
    words=words,
    order=lambda run: run["accuracy"],
    columns={
        "model": studies.row_name,
        "accuracy, %": accuracy,
        "rows per second": lambda row: harness.median_and_spread(
            row.run["rows_per_second"][row.name], 0
        ),
        "speed": times_teacher,
        "MB": lambda row: f"{row.run['bytes'][row.name] / 1e6:.1f}",
        "flags": lambda row: f"`{flags}`" if (flags := row.run["flags"].get(row.name)) else "",
    },
)

if __name__ == "__main__":
    harness.run_benchmark(main)
