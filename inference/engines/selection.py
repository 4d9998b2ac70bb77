"""Picks the engine that runs a model fastest here, by measurement, and says why in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.calibration import Calibration
from common.errors import ModelLoadError, first_line
from common.familiarity import Familiarity
from common.files import sha256_of
from common.hardware import Hardware, has_fast_int8
from common.model_folder import (
    EXPORT_AGAIN,
    FAMILIARITY_FILE,
    MANIFEST_FILE,
    SMALL_FOLDER,
    Manifest,
    SavedModel,
    artefact_folder,
    is_artefact,
    read_manifest,
    read_saved_model,
    verified_manifest,
    weights_file,
)
from common.problem_types import REGRESSION
from common.text import TextTokenizer
from inference.engines import native
from inference.engines.base import Engine, answers_of
from inference.engines.self_test import (
    FLOAT_TOLERANCE,
    HALF_TOLERANCE,
    check_engine,
    measure_speed,
    recall_speeds,
    remember_speeds,
    speeds_key,
)
from inference.engines.windowed import config_with_attention, with_windows

if TYPE_CHECKING:
    from inference.engines.torch_engine import TorchEngine

_TORCH_ENGINES = ("torch", "torch_compiled")
_DEVICES = Path("/dev")
_ANY_DEVICE = Hardware()


# Each builder imports its runtime only when it is called: a runtime may be missing, and each takes
# up to seconds to import, which no server should spend on engines that it does not use.


def _native(folder: Path, config: Mapping[str, Any], precision: str, hardware: Hardware) -> Engine:
    if not native.is_supported()[0] and hardware.instruction_set == "auto":
        from inference.engines.native.numpy_engine import NumpyEngine

        return NumpyEngine(folder, config)
    from inference.engines.native.engine import NativeEngine

    return NativeEngine(folder, config, hardware.num_threads, hardware.instruction_set)


def _openvino(
    folder: Path, config: Mapping[str, Any], precision: str, hardware: Hardware
) -> Engine:
    from inference.engines.openvino_engine import OpenVinoEngine

    return OpenVinoEngine(folder, config, hardware.num_threads)


def _onnx(folder: Path, config: Mapping[str, Any], precision: str, hardware: Hardware) -> Engine:
    from inference.engines.onnx_engine import OnnxEngine

    return OnnxEngine(folder, config, hardware.num_threads, precision)


# The engines that run artefacts, in the order in which they are tried if nothing was measured.
_BUILDERS: dict[str, Callable[[Path, Mapping[str, Any], str, Hardware], Engine]] = {
    "native": _native,
    "openvino": _openvino,
    "onnx": _onnx,
}
ARTEFACT_ENGINES = tuple(_BUILDERS)
ENGINES = ("auto", *ARTEFACT_ENGINES, *_TORCH_ENGINES)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to answer."""

    saved: SavedModel  # its description, from the artefact if one was picked
    tokenizer: TextTokenizer
    engine: Engine
    precision: str  # of the arithmetic: int8, fp32, bf16 or fp16
    revision: str  # the first 12 hex digits of the SHA-256 of the weights that training wrote
    reason: str  # why this engine was picked, in one line
    # None for a compiled model, whose first passes are not typical.
    tokens_per_second: float | None = None
    calibration: Calibration | None = None  # of the artefact, if its export had rows for one


def load_model(path: Path, wanted: str = "auto", hardware: Hardware = _ANY_DEVICE) -> LoadedModel:
    """Load a model into an engine.

    Raises:
        ModelLoadError: The model is missing or damaged, or the wanted engine cannot be used.
    """
    if wanted not in ENGINES:
        what, remedy = f"no engine is called {wanted!r}", f"give one of {', '.join(ENGINES)}"
        raise ModelLoadError(path, what, remedy)
    if hardware.device == "cuda" and (wanted in ARTEFACT_ENGINES or is_artefact(path)):
        what = "artefacts run on processors, and DEVICE is cuda"
        raise ModelLoadError(path, what, "set DEVICE to auto or cpu")
    if is_artefact(path):
        loaded = _load_given_artefact(path, wanted, hardware)
    elif wanted == "auto":
        loaded = _load_fastest(path, hardware)
    else:
        loaded = _load(path, wanted, "it was asked for", hardware)
    if loaded.tokens_per_second is None and wanted != "torch_compiled":
        speed = measure_speed(loaded.engine, loaded.tokenizer, loaded.saved.max_length, seconds=0.0)
        loaded = replace(loaded, tokens_per_second=speed)
    return loaded


def is_native_without_comparison(path: Path, wanted: str, hardware: Hardware) -> bool:
    """Whether `load_model` tries the native engine first, whatever else is there.

    It is the only one that still works in a process that is forked after loading, with the weights
    in memory once.
    """
    if wanted not in ("auto", "native") or hardware.device == "cuda":
        return False
    if not native.is_supported()[0]:
        return False
    with contextlib.suppress(ModelLoadError):
        if is_artefact(path):
            # Of a cascade, both models.
            places = [one for one in (path, path / SMALL_FOLDER) if is_artefact(one)]
            return all(read_manifest(one).engine == "native" for one in places)
        return wanted == "native" or _is_known_fastest(_engines_of(path, hardware), hardware)
    return False


def _load_given_artefact(folder: Path, wanted: str, hardware: Hardware) -> LoadedModel:
    engine = read_manifest(folder).engine
    if wanted not in ("auto", engine):
        what = f"this artefact is for the {engine} engine, not {wanted}"
        remedy = f"give engine {engine} or auto, or the model folder itself"
        raise ModelLoadError(folder, what, remedy)
    return _load_artefact(folder, None, "the artefact itself was given", hardware)


def _load(path: Path, name: str, reason: str, hardware: Hardware) -> LoadedModel:
    """Load the model of a folder (or a .pt file) into the engine of this name."""
    # A missing model is reported by the reader of its weights, whichever engine was asked for.
    if name in _TORCH_ENGINES or not path.exists():
        return _load_weights(path, reason, hardware, compiled=name == "torch_compiled")
    folder = artefact_folder(path, name)
    if not is_artefact(folder):
        what = f"no {name} artefact of this model"
        remedy = f"write it with python -m inference.export {path} --engine {name}"
        raise ModelLoadError(folder, what, remedy)
    return _load_artefact(folder, path, reason, hardware)


def _load_fastest(path: Path, hardware: Hardware) -> LoadedModel:
    if hardware.device == "cuda":
        return _load_weights(path, "DEVICE is cuda", hardware)
    engines = _engines_of(path, hardware)
    if not engines:
        reason = "the model has no artefact; python -m inference.export writes a faster one"
        return _load_weights(path, reason, hardware)
    # An engine that does not load costs speed, not the service: the next one is tried, and the
    # reason names those that were skipped.
    skipped: list[str] = []
    for name, reason, speed in _fastest_first(path, engines, hardware, skipped):
        try:
            loaded = _load(path, name, "; ".join([reason, *skipped]), hardware)
        except ModelLoadError as error:
            skipped.append(f"skipped {name} ({error})")
        else:
            return replace(loaded, tokens_per_second=speed)
    # Without a working artefact, PyTorch runs the model itself, if its weights are here.
    if not weights_file(path).is_file():
        what = f"none of its artefacts works here: {'; '.join(skipped)}"
        raise ModelLoadError(path, what, "export the model for another engine")
    return _load_weights(path, "; ".join(skipped), hardware)


def _fastest_first(
    path: Path, engines: list[str], hardware: Hardware, skipped: list[str]
) -> Iterator[tuple[str, str, float | None]]:
    """Give the engines, the fastest first: name, why it is fastest, and its tokens per second.

    To ask for another one means that those before it do not load. So nothing is measured while the
    engine that needs no measurement works. ``skipped`` gets those that fail when they are measured.
    """
    if _is_known_fastest(engines, hardware):
        yield "native", "native is the fastest on this kind of processor", None
        engines = [name for name in engines if name != "native"]
    # Measuring loads every candidate once, so the speeds are remembered for the next start.
    speeds: dict[str, float] = {}
    when = "at an earlier start"
    if len(engines) > 1:
        key = speeds_key(path, engines, hardware)
        speeds = recall_speeds(key)
        if not speeds:
            speeds, when = _measure_all(path, engines, hardware, skipped), "just now"
            engines = list(speeds)
            if len(speeds) > 1:
                remember_speeds(key, speeds)
    for name in sorted(engines, key=lambda name: -speeds.get(name, 0.0)):
        reason = f"{name} is the only artefact that works here"
        if len(speeds) > 1:
            reason = _comparison(name, speeds, when)
        yield name, reason, speeds.get(name)
        # It does not load, so the next one is not compared with it.
        speeds.pop(name, None)


def _engines_of(path: Path, hardware: Hardware) -> list[str]:
    """The engines that may be the fastest for a model with artefacts; none for one without."""
    engines = [name for name in ARTEFACT_ENGINES if is_artefact(artefact_folder(path, name))]
    # PyTorch may be faster than int8 artefacts, but never than our kernels, nor on a processor that
    # multiplies int8 fast. To import it there would cost every start seconds and hundreds of
    # megabytes.
    has_torch = weights_file(path).is_file() and importlib.util.find_spec("torch") is not None
    int8_is_fast = has_fast_int8() or ("native" in engines and native.is_supported()[0])
    if engines and has_torch and (not int8_is_fast or _has_cuda(hardware)):
        engines.append("torch")
    return engines


def _is_known_fastest(engines: Sequence[str], hardware: Hardware) -> bool:
    # On x86-64 our kernels have won every comparison by far. A short measurement, on a machine that
    # others use too, could only choose wrongly, and would make the start slower.
    is_known = native.is_known_fastest() and hardware.instruction_set == "auto"
    return is_known and engines[:1] == ["native"] and "torch" not in engines


def _measure_all(
    path: Path, engines: list[str], hardware: Hardware, skipped: list[str]
) -> dict[str, float]:
    speeds = {}
    for name in engines:
        try:
            loaded = _load(path, name, "it is measured", hardware)
            speeds[name] = measure_speed(loaded.engine, loaded.tokenizer, loaded.saved.max_length)
        except ModelLoadError as error:
            skipped.append(f"skipped {name} ({error})")
        except Exception as error:  # every runtime has its own errors
            skipped.append(f"skipped {name} (fails on its first passes: {first_line(error)})")
        loaded = None  # free this model before the next one is loaded
    return speeds


def _comparison(name: str, speeds: Mapping[str, float], when: str) -> str:
    others = ", ".join(f"{other} {speed:,.0f}" for other, speed in speeds.items() if other != name)
    return f"{name} makes {speeds[name]:,.0f} tokens per second here, {others} (measured {when})"


def _load_artefact(
    folder: Path, model: Path | None, reason: str, hardware: Hardware
) -> LoadedModel:
    manifest = verified_manifest(folder, model)
    saved = read_saved_model(folder)
    tokenizer = saved.tokenizer()
    engine = _artefact_engine(folder, manifest, saved.config, hardware)
    # Three checks before anything is answered: the files are those of the manifest, texts do not
    # change each other's answers, and the answers are the reference's.
    tolerance = FLOAT_TOLERANCE if manifest.precision == "fp32" else manifest.probe_tolerance
    spread = _spread(folder, manifest) if saved.problem_type is REGRESSION else 1.0
    check_engine(folder, engine, tokenizer, saved, tolerance, spread)
    check_probes(folder, manifest, saved, tokenizer, engine)
    if manifest.engine == "native":
        if engine.instructions == "numpy":
            reason += f"; NumPy computes it, slowly: {native.is_supported()[1]}"
        else:
            reason += f"; its kernels use {engine.instructions}"
    elif manifest.precision == "int8" and not has_fast_int8():
        reason += "; this processor has no fast int8 instructions (VNNI), "
        reason += "so int8 gains less than measured"
    return LoadedModel(
        saved,
        tokenizer,
        engine,
        precision=manifest.precision,
        revision=str(manifest.source.get("weights_sha256"))[:12],
        reason=reason,
        calibration=read_calibration(folder, manifest, saved),
    )


def read_calibration(folder: Path, manifest: Manifest, saved: SavedModel) -> Calibration | None:
    """The calibration of an artefact; None for one that was exported without."""
    if not (record := manifest.calibration):
        return None
    try:
        familiarity = None
        if described := record.get("familiarity"):
            table = (folder / FAMILIARITY_FILE).read_bytes()
            familiarity = Familiarity(described, table, saved.problem_type)
        return Calibration(record, saved.labels, familiarity)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        what = f"its calibration is damaged ({first_line(error)})"
        raise ModelLoadError(folder / MANIFEST_FILE, what, EXPORT_AGAIN) from error


def _artefact_engine(
    folder: Path, manifest: Manifest, config: Mapping[str, Any], hardware: Hardware
) -> Engine:
    try:
        return build_engine(manifest.engine, folder, config, manifest.precision, hardware)
    except ImportError as error:
        what = f"the {manifest.engine} engine needs {error.name}"
        remedy = f"install it (pip install {error.name}) or serve the model with another engine"
        raise ModelLoadError(folder, what, remedy) from error
    except Exception as error:  # every runtime has its own errors for files it cannot read
        what = f"does not load ({first_line(error)})"
        raise ModelLoadError(folder, what, EXPORT_AGAIN) from error


def build_engine(
    name: str,
    folder: Path,
    config: Mapping[str, Any],
    precision: str,
    hardware: Hardware = _ANY_DEVICE,
) -> Engine:
    if name not in _BUILDERS:
        raise ValueError(f"no engine is called {name!r}")
    engine = _BUILDERS[name](folder, config_with_attention(config), precision, hardware)
    return with_windows(engine, config)


def _spread(folder: Path, manifest: Manifest) -> float:
    """The spread of a regression model's answers, as its export measured it."""
    spread = manifest.accuracy.get("spread")
    if not isinstance(spread, int | float) or not 0 < spread < np.inf:
        what = f"accuracy.spread {spread!r}: must be a number greater than 0, "
        what += "for a regression model"
        raise ModelLoadError(folder / MANIFEST_FILE, what, EXPORT_AGAIN)
    return spread


def check_probes(
    folder: Path, manifest: Manifest, saved: SavedModel, tokenizer: TextTokenizer, engine: Engine
) -> None:
    """Refuse an artefact that does not repeat the answers that its export got from the reference.

    Its files are intact (their hashes were compared), but another processor may compute otherwise.
    """
    is_number = saved.problem_type is REGRESSION
    texts, expected = [], []
    for probe in manifest.probes:
        text = probe["text"]
        texts.append(text if isinstance(text, str) else tuple(text))
        expected.append([probe["value"]] if is_number else probe["probabilities"])
    token_ids = [encoded.ids for encoded in tokenizer.encode(texts)]
    found = answers_of(engine, saved.problem_type, token_ids)  # (probes, labels)
    difference = np.inf
    if found.shape == np.shape(expected):
        difference = np.abs(found - expected).max()
    unit = ""
    if is_number:
        difference, unit = difference / _spread(folder, manifest), " standard deviations"
    if not difference <= manifest.probe_tolerance:  # written so that NaN fails too
        what = f"its answers differ by {difference:.2f}{unit} from the reference"
        what += f", more than {manifest.probe_tolerance:.2f}"
        raise ModelLoadError(folder, f"{what}: not to be trusted on this processor", EXPORT_AGAIN)


def _load_weights(
    path: Path, reason: str, hardware: Hardware, *, compiled: bool = False
) -> LoadedModel:
    """Load the weights that training wrote into PyTorch."""
    weights = weights_file(path)
    # To notice if the file is replaced while it is read: a rename puts another inode there.
    before = _version_of(weights)
    saved = read_saved_model(path)
    tokenizer = saved.tokenizer()
    try:
        engine = _torch_engine(saved, hardware, compiled)
    except ImportError as error:
        what = f"the torch engine needs {error.name or 'PyTorch and transformers'}, "
        what += f"which is not installed ({reason})"
        remedy = "install it, or export the model on a machine that has it"
        raise ModelLoadError(path, what, remedy) from error
    tolerance = FLOAT_TOLERANCE if engine.precision == "fp32" else HALF_TOLERANCE
    answering = with_windows(engine, saved.config)
    check_engine(saved.path, answering, tokenizer, saved, tolerance)
    revision = sha256_of(weights)[:12]
    # The revision names what was loaded, so the file may not have been replaced in between.
    if _version_of(weights) != before:
        what, remedy = "changed while it was read", "load it again when the copy is complete"
        raise ModelLoadError(weights, what, remedy)
    if hardware.device == "auto" and engine.device.type == "cpu":
        reason += f"; it runs on the processor, since {_why_no_cuda()}"
    return LoadedModel(saved, tokenizer, answering, engine.precision, revision, reason)


def _torch_engine(saved: SavedModel, hardware: Hardware, compiled: bool) -> TorchEngine:
    try:
        import torch  # takes seconds: not before it is needed

        from inference.engines.torch_engine import TorchEngine

        if hardware.device == "cuda" and not torch.cuda.is_available():
            what = f"DEVICE is cuda, and {_why_no_cuda()}"
            raise ModelLoadError(saved.path, what, "set DEVICE to auto or cpu, or fix that")
        torch.set_num_threads(hardware.num_threads)
        return TorchEngine(saved.config, saved.weights, compiled=compiled, device=hardware.device)
    except (ImportError, ModelLoadError):
        raise
    except Exception as error:  # every library has its own errors for damaged files
        source = saved.weights if isinstance(saved.weights, Path) else saved.path
        what = "the weights do not load into the model that config.json describes "
        what += f"({first_line(error)})"
        remedy = "copy the files again, or write them again with what wrote them"
        raise ModelLoadError(source, what, remedy) from error


def _version_of(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _has_cuda(hardware: Hardware) -> bool:
    if hardware.device == "cpu" or not _has_gpu_files():
        return False  # without importing PyTorch, which takes seconds
    import torch

    return torch.cuda.is_available()


def _has_gpu_files(folder: Path = _DEVICES) -> bool:
    # A container may be given only the sixth GPU, so any number will do; dxg is WSL's.
    return any(re.fullmatch(r"nvidia\d+|dxg", file.name) for file in folder.iterdir())


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "this PyTorch is built for processors only"
    return "PyTorch cannot use the GPU (driver?)" if _has_gpu_files() else "there is no GPU"
