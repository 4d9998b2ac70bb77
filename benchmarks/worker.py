"""One rank of one measurement: python -m benchmarks.worker FOLDER VARIANT; started by ``benchmarks.processes``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from benchmarks.variants import VARIANTS
from benchmarks.workload import read_workload
from training.model.precision import DTYPES
from training.parallelism.distributed import Ranks, ranks

MATMUL = "matmul-"
MATMUL_SIZE = 2048
MATMUL_REPEATS = 12


def main() -> None:
    """Measure and print the result as one line of JSON."""
    folder, variant = Path(sys.argv[1]), sys.argv[2]
    transformers_logging.set_verbosity_error()
    with ranks("cpu") as mine:
        if variant.startswith(MATMUL):
            result = measure_matmul(variant.removeprefix(MATMUL))
        else:
            result = measure_epoch(folder, variant, mine)
    print(json.dumps(result), flush=True)


def measure_epoch(folder: Path, variant: str, mine: Ranks) -> dict[str, Any]:
    """Warm up on other rows with another copy of the model, then time an epoch."""
    workload = read_workload(folder)
    run = VARIANTS[variant].run
    run(workload, workload.warmup, mine)
    epoch = run(workload, workload.timed, mine)
    return {
        "seconds": epoch.seconds,
        "cells": epoch.cells,
        "squares": epoch.squares,
        "loss": epoch.loss.average,
        "threads": torch.get_num_threads(),
    }


def measure_matmul(precision: str) -> dict[str, Any]:
    """The best rate of a square matrix product, all ranks multiplying at the same time."""
    size = MATMUL_SIZE
    left, right = (torch.randn(size, size).to(DTYPES[precision]) for _ in range(2))
    out = left @ right
    best = float("inf")
    for _ in range(MATMUL_REPEATS):
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - started)
    return {"flops": 2 * size**3 / best, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    main()
