from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from common.files import sha256_of
from common.model_folder import read_manifest, write_manifest
from deployment.image_context import ROOT, DeploymentError, build_arguments, image_files, torch_image_files
from deployment.space_files import dockerfile, space_files
from inference.engines.model_loader import ModelLoader
from tests.deployment.card_rules import front_matter
from tests.deployment.small_model import write_cascade, write_small_model
from tests.inference.cascades import make_cascade
from training.publishing.published_files import model_files


def test_every_source_file_is_in_the_context(exported_folder: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "inference", "training"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("needs the repository's git")
    files = {name for name in tracked.stdout.split() if not name.endswith(".md")}
    assert {name for name in files if name.startswith("inference/")} <= image_files(exported_folder).keys()
    assert files <= torch_image_files().keys()


def test_the_served_context_has_the_exported_model_without_its_weights(exported_folder: Path) -> None:
    files = image_files(exported_folder)
    assert {"model/config.json", "model/onnx/manifest.json", "model/onnx/model.onnx"} <= files.keys()
    assert "model/model.safetensors" not in files
    assert all(source.is_file() for source in files.values())


def test_the_served_context_has_what_a_calibration_needs(tmp_path: Path) -> None:
    news = ROOT / "checkpoints" / "news"
    shutil.copytree(news, tmp_path / "native")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(news / name, tmp_path)
    files = image_files(tmp_path)
    assert files["model/native/familiarity.bin"].read_bytes() == (news / "familiarity.bin").read_bytes()
    assert json.loads(files["model/native/manifest.json"].read_text())["calibration"]


def test_the_served_context_has_no_trainer_and_no_tests(exported_folder: Path) -> None:
    assert not [name for name in image_files(exported_folder) if name.startswith(("training", "tests"))]


def test_the_label_names_the_weights_that_training_wrote(exported_folder: Path) -> None:
    manifest = json.loads((exported_folder / "onnx" / "manifest.json").read_text())
    assert build_arguments(exported_folder)["MODEL_SHA256"] == manifest["source"]["weights_sha256"]


def test_a_damaged_artefact_is_refused(exported_copy: Path) -> None:
    (exported_copy / "onnx" / "model.onnx").write_bytes(b"")
    with pytest.raises(DeploymentError, match=r"model\.onnx: is not the file that was exported"):
        image_files(exported_copy)


@pytest.mark.parametrize("take", [image_files, space_files, model_files])
def test_an_artefact_alone_is_refused(take: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"artefact.*; give the model folder") as refusal:
        take(write_small_model(tmp_path / "model") / "onnx")
    assert refusal.value.code == "model-folder-needed"


@pytest.fixture
def cascade(tmp_path: Path) -> Path:
    return write_cascade(write_small_model(tmp_path / "model"), tmp_path / "cascade")


def test_a_cascade_is_copied_with_both_of_its_models_and_nothing_else(cascade: Path) -> None:
    for name in ("notes.txt", "seen_texts.bin", "small/seen_texts.bin", "native"):
        (cascade / name).touch()
    own = {"config.json", "manifest.json", "metrics.json", "model.onnx", "tokenizer.json", "tokenizer_config.json"}
    in_model = {name for name in image_files(cascade) if name.startswith("model/")}
    assert in_model == {f"model/{folder}{name}" for folder in ("", "small/") for name in own}


def _set_record(cascade: Path, **changes: object) -> None:
    manifest = read_manifest(cascade)
    write_manifest(cascade, replace(manifest, cascade=manifest.cascade | changes))


@pytest.mark.parametrize("take", [image_files, space_files, model_files])
@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b""), r"model\.onnx: is not the file that was exported"),
        (lambda folder: (folder / "small/model.onnx").write_bytes(b""), r"small/model\.onnx: is not the file that was"),
        (lambda folder: (folder / "small/manifest.json").open("a").write(" "), "small: is missing, or is not the sm"),
        (lambda folder: shutil.rmtree(folder / "small"), "small: is missing, or is not the small model that this"),
        (lambda folder: _set_record(folder, threshold=None), r"manifest\.json: its cascade is damaged; write it again"),
        (lambda folder: _set_record(folder, small=None), r"manifest\.json: its cascade is damaged; write it again"),
    ],
)
def test_a_cascade_of_which_one_part_has_changed_is_refused(
    take: Callable[[Path], object], cascade: Path, damage: Callable[[Path], object], line: str
) -> None:
    damage(cascade)
    with pytest.raises(UserError, match=line):
        take(cascade)


def test_a_cascade_for_an_engine_that_no_image_has_is_refused(cascade: Path) -> None:
    small = cascade / "small"
    write_manifest(small, replace(read_manifest(small), engine="openvino"))
    _set_record(cascade, small={"manifest_sha256": sha256_of(small / "manifest.json")})
    with pytest.raises(DeploymentError, match="is a cascade for openvino, which no image has; write it again from"):
        image_files(cascade)


def test_the_label_of_a_cascade_is_the_revision_that_its_server_shows(exported_folder: Path, tmp_path: Path) -> None:
    news = ROOT / "checkpoints" / "news"
    found = set()
    for threshold in (0.8, 1):  # JSON knows no difference between 1 and 1.0
        cascade = make_cascade(exported_folder / "onnx", news, tmp_path / str(threshold), threshold)
        found.add(revision := build_arguments(cascade)["MODEL_SHA256"][:12])
        assert ModelLoader(cascade).info["revision"] == revision
    assert len(found) == 2


def test_an_artefact_of_other_weights_is_refused(exported_copy: Path) -> None:
    with (exported_copy / "model.safetensors").open("ab") as file:
        file.write(b"trained on")
    with pytest.raises(DeploymentError, match="was made from other weights"):
        image_files(exported_copy)


def test_artefacts_of_different_weights_are_refused(exported_copy: Path) -> None:
    (exported_copy / "model.safetensors").unlink()
    shutil.copytree(exported_copy / "onnx", exported_copy / "native")
    path = exported_copy / "native" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["weights_sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(DeploymentError, match="native and onnx were made from different weights"):
        image_files(exported_copy)


@pytest.mark.parametrize("make", [build_arguments, image_files, space_files])
def test_a_manifest_adds_no_line_to_what_is_built_from_it(exported_copy: Path, make: Callable[[Path], object]) -> None:
    path = exported_copy / "onnx" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["weights_sha256"] += "\nUSER 0\nRUN true"
    path.write_text(json.dumps(manifest))

    with pytest.raises(UserError, match=r"source\.weights_sha256 must be 64 hex digits, got '\w+\\nUSER 0"):
        make(exported_copy)


@pytest.mark.parametrize("value", ["a\nUSER 0", "a\rUSER 0", "a b=c", "$HOME", r"\g<0>", 'a"', "a\u2028b"])
def test_a_dockerfile_takes_plain_words_alone(value: str) -> None:
    with pytest.raises(UserError, match="is not one plain word"):
        dockerfile({"VERSION": value})


@pytest.mark.parametrize("name", ["alice/news\n---\nsdk: static", "alice/news: x", "<b>/x", ["alice/news"], {"a": 1}])
def test_a_space_s_card_links_what_the_hub_can_have_alone(exported_copy: Path, name: object) -> None:
    path = exported_copy / "metrics.json"
    metrics = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**metrics, "base_model": name, "dataset": name}))

    card = front_matter(space_files(exported_copy)["README.md"].decode())

    assert card["sdk"] == "docker"
    assert not {"models", "datasets"} & set(card)


def test_a_model_that_is_not_exported_is_refused_in_one_line(model_folder: Path) -> None:
    command = [sys.executable, "deployment/build_image.py", "--model", model_folder, "--builder", "buildah"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    remedy = f"write one with python -m inference.export {model_folder}"
    assert done.stderr == f"error: {model_folder}: no native or onnx artefact in it; {remedy} [artefact-missing]\n"


@pytest.mark.parametrize("name", ["metrics.json", "config.json", "onnx/manifest.json", "onnx/model.onnx", "onnx/more"])
def test_no_file_from_outside_of_the_model_is_copied(exported_copy: Path, tmp_path: Path, name: str) -> None:
    (exported_copy / "metrics.json").write_text("{}")
    secret = tmp_path / "secret"
    if (exported_copy / name).exists():
        shutil.copy(exported_copy / name, secret)
        (exported_copy / name).unlink()
    (exported_copy / name).symlink_to(secret)
    secret.touch()
    with pytest.raises(DeploymentError, match=rf"{name}: is a link to .*, outside of the model"):
        image_files(exported_copy)


def test_a_model_in_the_hub_s_cache_is_copied(exported_copy: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--news"
    (repository / "blobs").mkdir(parents=True)
    snapshot = Path(shutil.copytree(exported_copy, repository / "snapshots" / "0a1b"))
    for number, file in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        file.rename(repository / "blobs" / str(number))
        file.symlink_to(Path("../" * (len(file.relative_to(snapshot).parts) + 1)) / "blobs" / str(number))
    assert image_files(snapshot).keys() == image_files(exported_copy).keys()
