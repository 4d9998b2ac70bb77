"""How a model's figure falls on rough texts: the same test rows as titles, in upper case, with
typing errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from training.data.dataset import Rows
from training.data.rough_text import KINDS, cleaned
from training.monitoring.records import METRICS, Metric, metrics_of

WHOLE = "whole rows"
# Six times as many are classified: a minute with the starter on two cores. Of more test rows, these
# are drawn.
MOST_ROWS = 7_600
SEED = 0


def measure_robustness(
    rows: Rows, answer: Callable[[Rows], dict[str, Any]], clean: Callable[[str], str]
) -> dict[str, Any]:
    """The task's first metric on rows and on rough versions of them.

    ``answer`` evaluates rows; ``clean`` is what the model's tokenizer does to a text, and is done
    here before a text is changed, because a character reference without its punctuation could no
    longer be decoded.
    """
    # Row numbers decide how a text is changed, so they are kept when rows are drawn.
    index = np.arange(len(rows.texts))
    if len(index) > MOST_ROWS:
        index = np.sort(np.random.default_rng(SEED).choice(index, MOST_ROWS, replace=False))
    rows = rows.take(index)
    texts = [cleaned(text, clean) for text in rows.texts]
    whole = answer(rows)
    metric = next(iter(metrics_of(whole)))
    kinds = {WHOLE: {metric: whole[metric], "rows_changed": 0}}
    for name, roughen in KINDS.items():
        rough = [roughen(text, SEED, int(row)) for row, text in zip(index, texts, strict=True)]
        changed = sum(one != text for one, text in zip(rough, texts, strict=True))
        kinds[name] = {metric: answer(Rows(rough, rows.labels))[metric], "rows_changed": changed}
    return {"metric": metric, "rows": len(index), "seed": SEED, "kinds": kinds}


def robustness_table(found: dict[str, Any], num_test_rows: int) -> str:
    """The table that people see."""
    name, rows, kinds = found["metric"], found["rows"], found["kinds"]
    metric = METRICS.get(name, Metric(name, is_share=False))
    whole = kinds[WHOLE][name]
    width = max(map(len, kinds))
    of = (
        f"{rows:,} rows drawn from {num_test_rows:,}"
        if rows < num_test_rows
        else f"{rows:,} test rows"
    )
    lines = [
        f"robustness: {metric.title} on {of}",
        f"{'':{width}}  {metric.title:>10}     change  texts changed",
    ]
    for kind, one in kinds.items():
        change = ""
        if kind != WHOLE:
            change = (
                f"{100 * (one[name] - whole):+.2f}"
                if metric.is_share
                else f"{one[name] - whole:+.4g}"
            )
        changed = "" if kind == WHOLE else f"{one['rows_changed'] / rows:.0%}"
        lines.append(
            f"{kind:{width}}  {metric.shown(one[name]):>10}  {change:>9}  {changed:>13}".rstrip()
        )
    return "\n".join(lines)
