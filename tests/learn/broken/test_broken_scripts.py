"""The broken scripts: each fails as its page says, the diagnosis names the rank, and the fixed version is right."""

import ast
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import REPOSITORY

FOLDER = Path("learn/broken")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
# The line at which each rank waits, and its counts.
HANGS = {
    "rank0_collective": [("dist.reduce(total, dst=0)", 4, 4), ("loss.backward()", 5, 4)],
    "uneven_batches": [("loss.backward()", 6, 5), ("dist.barrier()", 5, 5)],
}
SILENT = ("batch_norm", "forgotten_set_epoch", "no_sync_left_on")
NOTHING = "diagnose: nothing found on 2 ranks in "

Diagnose = Callable[..., "Run"]  # noqa: F821 - of the fixture's class, in conftest.py


@pytest.fixture
def diagnose(start: Diagnose) -> Diagnose:
    """`diagnose(script, *flags)`: what it prints about two ranks that run the script."""

    def diagnose(script: Path | str, *flags: str) -> "Run":  # noqa: F821
        command = [*TORCHRUN, FOLDER / "diagnose.py", "--seconds", "2", script, *flags]
        return start(command, env={"OMP_NUM_THREADS": "1"}, cwd=REPOSITORY, warm=True)

    return diagnose


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "uneven_batches" else pytest.mark.slow) for name in HANGS]
)
def test_a_hang_ends_with_the_line_at_which_each_rank_waits(name: str, diagnose: Diagnose) -> None:
    run = diagnose(FOLDER / f"{name}.py")

    assert run.process.returncode == 0, run.err
    report = run.out.partition("diagnose: no rank has moved for 2 s\n")[2].splitlines()
    for rank, (line, (code, num_forwards, num_steps)) in enumerate(zip(report, HANGS[name], strict=True)):
        number = line.partition(".py:")[2].partition(":")[0]
        counts = f"({num_forwards} forward passes, {num_steps} optimizer steps)"
        assert line == f"  rank {rank} is at learn/broken/{name}.py:{number}: {code}  {counts}"
        assert (REPOSITORY / FOLDER / f"{name}.py").read_text().splitlines()[int(number) - 1].strip() == code


@pytest.mark.slow
def test_the_rank_that_skipped_a_batch_is_named_before_the_run_hangs(diagnose: Diagnose) -> None:
    run = diagnose(FOLDER / "skip_on_one_rank.py")

    skipped, hangs = run.out.split("diagnose: ")[1:]
    assert skipped == "after optimizer step 3, rank 1 has done 4 forward passes, rank 0 3\n"
    assert hangs.startswith("no rank has moved")


@pytest.mark.slow
def test_without_set_epoch_each_epoch_has_the_same_order(diagnose: Diagnose) -> None:
    broken, fixed = (diagnose(FOLDER / "forgotten_set_epoch.py", *flags).out for flags in ((), ("--fixed",)))

    assert [len(set(re.findall(r"first rows (.*)", out))) for out in (broken, fixed)] == [1, 3]
    assert "diagnose: batch 3 of rank 0 is batch 1 again, in the same order\n" in broken
    assert NOTHING in fixed


@pytest.mark.slow
def test_batch_norm_fails_on_the_rows_of_the_other_rank(diagnose: Diagnose) -> None:
    broken, fixed = (diagnose(FOLDER / "batch_norm.py", *flags).out for flags in ((), ("--fixed",)))
    first, second = ([float(share) for share in re.findall(r"source \d: (.*)%", out)] for out in (broken, fixed))

    assert first[0] > 95 > 60 > first[1]
    assert min(second) > 95
    assert "diagnose: after optimizer step 1, 1.running_mean (and 1 more) on rank 1 is not that of rank 0\n" in broken
    assert NOTHING in fixed


@pytest.mark.slow
def test_replicas_drift_apart_if_no_sync_is_left_on(diagnose: Diagnose) -> None:
    broken, fixed = (diagnose(FOLDER / "no_sync_left_on.py", *flags).out for flags in ((), ("--fixed",)))
    first, second = (float(re.search(r"between the ranks' weights: (\S+)", out)[1]) for out in (broken, fixed))

    assert first > 0.1
    assert second == 0
    assert "diagnose: after optimizer step 1, weight (and 1 more) on rank 1 is not that of rank 0\n" in broken
    assert NOTHING in fixed


@pytest.mark.slow
def test_with_the_fix_every_rank_calls_the_reduction(diagnose: Diagnose) -> None:
    out = diagnose(FOLDER / "rank0_collective.py", "--fixed").out

    assert re.findall(r"step (\d): mean loss", out) == ["4", "8"]
    assert NOTHING in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven_batches", "skip_on_one_rank"])
def test_a_fixed_script_ends_with_the_same_weights_on_all_ranks(name: str, diagnose: Diagnose) -> None:
    out = diagnose(FOLDER / f"{name}.py", "--fixed").out
    first, second = re.search(r"first weight by rank: (\S+), (\S+)", out).groups()

    assert first == second
    assert NOTHING in out


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_its_line_in_another_file(diagnose: Diagnose, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("def half(rank):\n    return 1 / (1 - rank)\n")
    (tmp_path / "script.py").write_text(
        "import torch.distributed as dist\nfrom half import half\n"
        "dist.init_process_group('gloo')\nhalf(dist.get_rank())\ndist.barrier()\n"
    )

    run = diagnose(tmp_path / "script.py")

    assert run.process.returncode == 1
    first, second = run.out.partition("diagnose: a rank failed\n")[2].splitlines()
    assert first.endswith("script.py:5: dist.barrier()  (0 forward passes, 0 optimizer steps)")
    assert re.search(r"rank 1 raised ZeroDivisionError at \S*half.py:2: return 1 / \(1 - rank\)", second)


@pytest.mark.slow
def test_monitored_barrier_names_the_rank_that_does_not_come(run_on_ranks: Callable[..., list[Any]]) -> None:
    assert "Rank 1 failed to pass monitoredBarrier in 1000 ms" in run_on_ranks(3, _wait_for_rank_1)[0]


def _wait_for_rank_1() -> str:
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(RuntimeError) as error:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HANGS, *SILENT, "skip_on_one_rank", "diagnose"])
def test_a_script_needs_only_pytorch_so_that_it_can_be_copied(name: str) -> None:
    source = (REPOSITORY / FOLDER / f"{name}.py").read_text()
    modules = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([str(node.module)] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }

    assert modules - sys.stdlib_module_names == {"torch"}
    assert name == "diagnose" or 30 <= len(re.findall(r"^ *[^#\s]", source, re.MULTILINE)) <= 70
