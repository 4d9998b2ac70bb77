"""How fast an engine runs here: a few passes, and a file that remembers them for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import numpy as np

from common.hardware import cpu_flags, cpu_name
from common.manifest import FILE_NAME as MANIFEST
from common.manifest import sha256_of
from common.model_folder import artefact_folder, weights_file
from common.text import TextTokenizer
from inference.engines.base import Engine, TokenBatch
from inference.engines.native.library import library_path

_TEXT = "Shares rose on Wall Street after the makers of chips said that demand had doubled within a year."
# A batch as news gives it: near lengths, some padding.
_LENGTHS = (40, 44, 48, 52)
_PACKAGES = {"openvino": "openvino", "onnx": "onnxruntime", "torch": "torch"}


def measure_speed(engine: Engine, tokenizer: TextTokenizer, max_length: int, seconds: float = 0.15) -> float:
    """Return tokens per second over the best of a few passes.

    Args:
        engine: What runs the passes; the first is not counted, since many runtimes prepare themselves in it.
        tokenizer: Of the model.
        max_length: Tokens that the model reads.
        seconds: No pass begins after these, but one is always measured.
    """
    ids = tokenizer.encode([_TEXT])[0].ids
    batch = TokenBatch.of([np.resize(ids, min(length, max_length)) for length in _LENGTHS])
    engine.logits(batch, engine.num_slots)
    took = []
    until = time.perf_counter() + seconds
    while not took or time.perf_counter() < until:
        started = time.perf_counter()
        engine.logits(batch, engine.num_slots)
        took.append(time.perf_counter() - started)
    return len(batch.ids) / max(min(took), 1e-9)


def speeds_key(path: Path, engines: list[str], threads: int) -> str:
    """Return what measured speeds hold for: this processor, these threads, runtimes and artefacts."""
    facts = [
        cpu_name(),
        sorted(cpu_flags()),
        threads,
        [(name, _version(name), _identity(path, name)) for name in engines],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def recall_speeds(key: str) -> dict[str, float]:
    """Return tokens per second by engine as an earlier start measured them, empty if none did."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: there is no home directory
        content = json.loads(_file(key).read_text(encoding="utf-8"))
        if isinstance(content, dict) and all(isinstance(speed, float) for speed in content.values()):
            return content
    return {}


def remember_speeds(key: str, speeds: Mapping[str, float]) -> None:
    """Write what `recall_speeds` reads; a folder that cannot be written to only means to measure again."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(speeds, file)
        Path(file.name).replace(path)


def _file(key: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "distrinews" / "engine_speeds" / f"{key}.json"


def _version(engine: str) -> str | None:
    if engine == "native":
        library = library_path()
        return sha256_of(library) if library else None
    try:
        return metadata.version(_PACKAGES[engine])
    except metadata.PackageNotFoundError:
        return None


def _identity(path: Path, engine: str) -> str | list[int]:
    if engine != "torch":
        return sha256_of(artefact_folder(path, engine) / MANIFEST)  # which has the hashes of all other files
    status = weights_file(path).stat()
    return [status.st_size, status.st_mtime_ns]
