"""Reads long texts in windows with any engine, which then computes one more output: the attention
of each window.

A text arrives as its joined windows (see ``common/windows.py``), so queues, caches and files handle
it like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.problem_types import PROBLEM_TYPES, REGRESSION, SINGLE_LABEL
from common.windows import ATTENTION_KEY, Windows, count_windows, pool, window_lengths
from inference.engines.base import Engine, TokenBatch, forward_passes

if TYPE_CHECKING:
    import torch


class WindowedEngine:
    """An engine whose scores for a text are those of its windows, weighed by their attention."""

    def __init__(self, engine: Engine, windows: Windows, problem_type: str | None) -> None:
        self.inner = engine
        self._windows = windows
        self._problem_type = PROBLEM_TYPES[problem_type or SINGLE_LABEL.name]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        return self.read(batch, threads)[0]

    def read(
        self, batch: TokenBatch, threads: int = 1
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The scores of each text, (texts, labels), and which of its windows decided each of them,
        (texts, labels).
        """
        return self.pooled(self.outputs(batch, threads), batch.lengths)

    def over(self, engine: Engine) -> WindowedEngine:
        """The same on top of another engine."""
        other = copy.copy(self)
        other.inner = engine
        return other

    def pooled(
        self, outputs: NDArray[np.float32], lengths: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """What `read` returns, from the outputs of texts with so many token ids each, (texts,)."""
        # outputs: (windows, labels + 1), of which the last column is the window's attention;
        # shares: how much each window counts for its text, (windows,).
        counts = count_windows(lengths, self._windows.length)
        scores, shares = pool(outputs, counts)
        evidence = np.repeat(shares[:, None], scores.shape[1], axis=1)
        if self._problem_type is not REGRESSION:
            # What a window alone would answer, times how much it counts.
            with np.errstate(invalid="ignore"):
                evidence = evidence * self._problem_type.answers(outputs[:, :-1])
        texts = np.split(evidence, np.cumsum(counts)[:-1])
        return scores, np.stack([text.argmax(axis=0) for text in texts])

    def outputs(self, batch: TokenBatch, threads: int) -> NDArray[np.float32]:
        """What the engine computes of each window of all texts, (windows, outputs)."""
        lengths = window_lengths(batch.lengths, self._windows.length).astype(np.int32)
        if len(lengths) == len(batch.lengths):
            return self.inner.logits(batch, threads)
        # A long text has many windows, and the buffers of a pass are to stay small.
        ids, found = np.split(batch.ids, np.cumsum(lengths)[:-1]), {}
        for chosen in forward_passes(lengths.tolist(), pads=self.inner.pads):
            outputs = self.inner.logits(TokenBatch.of([ids[i] for i in chosen]), threads)
            if len(outputs) != len(chosen):
                what = f"{self.inner.name} gave {len(outputs)} rows of scores"
                raise ValueError(f"{what} for {len(chosen)} windows")
            found |= dict(zip(chosen, outputs, strict=True))
        # `forward_passes` may sort by length; back in the order of the texts.
        return np.stack([found[i] for i in range(len(lengths))])


def with_windows(engine: Engine, config: Mapping[str, Any]) -> Engine:
    """The engine of a model with this config.json, which reads windows if the model does."""
    windows = Windows.of(config)
    return WindowedEngine(engine, windows, config.get("problem_type")) if windows else engine


def config_with_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json for building an engine: one more output if the model reads windows."""
    if Windows.of(config) is None:
        return dict(config)
    names = config["id2label"]
    return {**config, "id2label": {**names, str(len(names)): ATTENTION_KEY}, "label2id": {}}


def weights_with_attention(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights that belong to `config_with_attention`.

    Raises:
        ValueError: The row of the attention is missing.
    """
    widened, windows = dict(weights), Windows.of(config)
    if windows is None:
        return widened
    import torch  # a server with another engine need not have it

    if ATTENTION_KEY not in widened:
        raise ValueError(f"the weights lack {ATTENTION_KEY}")
    weight, bias = f"{windows.head}.weight", f"{windows.head}.bias"
    widened[weight] = torch.cat([widened[weight], widened.pop(ATTENTION_KEY).to(widened[weight])])
    if bias in widened:
        widened[bias] = torch.cat([widened[bias], widened[bias].new_zeros(1)])
    return widened
