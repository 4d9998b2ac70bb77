"""Dropout whose masks belong to the rows of a global batch, not to the process that computes them.

A mask is a slice of a counter-based random stream. The seed, the step and the dropout layer choose
the stream, and the row's position in the global batch is the address in it. So 1, 2 or 4 ranks drop
the same values, and so does a resumed run. Four values come from each 64-bit random number, which
costs a tenth of drawing them one by one.

On the CPU the stream is Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
Its 128-bit products would take hundreds of kernels on a GPU, so there it is SplitMix64 (Steele et
al. 2014, "Fast splittable pseudorandom number generators") in about fifteen: other masks than on
the CPU, but with the same addresses. Two things still draw from torch's own generator, seeded by
the first row of the micro-batch: attention on GPUs, inside its fused kernel, and compiled blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from training.model.packing import Packing

_DRAWS_PER_BLOCK = 16  # a Philox-4x64 block holds four 64-bit numbers, each four 16-bit draws
_DRAWS_PER_NUMBER = 4
_LEVELS = 1 << 16


class DropoutStream:
    """The random stream, and the position in it of the current micro-batch. One object per model."""

    def __init__(self) -> None:
        self.seed = 0
        self.step = 0
        self.first_row = 0
        # If the rows of the micro-batch are joined without padding.
        self.packing: Packing | None = None
        # With tensor parallelism, the number of this rank: each draws other masks from torch's
        # generator.
        self.tensor_rank: int | None = None

    def move(self, seed: int, step: int, first_row: int, packing: Packing | None = None) -> None:
        self.seed, self.step, self.first_row, self.packing = seed, step, first_row, packing

    @property
    def position(self) -> tuple[int, int, int, Packing | None]:
        return self.seed, self.step, self.first_row, self.packing

    def seed_torch(self, *more: int) -> None:
        """Seed torch's own generators by this position, the tensor-parallel rank and ``more``."""
        split = () if self.tensor_rank is None else (self.tensor_rank,)
        torch.manual_seed(hash((*self.position[:3], *more, *split)) % 2**63)

    def draws(self, site: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return self.device_draws(site, shape, device)
        count = shape.numel()
        # Draw number i of the global batch is always the same bits of the stream. Philox can jump
        # to any block of 16 draws, and what precedes our first row within that block is skipped.
        blocks, skipped = divmod(self.first_row * (count // shape[0]), _DRAWS_PER_BLOCK)
        philox = np.random.Philox(key=[self.seed, self.step], counter=[blocks, site, 0, 0])
        numbers = philox.random_raw((skipped + count + 3) // 4)
        return torch.from_numpy(numbers.view(np.int16)[skipped : skipped + count]).view(shape)

    def device_draws(self, site: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """:meth:`draws` on a GPU: computed there, without synchronising."""
        count = shape.numel()
        first, skipped = divmod(self.first_row * (count // shape[0]), _DRAWS_PER_NUMBER)
        # SplitMix64's state after n steps is key + n * gamma, so all numbers can be mixed at once.
        # Torch has no uint64, but int64 arithmetic wraps around to the same bits.
        stream = repr((self.seed, self.step, site)).encode()
        key = int.from_bytes(blake2b(stream, digest_size=8).digest(), "little")
        numbers = torch.arange(-(-(skipped + count) // _DRAWS_PER_NUMBER), device=device)
        numbers.mul_(_signed(_GAMMA)).add_(_signed(key + first * _GAMMA))
        # SplitMix64's mixing function. Torch's shift repeats the sign bit, which is masked out
        # again.
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1))
            numbers.mul_(_signed(factor))
        numbers.bitwise_xor_((numbers >> 31).bitwise_and_((1 << 33) - 1))
        return numbers.view(torch.int16)[skipped : skipped + count].view(shape)


_GAMMA = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


class RowDropout(nn.Module):
    """Drop-in for ``nn.Dropout`` on tensors whose first dimension is the rows of the batch.

    Args:
        p: probability of dropping, rounded to 1/65,536. Kept values are scaled by the inverse of
        their exact share.
        site: this layer's number in the model; layers with equal numbers would repeat a mask.
        stream: shared by all layers.

    ``part``: with tensor parallelism, (dimension that is split, this rank's index, number of
    ranks). The mask is drawn for the whole tensor, and each rank takes its slice.
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
        if torch.compiler.is_compiling():
            return self._compiled(x)
        draws = self.draws(x.shape, x.device)
        return _Masked.apply(x, draws, self.lowest_kept, self.scale)

    # Draws are signed, -32768 to 32767: the lowest `threshold` of the 65,536 values are dropped.

    @property
    def _threshold(self) -> int:
        return round(self.p * _LEVELS)

    @property
    def lowest_kept(self) -> int:
        """Values whose draw is below it are dropped."""
        return self._threshold - _LEVELS // 2

    @property
    def scale(self) -> float:
        """What kept values are multiplied by."""
        return _LEVELS / (_LEVELS - self._threshold)

    def draws(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """A draw for each value of a tensor of that shape, int16."""
        packing = self.stream.packing
        if packing and shape[:2] == (1, packing.tokens):
            # The masks that these rows have when they are padded.
            padded = torch.Size((*packing.shape, *shape[2:]))
            return packing.pack(self.stream.draws(self.site, padded, device))
        return self._part_of(lambda whole: self.stream.draws(self.site, whole, device), shape)

    def masks_attention(self, query: torch.Tensor) -> bool:
        """Whether attention weights get a mask from the stream; fused kernels on GPUs never store
        the weights.
        """
        return query.device.type == "cpu"

    def _compiled(self, x: torch.Tensor) -> torch.Tensor:
        # With torch's generator, because a graph compiled with a position of the stream would be
        # valid for one step.
        if self.part is None:
            return F.dropout(x, self.p)
        return x * self._part_of(lambda shape: F.dropout(x.new_ones(shape), self.p), x.shape)

    def _part_of(
        self, draw: Callable[[torch.Size], torch.Tensor], shape: torch.Size
    ) -> torch.Tensor:
        if self.part is None:
            return draw(shape)
        dim, position, parts = self.part
        size = shape[dim]
        # Every rank draws the whole mask, so that all ranks agree with a run without tensor
        # parallelism.
        whole = torch.Size((*shape[:dim], size * parts, *shape[dim:][1:]))
        return draw(whole).narrow(dim, position * size, size)


class _Masked(torch.autograd.Function):
    """``x`` times its mask times ``scale``. It saves the mask as bytes, a quarter of the size of
    floats, for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, draws: torch.Tensor, lowest_kept: int, scale: float
    ) -> torch.Tensor:
        if x.device.type == "cpu":
            # As floats: the CPU compares integers one by one, and is ten times as slow at a product
            # of floats and bools as at converting them and multiplying.
            kept = draws.to(torch.float32).ge_(lowest_kept)
            bytes_kept = kept.to(torch.uint8)
        else:
            bytes_kept = kept = draws >= lowest_kept
        ctx.save_for_backward(bytes_kept)
        ctx.scale = scale
        return _times(x, kept, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (kept,) = ctx.saved_tensors
        return _times(gradient, kept, ctx.scale), None, None, None


def _times(x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    # A GPU converts within the product.
    kept = kept if kept.dtype == torch.bool else kept.to(x.dtype)
    return (x * kept).mul_(scale)


def use_row_dropout(model: nn.Module) -> DropoutStream:
    stream = DropoutStream()
    positions = [
        (parent, name, child.p)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Dropout
    ]
    for site, (parent, name, p) in enumerate(positions):
        setattr(parent, name, RowDropout(p, site, stream))
    return stream
