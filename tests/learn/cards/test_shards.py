"""Which rank a row goes to is said in one place: the shard card, the ranks, and the page agree."""

from pathlib import Path
from typing import Any

import pytest
import torch

from learn.cards.model import build_mlp
from learn.cards.picture import card_picture
from learn.cards.runner import Runner
from learn.cards.storage import Storage
from learn.cards.training_step import Forward
from tests.learn.cards.small_runs import small_pipeline

WORKERS = 3
BATCHES = [50, 50, 20]


def sharded(folder: Path) -> Runner:
    with Runner(small_pipeline(folder, WORKERS, batch_size=50), folder) as runner:
        for _ in range(3):
            runner.step()
    return runner


def forward_epochs(runner: Runner, rank: int, epochs: int) -> list[list[int]]:
    """The rows that a rank takes of every global batch."""
    storage = Storage(runner.storage.folder, "forward", rank, live={"model": build_mlp([4, 8, 3])})
    group = {"rank": rank, "world_size": WORKERS, "device": "cpu"}
    inputs = runner.outputs["shard"][0] | {"process_group": group}
    rows = []
    for _ in range(epochs * len(BATCHES)):
        Forward().execute(Forward.config_schema(), inputs, storage)
        rows.append(storage.load(f"forward/rank_{rank}/batch")["row"])
    return rows


def test_the_page_the_shards_and_the_ranks_agree_on_every_row_of_an_epoch(tmp_path: Path) -> None:
    runner = sharded(tmp_path)
    [picture] = card_picture(runner, runner.pipeline.node("shard"))
    batches, owners = picture["shards"]["batches"], picture["shards"]["owners"]
    shards = runner.storage.tensors("shard/shards")

    assert [len(batch) for batch in batches] == [len(ranks) for ranks in owners] == BATCHES
    for rank in range(WORKERS):
        seen = forward_epochs(runner, rank, 1)
        drawn = [
            [row for row, owner in zip(batch, ranks, strict=True) if owner == rank]
            for batch, ranks in zip(batches, owners, strict=True)
        ]
        assert seen == drawn
        assert [row for rows in seen for row in rows] == shards[f"rank_{rank}"].tolist()


def test_an_epoch_is_shuffled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = []
    original = torch.randperm

    def counted(count: int, **options: Any) -> torch.Tensor:
        shuffled.append(count)
        return original(count, **options)

    runner = sharded(tmp_path)
    monkeypatch.setattr(torch, "randperm", counted)
    forward_epochs(runner, 0, epochs=2)
    assert shuffled == [120, 120]

    sharded(tmp_path)
    assert shuffled.count(120) == 3
