"""From a saved model to answers: loads engine, tokenizer and labels, and classifies texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from inference.engines.base import Engine, TokenBatch
from inference.errors import ModelLoadError, RefusedTextError
from inference.model_files import SavedModel, read_saved_model
from inference.tokenization import TextTokenizer, clean_text

# Large enough to keep every core busy, small enough that texts in it are of like length.
SUB_BATCH_TEXTS = 32


class Prediction(TypedDict):
    """The answer to one text: the most likely label, its probability, and the probability of every label."""

    label: str
    confidence: float
    probabilities: dict[str, float]


class ModelLoader:
    """A loaded classifier; may be shared by threads.

    Attributes:
        labels: Class names, by class id.
        max_length: Token ids that the model reads of a text, special tokens included.
        metadata: The contents of the model's ``metrics.json``, empty where there is none.
    """

    def __init__(self, path: str | Path) -> None:
        """Load a model folder or a .pt file.

        Raises:
            ModelLoadError: It is missing, incomplete or damaged, or answers with no numbers.
        """
        saved = read_saved_model(Path(path))
        self.labels = saved.labels
        self.max_length = saved.max_length
        self.metadata: dict[str, Any] = saved.metadata
        self._tokenizer = _load_tokenizer(saved)
        self._engine = _load_engine(saved)
        self._check_answer(saved.path)

    def predict(self, text: str) -> Prediction:
        """Classify one text.

        Raises:
            ValueError: The text is blank.
        """
        _refuse_blank("text", text)
        return self._classify([text])[0]

    def predict_batch(self, texts: Sequence[str]) -> list[Prediction]:
        """Classify texts; the answers come in the order of the texts.

        Raises:
            ValueError: A text is blank; the line names its place.
        """
        for position, text in enumerate(texts):
            _refuse_blank(f"texts[{position}]", text)
        return self._classify(texts)

    def _classify(self, texts: Sequence[str]) -> list[Prediction]:
        token_ids = [encoded.ids for encoded in self._tokenizer.encode(texts)]
        by_length = sorted(range(len(texts)), key=lambda i: len(token_ids[i]))
        probabilities = np.empty((len(texts), len(self.labels)))
        for start in range(0, len(texts), SUB_BATCH_TEXTS):
            chosen = by_length[start : start + SUB_BATCH_TEXTS]
            probabilities[chosen] = self._probabilities([token_ids[i] for i in chosen])
        return [self._prediction(row) for row in probabilities]

    def _probabilities(self, token_ids: list[list[int]]) -> NDArray[np.float64]:
        return _softmax(self._engine.logits(TokenBatch.of(token_ids)))

    def _prediction(self, probabilities: NDArray[np.float64]) -> Prediction:
        best = int(probabilities.argmax())
        return {
            "label": self.labels[best],
            "confidence": float(probabilities[best]),
            "probabilities": dict(zip(self.labels, probabilities.tolist(), strict=True)),
        }

    def _check_answer(self, path: Path) -> None:
        # One text through the whole model: faults show now, not in a request, and the first request is fast.
        ids = self._tokenizer.encode(["News"])[0].ids
        probabilities = self._probabilities([ids])[0]
        if len(probabilities) != len(self.labels):
            raise ModelLoadError(path, f"{len(probabilities)} classes in the weights, {len(self.labels)} labels")
        if not np.isfinite(probabilities).all():
            raise ModelLoadError(
                path, "the model answers with NaN, its training diverged", "train with a lower learning rate"
            )


def _refuse_blank(name: str, text: str) -> None:
    if not clean_text(text):
        raise RefusedTextError("blank_text", f"{name} is blank: there is nothing to classify")


def _load_tokenizer(saved: SavedModel) -> TextTokenizer:
    try:
        tokenizer = TextTokenizer.from_json(saved.tokenizer_json, saved.max_length)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(saved.path, _first_line(error)) from error
    vocab_size = saved.config.get("vocab_size", tokenizer.vocab_size)
    if tokenizer.vocab_size > vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size} token ids, the model only {vocab_size}"
        raise ModelLoadError(saved.path, what, "give both from the same training run")
    return tokenizer


def _load_engine(saved: SavedModel) -> Engine:
    from inference.engines.torch_engine import TorchEngine  # takes seconds: not before a model is asked for

    try:
        return TorchEngine(saved.config, saved.weights)
    except Exception as error:  # every library below has its own error for damaged bytes
        place = saved.weights if isinstance(saved.weights, Path) else saved.path
        what = f"the weights do not load into the model of its configuration ({_first_line(error)})"
        raise ModelLoadError(place, what, "copy the files again or export the model again") from error


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    scores = logits.astype(np.float64)
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
