from __future__ import annotations

import json
import os
import shutil
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
    file_inside,
    is_from,
    read_manifest,
    read_saved_model,
    verify_files,
    write_manifest,
)
from tests.processes import REPOSITORY

# More levels than Python's reader takes, and more than the libraries that write JSON.
NESTED = ['{"a":' * depth + "1" + "}" * depth for depth in (100_000, 300)] + ['{"a":' + "[" * 100_000]


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
        (lambda folder: (folder / MANIFEST_FILE).write_text("{"), "not valid JSON"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[]"), "is not a JSON object"),
        (lambda folder: _edit(folder, format=None), "format None"),
        *((lambda folder, deep=deep: (folder / MANIFEST_FILE).write_text(deep), "levels deep") for deep in NESTED),
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder as far as it is read without its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    starter = REPOSITORY / "checkpoints" / "starter"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(starter / name, folder / name)
    (folder / "model.safetensors").touch()
    _change(folder / "config.json", id2label={"0": "World", "1": "Sports"})
    (folder / "metrics.json").write_text(json.dumps({"dataset": "news"}))
    return folder


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", ["config.json", "metrics.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("deep", NESTED, ids=["deeper than Python reads", "deeper than Python writes", "not closed"])
def test_json_nested_too_deeply_is_refused_in_one_line(model: Path, name: str, deep: str) -> None:
    (model / name).write_text(deep)
    with pytest.raises(ModelLoadError, match=rf"^[^\n]*{name}[^\n]*$"):
        read_saved_model(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": "512"},
        {"max_position_embeddings": [512]},
        {"vocab_size": "8800"},
        {"vocab_size": None},
        {"vocab_size": 8800.0},
        {"architectures": 5},
        {"id2label": {"a": "World", "b": "Sports"}},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_in_one_line(model: Path, changes: dict[str, Any]) -> None:
    _change(model / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=r"^[^\n]*config.json[^\n]*$"):
        read_saved_model(model).tokenizer()


def _move_and_link(file: Path, target: Path, link: str | None = None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    file.rename(target)
    file.symlink_to(link or target)


@pytest.mark.parametrize("name", ["metrics.json", "config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("link", ["../secret", None], ids=["relative", "absolute"])
def test_a_file_that_leads_out_of_the_model_is_refused(model: Path, name: str, link: str | None) -> None:
    _move_and_link(model / name, model.parent / "secret", link)
    with pytest.raises(ModelLoadError, match=rf"{name}: is a link to .*secret, outside of the model"):
        read_saved_model(model)


@pytest.mark.parametrize("name", ["native", "onnx"])
def test_a_folder_named_like_an_engine_may_not_lead_out_either(model: Path, name: str) -> None:
    folder = model.rename(model.with_name(name))
    _move_and_link(folder / "metrics.json", folder.parent / "secret")
    with pytest.raises(ModelLoadError, match="outside of the model"):
        read_saved_model(folder)


def test_a_chain_of_links_is_followed_to_its_end(model: Path) -> None:
    (model / "inside").symlink_to(model.parent / "secret")
    (model.parent / "secret").write_text("{}")
    (model / "metrics.json").unlink()
    (model / "metrics.json").symlink_to("inside")
    with pytest.raises(ModelLoadError, match="outside of the model"):
        read_saved_model(model)


def test_any_file_of_an_artefact_that_leads_out_is_refused(artefact: Path, weights: Path) -> None:
    (artefact / "metrics.json").symlink_to(weights)
    with pytest.raises(ModelLoadError, match=r"metrics\.json: is a link to .*outside of the model"):
        verify_files(artefact, read_manifest(artefact))
    (artefact / "metrics.json").unlink()
    _move_and_link(artefact / MANIFEST_FILE, weights.parent / "manifest")
    with pytest.raises(ModelLoadError, match="outside of the model"):
        read_manifest(artefact)


def test_the_hub_s_cache_and_mounted_volumes_may_have_links(model: Path) -> None:
    expected = read_saved_model(model).config
    repository = model.parent / "models--org--news"
    (repository / "snapshots").mkdir(parents=True)
    snapshot = model.rename(repository / "snapshots" / "0a1b")
    for number, file in enumerate(sorted(snapshot.iterdir())):
        _move_and_link(file, repository / "blobs" / str(number), f"../../blobs/{number}")
    assert read_saved_model(snapshot).config == expected
    assert file_inside(snapshot, "config.json").is_file()

    # As Kubernetes mounts a volume: each file leads into a folder that another link names.
    volume = repository.parent / "volume"
    shutil.copytree(snapshot, volume / "..2026_11_26")
    (volume / "..data").symlink_to("..2026_11_26")
    for file in (volume / "..data").iterdir():
        (volume / file.name).symlink_to(f"..data/{file.name}")
    assert read_saved_model(volume).config == expected

    # The whole model may be a link, as a name for the newest of several.
    (repository.parent / "newest").symlink_to(volume)
    assert read_saved_model(repository.parent / "newest").config == expected
