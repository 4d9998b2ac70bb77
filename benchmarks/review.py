"""How many random labels are reviewed ones worth?

A head on a frozen encoder is fitted on some rows and answers a stream. The queue of the product
chooses which texts of the stream get their label, and the head is fitted again with them. Against
it: texts of the stream drawn at random.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.harness import Goal
from common.errors import positive
from inference.observing.store import KeptText
from loop.candidates import UNCERTAIN, choose
from training.data.dataset import load_data

MODULE = "benchmarks.review"
PACKAGES = ("numpy", "scikit-learn", "torch", "transformers")
REVIEWED = 500
RANDOM = (500, 1000, 1250, 1500, 2000, 3000, 4000)
DRAWS = 4  # of the random texts, per seed and number
WORTH = 2.5
# As the server draws them (`inference.observing.kept_texts`).
UNIFORM_SHARE = 0.1
_CHUNK, _BATCH, _MAX_LENGTH = 256, 32, 96
_STRENGTH = 10.0  # C of scikit-learn
QUEUE, ALL_UNCERTAIN = "the queue", "only the least sure"
INTRODUCTION = """
A logistic regression on the frozen vectors of {encoder} is fitted on {start:,} rows of {dataset} and answers a stream
of {stream:,} others. Then {reviewed} texts of the stream get their true label, and it is fitted again with all of them.
*the queue*: chosen by `python -m loop.review`, {uncertain:.0%} of them the least sure, a tenth each unlike what is
known (here by the nearest vector) and drawn uniformly. Nobody corrects, so none disagrees. *only the least sure*:
without those tenths. Random texts are drawn {draws} times per seed. Accuracy on {tests:,} test rows; means of {seeds}
seeds (lowest to highest), each with other rows at first. *worth*: the number of random texts with the same mean
accuracy, on the straight lines between the numbers that were measured.
"""
Floats = NDArray[np.float32]


def main() -> None:
    options = _parse()
    data = load_data(options.dataset)
    rows = np.random.default_rng(0).permutation(len(data.train.labels))[: options.rows]
    pool = data.train.take(rows)
    known = vectors(pool.texts, options), np.asarray(pool.labels)
    tests = vectors(data.test.texts, options), np.asarray(data.test.labels)
    runs = []
    for seed in range(options.seeds):
        runs.append(measure(options, known, tests, pool.texts, seed))
        harness.report(f"seed {seed}: {runs[-1]}")
    found = {
        "facts": harness.measurement_facts(MODULE, PACKAGES),
        "encoder": Path(options.encoder).name,
        "dataset": Path(options.dataset).name,
        "start": options.start,
        "stream": len(rows) - options.start,
        "tests": len(tests[1]),
        "runs": runs,
    }
    harness.write_page(options.output, render(found), found)


def vectors(texts: Sequence[Any], options: Namespace) -> Floats:
    """Means of the last hidden states, of length 1. They are kept in files, as all of them take minutes."""
    options.work.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Floats] = {}
    for path in options.work.glob("vectors_*.npz"):
        with np.load(path) as found:
            kept |= dict(zip(found["names"].tolist(), found["vectors"], strict=True))
    known = [(_name(options.encoder, str(text)), str(text)) for text in texts]
    missing = list({name: text for name, text in known if name not in kept}.items())
    encoder = _Encoder(options.encoder) if missing else None
    for first in range(0, len(missing), _CHUNK):
        names, chunk = zip(*missing[first : first + _CHUNK], strict=True)
        read = encoder.read(chunk)
        unfinished = options.work / "unfinished.npz"
        np.savez(unfinished, names=np.array(names), vectors=read)
        unfinished.replace(options.work / f"vectors_{names[0]}.npz")
        kept |= dict(zip(names, read, strict=True))
        harness.report(f"{first + len(chunk):,} of {len(missing):,} vectors")
    return np.stack([kept[name] for name, _ in known])


def _name(encoder: str, text: str) -> str:
    return hashlib.sha256(f"{Path(encoder).name}\0{text}".encode()).hexdigest()[:16]


class _Encoder:
    def __init__(self, name: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(name)
        self._model = AutoModel.from_pretrained(name).eval()

    def read(self, texts: Sequence[str]) -> Floats:
        import torch

        order = np.argsort([len(text) for text in texts])
        found = np.zeros((len(texts), self._model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for first in range(0, len(texts), _BATCH):
                batch = order[first : first + _BATCH]
                tokens = self._tokenizer(
                    [texts[i] for i in batch],
                    truncation=True,
                    max_length=_MAX_LENGTH,
                    padding=True,
                    return_tensors="pt",
                )
                states = self._model(**tokens).last_hidden_state
                mask = tokens["attention_mask"][..., None]
                means = (states * mask).sum(1) / mask.sum(1)
                found[batch] = torch.nn.functional.normalize(means, dim=1).numpy()
        return found


def measure(
    options: Namespace, known: tuple[Floats, Any], tests: tuple[Floats, Any], texts: Any, seed: int
) -> dict[str, Any]:
    """The accuracy with nothing, with random and with chosen labels, in per cent."""
    from sklearn.linear_model import LogisticRegression

    generator = np.random.default_rng(seed)
    dealt = generator.permutation(len(known[1]))
    start, stream = dealt[: options.start], dealt[options.start :]

    def fitted(rows: Any) -> Any:
        head = LogisticRegression(C=_STRENGTH, max_iter=300)
        return head.fit(known[0][rows], known[1][rows])

    def accuracy(chosen: Any) -> float:
        head = fitted(np.concatenate([start, chosen]).astype(int))
        return 100 * float((head.predict(tests[0]) == tests[1]).mean())

    served = fitted(start).predict_proba(known[0][stream])
    kept = [
        KeptText(
            *(str(row), 0.0, "news", "1", "anonymous", str(texts[row]), str(answer.argmax())),
            *(float(answer.max()), _nearness(known[0][row], known[0][start]), int(drawn)),
        )
        for row, answer, drawn in zip(
            stream, served, generator.random(len(stream)) < UNIFORM_SHARE, strict=True
        )
    ]
    queue = choose(kept, [], REVIEWED)
    least_sure = stream[np.argsort(served.max(axis=1))[:REVIEWED]]
    random = {
        number: [accuracy(generator.permutation(stream)[:number]) for _ in range(DRAWS)]
        for number in RANDOM
        if number <= len(stream)
    }
    return {
        "start": accuracy([]),
        "random": {str(number): mean(found) for number, found in random.items()},
        QUEUE: accuracy([int(one.request) for one in queue]),
        ALL_UNCERTAIN: accuracy(least_sure),
        "uncertain": mean(one.why == UNCERTAIN for one in queue),
        "all": accuracy(stream),
    }


def _nearness(vector: Floats, others: Floats) -> float:
    """In place of the familiarity, which a head alone has not: only its order matters to the queue."""
    return float((others @ vector).max())


def worth(run_means: dict[int, float], accuracy: float) -> float | None:
    """The number of random texts with this accuracy; None if even the most have less."""
    numbers = sorted(run_means)
    # More labels do not make it worse: what looks so is noise.
    means = np.maximum.accumulate([run_means[number] for number in numbers])
    if accuracy > means[-1]:
        return None
    return float(np.interp(accuracy, means, numbers))


def render(found: dict[str, Any]) -> str:
    runs = found["runs"]
    means = {0: mean(one["start"] for one in runs)} | {
        int(number): mean(one["random"][number] for one in runs) for number in runs[0]["random"]
    }

    def row(name: str, values: list[float]) -> list[str]:
        same = worth(means, mean(values))
        shown = f"more than {max(means):,}" if same is None else f"{same:,.0f}"
        return [name, harness.mean_and_spread(values, 2), shown]

    def plain(name: str, number: int, values: list[float]) -> list[str]:
        return [name, harness.mean_and_spread(values, 2), f"{number:,}"]

    rows = [plain("none", 0, [one["start"] for one in runs])]
    rows += [
        row(f"{REVIEWED}, {name}", [one[name] for one in runs]) for name in (QUEUE, ALL_UNCERTAIN)
    ]
    for number in sorted(means)[1:]:
        values = [one["random"][str(number)] for one in runs]
        rows.append(plain(f"{number:,}, random", number, values))
    stream = found["stream"]
    rows.append(plain(f"all {stream:,}", stream, [one["all"] for one in runs]))
    same = worth(means, mean(one[QUEUE] for one in runs)) or max(means)
    goal = Goal(
        f"random texts that {REVIEWED} of the queue are worth",
        same,
        "at least",
        WORTH * REVIEWED,
        "{:,.0f}",
    )
    text = INTRODUCTION.format(
        **{name: found[name] for name in ("encoder", "dataset", "start", "stream", "tests")},
        reviewed=REVIEWED,
        draws=DRAWS,
        seeds=len(runs),
        uncertain=mean(one["uncertain"] for one in runs),
    )
    page = harness.introduction(MODULE, "What a reviewed text is worth", text)
    page += harness.fact_list(found["facts"]) + "\n" + harness.goals_table([goal]) + "\n"
    return page + harness.markdown_table(["labels of the stream", "accuracy, %", "worth"], rows)


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__ or "", page="review.md", seeds=3)
    add = parser.add_argument
    add("--dataset", default="data/ag_news", help="default: %(default)s")
    add(
        "--encoder",
        default="sentence-transformers/all-MiniLM-L6-v2",
        help="default: %(default)s",
    )
    add("--start", type=positive, default=2000, help="rows at first (default: %(default)s)")
    add("--rows", type=positive, default=9216, help="these and the stream (default: %(default)s)")
    work = harness.ROOT / "checkpoints" / "review"
    add("--work", type=Path, default=work, help="folder for vectors (default: checkpoints/review)")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
