"""The process group: refused in one line where it cannot form, bounded in its waiting, a new one for each attempt."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.training.parallelism.ranks import run_on_ranks
from training import distributed
from training.distributed import TIMEOUT_MARGIN, limit_waiting, ranks
from training.errors import ForeseenError, TrainingFailure, UserError


def test_a_port_that_is_taken_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))

        refused = pytest.raises(UserError, match=rf"^MASTER_PORT {port}: another program listens there; .*--standalone")
        with refused, ranks("cpu"):
            pass


@pytest.mark.parametrize(
    ("variables", "kind"), [({}, UserError), ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, TrainingFailure)]
)
def test_a_group_that_does_not_form_for_the_network_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kind: type[ForeseenError]
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in ({"RANK": "1", "WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "START_TIMEOUT", 0.0)
    monkeypatch.setattr(distributed, "TIMEOUT_MARGIN", 0.1)

    refused = pytest.raises(kind, match=r"^the process group did not form \(.*\): start with torchrun")
    with refused, ranks("cpu", collective_timeout=0.0):
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
        with ranks("cpu") as mine:
            mine.barrier()
        num_keys.append(launcher.num_keys())

    assert num_keys[1] > num_keys[0]  # what the second wrote stands beside what the first wrote, not in its place


def _waiting_of_all_groups() -> list[timedelta]:
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dist.new_group([0, 1])
    limit_waiting(7)
    groups = list(dist.distributed_c10d._world.pg_map)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_one_bound_on_waiting_holds_for_all_groups_those_of_meshes_too() -> None:
    for waiting in run_on_ranks(2, _waiting_of_all_groups):
        assert len(waiting) >= 3
        assert set(waiting) == {timedelta(seconds=7 + TIMEOUT_MARGIN)}
