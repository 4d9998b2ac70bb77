from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelLoadError
from common.model_folder import (
    MANIFEST_FILE,
    Manifest,
    describe_files,
    describe_source,
    is_from,
    read_manifest,
    verify_files,
    write_manifest,
)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def artefact(tmp_path: Path, weights: Path) -> Path:
    folder = tmp_path / "onnx"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"graph")
    manifest = Manifest(
        engine="onnx",
        precision="int8",
        created="2026-01-01T00:00:00+00:00",
        source=describe_source("model", weights),
        files=describe_files(folder),
        versions={},
        options={},
        accuracy={},
        size={},
        speed={},
        probes=[],
        probe_tolerance=0.1,
    )
    write_manifest(folder, manifest)
    return folder


def test_a_manifest_is_read_as_it_was_written(artefact: Path) -> None:
    manifest = read_manifest(artefact)
    assert json.loads((artefact / MANIFEST_FILE).read_text())["format"] == 1
    assert manifest.engine == "onnx"
    assert manifest.files["model.onnx"]["bytes"] == 5
    verify_files(artefact, manifest)


def _edit(artefact: Path, **changes: Any) -> None:
    path = artefact / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b"grapf"), "model.onnx: is not the file"),
        (lambda folder: (folder / "model.onnx").unlink(), "model.onnx: is missing"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("{"), "cannot be read"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[]"), "format None"),
        (lambda folder: _edit(folder, format=2), "format 2, this version reads format 1"),
        (lambda folder: _edit(folder, probes={}), "probes must be a list"),
        *(
            (
                lambda folder, digest=digest: _edit(folder, source={"weights_sha256": digest}),
                "must be 64 hex digits, got",
            )
            for digest in (None, 7, "", "ab" * 31, "AB" * 32, "ab" * 32 + "\n", "ab" * 32 + "\nUSER 0\nRUN true")
        ),
        (lambda folder: _edit(folder, files={"../model.safetensors": {}}), "not a plain file name"),
    ],
)
def test_a_damaged_artefact_is_refused_in_one_line(
    artefact: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(artefact)
    with pytest.raises(ModelLoadError, match=r"^[^\n]*$") as refusal:
        verify_files(artefact, read_manifest(artefact))
    assert message in str(refusal.value)
    assert "python -m inference.export" in str(refusal.value)


def test_changed_weights_are_distinguished_from_a_copy_of_the_same(artefact: Path, weights: Path) -> None:
    manifest = read_manifest(artefact)
    assert is_from(manifest, weights)
    os.utime(weights, (0, 0))
    assert is_from(manifest, weights)
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, (0, 0))
    assert not is_from(manifest, weights)
    weights.write_bytes(b"more weights")
    assert not is_from(manifest, weights)
