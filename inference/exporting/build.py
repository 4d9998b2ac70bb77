"""The export itself: write aside, compare with the reference, then put in place or refuse."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from common.hardware import cpu_name, usable_cpus
from common.manifest import Manifest, describe_files, describe_source, write_manifest
from common.model_folder import SavedModel, artefact_folder, weights_file
from common.rows import LabelledRows, evenly_spread
from common.text import TextTokenizer
from inference.engines.base import Engine
from inference.engines.forward import probabilities_of
from inference.engines.selection import build_engine, load_model
from inference.engines.self_test import FLOAT_TOLERANCE, check_engine
from inference.engines.torch_engine import TorchEngine, read_weights
from inference.errors import ExportRefusedError
from inference.exporting.artefact import replaced_whole, write_description
from inference.exporting.comparison import Comparison, compare
from inference.exporting.engine_files import package_versions, write_engine_files

SHOWN_CHANGES = 10
_CALIBRATION_TEXTS = 300
# The reference's answers to these are kept, and compared whenever the artefact is loaded.
_PROBES = (
    "Oil prices rise again as stocks fall on Wall Street.",
    "The home side won the cup final after extra time and penalties.",
    "A new chip doubles the speed of phones, its makers say, and halves the power that they draw.",
    "Ministers meet in Geneva for talks on a cease-fire; observers expect an answer from both sides within the week.",
    "Goal!",
)
# Added to what the probes differ by where the artefact is written: another processor may round otherwise.
_PROBE_MARGIN = 0.1
# An artefact that answers further from its reference is another model, whatever its accuracy.
MAX_TOLERANCE = 0.25


class Progress(Protocol):
    """Where an export says how far it is."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Name what the block does, and how long it took."""
        ...

    def advance(self, rows: int) -> None:
        """Count rows that were compared."""
        ...


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished export."""

    folder: Path
    manifest: Manifest


def export(
    saved: SavedModel, engine: str, precision: str, rows: LabelledRows, max_drop: float, progress: Progress
) -> Exported:
    """Write a model's artefact for an engine beside it.

    Args:
        saved: The model, with its weights.
        engine: A key of `inference.exporting.engine_files.PRECISIONS`.
        precision: One of the engine's.
        rows: What to measure on.
        max_drop: Percentage points of accuracy that it may lose.
        progress: Told of stages and rows.

    Raises:
        ExportRefusedError: It loses more, or a probability lies too far from the reference's; whatever artefact was
            there stays.
        ImportError: A package that the engine needs is not installed.
        ModelLoadError: The model or the artefact fails what every model is tried on when it is loaded.
        ValueError: The engine does not run this model, or something is in the way.
    """
    torch.set_num_threads(usable_cpus())
    tokenizer = saved.tokenizer()
    with progress.stage("Load the reference (PyTorch, float32)"):
        weights = _load_weights(saved)
        reference = TorchEngine(saved.config, weights, "fp32")
        expected = check_engine(saved.path, reference, tokenizer, saved.labels, FLOAT_TOLERANCE)
    target = artefact_folder(saved.path, engine)
    with replaced_whole(target) as folder:
        with progress.stage(f"Write the {engine} {precision} files"):
            chosen = evenly_spread(len(rows.calibration_texts), _CALIBRATION_TEXTS)
            calibration = _encode(tokenizer, [rows.calibration_texts[i] for i in chosen])
            options = write_engine_files(engine, precision, saved.config, weights, calibration, folder)
            after_bytes = sum(path.stat().st_size for path in folder.iterdir())
            artefact = build_engine(engine, folder, saved.config, precision)
            found = check_engine(target, artefact, tokenizer, saved.labels, MAX_TOLERANCE)
            _refuse_distance(float(np.abs(found - expected).max()))
        token_ids = _encode(tokenizer, rows.texts)
        with progress.stage(f"Compare both on {len(token_ids)} rows"):
            comparison = compare(reference, artefact, token_ids, rows.class_ids, progress.advance)
        _refuse_drop(comparison, rows, saved.labels, max_drop)
        with progress.stage("Write the manifest, load the artefact as a server will"):
            write_description(saved, folder)
            weights_path = weights_file(saved.path)
            probes, tolerance = _probes(tokenizer, reference, artefact)
            manifest = Manifest(
                engine=engine,
                precision=precision,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                source=describe_source(saved.path.name, weights_path),
                files=describe_files(folder),
                versions=package_versions(engine),
                options=options,
                accuracy=comparison.accuracy(rows.name),
                size={"before_bytes": weights_path.stat().st_size, "after_bytes": after_bytes},
                speed=_speed(comparison),
                probes=probes,
                probe_tolerance=tolerance,
            )
            write_manifest(folder, manifest)
            load_model(folder)
    return Exported(target, manifest)


def _load_weights(saved: SavedModel) -> dict[str, Tensor]:
    weights = read_weights(saved.weights) if isinstance(saved.weights, Path) else dict(saved.weights or {})
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def _encode(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoded.ids for encoded in tokenizer.encode(texts)]


def _refuse_drop(comparison: Comparison, rows: LabelledRows, labels: Sequence[str], max_drop: float) -> None:
    if comparison.drop_points <= max_drop:
        return
    accuracy = comparison.accuracy(rows.name)
    raise ExportRefusedError(
        f"accuracy falls by {comparison.drop_points:.2f} points ({accuracy['before']:.2%} to {accuracy['after']:.2%} "
        f"on {accuracy['rows']} rows), more than --max_drop {max_drop:g}; nothing was written",
        comparison.changed_lines(rows.texts, labels, SHOWN_CHANGES),
    )


def _probes(tokenizer: TextTokenizer, reference: Engine, artefact: Engine) -> tuple[list[dict[str, Any]], float]:
    token_ids = _encode(tokenizer, _PROBES)
    expected = probabilities_of(reference, token_ids)
    difference = float(np.abs(probabilities_of(artefact, token_ids) - expected).max())
    _refuse_distance(difference)
    probes = [
        {"text": text, "probabilities": row.round(6).tolist()} for text, row in zip(_PROBES, expected, strict=True)
    ]
    return probes, round(min(difference + _PROBE_MARGIN, MAX_TOLERANCE), 3)


def _refuse_distance(difference: float) -> None:
    if not difference <= MAX_TOLERANCE:
        raise ExportRefusedError(
            f"a probability of the artefact lies {difference:.2f} from the reference's, more than {MAX_TOLERANCE:.2f}; "
            "nothing was written, export for another engine",
            [],
        )


def _speed(comparison: Comparison) -> dict[str, Any]:
    before, after = comparison.texts_per_second
    return {
        "before_texts_per_second": round(before, 1),
        "after_texts_per_second": round(after, 1),
        "processor": cpu_name(),
        "threads": usable_cpus(),
    }
