"""Lays an artefact folder out: self-contained, written aside, and put in place whole or not at all."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.model_folder import CLEANING_KEY, DESCRIPTION_FILES, SavedModel, is_artefact

# From linux/fcntl.h and linux/fs.h; Python has no call for it.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replaced_whole(target: Path) -> Iterator[Path]:
    """Give an empty folder that takes the target's place if the block ends well, and vanishes if it does not.

    Raises:
        ValueError: Something that no export wrote is in the way.
    """
    if target.exists() and not is_artefact(target):
        raise ValueError(f"{target}: is in the way and no artefact; move it elsewhere")
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    previous = aside.with_name(f"{aside.name}.previous")
    try:
        yield aside
        aside.chmod(0o755)  # a temporary folder is its owner's alone, but a server is often another user
        if not (target.exists() and _exchanged(aside, target)):
            if target.exists():
                target.rename(previous)
            aside.rename(target)
    except BaseException:
        if previous.exists() and not target.exists():
            previous.rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Swap two folders in one step, so that a server that loads now finds either; False if the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    return libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def write_description(saved: SavedModel, folder: Path) -> None:
    """Copy what serving needs besides weights: configuration, tokenizer, metrics."""
    if saved.path.is_dir():
        for name in (*DESCRIPTION_FILES, "metrics.json"):
            if (saved.path / name).is_file():
                shutil.copyfile(saved.path / name, folder / name)
        return
    # A .pt file keeps the same facts in a dict.
    names = {str(class_id): label for class_id, label in enumerate(saved.labels)}
    _write_json(folder / "config.json", {**saved.config, "id2label": names, CLEANING_KEY: saved.cleaning})
    (folder / "tokenizer.json").write_text(saved.tokenizer_json, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", {"model_max_length": saved.max_length})
    if saved.metadata:
        _write_json(folder / "metrics.json", saved.metadata)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
