"""What goes wrong is said in one line, costs nothing that was saved, and leaves no process behind."""

import csv
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from common.rows import SAMPLE_NEWS
from training import train_ddp
from training.data.dataset import LoadOptions, load_data
from training.data.tokenized import load_tokenizer
from training.distributed.group import _choose_device
from training.model.classifier import NewsClassifier

TRAIN_DDP = Path(train_ddp.__file__)
GOOD_ROWS = [[str(1 + i % 4), f"Headline {i}", "Prices rise as the season opens."] for i in range(40)]


def _write_csv(folder: Path, rows: Sequence[Sequence[str]]) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / "train.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return folder


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*"))


Inputs = Callable[[Path], Sequence[str | Path]]


def _malformed_row(folder: Path) -> Sequence[str | Path]:
    return "--dataset", _write_csv(folder / "data", [*GOOD_ROWS[:6], ["3"], *GOOD_ROWS[6:]])


def _one_class(folder: Path) -> Sequence[str | Path]:
    return "--dataset", _write_csv(folder / "data", [["2", *rest] for _, *rest in GOOD_ROWS])


def _output_below_a_file(folder: Path) -> Sequence[str | Path]:
    (folder / "file").write_text("")
    return "--output_dir", folder / "file" / "model"


def _output_with_other_files(folder: Path) -> Sequence[str | Path]:
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter_1.txt").write_text("keep me")
    return "--output_dir", folder / "thesis"


def _output_is_a_file(folder: Path) -> Sequence[str | Path]:
    (folder / "thesis.txt").write_text("keep me")
    return "--output_dir", folder / "thesis.txt"


def _damaged_checkpoint(folder: Path) -> Sequence[str | Path]:
    (folder / "step_00000004").mkdir()
    (folder / "step_00000004" / "__0_0.distcp").write_bytes(b"torn")
    (folder / "step_00000004" / "manifest.json").write_text(
        '{"format": 1, "step": 4, "files": {"__0_0.distcp": {"bytes": 4096, "sha256": "0"}}}'
    )
    return "--resume", folder / "step_00000004"


USER_ERRORS: dict[str, tuple[Inputs, str]] = {
    "no such dataset": (
        lambda _: ("--dataset", "agnews"),
        r"--dataset agnews: no such dataset; did you mean ag_news\?; use",
    ),
    "no such model": (lambda folder: ("--model", folder / "none"), r"--model .*none: no folder of that name"),
    "malformed row": (_malformed_row, r"data/train\.csv line 7: one field"),
    "one class only": (_one_class, r"--dataset .*data: all training rows have the label '2'"),
    "too few rows": (lambda _: ("--max_train_rows", "1"), r"no label has two rows"),
    "output below a file": (_output_below_a_file, r"--output_dir .*file/model: .* cannot be written"),
    "output in /proc": (lambda _: ("--output_dir", "/proc/model"), r"--output_dir /proc/model: /proc cannot be writ"),
    "output holds other files": (_output_with_other_files, r"--output_dir .*thesis: holds files that are not a model"),
    "output is a file": (_output_is_a_file, r"--output_dir .*thesis\.txt: is a file"),
    "no GPU": (lambda _: ("--device", "cuda"), r"--device cuda: no CUDA GPU was found on this machine"),
    "more tokens than positions": (
        lambda _: ("--max_length", "600"),
        r"--max_length 600: --model tiny has positions for 512 tokens",
    ),
    "damaged checkpoint": (_damaged_checkpoint, r"--resume .*step_00000004: __0_0\.distcp has 4 bytes, not 4,096"),
    "no such checkpoint": (lambda folder: ("--resume", folder / "none"), r"--resume .*none: no such folder"),
}


@pytest.mark.parametrize("case", USER_ERRORS)
def test_a_users_mistake_is_one_line_and_writes_nothing(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    prepare, expected = USER_ERRORS[case]
    flags = prepare(tmp_path)
    before = _files_below(tmp_path)

    code = train_here("--output_dir", tmp_path / "new" / "model", *flags)

    stderr = capfd.readouterr().err
    assert code == 2
    assert len(stderr.splitlines()) == 1
    assert re.match(f"error: .*{expected}", stderr), stderr
    assert _files_below(tmp_path) == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param(
            (), "error: 3 ranks for 2 training rows: start fewer processes [rows-too-few]", id="more ranks than rows"
        ),
        pytest.param(
            ("--epoch", "1"),
            "error: --epoch: no such flag; did you mean --epochs? [flag-unknown]",
            id="unknown flag",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--loss", "nowhere:foo"),
            "error: --loss nowhere:foo: cannot be imported (ModuleNotFoundError: No module named 'nowhere'); give "
            "module:name, such as my_models:TextCNN [own-code]",
            id="own code that is missing",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_under_torchrun_a_users_mistake_is_printed_once_even_if_rank_0_is_slow(
    launch: Callable[..., Any], tmp_path: Path, flags: tuple[str, ...], expected: str
) -> None:
    # Three rows, of which one is kept for validation: the other label has a single row and keeps it.
    data = _write_csv(tmp_path / "data", [["1", "First", "text"], ["1", "Second", "text"], ["2", "Third", "text"]])
    shutil.copy(data / "train.csv", data / "test.csv")

    # torchrun looks every 0.1 s whether a rank has ended, and then ends the others.
    script = tmp_path / "slow_rank_0.py"
    script.write_text(
        "import runpy, time\n"
        "from common.errors import ForeseenError\n"
        "say = ForeseenError.say\n"
        "ForeseenError.say = lambda error: (error.quiet or time.sleep(1), say(error))\n"
        f"runpy.run_path({str(TRAIN_DDP)!r}, run_name='__main__')\n"
    )

    ended = launch(3, "--dataset", data, "--output_dir", tmp_path / "model", *flags, script=script)

    assert ended.process.returncode == 1
    assert ended.error_lines == [expected]
    assert not (tmp_path / "model.run").exists()


def test_more_processes_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    with pytest.raises(UserError, match=r"4 processes on a machine with 2 GPUs: .*--nproc_per_node=2"):
        _choose_device("auto", local_rank=0, local_world_size=4)


@pytest.mark.parametrize("launcher", ["torchrun", "another"])
def test_a_process_that_sees_one_gpu_takes_it_unless_torchrun_shows_it_to_all(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
        with pytest.raises(UserError, match="8 processes on a machine with 1 GPU: "):
            _choose_device("auto", local_rank=3, local_world_size=8)
    else:
        assert _choose_device("auto", local_rank=3, local_world_size=8) == torch.device("cuda", 0)


@pytest.fixture
def poisoned(tmp_path: Path) -> tuple[Path, Path]:
    """Data, and a model that computes NaN for the one row with the word zebra.

    The row is the shortest: since an epoch begins with its longest rows, the first steps are sound.
    """
    with (SAMPLE_NEWS / "train.csv").open(encoding="utf-8") as file:
        rows = [row for row in list(csv.reader(file))[:80] if "zebra" not in " ".join(row).lower()]
    rows.insert(40, ["2", "zebra zebra", ""])
    data = _write_csv(tmp_path / "data", rows)
    (data / "test.csv").write_text('"1","Prices rise","as the season opens"\n')
    tokenizer = load_tokenizer("tiny", load_data(str(data), LoadOptions(seed=42)).train.texts, 48)
    network = NewsClassifier(4, "tiny", vocab_size=len(tokenizer)).network
    with torch.no_grad():
        # Not NaN, with which no training may begin; a sum of so large numbers is infinite.
        network.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("zebra")] = torch.finfo(torch.float32).max
    network.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    return data, tmp_path / "start"


@pytest.mark.slow
def test_nan_loss_names_step_rank_and_row_and_the_checkpoint_stays(
    launch: Callable[..., Any],
    poisoned: tuple[Path, Path],
    checkpoint_state: Callable[..., Any],
    metrics_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    data, model = poisoned
    flags = ("--dataset", data, "--model", model, "--max_train_rows", 0, "--batch_size", 4, "--save_every", 1)
    flags += ("--max_length", 128, "--bad_steps", 0)

    ended = launch(2, *flags, "--output_dir", tmp_path / "model")

    assert ended.process.returncode == 1
    [line] = ended.error_lines
    found = re.match(
        r"error: step (\d+): the loss is nan \(rank [01], training rows \d+\); row \d+ reads \"zebra", line
    )
    assert found, line
    step, run_dir = int(found[1]), tmp_path / "model.run"
    assert [record["step"] for record in metrics_of(run_dir) if not record["skipped"]] == list(range(1, step))
    weights = checkpoint_state(run_dir, step - 1).model
    assert all(weight.isfinite().all() for weight in weights.values())
    assert not (run_dir / "checkpoints" / f"step_{step:08d}").exists()


def test_a_dead_rank_takes_the_others_down_with_a_line(launch: Callable[..., Any], tmp_path: Path) -> None:
    run = launch(2, "--epochs", 500, "--batch_size", 4, "--output_dir", tmp_path / "model", wait=False)
    run.wait_until(lambda: "step 1/" in run.out)
    ranks = run.ranks

    os.kill(ranks[1], signal.SIGKILL)

    assert run.wait(20) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    [line] = run.error_lines
    named = rf"rank 1 \(host \S+, process {ranks[1]}\) is gone: its process has ended; last seen "
    assert re.match(
        rf"error: lost at step \d+: a connection (ended|is silent); {named}.*to resume, rerun the same command", line
    )


def test_a_second_run_into_the_same_folder_is_refused(
    launch: Callable[..., Any], train_here: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--epochs", 500, "--batch_size", 8, "--output_dir", tmp_path / "model")
    first = launch(1, *flags, wait=False)
    first.wait_until(lambda: (tmp_path / "model.run" / "checkpoints" / "step_00000008").exists())

    codes = [train_here(*flags, "--resume", resume) for resume in ("auto", "none")]

    assert codes == [2, 2]
    assert capfd.readouterr().err.count("another run is training into this folder") == 2
    assert first.process.poll() is None
    assert [path.name for path in tmp_path.glob("model*")] == ["model.run"]
