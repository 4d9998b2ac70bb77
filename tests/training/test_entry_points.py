from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from training.config import TrainConfig, parse_config
from training.distributed.group import join_ranks
from training.distributed.ranks import Ranks
from training.evaluation.evaluator import evaluate_saved

REPOSITORY = Path(__file__).resolve().parents[2]
TRAINING = REPOSITORY / "training"
README = REPOSITORY / "README.md"
PYTHON = sys.executable
QUICK = ("--max_train_rows", "40", "--epochs", "1")

Start = Callable[..., "Run"]  # noqa: F821 - the fixture's class, in conftest.py


@pytest.fixture(scope="module")
def trained(launch_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that train_single.py, started by path from an empty folder, has trained."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    run = launch_shared(1, *QUICK, "--output_dir", folder)
    assert run.process.returncode == 0, run.err
    return folder


def test_train_single_by_path_from_another_folder_writes_the_model(trained: Path) -> None:
    beside = {path.name for path in trained.parent.iterdir()}

    assert {"tiny", "tiny.pt", "tiny.run"} <= beside
    assert (trained / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train_ddp.py", "--epochs", "0"], "error: --epochs 0: must be at least 1 [flag-value]"),
        (["train_single.py", "--dataset", "gone", "--model", "tiny"], "error: --dataset gone: no such dataset; use"),
        (["evaluate.py", "gone"], "error: gone: no such model"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(start: Start, arguments: list[str], message: str) -> None:
    run = start([PYTHON, TRAINING / arguments[0], *arguments[1:]], warm=True)

    assert run.process.returncode == 2
    assert run.err.startswith(message)
    assert run.err.count("\n") == 1


@pytest.mark.slow
def test_run_ddp_on_one_process_trains_to_the_end(start: Start, base_flags: tuple[str, ...], tmp_path: Path) -> None:
    flags = [*base_flags, *QUICK, "--output_dir", tmp_path / "news"]

    run = start([TRAINING / "run_ddp.sh", "1", *flags], env={"PYTHON": PYTHON})

    assert run.process.returncode == 0, run.err
    assert (tmp_path / "news/model.safetensors").is_file()
    assert "1 (gloo)" in run.out + run.err


def test_run_ddp_passes_on_help_and_refuses_no_processes(start: Start) -> None:
    helped = start([TRAINING / "run_ddp.sh", "1", "--help"], env={"PYTHON": PYTHON})
    refused = start([TRAINING / "run_ddp.sh", "0"], env={"PYTHON": PYTHON})

    assert (helped.process.returncode, refused.process.returncode) == (0, 2)
    assert helped.out.startswith("usage: train_ddp.py")
    assert refused.err == "error: run_ddp.sh 0: at least 1 process [flag-value]\n"


@pytest.fixture
def alone() -> Iterator[Ranks]:
    threads = torch.get_num_threads()
    with join_ranks("cpu", use_process_group=False) as mine:
        yield mine
    torch.set_num_threads(threads)


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_evaluating_gives_the_figures_that_training_wrote(alone: Ranks, trained: Path, suffix: str) -> None:
    written = json.loads((trained / "metrics.json").read_text())["test"]

    found = evaluate_saved(trained.with_suffix(suffix), None, alone, quiet=True)

    assert (found["model"], found["dataset"]) == (str(trained.with_suffix(suffix)), "sample")
    assert found["accuracy"] == written["accuracy"]
    assert found["confusion_matrix"] == written["confusion_matrix"]
    assert found["loss"] == pytest.approx(written["loss"], abs=1e-5)


def test_evaluate_prints_nothing_but_json_when_asked(start: Start, trained: Path) -> None:
    run = start([PYTHON, "-m", "training.evaluate", trained.with_suffix(".pt"), "--device", "cpu", "--json"], warm=True)

    assert run.process.returncode == 0, run.err
    assert json.loads(run.out)["rows"] == json.loads((trained / "metrics.json").read_text())["test"]["rows"]


def test_evaluate_prints_a_table_for_other_data(start: Start, trained: Path, tmp_path: Path) -> None:
    rows = [
        ("Oil prices rise", "Business"),
        ("A late goal", "Sports"),
        ("Peace talks", "World"),
        ("Shares", "Business"),
    ]
    for split in ("train", "test"):
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))

    run = start([PYTHON, TRAINING / "evaluate.py", trained, "--dataset", tmp_path, "--device", "cpu"], warm=True)

    assert run.process.returncode == 0, run.err
    assert f"{trained} on {tmp_path}: 4 test rows" in run.out
    assert re.search(r"^Business +[\d.]+ +[\d.]+ +[\d.]+ +2$", run.out, re.MULTILINE)
    assert re.search(r"^Sci/Tech +0\.0000 +0\.0000 +0\.0000 +0$", run.out, re.MULTILINE)


def _rows(path: Path, first: int, last: int) -> Path:
    texts = (f"number {i} of the {'oil' if i % 2 else 'cup'}" for i in range(first, last))
    path.write_text("text,label\n" + "".join(f"{text},{'ab'[text.endswith('oil')]}\n" for text in texts))
    return path


def test_evaluating_takes_the_rows_that_training_set_aside_and_of_other_rows_all(
    alone: Ranks, train_here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, model = _rows(tmp_path / "rows.csv", 0, 100), tmp_path / "model"
    assert train_here("--dataset", data, "--max_train_rows", 0, "--output_dir", model, "--seed", 7) == 0
    written = json.loads((model / "metrics.json").read_text())["test"]
    capsys.readouterr()

    found = evaluate_saved(model, None, alone)

    assert found["rows"] == written["rows"] < 20
    assert found["loss"] == pytest.approx(written["loss"], abs=1e-5)
    assert "rows were set aside as the test set" in capsys.readouterr().err
    assert evaluate_saved(model, str(data), alone, quiet=True)["loss"] == found["loss"]
    others = evaluate_saved(model, str(_rows(tmp_path / "others.csv", 100, 140)), alone, quiet=True)
    assert others["rows"] == 40


def test_data_with_other_labels_is_refused(alone: Ranks, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mail.csv").write_text("text,label\n" + "one,ham\ntwo,spam\n" * 4)

    with pytest.raises(UserError, match=r"mail.csv: label 'ham' is not one of the model's labels World, Sports"):
        evaluate_saved(trained, str(tmp_path / "mail.csv"), alone, quiet=True)


def readme_commands() -> list[list[str]]:
    """The commands of the README's code blocks that call training, as lists of words."""
    if not README.is_file():
        return []
    blocks = re.findall(r"^```(?:bash|sh|shell|console)?\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [
        shlex.split(line.removeprefix("$ "), comments=True) for line in lines if re.search(r"training[./]\w", line)
    ]
    return [command for command in words if any(name in ("python", "torchrun") or "/" in name for name in command[:2])]


def is_training(word: str) -> bool:
    return bool(re.search(r"training[./](train_ddp|train_single|run_ddp|evaluate)", word))


@pytest.mark.skipif(not any(map(is_training, chain(*readme_commands()))), reason="the README has no such command yet")
def test_the_readmes_commands_are_ones_that_training_takes() -> None:
    for command in readme_commands():
        place = next((i for i, word in enumerate(command) if is_training(word)), None)
        if place is None:
            continue
        arguments = command[place + 1 :]
        if "evaluate" in command[place]:
            assert {word for word in arguments if word.startswith("--")} <= {"--dataset", "--device", "--json"}, command
            continue
        if "run_ddp" in command[place] and arguments and arguments[0].isdecimal():
            arguments = arguments[1:]
        assert isinstance(parse_config(arguments, {}), TrainConfig)
