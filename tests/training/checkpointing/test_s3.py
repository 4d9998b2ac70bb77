"""Real runs that keep their checkpoints in a bucket of a real S3 server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from common.errors import UserError
from tests.training.checkpointing.crash_points import ALONE
from tests.training.checkpointing.s3_server import CREDENTIALS, Line, s3_server
from tests.training.checkpointing.saves import names_in, newest_whole, save, value_in, write_files
from training.checkpointing import check_storage, open_location

pytestmark = pytest.mark.slow
CHECKPOINTS = "s3://bucket/run"
IN_THE_BUCKET = ("--checkpoint_dir", CHECKPOINTS)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of the server."""
    with s3_server() as port:
        yield port


@pytest.fixture
def line(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """A line to the server, where there is an empty bucket; this process and its children find it as on any cloud."""
    line = Line(server)
    for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}).items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    bucket = fsspec.filesystem("s3")
    bucket.mkdir("bucket")
    yield line
    if line.is_cut.is_set():
        line.restore()
    bucket.rm("bucket", recursive=True)


def flags(batch_size: int, output: Path) -> tuple[Any, ...]:
    return ("--batch_size", batch_size, "--save_every", 2, "--output_dir", output)


@pytest.mark.usefixtures("line")
def test_a_bucket_keeps_every_promise_of_a_storage() -> None:
    storage = open_location(CHECKPOINTS)
    check_storage(storage, ALONE)
    older = save(storage, 1, 1.0)
    newer = save(storage, 1, 2.0)
    write_files(storage, 2, 3.0)

    assert newest_whole(storage) == (1, 2.0)
    storage.prune(keep_last=1, keep_every=0, best_step=None)
    assert names_in(CHECKPOINTS) == ["latest", "step_00000001-2"]
    assert storage.find_damage(older) == "manifest.json is missing"
    assert value_in(storage, storage.move_aside(newer)) == 2.0
    assert storage.steps() == {}


@pytest.mark.usefixtures("line")
def test_a_bucket_that_is_not_there_or_not_ours_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^--checkpoint_dir s3://other/run: cannot be written \(.*bucket does not ex"):
        check_storage(open_location("s3://other/run"), ALONE)
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(UserError, match=r"^--checkpoint_dir s3://bucket/run: cannot be written \(.*redentials"):
        check_storage(open_location(CHECKPOINTS), ALONE)


def test_a_run_of_two_ranks_killed_during_an_upload_resumes_on_one(
    line: Line,
    launch: Callable[..., Any],
    metrics_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    line.cut_at = b"PUT /bucket/run/step_00000006/manifest.json"
    run = launch(2, *flags(4, tmp_path / "model"), *IN_THE_BUCKET, wait=False)
    run.wait_until(line.is_cut.is_set)
    run.kill()
    line.restore()
    half = names_in(f"{CHECKPOINTS}/step_00000006")

    again = launch(1, *flags(8, tmp_path / "model"), *IN_THE_BUCKET)

    undisturbed = launch(1, *flags(8, tmp_path / "other"))
    assert half == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.json", "unfinished"]
    assert again.process.returncode == undisturbed.process.returncode == 0, again.err + undisturbed.err
    assert f"Resuming from {CHECKPOINTS}/step_00000004 " in again.out
    losses = [[record["loss"] for record in metrics_of(tmp_path / f"{name}.run")] for name in ("model", "other")]
    assert len(losses[0]) == len(losses[1]) == 16
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert not (tmp_path / "model.run/checkpoints").exists()


def test_a_run_whose_bucket_fails_during_a_save_reports_it_and_continues(
    line: Line, launch: Callable[..., Any], tmp_path: Path
) -> None:
    line.cut_at = b"PUT /bucket/run/step_00000006/__1_0.distcp"

    run = launch(2, *flags(4, tmp_path / "model"), *IN_THE_BUCKET, wait=False)
    run.wait_until(lambda: "Training continues, but the checkpoint" in run.out)
    line.restore()

    assert run.wait() == 0, run.err
    assert f"the checkpoint of step 6 could not be written to {CHECKPOINTS} (rank " in run.out
    assert "Traceback" not in run.err
    storage = open_location(CHECKPOINTS)
    assert max(storage.steps()) == 16
    assert all(storage.find_damage(path) is None for path in storage.steps().values())


def test_a_run_that_cannot_reach_its_bucket_does_not_start(
    line: Line, launch: Callable[..., Any], tmp_path: Path
) -> None:
    line.cut_at = b" "

    run = launch(1, *flags(8, tmp_path / "model"), *IN_THE_BUCKET)

    assert run.process.returncode == 2
    assert len(run.err.splitlines()) == 1
    assert f"--checkpoint_dir {CHECKPOINTS}: cannot be written (" in run.err
    assert not (tmp_path / "model.run").exists()
