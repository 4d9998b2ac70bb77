"""The launcher of one machine opens no port that others could reach: torchrun unpickles what comes in by its own."""

import ipaddress
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deployment.documented import documented
from tests.training.conftest import TRAINING, Run
from training.distributed.group import loopback_store
from training.monitoring.events import read_events

LISTEN = "0A"  # as /proc/net/tcp writes it


def _listening(pids: Sequence[int]) -> set[str]:
    """The addresses at which these processes accept connections."""
    links = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                links.add(str(entry.readlink()))
    return {address for inode, address, _ in _sockets() if f"socket:[{inode}]" in links}


def _sockets() -> Iterator[tuple[str, str, int]]:
    """Inode, address and port of every socket of this machine that listens. The kernel writes words of 4 bytes."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            words = re.findall("[0-9A-F]{8}", address)
            packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
            if fields[3] == LISTEN:
                yield fields[9], str(ipaddress.ip_address(packed)), int(port, 16)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def _start(start: Callable[..., Run], flags: Sequence[object], private: Path, **env: str) -> Run:
    given = {"PYTHON": sys.executable, "TMPDIR": str(private), **env}
    return start(["bash", TRAINING / "run_ddp.sh", 2, *flags], wait=False, env=given)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_attempt_of_a_run_on_one_machine_listens_where_others_can_reach_it(
    start: Callable[..., Run], base_flags: tuple[str, ...], tmp_path: Path, private: Path
) -> None:
    flags = (*base_flags, "--batch_size", 4, "--epochs", 6, "--save_every", 2, "--output_dir", tmp_path / "model")
    run = _start(start, flags, private, MAX_RESTARTS="1")
    for attempt in (0, 1):
        run.wait_until(lambda attempt=attempt: _has_trained(tmp_path / "model.run", attempt))
        assert {path.stat().st_mode & 0o77 for path in private.iterdir()} == {0}
        # gloo's own sockets, which take bytes for tensors of a known size.
        assert _listening(run.descendants) == {"127.0.0.1"}
        if attempt == 0:
            os.kill(run.ranks[1], signal.SIGKILL)

    assert run.wait() == 0, run.err
    assert list(private.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_documented_command_of_torchrun_listens_on_loopback_alone(start: Callable[..., Run], private: Path) -> None:
    command = documented("docs/running.md", "no-port").rstrip()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (place := private / "place").mkdir()
    (place / "training").symlink_to(TRAINING)
    command += " --epochs 50 --device cpu --cache_dir cache"
    run = start(["bash", "-c", command], wait=False, cwd=place, env={"PATH": path, "TMPDIR": str(private)})

    run.wait_until(lambda: _has_trained(place / "checkpoints" / "no_port.run", attempt=0))

    assert _listening(run.descendants) == {"127.0.0.1"}


def _has_trained(run_dir: Path, attempt: int) -> bool:
    return any(event["kind"] == "step" and event["restart"] == attempt for event in read_events(run_dir))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_launcher_that_is_stopped_while_it_starts_leaves_no_file(
    start: Callable[..., Run], base_flags: tuple[str, ...], tmp_path: Path, private: Path, number: signal.Signals
) -> None:
    run = _start(start, (*base_flags, "--output_dir", tmp_path / "model"), private)
    run.wait_until(lambda: list(private.glob("*/.rendezvous_*/store")))

    os.kill(run.process.pid, number)

    assert run.wait() in (0, 128 + number), run.err
    assert list(private.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_store_for_the_ranks_of_this_machine_listens_on_loopback_alone() -> None:
    store = loopback_store()

    assert {address for _, address, port in _sockets() if port == store.port} == {"127.0.0.1"}
    assert store.add("ranks", 2) == 2
