"""Dropout whose masks belong to the rows of a global batch, not to the process that computes them.

On the CPU a mask is a slice of one counter-based random stream (Philox; Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), keyed by the seed, the step and the place in the model, and addressed by the row's
position in the global batch. So 1, 2 or 4 ranks drop the same values, a resumed run too, and drawing four values
from each 64-bit number costs a tenth of drawing them one by one. On GPUs torch's own fused dropout is used.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

_DRAWS_PER_BLOCK = 16  # a Philox-4x64 block holds four 64-bit numbers, each four 16-bit draws
_LEVELS = 1 << 16


class DropoutStream:
    """Where in the random stream the rows of the current micro-batch lie. One object for a whole model."""

    def __init__(self) -> None:
        self.seed = 0
        self.step = 0
        self.first_row = 0

    def move(self, seed: int, step: int, first_row: int) -> None:
        """Go to the micro-batch that begins at ``first_row`` of the global batch of ``step``."""
        self.seed, self.step, self.first_row = seed, step, first_row

    @property
    def place(self) -> tuple[int, int, int]:
        """What :meth:`move` was told."""
        return self.seed, self.step, self.first_row

    def draws(self, site: int, shape: torch.Size) -> torch.Tensor:
        """Uniform 16-bit draws, int16 of ``shape``; the first dimension counts rows."""
        count = shape.numel()
        blocks, skipped = divmod(self.first_row * (count // shape[0]), _DRAWS_PER_BLOCK)
        philox = np.random.Philox(key=[self.seed, self.step], counter=[blocks, site, 0, 0])
        numbers = philox.random_raw((skipped + count + 3) // 4)
        return torch.from_numpy(numbers.view(np.int16)[skipped : skipped + count]).view(shape)


class RowDropout(nn.Module):
    """Drop-in for ``nn.Dropout`` on tensors whose first dimension is the rows of the batch.

    Args:
        p: probability of dropping, kept to 1/65,536; what is kept is scaled by the inverse of its exact share.
        site: this place's number in the model; equal numbers would repeat a mask.
        stream: shared by all places.

    ``part``: where ranks split the tensor between them, (dimension, this rank's place, number of parts); the mask is
    drawn for the whole and cut.
    """

    def __init__(self, p: float, site: int, stream: DropoutStream) -> None:
        super().__init__()
        self.p = p
        self.site = site
        self.stream = stream
        self.part: tuple[int, int, int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop values of ``x`` (rows, ...) while training."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        threshold = round(self.p * _LEVELS)
        kept = self._draws(x.shape) >= threshold - _LEVELS // 2
        return _Masked.apply(x, kept, _LEVELS / (_LEVELS - threshold))

    def _draws(self, shape: torch.Size) -> torch.Tensor:
        if self.part is None:
            return self.stream.draws(self.site, shape)
        dim, place, parts = self.part
        size = shape[dim]
        whole = torch.Size((*shape[:dim], size * parts, *shape[dim:][1:]))
        return self.stream.draws(self.site, whole).narrow(dim, place * size, size)


class _Masked(torch.autograd.Function):
    """``x * kept * scale`` that keeps the boolean mask, a quarter of a float one, for the backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:  # noqa: ANN001
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (x * kept).mul_(scale)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN001
        (kept,) = ctx.saved_tensors
        return (gradient * kept).mul_(ctx.scale), None, None


def use_row_dropout(model: nn.Module) -> DropoutStream:
    """Put a :class:`RowDropout` in the place of every ``nn.Dropout`` of ``model``; they hold no parameters."""
    stream = DropoutStream()
    places = [
        (parent, name, child.p)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Dropout
    ]
    for site, (parent, name, p) in enumerate(places):
        setattr(parent, name, RowDropout(p, site, stream))
    return stream
