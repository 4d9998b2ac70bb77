"""What do the defaults reach, on data sets of other kinds and with few rows, beside what takes
seconds?

Every run is a command without any flag but data and encoder. Results are kept beside the page, and
what is there is not measured again.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.metrics import accuracy_score, f1_score, r2_score

from benchmarks import harness
from benchmarks.training_run import run_program
from common.errors import positive
from common.rows import Columns
from common.text import cleaner
from training.config import STARTER, model_place
from training.data.dataset import LoadOptions, TextData, default_cleaning, load_data
from training.quiet import quiet_libraries
from training.tasks import TASKS

MODULE = "benchmarks.recipe"
ALL, NAMES, TEXTS = "all", "names", "names+texts"
WITHOUT_ROWS = (NAMES, TEXTS)
TIE = 0.005
METRIC_OF = {"classification": "accuracy", "multi_label": "micro_f1", "regression": "r2"}
SCORE_OF: dict[str, Callable[..., float]] = {
    "classification": accuracy_score,
    "multi_label": partial(f1_score, average="micro"),
    "regression": r2_score,
}
PACKAGES = ("torch", "transformers", "scikit-learn")
INTRODUCTION = """
`python -m training.train_single --dataset ROWS --model ENCODER`, without another flag that decides anything, on so many
rows per label drawn with the seed, or on all rows; always tested on all test rows of the data. *defaults*: what the
model that the run writes achieves, mean over the seeds (lowest to highest): accuracy, or with several labels per text
micro F1, in percent; of numbers, R² times 100. *words*: TF-IDF of words and pairs with a linear model, on the same
rows, as the run reports it. *frozen*: logistic regression (scikit-learn, C = 10; one per label if a text may have
several; ridge regression for numbers) on the encoder's vectors as they were before training, of length 1, the better of
the mean of all tokens and the first one; of a pair, both vectors, the difference and the product. *seconds*: of the
whole command, from start to the model folder with its test and report, median; they depend on the machine, which the
last column refers to, and are upper limits, as most were measured while it did other work too.

*names*: no rows, only the names of the labels (`--labels NAMES`); *names+texts*: the same, and the texts of all
training rows without their labels (`--unlabelled TEXTS`). Both are tested by `python -m training.evaluate`.
"""


def main() -> None:
    options = _parse()
    quiet_libraries()
    run = harness.read_results(options.output.with_suffix(".json")) or {
        "measurements": [],
        "results": {},
    }
    facts = harness.measurement_facts(MODULE, PACKAGES)
    with tempfile.TemporaryDirectory(prefix="recipe-") as name:
        for place in options.dataset:
            asked = LoadOptions(columns=_columns(options), task=TASKS[options.task])
            data = load_data(str(place), asked)
            for per_label in options.per_label:
                for seed in range(options.seeds):
                    measure_all(options, run, facts, data, per_label, seed, Path(name))
                    harness.write_page(options.output, render(run), run)


def measure_all(
    options: Namespace,
    run: dict[str, Any],
    facts: dict[str, str],
    data: TextData,
    per_label: str,
    seed: int,
    folder: Path,
) -> None:
    """Draw the rows, and measure every encoder that has not been."""
    case = f"{Path(data.name).name} / {per_label}"
    rows = folder / f"{case.replace(' / ', '-')}-{seed}"
    wanted = [
        model
        for model in options.model
        if f"{case} / {Path(model).name} / {seed}" not in run["results"]
    ]
    if wanted and not rows.exists():
        write_rows(data, per_label, seed, rows)
    for model in wanted:
        clean = default_cleaning(data.name, data.label_names)
        if per_label in WITHOUT_ROWS:
            found = from_names(rows, model, seed, clean, with_texts=per_label != NAMES)
        else:
            found = train(options, rows, model, seed, clean)
            found["frozen"] = frozen(data, options, draw(data, per_label, seed), model, clean)
        # Only now: a command that finds nothing to measure leaves no trace.
        if run["measurements"][-1:] != [facts]:
            run["measurements"].append(facts)
        found["measurement"] = len(run["measurements"])
        run["results"][f"{case} / {Path(model).name} / {seed}"] = found
        harness.report(f"{case}, {model}, seed {seed}: {found}")


def draw(data: TextData, per_label: str, seed: int) -> np.ndarray:
    """The training rows of a run."""
    labels = data.train.labels
    if not per_label.isdigit():
        return np.arange(len(labels))
    generator = np.random.default_rng(seed)
    chosen = [
        generator.permutation(np.flatnonzero(labels == label))[: int(per_label)]
        for label in np.unique(labels)
    ]
    # In the order of the data again: the trainer shuffles by its own seed.
    return np.sort(np.concatenate(chosen))


def write_rows(data: TextData, per_label: str, seed: int, folder: Path) -> None:
    """Write the drawn training rows, and all others, where training reads them."""
    folder.mkdir()
    splits = data.splits | {"train": data.train.take(draw(data, per_label, seed))}
    for name, rows in splits.items():
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for text, target in zip(rows.texts, rows.labels, strict=True):
                texts = (
                    {"text": text}
                    if isinstance(text, str)
                    else dict(zip(("text", "text_pair"), text, strict=True))
                )
                file.write(json.dumps(texts | {"label": _label(data.label_names, target)}) + "\n")
    (folder / "names.txt").write_text("\n".join(data.label_names), encoding="utf-8")


def _label(names: list[str], target: np.ndarray) -> str | list[str] | float:
    if target.ndim:
        return [names[label] for label in np.flatnonzero(target)]
    return float(target) if target.dtype.kind == "f" else names[target]


def common_flags(model: str, seed: int, clean: str) -> list[str]:
    # The rows are written as a folder of their own, so the trainer no longer sees by the data's
    # name that they are news, which it would clean.
    cleaning = ["--clean", clean] if clean != "none" else []
    return ["--model", model, "--seed", str(seed), *cleaning]


def train(options: Namespace, rows: Path, model: str, seed: int, clean: str) -> dict[str, float]:
    """Train at the defaults; figures of the model and of its linear baseline, and the seconds of the command."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=rows.parent) as place:
        output = Path(place) / "model"
        flags = ["--dataset", str(rows), "--task", options.task, *common_flags(model, seed, clean)]
        flags += ["--cache_dir", place, "--output_dir", str(output)]
        flags += ["--pair_column", "text_pair"] if options.pair_column else []
        began = time.monotonic()
        run_program([sys.executable, "-m", "training.train_single", *flags])
        seconds = time.monotonic() - began
        metrics = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    name = METRIC_OF[options.task]
    words = metrics["baseline"]["test"][name]
    return {"defaults": metrics["test"][name], "words": words, "seconds": seconds}


def from_names(
    rows: Path, model: str, seed: int, clean: str, *, with_texts: bool
) -> dict[str, float]:
    """Make a model from the names of the labels, and test it on rows that it knows nothing of."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=rows.parent) as place:
        output = Path(place) / "model"
        flags = ["--labels", str(rows / "names.txt"), *common_flags(model, seed, clean)]
        flags += ["--cache_dir", place, "--output_dir", str(output)]
        flags += ["--unlabelled", str(rows / "train.jsonl")] if with_texts else []
        began = time.monotonic()
        run_program([sys.executable, "-m", "training.train_single", *flags])
        seconds = time.monotonic() - began
        test = ["--dataset", str(rows), "--json"]
        told = run_program([sys.executable, "-m", "training.evaluate", str(output), *test])
    return {"defaults": json.loads(told[told.index("{") :])["accuracy"], "seconds": seconds}


# They take longer to read than few training rows.
of_test_rows: dict[tuple[str, str], tuple[np.ndarray, ...]] = {}


def frozen(data: TextData, options: Namespace, chosen: np.ndarray, model: str, clean: str) -> float:
    """What a linear model makes of the vectors of the untrained encoder."""
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    fit: Any = LogisticRegression(C=10, max_iter=1000)
    if options.task == "multi_label":
        fit = OneVsRestClassifier(fit)
    elif options.task == "regression":
        fit = Ridge(alpha=0.1)
    rows = data.train.take(chosen)
    # Both poolings are read in one pass, and the better one counts: which one an encoder was
    # trained for is not written anywhere, and the baseline must not lose by a wrong guess.
    train = read(model, rows.texts, clean)
    test = of_test_rows.get((data.name, model)) or read(model, data.test.texts, clean)
    of_test_rows[data.name, model] = test
    return max(
        float(
            SCORE_OF[options.task](
                data.test.labels, fit.fit(of_train, rows.labels).predict(of_test)
            )
        )
        for of_train, of_test in zip(train, test, strict=True)
    )


def read(model: str, texts: Sequence[Any], clean: str) -> tuple[np.ndarray, ...]:
    """Vectors of the mean of all tokens and of the first one: (texts, width) each."""
    if isinstance(texts[0], str):
        return read_texts(model, texts, clean)
    first, second = (read_texts(model, side, clean) for side in zip(*texts, strict=True))
    # A linear model cannot compare two vectors by itself: difference and product let it (InferSent,
    # Conneau et al., 2017).
    return tuple(
        np.column_stack([a, b, abs(a - b), a * b]) for a, b in zip(first, second, strict=True)
    )


@torch.inference_mode()
def read_texts(model: str, texts: Sequence[Any], clean: str) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of the mean of all tokens and of the first one: (texts, width) each."""
    from transformers import AutoModel, AutoTokenizer

    place = model_place(model)
    network, tokenizer = (
        AutoModel.from_pretrained(place).float().eval(),
        AutoTokenizer.from_pretrained(place),
    )
    cleaned = list(map(cleaner(clean), texts))
    # Texts of like length share a batch, so that little of it is padding.
    order = sorted(range(len(cleaned)), key=lambda i: len(cleaned[i]))
    found = np.zeros((2, len(cleaned), network.config.hidden_size), np.float32)
    for start in range(0, len(order), 64):
        batch = order[start : start + 64]
        given = tokenizer(
            [cleaned[i] for i in batch],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        )
        mask = given["attention_mask"]
        states = network(input_ids=given["input_ids"], attention_mask=mask).last_hidden_state
        found[0, batch] = torch.nn.functional.normalize(
            (states * mask[..., None]).sum(1), dim=1
        ).numpy()
        found[1, batch] = torch.nn.functional.normalize(states[:, 0], dim=1).numpy()
    return found[0], found[1]


def render(run: dict[str, Any]) -> str:
    """The page of a run."""
    cases = sorted({key.rpartition(" / ")[0] for key in run["results"]}, key=_place)

    def values(case: str, name: str) -> list[float]:
        return [
            found.get(name, 0)
            for key, found in run["results"].items()
            if key.rpartition(" / ")[0] == case
        ]

    def share(name: str) -> Callable[[str], str]:
        def cell(case: str) -> str:
            # Cases without rows have no baseline; their missing figures are zeros here and are left
            # out.
            found = [100 * value for value in values(case, name) if value]
            if not found:
                return harness.NONE
            return f"{mean(found):.1f}" + (f" ({harness.spread(found)})" if len(found) > 1 else "")

        return cell

    def verdict(model: str) -> str:
        """Of the cases of an encoder, where its defaults are at least as good as each of the others."""
        said = []
        for name in ("words", "frozen"):
            both = {
                case: (mean(values(case, "defaults")), mean(values(case, name)))
                for case in cases
                # Only where both were measured with every seed: a mean over other seeds would
                # compare other rows.
                if case.split(" / ")[2] == model and all(values(case, name))
            }
            behind = [
                case.rpartition(" / ")[0]
                for case, (own, other) in both.items()
                if own < other - TIE
            ]
            but = f" (not {', '.join(behind)})" if behind else ""
            said.append(f"*{name}* in {len(both) - len(behind)} of {len(both)} cases{but}")
        return (
            f"- `{model}`: its defaults reach, within {100 * TIE:g} points, {' and '.join(said)}.\n"
        )

    columns: dict[str, Callable[[str], str]] = {
        "data": lambda case: case.split(" / ")[0],
        "rows per label": lambda case: case.split(" / ")[1],
        "encoder": lambda case: f"`{case.split(' / ')[2]}`",
        "seeds": lambda case: str(len(values(case, "defaults"))),
        "defaults": share("defaults"),
        "words": share("words"),
        "frozen": share("frozen"),
        "seconds": lambda case: harness.median_and_spread(values(case, "seconds"), 0),
        "measurement": lambda case: ", ".join(map(str, sorted(set(values(case, "measurement"))))),
    }
    page = harness.introduction(MODULE, "What the defaults reach", INTRODUCTION)
    found = "".join(map(verdict, dict.fromkeys(case.split(" / ")[2] for case in cases)))
    facts = "".join(
        f"\nMeasurement {number}:\n\n{harness.fact_list(facts)}"
        for number, facts in enumerate(run["measurements"], 1)
    )
    return f"{page}{harness.table(columns, cases)}\n{found}{facts}"


def _place(case: str) -> tuple[str, str, float]:
    """By data set and encoder, from no rows to all."""
    data, rows, model = case.split(" / ")
    number = float(rows) if rows.isdigit() else {NAMES: 0.0, TEXTS: 0.5, ALL: math.inf}[rows]
    return data, model, number


def _columns(options: Namespace) -> Columns:
    return Columns(label=options.label_column, pair=options.pair_column)


def _rows_per_label(text: str) -> str:
    return text if text in (*WITHOUT_ROWS, ALL) else str(positive(text))


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="recipe.md")
    add = parser.add_argument
    add("--dataset", nargs="+", required=True, help="folders with train and test rows")
    add("--model", nargs="+", default=[STARTER], help="encoders (default: starter)")
    add(
        "--per_label",
        type=_rows_per_label,
        nargs="+",
        default=["8", "16", "64"],
        help=f"rows, {ALL}, {NAMES} or {TEXTS} (default: 8 16 64)",
    )
    add("--task", choices=METRIC_OF, default="classification", help="as for training")
    add("--label_column", default="label", help="column with the label (default: label)")
    add("--pair_column", default="", help="column with a second text")
    add("--seeds", type=positive, default=3, help="how many draws (default: 3)")
    options = parser.parse_args()
    if options.task != "classification" and options.per_label != [ALL]:
        parser.error(f"--task {options.task}: rows are drawn by label, so give --per_label {ALL}")
    return options


if __name__ == "__main__":
    harness.run_benchmark(main)
