"""What a block keeps for its backward pass under tensor parallelism, with and without cutting the sequence as well.

Counted, not timed: one process stands for each of the ranks alike, on a process group that sends nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForSequenceClassification, DistilBertConfig, LlamaConfig, PreTrainedConfig

from benchmarks.tables import HERE, Parser, circumstances, fact_list, markdown_table, write_table
from common.errors import run_command
from common.model_folder import SavedModel
from training.model.classifier import NewsClassifier
from training.parallelism.tensor_parallel import apply_tensor_parallel

MODULE = "benchmarks.sequence_parallel"
DEGREES = (1, 2, 4)
INTRODUCTION = f"""# Sequence parallelism: what it saves

Written by `python -m {MODULE}`. *MiB kept*: what one block, in training in fp32 on the CPU, keeps on each rank for its
backward pass, beside weights. *calls*: collective calls of the block, forward and backward together; an all-reduce
carries the bytes of a reduce-scatter and an all-gather.

"""
HEADER = ["`--tp`", "MiB kept", "MiB kept, `--sequence_parallel`", "calls", "calls, `--sequence_parallel`"]


@dataclass(frozen=True)
class Case:
    """A block of a network and what runs through it."""

    title: str
    config: PreTrainedConfig
    rows: int
    length: int


# Two blocks, since the last one works for a single token.
SMALL = {"vocab_size": 32, "num_hidden_layers": 2}
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
CASES = (
    Case("A block of DistilBERT-base", DistilBertConfig(n_layers=2, vocab_size=32), 4, 128),
    Case("A block of Llama, 1,024 wide", LlamaConfig(**WIDE, **SMALL), 1, 512),
)


def main() -> None:
    """Count every case and write the page."""
    parser = Parser(MODULE, "Count what a tensor-parallel block keeps and calls")
    parser.add_argument("--output", type=Path, default=HERE / "sequence_parallel.md", help="the page to write")
    options = parser.parse_args()
    page = INTRODUCTION + fact_list(circumstances(MODULE, ("torch", "transformers")))
    for case in CASES:
        page += f"\n## {case.title}, {case.rows} × {case.length} tokens\n\n"
        page += markdown_table(HEADER, [row(case, ranks) for ranks in DEGREES])
    write_table(options.output, page)
    print(page)


def row(case: Case, ranks: int) -> list[str]:
    """One degree: without sequence parallelism and with it."""
    plain, calls = count(case, ranks, sequence_parallel=False)
    cut, calls_cut = count(case, ranks, sequence_parallel=True) if ranks > 1 else (plain, calls)
    return [str(ranks), f"{plain / 2**20:.0f}", f"{cut / 2**20:.0f}", str(calls), str(calls_cut)]


def count(case: Case, ranks: int, *, sequence_parallel: bool) -> tuple[int, int]:
    """Bytes that the first block keeps on rank 0, and its collective calls."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        model = _model(case.config)
        apply_tensor_parallel(model, init_device_mesh("cpu", (ranks,)), sequence_parallel=sequence_parallel)
        length = case.length // ranks if sequence_parallel else case.length
        hidden = torch.randn(case.rows, length, case.config.hidden_size, requires_grad=True)
        mask = torch.ones(case.rows, case.length, dtype=torch.int64)
        context = model.architecture.context(model.network, hidden, mask)
        with CommDebugMode() as calls:
            output, kept = _keeping(model.blocks[0], hidden, context)
            output.sum().backward()
        return kept, calls.get_total_counts()
    finally:
        dist.destroy_process_group()


def _model(config: PreTrainedConfig) -> NewsClassifier:
    network = AutoModelForSequenceClassification.from_config(config)
    return NewsClassifier.from_saved(SavedModel(Path(), config.to_dict(), network.state_dict(), "", [], 0, {})).train()


def _keeping(block: torch.nn.Module, hidden: torch.Tensor, context: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """A block's output, and the bytes that autograd keeps until the backward pass, each once."""
    held = {_local(parameter).untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = block(hidden, **context)
    return output, sum(kept.values())


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    run_command(main)
