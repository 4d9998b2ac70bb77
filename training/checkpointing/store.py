"""A checkpoint is whole or absent: written aside, hashed, renamed; the newest whole one is found, not configured.

A checkpoint is a folder ``step_00000120`` with ``state.pt`` and ``manifest.json``. The manifest, written last, holds
size and SHA-256 of the state; a folder without it does not exist for readers.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from training.errors import TrainingFailure, UserError
from training.utils import replace_folder, write_json

STATE_FILE = "state.pt"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})")


class CheckpointStore:
    """The checkpoints of one run, in a folder of their own.

    Args:
        folder: made at the first save.
        keep_last: how many of the newest stay when a new one stands.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last

    def save(self, step: int, state: dict[str, Any], best_step: int | None) -> Path:
        """Write a checkpoint, then remove all but the newest ones and the best.

        Args:
            step: optimizer steps done.
            state: tensors and plain values only.
            best_step: the step whose checkpoint must stay.

        Raises:
            TrainingFailure: it could not be written; the ones before it stay.
        """
        target = self.folder / f"step_{step:08d}"
        aside = self.folder / f".step_{step:08d}.tmp"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            torch.save(state, aside / STATE_FILE)
            files = {
                STATE_FILE: {
                    "bytes": (aside / STATE_FILE).stat().st_size,
                    "sha256": _sha256(aside / STATE_FILE),
                }
            }
            write_json(aside / MANIFEST, {"step": step, "files": files})
            replace_folder(aside, target)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise TrainingFailure(
                f"the checkpoint {target} could not be written ({error}); the ones before it are whole: "
                "make room, then start the same command again"
            ) from error
        self._prune(best_step)
        return target

    def newest(self, reject: Callable[[str], None]) -> Path | None:
        """The newest whole checkpoint, or None where there is none at all.

        Args:
            reject: told in one line which checkpoint was passed over and why.

        Raises:
            UserError: there are checkpoints, and none is whole.
        """
        found = self._steps()
        for step in sorted(found, reverse=True):
            damage = find_damage(found[step])
            if damage is None:
                return found[step]
            reject(f"Skipping the damaged checkpoint {found[step]}: {damage}")
        if found:
            raise UserError(
                f"--resume auto: none of the {len(found)} checkpoints in {self.folder} is whole; "
                "use --resume none to start anew (they are moved aside, not deleted)"
            )
        return None

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies or would lie."""
        return self.folder / f"step_{step:08d}"

    def later_than(self, path: Path) -> list[Path]:
        """The checkpoints of more steps than that of ``path``, whole or not."""
        match = _NAME.fullmatch(path.name)
        return [found for step, found in sorted(self._steps().items()) if match and step > int(match[1])]

    def _steps(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir())
        return {int(match[1]): path for match, path in matches if match}

    def _prune(self, best_step: int | None) -> None:
        found = self._steps()
        for step in sorted(found, reverse=True)[self.keep_last :]:
            if step != best_step:
                # Without its manifest it is no checkpoint, should the removal be cut short.
                (found[step] / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(found[step], ignore_errors=True)
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """What keeps a checkpoint from being whole, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, not {expected['bytes']}"
            if _sha256(path / name) != expected["sha256"]:
                return f"{name} does not match its SHA-256"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint's state onto the CPU, page by page as it is used: ranks of one machine share the pages.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return torch.load(path / STATE_FILE, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"checkpoint {path}: cannot be read ({str(error).splitlines()[0]})") from error


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free name of ``folder.1``, ``folder.2``, ...; returns the new name."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
