"""A rank that fails says why, leaves without waiting for the others, and no error of a backend loses its words."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from common.errors import LostRank
from tests.training.checkpointing.small_saves import ALONE
from tests.training.fault_tolerance.started_ranks import StartedRanks
from training.distributed.failures import translate_errors
from training.monitoring.status import read_statuses
from training.run import step as step_module

NO_ROOM = """NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error (run with NCCL_DEBUG=INFO for details)
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-aBcDeF (size 33030528), error: No space left on device (28)"""


def _fail_on_rank_1(rank: int, error: Exception) -> None:
    """Let one rank fail, where leaving the process group waits for the others, as NCCL's teardown does."""
    share, calls = step_module.micro_batches_of_rank, itertools.count(1)

    def fails(*arguments: Any, **options: Any) -> Any:
        if rank == 1 and next(calls) > 3:
            raise error
        return share(*arguments, **options)

    step_module.micro_batches_of_rank = fails
    dist.destroy_process_group = lambda *group: time.sleep(3600)


def _has_no_shared_memory(rank: int) -> None:
    _fail_on_rank_1(rank, dist.DistBackendError(NO_ROOM))


def test_a_failing_rank_prints_the_whole_nccl_error_and_does_not_wait_for_the_others(
    start_ranks: Callable[..., StartedRanks], tmp_path: Path
) -> None:
    ranks = start_ranks(2, "--epochs", 500, fault=_has_no_shared_memory)

    assert [ranks.exit_code(rank) for rank in (1, 0)] == [1, LostRank.exit_code]

    assert set(NO_ROOM.splitlines()[1:]) <= set(ranks.errors)
    events = [json.loads(line) for line in (tmp_path / "model.run" / "events.jsonl").read_text().splitlines()]
    [failed] = [event for event in events if event["kind"] == "failed" and event["rank"] == 1]
    [status] = [status for status in read_statuses(tmp_path / "model.run") if status.rank == 1]
    assert status.state == "failed"
    for message in (failed["message"], status.message):
        assert message.endswith("error: No space left on device (28)")
        assert "\n" not in message


LOST_PEERS = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:5182",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:5182: Connection reset by peer",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation "
    "to complete",
    "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error\nncclRemoteError: A "
    "call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "NET/Socket: peer closed",
]


@pytest.mark.parametrize("message", LOST_PEERS)
def test_a_lost_peer_is_recognised_and_the_original_message_kept(message: str) -> None:
    with pytest.raises(LostRank) as lost, translate_errors(ALONE, 7):
        raise dist.DistBackendError(message)

    assert "another rank went away at step 7" in str(lost.value)
    assert " ".join(message.split()) in str(lost.value)


@pytest.mark.parametrize(
    "message",
    [
        NO_ROOM,
        "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error\nLast error:\nFailed to CUDA calloc "
        "async 608 bytes",
        "NCCL error in: NCCLUtils.cpp:1, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both "
        "on CUDA device 35000",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] Unable to find address for: ib0",
    ],
)
def test_an_error_of_this_machine_is_not_taken_for_a_lost_peer(message: str) -> None:
    with pytest.raises(dist.DistBackendError) as raised, translate_errors(ALONE, 7):
        raise dist.DistBackendError(message)

    assert str(raised.value) == message
