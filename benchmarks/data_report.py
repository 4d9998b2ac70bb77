"""Does the data report find planted faults, how long does it take, and how good is its prediction
for twice the rows?

Faults are planted at random in rows that have none: equal texts and near duplicates among the
training rows, training texts among the test rows, and training texts under another label.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from common.errors import UserError, positive
from training.config import FAULTS
from training.data.dataset import TextData, load_data
from training.data.duplicates import LEAST_SIMILARITY, WORDS_PER_SHINGLE, Repeats
from training.data.learning_curve import FOLDS, learning_curve

MODULE = "benchmarks.data_report"
PACKAGES = ("torch", "numpy", "scikit-learn")
KINDS = ("equal", "near")
FEWEST_WORDS = 12  # of a text that is changed and still has four of five word triples
CURVE_ROWS = (500, 1000, 2000, 4000, 8000)
INTRODUCTION = """
Of each fault {planted} are planted with seed {seed}, half as equal texts (in other case, with other white space), half
as near duplicates (a word more or another one, and 80% of all word triples in common). *recall*: the share of them
whose row the report names under that fault. *precision*: the share of all rows that it names whose texts are equal or
near by a plain comparison of their sets of word triples, and for conflicts whose labels differ. Time and memory are
those of the whole command `python -m training.data_report`, start included; *load*: how many other processes wanted a
core when it began. {made} training rows are made of
halves of two rows with the same label, because this copy has fewer.
"""
CURVE = """
The prediction for twice the rows, from so many training rows, and what the same linear model then reaches on that many
(both averaged over held-out folds), in percent:
"""


def main() -> None:
    parser = harness.Parser(MODULE, __doc__ or "", page="data_report.md", rounds=3)
    add = parser.add_argument
    add(
        "--dataset",
        default=str(harness.ROOT / "data" / "ag_news"),
        help="data with one label per row",
    )
    add("--rows", type=positive, default=harness.AG_NEWS_ROWS, help="training rows, at least")
    add("--planted", type=positive, default=1000, help="of each fault")
    add("--seed", type=int, default=0, help="of what is drawn")
    options = parser.parse_args()
    data = load_data(options.dataset)
    run: dict[str, Any] = {
        "facts": harness.measurement_facts(MODULE, PACKAGES),
        "planted": options.planted,
        "seed": options.seed,
        "rounds": [],
        "curve": [],
    }
    with tempfile.TemporaryDirectory(prefix="data-report-") as name:
        folder = Path(name)
        planted, run["rows"], run["made"] = write_rows(data, options, folder)
        for _ in range(options.rounds):
            run["rounds"].append(run_command(folder, folder / "report.json"))
            harness.report(str(run["rounds"][-1]))
        figures = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        run["found"] = {
            fault: judge(figures[fault]["rows"], planted[fault], fault) for fault in FAULTS
        }
        harness.report(str(run["found"]))
    run["curve"] = [predict(data, num_rows, options.seed) for num_rows in CURVE_ROWS]
    harness.write_page(options.output, render(run), run)


Row = list[str]  # a text and its label
Planted = tuple[Row, str]  # and how it repeats another one: KINDS


def write_rows(
    data: TextData, options: Namespace, folder: Path
) -> tuple[dict[str, dict[str, str]], list[int], int]:
    """Write ``train.csv`` and ``test.csv`` with planted faults.

    Returns:
        By fault, where each planted row is (as the report says it) and its kind; how many training
        and test rows there are; and how many of the training rows are made of others.
    """
    draw = np.random.default_rng(options.seed)
    train, test = clean_rows(data)
    # Of the three faults, two are planted among the training rows and count there.
    num_made = max(0, options.rows - len(train) - 2 * options.planted)
    train += mixed_rows(train, num_made, data.label_names, draw)
    added = plant(train, data.label_names, options.planted, draw)
    where: dict[str, dict[str, str]] = {}
    # A leaked row is a training text among the test rows; the other faults are among training rows.
    faults_of = {"train": ("duplicates", "conflicts"), "test": ("leakage",)}
    for split, rows in (("train", train), ("test", test)):
        path = folder / f"{split}.csv"
        # A repeated row is the later one, so those that were planted come after all others.
        for fault in faults_of[split]:
            first = len(rows) + 2  # the header is line 1
            lines = [f"{path} line {first + number}" for number in range(len(added[fault]))]
            kinds = [kind for _, kind in added[fault]]
            where[fault] = dict(zip(lines, kinds, strict=True))
            rows += [row for row, _ in added[fault]]
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["text", "label"], *rows])
    return where, [len(train), len(test)], num_made


def clean_rows(data: TextData) -> tuple[list[Row], list[Row]]:
    """The training and the test rows that repeat no other row.

    Without the data's own faults, all that the report finds was planted, or is found in vain.
    """
    repeats = Repeats(data, near=True)
    everyone = np.concatenate(list(repeats.rows.values()))
    train: list[Row] = []
    test: list[Row] = []
    for row in everyone[repeats.partners(everyone) < 0]:
        label = data.label_names[repeats.labels(np.array([row]))[0]]
        part = train if row < len(data.train) else test
        part.append([" ".join(repeats.texts[row].split()), label])
    return train, test


def mixed_rows(
    train: Sequence[Row], number: int, names: Sequence[str], draw: np.random.Generator
) -> list[Row]:
    """Rows that each join halves of two texts with the same label."""
    # Halves of the same label keep the label plausible, and two halves have too few word triples in
    # common with either source to be near it.
    by_label = {name: [text.split() for text, label in train if label == name] for name in names}
    made = []
    for _ in range(number):
        name = names[draw.integers(len(names))]
        first, second = (by_label[name][draw.integers(len(by_label[name]))] for _ in range(2))
        made.append([" ".join([*first[: len(first) // 2], *second[len(second) // 2 :]]), name])
    return made


def plant(
    train: Sequence[Row], names: Sequence[str], number: int, draw: np.random.Generator
) -> dict[str, list[Planted]]:
    """By fault, so many rows that repeat a training row, each row at most once.

    Raises:
        UserError: too few texts are long enough, or can be told apart in another case.
    """
    long = [
        row for row in train if len(row[0].split()) >= FEWEST_WORDS and row[0].upper() != row[0]
    ]
    if len(long) < 3 * number:
        raise UserError(
            f"--planted {number}: the data has too few long texts", code="benchmark-input"
        )
    chosen = [long[i] for i in draw.permutation(len(long))[: 3 * number]]
    added: dict[str, list[Planted]] = {fault: [] for fault in FAULTS}
    for start, fault in enumerate(FAULTS):
        # The faults get disjoint rows: one that was leaked and also repeated would be found under
        # either, and the recall of a fault would depend on another one.
        for position, (text, label) in enumerate(chosen[start :: len(FAULTS)]):
            kind = KINDS[position % len(KINDS)]
            if fault == "conflicts":
                # A shift of at least one and less than all names is always another label.
                label = names[(names.index(label) + draw.integers(1, len(names))) % len(names)]
            added[fault].append(([changed(text, kind, draw), label], kind))
    return added


def changed(text: str, kind: str, draw: np.random.Generator) -> str:
    """The same text in other letters and with other spaces, or with words changed as long as it is near."""
    if kind == "equal":
        return "  ".join(["", *text.swapcase().split(" ")])
    near = text
    # Changed until one more change would no longer be near: the closer to the limit, the harder to
    # find.
    for _ in range(4):
        words = near.split()
        position = int(draw.integers(len(words)))
        words[position : position + int(draw.integers(2))] = [f"changed{draw.integers(10**6)}"]
        if similarity(text, " ".join(words)) < LEAST_SIMILARITY:
            break
        near = " ".join(words)
    return near if near != text else f"{text} changed{draw.integers(10**6)}"


def triples(text: str) -> set[tuple[str, ...]]:
    words = re.findall(
        r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]", text.lower()
    )
    # Written a second time, and slowly, on purpose: a judge that shared the report's own code would
    # share its mistakes.
    words += [""] * (WORDS_PER_SHINGLE - len(words)) if words else []
    return {
        tuple(words[i : i + WORDS_PER_SHINGLE]) for i in range(len(words) - WORDS_PER_SHINGLE + 1)
    }


def similarity(one: str, other: str) -> float:
    """The share of word triples in common."""
    ours, theirs = triples(one), triples(other)
    return len(ours & theirs) / max(1, len(ours | theirs))


def judge(found: Sequence[dict[str, Any]], planted: dict[str, str], fault: str) -> dict[str, float]:
    """Recall by kind, and precision, of the rows that the report names under a fault."""
    named = {one["row"] for one in found}
    # Rows that were not planted may be right too: joined halves can repeat something. So precision
    # asks whether texts are near and not whether they were planted.
    right = [is_right(one, fault) for one in found]
    recall = {
        kind: float(np.mean([row in named for row, own in planted.items() if own == kind] or [1]))
        for kind in KINDS
    }
    return {"found": len(found), **recall, "precision": float(np.mean(right or [1]))}


def is_right(one: dict[str, Any], fault: str) -> bool:
    """Whether a row that the report names does repeat the other one, by a plain comparison."""
    text, other = (" ".join(one[name].casefold().split()) for name in ("text", "other_text"))
    if fault == "conflicts" and one["label"] == one["other_label"]:
        return False
    return text == other or similarity(one["text"], one["other_text"]) >= LEAST_SIMILARITY


def run_command(folder: Path, report: Path) -> dict[str, float]:
    """Seconds and the peak of memory of the command, as the system counts them."""
    command = [sys.executable, "-m", "training.data_report", str(folder), "--json", str(report)]
    # wait4 and not resource.getrusage(RUSAGE_CHILDREN), whose memory is the peak of all children so
    # far.
    load, began = os.getloadavg()[0], time.perf_counter()
    process = subprocess.Popen(
        command, cwd=harness.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    # The process is gone now, and Popen, which did not wait for it itself, has to be told.
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(
            f"{' '.join(command)}: ended with code {process.returncode}", code="benchmark-input"
        )
    seconds = time.perf_counter() - began
    return {
        "load": load,
        "seconds": seconds,
        "cpu": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss * 1024 / 1e9,
    }


def predict(data: TextData, num_rows: int, seed: int) -> dict[str, Any]:
    """What is predicted from some rows for twice as many, and what these then bring."""
    # One order for both: the many rows contain the few, so the difference is that of more rows and
    # not of other ones.
    order = np.random.default_rng([seed, num_rows]).permutation(len(data.train))

    def curve(count: int) -> dict[str, Any]:
        rows = np.sort(order[:count])
        return learning_curve(
            [data.train.texts[row] for row in rows], data.train.labels[rows], seed
        )

    # A fold of rows is held out, and the others are twice as many as those that the prediction was
    # made from.
    few, many = curve(num_rows), curve(2 * num_rows * FOLDS // (FOLDS - 1))
    if "skipped" in few or "skipped" in many:
        return {"rows": num_rows}
    return {
        "rows": num_rows,
        "now": few["now"],
        "twice": few["twice"],
        "measured": many["scores"][-1],
    }


def render(run: dict[str, Any]) -> str:
    """The page of a run."""
    found = harness.table(
        {
            "fault": str,
            "found": lambda fault: f"{run['found'][fault]['found']:,}",
            **{
                f"recall, {kind}, %": lambda fault, kind=kind: (
                    f"{100 * run['found'][fault][kind]:.1f}"
                )
                for kind in KINDS
            },
            "precision, %": lambda fault: f"{100 * run['found'][fault]['precision']:.1f}",
        },
        FAULTS,
    )
    cost = harness.table(
        {
            "rows": lambda _: " + ".join(f"{count:,}" for count in run["rows"]),
            "rounds": lambda rounds: str(len(rounds)),
            "time, s": lambda rounds: harness.median_and_spread([one["seconds"] for one in rounds]),
            "CPU time, s": lambda rounds: harness.median_and_spread([one["cpu"] for one in rounds]),
            "load": lambda rounds: harness.median_and_spread([one["load"] for one in rounds]),
            "memory, GB": lambda rounds: harness.median_and_spread(
                [one["memory"] for one in rounds], 2
            ),
        },
        [run["rounds"]],
    )
    curve = harness.table(
        {
            "rows": lambda one: f"{one['rows']:,}",
            "score now": lambda one: f"{100 * one['now']:.1f}",
            "predicted for twice": lambda one: f"{100 * one['twice']:.1f}",
            "measured with twice": lambda one: f"{100 * one['measured']:.1f}",
            "difference": lambda one: f"{100 * (one['twice'] - one['measured']):+.1f}",
        },
        [one for one in run["curve"] if "twice" in one],
    )
    text = INTRODUCTION.format(planted=run["planted"], seed=run["seed"], made=f"{run['made']:,}")
    introduction = harness.introduction(MODULE, "Data report", text)
    return f"{introduction}{found}\n{cost}\n{CURVE.strip()}\n\n{curve}\n{harness.fact_list(run['facts'])}"


if __name__ == "__main__":
    harness.run_benchmark(main)
