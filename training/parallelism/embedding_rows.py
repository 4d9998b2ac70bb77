"""Averages the gradients of word embeddings over ranks: only the rows of tokens that a step has.

Of a table with 30,000 rows a step's texts use one or two thousand; the gradient of any other row is
zero on every rank. In a small encoder the table has half of all parameters, so leaving these rows
out halves what is sent per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from training.model.classifier import NewsClassifier

# Rows; a smaller table is not worth two more collectives.
LEAST_ROWS = 4096


class EmbeddingRows:
    """The tables of a model by name, and which of their rows were read since :meth:`average`."""

    def __init__(self, tables: Mapping[str, nn.Embedding]) -> None:
        self.names = list(tables)
        self._tables = list(tables.values())
        self._used = [torch.zeros(len(table.weight), dtype=torch.uint8) for table in self._tables]
        for table, used in zip(self._tables, self._used, strict=True):
            # As DDP does for what it averages: all ranks start from the first one's weights.
            dist.broadcast(table.weight.detach(), src=0)
            table.register_forward_pre_hook(partial(_note, used))

    def average(self) -> None:
        """Average the gradients in place; every rank calls this after its last backward pass."""
        for table, used in zip(self._tables, self._used, strict=True):
            # Every rank needs the same rows in the same order: those that any rank has read.
            dist.all_reduce(used, dist.ReduceOp.MAX)
            rows = used.nonzero().squeeze(1)
            used.zero_()
            gradient = table.weight.grad
            part = gradient[rows].div_(dist.get_world_size())
            dist.all_reduce(part)
            gradient[rows] = part


def _note(used: torch.Tensor, table: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    if table.training and torch.is_grad_enabled():
        used[inputs[0].flatten()] = 1


def large_tables(model: NewsClassifier) -> dict[str, nn.Embedding]:
    """The embeddings, by the names of their weights, whose gradients are zero outside the rows read.

    Only of known architectures: another network may use the table in a second place, such as a head
    over the vocabulary, which reaches every row.
    """
    if model.architecture is None:
        return {}
    times = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if type(module) is nn.Embedding
        and len(module.weight) >= LEAST_ROWS
        and module.weight.requires_grad
        and times[id(module.weight)] == 1
    }
