"""Rows with a doubtful label: found by the run itself, listed, left out or weighed less."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.parallelism.saved_states import WholeState
from training.data.tokenized import TokenizedRows
from training.distributed.ranks import Ranks
from training.run.suspects import TENSOR, Suspects, ask_words
from training.run.utilization import gpu_utilization
from training.tasks import Classification

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
WRONG = (3, 17, 40)
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")


@pytest.fixture
def mislabelled(tmp_path: Path) -> Path:
    """A folder of data that is easy to learn, in which three rows have the wrong label."""
    folder = tmp_path / "mislabelled"
    folder.mkdir()
    for split, count in (("train", 64), ("validation", 8), ("test", 8)):
        rows = []
        for i in range(count):
            is_storm = i % 2 == 0
            label = "storm" if is_storm != (split == "train" and i in WRONG) else "calm"
            rows.append(f"{'a storm breaks' if is_storm else 'the sea sleeps'} {i};{label}")
        (folder / f"{split}.csv").write_text("text;label\n" + "\n".join(rows))
    return folder


FLAGS = ("--epochs", 4, "--learning_rate", "5e-3", "--save_every", 5, "--keep_last", 9)


def _listed(run: Path) -> list[dict[str, str]]:
    with (run / "suspects.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _doubts_of_flagged(run: Path) -> dict[str, float]:
    return {row["row"]: float(row["doubt"]) for row in _listed(run) if row["flagged"] == "yes"}


def _losses(metrics_of: Metrics, run: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(run)]


def test_a_run_lists_the_rows_with_a_wrong_label_first_and_says_so_in_its_report(
    mislabelled: Path, train_here: Train, tmp_path: Path
) -> None:
    flags = ("--dataset", mislabelled, *FLAGS, "--suspects", "list", "--batch_size", 8)
    assert train_here(*flags, "--output_dir", tmp_path / "model") == 0

    listed = _listed(tmp_path / "model.run")
    assert {int(row["row"]) for row in listed[:3]} == set(WRONG)
    assert {row["flagged"] for row in listed[:3]} == {"yes"}
    assert {(row["label"], row["proposed"]) for row in listed[:3]} == {("storm", "calm"), ("calm", "storm")}
    assert listed[0]["text"] in (tmp_path / "model.run" / "report.html").read_text()


def test_looking_for_suspects_changes_no_loss(
    mislabelled: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    for name, asked in (("none", ()), ("list", ("--suspects", "list"))):
        flags = ("--dataset", mislabelled, "--batch_size", 8, *asked)
        assert train_here(*flags, "--output_dir", tmp_path / name) == 0

    assert _losses(metrics_of, tmp_path / "none.run") == _losses(metrics_of, tmp_path / "list.run")
    assert not (tmp_path / "none.run" / "suspects.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("action", ["drop", "reweight"])
def test_suspects_are_the_same_on_two_ranks_and_after_a_resume(
    action: str,
    mislabelled: Path,
    train_here: Train,
    launch: Callable[..., Any],
    metrics_of: Metrics,
    tmp_path: Path,
) -> None:
    flags = ("--dataset", mislabelled, *FLAGS, "--suspects", action)
    assert train_here(*flags, "--batch_size", 8, "--output_dir", tmp_path / "one") == 0
    one = _losses(metrics_of, tmp_path / "one.run")
    listed = _listed(tmp_path / "one.run")

    # Within the third epoch, when rows are already left out.
    shutil.copytree(tmp_path / "one.run", tmp_path / "resumed.run")
    checkpoint = tmp_path / "resumed.run" / "checkpoints" / "step_00000020"
    assert train_here(*flags, "--batch_size", 8, "--output_dir", tmp_path / "resumed", "--resume", checkpoint) == 0
    two = launch(2, *flags, "--batch_size", 4, "--output_dir", tmp_path / "two")

    assert two.process.returncode == 0, two.err
    assert _losses(metrics_of, tmp_path / "resumed.run") == one
    assert _listed(tmp_path / "resumed.run") == listed
    assert _losses(metrics_of, tmp_path / "two.run") == pytest.approx(one, rel=1e-4)
    # Sums over ranks differ in their last bits, so rows with almost the same doubt may change places.
    assert _doubts_of_flagged(tmp_path / "two.run") == pytest.approx(_doubts_of_flagged(tmp_path / "one.run"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--strategy", "zero3", "--batch_size", 4),
        ("--strategy", "tp", "--batch_size", 8),
        ("--strategy", "pp", "--batch_size", 4, "--gradient_accumulation", 2),
    ],
    ids=lambda flags: flags[1],
)
def test_suspects_are_the_same_under_every_strategy(
    flags: tuple[object, ...],
    mislabelled: Path,
    train_here: Train,
    launch: Callable[..., Any],
    metrics_of: Metrics,
    tmp_path: Path,
) -> None:
    drop = ("--dataset", mislabelled, *FLAGS, "--suspects", "drop")
    assert train_here(*drop, "--batch_size", 8, "--output_dir", tmp_path / "one") == 0
    two = launch(2, *drop, *flags, "--output_dir", tmp_path / "two")
    assert two.process.returncode == 0, two.err
    # A checkpoint of two ranks, resumed on one.
    (tmp_path / "two.run").rename(tmp_path / "resumed.run")
    checkpoint = tmp_path / "resumed.run" / "checkpoints" / "step_00000020"
    resume = ("--resume", checkpoint, "--output_dir", tmp_path / "resumed")
    assert train_here(*drop, "--batch_size", 8, *resume) == 0

    assert _losses(metrics_of, tmp_path / "resumed.run") == pytest.approx(
        _losses(metrics_of, tmp_path / "one.run"), rel=1e-3
    )
    assert _doubts_of_flagged(tmp_path / "resumed.run") == pytest.approx(
        _doubts_of_flagged(tmp_path / "one.run"), rel=1e-2
    )


def test_the_accuracy_of_an_epoch_is_that_of_its_steps(
    mislabelled: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    assert train_here("--dataset", mislabelled, "--batch_size", 12, "--output_dir", tmp_path / "model") == 0

    steps = metrics_of(tmp_path / "model.run")
    for epoch in metrics_of(tmp_path / "model.run", "epoch"):
        right = [(step["accuracy"] * step["rows"], step["rows"]) for step in steps if step["epoch"] == epoch["epoch"]]
        assert epoch["train_accuracy"] == pytest.approx(sum(r for r, _ in right) / sum(n for _, n in right))


def test_a_step_checks_each_label() -> None:
    scores = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, -1.0]])

    checks = Classification(["a", "b", "c"]).label_logprobs(scores, torch.tensor([0, 2]))

    assert checks[:, 0].tolist() == pytest.approx(
        [float(scores[0].log_softmax(0)[0]), float(scores[1].log_softmax(0)[2])]
    )
    assert checks[:, 1].tolist() == [2, 1]
    assert checks[:, 2].tolist() == [1, 0]


def test_what_is_known_of_the_rows_survives_a_checkpoint() -> None:
    index, labels = np.array([2, 5, 9]), np.array([0, 1, 1])
    words = np.log([[0.9, 0.1], [0.1, 0.9], [0.8, 0.2]])
    before, after = (Suspects(index, labels, "drop", words) for _ in range(2))
    before.add(1, np.array([5, -1, 2]), np.array([[-0.1, 0, 1], [0, 0, 0], [-0.05, 1, 1]]))
    before.add(2, np.array([9]), np.array([[-4.0, 0, 0]]))
    before.merge(ALONE)
    before.end_epoch()
    after.read(WholeState({TENSOR: before.tensor.clone()}, {}))

    for suspects in (before, after):
        assert suspects.is_left(np.array([9, 2, 5])).tolist() == [False, True, True]
        [row] = suspects.ranking()
        assert (row.row, row.label, row.proposed, row.is_flagged) == (9, 1, 0, True)


def test_a_row_is_called_wrong_only_if_steps_and_words_agree() -> None:
    index, labels = np.array([0, 1, 2, 3]), np.array([0, 1, 1, 1])
    suspects = Suspects(index, labels, "list", np.log([[0.9, 0.1], [0.1, 0.9], [0.8, 0.2], [0.2, 0.8]]))
    suspects.add(1, index, np.array([[-0.1, 1, 1], [-0.1, 0, 1], [-4.0, 0, 0], [-4.0, 0, 0]]))
    suspects.merge(ALONE)

    assert [(row.row, row.is_flagged) for row in suspects.ranking()] == [(2, True), (3, False)]


def test_a_row_of_a_label_that_is_never_doubted_comes_before_one_of_a_label_that_often_is() -> None:
    # Half of the rows of label 1 are improbable, and one row of label 0, a little less.
    index, labels = np.arange(400), np.repeat([0, 1], 200)
    checks = np.column_stack([np.full(400, -0.01), 1 - labels, np.ones(400)])
    checks[200:300, 0], checks[7, 0] = -4.0, -3.0
    suspects = Suspects(index, labels, "list", np.log(np.full((400, 2), 0.5)))
    suspects.add(1, index, checks)
    suspects.merge(ALONE)

    ranking = suspects.ranking()

    assert [row.row for row in ranking[:2]] == [7, 200]
    assert ranking[0].doubt < ranking[1].doubt


def _rows_of(words: list[list[int]], labels: list[int]) -> TokenizedRows:
    return TokenizedRows(np.concatenate(words), np.cumsum([0, *map(len, words)]), np.array(labels), 0)


def test_the_words_of_a_row_are_judged_by_other_rows() -> None:
    # Rows of label 0 have token 5, those of label 1 token 6; token 9 is only in the last row, whose label is wrong.
    words = [[1, 5], [1, 6]] * 20 + [[1, 5, 9]]

    said, if_relabelled = (
        ask_words(_rows_of(words, [0, 1] * 20 + [last]), np.arange(41), num_labels=2) for last in (1, 0)
    )

    assert np.allclose(np.exp(said).sum(axis=1), 1)
    assert said.argmax(axis=1).tolist() == [0, 1] * 20 + [0]
    assert said[-1] == pytest.approx(if_relabelled[-1])


def test_neighbouring_words_are_judged_together() -> None:
    # Tokens 5 and 6 are in every row; only their order tells the labels apart.
    words = [[5, 6, 7], [6, 5, 7]] * 20

    said = ask_words(_rows_of(words, [0, 1] * 20), np.arange(40), num_labels=2)

    assert said.argmax(axis=1).tolist() == [0, 1] * 20


def test_how_busy_a_gpu_is_is_logged_only_if_it_can_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_utilization(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 37)
    assert gpu_utilization(torch.device("cuda")) == 0.37
    monkeypatch.delattr(torch.cuda, "utilization")
    assert gpu_utilization(torch.device("cuda")) is None
