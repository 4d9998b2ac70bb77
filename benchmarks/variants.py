"""The training loops that are compared: each runs one epoch over the same rows; and the ranks' side of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    DistilBertForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from benchmarks.workload import MAX_LENGTH, SEED, Workload, read_workload
from training.config import TrainConfig
from training.data.batching import (
    DataShard,
    LengthBucketSampler,
    Padding,
    Targets,
    micro_batches_of_rank,
    pad,
)
from training.data.tokenized import Blocks, TokenizedRows
from training.distributed.group import join_ranks
from training.distributed.ranks import Ranks
from training.model.architectures import mask_of
from training.model.classifier import NewsClassifier
from training.model.optimizer import learning_rate_at
from training.model.precision import DTYPES
from training.parallelism.blocks import length_multiple
from training.parallelism.ddp import DDPStrategy
from training.run.state import AverageMeter
from training.run.step import StepLog, StepRecord, optimizer_step
from training.tasks import TASKS, MultiLabelClassification

LEARNING_RATE = 2e-5
WARMUP = 0.06
CLIP_NORM = 1.0
MATMUL_SIZE = 2048
MATMUL_REPEATS = 12
STEPS_PER_LOG = 25  # on a GPU


@dataclass
class Epoch:
    """What this rank measured of an epoch.

    ``cells``, ``squares``: tokens with the padding that is computed, and the sum of the squared
    lengths, padded alike, over its rows.
    """

    seconds: float = 0.0
    cells: int = 0
    squares: int = 0
    loss: AverageMeter = field(default_factory=AverageMeter)

    def start(self) -> None:
        # All ranks start together, or the first one would count its wait for the others' imports.
        if dist.is_initialized():
            dist.barrier()
        self.seconds = -_now()

    def stop(self) -> None:
        self.seconds += _now()

    def count(self, batch: torch.Tensor) -> None:
        rows, length = batch.shape
        self.cells += rows * length
        self.squares += rows * length**2

    def count_packed(self, lengths: list[int]) -> None:
        self.cells += sum(lengths)
        self.squares += sum(length**2 for length in lengths)


def _now() -> float:
    # Calls to a GPU return before it has computed anything.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def epoch_rank(folder: str, variant: str, device: str = "cpu") -> dict[str, Any]:
    """Warm up on other rows with another copy of the model, then time an epoch."""
    transformers_logging.set_verbosity_error()
    workload = read_workload(Path(folder))
    with join_ranks(device) as ranks:
        # The warm-up trains a copy of the model that is thrown away: the timed epoch starts from
        # the written weights, with allocator, thread pools and connections warm.
        VARIANTS[variant].run(workload, workload.warmup, ranks)
        epoch = VARIANTS[variant].run(workload, workload.timed, ranks)
    found = {name: getattr(epoch, name) for name in ("seconds", "cells", "squares")}
    return found | {"loss": epoch.loss.average, "threads": torch.get_num_threads()}


def matmul_rank(precision: str) -> dict[str, Any]:
    """The best rate of a square matrix product, all ranks multiplying at the same time."""
    with join_ranks("cpu") as ranks:
        left, right = (
            torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(DTYPES[precision]) for _ in range(2)
        )
        out = left @ right
        best = float("inf")
        # All at once, because processes that share a memory bus and a power budget are slower than
        # one alone. The best and not the median: what the machine can do, not what disturbed it.
        for _ in range(MATMUL_REPEATS):
            ranks.barrier()
            started = time.perf_counter()
            torch.mm(left, right, out=out)
            best = min(best, time.perf_counter() - started)
    return {"flops": 2 * MATMUL_SIZE**3 / best, "threads": torch.get_num_threads()}


def plain(workload: Workload, rows: TokenizedRows, ranks: Ranks) -> Epoch:
    """The textbook recipe: every text padded to the maximum, a DataLoader, AdamW, DDP."""
    # Padded before the clock starts, like a dataset that a recipe tokenizes first and then loads:
    # (rows, 128) each.
    ids, mask = pad(rows, np.arange(len(rows)), MAX_LENGTH)
    mask = mask_of(ids, mask)
    labels = torch.from_numpy(_targets(workload, rows))
    # One dictionary per row, as a tokenised dataset in torch's format returns it.
    dataset = [
        {"input_ids": ids[i], "attention_mask": mask[i], "labels": labels[i]}
        for i in range(len(labels))
    ]
    sampler = (
        DistributedSampler(dataset, ranks.world_size, ranks.rank, seed=SEED)
        if ranks.is_distributed
        else None
    )
    loader = DataLoader(
        dataset, workload.global_batch // ranks.world_size, shuffle=sampler is None, sampler=sampler
    )
    bare = _network(workload)
    model = DistributedDataParallel(bare) if ranks.is_distributed else bare
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True
    )
    # PyTorch's schedule counts from 0 and wants a factor; ours counts from 1 and gives a rate.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _rate(step + 1, len(loader)) / LEARNING_RATE
    )
    epoch = Epoch()
    losses = []
    epoch.start()
    for batch in loader:
        epoch.count(batch["input_ids"])
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        # No .item() here: on a GPU it would wait for the step, which the recipe need not do.
        losses.append(loss.detach())
    epoch.stop()
    epoch.loss.update(torch.stack(losses).mean().item())
    return epoch


def _examples(workload: Workload, rows: TokenizedRows) -> list[dict[str, Any]]:
    """Rows as `Trainer` takes them; of a language model without labels."""
    ends = zip(rows.offsets, rows.offsets[1:], strict=False)
    texts = [rows.ids[start:stop].tolist() for start, stop in ends]
    examples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts]
    if workload.is_language_model:
        return examples
    targets = _targets(workload, rows).tolist()
    return [one | {"labels": label} for one, label in zip(examples, targets, strict=True)]


def trainer(
    workload: Workload,
    rows: TokenizedRows,
    ranks: Ranks,
    sampling: str = "random",
    *,
    packed: bool = False,
    attention: str = "sdpa",
    **settings: Any,
) -> Epoch:
    """``transformers.Trainer`` with dynamic padding, at its defaults except where the comparison
    needs otherwise.

    ``packed``: of a language model, rows are blocks instead of texts, as its example script makes
    them. ``attention``: its implementation, by transformers' name. ``settings``: more of its
    training arguments.
    """
    batch = workload.global_batch
    if packed:
        rows, batch = _packed(rows, batch)
    dataset = _examples(workload, rows)
    epoch = Epoch()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(workload.folder / "tokenizer")
    collate = DataCollatorWithPadding(tokenizer)
    if workload.is_language_model:
        # The collator makes labels of the ids, with -100 where there is padding.
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)

    def counted(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate(examples)
        epoch.count(batch["input_ids"])
        return batch

    arguments = TrainingArguments(
        output_dir=str(workload.folder / "trainer"),
        use_cpu=ranks.device.type == "cpu",
        per_device_train_batch_size=batch // ranks.world_size,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        warmup_steps=WARMUP,
        weight_decay=0.01,
        max_grad_norm=CLIP_NORM,
        optim="adamw_torch_fused",
        train_sampling_strategy=sampling,
        # Otherwise it multiplies a classifier's loss and gradients by the number of ranks, before
        # clipping.
        average_tokens_across_devices=workload.is_language_model,
        dataloader_pin_memory=ranks.device.type != "cpu",
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
        **settings,
    )
    loop = Trainer(
        _network(workload, attention), arguments, counted, dataset, callbacks=[_Clock(epoch)]
    )
    epoch.loss.update(loop.train().training_loss)
    return epoch


def ours(
    workload: Workload,
    rows: TokenizedRows,
    ranks: Ranks,
    precision: str = "fp32",
    *,
    joined: bool = True,
) -> Epoch:
    """The step of ``training.run.trainer.Trainer``, without its progress bar, its log files and its
    checkpoints. ``joined``: without padding, where that is possible.
    """
    model = NewsClassifier(
        len(workload.label_names),
        str(workload.model_folder),
        workload.label_names,
        task=TASKS[workload.task],
    )
    config = TrainConfig(
        task=workload.task,
        batch_size=workload.global_batch // ranks.world_size,
        clip_norm=CLIP_NORM,
        seed=SEED,
    )
    strategy, batch_size = DDPStrategy(model, config, ranks, precision), workload.global_batch
    if not joined:
        strategy.why_padded, model.packs_rows = "to compare", False
    padding = Padding(length_multiple(config, ranks.device.type), MAX_LENGTH)
    if workload.is_language_model:
        rows, batch_size = _packed(rows, batch_size)
    # Only ours groups rows by length without being asked, so this belongs to what is compared.
    sampler = LengthBucketSampler(rows.lengths, batch_size, SEED)
    log = StepLog(ranks)
    epoch = Epoch()
    epoch.start()
    for step, batch in enumerate(sampler, start=1):
        shard = DataShard(ranks.rank, ranks.world_size)
        # A step has one micro-batch here: the whole share of this rank.
        (micro_batch,) = micro_batches_of_rank(
            rows, batch, shard, padding=padding, targets=Targets(model.task)
        )
        learning_rate = _rate(step, len(sampler))
        on_device = strategy.to_device(micro_batch)
        result = optimizer_step(strategy, [on_device], step, learning_rate)
        if packing := model.dropout_stream.packing:
            epoch.count_packed(packing.lengths)
        else:
            epoch.count(micro_batch.input_ids)
        tokens, local_rows = int(rows.lengths[batch].sum()), micro_batch.rows
        log.add(StepRecord(step, 1, learning_rate, batch, tokens, local_rows, result))
        # As the trainer does: on CPUs the ranks agree on the loss after every step, which costs an
        # all-reduce, and on GPUs, where it would make the host wait, about once per second.
        if ranks.device.type == "cpu" or step % STEPS_PER_LOG == 0 or step == len(sampler):
            for metrics in log.sync(0.0, {}).steps:
                epoch.loss.update(metrics.loss, metrics.rows)
    epoch.stop()
    return epoch


class _Clock(TrainerCallback):
    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.epoch.start()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.epoch.stop()


def _targets(workload: Workload, rows: TokenizedRows) -> np.ndarray:
    """Labels as transformers' losses take them: of several labels per row, floats."""
    return (
        rows.labels.astype(np.float32)
        if workload.task == MultiLabelClassification.name
        else rows.labels
    )


def _packed(rows: TokenizedRows, global_batch: int) -> tuple[TokenizedRows, int]:
    """The texts as blocks, and how many of them have as many tokens as a global batch of texts."""
    offsets = Blocks(MAX_LENGTH, end=None).offsets(len(rows.ids))
    # As many tokens per step as with texts, or the runs would take different numbers of steps. An
    # even number, because two ranks share it.
    size = round(global_batch * rows.lengths.mean() / MAX_LENGTH / 2) * 2
    return TokenizedRows(rows.ids, offsets, np.zeros(len(offsets) - 1, np.int64), 0), size


def _network(workload: Workload, attention: str = "sdpa") -> PreTrainedModel:
    kind = LlamaForCausalLM if workload.is_language_model else DistilBertForSequenceClassification
    model = kind.from_pretrained(
        workload.model_folder, dtype=torch.float32, attn_implementation=attention
    )
    return model.train()


def _rate(step: int, steps: int) -> float:
    # PyTorch's scheduler asks once more after the last step.
    return learning_rate_at(min(step, steps), steps, LEARNING_RATE, WARMUP, "linear")


@dataclass(frozen=True)
class Variant:
    """A training loop: its name in the tables, and the function that runs an epoch of it."""

    title: str
    run: Callable[[Workload, TokenizedRows, Ranks], Epoch]
    precision: str = "fp32"
    is_ours: bool = False


def _grouped(**settings: Any) -> Callable[[Workload, TokenizedRows, Ranks], Epoch]:
    return lambda *given: trainer(*given, sampling="group_by_length", **settings)


VARIANTS = {
    "plain": Variant("plain: every text padded to 128", plain),
    "trainer": Variant("`transformers.Trainer`, dynamic padding", trainer),
    "trainer-grouped": Variant("`transformers.Trainer`, length grouping", _grouped()),
    "trainer-compiled": Variant(
        "`transformers.Trainer`, length grouping, `torch_compile`", _grouped(torch_compile=True)
    ),
    "trainer-grouped-bf16": Variant(
        "`transformers.Trainer`, length grouping, bf16", _grouped(bf16=True), "bf16"
    ),
    "trainer-flash-bf16": Variant(
        "`transformers.Trainer`, length grouping, bf16, FlashAttention-2",
        _grouped(bf16=True, attention="flash_attention_2"),
        "bf16",
    ),
    "trainer-compiled-bf16": Variant(
        "`transformers.Trainer`, length grouping, bf16, `torch_compile`",
        _grouped(bf16=True, torch_compile=True),
        "bf16",
    ),
    "trainer-rebalanced": Variant(
        "`transformers.Trainer`, batch rebalancing",
        lambda *given: trainer(*given, sampling="batch_rebalance"),
    ),
    "trainer-packed": Variant(
        "`transformers.Trainer`, texts joined into blocks",
        lambda *given: trainer(*given, packed=True),
    ),
    "ours": Variant("**ours**", ours, is_ours=True),
    "ours-bf16": Variant(
        "**ours, bf16**", lambda *given: ours(*given, precision="bf16"), "bf16", is_ours=True
    ),
    "ours-padded-bf16": Variant(
        "ours, bf16, rows padded",
        lambda *given: ours(*given, precision="bf16", joined=False),
        "bf16",
        is_ours=True,
    ),
}
