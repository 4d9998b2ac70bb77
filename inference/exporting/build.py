"""The export: write an artefact aside, compare it with the reference, then keep or refuse it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from common.calibration import Bounds, CalibrationError
from common.encoders import FAMILIES
from common.errors import ModelLoadError, UserError
from common.files import write_json, writing_folder
from common.hardware import cpu_name, threads_per_process
from common.model_folder import (
    CLEANING_KEY,
    DESCRIPTION_FILES,
    METRICS_FILE,
    WEIGHTS_FILE,
    Manifest,
    SavedModel,
    artefact_folder,
    describe_files,
    describe_source,
    weights_file,
    write_manifest,
)
from common.problem_types import REGRESSION, ProblemType
from common.rows import LabelledRows, evenly_spread
from common.text import Text, TextTokenizer, counted
from common.tokenizer_files import SETTINGS_FILE, TOKENIZER_FILE
from common.weights import read_weights
from inference.engines.base import Engine, answers_of
from inference.engines.native.quantize import write_native
from inference.engines.selection import build_engine, load_model
from inference.engines.self_test import FLOAT_TOLERANCE, check_engine
from inference.engines.torch_engine import TorchEngine
from inference.engines.windowed import config_with_attention, weights_with_attention, with_windows
from inference.errors import ExportRefusedError
from inference.exporting.calibrating import (
    Answered,
    calibrate,
    error_row,
    fitted_factors,
    lines_about,
)
from inference.exporting.comparison import Comparison, compare
from inference.exporting.stages import Stages, replaced_whole

SHOWN_CHANGES = 10
_CALIBRATION_TEXTS = 300
# The manifest keeps the reference's answers to these, and the artefact has to repeat them whenever
# it is loaded.
_PROBES = (
    "Oil prices rise again as stocks fall on Wall Street.",
    "The home side won the cup final after extra time and penalties.",
    "A new chip doubles the speed of phones, its makers say, and halves the power that they draw.",
    "Ministers meet in Geneva for talks on a cease-fire; observers expect an answer from both "
    "sides within the week.",
    "Goal!",
)
# Allowed on top of how much the probes differ on this processor: another one may round differently.
_PROBE_MARGIN = 0.1
# Numbers are compared in standard deviations, of which a quarter is a smaller difference than a
# quarter in probability.
_NUMBER_FACTOR = 4
# An artefact whose answers differ more from the reference is another model, whatever its accuracy:
# probabilities as they are, numbers in standard deviations.
MAX_TOLERANCE = 0.25
_PACKAGES = {
    "native": ("torch", "transformers", "numpy"),
    "openvino": ("torch", "transformers", "openvino", "nncf"),
    "onnx": ("torch", "transformers", "onnx", "onnxruntime"),
}


@dataclass(frozen=True, slots=True)
class Exported:
    folder: Path
    manifest: Manifest
    measured: list[tuple[str, str, str, str]]  # for people: what, before, after, change
    about: list[str]  # for people: what can be promised


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked of an export: for which engine, how much it may lose, and what is to be
    certified. ``calibrates``: whether the rows are texts as the model will get them.
    """

    engine: str
    precision: str
    max_drop: float
    bounds: Bounds
    calibrates: bool
    folded: Path | None = None  # where to write the model for transformers' pipeline


def export(saved: SavedModel, wishes: Wishes, rows: LabelledRows, console: Console) -> Exported:
    """Write a model's artefact for an engine next to the weights, measured and calibrated on
    ``rows``. If it fails, an older artefact stays.

    Raises:
        CalibrationError: One of the bounds cannot be promised.
        ExportRefusedError: It loses more than ``max_drop`` in the metric of the task (see
            `inference.exporting.comparison`), or an answer is too far from the reference's.
        ImportError: A package that the engine needs is not installed.
        ModelLoadError: The model or the artefact fails the tests of every model that is loaded.
        UserError: Something else is where the artefact belongs.
        ValueError: The engine cannot run this model.
    """
    torch.set_num_threads(threads_per_process())
    engine, precision = wishes.engine, wishes.precision
    tokenizer, kind = saved.tokenizer(), saved.problem_type
    stages = Stages(console, len(rows.texts))
    target = artefact_folder(saved.path, engine)
    # Compared at the end: a training that goes on meanwhile may write the weights again.
    before = _files_now(saved)
    # Written to a temporary folder: a refusal anywhere below leaves an older artefact untouched.
    with stages.bars, replaced_whole(target) as folder:
        with stages.stage("Load the reference (PyTorch, float32)"):
            weights = _float_weights(saved)
            reference = with_windows(TorchEngine(saved.config, weights, "fp32"), saved.config)
            # The reference is tested first: an artefact that repeats a broken model would pass all
            # comparisons.
            expected = check_engine(saved.path, reference, tokenizer, saved, FLOAT_TOLERANCE)

        with stages.stage(f"Write the {engine} {precision} files"):
            calibration = _calibration(saved, tokenizer, rows)
            config = config_with_attention(saved.config)
            weights = weights_with_attention(saved.config, weights)
            options = _write_engine_files(engine, precision, config, weights, calibration, folder)
            # Before the description is copied beside them: only what replaces the weights counts.
            before_bytes = weights_file(saved.path).stat().st_size
            after_bytes = sum(path.stat().st_size for path in folder.iterdir())
            artefact = build_engine(engine, folder, saved.config, precision)
            found = check_engine(target, artefact, tokenizer, saved, _max_distance(kind))

        token_ids = _encode(tokenizer, rows.texts)
        with stages.stage(f"Compare both on {counted(len(token_ids), 'row')}"):
            comparison = compare(saved, reference, artefact, token_ids, rows, stages.advance)
        _refuse_distance(found, expected, comparison.spread, kind)
        _refuse_loss(comparison, wishes.max_drop)

        with stages.stage("Calibrate the artefact on the rows that the model has not seen"):
            answered = Answered(saved, artefact, tokenizer, rows, comparison.scores)
            fitted, about = _calibrated(answered, wishes, folder)

        with stages.stage("Write the manifest, load the artefact as a server will"):
            _write_description(saved, folder)
            rest = {
                "options": options,
                "size": {"before_bytes": before_bytes, "after_bytes": after_bytes},
                **fitted,
                **_probes(reference, artefact, tokenizer, kind, comparison.spread),
            }
            manifest = _manifest(saved, wishes, comparison, folder, rest)
            write_manifest(folder, manifest)
            _refuse_changed(saved, before)
            load_model(folder)  # the same checks as at every later start
        if wishes.folded is not None:
            scores = comparison.reference_scores
            write_folded(weights, replace(answered, engine=reference, scores=scores), wishes.folded)
    table = [*comparison.table(), *error_row(manifest.calibration)]
    return Exported(target, manifest, table, about)


def _manifest(
    saved: SavedModel, wishes: Wishes, comparison: Comparison, folder: Path, rest: dict[str, Any]
) -> Manifest:
    source = describe_source(saved.path.name, weights_file(saved.path), _described(saved))
    return Manifest(
        engine=wishes.engine,
        precision=wishes.precision,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=source,
        files=describe_files(folder),
        versions={name: version(name) for name in _PACKAGES[wishes.engine]},
        accuracy=comparison.accuracy(),
        speed=_speed(comparison),
        **rest,
    )


def _calibrated(
    answered: Answered, wishes: Wishes, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """The fields of the manifest, and what people are told; without bounds to certify, it is no reason
    to refuse an export that there are no rows to calibrate on.
    """
    try:
        if not wishes.calibrates:
            what = "these rows are not the model's own data; name some with --rows"
            raise CalibrationError(what)
        fitted = calibrate(answered, wishes.bounds, folder)
    except CalibrationError as error:
        if wishes.bounds != Bounds():
            raise
        return {}, [f"Not calibrated: {error}."]
    return fitted, lines_about(fitted["calibration"])


def write_folded(weights: dict[str, Tensor], answered: Answered, target: Path) -> None:
    """Write a model folder whose last layer gives calibrated scores, for programs that know no
    manifest: scale x (W h + b) + offset is the layer (scale x W) h + (scale x b + offset).

    ``answered``: by the model in float32, which these programs run.

    Raises:
        CalibrationError: there are too few rows to calibrate on.
        UserError: the last layer is not known, or does not give the scores as they are.
    """
    saved = answered.saved
    layer = next((f.classifier for f in FAMILIES if f.model_type == saved.config["model_type"]), "")
    weight, bias = f"{layer}.weight", f"{layer}.bias"
    scale, offset = map(torch.from_numpy, fitted_factors(answered))
    why_not = {
        "a number has no probability": saved.problem_type is REGRESSION,
        "long texts are answered from the scores of several windows": saved.windows is not None,
        "its last layer is not known": weight not in weights,
        "its last layer has no bias to add an offset to": bias not in weights
        and bool(offset.any()),
        "something is there already": target.exists(),
    }
    if reason := next((why for why, is_so in why_not.items() if is_so), None):
        raise UserError(f"--fold {target}: {reason}; nothing was written", code="export-failed")
    folded = weights | {weight: (weights[weight] * scale[:, None]).float()}
    if bias in weights:
        folded[bias] = (weights[bias] * scale + offset).float()
    with writing_folder(target) as folder:
        _write_description(saved, folder)
        save_file({name: t.contiguous() for name, t in folded.items()}, folder / WEIGHTS_FILE)


def _float_weights(saved: SavedModel) -> dict[str, Tensor]:
    """The weights in float32, in which the reference computes whatever they were saved in."""
    is_file = isinstance(saved.weights, Path)
    weights = read_weights(saved.weights) if is_file else saved.weights or {}
    return {name: t.float() if t.is_floating_point() else t for name, t in weights.items()}


def _calibration(
    saved: SavedModel, tokenizer: TextTokenizer, rows: LabelledRows
) -> list[list[int]]:
    """Token ids of a few texts, of a long one the first window, by which an engine may see how
    large activations become.
    """
    # Spread over all rows, which are often sorted by label.
    texts = rows.training_texts or rows.texts
    chosen = evenly_spread(len(texts), _CALIBRATION_TEXTS)
    token_ids = _encode(tokenizer, [texts[i] for i in chosen])
    return [ids[: saved.max_length] for ids in token_ids]


def _probes(
    reference: Engine,
    artefact: Engine,
    tokenizer: TextTokenizer,
    kind: ProblemType,
    spread: float,
) -> dict[str, Any]:
    """The reference's answers to the probes for the manifest, and how far later ones may be off."""
    texts = tokenizer.examples(_PROBES)
    token_ids = _encode(tokenizer, texts)
    answers = answers_of(reference, kind, token_ids)  # (probes, labels)
    difference = _refuse_distance(answers_of(artefact, kind, token_ids), answers, spread, kind)
    probes = [
        {"text": text, "value": float(row[0])}
        if kind is REGRESSION
        else {"text": text, "probabilities": row.round(6).tolist()}
        for text, row in zip(texts, answers, strict=True)
    ]
    most = min(difference + _PROBE_MARGIN * _factor(kind), _max_distance(kind))
    return {"probes": probes, "probe_tolerance": round(most, 3)}


def _speed(comparison: Comparison) -> dict[str, Any]:
    before, after = comparison.texts_per_second
    return {
        "before_texts_per_second": round(before, 1),
        "after_texts_per_second": round(after, 1),
        "processor": cpu_name(),
        "threads": threads_per_process(),
    }


def _files_now(saved: SavedModel) -> list[tuple[int, int, int]]:
    """What changes when a file of the model is written again or replaced."""
    described = [saved.path / name for name in _described(saved)]
    found = [path.stat() for path in (weights_file(saved.path), *described) if path.is_file()]
    return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]


def _refuse_changed(saved: SavedModel, before: list[tuple[int, int, int]]) -> None:
    # The manifest would name weights that gave none of these answers.
    if _files_now(saved) != before:
        what, remedy = "changed while it was exported", "export the model again"
        raise ModelLoadError(saved.path, what, remedy)


def _described(saved: SavedModel) -> tuple[str, ...]:
    return DESCRIPTION_FILES if saved.path.is_dir() else ()


def _encode(tokenizer: TextTokenizer, texts: Sequence[Text]) -> list[list[int]]:
    return [encoded.ids for encoded in tokenizer.encode(texts)]


def _write_engine_files(
    engine: str,
    precision: str,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    calibration: Sequence[Sequence[int]],
    folder: Path,
) -> dict[str, Any]:
    """Write a model for an engine, and return how it was done, for the manifest."""
    if engine == "native":
        write_native(config, {name: tensor.numpy() for name, tensor in weights.items()}, folder)
        return {
            "weights": "int8 per channel",
            "activations": "int8 per token",
            "embeddings": "float16",
        }
    # The packages that write the others are optional.
    if engine == "onnx":
        from inference.exporting.onnx_writer import write_onnx

        return write_onnx(config, weights, folder, precision)
    from inference.exporting.openvino_writer import write_openvino

    return write_openvino(config, weights, calibration, folder)


def _factor(kind: ProblemType) -> int:
    return _NUMBER_FACTOR if kind is REGRESSION else 1


def _max_distance(kind: ProblemType) -> float:
    return _factor(kind) * MAX_TOLERANCE


def _refuse_distance(
    found: NDArray[np.float64], expected: NDArray[np.float64], spread: float, kind: ProblemType
) -> float:
    """The largest difference between the answers, (texts, labels), which may not be too large."""
    difference = float(np.abs(found - expected).max()) / spread
    if not difference <= _max_distance(kind):  # written so that NaN is refused too
        what, unit = "a probability", ""
        if kind is REGRESSION:
            what, unit = "an answer", " standard deviations"
        raise ExportRefusedError(
            f"{what} of the artefact differs by {difference:.2f}{unit} from the reference's, more "
            f"than {_max_distance(kind):.2f}; nothing was written, export for another engine"
        )
    return difference


def _refuse_loss(comparison: Comparison, max_drop: float) -> None:
    if not comparison.loss <= max_drop:  # written so that NaN is refused too
        raise ExportRefusedError(
            f"{comparison.loss_line} on {len(comparison.rows.texts)} rows), "
            f"more than --max_drop {max_drop:g}; nothing was written",
            comparison.changed_lines(SHOWN_CHANGES),
        )


def _write_description(saved: SavedModel, folder: Path) -> None:
    """Copy what serving needs besides weights: configuration, tokenizer, metrics."""
    if saved.path.is_dir():
        for name in ("config.json", METRICS_FILE):
            if (saved.path / name).is_file():
                shutil.copyfile(saved.path / name, folder / name)
        _write_tokenizer(saved, folder)
        return
    # A .pt file has the same facts in a dict.
    names = {str(class_id): label for class_id, label in enumerate(saved.labels)}
    write_json(
        folder / "config.json", {**saved.config, "id2label": names, CLEANING_KEY: saved.cleaning}
    )
    _write_tokenizer(saved, folder)
    if saved.metadata:
        write_json(folder / METRICS_FILE, saved.metadata)


def _write_tokenizer(saved: SavedModel, folder: Path) -> None:
    """Write all that the tokenizer's files say into one, for servers without transformers."""
    (folder / TOKENIZER_FILE).write_text(saved.tokenizer_json, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": saved.max_length}
    write_json(folder / SETTINGS_FILE, settings)
