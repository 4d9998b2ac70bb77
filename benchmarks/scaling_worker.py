"""One rank of one layout: python -m benchmarks.scaling_worker FOLDER FIELDS STEPS; ``benchmarks.scaling`` starts it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.utils import logging as transformers_logging

from benchmarks.workload import GLOBAL_BATCH, MAX_LENGTH, SEED, Workload, read_workload
from training.config import TrainConfig
from training.data.batching import LengthBucketSampler, rank_share
from training.model.classifier import NewsClassifier
from training.parallelism.blocks import length_multiple
from training.parallelism.distributed import Ranks, ranks
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy
from training.run.step import optimizer_step

WARMUP_STEPS = 3


def main() -> None:
    """Measure and print the result as one line of JSON."""
    folder, fields, steps = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    transformers_logging.set_verbosity_error()
    config = TrainConfig(seed=SEED, device="cpu", max_length=MAX_LENGTH, **fields)
    with ranks(config.device) as mine:
        result = measure(read_workload(folder), config, mine, steps)
    print(json.dumps(result), flush=True)


def measure(workload: Workload, config: TrainConfig, mine: Ranks, steps: int) -> dict[str, Any]:
    """Time ``steps`` optimizer steps after a few that warm up; and the bytes of state that this rank holds."""
    model = NewsClassifier(len(workload.label_names), str(workload.model_folder), workload.label_names)
    strategy = STRATEGIES[config.strategy](model, config, mine, "fp32")
    held: dict[str, int] = {}
    strategy.optimizer.register_step_pre_hook(lambda *_: held.update(bytes_of_state(strategy)))
    sampler = LengthBucketSampler(workload.timed.lengths, GLOBAL_BATCH, SEED)
    batches = list(islice(cycle(sampler), WARMUP_STEPS + steps))
    began = 0.0
    for step, batch in enumerate(batches, start=1):
        if step == WARMUP_STEPS + 1:
            mine.barrier()
            began = time.perf_counter()
        share = rank_share(
            workload.timed,
            batch,
            strategy.place,
            config.gradient_accumulation,
            pad_to_multiple_of=length_multiple(config, "cpu"),
            max_length=MAX_LENGTH,
        )
        optimizer_step(strategy, share, step, learning_rate=2e-5)
    mine.barrier()
    return {"seconds": time.perf_counter() - began, "rows": steps * GLOBAL_BATCH, **held}


def bytes_of_state(strategy: Strategy) -> dict[str, int]:
    """Bytes of this rank's weights, gradients and moments, as they are when the optimizer steps."""
    parameters = list(strategy.parameters.values())
    optimizer = getattr(strategy, "own_optimizer", strategy.optimizer)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq") if name in state]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {"parameters": _bytes(parameters), "gradients": _bytes(gradients), "optimizer": _bytes(moments)}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


if __name__ == "__main__":
    main()
