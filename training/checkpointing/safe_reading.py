"""Reading a checkpoint must not run code from it.

Tensors are read with ``weights_only``. Their list, ``.metadata``, is a pickle, which could name any
function, so only the classes below are unpickled.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

# What a list of tensors consists of. BytesStorageMetadata is not allowed: such entries would be
# unpickled freely.
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _ListOfTensors(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Data types are pickled by name. Besides Size, nothing else in torch may be named:
        # torch.load is there, too.
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(
                f".metadata names {module}.{name}, which no list of tensors holds"
            )
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """DCP's reader for a folder, restricted to unpickling lists of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises pickle.UnpicklingError if the list names anything else."""
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata = _ListOfTensors(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
