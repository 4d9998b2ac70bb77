"""Dropout whose masks belong to the rows of a global batch, not to the process that computes them.

A mask is a slice of one counter-based random stream, keyed by the seed, the step and the place in the model, and
addressed by the row's position in the global batch. So 1, 2 or 4 ranks drop the same values, and a resumed run too.
Four values are drawn from each 64-bit number, which costs a tenth of drawing them one by one.

On the CPU the stream is Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Its 128-bit
products would take a GPU hundreds of kernels, so there it is SplitMix64 (Steele et al. 2014, "Fast splittable
pseudorandom number generators") in some fifteen: other masks than on the CPU, but addressed in the same way. Two things
still draw from torch's own generator, seeded by the first row of the micro-batch: attention on GPUs, inside its fused
kernel, and compiled blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

_DRAWS_PER_BLOCK = 16  # a Philox-4x64 block holds four 64-bit numbers, each four 16-bit draws
_DRAWS_PER_NUMBER = 4
_LEVELS = 1 << 16


class DropoutStream:
    """Where in the random stream the rows of the current micro-batch lie. One object for a whole model."""

    def __init__(self) -> None:
        self.seed = 0
        self.step = 0
        self.first_row = 0
        # On tensor-parallel ranks, which one this is: what draws from torch's generator is split between them.
        self.tensor_rank: int | None = None

    def move(self, seed: int, step: int, first_row: int) -> None:
        """Go to the micro-batch that begins at ``first_row`` of the global batch of ``step``."""
        self.seed, self.step, self.first_row = seed, step, first_row

    @property
    def place(self) -> tuple[int, int, int]:
        """What :meth:`move` was told."""
        return self.seed, self.step, self.first_row

    def seed_torch(self, *more: int) -> None:
        """Seed torch's generators by this place, the tensor rank and ``more``, for what draws from those."""
        split = () if self.tensor_rank is None else (self.tensor_rank,)
        torch.manual_seed(hash((*self.place, *more, *split)) % 2**63)

    def draws(self, site: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Uniform 16-bit draws, int16 of ``shape``; the first dimension counts rows."""
        if device.type != "cpu":
            return self.device_draws(site, shape, device)
        count = shape.numel()
        blocks, skipped = divmod(self.first_row * (count // shape[0]), _DRAWS_PER_BLOCK)
        philox = np.random.Philox(key=[self.seed, self.step], counter=[blocks, site, 0, 0])
        numbers = philox.random_raw((skipped + count + 3) // 4)
        return torch.from_numpy(numbers.view(np.int16)[skipped : skipped + count]).view(shape)

    def device_draws(self, site: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """As :meth:`draws` gives them on GPUs: computed where they are used, without waiting for the device."""
        count = shape.numel()
        first, skipped = divmod(self.first_row * (count // shape[0]), _DRAWS_PER_NUMBER)
        key = int.from_bytes(blake2b(repr((self.seed, self.step, site)).encode(), digest_size=8).digest(), "little")
        numbers = torch.arange(-(-(skipped + count) // _DRAWS_PER_NUMBER), device=device)
        numbers.mul_(_signed(_GAMMA)).add_(_signed(key + first * _GAMMA))
        # SplitMix64's mixing function. Torch's shift repeats the sign bit, which is masked out again.
        numbers.bitwise_xor_((numbers >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(0xBF58476D1CE4E5B9))
        numbers.bitwise_xor_((numbers >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(0x94D049BB133111EB))
        numbers.bitwise_xor_((numbers >> 31).bitwise_and_((1 << 33) - 1))
        return numbers.view(torch.int16)[skipped : skipped + count].view(shape)


_GAMMA = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


def _signed(number: int) -> int:
    """The int64 with the last 64 bits of ``number``."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


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
        if torch.compiler.is_compiling():
            return self._compiled(x)
        threshold = round(self.p * _LEVELS)
        draws = self._part_of(lambda shape: self.stream.draws(self.site, shape, x.device), x.shape)
        return _Masked.apply(x, draws >= threshold - _LEVELS // 2, _LEVELS / (_LEVELS - threshold))

    def masks_attention(self, query: torch.Tensor) -> bool:
        """Whether attention's weights get a mask of the stream; on GPUs fused kernels never hold the weights."""
        return query.device.type == "cpu"

    def _compiled(self, x: torch.Tensor) -> torch.Tensor:
        """By torch's generator: a graph that held the stream's place would serve one step."""
        if self.part is None:
            return F.dropout(x, self.p)
        return x * self._part_of(lambda shape: F.dropout(x.new_ones(shape), self.p), x.shape)

    def _part_of(self, draw: Callable[[torch.Size], torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """This rank's part of what is drawn for the whole tensor."""
        if self.part is None:
            return draw(shape)
        dim, place, parts = self.part
        size = shape[dim]
        whole = torch.Size((*shape[:dim], size * parts, *shape[dim:][1:]))
        return draw(whole).narrow(dim, place * size, size)


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
