"""The weights and moments of a DeepSpeed engine as whole tensors under the model's names, out and in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from training.distributed.ranks import Ranks
from training.model.optimizer import MOMENTS
from training.parallelism.state import SavedState


class ShardedState:
    """The state that the ranks of an engine hold together; every method is a collective call."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        from deepspeed import utils, zero

        self.engine = engine
        self.model = model
        self.stage = int(engine.zero_optimization_stage())
        self.utils, self.zero = utils, zero
        # ZeRO wraps an optimizer, whose parameters are then flat pieces of many.
        self.optimizer = engine.optimizer.optimizer if self.stage else engine.optimizer
        self.pieces: list[torch.Tensor] = (
            engine.optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else [piece for group in self.optimizer.param_groups for piece in group["params"]]
        )
        self._make_moments()

    def _make_moments(self) -> None:
        """Create the optimizer state now; DeepSpeed would only do it in the first step.

        In that step, stages 1 and 2 look for the state after the first group, and would never find
        the second group's.
        """
        for index, piece in enumerate(self.pieces):
            with self._in_memory(index):
                moments = {name: torch.zeros_like(piece) for name in MOMENTS}
                self.optimizer.state[piece] = {"step": self._count(0, piece), **moments}
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    @contextmanager
    def _in_memory(self, index: int) -> Iterator[None]:
        """Read a piece that is offloaded to a disk, and write it and its moments back.

        DeepSpeed 0.19 has no public way to do this before the first step.
        """
        optimizer = self.engine.optimizer
        swapped = (
            self.stage == 3
            and optimizer.swap_optimizer
            and optimizer._swappable_optimizer_subgroup(index)
        )
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        yield
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_out(index)

    def _count(self, step: float, piece: torch.Tensor) -> torch.Tensor | int:
        """A step count the way the optimizer keeps it: DeepSpeed's own optimizers use plain integers."""
        is_torch = isinstance(self.optimizer, torch.optim.AdamW)
        return torch.tensor(float(step), device=piece.device) if is_torch else int(step)

    def weights(self, *, keep: bool) -> dict[str, torch.Tensor]:
        """Whole fp32 weights on the CPU by name; empty unless ``keep``."""
        weights = {}
        for name, tensor in self._tensors().items():
            full = self._whole(tensor)
            if keep:
                weights[name] = full.cpu()
        return weights

    def shared_tensors(self, ranks: Ranks) -> dict[str, torch.Tensor]:
        """Every weight and moment, gathered one at a time and kept by one rank, under the names of a state."""
        held, loads = {}, [0] * ranks.world_size
        for name, full in self._all_whole():
            # The rank that has least so far. All ranks count alike, so they agree on it without
            # asking.
            rank = loads.index(min(loads))
            loads[rank] += full.nbytes
            if rank == ranks.rank:
                held[name] = full.cpu()
        return held

    # A generator, because only one tensor may be whole at a time: no rank has room for all.
    def _all_whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors().items():
            yield f"model/{name}", self._whole(tensor)
        for name, parameter in self.model.named_parameters():
            for moment in MOMENTS:
                yield f"optimizer/{name}/{moment}", self._whole(parameter, moment)
            yield (
                f"optimizer/{name}/step",
                torch.tensor(float(self.optimizer.state[self.pieces[0]]["step"])),
            )

    def load_weights(self, saved: SavedState) -> None:
        """Read weights one by one, into the module and into the optimizer's fp32 pieces."""
        for name, tensor in self._tensors().items():
            shared_out = self.stage == 3 and isinstance(tensor, nn.Parameter)
            full = self._room_for(tensor)
            saved.read({f"model/{name}": full})
            with (
                self.zero.GatheredParameters(tensor, modifier_rank=0)
                if shared_out
                else nullcontext()
            ):
                tensor.data.copy_(full)
            if isinstance(tensor, nn.Parameter):
                self._take(tensor, full)

    def load_moments(self, saved: SavedState) -> None:
        """Read moments one by one, if the checkpoint has any."""
        step = torch.zeros(())
        for name, parameter in self.model.named_parameters():
            if f"optimizer/{name}/step" in saved.tensors:
                for moment in MOMENTS:
                    full = self._room_for(parameter)
                    saved.read({f"optimizer/{name}/{moment}": full})
                    self._take(parameter, full, moment)
                saved.read({f"optimizer/{name}/step": step})
        for piece in self.pieces:  # one number for all
            self.optimizer.state[piece]["step"] = self._count(step.item(), piece)

    def _room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty whole tensor on the CPU. Weights and moments are saved in fp32, whatever training computes in."""
        shape = getattr(tensor, "ds_shape", tensor.shape)
        return torch.empty(
            shape, dtype=torch.float32 if isinstance(tensor, nn.Parameter) else tensor.dtype
        )

    def loss_scale(self) -> dict[str, float]:
        """Scale and good steps in a row, as :class:`training.model.precision.LossScale` keeps them."""
        if not self.engine.fp16_enabled():
            return {}
        scaler = self.engine.optimizer.loss_scaler
        return {
            "scale": scaler.cur_scale,
            "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1,
        }

    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        if self.engine.fp16_enabled() and state:
            scaler = self.engine.optimizer.loss_scaler
            scaler.cur_scale = state["scale"]
            scaler.last_overflow_iter = scaler.cur_iter - int(state["good_steps"]) - 1

    def _tensors(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict(keep_vars=True)

    def _whole(self, tensor: torch.Tensor, moment: str | None = None) -> torch.Tensor:
        if self.stage == 0 or not isinstance(tensor, nn.Parameter):
            return (self.optimizer.state[tensor][moment] if moment else tensor).detach()
        if moment:
            return self.utils.safe_get_full_optimizer_state(tensor, moment)
        return self.utils.safe_get_full_fp32_param(tensor)

    def _take(self, parameter: nn.Parameter, full: torch.Tensor, moment: str | None = None) -> None:
        """Write this rank's part of a whole tensor to where the optimizer holds it."""
        if self.stage == 0:
            if moment:
                self.optimizer.state[parameter][moment].copy_(full)
        elif self.stage < 3 and moment:
            self.utils.safe_set_full_optimizer_state(parameter, full, moment)
        elif self.stage < 3:
            self.utils.safe_set_full_fp32_param(parameter, full)
        elif moment:
            self.utils.safe_set_local_optimizer_state(parameter, _part(parameter, full), moment)
        else:
            self.utils.safe_set_local_fp32_param(parameter, _part(parameter, full))


def _part(parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of a stage-3 parameter; the last parts are padded, unlike in DeepSpeed's own."""
    group = parameter.ds_process_group
    size = parameter.ds_tensor.numel()
    padded = F.pad(full.flatten(), (0, size * dist.get_world_size(group) - full.numel()))
    return padded.narrow(0, size * dist.get_rank(group), size)
