"""What is known of local data from an earlier start, so that it is not read again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.rows import FORMATS, PLAIN_TEXT_FORMAT, SAMPLE_NEWS
from common.text import VERSION
from training.config import TrainConfig
from training.data.dataset import SAMPLE, is_saved_by_datasets
from training.data.kept import digest_of
from training.data.tokenized import Copies

# Raise it whenever a file may be read as other rows than before.
READING_VERSION = 4


def source_file(folder: Path, config: TrainConfig) -> Path | None:
    """Where it is kept what came of these files, read with these flags; None for the hub."""
    # Names are read in no time, and an earlier model's data may change.
    if not config.dataset or config.from_model:
        return None
    path = SAMPLE_NEWS if config.dataset == SAMPLE else Path(config.dataset).expanduser().absolute()
    states = _states_of(path)
    if not states:
        return None
    flags: list[Any] = [asdict(config.columns), asdict(config.selection), config.task]
    flags += [config.seed, config.bad_rows]
    if config.is_language_model:
        # It decides which texts are set aside before they are joined.
        flags.append(config.validation_fraction)
    flags += [config.dataset, config.clean, config.max_length, config.model, config.model_revision]
    # Added only if used: the names of earlier starts stay.
    flags += [config.long] if config.long != "cut" else []
    flags += [Copies.VERSION, config.rough_share] if config.rough_share else []
    flags += [config.labels] if config.labels else []
    for texts in filter(None, (config.distill_texts, config.unlabelled)):
        flags += [_states_of(Path(texts).expanduser().absolute())]
    digest = digest_of([json.dumps([VERSION, READING_VERSION, states, flags])])
    return folder / f"source-{digest}.json"


def _states_of(path: Path) -> list[list[Any]]:
    """What changes whenever a file of rows, or one of a folder, is written; empty without one."""
    beside = path.with_name("classes.txt")  # a folder's own is among its files
    files = [path, *([beside] if beside.is_file() else [])] if path.is_file() else []
    if path.is_dir():
        found = path.rglob("*") if is_saved_by_datasets(path) else path.glob("*")
        files = [
            one
            for one in found
            if one.suffix in (*FORMATS, PLAIN_TEXT_FORMAT, ".arrow") and one.is_file()
        ]
    return sorted(
        # The inode too: a file that is replaced within a tick of the clock has the same time and
        # maybe the same size.
        [str(one), one.stat().st_size, one.stat().st_mtime_ns, one.stat().st_ino]
        for one in files
    )


def repeats_file(folder: Path, key: str, config: TrainConfig, what: str) -> Path:
    """Where it is kept which of these rows repeat others, for the same split of them."""
    rows = [READING_VERSION, config.duplicates, config.validation_fraction]
    rows += [config.max_train_rows, config.seed]
    return folder / f"{key}-{what}-{digest_of([json.dumps(rows)])}.json"
