"""One server in one round: started, loaded in closed and open loops, weighed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.serving.client import Load
from benchmarks.serving.running import started
from benchmarks.serving.servers import Server

BATCH = 64
ONE, EIGHT, MANY, LISTS = "1 client", "8 clients", "64 clients", f"lists of {BATCH}"
STEADY, OVERLOAD = "70% of capacity", "3 times capacity"
STEADY_SHARE, OVERLOAD_SHARE = 0.7, 3.0
MAX_NOISE = 0.03  # share of the cores that others may take before a load counts as disturbed
PATIENCE = 10.0  # seconds to wait for answers after an open loop
CLOSED = {ONE: 1, EIGHT: 8, MANY: 64, LISTS: 1}


@dataclass(frozen=True)
class Plan:
    """What every server goes through.

    ``pythons``: the Python of each kind of server; ``seconds``: of a load, half of it with one
    client; ``poisson``: open loops have random gaps; ``preload``: a library that every server loads
    first; ``shares``: the rates of the open loops, as shares of the capacity.
    """

    model: Path
    texts: list[str]
    pythons: dict[str, str]
    seconds: float
    poisson: bool
    preload: str = ""
    shares: tuple[float, float] = (STEADY_SHARE, OVERLOAD_SHARE)


def measure(server: Server, plan: Plan, bodies: Path, number: int) -> dict[str, Any]:
    """Figures of one server.

    Args:
        bodies: a folder for the requests.
        number: of the round; each starts elsewhere in the texts.

    Raises:
        ServerFailure: it does not start or gives no useful answer.
    """
    # The requests are encoded here, before anything is measured, and the client only reads them: it
    # shares the cores with the server.
    singles, lists = bodies / "singles.jsonl", bodies / "lists.jsonl"
    server.write_bodies(singles, plan.texts, 1)
    server.write_bodies(lists, plan.texts, BATCH)
    with started(server, plan.model, plan.pythons[server.python], plan.preload) as running:
        # Idle memory is read before the warm-up, which lets the allocators grow.
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
                    # Each round starts elsewhere in the texts, so that medians are not those of one
                    # sequence.
                    first=number * 1009 if not is_list else number * 17,
                    **how,
                )
            )
            report(f"  {server.title}, {name}: {describe(result[name])}")

        # Runtimes compile for shapes that they have not seen yet: that belongs to no figure. With 8
        # and 64 clients all batch sizes occur that the loads below will have.
        for clients in (8, 64):
            seconds = min(2.0, plan.seconds / 4)
            running.apply(
                Load(str(singles), running.port, server.paths[0], 1, seconds, clients=clients)
            )
        result["engine"] = running.ask_engine()
        # Speed is worth nothing with other answers: the page compares these between servers.
        result["labels"] = running.ask_labels(plan.texts[:BATCH])
        for name, clients in CLOSED.items():
            load(name, clients=clients)
        capacity = result[MANY]["texts_per_second"]
        # The open loops are relative to what this server reached in this round: a slow server is
        # not flooded more.
        for name, share in zip((STEADY, OVERLOAD), plan.shares, strict=True):
            if capacity:
                load(name, rate=capacity * share, poisson=plan.poisson, patience=PATIENCE)
        result["pss_loaded"] = running.tree.pss_bytes()
    return result


def describe(figures: dict[str, Any]) -> str:
    """A load in one line."""
    latency = figures["latency"].get("200")
    shown = (
        f", p50 {latency['p50'] * 1e3:.0f} ms, p99 {latency['p99'] * 1e3:.0f} ms" if latency else ""
    )
    others = {status: count for status, count in figures["outcomes"].items() if status != "200"}
    shown += f", also {others}" if others else ""
    share = figures["others_share"] + figures["stolen_share"]
    shown += f" (NOT QUIET: others took {share:.0%} of the cores)" if share > MAX_NOISE else ""
    return f"{figures['texts_per_second']:.1f} texts/s{shown}"
