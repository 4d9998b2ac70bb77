"""Monitors: how a rank shows what its run does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.monitoring.console import Console
from training.monitoring.events import EventStream
from training.monitoring.exporter import Exporter
from training.monitoring.phases import Phases
from training.monitoring.status import StatusFile


@dataclass(frozen=True)
class Monitors:
    """Of one rank; the run folder is first written to when their contexts are entered."""

    ranks: Ranks
    phases: Phases
    events: EventStream
    exporter: Exporter
    status: StatusFile
    console: Console | None  # on rank 0
    say: Callable[[str], None]  # prints a line, on rank 0

    @classmethod
    def of(cls, config: TrainConfig, ranks: Ranks) -> Monitors:
        """A collective call.

        Raises:
            UserError: a rank cannot listen on its port for metrics.
        """
        phases, console = Phases(), Console() if ranks.is_first else None
        return cls(
            ranks,
            phases,
            EventStream(config.run_dir, ranks, phases, config.log_every),
            # A port may be taken on one rank alone. Then all raise its error; otherwise the others
            # would wait for that rank in their next collective.
            ranks.run_on_all_ranks(lambda: Exporter(config, ranks, phases)),
            StatusFile(config.run_dir, ranks, phases),
            console,
            console.say if console else _say_nothing,
        )


def _say_nothing(text: str) -> None: ...
