"""Small helpers for a training script of your own, under one short name."""

from training.distributed.ranks import seed_everything
from training.monitoring.records import format_time
from training.run.state import AverageMeter

__all__ = ["AverageMeter", "format_time", "seed_everything"]
