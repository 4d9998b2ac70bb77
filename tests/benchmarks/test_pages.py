"""The figures on a page are those of its rounds."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    accuracy,
    browser,
    budget,
    distillation,
    harness,
    imbalance,
    long_documents,
    lora,
    one_or_two_processes,
    recipe,
    review,
    scaling,
    sizing,
    starter,
    time_to_accuracy,
    verdict,
)
from benchmarks.cascading import page as cascade_page
from benchmarks.drift import page as drift_page
from benchmarks.honest import page as honest_page
from benchmarks.serving import page as serving_page
from benchmarks.training_features import Block, cost_of_save, count_kept, slowest
from common.errors import UserError
from tests.processes import run_python
from tests.training.parallelism.small_models import FAMILIES, small_config
from training.config import TrainConfig

MB = 1_000_000


def training_throughput_page(run: dict[str, Any]) -> str:
    from benchmarks import training_throughput  # Hugging Face's trainer, which it imports, takes seconds

    return "".join(map(training_throughput.render, run.values()))


STUDIES = (budget, distillation, imbalance, long_documents, lora, starter, time_to_accuracy)
RENDERERS: dict[str, Callable[[Any], str]] = {
    "scaling": lambda run: scaling.page(run["facts"], run["rounds"], "scaling.png", cores=2),
    "one_or_two_processes": lambda run: one_or_two_processes.render(run, "figure.png"),
    "sizing": sizing.render,
    "recipe": recipe.render,
    "serving": serving_page.render,
    "honest_answers": honest_page.render,
    "observing": drift_page.render,
    "review": review.render,
    "cascade": cascade_page.render,
    "verdict": verdict.render,
    "training_throughput": training_throughput_page,
    **{module.STUDY.name: module.STUDY.page for module in STUDIES},
}


def table_rows(text: str) -> list[list[str]]:
    """The rows of all tables, without their headers."""
    lines = text.splitlines()
    is_row = [
        line.startswith("| ") and "| ---" not in line + below
        for line, below in zip(lines, [*lines[1:], ""], strict=True)
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in compress(lines, is_row)]


@pytest.mark.parametrize("name", RENDERERS)
def test_the_figures_of_a_committed_page_are_those_of_its_json(name: str) -> None:
    committed = (harness.HERE / f"{name}.md").read_text()
    rendered = table_rows(RENDERERS[name](json.loads((harness.HERE / f"{name}.json").read_text())))

    assert len(rendered) > 1
    assert [row for row in rendered if row not in table_rows(committed)] == []


def test_one_machine_fills_its_table_and_leaves_the_others(tmp_path: Path) -> None:
    def run(seconds: float) -> dict[str, Any]:
        return {"rows": 100, "seconds": [seconds, seconds], "accuracy": [0.5, 0.75], "bytes": 800 * MB}

    path = tmp_path / "page.md"
    rounds = [{"one": run(one), "two": run(two)} for one, two in [(10.0, 5.0), (8.0, 5.0), (20.0, 10.0)]]
    one_or_two_processes.put(path, "cpu", {"facts": {}, "rounds": rounds})
    assert "Empty until `make gpu-check`" in path.read_text()
    one_or_two_processes.put(path, "gpu", {"facts": {}, "rounds": [{"one GPU": run(0.5)}]})

    rows = {row[0]: row[1:] for row in table_rows(path.read_text())[:2]}
    assert rows == {
        "one": ["10.0", "10.0", "5.0 to 12.5", "1.00", "800"],
        "two": ["5.0", "20.0", "10.0 to 20.0", "2.00", "800"],
    }
    assert "Empty until" not in path.read_text()
    assert set(harness.read_results(path.with_suffix(".json"))) == {"cpu", "gpu"}
    assert path.with_suffix(".png").stat().st_size > 1000


def test_the_share_of_a_gpus_peak_counts_what_is_computed_of_real_tokens() -> None:
    from benchmarks import training_on_gpu, training_throughput  # Hugging Face's trainer takes seconds to import

    rows, length, width, blocks = 10, 50, 768, 6
    tokens, squares = rows * length, rows * length**2
    section = {"facts": {}, "rows": rows, "tokens": tokens, "squares": squares, "peak": 1e12}
    # Twelve matrices of (width, width) per token and block, and two products in attention; backward costs twice as
    # much as forward, and each multiplication comes with an addition.
    block = tokens * 12 * width**2 + 2 * squares * width
    # Ours computes keys and values alone for all tokens of the last block, and the rest for one token per row.
    last = tokens * 2 * width**2 + rows * 10 * width**2 + 2 * rows * length * width

    assert training_on_gpu.mfu(section, "trainer-grouped-bf16", 2.0) == pytest.approx(6 * blocks * block / 2e12)
    expected = 6 * ((blocks - 1) * block + last) / 2e12
    assert training_on_gpu.mfu(section, "ours-bf16", 2.0) == pytest.approx(expected)

    run = {"seconds": 2.0, "cells": tokens, "squares": squares, "loss": 1.0}
    rounds = [{"trainer-grouped-bf16": run | {"cells": 2 * tokens}, "ours-bf16": run | {"seconds": 1.0}}]
    page = training_throughput.page({training_on_gpu.SECTION: section | {"rounds": rounds}})
    trainer, ours = table_rows(page)
    assert trainer[1:5] == ["5", "5 to 5", "1.00", "50.0%"]
    assert ours[1:] == ["10", "10 to 10", "2.00", "0.0%", f"{2 * expected:.1%}", "1.000"]
    assert training_on_gpu.EMPTY not in page
    assert training_on_gpu.EMPTY in training_throughput.page({})


def test_rows_are_drawn_with_a_fixed_seed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    written = [["1", f"title {number}", 'with a "quote",\nand a line'] for number in range(20)]
    for name in ("train.csv", "test.csv"):
        with (source / name).open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(written)

    first, again = (one_or_two_processes.write_data(source, tmp_path / name, 5, 50) for name in ("first", "again"))

    assert (first / "train.csv").read_bytes() == (again / "train.csv").read_bytes()
    with (first / "train.csv").open(newline="") as file:
        drawn = list(csv.reader(file))
    assert len(drawn) == 5
    assert all(row in written for row in drawn)
    with pytest.raises(UserError, match=r"train\.csv cannot be read"):
        one_or_two_processes.write_data(tmp_path, tmp_path / "none", 5, 5)


def test_a_save_costs_its_copy_and_the_steps_that_it_slows() -> None:
    ranks = [
        {"blocked": [0.1, 0.3], "quiet": [1.0, 1.0], "disturbed": [1.5, 1.5, 1.5]},
        {"blocked": [0.2, 0.2], "quiet": [1.0, 1.0], "disturbed": [1.5, 1.5, 1.5]},
    ]
    assert slowest(ranks, "blocked") == [0.2, 0.3]
    assert cost_of_save(ranks) == pytest.approx(0.25 + 1.5 * 0.5)  # one and a half slowed steps per save


@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_parallelism_keeps_less_with_twice_the_calls(family: str) -> None:
    rows, length, width, size_of_float = 4, 16, 32, 4
    block = Block(family, small_config(family, dropout=0.1), rows, length)

    one, no_calls = count_kept(block, 1, sequence_parallel=False)
    whole, calls = count_kept(block, 2, sequence_parallel=False)
    cut, calls_cut = count_kept(block, 2, sequence_parallel=True)

    assert (no_calls, calls, calls_cut) == (0, 4, 8)
    # Without it a norm keeps its whole input, with it half; a block has two norms.
    assert whole - cut >= rows * length * width * size_of_float
    assert one / 2 < whole < one


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [["no/such/model"], []])
def test_a_model_that_cannot_be_served_ends_in_one_line(wrong: list[str], tmp_path: Path) -> None:
    done = run_python(["-m", "benchmarks.sizing", *wrong, "--output", tmp_path / "page.md"])
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "page.md").exists()


# Each benchmark of training runs, with the smallest sizes.


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "accuracy",
        "by_hand --cases CNN(width=32) --rounds 1 --steps 1",
        "imbalance --dataset sample --model tiny --rows 40 --seeds 1",
        "lora --dataset sample --model tiny --rows 60 --test_rows 40 --seeds 1",
        "long_documents --dataset sample --model tiny --rows 60 --tests 20 --epochs 1 --seeds 1",
        "one_or_two_processes --device cpu --data common/sample_news --rows 160 --test_rows 20 --epochs 1 --rounds 1",
        "scaling --processes 2 --strategies zero3 --steps 1 --rounds 1",
        "training_features async_saving --layouts 1x1 --rounds 1 --steps 1 --rows 1 --tokens 8",
        "training_features balance --rounds 1 --slowdowns 2 --epochs 2 --batch_size 16",
        "training_features compression --seeds 1 --kinds bf16 --epochs 1 --max_train_rows 64",
        "training_features observation_cost --rounds 1 --models tiny",
        "training_features restart --kills 1",
        "training_features sequence_parallel",
        "training_throughput --rows 64 --rounds 1 --layouts 1x1 --variants ours",
    ],
)
def test_a_benchmark_runs_and_writes_its_page(command: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = [sys.executable, "-m", *f"benchmarks.{command}".split(), "--output", str(page)]
    done = subprocess.run(words, cwd=harness.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = table_rows(page.read_text())
    assert rows
    assert not [row for row in rows if "nan" in " ".join(row)]


def test_the_page_of_budgets_says_what_was_used_chosen_and_expected() -> None:
    found = {
        "used": 0.971,
        "accuracy": 0.907,
        "tests": 7600,
        "epochs": 0.3,
        "expected": [0.885, 0.936],
        "max_length": "64",
        "learning_rate": "0.00045",
        "layer_decay": "1.0",
        "dropout": "0.0",
        "freeze": "none",
    }
    other = found | {"accuracy": 0.95, "used": 0.989}
    cases = ("starter ; 1m ; ", "starter ; 1m ; --dropout 0.1")
    run = {"facts": {}, "name": "ag_news", "rounds": [dict.fromkeys(cases, found), dict.fromkeys(cases, other)]}

    page = budget.STUDY.page(run)

    chosen = "max_length 64, learning_rate 0.00045, layer_decay 1.0, dropout 0.0, freeze none, 0.3 epochs"
    assert f"| `starter` | 1m | none | {chosen}" in page
    assert "| 98.0 (97.1 to 98.9) | 92.85 (90.70 to 95.00) | 88.5 to 93.6: 1 of 2 |" in page
    assert "| `--dropout 0.1` | max_length 64, learning_rate 0.00045, layer_decay 1.0, freeze none" in page


def test_the_page_of_accuracy_says_what_trained_a_model_and_the_encoder_that_it_began_with(tmp_path: Path) -> None:
    metrics = {"base_model": str(tmp_path / "adapted"), "best_epoch": 2, "train_rows": 90, "test": {"rows": 10}}
    for name, flags in (("adapted", {"task": "masked_lm", "budget": "40m"}), ("model", {"seed": 3})):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.run").mkdir()
        config = TrainConfig(output_dir=tmp_path / name, **flags)
        (tmp_path / f"{name}.run" / "config.yaml").write_text(config.to_yaml())
    (tmp_path / "model" / "metrics.json").write_text(json.dumps(metrics))

    entry = accuracy.read_model(tmp_path / "model")

    entries = [replace(entry, test={"accuracy": share}) for share in (0.9, 0.94)]
    assert accuracy.means(entries) == "\nThe mean of 2 models from adapted is 92.00% (90.00% to 94.00%).\n"
    assert accuracy.means(entries[:1]) == ""
    student = replace(entry, test={"accuracy": 0.5}, command=f"{entry.command} --distill teacher")
    assert "0.5" not in accuracy.means([*entries, student])
    assert "2 students from adapted is 50.00%" in accuracy.means([*entries, student, student])
    assert entry.name == "model: adapted, epoch 2"
    assert entry.command == "training/run_ddp.sh --seed 3"
    assert entry.encoder[0] == "adapted"
    assert "--task masked_lm" in entry.encoder[1]
    assert "--budget 40m" in entry.encoder[1]


def test_a_missing_onnxruntime_web_is_named_with_the_command_that_brings_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no onnxruntime-web; npm install onnxruntime-web") as refused:
        browser.write_site(tmp_path / "site", tmp_path / "model", tmp_path / "node_modules")
    assert refused.value.code == "benchmark-input"


def test_a_row_compares_within_rounds() -> None:
    found = {name: [10.0, 40.0] for name in browser.CASES} | {browser.ORT: [30.0, 80.0]}
    row = next(line for line in browser.pass_table(found).splitlines() if line.startswith(f"| {browser.OURS} |"))
    assert row == f"| {browser.OURS} | 25.0 (10.0 to 40.0) | 2.50 | 1.00 | 1.00 |"


def test_the_first_answer_counts_code_and_model_apart() -> None:
    start = {"seconds": 0.5, "code": 100_000, "model": 24_500_000}
    assert f"| {browser.OURS} | 0.50 (0.50 to 0.50) | 100 | 24.5 |" in browser.start_table({browser.OURS: [start] * 2})


def test_a_number_of_random_texts_is_read_off_the_measured_ones() -> None:
    means = {0: 80.0, 500: 82.0, 1000: 81.9, 2000: 84.0}  # the third is noise

    assert review.worth(means, 81.0) == 250
    assert review.worth(means, 83.0) == 1500
    assert review.worth(means, 84.1) is None
