"""manifest.json: what an artefact is made of, what it was made from, and what was measured when it was made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common.errors import ModelLoadError

FORMAT = 1
FILE_NAME = "manifest.json"
# The precisions that each engine's artefact may have.
PRECISIONS = {"native": ("int8",), "openvino": ("int8",), "onnx": ("int8", "fp32")}
REMEDY = "write it again with python -m inference.export"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of ``manifest.json`` but for its format number.

    Attributes:
        engine: The engine that runs the artefact.
        precision: ``int8`` or ``fp32``.
        created: When it was written, ISO 8601 in UTC.
        source: ``name`` and ``weights_sha256`` of the model it was made from, and ``bytes`` and ``modified_ns`` by
            which that file is recognised without hashing it.
        files: ``sha256`` and ``bytes`` of every other file of the folder, by name.
        versions: Of the packages that made it.
        options: How it was made.
        accuracy: Of the reference and of the artefact on the same rows, and their disagreement.
        size: ``before_bytes`` and ``after_bytes`` of the weights.
        speed: Texts a second of both, and where they were measured.
        probes: A few texts with the reference's ``probabilities``.
        probe_tolerance: How far a probability may lie from the reference's when the artefact is loaded.
    """

    engine: str
    precision: str
    created: str
    source: dict[str, Any]
    files: dict[str, dict[str, Any]]
    versions: dict[str, str]
    options: dict[str, Any]
    accuracy: dict[str, Any]
    size: dict[str, int]
    speed: dict[str, Any]
    probes: list[dict[str, Any]]
    probe_tolerance: float


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into an artefact folder."""
    content = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2, ensure_ascii=False)
    (folder / FILE_NAME).write_text(content + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read an artefact's manifest.

    Raises:
        ModelLoadError: It is missing, damaged, or of another format.
    """
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(path, f"cannot be read ({error})", REMEDY) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ModelLoadError(path, f"format {found!r}, this version reads format {FORMAT}", REMEDY)
    kinds = {"str": str, "float": float}
    values: dict[str, Any] = {}
    for field in fields(Manifest):
        kind = kinds.get(str(field.type), list if str(field.type).startswith("list") else dict)
        values[field.name] = content.get(field.name)
        if not isinstance(values[field.name], kind):
            raise ModelLoadError(path, f"{field.name} must be a {kind.__name__}", REMEDY)
    return Manifest(**values)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what `Manifest.files` says of the files in a folder."""
    return {
        path.name: {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.name != FILE_NAME
    }


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare an artefact's files with its manifest.

    Raises:
        ModelLoadError: A file is missing or is not the one that was written.
    """
    for name, wanted in manifest.files.items():
        path = folder / name
        if Path(name).name != name:
            raise ModelLoadError(folder / FILE_NAME, f"{name!r} is not a plain file name", REMEDY)
        if not path.is_file():
            raise ModelLoadError(path, "is missing", REMEDY)
        if sha256_of(path) != wanted.get("sha256"):
            raise ModelLoadError(path, "is not the file that was exported, its SHA-256 differs", REMEDY)


def describe_source(name: str, weights: Path) -> dict[str, Any]:
    """Return what `Manifest.source` says of a model's weights file."""
    status = weights.stat()
    return {
        "name": name,
        "weights_sha256": sha256_of(weights),
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
    }


def is_from(manifest: Manifest, weights: Path) -> bool:
    """Whether an artefact was made from the weights that now lie at this path."""
    status = weights.stat()
    if status.st_size != manifest.source.get("bytes"):
        return False
    # An untouched file is not hashed again: hundreds of MB would cost a start up to a second.
    untouched = status.st_mtime_ns == manifest.source.get("modified_ns")
    return untouched or sha256_of(weights) == manifest.source.get("weights_sha256")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
