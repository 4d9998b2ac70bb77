"""The process group: how ranks, devices and network interfaces are found, and how long a rank waits
for others.

The only file that calls ``init_process_group`` (beside those that teach it), and, beside
:mod:`training.distributed.restarts`, that reads torchrun's environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import (
    SECONDS_FOR_RANK_0,
    ForeseenError,
    LostRank,
    TrainingFailure,
    UserError,
    in_one_line,
    rank0_only_output,
)
from common.hardware import threads_per_process
from training.distributed.ranks import Ranks, is_lost_rank
from training.distributed.restarts import attempt_file

COLLECTIVE_TIMEOUT = 1800.0  # seconds
# Before the first steps are done one rank may download or tokenise for all the others, or compile
# longer than they.
START_TIMEOUT = 3600.0
# The group's own timeout is the second line: the watchdog, which can say more, is to strike first.
TIMEOUT_MARGIN = 30.0
# "True": the ranks meet in the store of torchrun itself
SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# On CPUs, oneDNN and PyTorch's layer above it each keep kernels of about half a megabyte for every
# operation and shape, and batches have many lengths: their own limit of 1,024 takes hundreds of
# megabytes. These do for a few lengths.
CACHED_KERNELS = "128"
SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


def use_loopback() -> None:
    """For ranks of this machine alone: keep gloo's sockets off the network.

    By default it listens on the address of the machine's own name, which a sandbox may not know.
    """
    for name in sorted(name for _, name in socket.if_nameindex() if name.startswith("lo"))[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def loopback_store() -> dist.TCPStore:
    """A store for ranks of this machine alone; one that opens its own port listens on every interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def interface_to(host: str) -> str | None:
    """The network interface of this machine that leads to another one; None if that is unknown, or the loopback."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # chooses the route; nothing is sent
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        return None if own.is_loopback else _interface_of(own)
    except OSError:
        return None


def _interface_of(own: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if own.version == 6:  # address, index, prefix length, scope, flags, name (Linux)
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return next(
            (line.split()[5] for line in lines if int(line.split()[0], 16) == int(own)), None
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == own.packed:
                    return name
    return None


def saving_group(timeout: float) -> dist.ProcessGroup:
    """A gloo group over all ranks, beside the default one, for the thread that saves checkpoints.

    Two threads that share a group would take each other's messages.

    Raises:
        TrainingFailure: gloo does not reach the other machines, though the default group, on NCCL,
            may.
    """
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, dist.DistError) as error:
        named = {
            name: os.environ.get(name, "unset")
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        }
        raise TrainingFailure(
            f"rank {dist.get_rank()}: the second process group, over which gloo coordinates "
            "checkpoints, did not form "
            f"({in_one_line(error)}); set GLOO_SOCKET_IFNAME (now {named['GLOO_SOCKET_IFNAME']}) "
            "to the network "
            "interface that joins the machines, as NCCL_SOCKET_IFNAME (now "
            f"{named['NCCL_SOCKET_IFNAME']}) for NCCL",
            code="group-not-formed",
        ) from error


def limit_collective_time(seconds: float) -> None:
    """Let no collective of any existing group, meshes included, wait much longer than ``seconds``.

    Groups created later do not inherit it.
    """
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds + TIMEOUT_MARGIN), group)


def start_timeout(collective_timeout: float) -> float:
    """Seconds that a rank may wait for others until the first steps are done."""
    return max(collective_timeout, START_TIMEOUT)


def group_backend(device_type: str, *, also_on_cpu: bool) -> str:
    """What ``init_process_group`` is told; ``also_on_cpu``: on GPUs, for tensors in the machine's memory too."""
    if device_type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if also_on_cpu else "nccl"


@contextmanager
def join_ranks(
    device: str,
    *,
    use_process_group: bool = True,
    also_on_cpu: bool = False,
    collective_timeout: float = COLLECTIVE_TIMEOUT,
) -> Iterator[Ranks]:
    """The ranks of this run; the process group is formed on entry and destroyed after a clean end.

    After an error the group stays: NCCL's teardown waits for the other ranks of the machine, which
    may wait for this one, so a rank that fails must end its process instead
    (:func:`training.fault_tolerance.interruption.run_rank`).

    Args:
        use_process_group: join the group that torchrun's variables describe, or one that exists
            already (Ray Train forms it); without the variables, or when false, the process is
            alone.
        also_on_cpu: on GPUs, let tensors in the machine's memory be reduced too.
        collective_timeout: seconds to wait for other ranks; at least an hour before
            :func:`limit_collective_time`.

    Raises:
        UserError: more processes than GPUs, or ``cuda`` without one.
    """
    milestones = {"imported": time.time()}
    launched = use_process_group and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if launched else 0
    rank, world_size, local_rank, local_world_size = _place_of_process(launched=launched)
    with rank0_only_output():
        chosen = _choose_device(device, local_rank, local_world_size)
    backend = ("nccl" if chosen.type == "cuda" else "gloo") if launched else "none"
    if chosen.type == "cpu":
        _share_processors(local_world_size)
    joins = launched and not dist.is_initialized()
    if joins:
        with rank0_only_output():
            _check_restarts()
        if world_size > local_world_size:
            _choose_gloo_interface()
        else:
            use_loopback()
        _join_group(
            backend,
            chosen,
            restart,
            also_on_cpu=also_on_cpu,
            timeout=start_timeout(collective_timeout),
        )
        milestones["group_formed"] = time.time()
    with _reporting_errors(rank):
        yield Ranks(
            rank, world_size, local_rank, local_world_size, chosen, backend, restart, milestones
        )
    if joins and dist.is_initialized():
        # What still refers to the group (DDP, in cycles) must go before it: else its threads
        # outlive it and the process aborts at its end.
        gc.collect()
        dist.destroy_process_group()


def _place_of_process(*, launched: bool) -> tuple[int, int, int, int]:
    """Rank, world size, rank on this machine and ranks of this machine; of a process alone without a launcher."""
    if not launched:
        return 0, 1, 0, 1
    # DeepSpeed's launcher says LOCAL_SIZE where torchrun says LOCAL_WORLD_SIZE.
    local_size = int(os.environ.get("LOCAL_SIZE", 1))
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_size}
    rank, size, local_rank, local_size = (
        int(os.environ.get(name, value)) for name, value in alone.items()
    )
    return rank, size, local_rank, local_size


def _share_processors(local_world_size: int) -> None:
    """Without a share of its own every rank would start as many threads as the machine has cores."""
    torch.set_num_threads(threads_per_process(local_world_size))
    # Read at the first operation.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, CACHED_KERNELS)


@contextmanager
def _reporting_errors(rank: int) -> Iterator[None]:
    """Print what ends this rank before its group falls.

    torchrun ends a rank as soon as another is gone, and a line that is printed any later would be
    lost.
    """
    try:
        yield
    except ForeseenError as error:
        if error.quiet:  # rank 0 has the same error and prints it
            time.sleep(SECONDS_FOR_RANK_0)
        error.say()
        raise
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        failure = LostRank(
            f"rank {rank}: another rank went away. PyTorch's own error: {in_one_line(error)}"
        )
        failure.say()
        raise failure from error


def _choose_device(device: str, local_rank: int, local_world_size: int) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus == 0:
        raise UserError(
            "--device cuda: no CUDA GPU was found on this machine; use --device cpu or auto",
            code="gpu-not-found",
        )
    shared = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun shows all its ranks the same GPUs
    if num_gpus == 1 and not shared:
        # Some schedulers show each process its own GPU, which is then the first of one.
        local_rank = 0
    elif local_world_size > num_gpus:
        raise UserError(
            f"{local_world_size} processes on a machine with {num_gpus} GPU{'s' * (num_gpus > 1)}: "
            f"start torchrun with --nproc_per_node={num_gpus}, or train with --device cpu",
            code="gpus-too-few",
        )
    chosen = torch.device("cuda", local_rank)
    # Bound before the group exists: else every process opens a context on GPU 0.
    torch.cuda.set_device(chosen)
    return chosen


def _choose_gloo_interface() -> None:
    """By default gloo uses the address of the machine's own name, which other machines often cannot reach."""
    interface = interface_to(os.environ.get("MASTER_ADDR", ""))
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _check_restarts() -> None:
    """Refuse restarts that would hang: attempts of several launchers that share one store read each other's keys."""
    launchers, restarts = (
        os.environ.get("GROUP_WORLD_SIZE", "1"),
        os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"),
    )
    if os.environ.get(SHARES_STORE) == "True" and int(launchers) > 1 and int(restarts) > 0:
        raise UserError(
            f"--max_restarts {restarts} with {launchers} launchers: after a restart the ranks "
            "would wait for each "
            "other until they time out; use --rdzv_backend=c10d and set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every "
            "launcher, or --max_restarts 0",
            code="restarts-unsafe",
        )


def _private_store(timeout: timedelta) -> dist.FileStore | None:
    """A file that only this user can read, if all ranks have one launcher, which does not share its
    own store.

    Otherwise rank 0 would listen on every interface, and anyone who can write into that store can
    pose as a rank, whose objects the other ranks unpickle.
    """
    file = attempt_file("store")
    if (
        file is None
        or os.environ.get("GROUP_WORLD_SIZE") != "1"
        or os.environ.get(SHARES_STORE) == "True"
    ):
        return None
    store = dist.FileStore(str(file), int(os.environ["WORLD_SIZE"]))
    store.set_timeout(timeout)
    return store


def _join_group(
    backend: str, device: torch.device, restart: int, *, also_on_cpu: bool, timeout: float
) -> None:
    bound = device if backend == "nccl" else None
    backends = group_backend(device.type, also_on_cpu=also_on_cpu)
    # Every rank remembers its last collectives, for the record that a hang leaves.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    waits = timedelta(seconds=timeout + TIMEOUT_MARGIN)
    try:
        if (private := _private_store(waits)) is not None:
            store, rank, world_size = (
                private,
                int(os.environ["RANK"]),
                int(os.environ["WORLD_SIZE"]),
            )
        else:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=waits))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun (2.13) keeps one store for all its attempts: with names of its own, none
            # reads dead addresses. Several launchers count their restarts apart; for those
            # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is the way.
            store = dist.PrefixStore(f"restart_{restart}", store)
        dist.init_process_group(
            backends, store=store, rank=rank, world_size=world_size, timeout=waits, device_id=bound
        )
    except (ValueError, RuntimeError, dist.DistError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT {os.environ.get('MASTER_PORT')}: another program listens there; "
                "name a free port, or "
                "start with torchrun --standalone, which picks one",
                code="port-in-use",
            ) from error
        said = f"the process group did not form ({in_one_line(error)})"
        if isinstance(error, ValueError):  # a variable is missing
            raise UserError(
                f"{said}: start with torchrun --standalone --nproc_per_node=N",
                code="torchrun-needed",
            ) from error
        # A network that fails may not fail the next time.
        raise LostRank(
            f"rank {os.environ.get('RANK')}: {said}; if it has several machines, each must reach "
            "MASTER_ADDR "
            f"{os.environ.get('MASTER_ADDR')} at MASTER_PORT {os.environ.get('MASTER_PORT')}, and "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface that joins them",
            code="group-not-formed",
        ) from error
