"""A run in words: the facts of the banner, and the environment in the report."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers

from common.escaping import some_of, without_secrets
from common.hardware import cpu_name
from common.text import counted
from common.version import version
from training.config import TrainConfig
from training.data.report import lengths_in_words, run_lengths
from training.distributed.ranks import Ranks
from training.model.pooling import MEAN
from training.monitoring.records import format_time
from training.parallelism.strategy import Strategy
from training.run.budget import expect_accuracy
from training.run.context import RunContext, StepPlan


def describe_device(ranks: Ranks) -> str:
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_name(ranks.device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)} per process"


def describe_run(context: RunContext) -> dict[str, str]:
    config, ranks, data, tokens = context.config, context.ranks, context.data, context.data.tokens
    shares = context.strategy.data_shard.size
    rows_per_shard = context.plan.global_batch_size / shares / context.plan.accumulation
    validation = f"{len(data.validation_index):,}" if len(data.validation_index) else "no"
    who = f"share{'s' * (shares > 1)}"
    rows_each = f"{rows_per_shard:g} row{'s' * (rows_per_shard != 1)}"
    batch = f"{shares} {who} x {rows_each} x {context.plan.accumulation} accumulation"
    below = (
        f", times {config.layer_decay:g} from each block to the one below"
        if config.layer_decay < 1
        else ""
    )
    rows = f"blocks of {config.max_length} tokens" if config.is_language_model else "rows"
    num_unlabelled = data.num_unlabelled
    unlabelled = f" ({num_unlabelled:,} of them without a label)" if num_unlabelled else ""
    size = {"Global batch": f"{counted(context.plan.global_batch_size, 'row')} = {batch}"}
    learning = {
        "Learning rate": f"{context.plan.peak_learning_rate:.3g}, {config.schedule} after "
        + (
            f"{config.warmup:.0%} warm-up"
            if config.warmup < 1
            else f"{counted(int(config.warmup), 'step')} of warm-up"
        )
        + below,
        **describe_warmup(config, context.plan),
    }
    if not context.plan.total_steps and config.method == "head":  # nothing of this happens
        size, learning = {}, {}
    return {
        "Model": f"{config.model} ({context.num_parameters / 1e6:.1f} M parameters{_trained(context)})",
        **(
            {"Teacher": f"{config.distill}, {config.distill_share:.0%} of the loss"}
            if config.is_distilled
            else {}
        ),
        "Data": f"{tokens.name}: {len(data.train_index):,} training{unlabelled}, {validation} validation, "
        f"{len(tokens.test):,} test {rows}"
        if config.dataset
        else f"no rows, {len(tokens.label_names):,} names of labels, {tokens.num_unlabelled:,} texts without a label",
        **_rough(context),
        **_reads(context),
        "World size": f"{ranks.world_size} ({ranks.backend if ranks.is_distributed else 'no process group'})",
        "Layout": context.strategy.describe(),
        "Device": describe_device(ranks),
        "Precision": context.precision,
        **describe_padding(context.strategy),
        **size,
        **_head(context),
        **_steps(context),
        **learning,
        "Run folder": str(config.run_dir),
    }


def _rough(context: RunContext) -> dict[str, str]:
    copies = len(context.data.epoch_index) - len(context.data.train_index)
    return (
        {
            "Rough texts": f"{counted(copies, 'row')} of each epoch, the same texts as people type them"
        }
        if copies
        else {}
    )


def _head(context: RunContext) -> dict[str, str]:
    """The head that the run begins with, if it was fitted, and what it was chosen from."""
    if (start := context.plan.start) is None:
        return {}
    read = "the mean of all tokens" if start.pooling == MEAN else "the first token"
    found = f"; {start.by_folds}" if start.by_folds else ""
    if context.config.from_model:
        return {
            "Head": f"that of {context.config.from_model}, with what the new rows ask for{found}"
        }
    return {"Head": f"fitted to {read}{found}"}


def _steps(context: RunContext) -> dict[str, str]:
    config, plan = context.config, context.plan
    if config.method == "head":
        return {"Steps": "none, since --method head trains the head alone"}
    if (budget := context.budget) is None:
        return {
            "Steps": f"{plan.total_steps:,} = {counted(config.epochs, 'epoch')} x {plan.steps_per_epoch:,}"
        }
    epochs = plan.total_steps / plan.steps_per_epoch
    rows = min(len(context.data.train_index), plan.total_steps * plan.global_batch_size)
    expected = expect_accuracy(config, context.data, rows)
    end = f"{format_time(budget.closing)} of it set aside to test and write"
    facts = {
        "Steps": f"about {plan.total_steps:,} = {epochs:.2f} epochs x {plan.steps_per_epoch:,}; "
        "the number adapts to the speed",
        "Budget": f"{config.budget} in all, {format_time(budget.spent)} of it spent, {end}",
    }
    if plan.total_steps == config.epochs * plan.steps_per_epoch:
        facts["Budget"] += f"; ends before it, after --epochs {config.epochs}"
    if expected:
        facts["Expected"] = f"test accuracy {expected}, guessed from the words of the training rows"
    return facts


def describe_warmup(config: TrainConfig, plan: StepPlan) -> dict[str, str]:
    """A note on a warm-up that the run ends before, so that it trains at a fraction of the learning rate."""
    if config.warmup < 1 or config.warmup <= plan.total_steps:
        return {}
    peak, steps = plan.peak_learning_rate, counted(plan.total_steps, "step")
    return {
        "Warm-up": f"--warmup {config.warmup:g} is longer than the run of {steps}, so the learning rate only reaches "
        f"{peak * plan.total_steps / int(config.warmup):.3g}; give a share of the run, such as --warmup 0.06"
    }


def describe_padding(strategy: Strategy) -> dict[str, str]:
    """Whether a GPU computes padding, and why; a language model's blocks have none."""
    if strategy.ranks.device.type != "cuda" or strategy.config.is_language_model:
        return {}
    why = strategy.why_padded
    return {"Padding": f"computed: {why}" if why else "none: rows are joined, with FlashAttention"}


def _reads(context: RunContext) -> dict[str, str]:
    """What the model reads and answers; of a language model the blocks say it all."""
    tokens = context.data.tokens
    if context.config.is_language_model:
        return {}
    answers = {"Labels": some_of(tokens.label_names)}
    if not context.strategy.task.has_labels:
        answers = {
            "Vectors": f"of {context.config.distill}, {len(tokens.label_names)} numbers per text"
        }
    return answers | {"Lengths": lengths_in_words(run_lengths(tokens, context.config))}


def _trained(context: RunContext) -> str:
    if context.num_trained == context.num_parameters:
        return ""
    share = context.num_trained / context.num_parameters
    return f", {context.num_trained / 1e6:.2f} M of them trained = {share:.1%}"


def describe_command(ranks: Ranks) -> str:
    """The command line that started this run, as one types it; empty from Python or on several machines."""
    program, flags = Path(sys.argv[0]).name, without_secrets(shlex.join(sys.argv[1:]))
    if program == "train_single.py":
        return f"python training/train_single.py {flags}"
    # torchrun tells each rank how many of them are on its machine.
    if program == "train_ddp.py" and os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.world_size):
        return f"training/run_ddp.sh {ranks.world_size} {flags}"
    return ""


def describe_environment(ranks: Ranks) -> dict[str, str]:
    return {
        "DistriNews": version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
        "Processes": f"{ranks.world_size} ({ranks.backend if ranks.is_distributed else 'no process group'})",
        "Device": describe_device(ranks),
        "Machine": f"{platform.node()}, {cpu_name()}",
        "System": f"{platform.system()} {platform.machine()}",
    }
