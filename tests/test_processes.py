"""The processes that other tests start: they behave as ones that Python itself starts."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import PythonProcess, RankFailure, here, run_on_ranks, run_python, wait_until


def _add_up(value: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([value + here().rank])
    dist.all_reduce(total)
    return os.getpid(), total


def _fail_on_rank_1() -> None:
    if here().rank == 1:
        raise ValueError("this one")
    dist.barrier()


def _hang() -> None:
    time.sleep(600)


def _end_rank_1() -> None:
    if here().rank == 1:
        os._exit(1)
    _hang()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_answers_in_order_and_none_is_left() -> None:
    pids, totals = zip(*run_on_ranks(3, _add_up, 10), strict=True)

    assert [total.item() for total in totals] == [33, 33, 33]
    assert len(set(pids)) == 3
    assert not any(map(_is_running, pids))


@pytest.mark.parametrize(
    ("function", "complaint"),
    [(_fail_on_rank_1, "rank 1:\n.*ValueError: this one"), (_end_rank_1, "rank 1 ended without a word")],
)
def test_what_ends_a_rank_is_said_though_others_wait_for_it(function: Callable[[], None], complaint: str) -> None:
    with pytest.raises(RankFailure, match=f"(?s){complaint}"):
        run_on_ranks(2, function)


def test_ranks_that_hang_are_ended_at_the_deadline() -> None:
    with pytest.raises(RankFailure, match="still at work"):
        run_on_ranks(2, _hang, seconds=2)


TELLS = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['WORD'], sys.stdin.read(), flush=True); "


def test_a_program_gets_its_arguments_folder_environment_and_input_and_returns_its_exit_code(tmp_path: Path) -> None:
    run = run_python(["-c", TELLS + "sys.exit('no')", "a b"], stdin=b"given", cwd=tmp_path, WORD="here")

    assert (run.returncode, run.stdout, run.stderr) == (1, f"['a b'] {tmp_path} here given\n", "no\n")
    assert run_python(["-c", "raise SystemExit(3)"]).returncode == 3


def test_a_module_and_a_script_run_as_the_main_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import beside, sys; print(__name__, sys.argv, beside.__file__)")
    (tmp_path / "beside.py").write_text("")

    assert run_python([script, "-x"]).stdout == f"__main__ {[str(script), '-x']} {tmp_path / 'beside.py'}\n"
    assert run_python(["-m", "timeit", "-n1", "-r1", "pass"]).stdout.startswith("1 loop")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_program_as_it_does_any_other(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    code = "import time; print('begun', flush=True); time.sleep(600)"
    process = PythonProcess(["-c", code], os.environ, tmp_path, [out, tmp_path / "err"])
    wait_until(lambda: out.exists() and out.read_text())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)

    process.send_signal(number)

    assert process.wait(60) == process.returncode == -number


def test_torchruns_ranks_are_forks_with_the_environment_that_it_gives_them(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys; sys.stdout.write(f\"{os.environ['RANK']} {'torch' in sys.modules} {os.getppid()}\\n\")"
    )

    run = run_python(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script])

    first, second = (line.split() for line in sorted(run.stdout.splitlines()))
    assert (first[:2], second[:2], first[2] == second[2]) == (["0", "True"], ["1", "True"], True)
    assert run.returncode == 0
