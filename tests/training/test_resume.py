"""A run that was killed, stopped or damaged goes on as if nothing had been."""

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from common.model_folder import read_saved_model
from tests.processes import made_once
from training.data.dataset import load_data
from training.other_names import FORMER_FIELDS

LAST_STEP = 16
STEPS = list(range(1, LAST_STEP + 1))
TENSORS = "__0_0.distcp"  # of rank 0


def _flags(world_size: int, output: Path) -> tuple[str | Path | int, ...]:
    return ("--batch_size", 8 // world_size, "--save_every", 2, "--keep_last", 3, "--output_dir", output)


def _weights(output: Path) -> str:
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


def _checkpoint(output: Path, step: int) -> Path:
    return output.with_name(output.name + ".run") / "checkpoints" / f"step_{step:08d}"


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory, launch_shared: Callable[..., Any]) -> Callable[[int], Path]:
    """`never_stopped(world_size)`: the model folder of a run that was left alone."""

    def run(world_size: int) -> Path:
        def train(folder: Path) -> None:
            ended = launch_shared(world_size, *_flags(world_size, folder / f"on_{world_size}"))
            assert ended.process.returncode == 0, ended.err

        return made_once(tmp_path_factory, f"never_stopped_on_{world_size}", train) / f"on_{world_size}"

    return run


@pytest.fixture
def copied(never_stopped: Callable[[int], Path], tmp_path: Path) -> Path:
    """A finished run of one process, without its model: checkpoints 12, 14 and 16, the best."""
    shutil.copytree(never_stopped(1).with_name("on_1.run"), tmp_path / "model.run")
    return tmp_path / "model"


def _kill_after(run: Any, output: Path, step: int) -> None:
    run.wait_until(lambda: any(_checkpoint(output, later).exists() for later in range(step, LAST_STEP)))
    run.kill()
    assert not _checkpoint(output, LAST_STEP).exists()


@pytest.mark.parametrize("world_size", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_a_killed_run_ends_with_the_weights_of_one_never_killed(
    launch: Callable[..., Any],
    never_stopped: Callable[[int], Path],
    checkpoint_state: Callable[..., Any],
    metrics_of: Callable[..., Any],
    tmp_path: Path,
    world_size: int,
) -> None:
    output = tmp_path / "model"
    run = launch(world_size, *_flags(world_size, output), wait=False)
    _kill_after(run, output, step=4)

    again = launch(world_size, *_flags(world_size, output))

    assert again.process.returncode == 0, again.err
    assert "Resuming from" in again.out
    assert _weights(output) == _weights(never_stopped(world_size))
    found, expected = (
        checkpoint_state(folder.with_name(folder.name + ".run"), LAST_STEP).tensors
        for folder in (output, never_stopped(world_size))
    )
    assert any(name.endswith("/exp_avg_sq") for name in expected)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert [record["step"] for record in metrics_of(tmp_path / "model.run")] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_killed_at_random_moments_loses_nothing(
    launch: Callable[..., Any],
    never_stopped: Callable[[int], Path],
    metrics_of: Callable[..., Any],
    tmp_path: Path,
    world_size: int,
) -> None:
    output, moments = tmp_path / "model", random.Random(7)
    for _ in range(4):
        run = launch(world_size, *_flags(world_size, output), wait=False)
        looks, most = iter(range(10**9)), moments.randrange(1500)
        # Anywhere: in the imports, in a step, in a save. A run that ends first is fine, too.
        run.wait_until(lambda looks=looks, most=most, run=run: next(looks) > most or run.process.poll() is not None)
        run.kill()

    ended = launch(world_size, *_flags(world_size, output))

    assert ended.process.returncode == 0, ended.err
    assert _weights(output) == _weights(never_stopped(world_size))
    assert [record["step"] for record in metrics_of(tmp_path / "model.run")] == STEPS


def test_sigterm_stops_a_process_with_all_saved_and_it_resumes(
    launch: Callable[..., Any],
    train_here: Callable[..., int],
    never_stopped: Callable[[int], Path],
    metrics_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    output = tmp_path / "model"
    run = launch(1, *_flags(1, output), wait=False)
    run.wait_until(lambda: "step 2/" in run.out)

    run.process.terminate()

    assert run.wait() == 0
    stopped_at = metrics_of(tmp_path / "model.run")[-1]["step"]
    assert stopped_at < LAST_STEP
    assert f"Stopped at step {stopped_at}; everything is saved. To resume, rerun the same command." in run.out
    assert _checkpoint(output, stopped_at).exists()
    assert run.err == ""
    assert train_here(*_flags(1, output)) == 0
    assert _weights(output) == _weights(never_stopped(1))
    assert [record["step"] for record in metrics_of(tmp_path / "model.run")] == STEPS


@pytest.fixture(scope="module")
def stopped_on_two(tmp_path_factory: pytest.TempPathFactory, launch_shared: Callable[..., Any]) -> tuple[Path, Any]:
    """The output folder of a run on two ranks that SIGTERM to the second of them stopped, and that run."""
    output = tmp_path_factory.mktemp("stopped") / "model"
    run = launch_shared(2, *_flags(2, output), wait=False)
    run.wait_until(lambda: "step 2/" in run.out)
    os.kill(run.ranks[1], signal.SIGTERM)
    run.wait()
    return output, run


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_both_with_all_saved(stopped_on_two: tuple[Path, Any]) -> None:
    output, run = stopped_on_two

    assert run.process.returncode == 0, run.err
    assert "everything is saved. To resume, rerun the same command." in run.out
    assert not (output / "model.safetensors").exists()
    assert list(_checkpoint(output, 0).parent.glob("step_*"))


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_of_two_ranks_resumes_on_another_number_and_repeats_no_row(
    stopped_on_two: tuple[Path, Any],
    never_stopped: Callable[[int], Path],
    launch: Callable[..., Any],
    train_here: Callable[..., int],
    metrics_of: Callable[..., Any],
    tmp_path: Path,
    world_size: int,
) -> None:
    output = tmp_path / "model"
    shutil.copytree(stopped_on_two[0].with_name("model.run"), tmp_path / "model.run")

    flags = (*_flags(2, output), "--batch_size", 8 // world_size)
    code = train_here(*flags) if world_size == 1 else launch(world_size, *flags).process.returncode

    assert code == 0
    went_on, reference = (
        metrics_of(folder) for folder in (tmp_path / "model.run", never_stopped(1).with_name("on_1.run"))
    )
    assert [record["step"] for record in went_on] == STEPS
    np.testing.assert_allclose(
        [record["loss"] for record in went_on], [record["loss"] for record in reference], rtol=1e-4
    )


def _flip_a_bit(checkpoint: Path) -> str:
    data = bytearray((checkpoint / TENSORS).read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / TENSORS).write_bytes(data)
    return f"{TENSORS} does not match its SHA-256"


def _truncate(checkpoint: Path) -> str:
    size = (checkpoint / TENSORS).stat().st_size
    os.truncate(checkpoint / TENSORS, size - 1000)
    return f"{TENSORS} has {size - 1000:,} bytes, not {size:,}"


def test_damaged_and_unfinished_checkpoints_are_passed_over(
    copied: Path,
    train_here: Callable[..., int],
    never_stopped: Callable[[int], Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    newest, before = _checkpoint(copied, LAST_STEP), _checkpoint(copied, 14)
    unfinished = newest.with_name(f".{newest.name}.tmp")
    newest.rename(unfinished)
    (unfinished / "manifest.json").unlink()
    why = _flip_a_bit(before)

    code = train_here(*_flags(1, copied))

    out = capfd.readouterr().out
    assert code == 0
    assert f"Skipping the damaged checkpoint {before}: {why}" in out
    assert f"Resuming from {_checkpoint(copied, 12)}" in out
    assert not unfinished.exists()
    assert _weights(copied) == _weights(never_stopped(1))


def test_a_run_with_no_whole_checkpoint_is_refused_and_left_as_it_is(
    copied: Path, train_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = sorted(_checkpoint(copied, 0).parent.glob("step_*"))
    for checkpoint in checkpoints:
        _truncate(checkpoint)

    code = train_here(*_flags(1, copied))

    printed = capfd.readouterr()
    assert code == 2
    assert printed.err.startswith(f"error: --resume auto: none of the {len(checkpoints)} checkpoints in")
    assert "--resume none" in printed.err
    assert all(f"Skipping the damaged checkpoint {checkpoint}:" in printed.out for checkpoint in checkpoints)
    assert sorted(_checkpoint(copied, 0).parent.glob("step_*")) == checkpoints


@pytest.mark.slow
def test_a_best_epoch_with_a_damaged_checkpoint_is_passed_over_in_the_final_test(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A metric by which the first epoch is the best, because answers become surer.
    (tmp_path / "doubts.py").write_text("def doubt(scores, labels):\n    return {'doubt': -abs(scores).mean()}\n")
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "model"
    flags = (*_flags(1, output), "--metric", "doubts:doubt", "--best_metric", "doubt")
    assert train_here(*flags) == 0
    assert "Testing epoch 1" in capfd.readouterr().out
    shutil.rmtree(output)
    best = _checkpoint(output, 8)
    why = _flip_a_bit(best)

    code = train_here(*flags)

    out = capfd.readouterr().out
    assert code == 0
    assert f"Skipping epoch 1, although it scored best: {best} {why}" in out
    assert "Testing epoch 2" in out
    assert (output / "model.safetensors").exists()


@pytest.mark.slow
def test_checkpoints_in_another_folder_are_resumed_from_and_moved_aside_with_the_run(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, output = tmp_path / "elsewhere", tmp_path / "model"
    flags = (*_flags(1, output), "--epochs", "1", "--checkpoint_dir", place)
    codes = [train_here(*flags), train_here(*flags), train_here(*flags, "--resume", "none")]

    out = capfd.readouterr().out
    assert codes == [0, 0, 0]
    assert not (tmp_path / "model.run" / "checkpoints").exists()
    assert f"Resuming from {place}/step_00000008" in out
    assert f"Moved the earlier checkpoint {place}/step_00000008 to {place}/step_00000008.1" in out
    assert (place / "step_00000008" / "manifest.json").exists()
    assert (place / "step_00000008.1" / "manifest.json").exists()


def test_what_changes_the_training_is_refused_with_the_names_of_the_fields(
    copied: Path, train_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    fields = train_here(*_flags(1, copied), "--learning_rate", "5e-4", "--max_train_rows", "60", "--log_every", "3")
    [line] = capfd.readouterr().err.splitlines()
    batch = train_here(*_flags(1, copied), "--batch_size", "6")

    assert (fields, batch) == (2, 2)
    assert "learning_rate was 0.001 and is now 0.0005" in line
    assert "max_train_rows was 63 and is now 60" in line
    assert "log_every" not in line
    assert "the global batch was 8 rows and is now 6" in capfd.readouterr().err


def test_resume_none_moves_the_older_run_aside(
    copied: Path, train_here: Callable[..., int], never_stopped: Callable[[int], Path], metrics_of: Callable[..., Any]
) -> None:
    code = train_here(*_flags(1, copied), "--resume", "none")

    assert code == 0
    assert (copied.parent / "model.run.1" / "checkpoints" / "step_00000016" / "state.json").exists()
    assert [record["step"] for record in metrics_of(copied.parent / "model.run")] == STEPS
    assert _weights(copied) == _weights(never_stopped(1))


def test_a_named_checkpoint_is_resumed_from_and_later_ones_are_moved_aside(
    copied: Path,
    train_here: Callable[..., int],
    never_stopped: Callable[[int], Path],
    metrics_of: Callable[..., Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = train_here(*_flags(1, copied), "--resume", _checkpoint(copied, 12))

    assert code == 0
    assert f"Resuming from {_checkpoint(copied, 12)}" in capfd.readouterr().out
    for step in (14, 16):
        assert (_checkpoint(copied, step).with_name(f"step_{step:08d}.1") / "state.json").exists()
    assert [record["step"] for record in metrics_of(copied.parent / "model.run")] == STEPS
    assert _weights(copied) == _weights(never_stopped(1))


def test_a_finished_run_started_again_writes_the_same_model_and_loses_nothing(
    copied: Path, train_here: Callable[..., int], never_stopped: Callable[[int], Path], metrics_of: Callable[..., Any]
) -> None:
    before = sorted(path.name for path in _checkpoint(copied, 0).parent.iterdir())

    code = train_here(*_flags(1, copied))

    assert code == 0
    assert _weights(copied) == _weights(never_stopped(1))
    assert sorted(path.name for path in _checkpoint(copied, 0).parent.iterdir()) == before
    assert [record["step"] for record in metrics_of(copied.parent / "model.run")] == STEPS
    assert len(metrics_of(copied.parent / "model.run", "epoch")) == 2
    assert len(metrics_of(copied.parent / "model.run", "test")) == 1


def test_the_last_checkpoints_and_the_best_are_kept(
    never_stopped: Callable[[int], Path], metrics_of: Callable[..., Any]
) -> None:
    run_dir = never_stopped(1).with_name("on_1.run")
    [best] = [epoch["step"] for epoch in metrics_of(run_dir, "epoch") if epoch["is_best"]][-1:]

    kept = sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))

    assert kept == sorted({best, 12, 14, 16})


def _make_older(checkpoint: Path) -> None:
    """Turn a checkpoint into one from before the way of cleaning was a choice."""
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["config"].pop("clean") == "news"
    _rewrite(checkpoint, state | {"data_key": "made in another way"})


def _rewrite(checkpoint: Path, state: dict[str, Any]) -> None:
    state_file, manifest_file = checkpoint / "state.json", checkpoint / "manifest.json"
    state_file.write_text(json.dumps(state))
    content = state_file.read_bytes()
    manifest = json.loads(manifest_file.read_text())
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest_file.write_text(json.dumps(manifest))


def test_a_run_of_an_earlier_version_with_fields_that_are_gone_resumes(
    copied: Path, train_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    gone = {"dp": 1, "epsilon": 1e-8, "profile_start": 3, "profile_ranks": "all", "one_rank_rate": 9.0}
    gone |= {"record_collectives_every": 0}
    assert gone.keys() == FORMER_FIELDS.keys()
    newest, file = _checkpoint(copied, 16), copied.with_name("model.run") / "config.yaml"
    state = json.loads((newest / "state.json").read_text())
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | gone))
    _rewrite(newest, state | {"config": state["config"] | gone})
    assert train_here("--config", file, "--output_dir", copied) == 0
    assert f"Resuming from {newest}" in capfd.readouterr().out

    _rewrite(newest, state | {"config": state["config"] | {"epsilon": 1e-6}})
    assert train_here(*_flags(1, copied)) == 2
    assert "AdamW's epsilon was 1e-06 and is now 1e-08" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_older_than_the_clean_flag_resumes_and_cleans_as_before(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    sample, data, output = load_data("sample"), tmp_path / "mine.jsonl", tmp_path / "model"
    rows = [
        {"text": rf"{text} &amp;\n<b>more</b>", "label": f"topic {label}"}
        for text, label in zip(sample.train.texts[:120], sample.train.labels.tolist(), strict=False)
    ]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    few = ("--max_train_rows", 24, "--epochs", 1, "--save_every", 1)  # three steps
    flags = (*_flags(1, output), *few, "--dataset", data)
    first = launch(1, *flags, "--clean", "news")
    assert first.process.returncode == 0, first.err
    expected = _weights(output)
    shutil.rmtree(output)
    shutil.rmtree(_checkpoint(output, 3))
    for step in (1, 2):
        _make_older(_checkpoint(output, step))

    refused = launch(1, *flags, "--clean", "none")
    assert refused.process.returncode == 2
    assert "clean was 'news' and is now 'none'" in refused.err

    again = launch(1, *flags)
    assert again.process.returncode == 0, again.err
    assert "Resuming from" in again.out
    assert _weights(output) == expected
    assert read_saved_model(output).cleaning == read_saved_model(output.with_suffix(".pt")).cleaning == "news"
