from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.hardware import cpu_flags, cpu_name, has_fast_int8, usable_cpus

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
