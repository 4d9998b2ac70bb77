"""What was promised, and what came out, in one table."""

from __future__ import annotations

from benchmarks.serving.measure import EIGHT, LISTS, MANY, ONE
from benchmarks.serving.results import (
    Figure,
    Results,
    latency,
    lost,
    over_capacity,
    rate,
    refusal_latency,
    steady_tail,
    tail,
)
from benchmarks.tables import markdown_table

REFERENCE = "ours"
STOCK = ("bentoml", "litserve", "mosec", "ray", "infinity")
TUNED = ("mosec_tuned", "mosec_tuned_onnx")
MB = 1e6
Row = tuple[str, float | None, str, float, str]


def goals_table(results: Results) -> str:
    """The table; a goal whose servers were not measured is left out."""
    if REFERENCE not in results.names:
        return ""
    rows = []
    for what, value, bound, goal, shape in [*_speed(results), *_bounds(results), *_accuracy(results)]:
        if value is None:
            continue
        met = value >= goal if bound == "at least" else value <= goal
        rows.append([what, f"{bound} {shape.format(goal)}", shape.format(value), "yes" if met else "**no**"])
    return markdown_table(["", "goal", "measured", "met"], rows)


def _speed(results: Results) -> list[Row]:
    many = results.median(REFERENCE, rate(MANY)) or 0.0
    lone = _against(results, TUNED, latency(ONE, "p50"), least=True)
    return [
        ("64 clients, × plain FastAPI + PyTorch", _against(results, ("naive",), rate(MANY)), "at least", 14, "{:.1f}"),
        ("64 clients, × the best stock peer", _against(results, STOCK, rate(MANY)), "at least", 2.2, "{:.2f}"),
        ("64 clients, × mosec tuned", _against(results, TUNED, rate(MANY)), "at least", 1.3, "{:.2f}"),
        ("64 clients, share of the machine's int8 limit", many / results.limit_texts(), "at least", 0.6, "{:.0%}"),
        ("64 clients, p99 ÷ median", results.median(REFERENCE, tail), "at most", 1.5, "{:.2f}"),
        ("8 clients, × mosec tuned", _against(results, TUNED, rate(EIGHT)), "at least", 1.5, "{:.2f}"),
        ("1 client, median × mosec tuned's", lone, "at most", 0.7, "{:.2f}"),
        ("lists of 64, × mosec tuned", _against(results, TUNED, rate(LISTS)), "at least", 1.3, "{:.2f}"),
    ]  # fmt: skip


def _bounds(results: Results) -> list[Row]:
    def worst(figure: Figure) -> float | None:
        return max(results.series(REFERENCE, figure), default=None)

    refusal = worst(refusal_latency("p99"))
    memory = {name: results.median(name, lambda measured: measured["pss_loaded"] / MB) for name in results.ours()}
    start = results.median(REFERENCE, lambda measured: measured["start_s"])
    steady = results.median(REFERENCE, steady_tail)
    leanest = min(value for value in memory.values() if value is not None)
    return [
        ("70% of capacity, p99 ÷ a lone client's median", steady, "at most", 6, "{:.1f}"),
        ("3 × capacity, goodput ÷ capacity", results.median(REFERENCE, over_capacity), "at least", 0.9, "{:.2f}"),
        ("3 × capacity, p99 of a refusal", refusal and refusal * 1e3, "at most", 10, "{:.1f} ms"),
        ("3 × capacity, accepted and lost", worst(lost), "at most", 0, "{:.0f}"),
        ("first answer after the start", start, "at most", 1.5, "{:.2f} s"),
        ("memory after load, the default engine", memory[REFERENCE], "at most", 600, "{:.0f} MB"),
        ("memory after load, the leanest engine", leanest, "at most", 450, "{:.0f} MB"),
    ]  # fmt: skip


def _accuracy(results: Results) -> list[Row]:
    rows: list[Row] = []
    for name, manifest in results.run["accuracy"].items():
        found = manifest["accuracy"]
        if manifest["precision"] == "int8":
            rows.append((f"{name} int8, points of accuracy lost", found["drop_points"], "at most", 0.3, "{:.2f}"))
            rows.append((f"{name} int8, answers changed", found["disagreement_percent"], "at most", 1.0, "{:.2f}%"))
    return rows


def _against(results: Results, others: tuple[str, ...], figure: Figure, *, least: bool = False) -> float | None:
    """Our ratio to the best of some others."""
    ratios = [results.ratio(REFERENCE, other, figure) for other in others if other in results.names]
    found = [ratio for ratio in ratios if ratio is not None]
    if not found:
        return None
    return max(found) if least else min(found)
