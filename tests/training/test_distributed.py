"""Attempts of one launch do not meet: torchrun keeps one store for all of them."""

import pytest
import torch.distributed as dist

from training.distributed import ranks


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
