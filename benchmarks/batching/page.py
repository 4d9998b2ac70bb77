"""The page of the batching curve: tables, and the defaults that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.batching.passes import ONE_TEXT
from benchmarks.batching.waits import ARRIVALS, CLIENTS
from benchmarks.tables import fact_list, markdown_table, spread

MODULE = "benchmarks.batching_curve"
# Speeds so close are taken for equal: the smaller pass or window is then the better one.
EQUAL = 0.03
# A wait pays when it gains more than this in every round, since every text that comes alone pays for it.
WORTH = 0.05

INTRODUCTION = f"""# Batching curve

Written by `python -m {MODULE}`; the rounds behind it are in the JSON file beside it. It settles how
the serving queue (`inference/batching/scheduler.py`) groups texts: how many tokens a forward pass takes, when texts
share the slots of an engine, how far an engine that pads looks for near lengths, and whether a free slot should wait
for more.

- A *slot* is a forward pass that an engine may run beside others, on one thread of its own; a pass may also take
  several slots. Passes are laid out by the server's own queue, from texts in random order, each its own call.
- *tokens/s* counts the texts' own tokens, never padding. Figures are medians of the rounds, *rounds* their smallest
  and largest.
- The waits are measured through the server's queue in one process, tokenizer and event loop included, HTTP not: texts
  are held until the first of them has waited so long. Clients ask again as soon as they are answered; *light* and
  *heavy* are texts at random instants, {ARRIVALS["light"]:.0%} and {ARRIVALS["heavy"]:.0%} of what 64 clients get
  without a wait. A wait pays if in every round it makes 8 or 64 clients more than {WORTH:.0%} faster.
"""
CURVE = """
### Tokens of a pass

"""
WINDOWS = """
### Near lengths

Passes of {tokens} tokens, padding included, filled with the near lengths among the oldest so many texts.

"""
WAITS = """
### Waiting for more texts

"""


def render(results: dict[str, Any]) -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_section(results[name]) for name in sorted(results))


def _section(section: dict[str, Any]) -> str:
    facts = section["facts"] | {
        "Engine": f"{section['engine']}, {section['num_slots']} slots, {'pads' if section['pads'] else 'does not pad'}",
        "Texts": f"{section['dataset']}, {section['mean_length']:.1f} tokens each, cut at {section['max_length']}",
        "Rounds": f"{len(section['rounds'])}, {section['seconds']:g} s a measurement",
    }
    return "".join(
        [
            f"\n## {section['model']}, {section['engine']}\n\n{fact_list(facts)}",
            CURVE,
            _curve(section),
            WINDOWS.format(tokens=section["defaults"]["max_batch_tokens"]) + _windows(section)
            if section["windows"]
            else "",
            WAITS,
            _waits(section),
            "\n### What follows\n\n",
            "".join(f"- {line}\n" for line in _conclusions(section)),
        ]
    )


def _curve(section: dict[str, Any]) -> str:
    has_slots = section["num_slots"] > 1
    slots = section["num_slots"]
    header = ["tokens a pass", "texts a pass", "all threads, ms", "tokens/s", "rounds"]
    if has_slots:
        header += ["1 thread, ms", "tokens/s", f"{slots} × 1 thread at once, ms", "tokens/s", "rounds"]
    rows = []
    for budget in section["budgets"]:
        ways = ["all", "one", "side by side"] if has_slots else ["all"]
        row = ["one text" if budget == ONE_TEXT else f"{budget:,}"]
        row.append(f"{_median(section, 'curve', budget, 'all', 'texts_per_pass'):.1f}")
        for way in ways:
            speeds = _series(section, "curve", budget, way, "tokens_per_second")
            row += [f"{1e3 * _median(section, 'curve', budget, way, 'pass_s'):.1f}", f"{median(speeds):,.0f}"]
            row += [] if way == "one" else [spread(speeds, 0)]
        rows.append(row)
    return markdown_table(header, rows)


def _windows(section: dict[str, Any]) -> str:
    rows = []
    for window in section["windows"]:
        speeds = _series(section, "windows", window, "tokens_per_second")
        rows.append(
            [
                str(window),
                f"{_median(section, 'windows', window, 'texts_per_pass'):.1f}",
                f"{_median(section, 'windows', window, 'padding'):.0%}",
                f"{median(speeds):,.0f}",
                spread(speeds, 0),
            ]
        )
    return markdown_table(["texts looked at", "texts a pass", "padding", "tokens/s", "rounds"], rows)


def _waits(section: dict[str, Any]) -> str:
    ways = [f"{clients} clients" for clients in CLIENTS]
    header = ["wait"]
    for way in ways:
        header += [f"{way}, texts/s", "p50 ms"]
    for way in ARRIVALS:
        header += [f"{way}, p50 / p99 ms", "texts a pass"]
    rows = []
    for wait in section["rounds"][0]["waits"]:
        row = [f"{wait} ms"]
        for way in ways:
            row.append(f"{_median(section, 'waits', wait, way, 'texts_per_second'):,.1f}")
            row.append(f"{1e3 * _median(section, 'waits', wait, way, 'p50_s'):.1f}")
        for way in ARRIVALS:
            p50, p99 = (1e3 * _median(section, "waits", wait, way, name) for name in ("p50_s", "p99_s"))
            row += [f"{p50:.1f} / {p99:.1f}", f"{_median(section, 'waits', wait, way, 'texts_per_pass'):.1f}"]
        rows.append(row)
    return markdown_table(header, sorted(rows, key=lambda row: int(row[0].split()[0])))


def _conclusions(section: dict[str, Any]) -> list[str]:
    way = "side by side" if section["num_slots"] > 1 else "all"
    budgets = [budget for budget in section["budgets"] if budget != ONE_TEXT]
    budget = _smallest_good(budgets, lambda size: _median(section, "curve", size, way, "tokens_per_second"))
    lines = [
        f"`max_batch_tokens`: {budget:,}, the smallest pass within {EQUAL:.0%} of the fastest; "
        f"the default is {section['defaults']['max_batch_tokens']:,}. A single text waits for at most one pass of "
        f"others, {1e3 * _median(section, 'curve', budget, way, 'pass_s'):.0f} ms, before its own."
    ]
    if section["num_slots"] > 1:
        lines += [_slots(section, budget), _alone(section)]
    if section["windows"]:
        window = _smallest_good(section["windows"], lambda size: _median(section, "windows", size, "tokens_per_second"))
        default = section["defaults"]["length_window"]
        lines.append(f"`length_window`: {window}, by the same rule; the default is {default}.")
    return [*lines, _wait(section)]


def _slots(section: dict[str, Any], budget: int) -> str:
    apart, together = (_series(section, "curve", budget, way, "tokens_per_second") for way in ("side by side", "all"))
    gain = median(a / b for a, b in zip(apart, together, strict=True))
    rule = "as the queue does" if gain > 1 else "which the queue's rule of one slot a pass does not follow"
    return (
        f"Passes of {budget:,} tokens: one thread on each of {section['num_slots']} slots makes {gain:.2f} times the "
        f"tokens/s of all threads in one pass after the other, so texts that wait are "
        f"{'spread over the slots' if gain > 1 else 'better kept together'}, {rule}."
    )


def _alone(section: dict[str, Any]) -> str:
    fast, slow = (_median(section, "curve", ONE_TEXT, way, "pass_s") for way in ("all", "one"))
    return (
        f"A text alone takes {1e3 * fast:.1f} ms on all threads and {1e3 * slow:.1f} ms on one, so it "
        f"{'gets' if fast < slow else 'need not get'} all free slots."
    )


def _wait(section: dict[str, Any]) -> str:
    ways = [f"{clients} clients" for clients in CLIENTS if clients > 1]

    def gains(wait: str, way: str) -> list[float]:
        speeds, without = (_series(section, "waits", one, way, "texts_per_second") for one in (wait, "0"))
        return [a / b - 1 for a, b in zip(speeds, without, strict=True)]

    tried = [(wait, way) for wait in section["rounds"][0]["waits"] if wait != "0" for way in ways]
    best, way = max(tried, key=lambda one: median(gains(*one)))
    light = 1e3 * (_median(section, "waits", best, "light", "p50_s") - _median(section, "waits", "0", "light", "p50_s"))
    figures = (
        f"{best} ms changes the texts/s of {way} by {median(gains(best, way)):+.1%} (rounds: "
        f"{min(gains(best, way)):+.1%} to {max(gains(best, way)):+.1%}), the light load's median by {light:+.1f} ms"
    )
    if any(min(gains(*one)) > WORTH for one in tried):
        return f"A wait pays: {figures}. The queue has none yet."
    return f"No wait pays: at best, {figures}. The queue has none, and no setting for one."


def _smallest_good(sizes: list[int], speed: Callable[[int], float]) -> int:
    best = max(speed(size) for size in sizes)
    return min(size for size in sizes if speed(size) >= (1 - EQUAL) * best)


def _series(section: dict[str, Any], table: str, *path: object) -> list[float]:
    values = []
    for one in section["rounds"]:
        found = one[table]
        for part in path:
            found = found[str(part)]
        values.append(found)
    return values


def _median(section: dict[str, Any], table: str, *path: object) -> float:
    return median(_series(section, table, *path))
