"""Where a run resumes: at its newest complete checkpoint, if that belongs to the same run."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import lock_run_folder, move_aside
from training.checkpointing.places import open_location
from training.checkpointing.saver import STATE_FILE
from training.checkpointing.sharded import SavedShards
from training.checkpointing.storage import Storage
from training.config import TrainConfig, on_resume
from training.data.batching import DataShard
from training.distributed.ranks import Ranks
from training.distributed.restarts import has_begun
from training.facts import EPSILON


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to resume from: its plain values, and its tensors, which are not read yet."""

    path: str
    state: dict[str, Any]
    tensors: SavedShards


def find_resume_point(
    config: TrainConfig,
    ranks: Ranks,
    data_shard: DataShard,
    storage: Storage,
    sources: Mapping[str, str | None],
    say: Callable[[str], None],
) -> Resumed | None:
    """Find, verify and open the checkpoint that ``--resume`` asks for; all ranks verify a part.

    Once a run has begun as asked, restarts by its launcher with the same flags resume that run.
    ``sources``: see :class:`training.run.context.StepPlan`.

    Raises:
        UserError: it is damaged, or from another configuration, other data, another global batch
            size or another model.
    """
    with contextlib.ExitStack() as stack:
        # Locked while checkpoints are verified and moved, and given back at the end: the run takes
        # its own lock later.
        ranks.from_first(lambda: _hold(config, storage, stack))
        # torchrun restarts ranks with the same flags. The first attempt may have started from
        # scratch because of `--resume none`; the second must not throw away what the first has
        # trained.
        begun = ranks.any(has_begun())  # each launcher only knows its own attempts
        if config.resume == "none" and not begun:
            ranks.from_first(lambda: _start_from_scratch(config, storage, say))
            return None
        resumed = _choose(config.resume, begun, ranks, storage, say)
        if resumed is None:
            return None
        ranks.run_on_all_ranks(lambda: _check_same_run(config, data_shard, resumed, sources))
        move_later_aside(ranks, storage, resumed.state["step"], say)
        hint = "--resume none starts from scratch"
        if begun and config.resume != "auto":
            hint = f"--resume {config.resume} applied only to the first start"
        say(f"Resuming from {resumed.path} ({hint})")
        return resumed


def state_of_run(config: TrainConfig, ranks: Ranks, storage: Storage) -> dict[str, Any]:
    """The plain values of the run that will be resumed; empty for a new run.

    For what has to be known before data and model: the checkpoint is not verified yet.
    """
    begun = ranks.any(has_begun())
    if config.resume == "none" and not begun:
        return {}
    paths = [path for _, path in sorted(list_checkpoints(ranks, storage).items(), reverse=True)]
    if config.resume not in ("auto", "none"):
        paths.insert(0, _absolute(config.resume))

    def read() -> dict[str, Any]:
        for path in paths:
            # A checkpoint that cannot be read is skipped or refused later, when it is verified.
            with contextlib.suppress(OSError, ValueError):
                if "config" in (state := _storage_of(path).read_json(path, STATE_FILE)):
                    return state
        return {}

    return ranks.from_first(read)


def cleaning_of(config: TrainConfig, earlier: Mapping[str, Any]) -> str:
    """Resolve ``--clean auto``: a resumed run cleans as it did when it ``earlier``."""
    return _cleaning(earlier["config"]) if earlier and config.clean == "auto" else config.clean


def _cleaning(config: Mapping[str, Any]) -> str:
    """Before cleaning was a choice, all texts were cleaned as news."""
    return config.get("clean", "news")


def newest_checkpoint(
    ranks: Ranks, storage: Storage, say: Callable[[str], None], after: int = -1
) -> str | None:
    """The newest complete checkpoint of a step later than ``after``, or None; a collective call.

    ``say`` prints which damaged checkpoint was skipped, and why.

    Raises:
        UserError: there are checkpoints, but none is complete.
    """
    found = {step: path for step, path in list_checkpoints(ranks, storage).items() if step > after}
    for step in sorted(found, reverse=True):
        damage = find_shared_damage(found[step], ranks)
        if damage is None:
            return found[step]
        say(f"Skipping the damaged checkpoint {found[step]}: {damage}")
    if found:
        raise UserError(
            f"--resume auto: none of the {len(found)} checkpoints in {storage.location} is "
            "complete; use --resume none to start from scratch (they are moved aside, not deleted)",
            quiet=not ranks.is_first,
            code="no-complete-checkpoint",
        )
    return None


def list_checkpoints(ranks: Ranks, storage: Storage) -> dict[int, str]:
    """The path of each step's checkpoint, complete or not, as rank 0 sees them."""

    def look() -> dict[int, str]:
        with _unreachable_is_user_error(storage):
            return storage.steps()

    return ranks.from_first(look)


def move_later_aside(ranks: Ranks, storage: Storage, step: int, say: Callable[[str], None]) -> None:
    """Move aside the checkpoints after ``step``: this run will train those steps differently.

    If they stayed, they would count as the newest ones, for pruning after the next save and for the
    next start.
    """

    def move() -> None:
        with _unreachable_is_user_error(storage):
            for later, path in sorted(storage.steps().items()):
                if later > step:
                    say(f"Moved the later checkpoint {path} to {storage.move_aside(path)}")

    ranks.from_first(move)


def open_checkpoint(path: str, ranks: Ranks) -> Resumed:
    """Read a checkpoint's plain values, on rank 0 for all, and the list of its tensors."""
    storage = ranks.run_on_all_ranks(lambda: _storage_of(path))

    def read() -> Any:
        try:
            return storage.read_json(path, STATE_FILE)
        except (OSError, ValueError) as error:
            raise UserError(
                f"checkpoint {path}: {STATE_FILE} cannot be read ({error})",
                code="checkpoint-damaged",
            ) from error

    state = ranks.from_first(read)
    # Each rank opens the list of tensors itself: with it, each reads its own shards later.
    tensors = ranks.run_on_all_ranks(
        lambda: SavedShards(storage.reader(path), path, state["strategy"])
    )
    return Resumed(path, state, tensors)


def find_shared_damage(path: str, ranks: Ranks) -> str | None:
    """Why a checkpoint is not complete, or None; every rank hashes its share of the files."""
    found = ranks.run_on_all_ranks(
        lambda: _storage_of(path).find_damage(path, ranks.rank, ranks.world_size)
    )
    return next((damage for damage in ranks.gather(found) if damage), None)


def global_batch_size(
    rows: int, config: TrainConfig, data_shard: DataShard, resumed: Resumed | None
) -> tuple[int, int]:
    """Rows per global batch, and micro-batches of at most ``rows`` rows per rank and step.

    A resumed run keeps its global batch size on any number of ranks. A pipeline keeps the number of
    micro-batches, or takes a multiple of its ranks, which every schedule accepts.
    """
    if resumed is None:
        return rows * data_shard.size * config.gradient_accumulation, config.gradient_accumulation
    size = resumed.state["global_batch_size"]
    accumulation = max(1, -(-size // (data_shard.size * rows)))
    if data_shard.stages > 1 and accumulation != config.gradient_accumulation:
        accumulation = -(-accumulation // data_shard.stages) * data_shard.stages
    return size, accumulation


def _storage_of(path: str) -> Storage:
    return open_location(path.rsplit("/", 1)[0])


@contextlib.contextmanager
def _unreachable_is_user_error(storage: Storage) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{storage.location}: does not answer ({error}); rerun the same command when it does",
            code="storage-unreachable",
        ) from error


def _hold(config: TrainConfig, storage: Storage, stack: contextlib.ExitStack) -> None:
    """Lock the run, so that nothing is moved while another process still writes it."""
    if config.run_dir.is_dir():
        stack.enter_context(lock_run_folder(config.run_dir))
    with _unreachable_is_user_error(storage):
        if storage.steps():
            stack.enter_context(storage.lock())


def _start_from_scratch(config: TrainConfig, storage: Storage, say: Callable[[str], None]) -> None:
    if config.run_dir.exists():
        say(f"Moved the earlier run to {move_aside(config.run_dir)}")
    # Checkpoints in another folder must go too, or a later run would take them for its own.
    with _unreachable_is_user_error(storage):
        for path in storage.steps().values():
            say(f"Moved the earlier checkpoint {path} to {storage.move_aside(path)}")


def _choose(
    asked: str, begun: bool, ranks: Ranks, storage: Storage, say: Callable[[str], None]
) -> Resumed | None:
    """The named checkpoint, until the run resumed from it has saved a later one; or the newest."""
    named = None if asked in ("auto", "none") else open_checkpoint(_named(asked, ranks), ranks)
    if named and not begun:
        return named
    newest = newest_checkpoint(ranks, storage, say, after=named.state["step"] if named else -1)
    return open_checkpoint(newest, ranks) if newest else named


def _named(asked: str, ranks: Ranks) -> str:
    path = _absolute(asked)
    advice = "name a folder such as RUN/checkpoints/step_00000120"

    def look() -> None:
        if "://" not in path and not Path(path).is_dir():
            raise UserError(
                f"--resume {asked}: no such folder on {socket.gethostname()}; {advice} that all "
                "ranks see",
                code="checkpoint-not-found",
            )

    ranks.run_on_all_ranks(look)
    if damage := find_shared_damage(path, ranks):
        raise UserError(
            f"--resume {asked}: {damage}; {advice}",
            quiet=not ranks.is_first,
            code="checkpoint-damaged",
        )
    return path


def _absolute(asked: str) -> str:
    local = asked.removeprefix("file://")
    return asked.rstrip("/") if "://" in local else str(Path(local).expanduser().absolute())


def _check_same_run(
    config: TrainConfig, data_shard: DataShard, resumed: Resumed, sources: Mapping[str, str | None]
) -> None:
    state = resumed.state
    differing = _other_flags(config, data_shard, state) or _other_sources(config, state, sources)
    if differing:
        raise UserError(
            f"{resumed.path} belongs to another run: {'; '.join(differing)}. To resume it, use the "
            "same flags; otherwise give another --output_dir, or --resume none to start from "
            "scratch (the earlier run is moved aside, not deleted)",
            code="checkpoint-other-run",
        )
    # A run may get more epochs, or fewer, but none that it has begun is taken back.
    begun = _epochs_begun(state)
    if config.epochs < begun:
        raise UserError(
            f"--epochs {config.epochs}: {resumed.path} has reached epoch {begun}; give {begun} or "
            "more, or --resume none to start from scratch (the earlier run is moved aside, not "
            "deleted)",
            code="checkpoint-other-run",
        )


def _other_flags(config: TrainConfig, data_shard: DataShard, state: Mapping[str, Any]) -> list[str]:
    """The flags that would make the rest of the run another one than its beginning."""
    # What a run of an older version could not be told, it did as the default does.
    defaults = TrainConfig().model_dump(mode="json")
    before = defaults | state["config"] | {"clean": _cleaning(state["config"])}
    now = config.model_dump(mode="json")
    differing = [
        f"{name} was {before[name]!r} and is now {value!r}"
        for name, value in now.items()
        if on_resume(name) == "same" and before[name] != value
    ]
    if (epsilon := before.get("epsilon", EPSILON)) != EPSILON:  # once a flag
        differing.append(f"AdamW's epsilon was {epsilon!r} and is now {EPSILON!r}")
    # Another number of ranks multiplies to another batch. With the flags of before that is no
    # mistake: the run then keeps the batch that it began with, see `global_batch_size`.
    asked = config.batch_size * data_shard.size * config.gradient_accumulation
    same_flags = all(
        before[name] == now[name] for name in now if on_resume(name) == "same global batch"
    )
    if asked != state["global_batch_size"] and not same_flags:
        differing.append(
            f"the global batch was {state['global_batch_size']} rows and is now {asked}"
        )
    return differing


def _other_sources(
    config: TrainConfig, state: Mapping[str, Any], sources: Mapping[str, str | None]
) -> list[str]:
    """What has changed behind flags that are the same; at most one, as one explains the others."""
    # The key of cached tokens once had no version and changed with every edit of that code, so
    # that of an old checkpoint says nothing about its data.
    if state["data_key"].startswith("v") and state["data_key"] != sources["data_key"]:
        releases = {str(key).partition("-")[0] for key in (state["data_key"], sources["data_key"])}
        if len(releases) > 1:
            return [
                "the release that began it made other tokens of some texts, so finish it with that "
                "release"
            ]
        return ["the texts, the tokenizer or the cleaning have changed"]
    if state.get("frozen_hash") != sources["frozen_hash"]:
        return [f"the weights of --model {config.model} have changed"]
    before, now = state.get("teacher_key"), sources["teacher_key"]
    if before == now:
        return []
    what = "is new" if before is None else "is no longer given" if now is None else "has changed"
    return [f"the teacher (--distill) {what}"]


def _epochs_begun(state: Mapping[str, Any]) -> int:
    per_epoch = state.get("steps_per_epoch")
    # An older version did not write it. The last evaluation tells it, with a rounded epoch.
    if not per_epoch:
        last = max(state["epochs"], key=lambda evaluation: evaluation["step"], default={"epoch": 0})
        per_epoch = round(last["step"] / last["epoch"]) if last["epoch"] else state["step"]
    return math.ceil(state["step"] / max(1, per_epoch))
