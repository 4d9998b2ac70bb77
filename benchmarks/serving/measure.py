"""One server in one round: started, loaded in closed and open loop, weighed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.load import Load
from benchmarks.serving.running import Running, started
from benchmarks.serving.servers import Server

BATCH = 64
ONE, EIGHT, MANY, LISTS = "1 client", "8 clients", "64 clients", f"lists of {BATCH}"
STEADY, OVERLOAD = "70% of capacity", "3 times capacity"
STEADY_SHARE, OVERLOAD_SHARE = 0.7, 3.0
MOST_NOISE = 0.03  # share of the cores that others may take before a load counts as disturbed
PATIENCE = 10.0  # seconds after an open loop: who has no answer by then will not wait for it
_CLOSED = {ONE: 1, EIGHT: 8, MANY: 64, LISTS: 1}


@dataclass(frozen=True)
class Plan:
    """What every server goes through.

    Attributes:
        pythons: The Python of each kind of server.
        seconds: How long a load lasts; with one client half of it.
        poisson: Whether open loops have random gaps.
    """

    model: Path
    texts: list[str]
    pythons: dict[str, str]
    seconds: float
    poisson: bool


def measure(server: Server, plan: Plan, bodies: Path, number: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Figures of one server.

    Args:
        bodies: A folder for the requests.
        number: Of the round: each begins elsewhere in the texts.

    Raises:
        ServerFailure: It does not start or gives no useful answer.
    """
    singles, lists = bodies / "singles.jsonl", bodies / "lists.jsonl"
    server.write_bodies(singles, plan.texts, 1)
    server.write_bodies(lists, plan.texts, BATCH)
    with started(server, plan.model, plan.pythons[server.python]) as running:
        result: dict[str, Any] = {"start_s": running.start_s, "pss_idle": running.tree.pss_bytes()}

        def load(name: str, **how: Any) -> None:
            is_list = name == LISTS
            result[name] = running.apply(
                Load(
                    bodies=str(lists if is_list else singles),
                    port=running.port,
                    path=server.paths[is_list],
                    texts=BATCH if is_list else 1,
                    seconds=plan.seconds / 2 if name == ONE else plan.seconds,
                    first=number * 1009 if not is_list else number * 17,
                    **how,
                )
            )
            say(f"{name}: {describe(result[name])}")

        _warm_up(running, singles, plan.seconds)
        result["engine"] = running.ask_engine()
        result["labels"] = running.ask_labels(plan.texts[:BATCH])
        for name, clients in _CLOSED.items():
            load(name, clients=clients)
        capacity = result[MANY]["texts_per_second"]
        for name, share in ((STEADY, STEADY_SHARE), (OVERLOAD, OVERLOAD_SHARE)):
            if capacity:
                load(name, rate=capacity * share, poisson=plan.poisson, patience=PATIENCE)
        result["pss_loaded"] = running.tree.pss_bytes()
    return result


def describe(figures: dict[str, Any]) -> str:
    """A load in one line."""
    latency = figures["latency"].get("200")
    shown = f", p50 {latency['p50'] * 1e3:.0f} ms, p99 {latency['p99'] * 1e3:.0f} ms" if latency else ""
    others = {status: count for status, count in figures["outcomes"].items() if status != "200"}
    shown += f", also {others}" if others else ""
    share = figures["others_share"] + figures["stolen_share"]
    shown += f" (NOT QUIET: others took {share:.0%} of the cores)" if share > MOST_NOISE else ""
    return f"{figures['texts_per_second']:.1f} texts/s{shown}"


def _warm_up(running: Running, singles: Path, seconds: float) -> None:
    """Runtimes compile for shapes that they have not seen: not in the figures."""
    for clients in (8, 64):
        load = Load(str(singles), running.port, running.server.paths[0], 1, min(2.0, seconds / 4), clients=clients)
        running.apply(load)
