"""States as a checkpoint keeps them, without a disk: what all ranks hold, put together, and read back in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from training.checkpointing.ownership import chunk_of
from training.distributed.ranks import Ranks
from training.parallelism.state import StrategyState
from training.parallelism.strategy import Strategy

Tensors = dict[str, torch.Tensor]


@dataclass
class WholeState:
    """Whole tensors on the CPU, from which a strategy reads its part."""

    tensors: Tensors
    plain: dict[str, Any]

    def read(self, wanted: Tensors) -> None:
        """Fill tensors in place, those that are shared out as torch itself would share out the whole."""
        with torch.no_grad():
            for name, tensor in wanted.items():
                whole = self.tensors[name].to(tensor.dtype)
                assert whole.shape == tensor.shape, name
                if isinstance(tensor, DTensor):
                    whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.copy_(whole)

    def part(self, prefix: str) -> Tensors:
        """The tensors whose names begin so, without that."""
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}

    @property
    def model(self) -> Tensors:
        """The weights."""
        return self.part("model/")

    def moments(self, field: str) -> Tensors:
        """One figure of the optimizer (exp_avg, exp_avg_sq, step) by the names of parameters."""
        optimizer = self.part("optimizer/")
        return {
            name.removesuffix(f"/{field}"): value for name, value in optimizer.items() if name.endswith(f"/{field}")
        }


def whole_state(strategy: Strategy, ranks: Ranks) -> WholeState:
    """What all ranks hold, on every rank; all of them call it. The state may go on: these are copies."""
    state: StrategyState = strategy.state_dict()
    mine = []
    for name, tensor in state.tensors.items():
        chunk = chunk_of(name, tensor)
        mine.append((chunk, chunk.cut_from(tensor).detach().cpu().clone()))
    whole: Tensors = {}
    for pieces in ranks.gather(mine):
        for chunk, values in pieces:
            target = whole.setdefault(chunk.name, torch.full(chunk.whole, float("nan"), dtype=chunk.dtype))
            target[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))] = values
    return WholeState(whole, state.plain)
