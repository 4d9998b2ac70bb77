"""A model without weights: the real tokenizer, and an engine that takes as long as it is told and fails on request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.calibration import Calibration
from common.errors import ModelLoadError
from common.text import TextTokenizer
from inference.engines.answering import OneLabelAnswering
from inference.engines.base import TokenBatch
from inference.engines.model_loader import ModelLoader

LABELS = ["World", "Sports", "Business", "Sci/Tech"]
MAX_LENGTH = 24
# A text with one of these fails its forward pass, ends the worker, or is answered with NaN.
RAISES, DIES, ANSWERS_NAN = "penalties penalties", "phones phones", "geneva geneva"


# What `common.calibration.fit` could have returned for it.
CALIBRATION = {
    "rows": 200,
    "temperature": 1.0,
    "coverage": [{"coverage": 0.9, "threshold": 0.2}],
    "operating_points": {
        "0.05": {"max_error": 0.05, "threshold": 0.6},
        # World for Sports is all that costs nothing, so World is always answered.
        "cheap": {"costs": [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]], "threshold": 0.5},
    },
}


class TimedEngine:
    """Sleeps for its tokens, and answers a text by its token ids.

    Attributes:
        broken: What every pass raises, None while the engine works.
    """

    broken: str | None = None
    name = "stand-in"
    num_slots = 1
    batch_tokens = 512
    pads = False
    survives_fork = True

    def __init__(self, seconds_per_token: float, raises: int, dies: int, answers_nan: int) -> None:
        self._seconds_per_token = seconds_per_token
        self._raises, self._dies, self._answers_nan = raises, dies, answers_nan

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        """Run one forward pass; see `inference.engines.base.Engine`."""
        time.sleep(len(batch.ids) * self._seconds_per_token)
        texts = np.split(batch.ids, np.cumsum(batch.lengths)[:-1])
        if self.broken:
            raise RuntimeError(self.broken)
        if any(_twice(self._raises, text) for text in texts):
            raise RuntimeError("the secret text broke the model")
        if any(_twice(self._dies, text) for text in texts):
            raise SystemExit
        return np.array([self._scores(text) for text in texts], dtype=np.float32)

    def _scores(self, text: NDArray[np.int32]) -> list[float]:
        if _twice(self._answers_nan, text):
            return [float("nan")] * len(LABELS)
        return [float(sum(text % (7 + label)) % 5) for label in range(len(LABELS))]


def _twice(token: int, text: NDArray[np.int32]) -> bool:
    return np.count_nonzero(text == token) > 1


class StandInModel(ModelLoader):
    """What a `ModelLoader` would hold."""

    def __init__(self, folder: Path, seconds_per_token: float = 0.0) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(folder, "lacks tokenizer.json")
        self.labels = LABELS
        fitted = folder / "calibration.json"
        calibration = Calibration(json.loads(fitted.read_text()), LABELS) if fitted.is_file() else None
        self.answering = OneLabelAnswering(LABELS, calibration=calibration)
        self.max_length = MAX_LENGTH
        self.reads_pairs = False
        self.metadata = {"dataset": "tiny", "test": {"accuracy": 0.9}}
        self.tokenizer = TextTokenizer.from_file(path, MAX_LENGTH)
        ids = [self.tokenizer.encode([words])[0].ids[1] for words in (RAISES, DIES, ANSWERS_NAN)]
        self.engine = TimedEngine(seconds_per_token, *ids)
        revision = f"{path.stat().st_mtime_ns % 16**12:012x}"
        self.info = {
            "name": folder.name,
            "engine": "stand-in",
            "reason": "a test asked for it",
            "precision": "none",
            "revision": revision,
            "path": str(folder),
        }


def stand_in(seconds_per_token: float = 0.0) -> Callable[[Path, str], ModelLoader]:
    """Return what `create_app` loads its model with."""
    return lambda path, engine: StandInModel(path, seconds_per_token)


_WORDS = (
    *("oil", "prices", "rise", "again", "as", "stocks", "fall", "on", "wall", "street", "new", "chip", "doubles"),
    *("speed", "of", "ministers", "meet", "for", "talks", "goal"),
)


def text_of(number: int, num_words: int = 4) -> str:
    """Another text of known words for every number, so that no two are answered together."""
    words = []
    for _ in range(num_words):
        number, digit = divmod(number, len(_WORDS))
        words.append(_WORDS[digit])
    return " ".join(words)
