"""The demonstrations as a reader starts them."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from learn import by_hand

FOLDER = Path(by_hand.__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SAYS = {
    "ring_all_reduce.py": "equal to dist.all_reduce, rank by rank: [True, True, True, True]\n",
    "pipeline.py": "1F1B: 4 ranks, 8 micro-batches, bubble 27.3%\n",
    "zero1.py": "bytes of moments on each rank: ZeRO-1 [776, 776, 776, 776], plain Adam 3096\n",
}

Start = Callable[..., "Run"]  # noqa: F821 - the fixture's class, in conftest.py


@pytest.mark.parametrize("name", ["collectives", "data_parallel", "ddp_buckets", "tensor_parallel", *SAYS])
def test_an_idea_takes_less_than_120_lines_of_code(name: str) -> None:
    source = (FOLDER / name).with_suffix(".py").read_text()

    assert len(re.findall(r"^ *[^#\s]", source, re.MULTILINE)) < 120


@pytest.mark.slow
@pytest.mark.parametrize("script", SAYS)
def test_torchrun_on_four_ranks_shows_it_and_rank_0_alone_speaks(script: str, start: Start) -> None:
    run = start([*TORCHRUN, "--nproc_per_node=4", FOLDER / script], env={"OMP_NUM_THREADS": "1"}, warm=True)

    assert run.process.returncode == 0, run.err
    assert run.err == ""
    assert SAYS[script] in run.out
    assert run.out.count(run.out.splitlines()[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", SAYS)
def test_without_torchrun_one_line_names_the_command(script: str, start: Start) -> None:
    run = start([sys.executable, FOLDER / script], warm=True)

    assert run.process.returncode == 2
    assert run.err.startswith(f"error: learn/by_hand/{script} on 1 rank: it shows 2 to 16; start it with torchrun")
    assert run.err.count("\n") == 1
