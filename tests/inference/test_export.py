from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import UserError, run_command
from common.files import sha256_of
from common.model_folder import read_manifest, verify_files
from inference import export
from inference.engines.base import TokenBatch
from inference.engines.model_loader import ModelLoader
from inference.engines.native.architecture import EncoderShape
from inference.exporting import build
from inference.exporting.comparison import Comparison
from tests.inference.conftest import MAX_LENGTH, MakeFolder
from tests.processes import REPOSITORY, PythonProcess, run_python, wait_until

pytest.importorskip("onnxruntime", reason="the onnx engine needs onnxruntime")
pytest.importorskip("onnx", reason="exporting needs onnx")

from inference.engines.onnx_engine import OnnxEngine


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", "inference.export", *arguments])


def _refused(arguments: list[str]) -> bool:
    """Whether the command ends in exit code 1; a mistake of the user would be 2."""
    with pytest.raises(SystemExit) as end:
        run_command(lambda: export.main(arguments))
    return end.value.code == 1


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_command_writes_a_complete_artefact_and_shows_what_it_gains(folder_copy: Path, rows_file: Path) -> None:
    folder_copy = folder_copy.rename(folder_copy.with_name("model[v2]"))
    run = _run(folder_copy, "--engine", "onnx", "--rows", rows_file, "--max_drop", "100", "--limit", "30")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert f"Written to {folder_copy / 'onnx'}\n" in run.stdout
    for part in ("Compare both on 30 rows", "accuracy", "texts per second", "MODEL_CHECKPOINT="):
        assert part in run.stdout
    manifest = read_manifest(folder_copy / "onnx")
    verify_files(folder_copy / "onnx", manifest)
    assert set(manifest.files) | {"manifest.json"} == _names(folder_copy / "onnx")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "metrics.json"} < set(manifest.files)
    assert manifest.source["weights_sha256"] == sha256_of(folder_copy / "model.safetensors")
    assert manifest.accuracy["rows"] == 30
    assert manifest.size["after_bytes"] < manifest.size["before_bytes"]
    assert manifest.speed["after_texts_per_second"] > 0
    assert not [name for name in _names(folder_copy) if name.startswith(".")]


def test_a_loss_of_accuracy_is_refused_with_the_texts_that_changed(
    folder_copy: Path, rows_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = _names(folder_copy)
    assert _refused([str(folder_copy), "--engine", "onnx", "--rows", str(rows_file), "--max_drop", "0"])
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("error: accuracy drops by ")
    assert "more than --max_drop 0" in lines[0]
    assert 1 <= len(lines[1:]) <= 10
    assert all(" -> " in line and "(right: " in line for line in lines[1:])
    assert _names(folder_copy) == before


def test_a_refused_export_leaves_the_older_artefact_in_place(exported_copy: Path, rows_file: Path) -> None:
    before = (exported_copy / "onnx" / "manifest.json").read_text()
    arguments = [str(exported_copy), "--engine", "onnx", "--rows", str(rows_file), "--limit", "5"]
    assert _refused([*arguments, "--max_drop", "-100"])
    assert (exported_copy / "onnx" / "manifest.json").read_text() == before
    export.main([*arguments, "--max_drop", "100"])
    assert read_manifest(exported_copy / "onnx").accuracy["rows"] == 5


def test_weights_that_are_replaced_during_an_export_make_no_artefact(
    folder_copy: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*arguments: Any) -> Comparison:
        weights = folder_copy / "model.safetensors"
        shutil.copy(weights, folder_copy.with_name("others"))
        folder_copy.with_name("others").replace(weights)
        return right(*arguments)

    right = build.compare
    monkeypatch.setattr(build, "compare", compare)
    with pytest.raises(UserError, match=f"^{folder_copy}: changed while it was exported; export the model again"):
        export.main([str(folder_copy), "--engine", "onnx", "--rows", str(rows_file), "--limit", "5"])
    assert not [name for name in _names(folder_copy) if "onnx" in name]


def test_an_export_that_is_stopped_leaves_nothing(folder_copy: Path, rows_file: Path, tmp_path: Path) -> None:
    command = ["-m", "inference.export", str(folder_copy), "--engine", "onnx", "--rows", str(rows_file)]
    logs = [tmp_path / "out", tmp_path / "err"]
    process = PythonProcess(command, {**os.environ}, REPOSITORY, logs)
    before = _names(folder_copy)
    wait_until(lambda: _names(folder_copy) > before)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert _names(folder_copy) == before


def test_a_configuration_without_what_the_kernels_need_gets_another_engine() -> None:
    config = {"model_type": "bert", "num_hidden_layers": 1, "max_position_embeddings": 64, "hidden_size": 32}
    with pytest.raises(ValueError, match=r"^config\.json has no \w+, which the native engine needs$"):
        EncoderShape.of(config)
    assert export._default_engine(config) == "onnx"


def test_a_pt_file_is_exported_into_a_folder_next_to_it(
    checkpoint: Path, rows_file: Path, tmp_path: Path, texts: list[str], labels: list[str]
) -> None:
    model = Path(shutil.copy(checkpoint, tmp_path / "model.pt"))
    arguments = ["--engine", "onnx", "--rows", str(rows_file), "--limit", "20", "--max_drop", "100"]
    export.main([str(model), *arguments])
    exported, reference = ModelLoader(model), ModelLoader(model, "torch")
    assert exported.info["engine"] == "onnx int8"
    assert exported.info["revision"] == reference.info["revision"]
    assert (exported.labels, exported.max_length, exported.metadata) == (labels, 24, reference.metadata)
    for one, other in zip(exported.predict_batch(texts), reference.predict_batch(texts), strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=0.15)
    assert ModelLoader(tmp_path / "model.onnx").labels == labels


def test_a_folder_that_no_export_wrote_is_left_alone(folder_copy: Path, rows_file: Path) -> None:
    (folder_copy / "onnx").mkdir()
    (folder_copy / "onnx" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="is in the way and is not an artefact"):
        export.main([str(folder_copy), "--engine", "onnx", "--rows", str(rows_file)])
    assert _names(folder_copy / "onnx") == {"mine.txt"}


def test_without_its_own_rows_the_sample_is_used_and_the_output_says_so(
    folder_copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export.main([str(folder_copy), "--engine", "onnx", "--limit", "5", "--max_drop", "100"])
    assert "Measuring on the sample news (5 rows); --rows takes" in capfd.readouterr().out
    accuracy = json.loads((folder_copy / "onnx" / "manifest.json").read_text())["accuracy"]
    assert accuracy["dataset"] == "sample_news/test.csv"


def test_the_rows_of_training_are_used_if_they_are_still_there(
    folder_copy: Path, rows_file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows_file.parent)
    about = json.loads((folder_copy / "metrics.json").read_text())
    (folder_copy / "metrics.json").write_text(
        json.dumps(about | {"dataset": f"./{rows_file.name}"})
    )  # as training does
    export.main([str(folder_copy), "--engine", "onnx", "--limit", "5", "--max_drop", "100"])
    assert "Measuring on the sample news" not in capfd.readouterr().out
    accuracy = json.loads((folder_copy / "onnx" / "manifest.json").read_text())["accuracy"]
    assert rows_file.name in accuracy["dataset"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "no such model"),
        (["MODEL", "--rows", "none"], "none: no such file or folder"),
        (["MODEL", "--engine", "tensorflow"], "invalid choice"),
        (["MODEL", "--limit", "0"], "--limit: 0: must be a whole number, at least 1"),
        (["MODEL", "--engine", "native", "--precision", "fp32"], "the native engine supports int8 only"),
        (["MODEL/onnx"], "name some with --rows"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(exported_folder: Path, arguments: list[str], message: str) -> None:
    run = _run(*(argument.replace("MODEL", str(exported_folder)) for argument in arguments))
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("error: ")
    assert message in run.stderr


LONGFORMER = {"attention_window": [4, 4], "max_position_embeddings": 66, "pad_token_id": 1, "sep_token_id": 3}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("family", "config", "what"),
    [
        pytest.param(
            *("Longformer", SIZES | LONGFORMER, "the onnx fp32 engine fails on a text of 3 tokens"),
            marks=pytest.mark.slow,
        ),
        ("XLNet", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}, "answers a text differently in a batch"),
    ],
)
def test_a_model_that_would_answer_wrongly_or_not_at_all_is_not_written(
    make_folder: MakeFolder, rows_file: Path, family: str, config: dict, what: str
) -> None:
    folder = make_folder(family, **config)
    arguments = ["--engine", "onnx", "--precision", "fp32", "--rows", str(rows_file), "--limit", "10"]
    with pytest.raises(UserError, match=f"^[^\n]*{what}[^\n]*$"):
        export.main([str(folder), *arguments, "--max_drop", "100"])
    assert not [name for name in _names(folder) if "onnx" in name]


@pytest.mark.parametrize("changed", ["probes", "a text at its full length"])
def test_an_artefact_far_from_its_reference_is_refused_whatever_its_accuracy(
    folder_copy: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], changed: str
) -> None:
    """The runtime is real but for what it answers some texts, as a kernel with a fault on this processor would."""

    def faulty(engine: OnnxEngine, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        logits = right(engine, batch)
        wrong = batch.lengths == MAX_LENGTH if changed != "probes" else np.full(len(logits), len(logits) == 5)
        return np.where(wrong[:, None], np.roll(logits, 1, axis=1), logits)

    right = OnnxEngine.logits
    monkeypatch.setattr(OnnxEngine, "logits", faulty)
    arguments = ["--engine", "onnx", "--rows", str(rows_file), "--limit", "3", "--max_drop", "100"]
    assert _refused([str(folder_copy), *arguments])
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(r"a probability of the artefact differs by 0\.\d\d from the reference's, more than 0\.25", line)
    assert not (folder_copy / "onnx").exists()
