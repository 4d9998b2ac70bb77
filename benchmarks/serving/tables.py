"""The page's tables of figures, a function each."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.serving.measure import EIGHT, LISTS, MANY, ONE, OVERLOAD, STEADY
from benchmarks.serving.results import (
    Figure,
    Measured,
    Results,
    cpu_per_text,
    latency,
    lost,
    over_capacity,
    rate,
    refusal_latency,
    refused,
    steady_tail,
)
from benchmarks.serving.servers import SERVERS
from benchmarks.tables import markdown_table, spread

MB = 1e6
NONE = "–"
_CLOSED = (ONE, EIGHT, MANY, LISTS)


def closed_loop(results: Results) -> str:
    """Texts a second and their latencies, by number of clients."""
    header = ["texts/s", ONE, EIGHT, MANY, "rounds", LISTS, "rounds", "not answered"]
    rows = []
    for name in results.names:
        many, lists = (results.series(name, rate(load)) for load in (MANY, LISTS))
        rows.append(
            [
                SERVERS[name].title,
                *(_one(results, name, rate(load)) for load in (ONE, EIGHT, MANY)),
                spread(many),
                _one(results, name, rate(LISTS)),
                spread(lists),
                str(sum(_unanswered(measured) for measured in results.all(name))),
            ]
        )
    return markdown_table(header, rows)


def latencies(results: Results) -> str:
    """p50, p95 and p99 of the closed loops, milliseconds."""
    header = ["server", *(f"{load}, p50 / p95 / p99 ms" for load in _CLOSED)]
    rows = []
    for name in results.names:
        cells = []
        for load in _CLOSED:
            parts = (_one(results, name, latency(load, q), 1e3, 1 if load == ONE else 0) for q in ("p50", "p95", "p99"))
            cells.append(" / ".join(parts))
        rows.append([SERVERS[name].title, *cells])
    return markdown_table(header, rows)


def ratios(results: Results, reference: str) -> str:
    """Ours against each of the others."""
    header = ["ours ÷", "1 client, median latency", "8 clients, texts/s", "64 clients, texts/s", "lists of 64, texts/s"]
    figures = (latency(ONE, "p50"), rate(EIGHT), rate(MANY), rate(LISTS))
    rows = []
    for name in results.names:
        if name != reference:
            found = [results.ratio(reference, name, figure) for figure in figures]
            rows.append([SERVERS[name].title, *(NONE if ratio is None else f"{ratio:.2f}" for ratio in found)])
    return markdown_table(header, rows)


def steady(results: Results) -> str:
    """The open loop below capacity."""
    header = ["server", "sent, texts/s", "p50 ms", "p95 ms", "p99 ms", "p99 ÷ the lone client's median", "not answered"]
    rows = [
        [
            SERVERS[name].title,
            _one(results, name, lambda one: one[STEADY]["load"]["rate"]),
            *(_one(results, name, latency(STEADY, q), 1e3, 0) for q in ("p50", "p95", "p99")),
            _one(results, name, steady_tail),
            _sum(results, name, lambda one: _bad(one, STEADY)),
        ]
        for name in results.names
    ]
    return markdown_table(header, rows)


def overload(results: Results) -> str:
    """The open loop at three times the capacity."""
    header = [
        "server", "sent, texts/s", "answered in time, texts/s", "÷ capacity", "p50 / p99 ms of those answered",
        "refused", "refusals, p50 / p99 ms", "taken in and lost",
    ]  # fmt: skip
    rows = [
        [
            SERVERS[name].title,
            _one(results, name, lambda one: one[OVERLOAD]["load"]["rate"]),
            _one(results, name, rate(OVERLOAD)),
            _one(results, name, over_capacity, digits=2),
            " / ".join(_one(results, name, latency(OVERLOAD, q), 1e3, 0) for q in ("p50", "p99")),
            _sum(results, name, refused),
            " / ".join(_one(results, name, refusal_latency(q), 1e3) for q in ("p50", "p99")),
            _sum(results, name, lost),
        ]
        for name in results.names
    ]
    return markdown_table(header, rows)


def resources(results: Results) -> str:
    """Start, memory, processor time and cost."""
    header = [
        "server", "start to first answer, s", "memory idle, MB", "after load, MB", "CPU-s per 1,000 texts",
        "$ per million texts",
    ]  # fmt: skip
    rows = []
    for name in results.names:
        texts = results.median(name, rate(MANY))
        dollars = 1e6 / texts / 3600 * results.run["dollars_per_hour"] if texts else None
        rows.append(
            [
                SERVERS[name].title,
                _one(results, name, lambda one: one["start_s"], digits=2),
                _one(results, name, lambda one: one["pss_idle"] / MB, digits=0),
                _one(results, name, lambda one: one["pss_loaded"] / MB, digits=0),
                _one(results, name, cpu_per_text, 1e3),
                NONE if dollars is None else f"{dollars:.2f}",
            ]
        )
    return markdown_table(header, rows)


def limits(results: Results) -> str:
    """The machine's int8 rate, and the texts a second that it stands for."""
    limit_runs = results.run["limits"]
    names = {(library, rows): None for one in limit_runs for library, rates in one.items() for rows in rates}
    rows = []
    for library, size in names:
        values = [one[library][size] / 1e9 for one in limit_runs if size in one.get(library, {})]
        rows.append([library, size, f"{median(values):.0f}", spread(values, 0)])
    rates = markdown_table(["library", "matrices, chains × threads", "Gop/s, all cores", "rounds"], rows)
    work = results.run["workload"]["work"]
    texts = [[name, f"{flops / 1e9:.2f}", f"{results.limit() / flops:.0f}"] for name, flops in work.items()]
    return f"{rates}\n{markdown_table(['work', 'Gop a text', 'texts/s at the best rate'], texts)}"


def shares(results: Results) -> str:
    """Each server as a share of the limit."""
    header = ["server", MANY, LISTS, f"{MANY}, without the saving", f"{LISTS}, without the saving"]
    rows = []
    for name in results.names:
        found = [results.median(name, rate(load)) for load in (MANY, LISTS)]
        cells = [f"{(one or 0.0) / results.limit_texts(saving):.0%}" for saving in (True, False) for one in found]
        rows.append([SERVERS[name].title, *cells])
    return markdown_table(header, rows)


def agreement(results: Results) -> str:
    """Labels that each server gave the same texts, against the plain recipe's in fp32."""
    reference = "naive" if "naive" in results.names else results.names[0]
    wanted = results.all(reference)[0]["labels"]
    rows = []
    for name in results.names:
        same = min(sum(a == b for a, b in zip(one["labels"], wanted, strict=True)) for one in results.all(name))
        rows.append([SERVERS[name].title, f"{same} of {len(wanted)}"])
    return markdown_table(["server", f"same label as {SERVERS[reference].title.strip('*')}"], rows)


def accuracy(results: Results) -> str:
    """What the artefacts' manifests say."""
    header = ["artefact", "test rows", "accuracy before", "after", "points lost", "answers changed", "size, MB"]
    rows = []
    for name, manifest in results.run["accuracy"].items():
        found = manifest["accuracy"]
        rows.append(
            [
                f"{name} {manifest['precision']}",
                f"{found['rows']:,}",
                f"{found['before']:.2%}",
                f"{found['after']:.2%}",
                f"{found['drop_points']:.2f}",
                f"{found['disagreement_percent']:.2f}%",
                f"{manifest['size']['after_bytes'] / MB:.0f} (fp32 {manifest['size']['before_bytes'] / MB:.0f})",
            ]
        )
    return markdown_table(header, rows)


def _one(results: Results, name: str, figure: Figure, scale: float = 1.0, digits: int = 1) -> str:
    value = results.median(name, figure)
    return NONE if value is None else f"{value * scale:,.{digits}f}"


def _sum(results: Results, name: str, count: Callable[[Measured], int]) -> str:
    values = results.series(name, count)
    return f"{sum(values):,.0f}" if values else NONE


def _unanswered(measured: Measured) -> int:
    return sum(_bad(measured, load) for load in _CLOSED)


def _bad(measured: Measured, load: str) -> int:
    return sum(count for status, count in measured[load]["outcomes"].items() if status != "200")
