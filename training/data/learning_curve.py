"""What twice the rows would bring, predicted by a linear model of words: it learns in seconds.

Its error on n rows follows a + b n^-c closely (Hestness et al., 2017, "Deep Learning Scaling is
Predictable, Empirically", arXiv 1712.00409). The curve is fitted to its errors on an eighth, a
quarter, half and all of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_ROWS = 20_000
FEWEST_ROWS = 200
FEWEST_PER_LABEL = 8  # on average, so that an eighth of the rows still has most labels
PARTS = (8, 4, 2, 1)
FOLDS = 5
ROWS_TESTED = 10_000  # in all rounds together: of few rows, several rounds of folds are averaged
MOST_ROUNDS = 5
EXPONENTS = np.linspace(0.05, 1.5, 59)


def learning_curve(texts: Sequence[str], targets: np.ndarray, seed: int) -> dict[str, Any]:
    """The scores of a linear model by the number of rows, measured on others, and what the curve
    predicts for these rows and twice as many.

    ``targets``: of one label int (rows,), of several uint8 (rows, labels), of numbers float
    (rows,). Without an answer the only key is ``skipped``, which says why.
    """
    if why := _too_few(targets):
        return {"skipped": why}
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        return {"skipped": "scikit-learn is not installed"}

    generator, num_rows = np.random.default_rng(seed), len(targets)
    chosen = generator.permutation(num_rows)[:MOST_ROWS]
    targets = targets[chosen]
    try:
        words = TfidfVectorizer(sublinear_tf=True, dtype=np.float32).fit_transform(
            texts[i] for i in chosen
        )
    except ValueError:  # texts of single letters and symbols only
        return {"skipped": "the texts have no words"}

    sizes = np.array([len(chosen) * (FOLDS - 1) // FOLDS // part for part in PARTS])
    measured = _mean_errors(words, targets, sizes, generator)
    predict = _fit(sizes, measured)
    return {
        "metric": _metric(targets),
        "rows": num_rows,
        "rows_used": len(chosen),
        "sizes": sizes.tolist(),
        "scores": [round(float(1 - error), 4) for error in measured],
        "now": round(1 - predict(num_rows), 4),
        "twice": round(1 - predict(2 * num_rows), 4),
    }


def _mean_errors(
    words: Any, targets: np.ndarray, sizes: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Of models that learn from so many of the rows, on others; (sizes,)."""
    errors: list[list[float]] = []
    folds = FOLDS if len(targets) <= ROWS_TESTED else 1
    for _ in range(min(MOST_ROUNDS, max(1, ROWS_TESTED // len(targets)))):
        # Each round splits the rows into other folds: the errors of few rows vary much.
        order = generator.permutation(len(targets))
        for fold in range(folds):
            held_out = order[fold::FOLDS]
            # The smaller parts are in the larger ones: so they differ by their size alone.
            kept = generator.permutation(np.setdiff1d(order, held_out))
            errors.append([_error(words, targets, kept[:size], held_out) for size in sizes])
    return np.mean(errors, axis=0)


def _metric(targets: np.ndarray) -> str:
    if targets.ndim > 1:
        return "micro F1"
    return "R²" if targets.dtype.kind == "f" else "accuracy"


def _too_few(targets: np.ndarray) -> str:
    num_rows = len(targets)
    if num_rows < FEWEST_ROWS:
        return f"{num_rows:,} different rows are too few to tell; it takes {FEWEST_ROWS}"
    if targets.dtype.kind == "f":
        return ""
    labels = targets.shape[1] if targets.ndim > 1 else len(np.unique(targets))
    if labels * FEWEST_PER_LABEL > num_rows:
        rows = f"{num_rows:,} different rows of {labels:,} labels"
        return f"{rows} are too few to tell; it takes {FEWEST_PER_LABEL} each"
    return "all rows have the same label" if labels < 2 else ""


def _error(words: Any, targets: np.ndarray, kept: np.ndarray, held_out: np.ndarray) -> float:
    """1 minus the score of a linear model that has learned from the rows ``kept``."""
    from sklearn.linear_model import Ridge
    from sklearn.svm import LinearSVC

    known, wanted = targets[kept], targets[held_out]
    if targets.dtype.kind == "f":
        errors = Ridge().fit(words[kept], known).predict(words[held_out]) - wanted
        return float((errors**2).mean() / max(wanted.var(), 1e-12))
    if targets.ndim == 1:
        # The model refuses to learn a single label.
        several = len(np.unique(known)) > 1
        model = LinearSVC().fit(words[kept], known) if several else None
        predicted = model.predict(words[held_out]) if model else known[0]
        return float((predicted != wanted).mean())
    # Micro F1 is 2 x right / (predicted + wanted), summed over the labels.
    right = given = 0
    for label in range(targets.shape[1]):  # each separately
        both = np.unique(known[:, label])
        model = LinearSVC().fit(words[kept], known[:, label]) if len(both) > 1 else None
        predicted = model.predict(words[held_out]) if model else np.full(len(held_out), both[0])
        right += 2 * int((predicted * wanted[:, label]).sum(dtype=np.int64))
        given += int(predicted.sum(dtype=np.int64) + wanted[:, label].sum(dtype=np.int64))
    return 1 - right / given if given else 0.0


def _fit(sizes: np.ndarray, errors: np.ndarray) -> Any:
    """The curve a + b n^-c, with a and b of at least 0, that is closest to the errors."""
    # Errors on more rows count more, because they are closer to what is asked for.
    weights, fits = np.sqrt(sizes), []
    # For a fixed exponent the curve is linear in a and b, so least squares finds them exactly and
    # only the exponent is searched. The second set of columns is the same without a floor: without
    # it a negative a would be refused although a = 0 fits.
    for exponent in EXPONENTS:
        powers = sizes**-exponent
        for columns in (
            np.stack([np.ones(len(sizes)), powers], 1),
            np.stack([np.zeros(len(sizes)), powers], 1),
        ):
            (floor, factor), *_ = np.linalg.lstsq(
                columns * weights[:, None], errors * weights, rcond=None
            )
            if floor >= 0 and factor >= 0:
                misfit = float((((columns @ [floor, factor] - errors) * weights) ** 2).sum())
                fits.append((misfit, floor, factor, exponent))
    if not fits:  # more rows made it worse: nothing to gain from still more
        return lambda num_rows: float(errors[-1])
    _, floor, factor, exponent = min(fits)
    return lambda num_rows: float(floor + factor * num_rows**-exponent)
