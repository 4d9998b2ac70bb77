"""What features of training cost or save, a question each: balance, compression, async_saving,
restart, ...

Each question alternates its variants on this machine's processes and writes a page of its own. The
ranks' side of a question, if it has one, is the function whose name ends in ``_rank``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, mean, median, stdev
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from prometheus_client import generate_latest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import (
    AutoModelForSequenceClassification,
    DistilBertConfig,
    LlamaConfig,
    PreTrainedConfig,
)

import training.monitoring.monitors
from benchmarks import harness
from benchmarks.processes import Layout, free_port, last_line, run_ranks
from benchmarks.training_run import train
from benchmarks.workload import MAX_LENGTH, SEED, write_weights
from common.errors import OneLineParser, TrainingFailure, UserError, positive
from common.model_folder import SavedModel
from training.checkpointing import open_location
from training.checkpointing.saver import Saver
from training.config import TrainConfig, parse_config
from training.data.batching import MicroBatch, micro_batches_of_rank
from training.data.dataset import SAMPLE, load_data
from training.data.tokenized import TokenizedRows, load_tokenizer
from training.distributed.group import join_ranks
from training.facts import TINY
from training.model.classifier import NewsClassifier
from training.monitoring.events import Event, EventStream, StepsAgreed, StepStarted, read_events
from training.monitoring.replicas import first_difference
from training.monitoring.run_folder import restart_split
from training.monitoring.status import read_statuses
from training.parallelism.registry import STRATEGIES
from training.parallelism.tensor_parallel import apply_tensor_parallel
from training.quiet import quiet_libraries
from training.run.step import optimizer_step
from training.run.subscribers import COMPARE_EVERY
from training.run.trainer import Trainer

MODULE = "benchmarks.training_features"


def add_training_flags(parser: ArgumentParser, epochs: int, batch_size: int) -> None:
    """The flags of a question that trains whole runs."""
    add = parser.add_argument
    add("--dataset", default=SAMPLE, help="as for training")
    add("--model", default=TINY, help="as for training")
    add("--epochs", type=positive, default=epochs, help=f"default: {epochs}")
    add(
        "--batch_size",
        type=positive,
        default=batch_size,
        help=f"rows per rank (default: {batch_size})",
    )
    add("--max_train_rows", type=int, default=0, help="0 = all (default)")
    add("--layout", type=Layout.parse, default="2x1", help="PROCESSESxTHREADS (default: 2x1)")


def training_flags(options: Namespace) -> dict[str, Any]:
    """Those flags for the trainer."""
    return {
        name: getattr(options, name)
        for name in ("dataset", "model", "epochs", "batch_size", "max_train_rows")
    }


def write(options: Namespace, title: str, text: str, runs: str, body: str) -> None:
    """Write a question's page."""
    about = harness.introduction(f"{MODULE} {options.question}", title, text)
    facts = harness.measurement_facts(MODULE) | ({"Runs": runs} if runs else {})
    harness.write_page(options.output, f"{about}{harness.fact_list(facts)}\n{body}")


# balance: how much faster is a run with one slow rank if the ranks share each batch by their speed?

FIRST_BALANCED_STEP = 21  # by then the ranks have agreed on shares, and have corrected them once
BALANCE = f"""
The last rank computes each of its rows several times, forward and backward, and learns from one of them, so its work is
real and in proportion to its rows. Runs with `--balance none` and `--balance auto` alternate. Each time is the median
over rounds of the mean step from step {FIRST_BALANCED_STEP} on, with the smallest and the largest; both kinds of run
train on the same batches. *expected*: what arithmetic predicts if a step consisted only of computing rows. If one of N
ranks is k times slower, then even shares take k/N of the time that one of the other ranks would need for the whole
batch, and shares by speed take 1/(N - 1 + 1/k) of it: the mean speed counts, not that of the slowest rank.
"""


def add_balance_flags(parser: ArgumentParser) -> None:
    add_training_flags(parser, epochs=4, batch_size=32)
    parser.add_argument(
        "--slowdowns", type=positive, nargs="+", default=[1, 2, 4], help="default: 1 2 4"
    )


def balance(options: Namespace) -> None:
    num_ranks = options.layout.processes

    def measure(case: tuple[int, str], number: int) -> dict[str, float]:
        first = train(
            options.layout,
            slowdown=case[0],
            balance=case[1],
            log_every=1,
            **training_flags(options),
        )[0]
        # Not the steps before the ranks have agreed on shares, nor an epoch's last one, which may
        # have fewer rows.
        steps = [
            record
            for record in first["records"]
            if record["kind"] == "step"
            and record["step"] >= FIRST_BALANCED_STEP
            and record["step"] % first["steps_per_epoch"]
        ]
        if not steps:
            message = (
                f"--epochs {options.epochs}: below {FIRST_BALANCED_STEP} steps; raise it or lower "
                "--batch_size"
            )
            raise UserError(message, code="flag-value")
        # Every step is logged, so a record's rate is that of one step. The times are added and not
        # the rates: a mean of rates would give the fast steps too much weight.
        seconds = sum(first["global_batch"] / record["samples_per_second"] for record in steps)
        share = first["speeds"][-1] if first["speeds"] else 1 / num_ranks
        return {"milliseconds": 1000 * seconds / len(steps), "share": share}

    kinds = ("none", "auto")
    cases = {
        f"{slowdown} × {kind}": (slowdown, kind) for slowdown in options.slowdowns for kind in kinds
    }
    rounds: list[dict[str, dict[str, float]]] = []

    def times(slowdown: int, kind: str) -> list[float]:
        return [found[f"{slowdown} × {kind}"]["milliseconds"] for found in rounds]

    columns: dict[str, Callable[[int], str]] = {
        "last rank's work": lambda slowdown: f"{slowdown} ×",
        "even, ms per step": lambda slowdown: harness.median_and_spread(times(slowdown, "none")),
        "balanced, ms per step": lambda slowdown: harness.median_and_spread(
            times(slowdown, "auto")
        ),
        "× faster": lambda slowdown: (
            f"{harness.median_ratio(times(slowdown, 'none'), times(slowdown, 'auto')):.2f}"
        ),
        "× expected": lambda slowdown: (
            f"{slowdown * (num_ranks - 1 + 1 / slowdown) / num_ranks:.2f}"
        ),
        "its share of rows": lambda slowdown: (
            f"{median(r[f'{slowdown} × auto']['share'] for r in rounds):.0%}"
        ),
    }
    for found in harness.run_rounds(
        cases, options.rounds, measure, lambda one: f"{one['milliseconds']:.1f} ms per step"
    ):
        rounds.append(found)
        runs = (
            f"{Path(options.model).name} on {Path(options.dataset).name}, {options.layout} "
            "processes × threads, "
            f"{options.batch_size} rows per rank, {options.epochs} epochs, {len(rounds)} rounds"
        )
        write(options, "Balance", BALANCE, runs, harness.table(columns, options.slowdowns))


# compression: how many bytes do compressed gradients save, and what do they do to the loss?

COMPRESSION = """
Each seed trains a complete run with each kind of compression; the test is that of the best epoch. *MB per step per
rank*: what a rank passes to the all-reduces of a step, counted in the form in which it is sent, after PowerSGD's first
uncompressed steps; a ring carries twice that, less a rank's part, with any kind of compression. *points vs. none*: the
mean over seeds of the difference within a seed. The number after ± is the standard deviation over seeds.
"""


def add_compression_flags(parser: ArgumentParser) -> None:
    add_training_flags(parser, epochs=8, batch_size=16)
    parser.add_argument(
        "--kinds", nargs="+", default=["fp16", "bf16", "powersgd:4"], help="in addition to none"
    )
    parser.add_argument("--seeds", dest="rounds", type=positive, default=3, help="default: 3")
    parser.add_argument("--learning_rate", help="as for training")


def compression(options: Namespace) -> None:
    def measure(kind: str, number: int) -> dict[str, float]:
        rate = {"learning_rate": options.learning_rate} if options.learning_rate else {}
        # Every kind of a round has the round's seed, so that the difference within a round is that
        # of compression and not of the draw.
        first = train(
            options.layout, compress=kind, seed=number + 1, **training_flags(options), **rate
        )[0]
        [test] = [record for record in first["records"] if record["kind"] == "test"]
        train_loss = [
            record["train_loss"] for record in first["records"] if record["kind"] == "epoch"
        ][-1]
        return {name: first[name] for name in ("sent", "uncompressed")} | {
            "train_loss": train_loss,
            "test_loss": test["loss"],
            "accuracy": 100 * test["accuracy"],
        }

    seeds: list[dict[str, dict[str, float]]] = []

    def shown(kind: str, name: str, digits: int) -> str:
        values = [found[kind][name] for found in seeds]
        return f"{mean(values):.{digits}f}" + (
            f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        )

    def points(kind: str) -> str:
        return (
            f"{mean(found[kind]['accuracy'] - found['none']['accuracy'] for found in seeds):+.2f}"
        )

    columns: dict[str, Callable[[str], str]] = {
        "`--compress`": str,
        # Bytes follow from the shapes of the weights and not from the seed: any round tells them.
        "MB per step per rank": lambda kind: f"{seeds[0][kind]['sent'] / 1e6:.3g}",
        "× less": lambda kind: f"{seeds[0][kind]['uncompressed'] / seeds[0][kind]['sent']:.1f}",
        "training loss, last epoch": lambda kind: shown(kind, "train_loss", 4),
        "test loss": lambda kind: shown(kind, "test_loss", 4),
        "test accuracy": lambda kind: shown(kind, "accuracy", 2) + "%",
        "points vs. none": lambda kind: harness.NONE if kind == "none" else points(kind),
    }
    kinds = {kind: kind for kind in ["none", *options.kinds]}
    for found in harness.run_rounds(
        kinds, options.rounds, measure, lambda one: f"{one['accuracy']:.2f}%, {one['sent']:,} bytes"
    ):
        seeds.append(found)
        runs = (
            f"{Path(options.model).name} on {Path(options.dataset).name}, {options.epochs} epochs, "
            f"{options.layout.processes} ranks × {options.batch_size} rows, {len(seeds)} seeds"
        )
        write(options, "Gradient compression", COMPRESSION, runs, harness.table(columns, kinds))


# async_saving: how long does a checkpoint stop training, if training waits for it and if a thread
# writes it?

ASYNC_SAVING = """
What is saved is a DistilBERT with random weights and AdamW's moments. Under ddp, each of N ranks copies and writes 1/N
of it. *synchronous*: training stops until the checkpoint is complete, with its files synced, hashed and renamed.
*blocked*: a thread does the same save, and training stops only for the copy. *until complete*: how long the thread
takes during training, with the cores that training leaves it. *total cost*: the time that training loses to the save by
a thread, which is *blocked* plus the extra time of the *steps while saving*, because the thread computes hashes on the
cores that train. Training on a GPU does not use those cores, so it should lose little more than *blocked*; that was not
measured. The two kinds of save alternate; figures are medians over rounds of the slowest rank, with the smallest and
the largest.
"""
LABELS = ["World", "Sports", "Business", "Science"]


def add_async_saving_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--layouts", nargs="+", default=["1x2", "2x1"], metavar="PxT", help="default: 1x2 2x1")
    add("--steps", type=positive, default=3, help="undisturbed steps before each save (default: 3)")
    add("--rows", type=positive, default=8, help="per rank per step (default: 8)")
    add("--tokens", type=positive, default=64, help="per row (default: 64)")
    add("--place", type=Path, help="a folder on the disk to save to (default: a temporary one)")


def async_saving(options: Namespace) -> None:
    columns: dict[str, Callable[[list[dict[str, Any]]], str]] = {
        "MB": lambda ranks: f"{ranks[0]['bytes'] / 1e6:.0f}",
        "synchronous, s": lambda ranks: harness.median_and_spread(slowest(ranks, "waited"), 2),
        "blocked, s": lambda ranks: harness.median_and_spread(slowest(ranks, "blocked"), 2),
        "blocked ÷ synchronous": lambda ranks: (
            f"{harness.median_ratio(slowest(ranks, 'blocked'), slowest(ranks, 'waited')):.0%}"
        ),
        "until complete, s": lambda ranks: harness.median_and_spread(slowest(ranks, "seconds"), 2),
        "ms per step": lambda ranks: f"{1000 * median(ranks[0]['quiet']):.0f}",
        "ms per step while saving": lambda ranks: (
            f"{1000 * median(ranks[0]['disturbed']):.0f}" if ranks[0]["disturbed"] else harness.NONE
        ),
        "steps while saving": lambda ranks: f"{len(ranks[0]['disturbed']) / options.rounds:.1f}",
        "total cost, s": lambda ranks: f"{cost_of_save(ranks):.2f}",
    }
    rows = []
    for layout in map(Layout.parse, options.layouts):
        with tempfile.TemporaryDirectory(prefix="saving-", dir=options.place) as folder:
            names = ("rounds", "steps", "rows", "tokens")
            results = run_ranks(
                save_rank, layout, folder=folder, **{name: getattr(options, name) for name in names}
            )
        rows.append([str(layout), *(cell(results) for cell in columns.values())])
        harness.report(", ".join(rows[-1]))
        runs = (
            f"{options.rounds} rounds, {options.rows} rows of {options.tokens} tokens per rank "
            "per step"
        )
        body = harness.markdown_table(["processes × threads", *columns], rows)
        write(options, "Saving during training", ASYNC_SAVING, runs, body)


def slowest(ranks: Sequence[dict[str, Any]], name: str) -> list[float]:
    """The time of the slowest rank in each round, since all wait for it."""
    return [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)]


def cost_of_save(ranks: Sequence[dict[str, Any]]) -> float:
    """Seconds of training that a save by a thread takes: the copy, and by how much it slows the steps meanwhile."""
    blocked, quiet, disturbed = slowest(ranks, "blocked"), ranks[0]["quiet"], ranks[0]["disturbed"]
    # Only rank 0's steps: a barrier ends each step, so all ranks have the same times.
    # None is disturbed if the thread was done before the first step ended.
    slowed = median(disturbed) - median(quiet) if disturbed else 0.0
    # The factor is the number of steps that one save overlaps with, on average.
    return median(blocked) + len(disturbed) / len(blocked) * slowed


def save_rank(folder: str, rounds: int, steps: int, rows: int, tokens: int) -> dict[str, Any]:
    """Save both ways in each round; returns this rank's seconds."""
    quiet_libraries()
    config = TrainConfig(seed=SEED, device="cpu", keep_last=1)
    names = {
        "id2label": dict(enumerate(LABELS)),
        "label2id": {name: i for i, name in enumerate(LABELS)},
    }
    found: dict[str, Any] = {"quiet": [], "disturbed": []}
    with join_ranks(config.device) as ranks:
        torch.manual_seed(SEED)
        strategy = STRATEGIES[config.strategy](
            random_classifier(DistilBertConfig(**names), LABELS), config, ranks, "fp32"
        )
        saver = Saver(config, ranks, open_location(folder), print)
        batch = random_batch(rows * ranks.world_size, tokens, strategy.data_shard)
        num_steps = 0

        def step() -> float:
            nonlocal num_steps
            began = time.perf_counter()
            num_steps += 1
            optimizer_step(strategy, batch, num_steps, 1e-5)
            ranks.barrier()
            return time.perf_counter() - began

        def save(waits: bool) -> list[Any]:
            ranks.barrier()
            # The barrier lets all ranks begin together: `blocked` would otherwise include the wait
            # for one that is still in its step.
            saver.save(num_steps, strategy.state_dict, {"step": num_steps}, None)
            if waits:
                return saver.wait()
            # The ranks agree after each step whether all of them are done; otherwise one would
            # leave the loop earlier, and the others would wait for it in the next all-reduce.
            while ranks.sum_(torch.tensor(float(saver.done))) < ranks.world_size:
                found["disturbed"].append(step())
            return saver.collect()

        step()
        # The first save allocates the buffers that the later ones copy into: it counts for neither
        # kind.
        save(waits=True)
        saved: dict[bool, list[Any]] = {True: [], False: []}
        for number in range(rounds):
            for waits in harness.in_turns([True, False], number):
                found["quiet"] += [step() for _ in range(steps)]
                saved[waits] += save(waits)
        saver.close()
    return found | {
        "waited": [one.seconds for one in saved[True]],
        "blocked": [one.blocked_seconds for one in saved[False]],
        "seconds": [one.seconds for one in saved[False]],
        "bytes": saved[True][0].num_bytes,
    }


def random_classifier(config: PreTrainedConfig, labels: Sequence[str] = ()) -> NewsClassifier:
    """A classifier with random weights."""
    network = AutoModelForSequenceClassification.from_config(config)
    saved = SavedModel(
        Path(), network.config.to_dict(), network.state_dict(), "", list(labels), MAX_LENGTH, {}
    )
    return NewsClassifier.from_saved(saved)


def random_batch(rows: int, tokens: int, shard: Any) -> list[MicroBatch]:
    """This rank's part of a batch of random rows without padding."""
    ids = np.random.default_rng(SEED).integers(1000, 30_000, rows * tokens).astype(np.int32)
    everything = TokenizedRows(ids, np.arange(rows + 1) * tokens, np.arange(rows) % len(LABELS), 0)
    # Each row has the same length, offsets are its multiples, and nothing is padded: the time of a
    # step does not depend on which rows a rank gets.
    return micro_batches_of_rank(everything, np.arange(rows), shard, 1)


# restart: how long does a killed rank stop training, and what does the time go into?

RESTART = """
The ranks of one run of `training/run_ddp.sh` with restarts are killed with SIGKILL in turn, each after a checkpoint.
Seconds are medians over kills, with the smallest and the largest. The times come from the events that the run writes
to `events.jsonl` and from torchrun's own line about the rank that failed.
"""
RESTART_FLAGS = "--dataset sample --model tiny --epochs 1000 --save_every 50"
RECOVERY_TIMEOUT = 300.0  # seconds
STAGES = {
    "detection": "detection: torchrun sees that a rank is gone",
    "rendezvous": "rendezvous: it ends the other ranks and starts all of them again",
    "import": "import: Python imports the program and its libraries",
    "group": "group: the ranks form a process group",
    "load": "load: data, model, checkpoint",
    "first_step": "first step",
    "total": "**from the kill to the next optimizer step**",
}


def add_restart_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--kills", dest="rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--processes", type=positive, default=2, help="default: 2")


def _wait_for_event(
    run: subprocess.Popen[bytes], run_dir: Path, log: IO[str], kind: str, restart: int
) -> None:
    end = time.monotonic() + RECOVERY_TIMEOUT
    while not any((e["kind"], e["restart"]) == (kind, restart) for e in read_events(run_dir)):
        if run.poll() is not None or time.monotonic() > end:
            message = (
                f"the run ended or did not recover within {RECOVERY_TIMEOUT:.0f} s "
                f"({last_line(log)})"
            )
            raise TrainingFailure(message, code="benchmark-failed")
        # Reading the events takes time from the cores that are measured.
        time.sleep(0.1)


def restart(options: Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        folder = Path(name)
        command = [
            "bash",
            str(harness.ROOT / "training" / "run_ddp.sh"),
            str(options.processes),
            *RESTART_FLAGS.split(),
        ]
        command += ["--output_dir", str(folder / "model"), "--cache_dir", str(folder / "cache")]
        # training/launch.py silences torchrun unless LOGLEVEL is set; torchrun's line about the
        # lost rank has the time.
        environment = {
            "PYTHON": sys.executable,
            "MAX_RESTARTS": str(options.rounds),
            "LOGLEVEL": "WARNING",
        }
        with (folder / "log.txt").open("w+") as log:
            run = subprocess.Popen(
                command,
                cwd=harness.ROOT,
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            run_dir = folder / "model.run"

            wait_for = partial(_wait_for_event, run, run_dir, log)
            killed = []
            try:
                for number in range(options.rounds):
                    # Events carry the number of restarts so far, so each kill waits for a
                    # checkpoint of the ranks that run now. Without one, the next start would have
                    # to go back further, or to the beginning.
                    wait_for("checkpoint", number)
                    victim = read_statuses(run_dir)[number % options.processes]
                    # The system's clock and not a monotonic one: it is compared with the times of
                    # the events, which other processes wrote, and with those of torchrun's log.
                    killed.append(time.time())
                    os.kill(victim.pid, signal.SIGKILL)
                    wait_for("first_step", number + 1)
                    harness.report(
                        f"kill {number + 1}, rank {victim.rank}: {time.time() - killed[-1]:.1f} s"
                    )
            finally:
                run.terminate()  # the ranks finish their step, save and leave
                run.wait()
        splits = restart_split(run_dir, (folder / "log.txt").read_text())
    # The events know only the last sign of life of the lost rank; the moment of the kill is more
    # exact.
    seconds = [
        replace(split, lost=when).seconds() for split, when in zip(splits, killed, strict=True)
    ]
    columns: dict[str, Callable[[str], str]] = {
        "stage": lambda stage: STAGES[stage],
        "seconds": lambda stage: harness.median_and_spread([split[stage] for split in seconds]),
    }
    shown = (
        f"`MAX_RESTARTS={options.rounds} training/run_ddp.sh {options.processes} {RESTART_FLAGS}`"
    )
    runs = f"{shown}; {options.rounds} kills, all of them recovered from"
    write(options, "Restart", RESTART, runs, harness.table(columns, STAGES))


# sequence_parallel: what does a block keep for its backward pass under tensor parallelism, with the
# sequence cut too?

SEQUENCE_PARALLEL = """
*MiB kept*: what one block, trained in fp32 on the CPU, keeps on each rank for its backward pass, in addition to the
weights. *calls*: collective calls of the block, forward and backward together; an all-reduce carries as many bytes as a
reduce-scatter and an all-gather together. All figures are counted, not timed: one process stands in for any of the
ranks, which all do the same, in a process group that sends nothing.
"""


@dataclass(frozen=True)
class Block:
    """A block of a network and what runs through it."""

    title: str
    config: PreTrainedConfig
    rows: int
    length: int


# Two blocks, because the last one computes only the first token.
_SMALL = {"vocab_size": 32, "num_hidden_layers": 2}
_WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
BLOCKS = (
    Block("A block of DistilBERT-base", DistilBertConfig(n_layers=2, vocab_size=32), 4, 128),
    Block("A block of Llama, 1,024 wide", LlamaConfig(**_WIDE, **_SMALL), 1, 512),
)


def sequence_parallel(options: Namespace) -> None:
    body = []
    for block in BLOCKS:
        rows = []
        for num_ranks in (1, 2, 4):
            whole, calls = count_kept(block, num_ranks, sequence_parallel=False)
            cut, calls_cut = count_kept(block, num_ranks, sequence_parallel=num_ranks > 1)
            rows.append(
                [
                    str(num_ranks),
                    f"{whole / 2**20:.0f}",
                    f"{cut / 2**20:.0f}",
                    str(calls),
                    str(calls_cut),
                ]
            )
        header = [
            "`--tp`",
            "MiB kept",
            "MiB kept, `--sequence_parallel`",
            "calls",
            "calls, `--sequence_parallel`",
        ]
        title = f"## {block.title}, {block.rows} × {block.length} tokens"
        body.append(f"{title}\n\n{harness.markdown_table(header, rows)}")
    write(options, "Sequence parallelism: what it saves", SEQUENCE_PARALLEL, "", "\n".join(body))


def count_kept(block: Block, num_ranks: int, *, sequence_parallel: bool) -> tuple[int, int]:
    """Bytes that the first block keeps on rank 0, and its collective calls."""
    # PyTorch has no public store that sends nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        # The fake group accepts every collective and moves nothing: one process can stand in for
        # rank 0 of any number.
        model = random_classifier(block.config).train()
        apply_tensor_parallel(
            model, init_device_mesh("cpu", (num_ranks,)), sequence_parallel=sequence_parallel
        )
        # The hidden states are (rows, length, width), of which a rank has its part of the sequence.
        # The mask stays whole: inside attention, each rank has all tokens for its heads.
        length = block.length // num_ranks if sequence_parallel else block.length
        hidden = torch.randn(block.rows, length, block.config.hidden_size, requires_grad=True)
        mask = torch.ones(block.rows, block.length, dtype=torch.int64)
        context = model.architecture.context(model.network, hidden, mask)
        # Autograd saves a tensor as often as an operation needs it, often as views of one storage,
        # so storages are counted and not tensors. Weights are saved too, but are there anyway.
        weights = {
            _local(parameter).untyped_storage().data_ptr()
            for parameter in model.blocks[0].parameters()
        }
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = _local(tensor).untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with CommDebugMode() as calls:
            # Only the forward pass saves tensors. Calls are counted over both passes, because
            # sequence parallelism changes those of the backward pass too.
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                output = model.blocks[0](hidden, **context)
            output.sum().backward()
        return sum(kept.values()), calls.get_total_counts()
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# observation_cost: how much of a step goes into monitoring?

# How often what does not belong to a step is done: by default, and a page as Prometheus is
# configured to ask for it.
COMPARISON_EVERY = 500  # steps
PAGE_EVERY, STATUS_EVERY = 15.0, 1.0  # seconds
FIRST_STEADY_STEP = 5  # earlier steps pay for what happens once
REPEATS = 5
OBSERVATION_COST = f"""
All monitoring is on: metrics, events, metrics.jsonl and TensorBoard, status file, watchdog, loss spikes, and with two
processes stragglers, collectives and the comparison of replicas.

- *step*: the time from before its rows are read until all subscribers have its last event; the mean from step
  {FIRST_STEADY_STEP} on.
- *hooks*: the part of that time spent inside the subscribers, including the wait for other ranks when they communicate.
- *recording*: how much longer a step takes outside the subscribers if its collectives are recorded, as the difference
  of two medians; one step in {COMPARE_EVERY} is recorded.
- *comparison* of replicas, counted once in {COMPARISON_EVERY} steps; a *page* of metrics, every {PAGE_EVERY:.0f} s; the
  *status* file, every {STATUS_EVERY:.0f} s. Each is timed separately, and its figure is the median of {REPEATS} times.
- *all together*: the cost of all of it as a share of a step without monitoring; the median over rounds, with the
  smallest and the largest.
"""
OBSERVED = {  # model, processes, flags
    "tiny, 1 process": (TINY, 1, {"batch_size": 16, "epochs": 3}),
    "tiny, 2 processes": (TINY, 2, {"batch_size": 8, "epochs": 3}),
    "DistilBERT-size, 1 process": (
        "DistilBERT-size",
        1,
        {"batch_size": 8, "epochs": 1, "max_train_rows": 270},
    ),
    "DistilBERT-size, 2 processes": (
        "DistilBERT-size",
        2,
        {"batch_size": 4, "epochs": 1, "max_train_rows": 270},
    ),
}


def add_observation_cost_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--models", nargs="+", choices=(TINY, "DistilBERT-size"), default=[TINY, "DistilBERT-size"]
    )


def observation_cost(options: Namespace) -> None:
    quiet_libraries()
    cases = {name: case for name, case in OBSERVED.items() if case[0] in options.models}
    with tempfile.TemporaryDirectory(prefix="observation-") as name:
        folder = Path(name)
        data = load_data(SAMPLE)
        # Random weights come without a tokenizer, and a folder to train from needs one that fits.
        tokenizer = load_tokenizer(TINY, data.train.texts, MAX_LENGTH)
        base, num_labels = folder / "base", len(data.label_names)
        write_weights(base, "base", num_labels, vocabulary=len(tokenizer))
        tokenizer.save_pretrained(base)

        def measure(case: tuple[str, int, dict[str, int]], number: int) -> dict[str, float]:
            model, processes, flags = case
            results = train(
                Layout(processes, 1),
                observed_rank,
                dataset=SAMPLE,
                model=TINY if model == TINY else base,
                device="cpu",
                precision="fp32",
                max_length=MAX_LENGTH,
                cache_dir=folder / "cache",
                # Replicas are not compared during the run: that is timed afterwards, by itself, and
                # would otherwise be in some of the steps.
                check_replicas_every=0,
                metrics_port=free_port(),
                **flags,
            )
            ranks = [observed_milliseconds(one) for one in results]
            return {name: fmean(rank[name] for rank in ranks) for name in ranks[0]}

        def describe(found: dict[str, float]) -> str:
            return f"{monitoring_share(found):.2%}"

        rounds = list(harness.run_rounds(cases, options.rounds, measure, describe))

    def shown(name: str, of_two: bool = False, digits: int = 2) -> Callable[[str], str]:
        def cell(case: str) -> str:
            value = median(found[case][name] for found in rounds)
            return harness.NONE if of_two and cases[case][1] == 1 else f"{value:.{digits}f}"

        return cell

    def share(case: str) -> str:
        shares = [100 * monitoring_share(found[case]) for found in rounds]
        return f"{median(shares):.2f}% ({harness.spread(shares, 2)})"

    columns: dict[str, Callable[[str], str]] = {
        "model": lambda case: cases[case][0],
        "processes": lambda case: str(cases[case][1]),
        "step, ms": shown("step", digits=1),
        "hooks, ms": shown("hooks"),
        "recording, ms": shown("look", of_two=True),
        "comparison, ms": shown("comparison", of_two=True),
        "page, ms": shown("page"),
        "status, ms": shown("status"),
        "all together": share,
    }
    runs = f"the built-in sample, one thread per process, {options.rounds} rounds"
    write(options, "What monitoring costs", OBSERVATION_COST, runs, harness.table(columns, cases))


def monitoring_share(found: dict[str, float]) -> float:
    """The cost of all monitoring as a share of a step without it."""
    # Per step: the hooks in each, the look in one of COMPARE_EVERY, the comparison in one of
    # COMPARISON_EVERY. Per second: the page and the status file.
    # The measured step includes its own monitoring, which is taken out of the denominator below.
    at_steps = found["hooks"] + found["look"] / COMPARE_EVERY
    by_time = (found["page"] / PAGE_EVERY + found["status"] / STATUS_EVERY) / 1000
    # Steps get slower by what they do themselves; a page or a status file takes its share of each
    # second whatever a step takes.
    return (at_steps + found["comparison"] / COMPARISON_EVERY) / (
        found["step"] - at_steps
    ) + by_time


def observed_milliseconds(rank: dict[str, Any]) -> dict[str, float]:
    """What one rank found, in milliseconds. With one rank there is nothing to compare or to look at."""
    steps = list(zip(rank["seconds"], rank["watching"], strict=True))
    # Every COMPARE_EVERY-th step records its collectives. What that costs outside the subscribers
    # is the difference between such steps and the others, each without the time inside subscribers.
    looked = [step - watching for step, watching in steps[COMPARE_EVERY - 1 :: COMPARE_EVERY]]
    others = [
        step - watching for i, (step, watching) in enumerate(steps, start=1) if i % COMPARE_EVERY
    ]
    several = rank["world_size"] > 1
    found = {
        "step": fmean(step for step, _ in steps[FIRST_STEADY_STEP - 1 :]),
        "hooks": fmean(watching for _, watching in steps[FIRST_STEADY_STEP - 1 :]),
        "look": median(looked) - median(others) if several and looked else 0.0,
        "comparison": rank["comparison"] if several else 0.0,
        "page": rank["page"],
        "status": rank["status"],
    }
    return {name: 1000 * seconds for name, seconds in found.items()}


class TimedStream(EventStream):
    """An event stream with a clock: ``seconds`` of each step, and ``watching``, the part of it inside subscribers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds: list[float] = []
        self.watching: list[float] = []
        self._began = self._watched = 0.0
        self._depth = 0

    def publish(self, event: Event) -> None:
        began = time.perf_counter()
        if isinstance(event, StepStarted):
            self._began, self._watched = began, 0.0
        # Publishing agreed steps publishes the logged ones too, whose time is already within
        # theirs.
        self._depth += 1
        super().publish(event)
        self._depth -= 1
        if not self._depth:
            self._watched += time.perf_counter() - began
        if isinstance(event, StepsAgreed):
            self.seconds.append(time.perf_counter() - self._began)
            self.watching.append(self._watched)


def observed_rank(flags: list[str]) -> dict[str, Any]:
    """Train with a timed event stream; then time what its subscribers do only now and then."""
    config = parse_config(flags)
    # The monitors create the event stream, so the class is replaced.
    training.monitoring.monitors.EventStream = TimedStream
    with join_ranks(config.device) as ranks:
        trainer = Trainer(config, ranks)
        trainer.fit()
        context = trainer.context

        # The comparison is a collective: without the barrier, the time of a rank would include its
        # wait for the others to arrive.
        def repeated(work: Callable[[], object]) -> float:
            found = []
            for _ in range(REPEATS):
                ranks.barrier()
                began = time.perf_counter()
                work()
                found.append(time.perf_counter() - began)
            return median(found)

        return {
            "world_size": ranks.world_size,
            "seconds": context.events.seconds,
            "watching": context.events.watching,
            "comparison": repeated(lambda: first_difference(context.strategy.parameters, ranks)),
            "page": repeated(lambda: generate_latest(context.exporter.registry)),
            "status": repeated(context.status.write),
        }


@dataclass(frozen=True)
class Question:
    """``answer`` measures and writes the page; ``add_flags`` adds flags to the common ones."""

    help: str
    answer: Callable[[Namespace], None]
    add_flags: Callable[[ArgumentParser], None] | None = None
    rounds: int = 0


QUESTIONS = {
    "balance": Question(
        "one slow rank: even shares of a batch or shares by speed", balance, add_balance_flags, 3
    ),
    "compression": Question(
        "compressed gradients: bytes and loss", compression, add_compression_flags
    ),
    "async_saving": Question(
        "a checkpoint that a thread writes", async_saving, add_async_saving_flags, 7
    ),
    "restart": Question("from a killed rank to the next step", restart, add_restart_flags),
    "sequence_parallel": Question(
        "what tensor parallelism keeps for the backward pass", sequence_parallel
    ),
    "observation_cost": Question(
        "what monitoring costs", observation_cost, add_observation_cost_flags, 5
    ),
}


def main() -> None:
    parser = harness.Parser(MODULE, __doc__)
    chosen = parser.add_subparsers(
        dest="question", required=True, metavar="QUESTION", parser_class=OneLineParser
    )
    for name, question in QUESTIONS.items():
        flags = chosen.add_parser(name, help=question.help, description=question.help)
        harness.add_common_flags(flags, f"{name}.md", question.rounds)
        if question.add_flags:
            question.add_flags(flags)
    options = parser.parse_args()
    QUESTIONS[options.question].answer(options)


if __name__ == "__main__":
    harness.run_benchmark(main)
