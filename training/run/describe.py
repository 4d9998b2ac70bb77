"""What a run is, in words: the banner's facts and the report's environment."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch
import transformers

from training.parallelism.distributed import Ranks

if TYPE_CHECKING:
    from training.run.trainer import Trainer


def describe_device(ranks: Ranks) -> str:
    """The device of one rank: the GPU's name, or the CPU and its threads."""
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_name(ranks.device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)} a process"


def describe_run(trainer: Trainer) -> dict[str, str]:
    """The facts of a run, in the order in which they are shown."""
    config, ranks, news, tokens = trainer.config, trainer.ranks, trainer.news, trainer.news.tokens
    shares = trainer.strategy.place.size
    rows_a_share = trainer.global_batch_size / shares / trainer.accumulation
    who = f"share{'s' * (shares > 1)}"
    batch = f"{shares} {who} x {rows_a_share:g} rows x {trainer.accumulation} accumulation"
    return {
        "Model": f"{config.model} ({trainer.num_parameters / 1e6:.1f} M parameters)",
        "Data": f"{tokens.name}: {len(news.train_index):,} training, {len(news.validation_index):,} validation, "
        f"{len(tokens.test):,} test rows",
        "Labels": ", ".join(tokens.label_names),
        "Texts cut": f"{tokens.num_cut:,} of {tokens.num_texts:,}, at {config.max_length} tokens",
        "World size": f"{ranks.world_size} ({ranks.backend if ranks.is_distributed else 'no process group'})",
        "Layout": trainer.strategy.describe(),
        "Device": describe_device(ranks),
        "Precision": trainer.precision,
        "Global batch": f"{trainer.global_batch_size} rows = {batch}",
        "Steps": f"{trainer.total_steps:,} = {config.epochs} epochs x {len(trainer.sampler):,}",
        "Learning rate": f"{trainer.peak_learning_rate:.3g}, {config.schedule} after {config.warmup:.0%} warm-up",
        "Run folder": str(config.run_dir),
    }


def describe_environment(ranks: Ranks) -> dict[str, str]:
    """Versions and machine."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
        "Processes": f"{ranks.world_size} ({ranks.backend if ranks.is_distributed else 'no process group'})",
        "Device": describe_device(ranks),
        "System": f"{platform.system()} {platform.machine()}",
    }
