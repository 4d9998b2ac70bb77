"""How many seconds until so much accuracy? Ours beside a linear model, static embeddings, Trainer
and SetFit.

Every line is a new process, timed from its start until it has answered all test rows, on the same
machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import harness, studies
from benchmarks.studies import Figures, Flags, Row, Run, Trial
from benchmarks.training_run import run_program, train_as_a_user
from common.errors import UserError
from common.files import write_json
from common.text import clean_text
from training.data.dataset import load_data
from training.evaluation.baseline import fit_linear

GOALS = (0.90, 0.92, 0.93)
INTRODUCTION = """
*Seconds* count from the start of a process until it has answered all {tests:,} test rows of {name}. Rounds: {seeds},
with the variants in alternating order; each seed uses different rows in a different order. `ours` is
`training/run_ddp.sh {processes} --budget TIME`; the linear model is TF-IDF of words and word pairs with a linear SVM;
`Trainer` is `transformers.Trainer` at its defaults (batches of 8 rows, learning rate 5e-5, one process on all cores),
except that it trains for one epoch, and in bf16 if the processor is faster with it. From its second run
with a model on, `ours` finds the tokens of the rows in its cache, which spares it about 5 s. {setfit} {static}
"""


def variants(options: Namespace) -> dict[str, Flags]:
    cases: dict[str, Flags] = {f"linear, {rows} rows": ("linear", rows) for rows in options.linear}
    for budget in options.budgets:
        model, _, time_ = budget.rpartition(":")
        cases[f"ours, {Path(model).name}, --budget {time_}"] = ("ours", model, time_)
    for rows in options.trainer:
        cases[f"Trainer, {options.encoder.name}, {rows} rows"] = ("trainer", rows)
    for rows in options.static:
        cases[f"static, {options.encoder.name}, {rows} rows"] = ("static", rows)
    if options.setfit:
        cases[f"SetFit, {options.encoder.name}, 16 rows per label"] = ("setfit", "16")
    return cases


def measure(trial: Trial) -> Figures:
    options, seed, (kind, *rest) = trial.options, str(trial.seed), trial.flags
    if kind == "ours":
        model, budget = rest
        flags = ("--dataset", options.dataset, "--model", model, "--budget", budget, "--seed", seed)
        seconds, metrics, _ = train_as_a_user(flags, trial.output)
        return {"seconds": seconds, "accuracy": metrics["test"]["accuracy"]}
    # The others get what ours has: a new process, whose start and imports count. Measured in this
    # one, they would find their libraries imported.
    result = trial.output.with_suffix(".json")
    command = [sys.executable, "-m", STUDY.module, "--one", kind, *rest, seed, str(result)]
    began = time.monotonic()
    run_program([*command, "--dataset", options.dataset, "--encoder", str(options.encoder)])
    seconds = time.monotonic() - began
    return {"seconds": seconds} | json.loads(result.read_text(encoding="utf-8"))


def run_one(options: Namespace) -> None:
    """One of the others, in a process of its own."""
    kind, size, seed, file = options.one
    data = load_data(options.dataset)
    labels = data.train.labels
    generator = np.random.default_rng(int(seed))
    # All kinds take the beginning of one order, so that fewer rows are among the more rows.
    order = generator.permutation(len(labels))
    if kind == "setfit":
        rows = np.concatenate(
            [order[labels[order] == label][: int(size)] for label in np.unique(labels)]
        )
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
        return [
            {"input_ids": one, "labels": int(label)} for one, label in zip(ids, labels, strict=True)
        ]

    network = AutoModelForSequenceClassification.from_pretrained(
        options.encoder, num_labels=int(labels.max()) + 1
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=1,
            seed=seed,
            # As ours does by default: the comparison is of recipes and not of number formats.
            bf16=cpu_gains_by_bf16(),
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            per_device_eval_batch_size=64,
        )
        trainer = Trainer(
            network, arguments, DataCollatorWithPadding(tokenizer), rows(texts, labels)
        )
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
    Trainer(
        model=model, args=TrainingArguments(seed=seed, report_to="none"), train_dataset=rows
    ).train()
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


def middle(run: Run, case: str, key: str) -> float:
    return median(Row(case, run).values(key))


def words(run: Run) -> dict[str, str]:
    kinds = {case.split(", ")[0] for case in run["rounds"][0]}
    setfit, static = (
        "SetFit was not measured.",
        "Static embeddings (`model2vec`) were not measured.",
    )
    if "SetFit" in kinds:
        setfit = "SetFit trains on 16 rows per label, its usual case."
    if "static" in kinds:
        static = (
            "`static` is `model2vec` at its defaults: embeddings that it distills from the "
            "encoder, and its classifier."
        )
    return {"setfit": setfit, "static": static}


def fastest(run: Run) -> str:
    """The table of goals."""
    cases = run["rounds"][0]

    def seconds(kind: str, goal: float) -> str:
        of_kind = [
            case
            for case in cases
            # The median has to reach the goal: the best of several rounds would reward luck.
            if case.split(", ")[0] == kind and middle(run, case, "accuracy") >= goal
        ]
        best = min((middle(run, case, "seconds") for case in of_kind), default=None)
        return "not reached" if best is None else f"{best:,.0f} s"

    kinds = dict.fromkeys(case.split(", ")[0] for case in cases)
    header = ["kind", *(f"{goal:.0%}" for goal in GOALS)]
    table = harness.markdown_table(
        header, [[kind, *(seconds(kind, goal) for goal in GOALS)] for kind in kinds]
    )
    return f"\nThe fastest run of each kind whose median reaches the accuracy:\n\n{table}"


BUDGETS = ["starter:30s", "starter:1m", "starter:2m", "starter:4m"]
STUDY = studies.Study(
    "time_to_accuracy",
    __doc__,
    "Time to accuracy",
    INTRODUCTION,
    variants=variants,
    measure=measure,
    flags={
        "dataset": studies.dataset(),
        "encoder": {
            "type": Path,
            "default": Path("checkpoints/minilm"),
            "help": "that the others fine-tune",
        },
        "linear": {
            "nargs": "*",
            "default": ["5000", "20000", "all"],
            "help": "rows for the linear model",
        },
        "budgets": {"nargs": "*", "default": BUDGETS, "help": "MODEL:TIME of our runs"},
        "trainer": {
            "nargs": "*",
            "default": ["8000", "32000"],
            "help": "rows for transformers' Trainer",
        },
        "static": {
            "nargs": "*",
            "default": [],
            "help": "rows for model2vec, which must be installed",
        },
        "setfit": {"action": "store_true", "help": "measure SetFit too, which must be installed"},
        "one": {"nargs": 4, "help": SUPPRESS},
    },
    seeds=0,
    rounds=3,
    words=words,
    order=lambda run: sorted(run["rounds"][0], key=lambda case: middle(run, case, "seconds")),
    columns={
        "run": studies.row_name,
        "seconds": studies.median_seconds,
        "accuracy, %": lambda row: harness.median_and_spread(row.percent("accuracy"), 2),
    },
    goals=fastest,
    packages=(*harness.PACKAGES, "scikit-learn", "setfit", "model2vec"),
)

if __name__ == "__main__":
    # With --one, this module is the process of another recipe that `measure` has started.
    harness.run_benchmark(lambda: run_one(STUDY.parse()) if "--one" in sys.argv else STUDY.main())
