"""Which storage an address means, and whether every rank can use it."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError
from training.checkpointing.local_storage import LocalStorage
from training.checkpointing.remote_storage import RemoteStorage
from training.checkpointing.storage import Storage
from training.config import TrainConfig
from training.distributed.ranks import Ranks


def open_storage(config: TrainConfig) -> Storage:
    """The storage that ``--checkpoint_dir`` names; ``checkpoints`` in the run folder by default."""
    return open_location(config.checkpoint_dir or str(config.run_dir / "checkpoints"))


def open_location(address: str) -> Storage:
    # file:// is not left to fsspec, whose driver neither syncs what it writes nor renames a folder
    # in one step.
    if "://" not in address or address.startswith("file://"):
        return LocalStorage(Path(address.removeprefix("file://")).expanduser())
    return RemoteStorage(address)


def check_storage(storage: Storage, ranks: Ranks) -> None:
    """Check, before an epoch is lost, that rank 0 can write there and all ranks can read it."""

    def put(name: str) -> None:
        try:
            storage.put_probe(name)
        except OSError as error:
            raise UserError(
                f"--checkpoint_dir {storage.location}: cannot be written ({error})",
                code="not-writable",
            ) from error

    def look(name: str) -> None:
        try:
            seen = storage.sees_probe(name)
        except OSError as error:
            raise UserError(
                f"--checkpoint_dir {storage.location}: cannot be read ({error})",
                code="storage-unreachable",
            ) from error
        if not seen:
            raise UserError(
                f"--checkpoint_dir {storage.location}: files that rank 0 writes there are not "
                "visible here; name a place that all machines share",
                code="folder-not-shared",
            )

    with ranks.probing(put, storage.remove_probe) as probe:
        ranks.run_on_all_ranks(lambda: look(probe))
