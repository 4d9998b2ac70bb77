"""How many seconds until so much accuracy? Ours beside a linear model, static embeddings, Trainer and SetFit.

Every line is a new process, timed from its start until it has answered all test rows, on the same machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.training_run import run_program, train_as_a_user
from common.errors import UserError
from common.files import write_json
from common.hardware import usable_cpus
from common.text import clean_text
from training.data.dataset import load_news
from training.evaluation.baseline import fit_linear

MODULE = "benchmarks.time_to_accuracy"
GOALS = (0.90, 0.92, 0.93)
PACKAGES = (*harness.PACKAGES, "scikit-learn", "setfit", "model2vec")
INTRODUCTION = """
*Seconds* count from the start of a process until it has answered all {tests:,} test rows of {name}. Rounds: {rounds},
with the variants in alternating order; each seed uses different rows in a different order. `ours` is
`training/run_ddp.sh {cores} --budget TIME`; the linear model is TF-IDF of words and word pairs with a linear SVM;
`Trainer` is `transformers.Trainer` at its defaults (batches of 8 rows, learning rate 5e-5, one process on all cores),
except that it trains for one epoch, and in bf16 if the processor is faster with it. From its second run
with a model on, `ours` finds the tokens of the rows in its cache, which spares it about 5 s. {setfit} {static}
"""


def main() -> None:
    options = _parse()
    run: dict[str, Any] = {"facts": harness.measurement_facts(MODULE, PACKAGES), "rounds": []}
    data = load_news(options.dataset)
    run |= {"name": Path(options.dataset).name, "tests": len(data.test)}
    run["facts"]["Data"] = harness.rows_of(run["name"], len(data.train), len(data.test))
    cases: dict[str, Sequence[str]] = {f"linear, {rows} rows": ("linear", rows) for rows in options.linear}
    for budget in options.budgets:
        model, _, time_ = budget.rpartition(":")
        cases[f"ours, {Path(model).name}, --budget {time_}"] = ("ours", model, time_)
    for rows in options.trainer:
        cases[f"Trainer, {options.encoder.name}, {rows} rows"] = ("trainer", rows)
    for rows in options.static:
        cases[f"static, {options.encoder.name}, {rows} rows"] = ("static", rows)
    if options.setfit:
        cases[f"SetFit, {options.encoder.name}, 16 rows per label"] = ("setfit", "16")

    def measure(case: Sequence[str], seed: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="time-") as folder:
            return _measure(case, seed, Path(folder), options)

    def describe(one: Mapping[str, float]) -> str:
        return f"{one['seconds']:.0f} s, {one['accuracy']:.4f}"

    for found in harness.run_rounds(cases, options.rounds, measure, describe):
        run["rounds"].append(found)
        harness.write_page(options.output, render(run), run)


def _measure(case: Sequence[str], seed: int, folder: Path, options: Namespace) -> dict[str, float]:
    kind, *rest = case
    if kind == "ours":
        model, budget = rest
        flags = ("--dataset", options.dataset, "--model", model, "--budget", budget, "--seed", str(seed))
        seconds, metrics, _ = train_as_a_user(flags, folder / "model")
        return {"seconds": seconds, "accuracy": metrics["test"]["accuracy"]}
    command = [sys.executable, "-m", MODULE, "--one", kind, *rest, str(seed), str(folder / "result.json")]
    began = time.monotonic()
    run_program([*command, "--dataset", options.dataset, "--encoder", str(options.encoder)])
    seconds = time.monotonic() - began
    return {"seconds": seconds} | json.loads((folder / "result.json").read_text(encoding="utf-8"))


def run_one(options: Namespace) -> None:
    """One of the others, in a process of its own."""
    kind, size, seed, file = options.one
    data = load_news(options.dataset)
    labels = data.train.labels
    generator = np.random.default_rng(int(seed))
    order = generator.permutation(len(labels))
    if kind == "setfit":
        rows = np.concatenate([order[labels[order] == label][: int(size)] for label in np.unique(labels)])
    else:
        rows = order if size == "all" else order[: int(size)]
    texts = [data.train.texts[i] for i in rows]
    answer = {"linear": _linear, "trainer": _trainer, "setfit": _setfit, "static": _static}[kind]
    predicted = answer(texts, labels[rows], data.test.texts, options, int(seed))
    write_json(Path(file), {"accuracy": float((predicted == data.test.labels).mean())})


def _linear(
    texts: Sequence[str], labels: np.ndarray, tests: Sequence[str], options: Namespace, seed: int
) -> np.ndarray:
    answer = fit_linear([clean_text(text) for text in texts], labels, int(labels.max()) + 1, seed)
    return answer([clean_text(text) for text in tests]).argmax(axis=1)


def _trainer(
    texts: Sequence[str], labels: np.ndarray, tests: Sequence[str], options: Namespace, seed: int
) -> np.ndarray:
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    from training.model.precision import cpu_gains_by_bf16

    tokenizer = AutoTokenizer.from_pretrained(options.encoder)

    def rows(texts: Sequence[str], labels: Sequence[int]) -> list[dict[str, Any]]:
        ids = tokenizer(list(texts), truncation=True, max_length=128)["input_ids"]
        return [{"input_ids": one, "labels": int(label)} for one, label in zip(ids, labels, strict=True)]

    network = AutoModelForSequenceClassification.from_pretrained(options.encoder, num_labels=int(labels.max()) + 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=1,
            seed=seed,
            bf16=cpu_gains_by_bf16(),
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            per_device_eval_batch_size=64,
        )
        trainer = Trainer(network, arguments, DataCollatorWithPadding(tokenizer), rows(texts, labels))
        trainer.train()
        return trainer.predict(rows(tests, [0] * len(tests))).predictions.argmax(axis=1)


def _setfit(
    texts: Sequence[str], labels: np.ndarray, tests: Sequence[str], options: Namespace, seed: int
) -> np.ndarray:
    try:
        from datasets import Dataset
        from setfit import SetFitModel, Trainer, TrainingArguments
    except ImportError as error:
        raise UserError(
            "setfit is missing: pip install setfit, or leave out --setfit", code="package-missing"
        ) from error
    model = SetFitModel.from_pretrained(str(options.encoder))
    rows = Dataset.from_dict({"text": list(texts), "label": labels.tolist()})
    Trainer(model=model, args=TrainingArguments(seed=seed, report_to="none"), train_dataset=rows).train()
    return np.asarray(model.predict(list(tests)))


def _static(
    texts: Sequence[str], labels: np.ndarray, tests: Sequence[str], options: Namespace, seed: int
) -> np.ndarray:
    try:
        from model2vec.distill import distill
        from model2vec.train import StaticModelForClassification
    except ImportError as error:
        raise UserError(
            'model2vec is missing: pip install "model2vec[distill,train]", or leave out --static',
            code="package-missing",
        ) from error
    model = StaticModelForClassification.from_static_model(model=distill(str(options.encoder)))
    model.fit(list(texts), [str(label) for label in labels], random_seed=seed)
    return np.asarray(model.predict(list(tests))).astype(np.int64)


def render(run: dict[str, Any]) -> str:
    """The page of a run."""
    cases = list(run["rounds"][0])

    def middle(case: str, key: str) -> float:
        return median(found[case][key] for found in run["rounds"])

    def accuracy(case: str) -> str:
        return harness.median_and_spread([100 * found[case]["accuracy"] for found in run["rounds"]], 2)

    columns = {
        "run": lambda case: case,
        "seconds": lambda case: harness.median_and_spread([found[case]["seconds"] for found in run["rounds"]], 0),
        "accuracy, %": accuracy,
    }
    has_setfit = any(case.startswith("SetFit") for case in cases)
    setfit = "SetFit trains on 16 rows per label, its usual case." if has_setfit else "SetFit was not measured."
    static = "Static embeddings (`model2vec`) were not measured."
    if any(case.startswith("static") for case in cases):
        static = (
            "`static` is `model2vec` at its defaults: embeddings that it distills from the encoder, and its classifier."
        )
    text = INTRODUCTION.format(
        static=static,
        setfit=setfit,
        tests=run["tests"],
        name=run["name"],
        rounds=len(run["rounds"]),
        cores=usable_cpus(),
    )
    page = harness.introduction(MODULE, "Time to accuracy", text)
    page += harness.table(columns, sorted(cases, key=lambda case: middle(case, "seconds")))
    kinds = list(dict.fromkeys(case.split(", ")[0] for case in cases))
    page += "\nThe fastest run of each kind whose median reaches the accuracy:\n\n"

    def fastest(kind: str, goal: float) -> str:
        reached = [case for case in cases if case.split(", ")[0] == kind and middle(case, "accuracy") >= goal]
        best = min(reached, key=lambda case: middle(case, "seconds"), default=None)
        return "not reached" if best is None else f"{middle(best, 'seconds'):,.0f} s"

    header = ["kind", *(f"{goal:.0%}" for goal in GOALS)]
    page += harness.markdown_table(header, [[kind, *(fastest(kind, goal) for goal in GOALS)] for kind in kinds])
    return f"{page}\n{harness.fact_list(run['facts'])}"


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="time_to_accuracy.md", rounds=3)
    parser.add_argument("--dataset", default=str(harness.ROOT / "data" / "ag_news"), help="as for training")
    parser.add_argument("--encoder", type=Path, default=Path("checkpoints/minilm"), help="that the others fine-tune")
    parser.add_argument("--linear", nargs="*", default=["5000", "20000", "all"], help="rows for the linear model")
    parser.add_argument(
        "--budgets",
        nargs="*",
        default=["starter:30s", "starter:1m", "starter:2m", "starter:4m"],
        help="MODEL:TIME of our runs",
    )
    parser.add_argument("--trainer", nargs="*", default=["8000", "32000"], help="rows for transformers' Trainer")
    parser.add_argument("--static", nargs="*", default=[], help="rows for model2vec, which must be installed")
    parser.add_argument("--setfit", action="store_true", help="measure SetFit too, which must be installed")
    parser.add_argument("--one", nargs=4, help=SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(lambda: run_one(_parse()) if "--one" in sys.argv else main())
