"""Tables are read from anywhere, and what is wrong with one is named by its line; the test rows stay unseen."""

import socket
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from sklearn.datasets import load_iris

from common.errors import UserError
from learn.cards.data import LoadDataset, PrepareData, ShardData, _ordered, global_batches, stratified_split
from learn.cards.storage import Storage
from learn.cards.tables import read_table
from tests.http_servers import served_folder

FLOWERS = "width,kind,height\n" + "".join(f"{i},{'rose' if i % 2 else 'tulip'},{i / 2}\n" for i in range(20))


def load(folder: Path, source: str | Path, target: str = "kind") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    card, storage = LoadDataset(), Storage(folder, "load")
    config = card.config_schema(source_url=str(source), target_column=target)
    dataset = card.execute(config, {}, storage)["dataset"]
    return dataset, storage.tensors(dataset["tensors"])


def written(folder: Path, text: str) -> Path:
    path = folder / "flowers.csv"
    path.write_text(text)
    return path


def prepared(folder: Path, **config: Any) -> tuple[dict[str, Any], Storage]:
    dataset, _ = load(folder, written(folder, FLOWERS))
    card, storage = PrepareData(), Storage(folder, "prepare")
    return card.execute(card.config_schema(**config), {"dataset": dataset}, storage)["prepared_data"], storage


def test_iris_comes_without_a_network_and_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.datasets"):  # installed here for other tests
        monkeypatch.setitem(sys.modules, name, None)
    dataset, tensors = load(tmp_path, "iris", "species")

    assert dataset["classes"] == ["setosa", "versicolor", "virginica"]
    assert tensors["features"].shape == (150, 4)
    assert tensors["labels"].bincount().tolist() == [50, 50, 50]


def test_iris_has_the_rows_of_scikit_learn(tmp_path: Path) -> None:
    iris = load_iris()
    dataset, tensors = load(tmp_path, "iris", "species")

    assert dataset["features"] == iris.feature_names
    assert torch.equal(tensors["features"], torch.tensor(iris.data, dtype=torch.float32))
    assert tensors["labels"].tolist() == iris.target.tolist()


@pytest.mark.parametrize("target", ["kind", "1"])
def test_a_column_is_named_or_numbered(tmp_path: Path, target: str) -> None:
    dataset, tensors = load(tmp_path, written(tmp_path, FLOWERS), target)

    assert (dataset["features"], dataset["classes"]) == (["width", "height"], ["rose", "tulip"])
    assert tensors["features"][3].tolist() == [3.0, 1.5]
    assert tensors["labels"][:2].tolist() == [1, 0]


def test_a_file_without_a_header_loses_no_row(tmp_path: Path) -> None:
    dataset, tensors = load(tmp_path, written(tmp_path, "5.1,3.5,setosa\n\n4.9,3,virginica\n"), "2")

    assert dataset["features"] == ["column 0", "column 1"]
    assert tensors["labels"].tolist() == [0, 1]


def test_classes_that_are_numbers_stand_in_the_order_of_numbers(tmp_path: Path) -> None:
    dataset, _ = load(tmp_path, written(tmp_path, "size,kind\n1,10\n2,9\n3,10\n"))

    assert dataset["classes"] == ["9", "10"]


def test_the_order_of_classes_is_the_same_every_time() -> None:
    spellings = ["1", "+1", "01", "1.0", "1e0", "nan", "2"]
    assert _ordered({"2", *spellings[:5]}) == ["+1", "01", "1", "1.0", "1e0", "2"]
    assert _ordered({*spellings}) == sorted(spellings)


def test_an_address_is_read_like_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, FLOWERS)
    of_file, _ = load(tmp_path, path)

    assert load(tmp_path, path.as_uri())[0] == of_file
    with served_folder(tmp_path) as address:
        assert load(tmp_path, f"{address}/{path.name}")[0] == of_file
        with pytest.raises(UserError, match=r"missing.csv: cannot be read \(HTTP Error 404"):
            load(tmp_path, f"{address}/missing.csv")


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("width,kind\n1,a\nwide,b\n", "kind", "flowers.csv line 3, column width: 'wide' is not a finite number"),
        ("width,kind\n1,a\nnan,b\n", "kind", "line 3, column width: 'nan' is not a finite number"),
        ("width,kind\n1,a\n1e39,b\n", "kind", "line 3, column width: '1e39' is not a finite number"),
        ("width,kind\n1,a\n2\n", "kind", "line 3: 1 cells, but the first line has 2"),
        ("width,kind\n1,a\n2, \n", "kind", "line 3: column kind is empty"),
        ("width,kind\n1,a\n2,a\n", "kind", "target_column kind: 1 different values in 2 rows"),
        ("width,kind\n1,a\n2,b\n", "sort", "target_column 'sort': .* has the columns width, kind"),
        ("width,kind\n1,a\n2,b\n", "2", "target_column '2'"),
        ("kind\na\nb\n", "kind", "has only one column"),
        ("width;kind\n1;a\n2;b\n", "kind", "has only one column; .* separated by commas"),
        ("width,kind\n1,a\x0cb\n2,c\u2028d\nwide,e\n", "kind", "line 4, column width: 'wide' is not a finite number"),
        ("width,kind\n", "kind", "holds no rows"),
        ("", "kind", "is empty"),
        ('width,kind\n1,"a\n', "kind", "not valid CSV"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path: Path, text: str, target: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, written(tmp_path, text), target)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.csv: cannot be read"):
        load(tmp_path, tmp_path / "none.csv")
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\n")
    with pytest.raises(UserError, match=r"image.csv line 1: not UTF-8 text"):
        load(tmp_path, tmp_path / "image.csv")


def test_a_file_too_large_to_look_at_is_refused() -> None:
    with pytest.raises(UserError, match="source_url /dev/zero: has more than 1 MB"):
        read_table("/dev/zero", max_bytes=10**6)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nw"])
def test_a_server_that_stalls_is_given_up(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = Event()
        Thread(target=trickle, args=(server, sent, done), daemon=True).start()
        with pytest.raises(UserError, match=r"cannot be read \(not complete within 0.1 s\)"):
            read_table(f"http://127.0.0.1:{server.getsockname()[1]}/rows.csv", seconds=0.1)
        done.set()


def trickle(server: socket.socket, sent: bytes, done: Event) -> None:
    """Answer at once, and then a byte now and then: no single read waits for long."""
    connection, _ = server.accept()
    with connection, suppress(OSError):
        connection.sendall(sent)
        while not done.wait(0.02):
            connection.sendall(b"1")


def test_the_split_keeps_the_shares_of_the_classes_and_leaves_no_row_out() -> None:
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 2)
    train, test = stratified_split(labels, ["a", "b", "c"], 0.25, seed=1)

    assert sorted(torch.cat([train, test]).tolist()) == list(range(62))
    assert labels[test].bincount().tolist() == [10, 5, 1]
    assert not torch.equal(test, stratified_split(labels, ["a", "b", "c"], 0.25, seed=2)[1])
    with pytest.raises(UserError, match="class c: has only one row"):
        stratified_split(labels[:-1], ["a", "b", "c"], 0.25, seed=1)


def test_the_test_rows_have_no_say_in_the_scale(tmp_path: Path) -> None:
    facts, storage = prepared(tmp_path, test_ratio=0.5)
    tensors = storage.tensors(facts["tensors"])

    assert torch.allclose(tensors["train_features"].mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(tensors["train_features"].std(0, unbiased=False), torch.ones(2))
    raw = load(tmp_path, written(tmp_path, FLOWERS))[1]["features"]
    restored = tensors["test_features"] * tensors["deviation"] + tensors["mean"]
    assert torch.allclose(restored, raw[tensors["test_rows"]], atol=1e-5)


def test_a_feature_that_never_changes_stays_finite(tmp_path: Path) -> None:
    dataset, _ = load(tmp_path, written(tmp_path, "width,same,kind\n" + "1,7,a\n2,7,b\n" * 4))
    card, storage = PrepareData(), Storage(tmp_path, "prepare")
    facts = card.execute(card.config_schema(), {"dataset": dataset}, storage)["prepared_data"]

    assert storage.tensors(facts["tensors"])["train_features"][:, 1].tolist() == [0.0] * facts["train_rows"]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_shards_are_the_training_rows_each_once(tmp_path: Path, num_workers: int) -> None:
    facts, storage = prepared(tmp_path, batch_size=3)
    card, own = ShardData(), Storage(tmp_path, "shard")
    card.execute(card.config_schema(num_workers=num_workers), {"prepared_data": facts}, own)
    shards = own.tensors("shard/shards").values()

    assert len(shards) == num_workers
    assert sorted(torch.cat([*shards]).tolist()) == storage.tensors(facts["tensors"])["train_rows"].tolist()


def test_every_epoch_has_an_order_of_its_own_of_all_rows(tmp_path: Path) -> None:
    facts, _ = prepared(tmp_path, batch_size=3)
    orders = [torch.cat(global_batches(facts, epoch)).tolist() for epoch in (0, 1)]

    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(facts["train_rows"]))


def test_more_ranks_than_rows_of_a_batch_are_refused(tmp_path: Path) -> None:
    facts, _ = prepared(tmp_path, batch_size=3)
    card = ShardData()

    with pytest.raises(UserError, match=r"num_workers 4: more ranks than rows in a global batch \(3\)"):
        card.execute(card.config_schema(num_workers=4), {"prepared_data": facts}, Storage(tmp_path, "shard"))
