"""A run in words: the facts of the banner, and the environment in the report."""

from __future__ import annotations

import platform

import torch
import transformers

from common.escaping import some_of
from training.monitoring.records import format_time
from training.parallelism.distributed import Ranks
from training.run.budget import Budget, expect_accuracy
from training.run.context import RunContext


def describe_device(ranks: Ranks) -> str:
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_name(ranks.device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)} per process"


def describe_run(context: RunContext, budget: Budget | None = None) -> dict[str, str]:
    config, ranks, news, tokens = context.config, context.ranks, context.news, context.news.tokens
    shares = context.strategy.data_shard.size
    rows_per_shard = context.plan.global_batch_size / shares / context.plan.accumulation
    validation = f"{len(news.validation_index):,}" if len(news.validation_index) else "no"
    who = f"share{'s' * (shares > 1)}"
    batch = f"{shares} {who} x {rows_per_shard:g} rows x {context.plan.accumulation} accumulation"
    below = f", times {config.layer_decay:g} from each block to the one below" if config.layer_decay < 1 else ""
    rows = f"blocks of {config.max_length} tokens" if config.is_language_model else "rows"
    num_unlabelled = len(news.train_index) - len(news.labelled_index)
    unlabelled = f" ({num_unlabelled:,} of them without a label)" if num_unlabelled else ""
    return {
        "Model": f"{config.model} ({context.num_parameters / 1e6:.1f} M parameters{_trained(context)})",
        **({"Teacher": f"{config.distill}, {config.distill_share:.0%} of the loss"} if config.is_distilled else {}),
        "Data": f"{tokens.name}: {len(news.train_index):,} training{unlabelled}, {validation} validation, "
        f"{len(tokens.test):,} test {rows}",
        **_reads(context),
        "World size": f"{ranks.world_size} ({ranks.backend if ranks.is_distributed else 'no process group'})",
        "Layout": context.strategy.describe(),
        "Device": describe_device(ranks),
        "Precision": context.precision,
        "Global batch": f"{context.plan.global_batch_size} rows = {batch}",
        **_steps(context, budget),
        "Learning rate": f"{context.plan.peak_learning_rate:.3g}, {config.schedule} after "
        + (f"{config.warmup:.0%} warm-up" if config.warmup < 1 else f"{config.warmup:,.0f} steps of warm-up")
        + below,
        "Run folder": str(config.run_dir),
    }


def _steps(context: RunContext, budget: Budget | None) -> dict[str, str]:
    config, plan = context.config, context.plan
    if budget is None:
        return {"Steps": f"{plan.total_steps:,} = {config.epochs} epochs x {plan.steps_per_epoch:,}"}
    epochs = plan.total_steps / plan.steps_per_epoch
    rows = min(len(context.news.train_index), plan.total_steps * plan.global_batch_size)
    expected = expect_accuracy(config, context.news, rows)
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


def _reads(context: RunContext) -> dict[str, str]:
    """What the model reads and answers; of a language model the blocks say it all."""
    tokens = context.news.tokens
    if context.config.is_language_model:
        return {}
    cut = f"{tokens.num_cut:,} of {tokens.num_texts:,}, at {context.config.longest_text}"
    answers = {"Labels": some_of(tokens.label_names)}
    if not context.strategy.task.has_labels:
        answers = {"Vectors": f"of {context.config.distill}, {len(tokens.label_names)} numbers per text"}
    return answers | {"Texts cut": cut}


def _trained(context: RunContext) -> str:
    if context.num_trained == context.num_parameters:
        return ""
    share = context.num_trained / context.num_parameters
    return f", {context.num_trained / 1e6:.2f} M of them trained = {share:.1%}"


def describe_environment(ranks: Ranks) -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
        "Processes": f"{ranks.world_size} ({ranks.backend if ranks.is_distributed else 'no process group'})",
        "Device": describe_device(ranks),
        "System": f"{platform.system()} {platform.machine()}",
    }
