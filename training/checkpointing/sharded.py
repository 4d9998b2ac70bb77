"""A rank's pieces of a state: staged in host memory, written and read with DCP.

DCP: ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    SavePlan,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from common.errors import UserError, first_line
from training.checkpointing.ownership import Chunk


class Staging:
    """Copies of a rank's pieces in host memory, which training does not touch."""

    def __init__(self) -> None:
        self.copies: dict[Chunk, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor], pieces: Sequence[Chunk]) -> None:
        # Copies of the last save are written over; those of pieces that this rank writes no more
        # are freed first, so that memory holds one copy of the state and not two.
        self.copies = {piece: self.copies[piece] for piece in pieces if piece in self.copies}
        for piece in pieces:
            source = piece.cut_from(tensors[piece.name])
            if piece not in self.copies:
                # Pinned memory, so that the host does not wait for each copy from the GPU.
                self.copies[piece] = torch.empty(
                    piece.shape, dtype=piece.dtype, pin_memory=source.is_cuda
                )
            self.copies[piece].copy_(source, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            # The next step writes to the tensors, so the copies have to be there before it begins.
            torch.cuda.current_stream().synchronize()


class StagedPlanner(DefaultSavePlanner):
    """Gives DCP the staged copies; it checks that no piece overlaps another and none is missing."""

    def __init__(self, copies: Mapping[Chunk, torch.Tensor]) -> None:
        # The names are flat already.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = [_write_item(chunk) for chunk in copies]
        self._copies = {(chunk.name, chunk.offsets): copy for chunk, copy in copies.items()}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # DCP would look through a state dict for what to write. Here that is known from the start,
        # and `state_dict` is empty.
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._copies[index.fqn, tuple(index.offset or ())]


def _write_item(chunk: Chunk) -> WriteItem:
    offsets = torch.Size(chunk.offsets)
    box = ChunkStorageMetadata(offsets, torch.Size(chunk.shape))
    data = TensorWriteData(box, TensorProperties(dtype=chunk.dtype), torch.Size(chunk.whole))
    return WriteItem(MetadataIndex(chunk.name, offsets), WriteItemType.SHARD, tensor_data=data)


def writer_with_clear_errors(writer: StorageWriter) -> StorageWriter:
    """A writer whose errors say in one line why it could not write.

    torch.save hides a full disk behind an error of its own. DCP sends errors to the other ranks as
    pickles, and if a driver's error cannot be pickled, this rank would fail while the others wait
    for it.
    """

    def with_clear_errors(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            try:
                return work(*arguments, **named)
            except Exception as error:
                hidden = error.__context__ if isinstance(error, RuntimeError) else None
                raise OSError(
                    error_reason(hidden if isinstance(hidden, OSError) else error)
                ) from None

        return wrapped

    # The three methods in which the writer touches the disk or the network.
    for name in ("prepare_local_plan", "write_data", "finish"):
        setattr(writer, name, with_clear_errors(getattr(writer, name)))
    return writer


def error_reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return first_line(error)


class SavedShards:
    """The tensors of a checkpoint, from which each rank reads what it needs; a ``SavedState``."""

    def __init__(self, reader: StorageReader, location: str, plain: Mapping[str, Any]) -> None:
        self.plain = plain
        self.location = location
        self._reader = reader
        self._metadata = self._or_user_error(reader.read_metadata)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    @property
    def tensors(self) -> Collection[str]:
        return self._metadata.state_dict_metadata.keys()

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.size for name, tensor in self._metadata.state_dict_metadata.items()}

    @torch.no_grad()
    def read(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors in place; of a DTensor, this rank's shard.

        Raises:
            UserError: a tensor is missing, has another shape, or cannot be read.
        """
        # As if this rank were alone: no collective, so that each may read what it needs and when.
        # What no rank asks for is not read at all.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(wanted), self._metadata, is_coordinator=True)
        plan = self._or_user_error(planner.create_local_plan)
        self._or_user_error(lambda: self._reader.read_data(plan, planner).wait())

    def _or_user_error(self, work: Any) -> Any:
        try:
            return work()
        # Of the storage's driver, of a pickle, of torch: all mean the same to the user.
        except Exception as error:
            raise UserError(
                f"checkpoint {self.location}: cannot be read ({first_line(error)})",
                code="checkpoint-damaged",
            ) from error
