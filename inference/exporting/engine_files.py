"""Writes what an engine reads, one function an engine behind one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.engines import native
from inference.engines.native.architecture import EncoderShape

if TYPE_CHECKING:
    from torch import Tensor

_PACKAGES = {
    "native": ("torch", "transformers", "numpy"),
    "openvino": ("torch", "transformers", "openvino", "nncf"),
    "onnx": ("torch", "transformers", "onnx", "onnxruntime"),
}

Config = Mapping[str, Any]
Weights = Mapping[str, "Tensor"]


def default_engine(config: Config) -> str:
    """Return the fastest engine for this model on this processor that needs no extra package to write."""
    try:
        EncoderShape.of(config)
    except ValueError:
        return "onnx"
    return "native" if native.is_supported()[0] else "onnx"


def package_versions(engine: str) -> dict[str, str]:
    """Return the versions of the packages that write an engine's files."""
    return {name: version(name) for name in _PACKAGES[engine]}


def write_engine_files(
    engine: str,
    precision: str,
    config: Config,
    weights: Weights,
    calibration: Sequence[Sequence[int]],
    folder: Path,
) -> dict[str, Any]:
    """Write a model for an engine.

    Args:
        engine: A key of `common.manifest.PRECISIONS`.
        precision: One of the engine's.
        config: The contents of a transformers ``config.json``.
        weights: The state dict in float32, names as transformers gives them.
        calibration: Token ids of texts whose activations an engine may look at.
        folder: An existing folder.

    Returns:
        How it was done, for the manifest.

    Raises:
        ImportError: A package that writes this engine's files is not installed.
        ValueError: The engine does not run models of this architecture.
    """
    writers: dict[str, Callable[[], dict[str, Any]]] = {
        "native": lambda: _write_native(config, weights, folder),
        "onnx": lambda: _write_onnx(config, weights, folder, precision),
        "openvino": lambda: _write_openvino(config, weights, calibration, folder),
    }
    return writers[engine]()


def _write_native(config: Config, weights: Weights, folder: Path) -> dict[str, Any]:
    from inference.engines.native.quantize import write_native

    write_native(config, {name: tensor.numpy() for name, tensor in weights.items()}, folder)
    return {"weights": "int8 per channel", "activations": "int8 per token", "embeddings": "float16"}


def _write_onnx(config: Config, weights: Weights, folder: Path, precision: str) -> dict[str, Any]:
    from inference.exporting.onnx_writer import write_onnx

    return write_onnx(config, weights, folder, precision)


def _write_openvino(
    config: Config, weights: Weights, calibration: Sequence[Sequence[int]], folder: Path
) -> dict[str, Any]:
    from inference.exporting.openvino_writer import write_openvino

    return write_openvino(config, weights, calibration, folder)
