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
import torch
from safetensors.torch import load_file, save_file

from common.errors import ModelLoadError
from common.files import sha256_of
from common.hardware import Hardware, usable_cpus
from common.model_folder import MANIFEST_FILE, describe_files
from inference import export
from inference.engines import native
from inference.engines.model_loader import ModelLoader
from inference.engines.selection import _has_gpu_files, load_model
from inference.engines.self_test import measure_speed
from inference.settings import Settings
from tests.inference.stand_in_model import StandInModel
from tests.processes import run_python

REPOSITORY = Path(__file__).resolve().parents[3]
# Instructions that were asked for are always compared with the other engines.
COMPARED = Hardware(instruction_set="plain")

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
    if "torch" not in packages:
        return run_python(["-c", program])
    return subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_without_an_artefact_torch_answers_and_the_reason_says_how_to_get_one(model_folder: Path) -> None:
    info = ModelLoader(model_folder).info
    assert info["engine"].startswith("torch")
    assert info["precision"] == "fp32"
    assert "python -m inference.export" in info["reason"]


@pytest.fixture(name="fast_int8")
def fixture_fast_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor with VNNI; without it an int8 artefact is compared with the float model first."""
    monkeypatch.setattr("inference.engines.selection.has_fast_int8", lambda: True)


@pytest.mark.usefixtures("fast_int8")
def test_auto_picks_the_artefact_and_says_why(exported_folder: Path) -> None:
    info = ModelLoader(exported_folder).info
    weights = sha256_of(exported_folder / "model.safetensors")
    assert (info["engine"], info["precision"], info["revision"]) == ("onnx int8", "int8", weights[:12])
    assert "onnx is the only artefact that works here" in info["reason"]
    assert ModelLoader(exported_folder, "torch").info["revision"] == weights[:12]


def test_an_artefact_folder_serves_without_torch_and_without_the_weights(
    exported_folder: Path, tmp_path: Path, texts: list[str], labels: list[str]
) -> None:
    artefact = shutil.copytree(exported_folder / "onnx", tmp_path / "image")
    code = f"""
import json
import sys
import threading
from inference.engines.model_loader import ModelLoader
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
from common.errors import ModelLoadError
from common.files import sha256_of
from inference.engines.model_loader import ModelLoader
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
    code = f"from inference.engines.model_loader import ModelLoader; ModelLoader({str(model_folder)!r})"
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
    path = folder / "onnx" / MANIFEST_FILE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _make_probes_wrong(content: dict[str, Any]) -> None:
    for probe in content["probes"]:
        probe["probabilities"] = np.roll(probe["probabilities"], 1).tolist()


def _replace_the_graph(folder: Path) -> None:
    path = folder / "onnx" / "model.onnx"
    path.write_bytes(b"no graph")
    described = describe_files(folder / "onnx")
    _edit_manifest(folder, lambda content: content.update(files=described))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_retrain, "was made from other weights than model.safetensors"),
        (_rename_a_label, "was made before config.json changed"),
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


def test_a_missing_artefact_is_refused_with_the_command_that_writes_it(model_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"python -m inference\.export .* --engine openvino"):
        load_model(model_folder, "openvino")
    with pytest.raises(ModelLoadError, match="no engine is called 'tensorflow'"):
        load_model(model_folder, "tensorflow")


def test_an_artefact_of_another_engine_is_refused(exported_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="for the onnx engine, not torch"):
        load_model(exported_folder / "onnx", "torch")


@pytest.fixture(scope="module")
def two_artefacts(exported_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with an artefact for ONNX Runtime and one for our kernels."""
    if not native.is_supported()[0]:
        pytest.skip(native.is_supported()[1])
    folder = Path(shutil.copytree(exported_folder, tmp_path_factory.mktemp("two") / "tiny"))
    export.main([str(folder), "--engine", "native", "--rows", str(rows_file), "--max_drop", "100"])
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of a user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distrinews" / "engine_speeds"


def test_our_kernels_are_taken_without_a_comparison_where_they_have_won_them_all(
    two_artefacts: Path, cache: Path, tmp_path: Path
) -> None:
    if not native.is_known_fastest():
        pytest.skip("on this kind of processor the engines are compared")
    loaded = load_model(two_artefacts)
    assert loaded.reason.startswith("native is the fastest on this kind of processor; its kernels use ")
    assert not cache.exists()
    folder = Path(shutil.copytree(two_artefacts, tmp_path / "damaged"))
    (folder / "native" / "model_int8.safetensors").write_bytes(b"x")
    assert load_model(folder).reason.startswith("onnx is the only artefact that works here; skipped native (")


def test_auto_measures_every_artefact_and_takes_the_fastest(two_artefacts: Path, cache: Path) -> None:
    loaded = load_model(two_artefacts, hardware=COMPARED)
    [file] = cache.iterdir()
    assert cache.parent.stat().st_mode & 0o777 == 0o700  # training keeps texts in the same folder
    speeds = json.loads(file.read_text())
    assert speeds.keys() == {"native", "onnx"}
    fastest = max(speeds, key=speeds.get)
    assert loaded.engine.name == f"{fastest} int8"
    assert loaded.tokens_per_second == speeds[fastest]
    assert loaded.reason.startswith(f"{fastest} makes {speeds[fastest]:,.0f} tokens per second here, ")
    assert "(measured just now)" in loaded.reason


def test_measured_speeds_are_remembered_and_decide_at_the_next_start(two_artefacts: Path, cache: Path) -> None:
    load_model(two_artefacts, hardware=COMPARED)
    [file] = cache.iterdir()
    for speeds, expected in (
        ({"native": 1.0, "onnx": 2.0}, "onnx int8"),
        ({"native": 2.0, "onnx": 1.0}, "native int8"),
    ):
        file.write_text(json.dumps(speeds))
        loaded = load_model(two_artefacts, hardware=COMPARED)
        assert loaded.engine.name == expected
        assert "(measured at an earlier start)" in loaded.reason
    # Other threads are another machine.
    load_model(two_artefacts, hardware=Hardware(threads=1, instruction_set="plain"))
    assert len(list(cache.iterdir())) == (2 if usable_cpus() > 1 else 1)


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"native": "fast"}'])
def test_with_a_damaged_cache_speeds_are_measured_again(two_artefacts: Path, cache: Path, content: str) -> None:
    load_model(two_artefacts, hardware=COMPARED)
    [file] = cache.iterdir()
    file.write_text(content)
    assert "(measured just now)" in load_model(two_artefacts, hardware=COMPARED).reason
    assert json.loads(file.read_text()).keys() == {"native", "onnx"}


def test_an_unwritable_cache_does_not_prevent_a_start(two_artefacts: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    assert "(measured just now)" in load_model(two_artefacts, hardware=COMPARED).reason


def test_an_artefact_that_does_not_load_is_left_out_of_the_comparison(
    two_artefacts: Path, cache: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(two_artefacts, tmp_path / "damaged"))
    (folder / "native" / "model_int8.safetensors").write_bytes(b"x")
    loaded = load_model(folder, hardware=COMPARED)
    assert loaded.engine.name == "onnx int8"
    assert loaded.reason.startswith("onnx is the only artefact that works here; skipped native (")
    assert loaded.reason.count("skipped") == 1
    assert not cache.exists()


@pytest.mark.usefixtures("fast_int8")
def test_a_single_artefact_is_not_compared_but_its_speed_is_known(exported_folder: Path, cache: Path) -> None:
    loaded = load_model(exported_folder)
    assert not cache.exists()
    assert loaded.tokens_per_second > 0


def test_a_slower_engine_measures_slower(model_folder: Path) -> None:
    slow, fast = (StandInModel(model_folder, seconds) for seconds in (0.0005, 0.0001))
    speeds = [measure_speed(one.engine, one.tokenizer, one.max_length, seconds=0.05) for one in (slow, fast)]
    assert speeds[0] < 2000
    assert speeds[0] < speeds[1]


@pytest.mark.parametrize(
    ("name", "is_gpu"),
    [("nvidia0", True), ("nvidia5", True), ("dxg", True), ("nvidiactl", False), ("nvidia-uvm", False), ("null", False)],
)
def test_a_gpu_is_found_by_any_number_and_under_wsl(tmp_path: Path, name: str, is_gpu: bool) -> None:
    (tmp_path / name).touch()
    assert _has_gpu_files(tmp_path) == is_gpu


def test_torch_without_a_gpu_says_so_and_cuda_that_was_asked_for_is_an_error(
    model_folder: Path, exported_folder: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "; it runs on the processor, since " in load_model(model_folder, "torch").reason
    assert "processor" not in load_model(model_folder, "torch", Hardware(device="cpu")).reason
    for wanted in ("auto", "torch"):
        with pytest.raises(ModelLoadError, match=r"DEVICE is cuda, and .*; set DEVICE to auto or cpu"):
            load_model(exported_folder, wanted, Hardware(device="cuda"))
    with pytest.raises(ModelLoadError, match="artefacts run on processors, and DEVICE is cuda"):
        load_model(exported_folder, "onnx", Hardware(device="cuda"))


def test_threads_follow_the_setting_within_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Hardware().num_threads == Hardware(threads=10_000).num_threads == usable_cpus()
    monkeypatch.setenv("THREADS", "1")
    monkeypatch.setenv("DEVICE", "CPU")
    assert Settings().hardware == Hardware(threads=1, device="cpu")
    assert Settings().hardware.num_threads == 1


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
