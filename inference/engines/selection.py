"""Picks the engine: the fastest artefact of a model that works here, with the reason in one line."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inference.cpu import has_fast_int8, usable_cpus
from inference.engines.base import Engine
from inference.errors import ModelLoadError, first_line
from inference.forward import probabilities_of
from inference.manifest import Manifest, is_from, read_manifest, sha256_of, verify_files
from inference.model_files import (
    DESCRIPTION_FILES,
    SavedModel,
    artefact_folder,
    is_artefact,
    read_saved_model,
    weights_file,
)
from inference.self_test import FLOAT_TOLERANCE, HALF_TOLERANCE, check_engine
from inference.tokenization import TextTokenizer

# Fastest first, as measured in benchmarks/serving.md.
ARTEFACT_ENGINES = ("native", "openvino", "onnx")
_TORCH_ENGINES = ("torch", "torch_compiled")
ENGINES = ("auto", *ARTEFACT_ENGINES, *_TORCH_ENGINES)
_NVIDIA_DEVICE = Path("/dev/nvidia0")
_EXPORT = "write it again with python -m inference.export"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to answer.

    Attributes:
        saved: Its description, from the artefact where one was picked.
        precision: Of the arithmetic: ``int8``, ``fp32``, ``bf16`` or ``fp16``.
        revision: The first 12 hex digits of the SHA-256 of the weights that training wrote.
        reason: Why this engine was picked, in one line.
    """

    saved: SavedModel
    tokenizer: TextTokenizer
    engine: Engine
    precision: str
    revision: str
    reason: str


def load_model(path: Path, wanted: str = "auto") -> LoadedModel:
    """Load a model into an engine.

    Args:
        path: A model folder, a .pt file, or an artefact folder.
        wanted: ``auto``, or the one engine to use.

    Raises:
        ModelLoadError: The model is missing or damaged, or the wanted engine cannot be used.
    """
    if wanted not in ENGINES:
        raise ModelLoadError(path, f"no engine is called {wanted!r}", f"give one of {', '.join(ENGINES)}")
    if is_artefact(path):
        return _load_given_artefact(path, wanted)
    if wanted == "auto":
        return _load_fastest(path)
    if wanted in _TORCH_ENGINES or not path.exists():
        return _load_torch(path, "it was asked for", compiled=wanted == "torch_compiled")
    folder = artefact_folder(path, wanted)
    if not is_artefact(folder):
        what = f"no {wanted} artefact of this model"
        raise ModelLoadError(folder, what, f"write it with python -m inference.export {path} --engine {wanted}")
    return _load_artefact(folder, path, "it was asked for")


def _load_given_artefact(folder: Path, wanted: str) -> LoadedModel:
    engine = read_manifest(folder).engine
    if wanted not in ("auto", engine):
        what = f"this artefact is for the {engine} engine, not {wanted}"
        raise ModelLoadError(folder, what, f"give engine {engine} or auto, or the model folder itself")
    return _load_artefact(folder, None, "the artefact itself was given")


def _load_fastest(path: Path) -> LoadedModel:
    if _has_cuda() and weights_file(path).is_file():
        return _load_torch(path, "a CUDA device is faster than any processor")
    skipped: list[str] = []
    for name in ARTEFACT_ENGINES:
        folder = artefact_folder(path, name)
        if not is_artefact(folder):
            continue
        try:
            reason = "; ".join([f"{name} is the fastest artefact that works here", *skipped])
            return _load_artefact(folder, path, reason)
        except ModelLoadError as error:
            skipped.append(f"skipped {name} ({error})")
    if skipped and not weights_file(path).is_file():
        what = f"none of its artefacts works here: {'; '.join(skipped)}"
        raise ModelLoadError(path, what, "export the model for another engine")
    reason = "; ".join(skipped) or "no artefact beside the model, python -m inference.export writes a faster one"
    return _load_torch(path, reason)


def verified_manifest(folder: Path, model: Path | None) -> Manifest:
    """Read an artefact's manifest and hold its files, and the model it should be made from, to it.

    Raises:
        ModelLoadError: A file is missing or another, or the artefact was made from other weights or another tokenizer.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    if model is not None:
        _refuse_stale(folder, manifest, model)
    return manifest


def _load_artefact(folder: Path, model: Path | None, reason: str) -> LoadedModel:
    manifest = verified_manifest(folder, model)
    saved = read_saved_model(folder)
    tokenizer = saved.tokenizer()
    engine = _artefact_engine(folder, manifest, saved.config)
    tolerance = FLOAT_TOLERANCE if manifest.precision == "fp32" else manifest.probe_tolerance
    check_engine(folder, engine, tokenizer, saved.labels, tolerance)
    _check_probes(folder, manifest, tokenizer, engine)
    if manifest.precision == "int8" and not has_fast_int8():
        reason += "; this processor has no fast int8 instructions (VNNI), so it gains less than measured"
    revision = str(manifest.source.get("weights_sha256"))[:12]
    return LoadedModel(saved, tokenizer, engine, manifest.precision, revision, reason)


def _refuse_stale(folder: Path, manifest: Manifest, model: Path) -> None:
    weights = weights_file(model)
    if weights.is_file() and not is_from(manifest, weights):
        raise ModelLoadError(folder, f"was made from other weights than {weights.name}", _EXPORT)
    if model.is_dir():
        for name in DESCRIPTION_FILES:
            file = model / name
            if file.is_file() and sha256_of(file) != manifest.files.get(name, {}).get("sha256"):
                raise ModelLoadError(folder, f"was made when {name} was another", _EXPORT)


def _artefact_engine(folder: Path, manifest: Manifest, config: Mapping[str, Any]) -> Engine:
    try:
        return build_engine(manifest.engine, folder, config, manifest.precision)
    except ImportError as error:
        remedy = f"install it (pip install {error.name}) or serve the model with another engine"
        raise ModelLoadError(folder, f"the {manifest.engine} engine needs {error.name}", remedy) from error
    except Exception as error:  # every runtime has its own errors for what it cannot read
        raise ModelLoadError(folder, f"does not load ({first_line(error)})", _EXPORT) from error


def build_engine(name: str, folder: Path, config: Mapping[str, Any], precision: str) -> Engine:
    """Build the engine of an artefact folder.

    Raises:
        ImportError: Its runtime is not installed.
        Exception: Whatever the runtime raises for files that it cannot read.
    """
    threads = usable_cpus()
    if name == "native":
        from inference.engines.native import is_supported
        from inference.engines.native.engine import NativeEngine

        supported, why_not = is_supported()
        if not supported:
            raise OSError(why_not)
        return NativeEngine(folder, config, threads)
    if name == "openvino":
        from inference.engines.openvino_engine import OpenVinoEngine

        return OpenVinoEngine(folder, config, threads)
    if name == "onnx":
        from inference.engines.onnx_engine import OnnxEngine

        return OnnxEngine(folder, config, threads, precision)
    raise ValueError(f"no engine is called {name!r}")


def _check_probes(folder: Path, manifest: Manifest, tokenizer: TextTokenizer, engine: Engine) -> None:
    texts = [probe["text"] for probe in manifest.probes]
    expected = np.array([probe["probabilities"] for probe in manifest.probes])
    found = probabilities_of(engine, [encoded.ids for encoded in tokenizer.encode(texts)])
    difference = np.abs(found - expected).max() if found.shape == expected.shape else np.inf
    # NaN is no number below the tolerance either.
    if not difference <= manifest.probe_tolerance:
        what = f"answers {difference:.2f} beside the reference, more than {manifest.probe_tolerance:.2f}"
        raise ModelLoadError(folder, f"{what}: not to be trusted on this processor", _EXPORT)


def _load_torch(path: Path, reason: str, *, compiled: bool = False) -> LoadedModel:
    weights = weights_file(path)
    before = _version_of(weights)
    saved = read_saved_model(path)
    tokenizer = saved.tokenizer()
    place = saved.weights if isinstance(saved.weights, Path) else saved.path
    try:
        import torch  # takes seconds: not before it is needed

        from inference.engines.torch_engine import TorchEngine

        torch.set_num_threads(usable_cpus())
        engine = TorchEngine(saved.config, saved.weights, compiled=compiled)
    except ImportError as error:
        what = f"the torch engine needs {error.name or 'PyTorch and transformers'}, which is not installed"
        raise ModelLoadError(path, f"{what} ({reason})", "install it, or export the model where it is") from error
    except Exception as error:  # every library below has its own error for damaged bytes
        what = f"the weights do not load into the model of its configuration ({first_line(error)})"
        raise ModelLoadError(place, what, "copy the files again or export the model again") from error
    tolerance = FLOAT_TOLERANCE if engine.precision == "fp32" else HALF_TOLERANCE
    check_engine(saved.path, engine, tokenizer, saved.labels, tolerance)
    revision = sha256_of(weights)[:12]
    if _version_of(weights) != before:  # else the bytes that were hashed are not those that answer
        raise ModelLoadError(weights, "changed while it was read", "load it again when the copy is complete")
    return LoadedModel(saved, tokenizer, engine, engine.precision, revision, reason)


def _version_of(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _has_cuda() -> bool:
    if not _NVIDIA_DEVICE.exists() or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
