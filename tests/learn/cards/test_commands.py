"""The commands: run trains to over 93% on four ranks, show draws, and a mistake is one line."""

import errno
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError, run_command
from learn.cards.__main__ import main
from learn.cards.pipeline import DEFAULT_PIPELINE
from learn.cards.storage import Storage
from tests.deployment.documented import REPOSITORY

CARDS = [sys.executable, "-m", "learn.cards"]


def output_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["cards", *arguments])
    main()
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_four_ranks_learn_the_irises(start: Callable[..., Any], tmp_path: Path, strategy: str) -> None:
    # scikit-learn is installed here for other tests; no rank may need it.
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('hidden', name='sklearn')")
    command = [*CARDS, "run", "--workers", "4", "--epochs", "30", "--strategy", strategy, "--output", tmp_path]
    run = start(command, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])})

    assert (run.process.returncode, run.err) == (0, "")
    assert float(re.search(r"accuracy (\d+\.\d+)%", run.out)[1]) > 93
    assert (tmp_path / "iris" / "save" / "rank_3" / "model.safetensors").exists()


def test_show_draws_every_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(monkeypatch, capsys, "show", "--workers", "3", "--epochs", "7").splitlines()

    assert "iris: 12 cards, 3 ranks, 7 epochs" in lines[0]
    assert sum("3 ranks" in line for line in lines[1:]) == 8
    assert output_of(monkeypatch, capsys, "show", "--mermaid").startswith("flowchart TD\n")


def test_a_wrong_flag_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("nodes: [{id: load, card: dist_load_dataset}]")
    for flags, message in (
        ([str(path), "--workers", "2"], f"^--workers 2: there is no dist_shard_data card in {path}"),
        (["--workers", "20"], r"^--workers 20: .* must be at most 16$"),
    ):
        monkeypatch.setattr(sys, "argv", ["cards", "show", *flags])
        with pytest.raises(UserError, match=message):
            main()


def short_pipeline(folder: Path) -> Path:
    """One card that reads two rows."""
    (folder / "sizes.csv").write_text("1,2,small\n3,4,large\n")
    path = folder / "short.yaml"
    config = f"{{source_url: {folder}/sizes.csv, target_column: 2}}"
    path.write_text(f"nodes: [{{id: load, card: dist_load_dataset, config: {config}}}]")
    return path


def test_a_pipeline_may_be_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = short_pipeline(tmp_path)

    lines = output_of(monkeypatch, capsys, "run", str(path), "--output", str(tmp_path / "kept")).splitlines()

    assert lines[0].startswith("Load dataset")
    assert (tmp_path / "kept" / "short" / "load" / "dataset.safetensors").exists()


def test_a_full_disk_is_one_line_that_names_the_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def save(self: Storage, name: str, value: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Storage, "save", save)
    pipeline = short_pipeline(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cards", "run", str(pipeline), "--output", str(tmp_path / "kept")])
    with pytest.raises(SystemExit) as ended:
        run_command(main)

    trace = tmp_path / "kept" / "short" / "load" / "error.txt"
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "error: card dist_load_dataset (node load): OSError: [Errno 28] No space left on device; "
        f"traceback in {trace} [card-failed]\n"
    )
    assert "save" in trace.read_text()


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    wrong = {tmp_path: "Is a directory", tmp_path / "file" / "run.html": "File exists"}
    for report, reason in wrong.items():
        flags = ("run", str(short_pipeline(tmp_path)), "--output", str(tmp_path / "kept"), "--report", str(report))
        with pytest.raises(UserError, match=re.escape(f"--report {report}: cannot be written ({reason})")):
            output_of(monkeypatch, capsys, *flags)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "kept" / "short").exists()


def test_a_run_that_fails_leaves_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "run.html"
    flags = ("--workers", "16", "--output", str(tmp_path / "kept"), "--report", str(report))
    path = tmp_path / "mine.yaml"
    path.write_text(DEFAULT_PIPELINE.read_text().replace("batch_size: 16", "batch_size: 8"))
    with pytest.raises(UserError, match="num_workers 16: more ranks than rows in a global batch"):
        output_of(monkeypatch, capsys, "run", str(path), *flags)

    run = json.loads(re.search(r'id="run">(.*?)</script>', report.read_text())[1])
    states = [card["state"] for card in run["state"]["cards"].values()]
    assert states[:4] == ["done", "done", "failed", "waiting"]
    assert f"The run on a page: {report}" in capsys.readouterr().out
