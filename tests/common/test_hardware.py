from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.hardware import available_memory, cpu_flags, cpu_name, has_fast_int8, usable_cpus

AFFINITY = len(os.sched_getaffinity(0))


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_without_limits_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == AFFINITY


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"},
        {"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": "150000 100000\n"},
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
        },
        {
            "proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/docker/of-the-host\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "199999\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["version 2", "one and a half cores", "a limit above", "version 1 in a container"],
)
def test_a_quota_below_two_cores_is_one_thread(tmp_path: Path, files: dict[str, str]) -> None:
    assert usable_cpus(_write(tmp_path, files)) == 1


MEMINFO = {"proc/meminfo": "MemTotal:  4000 kB\nMemAvailable:    3000 kB\n"}
VERSION_1 = "sys/fs/cgroup/memory/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 3000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/pod/app\n",
                "sys/fs/cgroup/pod/memory.max": "2000000\n",
                "sys/fs/cgroup/pod/memory.current": "1500000\n",
                "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 100000\n",
                "sys/fs/cgroup/pod/app/memory.max": "max\n",
                **MEMINFO,
            },
            600_000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/of-the-host\n",
                f"{VERSION_1}.limit_in_bytes": "900000\n",
                f"{VERSION_1}.usage_in_bytes": "300000\n",
            },
            600_000,
        ),
    ],
    ids=["unknown", "the machine's", "a limit above", "version 1 in a container"],
)
def test_available_memory_is_the_least_that_any_limit_leaves(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert available_memory(_write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": ""},
        {
            "proc/self/cgroup": "2:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
    ids=["no limit", "more than there is", "an empty file", "version 1 without a limit"],
)
def test_a_quota_beyond_the_cores_changes_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    assert usable_cpus(_write(tmp_path, files)) == AFFINITY


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx512f avx512_vnni\n", True),
        ("processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx512f\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", True),
    ],
    ids=["x86 with VNNI", "x86 without", "ARM with dot product"],
)
def test_fast_int8_is_read_from_the_processor(tmp_path: Path, cpuinfo: str, fast: bool) -> None:
    assert has_fast_int8(_write(tmp_path, {"proc/cpuinfo": cpuinfo})) is fast


def test_the_processor_has_a_name_and_flags(tmp_path: Path) -> None:
    root = _write(tmp_path, {"proc/cpuinfo": "model name\t: Xeon: Gold\nflags\t: a b\n"})
    assert cpu_name(root) == "Xeon: Gold"
    assert cpu_flags(root) == {"a", "b"}
    assert cpu_name(tmp_path / "nowhere")
