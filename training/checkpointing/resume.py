"""Where a run goes on: the newest whole checkpoint of its folder, if it is of the same run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.batching import DataPlace
from training.checkpointing.store import CheckpointStore, find_damage, load_checkpoint, move_aside
from training.config import BATCH_FIELDS, OPERATIONAL_FIELDS, TrainConfig
from training.distributed import Ranks
from training.errors import UserError
from training.utils import only_run_in


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to go on from, and its state on the CPU."""

    path: Path
    state: dict[str, Any]


def find_resume_point(
    config: TrainConfig,
    ranks: Ranks,
    place: DataPlace,
    store: CheckpointStore,
    data_key: str,
    say: Callable[[str], None],
) -> Resumed | None:
    """Find, check and read the checkpoint that ``--resume`` asks for; every rank reads the one rank 0 found.

    Raises:
        UserError: it is damaged, or of another configuration, other data or another global batch.
    """

    def find() -> Path | None:
        if not ranks.is_first:
            return None
        # Nothing may be moved from under a run that is still writing.
        with only_run_in(config.run_dir) if config.run_dir.is_dir() else contextlib.nullcontext():
            path = _find(config, store, say)
            if path is not None:
                _check_same_run(config, place, path, load_checkpoint(path), data_key)
                _move_later_ones_aside(store, path, say)
                say(f"Resuming from {path} (--resume none starts anew)")
            return path

    path = ranks.broadcast(ranks.together(find))
    return Resumed(path, ranks.together(lambda: load_checkpoint(path))) if path is not None else None


def global_batch_size(config: TrainConfig, place: DataPlace, resumed: Resumed | None) -> tuple[int, int]:
    """Rows of a global batch, and into how many micro-batches a share of it is cut.

    A resumed run keeps its global batch on any number of ranks; the micro-batches stay at most ``batch_size`` rows,
    and a pipeline has as many as it is asked to have, or a multiple of its ranks, which every schedule takes.
    """
    if resumed is None:
        return config.batch_size * place.size * config.gradient_accumulation, config.gradient_accumulation
    size = resumed.state["global_batch_size"]
    accumulation = max(1, -(-size // (place.size * config.batch_size)))
    if place.stages > 1 and accumulation != config.gradient_accumulation:
        accumulation = -(-accumulation // place.stages) * place.stages
    return size, accumulation


def _find(config: TrainConfig, store: CheckpointStore, say: Callable[[str], None]) -> Path | None:
    if config.resume == "none":
        if config.run_dir.exists():
            say(f"Moved the earlier run to {move_aside(config.run_dir)}")
        return None
    if config.resume == "auto":
        return store.newest(reject=say)
    path = Path(config.resume).expanduser()
    damage = find_damage(path) if path.is_dir() else "no such folder"
    if damage:
        raise UserError(f"--resume {config.resume}: {damage}; name a folder such as RUN/checkpoints/step_00000120")
    return path


def _check_same_run(config: TrainConfig, place: DataPlace, path: Path, state: dict[str, Any], data_key: str) -> None:
    before, now = state["config"], config.model_dump(mode="json")
    differing = [
        f"{name} was {before.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if name not in OPERATIONAL_FIELDS | BATCH_FIELDS and before.get(name) != value
    ]
    asked = config.batch_size * place.size * config.gradient_accumulation
    same_flags = all(before[name] == now[name] for name in BATCH_FIELDS)
    if asked != state["global_batch_size"] and not same_flags:
        differing.append(f"the global batch was {state['global_batch_size']} rows, is {asked}")
    if not differing and state["data_key"] != data_key:
        differing.append("the texts, the tokenizer or the way of cleaning have changed")
    if differing:
        raise UserError(
            f"{path} is of another run: {'; '.join(differing)}. Use the same flags to go on, another --output_dir, "
            "or --resume none to start anew (the earlier run is moved aside, not deleted)"
        )


def _move_later_ones_aside(store: CheckpointStore, path: Path, say: Callable[[str], None]) -> None:
    """Checkpoints beyond the one chosen belong to a future that this run will not have."""
    if path.absolute().parent != store.folder.absolute():
        return
    for later in store.later_than(path):
        say(f"Moved the later checkpoint {later} to {move_aside(later)}")
