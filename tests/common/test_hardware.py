from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.hardware import available_memory, cpu_flags, cpu_name, has_fast_int8, threads_per_process, usable_cpus

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


PRINTS_THREADS = (
    "import os; from common.hardware import threads_per_process as threads;"
    "line = f\"{os.environ['RANK']} {threads(int(os.environ['LOCAL_WORLD_SIZE']))}\\n\";"
    "os.write(1, line.encode())"  # in one piece, whatever the other rank prints meanwhile
)
FOUR_CORES = "import os; os.sched_getaffinity = lambda _: range(4);"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, 2), pytest.param("1", 1, marks=pytest.mark.slow), ("3", 3)],
    ids=["nothing", "one thread", "three threads"],
)
@pytest.mark.parametrize(
    "wrapper",
    [pytest.param([], marks=pytest.mark.slow), ["sh", "-c", '"$@"; exit', "sh"]],
    ids=["a rank", "a rank in a script"],
)
def test_under_torchrun_a_rank_has_its_share_of_four_cores_or_the_threads_that_a_person_asked_for(
    asked: str | None, expected: int, wrapper: list[str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": asked} if asked else {}
    rank = [*wrapper, sys.executable, "-c", FOUR_CORES + PRINTS_THREADS]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no_python"]

    done = subprocess.run([*torchrun, *rank], env=environment, capture_output=True, text=True, check=True)

    assert sorted(done.stdout.split("\n")) == ["", f"0 {expected}", f"1 {expected}"]


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, 4), ("1", 1), ("2,1", 2), ("64", 4), ("0", 4), ("many", 4), ("", 4)]
)
def test_a_process_alone_has_all_four_cores_or_fewer_if_a_person_asks_for_fewer(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)

    assert threads_per_process(root=Path("/nowhere")) == expected


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
