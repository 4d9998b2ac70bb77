"""The process group: refused in one line where it cannot form, bounded in its waiting, a new one for each attempt."""

import ipaddress
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from common.errors import ForeseenError, TrainingFailure, UserError
from tests.processes import free_port, here, run_on_ranks
from training.config import TrainConfig
from training.distributed import group
from training.distributed.group import TIMEOUT_MARGIN, join_ranks, limit_collective_time
from training.distributed.ranks import Ranks
from training.run.trainer import Trainer


@pytest.fixture(autouse=True)
def _no_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what a test sets is gone after it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(("asked", "expected"), [("1", 1), ("3", 3), (None, 4)])
def test_a_run_on_cpus_has_the_threads_that_a_person_asked_for_or_all_cores(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: int
) -> None:
    monkeypatch.setattr("common.hardware.usable_cpus", lambda root: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    try:
        with join_ranks("cpu", use_process_group=False):
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_port_in_use_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))

        refused = pytest.raises(UserError, match=rf"^MASTER_PORT {port}: another program listens there; .*--standalone")
        with refused, join_ranks("cpu"):
            pass


def _wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "START_TIMEOUT", 0.0)
    monkeypatch.setattr(group, "TIMEOUT_MARGIN", 0.1)


@pytest.mark.parametrize(
    ("variables", "kind"), [({}, UserError), ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, TrainingFailure)]
)
def test_a_group_that_fails_to_form_because_of_the_network_may_be_retried(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kind: type[ForeseenError]
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in ({"RANK": "1", "WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    _wait_for_nobody(monkeypatch)

    advice = ": start with torchrun" if kind is UserError else "; .* MASTER_ADDR 127.0.0.1 at MASTER_PORT 9, and GLOO"
    refused = pytest.raises(kind, match=rf"the process group did not form \(.*\){advice}")
    with refused, join_ranks("cpu", collective_timeout=0.0):
        pass


def test_an_attempt_reads_nothing_that_the_one_before_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_USE_AGENT_STORE": True}
    place |= {"GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launcher.port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    num_keys = []

    for restart in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        with join_ranks("cpu") as mine:
            mine.barrier()
        num_keys.append(launcher.num_keys())

    assert num_keys[1] > num_keys[0]  # what the second wrote stands beside what the first wrote, not in its place


def test_ranks_of_one_machine_keep_gloo_off_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    _place(monkeypatch, MASTER_PORT=free_port())
    with join_ranks("cpu"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_ranks_whose_launcher_shares_no_store_meet_in_a_file_of_their_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for attempt in (0, 1):
        error_file = tmp_path / f"attempt_{attempt}" / "0" / "error.json"
        error_file.parent.mkdir(parents=True)
        # No port: the variables name one where nobody listens.
        _place(monkeypatch, MASTER_PORT=9, GROUP_WORLD_SIZE=1, TORCHELASTIC_USE_AGENT_STORE=False)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
        with join_ranks("cpu") as ranks:
            ranks.barrier()
            assert (error_file.parents[1] / "store").exists()


def _waiting_of_all_groups() -> list[timedelta]:
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dist.new_group([0, 1])
    limit_collective_time(7)
    groups = list(dist.distributed_c10d._world.pg_map)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_one_bound_on_waiting_holds_for_all_groups_those_of_meshes_too() -> None:
    for waiting in run_on_ranks(2, _waiting_of_all_groups):
        assert len(waiting) >= 3
        assert set(waiting) == {timedelta(seconds=7 + TIMEOUT_MARGIN)}


def _place(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | variables).items():
        monkeypatch.setenv(name, str(value))


def test_an_interface_that_does_not_exist_is_named_when_the_group_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    _place(monkeypatch, MASTER_PORT=free_port(), GLOO_SOCKET_IFNAME="ib0")

    refused = pytest.raises(TrainingFailure, match=r"the process group did not form \(.*ib0.*\).*GLOO_SOCKET_IFNAME")
    with refused, join_ranks("cpu"):
        pass


def test_an_interface_that_does_not_exist_is_named_before_data_and_model_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default group stands, as on NCCL, which has an interface of its own."""
    _place(monkeypatch, MASTER_PORT=free_port())
    with join_ranks("cpu") as mine:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
        config = TrainConfig(dataset="never read", output_dir=tmp_path / "model", device="cpu")

        with pytest.raises(TrainingFailure) as failed:
            Trainer(config, mine)

    assert "Unable to find address for: ib0" in str(failed.value)
    assert "set GLOO_SOCKET_IFNAME (now ib0)" in str(failed.value)
    assert "NCCL_SOCKET_IFNAME (now unset)" in str(failed.value)


def test_an_interface_is_known_by_its_own_address() -> None:
    [loopback] = [name for _, name in socket.if_nameindex() if name.startswith("lo")]

    assert group._interface_of(ipaddress.ip_address("127.0.0.1")) == loopback
    assert group._interface_of(ipaddress.ip_address("192.0.2.7")) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_no_interface_is_chosen_for_this_machine_or_one_that_is_unknown(host: str) -> None:
    assert group.interface_to(host) is None


def test_restarts_of_several_launchers_that_would_hang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _place(monkeypatch, WORLD_SIZE=2, GROUP_WORLD_SIZE=2, TORCHELASTIC_MAX_RESTARTS=3, MASTER_PORT=free_port())
    _wait_for_nobody(monkeypatch)
    # What torchrun sets without the variable that is missing.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    refused = pytest.raises(UserError, match=r"--max_restarts 3 with 2 launchers: .*SHARE_RDZV_TCP_STORE=1 for every")
    with refused, join_ranks("cpu", collective_timeout=0.0):
        pass


class _Queued(torch.Tensor):
    """A tensor of a device that works on its own: only reading it waits."""

    read = 0

    def item(self) -> float:
        type(self).read += 1
        return 0.0


def test_a_barrier_makes_the_host_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Ranks(0, 2, 0, 2, torch.device("cpu"), "nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)  # NCCL's returns once it is queued
    monkeypatch.setattr(torch, "zeros", lambda *size, device: torch.ones(*size).as_subclass(_Queued))

    mine.barrier()

    assert _Queued.read == 1


def _fails_on_rank_1() -> str:
    mine = here()

    def work() -> str:
        if mine.rank == 1:
            raise UserError("the mount does not answer")
        return "model"

    try:
        return mine.local_rank0_first(work)
    except UserError as error:
        return f"{error} (quiet: {error.quiet})"


def test_a_rank_that_fails_alone_after_the_first_has_worked_does_not_leave_the_others_waiting() -> None:
    said = "rank 1: the mount does not answer"

    assert run_on_ranks(2, _fails_on_rank_1, seconds=30) == [f"{said} (quiet: False)", f"{said} (quiet: True)"]
