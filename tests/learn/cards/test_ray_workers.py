"""The cards' ranks as actors of a Ray cluster do what processes of this machine do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CARDS = [sys.executable, "-m", "learn.cards", "run", "--workers", "2", "--epochs", "1"]
# A cluster of two nodes with a core each; then the command, in the same process.
TWO_NODES = """
import runpy, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
sys.argv = ["learn.cards", *sys.argv[1:], "--cluster", cluster.address]
runpy.run_module("learn.cards", run_name="__main__")
"""
# Kills the process of rank 1 when the all-reduce begins.
KILL_RANK_1 = """
import os, signal, sys
from pathlib import Path
import ray
from common.errors import run_command
from learn.cards.pipeline import DEFAULT_PIPELINE, read_pipeline
from learn.cards.runner import Runner

def kill(event):
    if (event.node, event.state) == ("allreduce", "running"):
        os.kill(ray.get(runner._workers._actors[1].__ray_call__.remote(lambda actor: os.getpid())), signal.SIGKILL)

def main():
    global runner
    pipeline = read_pipeline(DEFAULT_PIPELINE).configured("shard", num_workers=2)
    try:
        with Runner(pipeline, Path(sys.argv[1]), kill, "local") as runner:
            runner.run()
    finally:
        with Runner(pipeline, Path(sys.argv[1]), cluster="local") as again:
            again.run()
        print("the next run: finished")

run_command(main)
"""

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'")


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, timeout=300)


def _results(run: subprocess.CompletedProcess[str], folder: Path) -> tuple[str, object]:
    """The printed result and the synchronized gradients' record, without the times."""
    assert run.returncode == 0, run.stderr
    evaluated = re.search(r"Evaluate.*(accuracy.*)", run.stdout)
    assert evaluated
    return evaluated[1], json.loads((folder / "iris" / "forward" / "rank_1" / "outputs.json").read_text())


@pytest.mark.slow
def test_without_ray_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('stands for no Ray')")
    run = _run(*CARDS, "--cluster", "auto", "--output", tmp_path / "out", PYTHONPATH=str(tmp_path))
    assert run.returncode == 2
    assert 'error: Ray is not installed: pip install "distrinews[ray]" [package-missing]\n' in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
@needs_ray
def test_ranks_on_a_cluster_of_two_nodes_do_what_processes_of_this_machine_do(tmp_path: Path) -> None:
    here = _run(*CARDS, "--output", tmp_path / "here")
    there = _run(sys.executable, "-c", TWO_NODES, *CARDS[3:], "--output", tmp_path / "there")
    assert _results(there, tmp_path / "there") == _results(here, tmp_path / "here")


@pytest.mark.slow
@needs_ray
def test_a_rank_that_dies_on_a_cluster_is_named_and_the_next_run_has_new_ones(tmp_path: Path) -> None:
    run = _run(sys.executable, "-c", KILL_RANK_1, tmp_path / "out")
    assert run.returncode == 1
    assert "the next run: finished" in run.stdout
    assert "rank 1, card dist_allreduce (node allreduce): the process ended" in run.stderr


@pytest.mark.slow
@needs_ray
@pytest.mark.skipif((os.cpu_count() or 1) >= 16, reason="has room for the most ranks that there are")
def test_more_ranks_than_cores_are_refused_in_one_line(tmp_path: Path) -> None:
    run = _run(*CARDS, "--workers", "16", "--cluster", "local", "--output", tmp_path / "out")
    assert run.returncode == 2
    assert run.stderr.count("error: ") == 1
    assert "error: 16 ranks: takes 16 CPUs" in run.stderr
