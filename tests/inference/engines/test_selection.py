from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from inference import manifest as manifests
from inference.engines.selection import load_model
from inference.errors import ModelLoadError
from inference.model_loader import ModelLoader

REPOSITORY = Path(__file__).resolve().parents[3]

# Started before anything else in a process: whoever imports one of the names gets what a missing package gives.
_WITHOUT_PACKAGES = """
import builtins
found = builtins.__import__
def refuse(name, *rest, **named):
    if name.partition(".")[0] in {names!r}:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return found(name, *rest, **named)
builtins.__import__ = refuse
"""


def _run_without(packages: set[str], code: str) -> subprocess.CompletedProcess[str]:
    program = _WITHOUT_PACKAGES.format(names=packages) + code
    return subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_without_an_artefact_torch_answers_and_the_reason_says_how_to_get_one(model_folder: Path) -> None:
    info = ModelLoader(model_folder).info
    assert info["engine"].startswith("torch")
    assert info["precision"] == "fp32"
    assert "python -m inference.export" in info["reason"]


def test_auto_picks_the_artefact_and_says_why(exported_folder: Path) -> None:
    info = ModelLoader(exported_folder).info
    weights = manifests.sha256_of(exported_folder / "model.safetensors")
    assert (info["engine"], info["precision"], info["revision"]) == ("onnx int8", "int8", weights[:12])
    assert "onnx is the fastest artefact" in info["reason"]
    assert ModelLoader(exported_folder, "torch").info["revision"] == weights[:12]


def test_an_artefact_folder_serves_without_torch_and_without_the_weights(
    exported_folder: Path, tmp_path: Path, texts: list[str], labels: list[str]
) -> None:
    artefact = shutil.copytree(exported_folder / "onnx", tmp_path / "image")
    code = f"""
import json
import sys
import threading
from inference.model_loader import ModelLoader
model = ModelLoader({str(artefact)!r})
assert not {{"torch", "transformers"}} & set(sys.modules)
print(json.dumps([model.info["engine"], model.labels, model.max_length, model.predict({texts[0]!r})]))
"""
    run = _run_without({"torch", "transformers"}, code)
    assert run.returncode == 0, run.stderr
    engine, found_labels, max_length, answer = json.loads(run.stdout)
    assert (engine, found_labels, max_length) == ("onnx int8", labels, 24)
    assert answer == ModelLoader(exported_folder, "onnx").predict(texts[0])


def test_without_the_runtime_auto_falls_back_and_the_named_engine_is_refused(exported_folder: Path) -> None:
    code = f"""
from inference.errors import ModelLoadError
from inference.model_loader import ModelLoader
print(ModelLoader({str(exported_folder)!r}).info["engine"])
print(ModelLoader({str(exported_folder)!r}).info["reason"])
try:
    ModelLoader({str(exported_folder)!r}, "onnx")
except ModelLoadError as error:
    print(error)
"""
    run = _run_without({"onnxruntime"}, code)
    assert run.returncode == 0, run.stderr
    engine, reason, refusal = run.stdout.splitlines()
    assert engine.startswith("torch")
    assert "skipped onnx" in reason
    assert "the onnx engine needs onnxruntime" in reason
    assert "pip install onnxruntime" in refusal


def test_without_torch_and_without_an_artefact_the_line_says_what_is_missing(model_folder: Path) -> None:
    code = f"from inference.model_loader import ModelLoader; ModelLoader({str(model_folder)!r})"
    run = _run_without({"torch"}, code)
    assert "the torch engine needs torch, which is not installed" in run.stderr.splitlines()[-1]


def _retrain(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"] += 1
    save_file(weights, folder / "model.safetensors")


def _rename_a_label(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("Sports", "Sport"))


def _edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "onnx" / manifests.FILE_NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _make_probes_wrong(content: dict[str, Any]) -> None:
    for probe in content["probes"]:
        probe["probabilities"] = np.roll(probe["probabilities"], 1).tolist()


def _replace_the_graph(folder: Path) -> None:
    path = folder / "onnx" / "model.onnx"
    path.write_bytes(b"no graph")
    described = manifests.describe_files(folder / "onnx")
    _edit_manifest(folder, lambda content: content.update(files=described))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_retrain, "was made from other weights than model.safetensors"),
        (_rename_a_label, "was made when config.json was another"),
        (lambda folder: (folder / "onnx" / "model.onnx").write_bytes(b"x"), "model.onnx: is not the file"),
        (lambda folder: (folder / "onnx" / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
        (_replace_the_graph, "does not load"),
        (lambda folder: _edit_manifest(folder, _make_probes_wrong), "not to be trusted on this processor"),
        (lambda folder: _edit_manifest(folder, lambda content: content.update(format=0)), "format 0"),
        (lambda folder: _edit_manifest(folder, lambda content: content.update(engine="none")), "'none'"),
    ],
)
def test_an_artefact_that_cannot_be_trusted_is_skipped_by_auto_and_refused_by_name(
    exported_copy: Path, damage: Callable[[Path], object], why: str
) -> None:
    damage(exported_copy)
    loaded = load_model(exported_copy)
    assert loaded.engine.name.startswith("torch")
    assert "skipped onnx" in loaded.reason
    assert why in loaded.reason
    assert "\n" not in loaded.reason
    with pytest.raises(ModelLoadError, match=r"^[^\n]*$") as refusal:
        load_model(exported_copy, "onnx")
    assert why in str(refusal.value)


def test_without_weights_the_line_says_why_no_artefact_works(exported_copy: Path) -> None:
    # As in an image that holds what was exported and nothing else.
    (exported_copy / "model.safetensors").unlink()
    (exported_copy / "onnx" / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"none of its artefacts works here: skipped onnx \(.*SHA-256 differs"):
        load_model(exported_copy)


def test_weights_that_were_only_copied_keep_their_artefact(exported_copy: Path) -> None:
    # The copy has another modification time, so the hash decides.
    (exported_copy / "model.safetensors").touch()
    assert load_model(exported_copy).engine.name == "onnx int8"


def test_a_named_engine_that_is_not_there_is_refused_with_the_command_that_makes_it(model_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"python -m inference\.export .* --engine openvino"):
        load_model(model_folder, "openvino")
    with pytest.raises(ModelLoadError, match="no engine is called 'tensorflow'"):
        load_model(model_folder, "tensorflow")


def test_an_artefact_of_another_engine_is_refused(exported_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="for the onnx engine, not torch"):
        load_model(exported_folder / "onnx", "torch")


def test_a_weights_file_that_changes_while_it_is_read_is_refused(model_folder: Path, folder_copy: Path) -> None:
    weights = folder_copy / "model.safetensors"
    stop = threading.Event()

    def keep_writing() -> None:
        while not stop.wait(0.001):
            weights.touch()

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        with pytest.raises(ModelLoadError, match="changed while it was read; load it again when the copy is complete"):
            load_model(folder_copy)
    finally:
        stop.set()
        writer.join()
    assert load_model(folder_copy).revision == load_model(model_folder).revision
