"""How often does the verdict on a new model err, and what do wrong reviews cost?

The first two parts use the product's own comparison, on simulated answers and on the answers of a
real model, of which some are changed. The last part trains heads. Parts that are not measured again
keep what the page has of them.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from benchmarks.harness import Goal
from common.errors import positive
from common.rows import AG_NEWS_LABELS, LabelledRows, read_labelled_rows
from common.text import TextTokenizer
from inference.engines.model_loader import ModelLoader
from loop.comparison import HOLD, PROMOTE, REJECT, Answers, compare
from training.data.tokenized import TokenizedRows
from training.model.classifier import Loading, NewsClassifier
from training.model.layers import FAMILY_OF
from training.model.pooling import MEAN
from training.run.fitted_head import FittedHead, fit_head, read_rows

MODULE = "benchmarks.verdict"
PACKAGES = ("numpy", "torch", "transformers")
ROWS = 3_100
# Rows, and the shares of them that are lost and gained.
CASES = {
    "1 point worse": (ROWS, 0.03, 0.02),
    "0.3 points worse, the margin": (ROWS, 0.0265, 0.0235),
    "equal": (ROWS, 0.025, 0.025),
    "equal, 1% differ": (ROWS, 0.005, 0.005),
    "2 points better": (ROWS, 0.015, 0.035),
}
WORSE, EQUAL, BETTER = "1 point worse", "equal", "2 points better"
REAL = {name: CASES[name] for name in (WORSE, EQUAL, BETTER)}
OLD_ROWS, REVIEWED, WRONG_SHARE, POOL, TEST_ROWS = 2_000, 500, 0.05, 2_800, 1_000
MAX_LENGTH = 64
INTRODUCTION = """
A new model is compared with the old one on rows that neither has seen (`python -m loop.verdict`). It is promoted if it
is certainly not 0.3 points less accurate, no class loses, and few rows become wrong; rejected if it, or a class, is
worse beyond chance; otherwise it is held, and the verdict says how many rows would probably decide.
"""
SIMULATED = """
## Simulated models

{trials} comparisons of each kind. Unless a line says otherwise, 5% of the rows are right for one of the two only.
*Better*: promoted, and called better beyond chance. All figures are shares of the comparisons.
"""
ANSWERED = """
## A real model, and itself with changed answers

The same on the answers of `{model}` to {texts:,} test rows of AG News. Each of {trials} comparisons draws {rows:,} of
them, and changes as many answers at random as the name says: right ones become wrong, and wrong ones right.
"""
FEEDBACK = """
## Reviews that are wrong on purpose

A head on MiniLM learns from {old:,} rows of AG News, from these and {reviewed} reviewed ones, and from the same with
{share:.0%} of the reviewed labels replaced by a wrong one. Accuracy on {tests:,} test rows; a round draws other rows.
"""
GOALS = "\n## Goals\n\n"
Results = Iterator[dict[str, Any]]


def main() -> None:
    options = _parse()
    harness.measure_parts(
        options,
        PARTS,
        MODULE,
        PACKAGES,
        lambda results: harness.write_page(options.output, render(results), results),
    )


# ---------------------------------------------------------------- comparisons


def _simulated(options: Namespace) -> Results:
    draw = np.random.default_rng(0)
    found = []
    for name, (rows, lost, gained) in CASES.items():
        counts: Counter[str] = Counter()
        for _ in range(options.trials):
            # Both are sure of an answer as it deserves.
            confidence = draw.uniform(0.8, 1.0, rows)
            old = draw.random(rows) < confidence
            counts[_verdict(old, confidence, lost, gained, draw.integers(4, size=rows), draw)] += 1
        found.append(_shares(name, rows, counts, options.trials))
        harness.report(str(found[-1]))
        yield {"trials": options.trials, "cases": found}


def _answered(options: Namespace) -> Results:
    rows = read_labelled_rows(options.dataset, AG_NEWS_LABELS)
    answers = ModelLoader(options.model).predict_batch(rows.texts)
    targets = np.asarray(rows.targets)
    labels = np.array([AG_NEWS_LABELS.index(one["label"]) for one in answers])
    confidence = np.array([one["confidence"] for one in answers])
    draw = np.random.default_rng(1)
    found = []
    for name, (size, lost, gained) in REAL.items():
        counts: Counter[str] = Counter()
        for _ in range(options.trials):
            own = draw.permutation(len(targets))[:size]
            right = labels[own] == targets[own]
            counts[_verdict(right, confidence[own], lost, gained, targets[own], draw)] += 1
        found.append(_shares(name, size, counts, options.trials))
        harness.report(str(found[-1]))
    about = {"model": options.model.name, "texts": len(targets), "trials": options.trials}
    yield {**about, "cases": found}


def _verdict(
    old: np.ndarray,
    confidence: np.ndarray,
    lost: float,
    gained: float,
    targets: np.ndarray,
    draw: np.random.Generator,
) -> str:
    """Of a model that loses and gains such shares of all rows, on average, and in each class in the
    same proportion: otherwise a class that is easy would lose, and the model be rejected for it.
    """
    accuracy = np.bincount(targets, old, minlength=4) / np.bincount(targets, minlength=4)
    odds = (1 - accuracy) / accuracy  # of a wrong row
    gains = gained / (1 - old.mean())
    loses = (lost / gained * gains * odds)[targets]
    new = old ^ (draw.random(len(old)) < np.where(old, loses, gains))
    # As sure as it is right, if the old one is.
    sure = confidence * (1 - loses) + (1 - confidence) * gains
    answers = Answers(old, confidence), Answers(new, sure)
    found = compare(*answers, targets.tolist(), AG_NEWS_LABELS)
    return "better" if found.is_better else found.verdict


def _shares(name: str, rows: int, counts: Counter[str], trials: int) -> dict[str, Any]:
    shares = {verdict: counts[verdict] / trials for verdict in (PROMOTE, "better", HOLD, REJECT)}
    shares[PROMOTE] += shares["better"]
    return {"name": name, "rows": rows, **shares}


# ---------------------------------------------------------------- wrong reviews


def _feedback(options: Namespace) -> Results:
    pool, tests = _some_rows(options.dataset)
    model = NewsClassifier(
        len(AG_NEWS_LABELS), str(options.encoder), AG_NEWS_LABELS, loading=Loading(pooling=MEAN)
    )
    read, asked = (_read(model, options.encoder, one) for one in (pool, tests))
    right, tested = np.asarray(pool.targets), np.asarray(tests.targets)
    rounds = []
    for seed in range(options.rounds):
        draw = np.random.default_rng(seed)
        own = draw.permutation(len(right))[: OLD_ROWS + REVIEWED]
        told = right[own]
        wrong = told.copy()
        places = OLD_ROWS + draw.permutation(REVIEWED)[: round(WRONG_SHARE * REVIEWED)]
        wrong[places] = (wrong[places] + draw.integers(1, 4, len(places))) % 4
        learned = {
            "old rows": told[:OLD_ROWS],
            "with reviews": told,
            "with wrong reviews": wrong,
        }
        rounds.append(
            {
                name: _accuracy(
                    model, _fit(model, read, own[: len(said)], said, seed), asked, tested
                )
                for name, said in learned.items()
            }
        )
        harness.report(str(rounds[-1]))
        yield {"rounds": rounds}


def _some_rows(dataset: Path) -> tuple[LabelledRows, LabelledRows]:
    train, test = (
        read_labelled_rows(dataset / f"{name}.csv", AG_NEWS_LABELS, limit)
        for name, limit in (("train", POOL), ("test", TEST_ROWS))
    )
    return train, test


def _read(model: NewsClassifier, encoder: Path, rows: LabelledRows) -> dict[str, np.ndarray]:
    text = (encoder / "tokenizer.json").read_text(encoding="utf-8")
    encoded = TextTokenizer.from_json(text, MAX_LENGTH, "news").encode(rows.texts)
    ids = [one.ids for one in encoded]
    offsets = np.cumsum([0, *map(len, ids)])
    tokens = np.concatenate([np.asarray(one, np.int32) for one in ids])
    tokenized = TokenizedRows(tokens, offsets, np.asarray(rows.targets), 0)
    return read_rows(model, tokenized, np.arange(len(ids)), torch.device("cpu"), "fp32")


def _fit(
    model: NewsClassifier,
    read: Mapping[str, np.ndarray],
    own: np.ndarray,
    targets: np.ndarray,
    seed: int,
) -> FittedHead:
    rows = {name: states[own] for name, states in read.items()}
    none = {name: states[:0] for name, states in read.items()}
    return fit_head(model, (rows, none, none), targets, trained=MEAN, is_final=True, seed=seed)


@torch.inference_mode()
def _accuracy(
    model: NewsClassifier, head: FittedHead, asked: Mapping[str, np.ndarray], targets: np.ndarray
) -> float:
    """By what the encoder said of the test rows, which is read once for all heads."""
    head.apply_to(model)
    network = model.network
    pooler = network.get_submodule(FAMILY_OF[type(network).__name__].pooler)
    pooled = torch.tanh(pooler(torch.from_numpy(asked[head.pooling])))
    answers = network.get_submodule(model.head)(pooled).argmax(dim=1).numpy()
    return float((answers == targets).mean())


# ---------------------------------------------------------------- page


PARTS = {"simulated": _simulated, "answered": _answered, "feedback": _feedback}


def render(results: dict[str, Any]) -> str:
    text = harness.introduction(MODULE, "The verdict on a new model", INTRODUCTION)
    if part := results.get("simulated"):
        text += SIMULATED.format(trials=part["trials"]) + _section(part)
    if part := results.get("answered"):
        text += ANSWERED.format(rows=ROWS, **part) + _section(part)
    if part := results.get("feedback"):
        words = {"old": OLD_ROWS, "reviewed": REVIEWED, "share": WRONG_SHARE, "tests": TEST_ROWS}
        names = part["rounds"][0]
        table = harness.markdown_table(
            ["round", *names],
            [
                [str(number), *(f"{one[name]:.2%}" for name in names)]
                for number, one in enumerate(part["rounds"], start=1)
            ],
        )
        text += FEEDBACK.format(**words) + f"\n{harness.fact_list(part['facts'])}\n{table}\n"
    return text + GOALS + harness.goals_table(_goals(results)) + "\n"


def _section(part: dict[str, Any]) -> str:
    columns = {
        "new model": lambda one: one["name"],
        "rows": lambda one: f"{one['rows']:,}",
        "promoted": lambda one: f"{one[PROMOTE]:.1%}",
        "better": lambda one: f"{one['better']:.1%}",
        "held": lambda one: f"{one[HOLD]:.1%}",
        "rejected": lambda one: f"{one[REJECT]:.1%}",
    }
    return f"\n{harness.fact_list(part['facts'])}\n{harness.table(columns, part['cases'])}\n"


def _goals(results: dict[str, Any]) -> list[Goal]:
    def share(part: str, case: str, verdict: str) -> float | None:
        cases = results.get(part, {}).get("cases", ())
        return next((one[verdict] for one in cases if one["name"] == case), None)

    goals = []
    for part, which in (("simulated", "simulated"), ("answered", "real answers")):
        promoted = share(part, WORSE, PROMOTE)
        goals += [
            Goal(
                f"1 point worse, not promoted ({which})",
                None if promoted is None else 1 - promoted,
                "at least",
                0.95,
                "{:.1%}",
                "{:.0%}",
            ),
            Goal(
                f"equal, called better ({which})",
                share(part, EQUAL, "better"),
                "at most",
                0.05,
                "{:.1%}",
                "{:.0%}",
            ),
        ]
    rounds = results.get("feedback", {}).get("rounds", ())
    cost = [100 * (one["with reviews"] - one["with wrong reviews"]) for one in rounds]
    goals.append(
        Goal(
            f"{WRONG_SHARE:.0%} wrong reviews cost, in points",
            mean(cost) if cost else None,
            "at most",
            0.5,
            "{:.2f}",
            "{:g}",
        )
    )
    return goals


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="verdict.md", rounds=3)
    add = parser.add_argument
    data = harness.ROOT / "data"
    news = harness.ROOT / "checkpoints" / "news"
    add("--model", type=Path, default=news, help="an artefact (default: checkpoints/news)")
    add(
        "--dataset",
        type=Path,
        default=data / "ag_news",
        help="folder in AG News' layout (default: data/ag_news)",
    )
    add(
        "--encoder",
        type=Path,
        default=data / "minilm",
        help="folder of all-MiniLM-L6-v2 (default: data/minilm)",
    )
    add("--trials", type=positive, default=100, help="per kind of model (default: 100)")
    harness.add_parts_flag(parser, PARTS)
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
