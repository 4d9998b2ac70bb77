"""Errors that others print, provoked: the page quotes what they say."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing.api import SignalException, _terminate_process_handler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from common.errors import UserError
from inference.errors import SettingsError
from inference.settings import Settings
from tests.docs.troubleshooting import PAGE, read_entries
from tests.processes import run_on_ranks
from training.config import parse_config

QUOTED = {entry.title: entry.classics for entry in read_entries(PAGE.read_text(encoding="utf-8"))}


def _assert_quoted(title: str, said: str) -> None:
    assert any(line in said for line in QUOTED[title]), said


def _said(provoke: Callable[[], object], *kinds: type[Exception]) -> str:
    """What an error of one of these kinds says."""
    with pytest.raises(kinds) as error:
        provoke()
    return str(error.value)


def test_no_memory_on_a_processor() -> None:
    _assert_quoted("Out of memory", _said(lambda: torch.empty(1 << 46), RuntimeError))


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = _said(lambda: dist.TCPStore("127.0.0.1", port, is_master=True), dist.DistError)
    _assert_quoted("The address is already in use", said)


def test_no_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    _assert_quoted("The process group does not form", _said(lambda: dist.init_process_group("gloo"), ValueError))


def test_a_collective_without_a_process_group() -> None:
    _assert_quoted("The process group does not form", _said(dist.barrier, ValueError))


@pytest.mark.slow
def test_launchers_that_do_not_come() -> None:
    said = _said(lambda: dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=1)), dist.DistError)
    _assert_quoted("The process group does not form", said)
    for kind in (rendezvous.RendezvousTimeoutError, rendezvous.RendezvousClosedError):
        _assert_quoted("The process group does not form", kind.__name__)


def test_a_terminal_that_is_closed() -> None:
    said = _said(lambda: _terminate_process_handler(signal.SIGHUP, None), SignalException)
    _assert_quoted("The terminal was closed", said)


def test_too_many_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        said = _said(lambda: os.open(os.devnull, os.O_RDONLY), OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    _assert_quoted("Too many open files", said)


def test_cuda_in_a_process_that_was_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    _assert_quoted("CUDA in a process that was forked", _said(torch.cuda.init, RuntimeError))


def test_an_activation_that_was_written_over() -> None:
    activations = torch.ones(2, requires_grad=True).exp()
    activations += 1
    _assert_quoted("The backward pass is refused", _said(activations.sum().backward, RuntimeError))


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_the_operation_whose_gradient_is_not_a_number() -> None:
    with torch.autograd.set_detect_anomaly(True):
        loss = torch.tensor(-1.0, requires_grad=True).sqrt()
        _assert_quoted("The loss is not a number", _said(loss.backward, RuntimeError))


def test_the_names_of_a_wrapped_model() -> None:
    network = torch.nn.Linear(2, 2)
    state = {f"module.{name}": value for name, value in network.state_dict().items()}
    _assert_quoted("Weights that do not fit the network", _said(lambda: network.load_state_dict(state), RuntimeError))


def test_a_file_that_would_run_code(tmp_path: Path) -> None:
    torch.save({"run": Path.cwd}, tmp_path / "model.pt")
    _assert_quoted("Weights that do not fit the network", _said(lambda: torch.load(tmp_path / "model.pt"), Exception))


@pytest.mark.parametrize("flags", [["--epochs", "0"], ["--epochs", "many"], ["--warmup", "2"], ["--clip_norm", "-1"]])
def test_a_value_out_of_its_limits(flags: list[str]) -> None:
    _assert_quoted("A value out of its limits", _said(lambda: parse_config(flags, {}), UserError))


@pytest.mark.parametrize(("name", "value"), [("MAX_WAIT_SECONDS", "many"), ("MAX_BODY_MB", "0")])
def test_a_setting_out_of_its_limits(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    _assert_quoted("The server does not start", _said(Settings.from_environment, SettingsError))


def _parameter_without_a_gradient() -> str:
    network = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    network.forward = lambda rows: network["used"](rows)
    replica = DistributedDataParallel(network)
    replica(torch.ones(1, 2)).sum().backward()
    return _said(lambda: replica(torch.ones(1, 2)), RuntimeError)


def _another_model_on_each_rank() -> str:
    impatient = dist.new_group(timeout=timedelta(seconds=2))  # rank 0 is not told, and waits
    network = torch.nn.Linear(2, 2 + dist.get_rank())
    return _said(lambda: DistributedDataParallel(network, process_group=impatient), RuntimeError)


def _a_rank_that_leaves() -> str:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    return _said(lambda: dist.all_reduce(torch.ones(1)), RuntimeError)


def _a_rank_that_does_not_come() -> str:
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        return ""
    return _said(lambda: dist.all_reduce(torch.ones(1), group=impatient), RuntimeError)


def _another_collective_on_each_rank() -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    mine = dist.all_reduce if dist.get_rank() else partial(dist.broadcast, src=0)
    return _said(lambda: mine(torch.ones(1), group=group), RuntimeError)


def _a_layer_checkpointed_twice() -> str:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, twice = network
    again = partial(checkpoint, twice, use_reentrant=True)
    network.forward = lambda rows: again(again(first(rows)))
    replica = DistributedDataParallel(network)
    loss = replica(torch.ones(1, 2)).sum()
    return _said(loss.backward, RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "provoke", "told_on"),
    [
        ("DDP waits for gradients that never come", _parameter_without_a_gradient, (0, 1)),
        ("DDP waits for gradients that never come", _another_model_on_each_rank, (1,)),
        ("Another rank went away", _a_rank_that_leaves, (0,)),
        ("It hangs", _a_rank_that_does_not_come, (0,)),
        ("It hangs", _another_collective_on_each_rank, (0, 1)),
        ("The backward pass is refused", _a_layer_checkpointed_twice, (0, 1)),
    ],
)
def test_what_two_ranks_run_into(title: str, provoke: Callable[[], str], told_on: tuple[int, ...]) -> None:
    said = run_on_ranks(2, provoke)
    for rank in told_on:
        _assert_quoted(title, said[rank])


@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    told = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=120)
    for line in ("exitcode  : -9", "Signal 9 (SIGKILL) received by PID", "(SIGKILL)"):
        assert line in QUOTED["Killed by the kernel"]
        assert line in done.stderr
    _assert_quoted("Another rank went away", done.stderr)
    _assert_quoted("Training on a CPU is slow", done.stderr)
