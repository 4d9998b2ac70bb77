"""What a profile comes to: the costliest operators, what computing hides of communication, how long data was late."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import write_json
from training.monitoring.records import format_percent

if TYPE_CHECKING:
    from torch.autograd.profiler_util import EventList, FunctionEvent

FOLDER = "profile"
SUMMARY_FILE = "summary.json"
MOST_OPERATORS = 12
# What a collective is called: by gloo and NCCL as they run it, by torch as it is asked for.
_COMMUNICATION = ("gloo:", "nccl")
_ASKED = ("c10d::", "_c10d_functional::", "record_param_comms")
_PHASES = ("data", "forward", "backward", "optimizer")
_RANK_HEADINGS = ("Rank", "A step", "Data wait", "Forward", "Backward", "Optimizer", "Other", "Collectives", "Hidden")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Operator:
    """All calls of one operator; ``seconds`` without those within it, ``share`` of the seconds of all operators."""

    name: str
    calls: int
    seconds: float
    share: float


@dataclass(frozen=True)
class RankProfile:
    """The profiled steps of one rank.

    ``phases``: shares of ``seconds``. ``communication``: seconds in which a collective was under way, waiting for other
    ranks included. ``hidden``: the share of those in which operators ran too; None without communication.
    """

    rank: int
    first_step: int
    last_step: int
    seconds: float
    phases: dict[str, float]
    communication: float
    hidden: float | None
    operators: list[Operator]
    trace: str


def summarise(events: EventList, *, on_gpu: bool) -> dict[str, Any]:
    """Say what the events of a profiler come to: the fields ``communication``, ``hidden`` and ``operators``.

    On a GPU what counts is when kernels run there, on a CPU when operators do.
    """
    return communication(events, on_gpu=on_gpu) | {"operators": _top_operators(events, on_gpu=on_gpu)}


def communication(events: Iterable[FunctionEvent], *, on_gpu: bool) -> dict[str, Any]:
    """The fields ``communication`` and ``hidden`` alone, of all events of a profiler or of some."""
    from torch.autograd import DeviceType

    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    ran = [event for event in events if event.device_type == device]
    # gloo marks its work as an annotation, as a person does; NCCL's kernels are kernels.
    collectives = [e for e in ran if e.name.startswith(_COMMUNICATION) and not (on_gpu and e.is_user_annotation)]
    # Of other nested ones the innermost: what is around them, such as a node of autograd, may contain a wait.
    operators = [e for e in ran if not e.is_user_annotation and (e.name.startswith("aten::") or not e.cpu_children)]
    computing = [e for e in operators if not e.name.startswith(_COMMUNICATION + _ASKED)]
    talks = merged((e.time_range.start, e.time_range.end) for e in collectives)
    works = merged(interval for e in computing for interval in _own_times(e))
    microseconds = math.fsum(end - start for start, end in talks)
    return {
        "communication": microseconds / 1e6,
        "hidden": overlap(talks, works) / microseconds if microseconds else None,
    }


def _own_times(event: FunctionEvent) -> Iterator[Interval]:
    """When an operator ran outside of those that it called."""
    start = event.time_range.start
    for child in sorted((child.time_range for child in event.cpu_children), key=lambda span: span.start):
        yield start, child.start
        start = child.end
    yield start, event.time_range.end


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, as rising intervals that do not touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long both are under way; each of intervals as :func:`merged` gives them."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return total


def _top_operators(events: EventList, *, on_gpu: bool) -> list[Operator]:
    from torch.autograd import DeviceType

    averages = [a for a in events.key_averages() if a.device_type == DeviceType.CPU and not a.is_user_annotation]
    seconds = {a.key: (a.self_device_time_total if on_gpu else a.self_cpu_time_total) / 1e6 for a in averages}
    total = math.fsum(seconds.values()) or 1.0
    top = sorted(averages, key=lambda average: -seconds[average.key])[:MOST_OPERATORS]
    return [Operator(a.key, a.count, seconds[a.key], seconds[a.key] / total) for a in top if seconds[a.key] > 0]


def write_summary(run_dir: Path, profiles: Sequence[RankProfile]) -> None:
    """Write ``profile/summary.json``.

    Raises:
        OSError: it cannot be written.
    """
    write_json(run_dir / FOLDER / SUMMARY_FILE, {"ranks": [asdict(profile) for profile in profiles]})


def read_summary(run_dir: Path) -> list[RankProfile]:
    """Read what :func:`write_summary` wrote; nothing where there is none."""
    path = run_dir / FOLDER / SUMMARY_FILE
    if not path.exists():
        return []
    ranks: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["ranks"]
    return [RankProfile(**{**rank, "operators": [Operator(**o) for o in rank["operators"]]}) for rank in ranks]


def rank_table(profiles: Sequence[RankProfile]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: for each rank, what its time went into."""
    rows = []
    for profile in profiles:
        shares = [profile.phases.get(name, 0.0) for name in _PHASES]
        times = [*shares, max(0.0, 1 - sum(shares)), profile.communication / profile.seconds]
        hidden = "-" if profile.hidden is None else format_percent(profile.hidden, 1)
        step = profile.seconds / (profile.last_step - profile.first_step + 1)
        rows.append([str(profile.rank), _milliseconds(step), *(format_percent(time, 1) for time in times), hidden])
    return [*_RANK_HEADINGS], rows


def operator_table(profile: RankProfile) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: a rank's costliest operators."""
    rows = [[o.name, f"{o.calls:,}", _milliseconds(o.seconds), format_percent(o.share, 1)] for o in profile.operators]
    return ["Operator", "Calls", "Own time", "Share"], rows


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
