"""A real step of a shape and a layout on this machine's processes: what it held, and how long it
took.

torchrun --standalone --nproc_per_node=2 -m benchmarks.real_step memory --asked '{"shape": {...},
"layout": {...}}'
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForSequenceClassification

from benchmarks.harness import Parser
from common.errors import run_command
from training.config import TrainConfig
from training.data.batching import MicroBatch
from training.distributed.group import join_ranks
from training.distributed.ranks import Ranks
from training.model.classifier import NewsClassifier
from training.parallelism.registry import STRATEGIES
from training.planning.layouts import Layout
from training.planning.models import COMMON_KEYS, OWN_KEYS, ModelShape
from training.run.step import optimizer_step
from training.tasks import Classification

AT_UPDATE = "the optimizer begins"


def model_of(shape: ModelShape) -> NewsClassifier:
    """A classifier of this shape with random weights, as training makes it."""
    keys = COMMON_KEYS | OWN_KEYS.get(shape.family, {})
    sizes = {
        "hidden": shape.hidden,
        "layers": shape.layers,
        "heads": shape.heads,
        "intermediate": shape.intermediate,
    }
    config = {
        keys[name]: size for name, size in (sizes | {"positions": shape.max_positions}).items()
    }
    config |= {"vocab_size": shape.vocab, "num_labels": shape.num_labels}
    if shape.type_vocab:
        config["type_vocab_size"] = shape.type_vocab
    if shape.family == "llama":
        config |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    # The constructor wants a saved model; a shape of the planner has none, and its weights do not
    # matter for memory or time. There is no public way to build one from a configuration.
    model = NewsClassifier.__new__(NewsClassifier)
    nn.Module.__init__(model)
    network = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(shape.family, **config)
    )
    model._adopt(network, Classification([str(label) for label in range(shape.num_labels)]))
    return model


def config_of(layout: Layout) -> TrainConfig:
    """The flags of a run with this layout."""
    degrees = {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp_shard": layout.dp_shard if layout.dp_replicate > 1 else 1,
    }
    return TrainConfig(
        strategy=layout.strategy,
        batch_size=layout.micro_batch,
        gradient_accumulation=layout.accumulation,
        precision=layout.precision,
        activation_checkpointing=layout.activation_checkpointing,
        sequence_parallel=layout.sequence_parallel,
        pp_schedule=layout.schedule,
        device="cpu",
        **{name: degree for name, degree in degrees.items() if degree > 1},
    )


def micro_batches_of(shape: ModelShape, layout: Layout) -> list[MicroBatch]:
    """Random rows without padding."""
    rows = layout.micro_batch

    def batch(number: int) -> MicroBatch:
        ids = torch.randint(1, shape.vocab, (rows, layout.seq_len))
        labels = torch.randint(0, shape.num_labels, (rows,))
        # Each row counts as one of all rows of the step, over micro-batches and data ranks: the
        # mean.
        weights = torch.full((rows,), 1 / (rows * layout.accumulation * layout.dp))
        first = number * rows
        positions = np.arange(first, first + rows)
        return MicroBatch(ids, torch.ones_like(ids), labels, weights, positions, first, ids.numel())

    return [batch(number) for number in range(layout.accumulation)]


def measure_memory(shape: ModelShape, layout: Layout, ranks: Ranks) -> dict[str, float]:
    """Bytes on this rank: of weights, gradients and moments, counted; and the peak of a step.

    The third, since DDP rebuilds its buckets in the second. The peak: the tensors that are alive
    when the optimizer begins, and from there back and forth by what PyTorch's allocator gave out
    and took back, as the profiler saw it.
    """
    batches = micro_batches_of(shape, layout)
    strategy = STRATEGIES[layout.strategy](
        model_of(shape), config_of(layout), ranks, layout.precision
    )
    parameters = list(strategy.parameters.values())
    at_update: dict[str, int] = {}

    def note(*_: object) -> None:
        with record_function(AT_UPDATE):
            at_update["gradients"] = _bytes(parameter.grad for parameter in parameters)
            # At this moment gradients and, from earlier steps, moments are there, and activations
            # are gone: a known point from which the profiler's changes can be counted.
            at_update["alive"] = _alive()

    # Moments are allocated in the first step, and DDP rebuilds its buckets in the second. Both
    # would be in the peak.
    for step in (1, 2):
        optimizer_step(strategy, batches, step, 1e-4)
    # The whole model, of which each rank has kept its part, may still wait in a reference cycle.
    gc.collect()
    hook = register_optimizer_step_pre_hook(note)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer_step(strategy, batches, 3, 1e-4)
    hook.remove()
    optimizer = strategy.local_optimizer
    return {
        "parameters": _bytes(parameters),
        "gradients": at_update["gradients"],
        "optimizer": _bytes(
            value for state in optimizer.state.values() for value in state.values()
        ),
        "peak": at_update["alive"] + _above_update(profiler),
    }


def measure_seconds(
    shape: ModelShape, layout: Layout, ranks: Ranks, steps: int = 7
) -> dict[str, float]:
    """The median time of a step on this rank, after two that do not count; and the machine's rates
    around it.

    A machine that others share is not equally fast all day: what a step is held to is measured
    before and after it.
    """
    # The barrier inside each rate makes all ranks compute at the same time, as they do in a step.
    before = measure_rates(ranks)
    batches = micro_batches_of(shape, layout)
    strategy = STRATEGIES[layout.strategy](
        model_of(shape), config_of(layout), ranks, layout.precision
    )
    seconds = []
    for step in range(1, steps + 3):
        ranks.barrier()
        began = time.perf_counter()
        optimizer_step(strategy, batches, step, 1e-4)
        seconds.append(time.perf_counter() - began)
    # The first two allocate gradients and moments, and let DDP rebuild its buckets.
    after = measure_rates(ranks)
    return {"seconds": median(seconds[2:])} | {
        name: (before[name] + after[name]) / 2 for name in before
    }


def _bytes(tensors: Iterable[Any]) -> int:
    local = (
        t.to_local() if isinstance(t, DTensor) else t
        for t in tensors
        if isinstance(t, torch.Tensor)
    )
    return sum(tensor.nbytes for tensor in local)


def _alive() -> int:
    """Bytes of all tensors that Python knows of, each storage once."""
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    # A view and its base share one storage, which counts once.
    storages = [tensor.untyped_storage() for tensor in local if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _above_update(profiler: profile) -> int:
    """How far the allocator's peak lies above what was given out when the optimizer began, bytes."""
    events = profiler.profiler.kineto_results.events()
    update = min(event.start_ns() for event in events if event.name() == AT_UPDATE)
    given_out = peak = at_update = 0
    # Events of several threads come unordered. The profiler knows only what changed since it was
    # started, so the sum is relative: the difference to the optimizer's beginning is what counts.
    for moment, change in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        given_out += change
        peak = max(peak, given_out)
        if moment <= update:
            at_update = given_out
    return peak - at_update


def measure_rates(ranks: Ranks) -> dict[str, float]:
    """What this rank reaches while all others do the same: the machine's entry in the planner's
    table.

    Operations per second of a feed-forward's product and of attention's; bytes per second of a copy
    (read and written) and of a ring's link in an all-reduce; seconds of an all-reduce of one
    number, for each of a ring's hops.
    """
    left, right = torch.randn(1024, 768), torch.randn(768, 3072)
    queries, keys = torch.randn(96, 128, 64), torch.randn(96, 64, 128)
    large, number = torch.randn(16 * 2**20), torch.zeros(1)
    # A ring passes each of its N parts N-1 times to sum it up, and N-1 times to spread the sum.
    hops = 2 * (ranks.world_size - 1)
    copied = torch.empty_like(large)
    rates = {
        # Shapes of a small DistilBERT batch: 8 rows of 128 tokens through the feed-forward, and
        # their 12 heads of 64 channels each in attention. A rate of huge matrices would be out of
        # reach for a step.
        "flops": 2 * 1024 * 768 * 3072 / _seconds(lambda: left @ right, ranks),
        "attention_flops": 2 * 96 * 128 * 128 * 64 / _seconds(lambda: queries @ keys, ranks),
        "memory": 2 * large.nbytes / _seconds(lambda: copied.copy_(large), ranks),
    }
    if hops:
        rates["latency"] = _seconds(lambda: ranks.sum_(number), ranks) / hops
        rates["link"] = (
            large.nbytes * hops / ranks.world_size / _seconds(lambda: ranks.sum_(large), ranks)
        )
    return rates


def _seconds(work: Callable[[], object], ranks: Ranks, repeats: int = 15) -> float:
    taken = []
    for _ in range(repeats):
        ranks.barrier()
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return median(taken)


MEASURES = {"memory": measure_memory, "seconds": measure_seconds}
RATES = ("flops", "attention_flops", "memory", "link")  # the more the better


def main() -> None:
    """Measure, and print from rank 0 the worst of all ranks as JSON."""
    parser = Parser("benchmarks.real_step", __doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("asked", type=json.loads, metavar="JSON", help="shape and layout")
    flags = parser.parse_args()
    with join_ranks("cpu") as ranks:
        torch.set_num_threads(1)
        shape, layout = ModelShape(**flags.asked["shape"]), Layout(**flags.asked["layout"])
        found = MEASURES[flags.what](shape, layout, ranks)
        everywhere = _of_all_ranks(found, ranks)
        if ranks.is_first:
            # A step ends with its slowest rank and fits if the fullest one fits.
            worst = {name: min if name in RATES else max for name in found}
            print(
                json.dumps({name: worst[name](one[name] for one in everywhere) for name in found})
            )


def _of_all_ranks(found: dict[str, float], ranks: Ranks) -> list[dict[str, float]]:
    if not ranks.is_distributed:
        return [found]
    everywhere: list[Any] = [None] * ranks.world_size
    torch.distributed.all_gather_object(everywhere, found)
    return everywhere


if __name__ == "__main__":
    run_command(main)
