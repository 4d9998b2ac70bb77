"""CIFAR-10 from a stand-in for the hub on this machine: real client libraries, own HTTP server."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from learn.by_hand.cifar10_batches import CLASSES
from tests.http_servers import served
from tests.training.test_hub import Hub

CARD = """---
dataset_info:
  config_name: plain_text
  features:
  - name: img
    dtype: image
  - name: label
    dtype:
      class_label:
        names:
{names}
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
  - split: test
    path: plain_text/test-*
  default: true
---
"""
LOAD = """
import json
from learn.by_hand.cifar10 import load_images
data = load_images("cifar10")
print(json.dumps({
    "classes": data.classes,
    "labels": [data.train.labels.tolist(), data.test.labels.tolist()],
    "shape": data.train.images.shape,
    "type": str(data.train.images.dtype),
    "corners": data.train.images[:, 0, 0].tolist(),
}))
"""
# The hub's library tries again for a while before it gives up; nothing here comes back in that time.
LOAD_IMPATIENTLY = """
import time
time.sleep = lambda seconds: None
from learn.by_hand.cifar10 import load_images
from common.errors import run_command
run_command(lambda: load_images("cifar10") and None)
"""
COLOURS = [(3 * row, 2 * row, 200 - row) for row in range(12)]


def png(colour: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(buffer, "PNG")
    return buffer.getvalue()


def write_repository(folder: Path) -> None:
    (folder / "plain_text").mkdir(parents=True)
    names = "\n".join(f"          '{number}': {name}" for number, name in enumerate(CLASSES))
    (folder / "README.md").write_text(CARD.format(names=names))
    for split, rows in (("train", 12), ("test", 4)):
        images = [{"bytes": png(colour), "path": None} for colour in COLOURS[:rows]]
        table = pyarrow.table({"img": images, "label": [row % 10 for row in range(rows)]})
        pyarrow.parquet.write_table(table, folder / "plain_text" / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of a hub that has CIFAR-10's first rows."""
    write_repository(tmp_path / "hub/datasets/uoft-cs/cifar10")
    handler = type("ThisHub", (Hub,), {"root": tmp_path / "hub", "asked": []})
    with served(handler) as address:
        yield address


def load(code: str, address: str, home: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**inherited, "HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **settings}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=home.parent, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_cifar10_is_downloaded_once_and_then_read_without_the_hub(hub: str, tmp_path: Path) -> None:
    home = tmp_path / "home"

    first = load(LOAD, hub, home)
    again = load(LOAD, "http://127.0.0.1:1", home, HF_HUB_OFFLINE="1")

    assert first.returncode == 0, first.stderr
    assert again.returncode == 0, again.stderr
    found = json.loads(first.stdout.splitlines()[-1])
    assert found == json.loads(again.stdout.splitlines()[-1])
    assert found["classes"] == CLASSES
    assert found["labels"] == [[row % 10 for row in range(12)], [0, 1, 2, 3]]
    assert (found["shape"], found["type"]) == ([12, 32, 32, 3], "uint8")
    assert np.array_equal(found["corners"], COLOURS)


@pytest.mark.slow
def test_a_hub_out_of_reach_gives_one_line_that_says_how_to_go_on(tmp_path: Path) -> None:
    run = load(LOAD_IMPATIENTLY, "http://127.0.0.1:1", tmp_path / "home")

    assert run.returncode == 2
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith("error: --data cifar10: the hub could not be read (")
    assert "without a network use --data shapes" in line
