"""A model cut into consecutive runs of blocks, for a pipeline whose ranks each hold one or two of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from common.errors import UserError
from training.model.classifier import NewsClassifier
from training.model.precision import autocast


class Stage(nn.Module):
    """Consecutive blocks of a model, with the embeddings in the first stage and the head in the last."""

    def __init__(self, model: NewsClassifier, blocks: range, index: int, num_stages: int) -> None:
        super().__init__()
        self.architecture = model.architecture
        self.dropout_stream = model.dropout_stream
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.network = self._cut(model, blocks)
        self.precision = "fp32"
        # (seed, step, first row) of the coming micro-batches, in order.
        self.positions: Iterator[tuple[int, int, int]] = iter(())

    def _cut(self, model: NewsClassifier, blocks: range) -> nn.Module:
        shared = (*model.parameters(), *model.buffers(), model.dropout_stream)
        network = copy.deepcopy(model.network, {id(value): value for value in shared})
        container = network.get_submodule(self.architecture.blocks)
        network.set_submodule(
            self.architecture.blocks, nn.ModuleDict({str(i): container[i] for i in blocks})
        )
        absent = [] if self.is_first else [self.architecture.embeddings]
        for name in absent if self.is_last else [*absent, *self.architecture.head]:
            network.set_submodule(name, nn.Identity())
        return network

    def forward(self, states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Run one micro-batch.

        Args:
            states: ids, (batch, seq), on the first stage; otherwise the output of the previous
                stage.
            attention_mask: (batch, seq).

        Returns:
            Logits, (batch, num_labels), from the last stage; otherwise hidden states, (batch, seq,
            hidden), in fp32.
        """
        if self.training:
            self.seed_dropout(*next(self.positions))
        # Here, and not around the whole step: a backward pass runs in the dtypes of its forward
        # pass.
        with autocast(self.precision, states.device):
            if self.is_first:
                states = self.architecture.embed(self.network, states)
            states = self.architecture.run_blocks(self.network, states, attention_mask)
            if self.is_last:
                states = self.architecture.classify(self.network, states, attention_mask)
        states = states.float()
        # A DTensor's local part is a view, and a split backward pass detaches its starting point in
        # place.
        return states.clone() if states._is_view() else states

    def seed_dropout(self, seed: int, step: int, first_row: int) -> None:
        self.dropout_stream.move(seed, step, first_row)
        # Torch's generator counts from where it is set, so two stages on a rank would draw the same
        # masks.
        self.dropout_stream.seed_torch(self.index)


def split_stages(
    model: NewsClassifier, indices: Sequence[int], num_stages: int, where: str
) -> list[Stage]:
    """This rank's stages of a model, cut so that all cost about the same; ``where`` names the flags
    that asked for them.

    The rest of the model is freed once the caller drops ``model``.

    Raises:
        UserError: the network family is not known, has fewer blocks than there are stages, or a
            stage would not train.
    """
    if model.architecture is None:
        kind = type(model.network).__name__
        raise UserError(
            f"{where}: {kind} cannot be split into stages; DistilBERT, BERT and Llama can",
            code="model-not-splittable",
        )
    if len(model.blocks) < num_stages:
        raise UserError(
            f"{where}: {num_stages} stages, and the model has {len(model.blocks)} blocks",
            code="uneven-split",
        )
    _check_not_tied(model, where)
    # Looking up embeddings costs next to nothing.
    last = model.architecture.last_block_work + model.architecture.head_work(model.network)
    costs = [1.0] * (len(model.blocks) - 1) + [last]
    runs = balanced_split(costs, num_stages)
    if not any(
        parameter.requires_grad for parameter in model.blocks[runs[0].stop - 1].parameters()
    ):
        raise UserError(
            f"--freeze and {where}: the first of {num_stages} stages has blocks 1 to "
            f"{runs[0].stop}, and nothing in "
            "them is trained; freeze fewer, or use another --strategy",
            code="flags-conflict",
        )
    return [Stage(model, runs[index], index, num_stages) for index in indices]


def _check_not_tied(model: NewsClassifier, where: str) -> None:
    if model.task.is_language_model and model.config.tie_word_embeddings:
        raise UserError(
            f"{where}: the head of this language model is also its embedding table "
            "(tie_word_embeddings), and the "
            "first and the last stage cannot share one; use --strategy zero3",
            code="model-not-splittable",
        )


def balanced_split(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut a list of costs into non-empty runs so that the most expensive run is as cheap as
    possible.

    Among equal cuts the most even one wins, then the one with shorter first runs, because the first
    stage also holds the embeddings and keeps the most activations.
    """
    # best[i]: (most expensive run, sum of squares, ends of the runs) of the first i costs.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ())] + [None] * len(costs)
    for _ in range(num_stages):
        best = [min(_extensions(best, costs, end), default=None) for end in range(len(costs) + 1)]
    assert best[-1] is not None, "more stages than costs"
    ends = best[-1][2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def _extensions(
    best: Sequence[tuple[float, float, tuple[int, ...]] | None], costs: Sequence[float], end: int
) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """The first ``end`` costs with one more run."""
    run = 0.0
    for start in range(end - 1, -1, -1):
        run += costs[start]
        if (before := best[start]) is not None:
            yield max(before[0], run), before[1] + run * run, (*before[2], end)
