"""A linear baseline: what TF-IDF and a linear model make of the rows of a run, in seconds, beside
the network.

A network that was trained too briefly can stay far behind a linear model of single words and pairs
of neighbouring ones. Whoever has no such figure to compare with takes the network's for what can be
had.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from common.text import Text, cleaner, num_chars, texts_in
from training.config import TrainConfig
from training.data.prepare import PreparedData
from training.data.stored_texts import ChosenTexts
from training.monitoring.records import METRICS, score_of
from training.tasks import Task

if TYPE_CHECKING:
    from scipy.sparse import spmatrix

NAMES = {
    SINGLE_LABEL.name: "TF-IDF + linear SVM",
    MULTI_LABEL.name: "TF-IDF + a linear SVM per label",
    REGRESSION.name: "TF-IDF + ridge regression",
}
# What it may take at the end of a run, on one core. If that is not enough, some of the rows are
# read, drawn at random.
MOST_SECONDS = 10.0
# Of a run's --budget, and of the --collective_timeout after which ranks give up waiting for the one
# that does this.
SHARE_OF_BUDGET, SHARE_OF_TIMEOUT = 0.05, 0.2
# Of a core: to import scikit-learn, to count the words and pairs of a text, and to fit one label to
# them. They are what 10,000 to 79,235 rows of AG News took, rounded up.
STARTING_SECONDS, SECONDS_PER_LETTER, SECONDS_PER_LETTER_AND_LABEL = 2.0, 4.5e-7, 1.1e-7
LETTERS_PER_TOKEN = 5
# The error of a difference is estimated by leaving out one of so many parts of the test rows after
# the other. With fewer rows than parts, no difference is clear.
PARTS = 20
CLEAR = 2.0  # standard errors


@dataclass(frozen=True)
class Gain:
    """How much better the network is than the baseline on the same test rows by one metric;
    negative if it is worse.
    """

    metric: str
    value: float
    standard_error: float

    @property
    def is_clear(self) -> bool:
        """Whether chance hardly explains it."""
        return abs(self.value) > CLEAR * self.standard_error


@dataclass(frozen=True)
class Baseline:
    """What the linear model achieves.

    ``rows``: of the training rows with a label, how many it was fitted on, and how many there are;
    ``validation`` is empty without such rows.
    """

    name: str
    rows: tuple[int, int]
    validation: dict[str, float]
    test: dict[str, float]
    gain: Gain

    def __str__(self) -> str:
        return f"{self.figures} ({self.how}): {self.verdict}"

    @property
    def figures(self) -> str:
        """The task's first two metrics on the test rows."""
        return ", ".join(
            f"{METRICS[name].title} {METRICS[name].shown(self.test[name])}"
            for name in self._metrics[:2]
        )

    @property
    def tile(self) -> tuple[str, str]:
        """The first of them, and what it is."""
        metric = METRICS[self._metrics[0]]
        figure = metric.shown(self.test[self._metrics[0]])
        return figure, f"{metric.title} of {self.how}: {self.verdict}"

    @property
    def _metrics(self) -> list[str]:
        return [name for name in METRICS if name in self.test]

    @property
    def how(self) -> str:
        read, there = self.rows
        rows = "the same rows" if read == there else f"on {read:,} of the {there:,} rows"
        return f"{self.name}, {rows}"

    @property
    def verdict(self) -> str:
        if not self.gain.is_clear:
            return "no clear difference"
        is_first = self.gain.metric == self._metrics[0]
        by = "" if is_first else f" by its {METRICS[self.gain.metric].title}"
        return f"{'better' if self.gain.value < 0 else 'worse'} than this model{by}"

    @property
    def wins(self) -> bool:
        return self.gain.is_clear and self.gain.value < 0

    def to_plain(self) -> dict[str, Any]:
        """For metrics.json; ``gain`` is the network's over the baseline."""
        read, there = self.rows
        return {
            "name": self.name,
            "train_rows": read,
            **({} if read == there else {"of_train_rows": there}),
            "validation": self.validation or None,
            "test": self.test,
            "gain": vars(self.gain),
        }


def seconds_for_baseline(config: TrainConfig, data: PreparedData) -> float:
    """How long the baseline of a run takes at most; 0 if there is no time for one."""
    limits = [MOST_SECONDS, SHARE_OF_TIMEOUT * config.collective_timeout]
    limits += [SHARE_OF_BUDGET * config.budget_seconds] if config.budget else []
    letters = LETTERS_PER_TOKEN * sum(
        float(rows.lengths.sum()) for rows in (data.tokens.train, data.tokens.test)
    )
    needed = STARTING_SECONDS + letters * _seconds_per_letter(len(data.tokens.label_names))
    return min(needed, *limits) if min(limits) > STARTING_SECONDS else 0.0


def _seconds_per_letter(num_labels: int) -> float:
    return SECONDS_PER_LETTER + SECONDS_PER_LETTER_AND_LABEL * num_labels


def measure_baseline(
    config: TrainConfig,
    data: PreparedData,
    task: Task,
    class_weights: np.ndarray | None,
    scores_of_network: np.ndarray,
    chosen_by_network: Mapping[str, Any],
    heartbeat: Callable[[], None] = lambda: None,
) -> Baseline:
    """Fit the linear model to the training rows of a run, and compare it with the network on the
    test rows.

    Args:
        class_weights: what a row of each label weighs in the loss, (labels,); None if all weigh the
        same.
        scores_of_network: of all test rows, (rows, labels).
        chosen_by_network: the evaluation on which its thresholds were chosen.
        heartbeat: called now and then, since all of it may take :data:`MOST_SECONDS`.

    Raises:
        ValueError: the texts have no words.
    """
    assert data.texts is not None
    num_labels = len(data.tokens.label_names)
    seconds = seconds_for_baseline(config, data) - STARTING_SECONDS
    letters = int(seconds / _seconds_per_letter(num_labels))

    def read(texts: Sequence[Text], index: np.ndarray) -> tuple[np.ndarray, list[Text]]:
        """As many of these rows as there is time for, and their texts as the network gets them."""
        heartbeat()
        rows = _draw(texts, index, letters, config.seed)
        return rows, [_cleaned(text, data.cleaning) for text in ChosenTexts(texts, rows)]

    train, texts = read(data.texts.train.texts, data.labelled_index)
    weights = _class_weights(config, class_weights)
    answer = fit_linear(texts, data.tokens.train.labels[train], num_labels, config.seed, weights)
    validation: dict[str, Any] = {}
    if len(data.validation_index):
        rows, texts = read((data.texts.validation or data.texts.train).texts, data.validation_index)
        validation = task.metrics(task.as_scores(answer(texts)), data.validation_rows.labels[rows])
    # Thresholds were chosen on the validation rows, so the test rows are only measured.
    rows, texts = read(data.texts.test.texts, np.arange(len(data.tokens.test)))
    scores, targets = task.as_scores(answer(texts)), data.tokens.test.labels[rows]
    heartbeat()

    # The loss is one of probabilities, which distances from a plane are not.
    names = [name for name in config.task_facts.metrics if name != "loss"]
    of_both = [(scores_of_network[rows], chosen_by_network), (scores, validation)]
    gains = [
        _gain(task, name, of_both, targets) for name in _compared_by(config.best_metric, names)
    ]
    test = task.metrics(scores, targets, validation)
    return Baseline(
        name=NAMES[task.problem_type.name],
        rows=(len(train), len(data.labelled_index)),
        validation={name: validation[name] for name in names if validation},
        test={name: test[name] for name in ("rows", *names)},
        # Accuracy often cannot tell two models apart that macro-F1 can, because some labels are
        # rare.
        gain=next((gain for gain in gains if gain.is_clear), gains[0]),
    )


def _class_weights(
    config: TrainConfig, class_weights: np.ndarray | None
) -> Mapping[int, float] | str | None:
    """What a row of each label weighs, as scikit-learn takes it."""
    # The network sees rare labels more often instead; a linear model gets the same from weights.
    if config.sampling == "balanced":
        return "balanced"
    return None if class_weights is None else dict(enumerate(class_weights))


def _compared_by(best_metric: str, names: Sequence[str]) -> list[str]:
    """The metric that the run chose its epoch by, then the two that people see first, each once."""
    return list(dict.fromkeys(name for name in (best_metric, *names[:2]) if name in names))


def _draw(texts: Sequence[Text], index: np.ndarray, letters: int, seed: int) -> np.ndarray:
    """All of these rows, or at random as many as have so many letters, but at least one; ascending."""
    drawn = np.random.default_rng([seed, 6]).permutation(index)
    fitting = takewhile(
        lambda total: total <= letters, accumulate(map(num_chars, ChosenTexts(texts, drawn)))
    )
    return np.sort(drawn[: max(1, sum(1 for _ in fitting))])


def _cleaned(text: Text, cleaning: str) -> Text:
    clean = cleaner(cleaning)
    return clean(text) if isinstance(text, str) else (clean(text[0]), clean(text[1]))


def _gain(
    task: Task,
    metric: str,
    of_both: Sequence[tuple[np.ndarray, Mapping[str, Any]]],
    targets: np.ndarray,
) -> Gain:
    """Of the first of two models over the second, each with the evaluation that chose its
    thresholds.

    Both answered the same rows, so the error is that of the difference: a jackknife over parts of
    the rows, which fits every metric (Efron & Tibshirani, 1993, "An introduction to the bootstrap",
    chapter 11).
    """

    def difference(rows: np.ndarray) -> float:
        first, second = (
            score_of(task.metrics(scores[rows], targets[rows], chosen), metric)
            for scores, chosen in of_both
        )
        return first - second

    every = np.arange(len(targets))
    # At random, as rows may come in an order: a part of one label alone would say nothing of the
    # others.
    part = np.random.default_rng(len(targets)).permutation(every) % PARTS
    if len(targets) < PARTS:
        return Gain(metric, difference(every), math.inf)
    without = np.array([difference(every[part != left_out]) for left_out in range(PARTS)])
    return Gain(metric, difference(every), math.sqrt((PARTS - 1) * float(without.var())))


def fit_linear(
    texts: Sequence[Text],
    targets: np.ndarray,
    num_labels: int,
    seed: int,
    class_weights: Mapping[int, float] | str | None = None,
) -> Callable[[Sequence[Text]], np.ndarray]:
    """Fit TF-IDF of words and word pairs with a linear SVM, one per label, or to numbers with ridge
    regression.

    Args:
        texts: cleaned; of a pair the words of each text, and those that both have, are features of
        their own.
        targets: as the task has them, (rows, ...).
        class_weights: see scikit-learn's ``class_weight``.

    Returns:
        A function from texts to scores, (texts, labels): distances from the separating planes, not
        probabilities. Of numbers, the predictions.

    Raises:
        ValueError: the texts have no words.
    """
    # Here and not at the top, because it takes more than a second to import, and cards and servers
    # do without it.
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    features = _features(texts, vectorizer.fit_transform)
    if targets.dtype.kind == "f":
        ridge = Ridge().fit(features, targets)
        return lambda texts: ridge.predict(_features(texts, vectorizer.transform))[:, None]
    if targets.ndim == 2:  # several labels per text: for each whether it applies
        each = [_separate(features, column, 2, seed) for column in targets.T]

        def answer(texts: Sequence[Text]) -> np.ndarray:
            new = _features(texts, vectorizer.transform)
            return np.column_stack([margins(new)[:, 1] for margins in each])

        return answer
    margins = _separate(features, targets, num_labels, seed, class_weights)
    return lambda texts: margins(_features(texts, vectorizer.transform))


def _features(texts: Sequence[Text], read: Callable[[Iterable[str]], spmatrix]) -> spmatrix:
    """(texts, features); ``read``: from texts to their TF-IDF."""
    from scipy.sparse import hstack

    # The first texts of all pairs, then the second ones: (texts or 2 * pairs, words).
    of_all = read(chain.from_iterable(zip(*map(texts_in, texts), strict=True)))
    if of_all.shape[0] == len(texts):
        return of_all
    first, second = of_all[: len(texts)], of_all[len(texts) :]
    shared = first.multiply(second)
    # Rows of TF-IDF have length 1, so the last column is the cosine similarity of the two texts.
    return hstack([first, second, shared, shared.sum(axis=1)], format="csr")


def _separate(
    features: spmatrix,
    labels: np.ndarray,
    num_labels: int,
    seed: int,
    class_weights: Mapping[int, float] | str | None = None,
) -> Callable[[spmatrix], np.ndarray]:
    """Fit a linear SVM to rows with one label each; returns a function from features to margins,
    (rows, labels).
    """
    from sklearn.svm import LinearSVC

    present = np.unique(labels)
    svm = None
    if len(present) > 1:
        if isinstance(class_weights, Mapping):
            class_weights = {label: class_weights[label] for label in present.tolist()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not quite converged is good enough here
            svm = LinearSVC(C=1, random_state=seed, class_weight=class_weights).fit(
                features, labels
            )

    def margins(rows: spmatrix) -> np.ndarray:
        found = np.ones((rows.shape[0], 1)) if svm is None else svm.decision_function(rows)
        if found.ndim == 1:  # two labels share one plane
            found = np.stack([-found, found], axis=1)
        # Labels that no training row has are below all others, so they are never the answer.
        answers = np.full((rows.shape[0], num_labels), found.min() - 2)
        answers[:, present] = found
        return answers

    return margins
