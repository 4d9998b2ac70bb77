"""What this process may use of the machine, within the limits of its container."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ROOT = Path("/")
# Instructions that multiply int8 several times faster than float32, by their x86 and ARM names.
_FAST_INT8 = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})


def usable_cpus(root: Path = _ROOT) -> int:
    """The cores that this process may keep busy, at least 1.

    The minimum of its affinity and every CPU quota above it (cgroup v1 or v2), not the host's core
    count. A quota of 1.5 cores counts as 1: with a second thread the kernel would stop the whole
    process for a quarter of the time, event loop included, while one thread leaves the remaining
    half core to it.
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([affinity, *(int(quota) for quota in _quotas(root))]))


def threads_per_process(processes: int = 1, root: Path = _ROOT) -> int:
    """Compute threads for each of the ``processes`` of a program on this machine.

    OMP_NUM_THREADS if a person has set it, at most all cores; otherwise an equal share of the
    cores.
    """
    cores = usable_cpus(root)
    return min(cores, threads_asked_for(root) or max(1, cores // processes))


def threads_asked_for(root: Path = _ROOT) -> int | None:
    """OMP_NUM_THREADS, if it has a valid value that a person chose; None if it is torchrun's own.

    If the variable is unset, torchrun sets it to 1 for its ranks, whatever the machine has. So a 1
    counts only if torchrun itself was started with it, which Linux shows in /proc; elsewhere a rank
    takes it for torchrun's.
    """
    # torchrun sets the variable only for several ranks, so a 1 of a single rank is a person's.
    value = _number_of_threads(os.environ.get("OMP_NUM_THREADS", ""))
    if (
        value == 1
        and "TORCHELASTIC_RUN_ID" in os.environ
        and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1
    ):
        return _number_of_threads(_environment_of_launcher(root).get("OMP_NUM_THREADS", ""))
    return value


def _number_of_threads(value: str) -> int | None:
    # A list has a number for each level of nested parallelism; we have one level.
    first = value.partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def _environment_of_launcher(root: Path) -> dict[str, str]:
    """The environment of the first ancestor of this process that torchrun did not start itself."""
    pid = os.getppid()
    while pid > 1:
        # The environment at a process's start: what it has set for its children since does not
        # show.
        pairs = (pair.partition("=") for pair in _read(root / f"proc/{pid}/environ").split("\0"))
        environment = {name: value for name, _, value in pairs}
        if "TORCHELASTIC_RUN_ID" not in environment:
            return environment
        parent = re.search(r"^PPid:\s+(\d+)$", _read(root / f"proc/{pid}/status"), re.MULTILINE)
        pid = int(parent[1]) if parent else 0
    return {}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a model may run on.

    ``threads``: processors, 0 for all that this process may use. ``device``: ``cuda`` requires a
    GPU, ``cpu`` uses none, ``auto`` uses one that PyTorch supports. ``instruction_set``: what the
    native engine's kernels use, ``auto`` for the fastest of this processor.
    """

    threads: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    instruction_set: str = "auto"

    @property
    def num_threads(self) -> int:
        """Threads for the model; more than this process's cores would only take turns."""
        usable = usable_cpus()
        return min(self.threads or usable, usable)


def cpu_flags(root: Path = _ROOT) -> frozenset[str]:
    """What the cores can do, in the kernel's words (``avx512_vnni`` on x86, ``asimddp`` on ARM)."""
    return frozenset((_cpuinfo(root, "flags") or _cpuinfo(root, "Features")).split())


def has_fast_int8(root: Path = _ROOT) -> bool:
    """Whether the cores have instructions for int8: VNNI, AMX, or ARM's dot product."""
    # Apple's ARM has no /proc/cpuinfo, but all of its processors since 2018 have the dot product.
    is_apple = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    return is_apple or bool(cpu_flags(root) & _FAST_INT8)


def cpu_name(root: Path = _ROOT) -> str:
    return _cpuinfo(root, "model name") or platform.processor() or platform.machine()


def _cpuinfo(root: Path, key: str) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that the processes of this machine or container can still take; None if the system does
    not say.

    The minimum of what the kernel could give without swapping and of every memory limit above this
    process (cgroup v1 or v2). Cached files count as available.
    """
    available = re.search(r"^MemAvailable: +(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    found = [int(available[1]) * 1024] if available else []
    for level in _groups(root, "memory", ["memory"]):
        # The names of version 2 of control groups, then those of version 1.
        limit = (_read(level / "memory.max") or _read(level / "memory.limit_in_bytes")).strip()
        used = (_read(level / "memory.current") or _read(level / "memory.usage_in_bytes")).strip()
        if limit.isdecimal() and used.isdecimal():
            cached = re.search(
                r"^(?:total_)?inactive_file (\d+)$", _read(level / "memory.stat"), re.MULTILINE
            )
            found.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return max(0, min(found)) if found else None


def _quotas(root: Path) -> Iterator[float]:
    for level in _groups(root, "cpu", ["cpu", "cpu,cpuacct"]):
        yield from _quota(level)


def _groups(root: Path, controller: str, mounts_v1: Sequence[str]) -> Iterator[Path]:
    """The folders of the control groups that this process is in, with those above them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            mounts = [root / "sys/fs/cgroup"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in mounts_v1]
        else:
            continue
        for mount in mounts:
            # Limits of parent groups apply too. Inside a container the path is the host's, and only
            # the mount itself exists.
            inside = Path(group.lstrip("/"))
            yield from (mount / inside, *(mount / parent for parent in inside.parents), mount)


def _quota(level: Path) -> Iterator[float]:
    limit, _, period = _read(level / "cpu.max").strip().partition(" ")
    if not limit:
        limit = _read(level / "cpu.cfs_quota_us").strip()
        period = _read(level / "cpu.cfs_period_us").strip()
    # "No limit" is "max" in version 2 and -1 in version 1.
    if limit.isdecimal() and period.isdecimal() and int(period):
        yield int(limit) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
