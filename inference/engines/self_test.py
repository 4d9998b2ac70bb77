"""What every model is tried on when it is loaded: texts alone, together, and as long as it takes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelLoadError, first_line
from common.text import TextTokenizer
from inference.engines.base import Engine, TokenBatch
from inference.engines.forward import softmax

_NEWS = "The report says that oil prices rose again and that markets in Europe fell"
# Three texts of the first length pad to a pass that is still cheap; the longest text is tried alone. A pass beyond the
# second length would take minutes.
_LONGEST_TOGETHER, _LONGEST = 512, 8192
# Float sums in another order differ by far less; half precision keeps two to three digits.
FLOAT_TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05


def check_engine(
    place: Path, engine: Engine, tokenizer: TextTokenizer, labels: Sequence[str], tolerance: float
) -> NDArray[np.float64]:
    """Classify texts of a few, some and ``max_length`` tokens, each alone and all together.

    Args:
        place: Of the model, for errors.
        engine: What is to be tried.
        tokenizer: The model's own.
        labels: The model's class names.
        tolerance: How far a probability may move when other texts are in the same forward pass.

    Returns:
        What each text was answered alone, (texts, labels).

    Raises:
        ModelLoadError: It fails on one of them, answers with another number of classes or with NaN, or a text's answer
            depends on its neighbours, because the model does not mask its padding.
    """
    longest = min(tokenizer.max_length, _LONGEST)
    num_words = dict.fromkeys((1, 15, min(longest, _LONGEST_TOGETHER), longest))  # a word has a token or more
    texts = [" ".join(islice(cycle(_NEWS.split()), count)) for count in num_words]
    token_ids = [encoded.ids for encoded in tokenizer.encode(texts)]
    alone = np.concatenate([_classify(place, engine, [ids]) for ids in token_ids])
    if alone.shape[1] != len(labels):
        raise ModelLoadError(place, f"{alone.shape[1]} classes in the weights, {len(labels)} labels")
    if not np.isfinite(alone).all():
        raise ModelLoadError(
            place, "the model answers with NaN, its training diverged", "train with a lower learning rate"
        )
    together = _classify(place, engine, token_ids[:3])
    difference = np.abs(together - alone[:3]).max()
    if not difference <= tolerance:
        raise ModelLoadError(
            place,
            f"the {engine.name} engine answers a text differently among longer texts, by {difference:.3f} where "
            f"{tolerance:.3f} is allowed: the model does not mask padding",
            "serve a model that does, such as BERT or RoBERTa",
        )
    return alone


def _classify(place: Path, engine: Engine, token_ids: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    try:
        with np.errstate(invalid="ignore"):  # NaN is looked for afterwards
            return softmax(engine.logits(TokenBatch.of(token_ids), engine.num_slots))
    except Exception as error:  # a graph that was traced for one shape, positions that run out, no memory, no compiler
        *others, last = (str(len(ids)) for ids in token_ids)
        lengths = f"texts of {', '.join(others)} and {last}" if others else f"a text of {last}"
        what = f"the {engine.name} engine fails on {lengths} tokens ({first_line(error)})"
        raise ModelLoadError(place, what, "serve it with another engine") from error
