"""The GPU section of the page on training throughput: ours with joined rows beside the Trainer."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from benchmarks import harness
from benchmarks.variants import VARIANTS, epoch_rank
from benchmarks.workload import SIZES, make_workload
from common.errors import UserError
from training.run.utilization import peak_of_device

SECTION = "GPUs"
PRECISION = "bf16"
SIZE, ROWS, GLOBAL_BATCH = "base", 12_800, 256
TRAINER, OURS = "trainer-grouped-bf16", "ours-bf16"
CHOSEN = (TRAINER, "trainer-flash-bf16", "ours-padded-bf16", OURS)
EMPTY = (
    "No GPU has been available, so this was not measured; `make gpu-check` does it on a machine "
    "that has one.\n"
)
NOTE = """
Everything runs in one process on one GPU, one variant after the other within a round. *MFU*: the matrix products of the
real tokens that are computed, without padding and without what ours leaves out of the last block, per second, over the
peak of the GPU. FlashAttention-2 is measured if the package flash-attn is installed.

"""
Section = dict[str, Any]


def measure(options: Namespace, facts: dict[str, str]) -> Iterator[Section]:
    """The section after each round.

    Raises:
        UserError: there is not exactly one GPU.
    """
    if torch.cuda.device_count() != 1:
        # The Trainer would spread its batches over all GPUs that it sees.
        raise UserError(
            f"--device gpu: needs one GPU, and PyTorch sees {torch.cuda.device_count()}; choose "
            "one with CUDA_VISIBLE_DEVICES=0",
            code="gpu-not-found",
        )
    names = [name for name in CHOSEN if "flash" not in name or is_flash_attn_2_available()]
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        given = (SIZE, options.dataset, options.tokenizer, ROWS)
        workload = make_workload(Path(folder), *given, global_batch=GLOBAL_BATCH)
        lengths = workload.timed.lengths
        section: Section = {
            "facts": facts | {"Dataset": workload.dataset},
            "rows": len(lengths),
            "tokens": int(lengths.sum()),
            "squares": int((lengths**2).sum()),
            "peak": peak_of_device(torch.device("cuda", 0), PRECISION),
            "rounds": [],
        }

        def epoch(name: str, number: int) -> dict[str, Any]:
            return epoch_rank(folder, name, "cuda")

        def describe(run: dict[str, Any]) -> str:
            return f"{section['rows'] / run['seconds']:.0f} samples/s"

        cases = {name: name for name in names}
        for found in harness.run_rounds(cases, options.rounds, epoch, describe):
            section["rounds"].append(found)
            yield section


def mfu(section: Section, name: str, seconds: float) -> float:
    """Model FLOPs utilization of an epoch; see ``NOTE``."""
    first_tokens = section["rows"] if VARIANTS[name].is_ours else 0
    work = SIZES[SIZE].training_work(section["tokens"], section["squares"], first_tokens)
    return work / seconds / section["peak"]


def render(section: Section) -> str:
    """The section of the page; empty, it says how it is filled."""
    if not section:
        return f"## {SECTION}\n\n{EMPTY}"
    rounds, blocks = section["rounds"], SIZES[SIZE]

    def values(name: str, field: str = "seconds") -> list[float]:
        return [found[name][field] for found in rounds]

    def rates(name: str) -> list[float]:
        return [section["rows"] / seconds for seconds in values(name)]

    facts = section["facts"] | {
        "Model": f"DistilBERT, {blocks.n_layers} blocks of {blocks.dim}, {PRECISION}",
        "Rows": f"{section['rows']:,} of {section['tokens'] / section['rows']:.1f} tokens each on "
        f"average, global batch {GLOBAL_BATCH}",
        "Peak": f"{section['peak'] / 1e12:,.0f} TFLOP/s in {PRECISION}",
        "Rounds": str(len(rounds)),
    }
    columns = {
        "variant": lambda name: VARIANTS[name].title,
        "samples/s": lambda name: f"{median(rates(name)):,.0f}",
        "range": lambda name: harness.spread(rates(name), 0),
        "× Trainer, length grouping": lambda name: (
            f"{harness.median_ratio(rates(name), rates(TRAINER)):.2f}"
        ),
        "padding": lambda name: f"{1 - section['tokens'] / median(values(name, 'cells')):.1%}",
        "MFU": lambda name: f"{mfu(section, name, median(values(name))):.1%}",
        "loss": lambda name: f"{median(values(name, 'loss')):.3f}",
    }
    return (
        f"## {SECTION}\n\n{harness.fact_list(facts)}{NOTE}{harness.table(columns, list(rounds[0]))}"
    )
