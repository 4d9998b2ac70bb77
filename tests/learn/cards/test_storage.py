"""What a card saves stands under its pipeline, node and rank, and is read back equal."""

from pathlib import Path

import torch

from learn.cards.storage import Storage


def test_values_and_tensors_come_back_equal_under_their_key(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "iris", "forward", rank=1)
    tensors = {
        "whole": torch.arange(6.0).reshape(2, 3),
        "view": torch.arange(6).reshape(2, 3).T,
        "none": torch.empty(0),
    }
    key = storage.save("batch", {"row": [3, 1]})
    storage.save_tensors("batch", tensors)

    assert key == "forward/rank_1/batch"
    assert Storage(tmp_path / "iris", "backward").load(key) == {"row": [3, 1]}
    assert sorted(path.name for path in (tmp_path / "iris/forward/rank_1").iterdir()) == [
        "batch.json",
        "batch.safetensors",
    ]
    found = storage.tensors(key)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_pass_that_nobody_will_look_at_writes_nothing(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "iris", "forward", rank=0, recording=False)

    assert storage.save("batch", 1) == storage.save_tensors("batch", {"one": torch.ones(1)}) == "forward/rank_0/batch"
    assert not list(tmp_path.iterdir())


def test_the_first_pass_stays_when_a_later_one_is_saved(tmp_path: Path) -> None:
    ranks = [Storage(tmp_path, "step", rank) for rank in range(3)]
    for rank in ranks:
        rank.save("loss", [rank.rank, 1])
    node = Storage(tmp_path, "step")
    node.keep_first_pass()
    for rank in ranks:
        rank.save("loss", [rank.rank, 2])

    assert node.of_ranks("loss") == [[0, 2], [1, 2], [2, 2]]
    assert node.first_pass().of_ranks("loss") == [[0, 1], [1, 1], [2, 1]]
    assert ranks[1].first_pass().load(ranks[1].first_pass().key("loss")) == [1, 1]


def test_tensors_come_in_the_order_of_their_names_on_every_rank(tmp_path: Path) -> None:
    storage = Storage(tmp_path, "save", rank=3)
    names = [f"{layer}.{kind}" for layer in range(4) for kind in ("weight", "bias")]
    # As FSDP leaves them on the last rank, some empty; and of two types, by which a file sorts first.
    types = (torch.float, torch.long)
    tensors = {name: torch.zeros(number % 2, dtype=types[number % 3 % 2]) for number, name in enumerate(names)}
    key = storage.save_tensors("model", tensors)

    assert list(storage.tensors(key)) == sorted(names)
