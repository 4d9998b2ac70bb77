"""Pooling the windows of long texts by learned attention; why it is one more output is in
``common/windows.py``.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from common.errors import UserError
from common.windows import ATTENTION_KEY, Windows
from training.config import TrainConfig
from training.model.classifier import NewsClassifier, to_fp32


def add_window_attention(model: NewsClassifier, config: TrainConfig) -> None:
    """Add the attention's row to the last layer, in place. It begins at zero: all windows of a text
    weigh the same.

    Raises:
        UserError: the last layer is unknown, or more follows behind it.
    """
    if not isinstance(model.network, PreTrainedModel):
        raise UserError(
            "--long windows and a network of your own: windows are pooled by a row of the last "
            "layer, and only "
            "encoders of transformers are known to have such a layer; drop one",
            code="flags-conflict",
        )
    name = model.head
    head = model.network.get_submodule(name) if name else None
    if isinstance(head, nn.Linear):
        to_fp32(model)  # an encoder in half precision has a new head in fp32
        row = torch.zeros_like(head.weight[:1])
        model.widen_head(Windows.of_length(config.max_length, name), row)
        was_training = model.training
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = model.eval()(torch.ones(1, 1, dtype=torch.int64), None)
        model.train(was_training)
        # What the row computes has to arrive as it is, or the scores of windows could not be
        # averaged either.
        if outputs.shape[1:] == (len(model.label_names) + 1,) and outputs[0, -1] == 0:
            return
    raise UserError(
        f"--long windows and --model {config.model}: the last layer of {model.config.model_type} "
        "is not a linear layer "
        "from which the scores come; use BERT, RoBERTa or the like, or --long cut",
        code="windows-not-pooled",
    )


def pool_windows(outputs: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """:func:`common.windows.pool` with gradients: (inputs, labels + 1) to fp32 (rows, labels).

    ``windows``: (rows, most), which inputs are the windows of each row, then -1.
    """
    absent = windows < 0
    found = outputs.float()[windows.clamp(min=0)]  # (rows, most, labels + 1)
    # Filled before anything is multiplied, so that a row whose scores are NaN spoils no other.
    scores = found[..., :-1].masked_fill(absent[..., None], 0)
    shares = found[..., -1].masked_fill(absent, -torch.inf).softmax(dim=1)
    return (shares[..., None] * scores).sum(dim=1)


def split_head(weights: dict[str, torch.Tensor], head: str) -> dict[str, torch.Tensor]:
    """The whole weights with an ordinary last layer, and the attention's row under a name of its
    own.
    """
    weight, bias = f"network.{head}.weight", f"network.{head}.bias"
    split = {
        weight: weights[weight][:-1].clone(),
        f"network.{ATTENTION_KEY}": weights[weight][-1:].clone(),
    }
    if bias in weights:
        # The bias of the attention is the same for all windows, so it changes nothing.
        split[bias] = weights[bias][:-1].clone()
    return weights | split
