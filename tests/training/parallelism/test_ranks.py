"""One run on 1, 2 or 4 ranks: the same rows, the same losses, the same weights, the same scores."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.rows import SAMPLE_NEWS

GLOBAL_BATCH = 8

# Trains through the public API, then writes down a hash of the weights that each rank ended with.
HASHING_SCRIPT = """
import hashlib, json, sys
from training.config import parse_config
from training.distributed.group import join_ranks
from training.run.trainer import Trainer

config = parse_config(sys.argv[1:])
with join_ranks(config.device) as mine:
    trainer = Trainer(config, mine)
    trainer.fit()
    weights = trainer.context.strategy.parts[0].state_dict()
    digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
    digests = mine.gather(digest)
    if mine.is_first:
        (config.run_dir / "weights.json").write_text(json.dumps(digests))
"""


@pytest.fixture(scope="module")
def run_on(tmp_path_factory: pytest.TempPathFactory, launch_shared: Callable[..., Any]) -> Callable[[int, int], Path]:
    """`run_on(world_size, accumulation)`: the run folder of a finished run, always of the same global batch."""
    finished: dict[tuple[int, int], Path] = {}
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "train_and_hash.py"
    script.write_text(HASHING_SCRIPT)

    def run(world_size: int, accumulation: int = 1) -> Path:
        if (world_size, accumulation) not in finished:
            output = folder / f"on_{world_size}_by_{accumulation}"
            rows = GLOBAL_BATCH // world_size // accumulation
            batch = ("--batch_size", rows, "--gradient_accumulation", accumulation)
            ended = launch_shared(world_size, *batch, "--save_every", 0, "--output_dir", output, script=script)
            assert ended.process.returncode == 0, ended.err
            finished[world_size, accumulation] = output.with_name(output.name + ".run")
        return finished[world_size, accumulation]

    return run


def _losses(records: list[dict[str, Any]]) -> np.ndarray:
    return np.array([record["loss"] for record in records])


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_end_with_equal_weights(run_on: Callable[..., Path], world_size: int) -> None:
    digests = json.loads((run_on(world_size) / "weights.json").read_text())

    assert len(digests) == world_size
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    ("world_size", "accumulation"),
    [
        (2, 1),
        *(pytest.param(*slower, marks=pytest.mark.slow) for slower in ((1, 2), (2, 2), (4, 1), (4, 2))),
    ],
)
def test_loss_curve_with_dropout_is_that_of_one_process(
    run_on: Callable[..., Path], metrics_of: Callable[..., Any], world_size: int, accumulation: int
) -> None:
    alone = metrics_of(run_on(1))

    together = metrics_of(run_on(world_size, accumulation))

    assert [record["step"] for record in together] == list(range(1, 17))
    assert [record["learning_rate"] for record in together] == [record["learning_rate"] for record in alone]
    np.testing.assert_allclose(_losses(together), _losses(alone), rtol=1e-5)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_and_test_scores_are_those_of_one_process(
    run_on: Callable[..., Path], checkpoint_state: Callable[..., Any], metrics_of: Callable[..., Any], world_size: int
) -> None:
    alone = checkpoint_state(run_on(1), 16).model

    together = checkpoint_state(run_on(world_size), 16).model

    for name, weights in alone.items():
        torch.testing.assert_close(
            together[name], weights, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
    [test_alone], [test_together] = metrics_of(run_on(1), "test"), metrics_of(run_on(world_size), "test")
    assert test_together["confusion_matrix"] == test_alone["confusion_matrix"]


@pytest.fixture(scope="module")
def uneven_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample with one test row less: 431 rows divide by neither 2 nor 4."""
    folder = tmp_path_factory.mktemp("uneven")
    for name in ("train.csv", "classes.txt"):
        shutil.copy(SAMPLE_NEWS / name, folder)
    lines = (SAMPLE_NEWS / "test.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "test.csv").write_text("".join(lines[:-1]), encoding="utf-8")
    return folder


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluation_on_several_ranks_equals_one_process(
    run_on: Callable[..., Path], uneven_data: Path, start: Callable[..., Any], world_size: int
) -> None:
    run_dir = run_on(1)
    model = run_dir.with_name(run_dir.name.removesuffix(".run"))
    options = ["-m", "training.evaluate", model, "--dataset", uneven_data, "--device", "cpu", "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]

    alone = json.loads(start([sys.executable, *options], warm=True).out)
    together = json.loads(start([*torchrun, *options], warm=True).out)

    assert alone["rows"] == 431
    # Ranks share the cores: fewer threads each, which add up in another order. All that is counted is exactly equal.
    sums = {name: pytest.approx(alone[name], rel=1e-6) for name in ("loss", "calibration_error")}
    sums["reliability"] = [pytest.approx(row, rel=1e-6) for row in alone["reliability"]]
    assert together == alone | sums
