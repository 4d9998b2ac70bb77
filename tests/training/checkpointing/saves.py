"""Checkpoints of one process for tests of storages: each holds one number, in tensors and in plain values."""

from __future__ import annotations

import warnings
from pathlib import Path

import fsspec
import torch
import torch.distributed.checkpoint as dcp

from training.checkpointing import Storage

FILES = (".metadata", "__0_0.distcp", "state.json")


def write_files(storage: Storage, step: int, value: float) -> dict[str, dict]:
    """Write all but the manifest; returns what the manifest is to hold."""
    tensors = {"weight": torch.full((500,), value)}
    storage.begin(step)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(tensors, storage_writer=storage.writer(step), no_dist=True)
    storage.write_json(step, "state.json", {"step": step, "value": value})
    return storage.hashes(step, "__0_") | storage.hashes(step, ".metadata") | storage.hashes(step, "state.json")


def save(storage: Storage, step: int, value: float) -> str:
    """Save a whole checkpoint; returns its path."""
    return storage.commit(step, write_files(storage, step, value))


def value_in(storage: Storage, path: str) -> float:
    """The one number that a checkpoint holds; a failed test if its parts do not agree."""
    tensors = {"weight": torch.zeros(500)}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(tensors, storage_reader=storage.reader(path), no_dist=True)
    values = {storage.read_json(path, "state.json")["value"], *tensors["weight"].unique().tolist()}
    assert len(values) == 1, f"{path} mixes {values}"
    return values.pop()


def newest_whole(storage: Storage) -> tuple[int, float]:
    """Step and number of the checkpoint that a run would go on from."""
    for step, path in sorted(storage.steps().items(), reverse=True):
        if storage.find_damage(path) is None:
            return step, value_in(storage, path)
    raise AssertionError(f"no whole checkpoint in {storage.location}")


def content(path: str) -> bytes:
    """The bytes of a file in any storage."""
    files, place = fsspec.url_to_fs(path)
    return files.cat_file(place)


def names_in(folder: str) -> list[str]:
    """The names of all that lies in a folder of any storage; none if there is no such folder."""
    files, place = fsspec.url_to_fs(folder)
    return sorted(Path(path).name for path in files.ls(place, detail=False)) if files.exists(place) else []
