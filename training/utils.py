"""What a training script of one's own needs of the small things, under one short name."""

from training.monitoring.records import format_time
from training.parallelism.distributed import seed_everything
from training.run.state import AverageMeter

__all__ = ["AverageMeter", "format_time", "seed_everything"]
