"""The process of a dry run: reads a shape and a layout, runs a step on fake tensors, writes what was alive at the peak.

python -m training.planning.fake_step < asked.json
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, repeat

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # the shapes that collectives give
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from training.model.architectures import find_blocks
from training.model.classifier import NewsClassifier
from training.model.optimizer import parameter_groups
from training.model.precision import autocast
from training.parallelism.activation_checkpointing import apply_activation_checkpointing
from training.parallelism.dims import ParallelDims
from training.parallelism.fsdp import apply_fsdp, set_gradient_sync
from training.parallelism.schedules import SCHEDULES, order_of_actions, stages_of
from training.parallelism.stages import Stage, split_stages
from training.parallelism.tensor_parallel import apply_tensor_parallel
from training.planning.dry_run import HOST_BYTES_LIMIT, Device
from training.planning.live_memory import Kind, LiveMemory
from training.planning.networks import build_model
from training.planning.partition import stages as plan_stages
from training.planning.shapes import Layout, ModelShape


class FakeRank:
    """One rank of a layout, in a process group that sends nothing.

    Args:
        pipeline_rank: which one; of the other dimensions it is the first.
    """

    def __init__(self, shape: ModelShape, layout: Layout, device: Device, pipeline_rank: int) -> None:
        self.shape, self.layout, self.pipeline_rank = shape, layout, pipeline_rank
        # Among the strategies that lie on a mesh, data parallelism is FSDP's, be it over shards of one rank.
        self.is_fsdp = layout.strategy not in ("ddp", "zero1") and layout.dp > 1
        dims = ParallelDims(layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
        rank = pipeline_rank * (layout.ranks // layout.pp)
        dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
        mesh = dims.build_mesh("cpu")  # of real numbers, therefore before the fake ones
        self.tensor_mesh = mesh["tp"]
        self.data_mesh = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
        self.memory = LiveMemory()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self.fake, _real_meshes():
            self.parts = self._lay_out(build_model(shape, as_on_gpus=device == "gpu"))
        self.parameters = list({id(p): p for part in self.parts.values() for p in part.parameters()}.values())
        for parameter in self.parameters:
            self.memory.count(parameter, "parameters")
            if not self.is_fsdp:
                parameter.register_post_accumulate_grad_hook(lambda p: self.memory.count(p.grad, "gradients"))

    def _lay_out(self, model: NewsClassifier) -> dict[int, nn.Module]:
        """As ``training.parallelism.mesh`` does it; this rank's stages, or the whole model, by their numbers."""
        layout = self.layout
        parts = self._stages(model) if layout.pp > 1 else {0: model}
        for part in parts.values():
            if layout.tp > 1:
                apply_tensor_parallel(part, self.tensor_mesh, sequence_parallel=layout.sequence_parallel)
            blocks = find_blocks(part)
            if layout.activation_checkpointing != "none":
                for block in blocks:
                    apply_activation_checkpointing(block, layout.activation_checkpointing, model.dropout_stream)
            if self.is_fsdp:
                apply_fsdp(
                    part,
                    blocks,
                    self.data_mesh,
                    reshard_after_forward=layout.strategy != "zero2" and layout.pp == 1,
                    precision=layout.precision,
                )
        return parts

    def _stages(self, model: NewsClassifier) -> dict[int, nn.Module]:
        layout = self.layout
        numbers = stages_of(layout.schedule, self.pipeline_rank, layout.pp)
        count = layout.pp * len(numbers)
        if self.shape.num_labels is not None:
            stages = split_stages(model, numbers, count, f"pp {layout.pp}")
        else:  # what is only planned is cut as the plan says
            ends = list(accumulate((stage.blocks for stage in plan_stages(self.shape, count)), initial=0))
            stages = [Stage(model, range(ends[i], ends[i + 1]), i, count) for i in numbers]
        for stage in stages:
            stage.precision, stage.places = layout.precision, repeat((0, 0, 0))
        return dict(zip(numbers, stages, strict=True))

    def run(self) -> LiveMemory:
        """A step with optimizer state in place, as every step but the first is."""
        with self.fake, self.memory:
            optimizer = torch.optim.AdamW(self._parameters_to_update(), lr=1e-3, fused=True)
            with self._making("gradients"):
                self._set_gradients()
            with self._making("optimizer"):
                optimizer.step()
            if not self._keeps_gradients():
                optimizer.zero_grad()
            self.memory.restart()
            self._passes()
            with self._making("optimizer"):
                optimizer.step()
        return self.memory

    def _parameters_to_update(self) -> Sequence[torch.Tensor]:
        if self.layout.strategy != "zero1":
            return self.parameters
        # Whole tensors are dealt out, so that the shares differ; the largest counts.
        zero = ZeroRedundancyOptimizer(parameter_groups(self.parameters, 0.01), torch.optim.AdamW, lr=1e-3)
        shares = [[p for group in groups for p in group["params"]] for groups in zero._partition_parameters()]
        return max(shares, key=lambda share: sum(p.numel() for p in share))

    def _keeps_gradients(self) -> bool:
        # DDP's buckets hold the gradients from the first step to the last.
        return self.layout.strategy in ("ddp", "zero1") and self.layout.ranks > 1

    def _set_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
            self.memory.count(parameter.grad, "gradients")

    def _passes(self) -> None:
        """Forward and backward passes of all micro-batches, in the order of the schedule."""
        if self.layout.pp > 1:
            ranks = order_of_actions(self.layout.schedule, self.layout.pp, self.layout.accumulation)
            actions = [(a.kind, a.stage, a.micro_batch) for a in ranks[self.pipeline_rank]]
        else:  # a first, one like all between, and a last
            actions = [(kind, 0, i) for i in range(min(self.layout.accumulation, 3)) for kind in "FB"]
        last = max(micro_batch for _, _, micro_batch in actions)
        # The halves of a backward pass: what is kept goes with the second.
        ends = "W" if SCHEDULES[self.layout.schedule].splits_backward and self.layout.pp > 1 else "B"
        given: dict[tuple[int, int], torch.Tensor] = {}
        for kind, stage, micro_batch in actions:
            if kind == "F":
                given[stage, micro_batch] = self._forward(stage)
            elif kind in (ends, "B"):
                if self.is_fsdp:
                    scatters = self.layout.dp_shard > 1 and self.layout.pp == 1
                    set_gradient_sync([self.parts[stage]], wanted=micro_batch == last, between_copies_only=scatters)
                self._backward(given.pop((stage, micro_batch)))

    def _forward(self, number: int) -> torch.Tensor:
        layout, part = self.layout, self.parts[number]
        ids = torch.zeros(layout.micro_batch, layout.seq_len, dtype=torch.int64)
        with self._making("activations"):
            if layout.pp > 1:  # casts for itself
                out = part(ids if part.is_first else self._received(), torch.ones_like(ids))
            else:
                with autocast(layout.precision, ids.device):
                    out = part(ids, torch.ones_like(ids))
            if layout.pp > 1 and not part.is_last:
                return out
            labels = ids if self.shape.num_labels is None else ids[:, 0]
            return F.cross_entropy(out.flatten(0, -2).float(), labels.flatten())

    def _received(self) -> torch.Tensor:
        """What the stage before sends: (batch, seq, hidden), the sequence cut under sequence parallelism."""
        layout = self.layout
        length = layout.seq_len // (layout.tp if layout.sequence_parallel else 1)
        return torch.empty(layout.micro_batch, length, self.shape.hidden, requires_grad=True)

    def _backward(self, out: torch.Tensor) -> None:
        with self._making("temporary"):
            out.backward(torch.empty_like(out))
        del out
        self._sort()

    def _sort(self) -> None:
        """Say of what has come to stay what it is for."""
        held = {parameter.grad: "gradients" for parameter in self.parameters}
        for weights in _fsdp_parameters(self.parts.values()):
            # Micro-batches before the last leave whole gradients.
            held |= {weights.unsharded_accumulated_grad: "gradients"}
            held |= dict.fromkeys(weights.all_gather_outputs, "communication")
        for tensor, kind in held.items():
            if tensor is not None:
                self.memory.count(tensor, kind)

    @contextmanager
    def _making(self, kind: Kind) -> Iterator[None]:
        before, self.memory.kind = self.memory.kind, kind
        yield
        self.memory.kind = before


def _fsdp_parameters(parts: Iterable[nn.Module]) -> Iterator[FSDPParam]:
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            yield from group.fsdp_params


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Sharding what is cut already joins two meshes, which are of real numbers even among fake tensors."""
    join = DeviceMesh._concatenate

    def join_for_real(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return join(meshes)

    DeviceMesh._concatenate = staticmethod(join_for_real)
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(join)


def worst_rank(shape: ModelShape, layout: Layout, device: Device) -> dict[str, object]:
    """What the rank of a pipeline that needs most holds at its peak: the first keeps most, the last has the head."""
    began = time.perf_counter()
    found: dict[int, LiveMemory] = {}
    for pipeline_rank in sorted({0, layout.pp - 1}):
        found[pipeline_rank] = FakeRank(shape, layout, device, pipeline_rank).run()
        dist.destroy_process_group()
    stage, memory = max(found.items(), key=lambda item: item[1].peak)
    alive = dict(memory.at_peak)
    temporary = alive.pop("temporary")
    alive["activations"] += temporary
    return {
        "memory": alive,
        "temporary": temporary,
        "stage": stage,
        "seconds": time.perf_counter() - began,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Read what is asked for from standard input, and answer on standard output."""
    resource.setrlimit(resource.RLIMIT_DATA, (HOST_BYTES_LIMIT, HOST_BYTES_LIMIT))
    asked = json.load(sys.stdin)
    try:
        found = worst_rank(ModelShape(**asked["shape"]), Layout(**asked["layout"]), asked["device"])
    except Exception as error:  # whatever it is, the plan says it in one line
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
