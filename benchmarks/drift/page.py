"""The page: figures, what they mean, and where an estimate ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import pi, sqrt
from statistics import mean, median
from typing import Any

from benchmarks import harness
from benchmarks.drift.alarms import ALL, SHARE
from benchmarks.drift.cost import ON
from benchmarks.drift.months import OURS

MODULE = "benchmarks.observing"
Part = dict[str, Any]
INTRODUCTION = """
Two things are asked of a server that sees texts without labels: how accurate its answers are, and whether the texts
have changed. [What is estimated, and what cannot be known](../docs/observing.md) has the formulas. The last section is
about what it costs.
"""
MONTHS = """
## Accuracy without labels

A head on a frozen MiniLM was trained on half of the events before July 2011, and exported with the other half
({rows:,} rows, {accuracy:.1%} right) as held-out rows. From then on, each month is a stream: {texts:,} sentences of
Wikipedia's Current Events portal in {months} months, labelled by their editors. The estimate sees only counts.

*error*: the mean distance to the month's true accuracy, in points. *bias*: the mean difference. *in interval*: the
share of months whose accuracy lies within our interval around the method's estimate, which is meant to be 90%. The
interval is {width:.1f} points wide either way (median). All methods but ours look at each text and not at counts. By
chance alone, an estimator that knows the true probability of each answer would be off by {noise:.2f} points.
"""
MONTHS_MEANS = """
So the mean of calibrated confidences would do as well here. Cells need no more than counts either, and correct the
answers whose confidence is off. Methods that look at each text gain nothing on these texts. The labels hardly changed
their meaning in these years, which helps all methods. The last line is what people assume if they estimate nothing.
"""
YEARS = """
By year, *off*: the mean distance of the estimate within its months.
"""
SWAPPED = """
## What only reviewed texts can show

If {labels} swap their meaning in July 2011, no answer and no text looks different. Without reviews,
the estimate stays where it was. {reviewed} texts of each month, drawn uniformly and reviewed, correct it; *by them
alone* is the mean of the reviewed answers. Averages over {months} months and 20 draws each. *±*: half of the interval.
"""
OTHER = """
## Texts of another kind

`checkpoints/news` has learned from news of 2004, and its reference are such news ({reference:.1%} right). Of the same
months of events it answers {accuracy:.1%} right. The estimate is {value:.1%}, on average {error:.2f} points from the
truth of a month, and its interval, {width:.1f} points either way (median), holds in {held:.0%} of the months. So these
texts are not too different to say something: {unfamiliar:.1%} of them are unfamiliar, in the month with the most
{most:.1%}, instead of 1%. From 10% on the product gives no number. It gives one in {known} of the {months} months.
"""
ALARM = """
## The alarm

`checkpoints/news`, whose reference are {rows:,} test rows of AG News. {quiet:,} of them come first, then {share:.0%} of
the texts are foreign. *texts until the alarm*: counted from the change, foreign or not, in steps of 16; the median, and
in brackets the middle 90% of {trials} trials. *found*: within {most:,} texts. *Topics without a label* are arts and
health among the current events. They are written like other news, so the alarm needs longer than the 200 texts of the
goal to be sure of them.
"""
SILENT = """
**Silence.** In {trials} times {texts:,} texts drawn from the rows there were {alarms} alarms. The most evidence on the
way was {evidence:,.0f}; the alarm is raised at 1,000,000. With half of the rows as the reference, and texts drawn from
the other half, there were {unseen[alarms]} alarms in {unseen[trials]} times {unseen[texts]:,} texts, and the most
evidence was {unseen[evidence]:,.0f}.

**What has moved.** From now on all texts are of one kind. If they are all of a label of which the model is surer than
of others, no alarm is raised, but the line names it.
"""
COST = """
## What it costs

`checkpoints/news` under the load of {clients} clients, each of which sends its next text of AG News once the last is
answered. Client and server share the machine, whose speed changes by a tenth within seconds, because others use it too.
So servers that are started one after the other cannot be compared: two that do the same differ more than what is to be
measured. Instead, one process switches its observer every {slice_s:g} s (off, on, on, off), and each four slices give
one ratio. {starts} starts of {seconds:g} s each. Medians, in brackets the 95% interval of the median.

What the observer's own thread does counts for the texts that it has counted. The server without `OBSERVE` would also
lack four wake-ups per second, and a look at the store every five seconds. The goal is about the median: this interval
does not rule out that `OBSERVE=1` costs {most:.1%} of the texts per second.
"""


def render(results: dict[str, Part]) -> str:
    sections: dict[str, Callable[[Part], str]] = {
        "months": _months,
        "other_texts": _other_texts,
        "alarm": _alarm,
        "cost": _cost,
    }
    page = harness.introduction(MODULE, "Accuracy without labels, and the alarm", INTRODUCTION)
    page += f"{harness.goals_table(_goals(results))}"
    page += "".join(draw(results[part]) for part, draw in sections.items() if part in results)
    facts = (
        f"\n*{part}*:\n\n{harness.fact_list(found['facts'])}" for part, found in results.items()
    )
    return f"{page}\n## Measurements\n{''.join(facts)}"


def _goals(results: dict[str, Part]) -> list[harness.Goal]:
    months, alarm, cost = (results.get(name) for name in ("months", "alarm", "cost"))
    by_method = _by_method(months["months"]) if months else {}
    ours = by_method.get(OURS, {"error": None, "held": None})
    return [
        harness.Goal("mean error of the estimate, points", ours["error"], "at most", 2.0, "{:.2f}"),
        harness.Goal(
            "months within the interval, %", ours["held"], "at least", 90, "{:.1f}", "{:.0f}"
        ),
        harness.Goal(
            f"texts until the alarm, {SHARE:.0%} foreign, {ALL} (median)",
            alarm and (alarm["kinds"][ALL]["median"] or float("inf")),
            "at most",
            200,
            "{:.0f}",
        ),
        harness.Goal(
            "alarms in 5 × 1,000,000 texts without a change",
            alarm and alarm["silent"]["alarms"],
            "at most",
            0,
            "{:.0f}",
        ),
        harness.Goal(
            f"cost of {ON}, % of the texts per second",
            cost and 100 * (1 - median(_ratios(cost["cases"][ON], "on", "off"))),
            "at most",
            3.0,
            "{:.1f}",
        ),
    ]


def _ratios(fours: Sequence[Part], on: str, off: str) -> list[float]:
    return [one[on] / one[off] for one in fours]


def _by_method(months: Sequence[Part]) -> dict[str, dict[str, float]]:
    """Error and bias in points, and the share of months within our interval."""
    found = {}
    for name in (OURS, *months[0]["others"]):
        known = [one for one in months if one["value"] is not None]
        values = [one["value"] if name == OURS else one["others"][name] for one in known]
        errors = [value - one["accuracy"] for value, one in zip(values, known, strict=True)]
        within = [
            one["low"] - one["value"] <= -error <= one["high"] - one["value"]
            for error, one in zip(errors, known, strict=True)
        ]
        found[name] = {
            "error": 100 * mean(map(abs, errors)),
            "bias": 100 * mean(errors),
            "held": 100 * mean(within),
        }
    return found


def _months(part: Part) -> str:
    months = part["months"]
    rows = [{"name": name, **one} for name, one in _by_method(months).items()]
    table = harness.table(
        {
            "method": lambda one: f"**{one['name']}**" if one["name"] == OURS else one["name"],
            "error": lambda one: f"{one['error']:.2f}",
            "bias": lambda one: f"{one['bias']:+.2f}",
            "in interval, %": lambda one: f"{one['held']:.0f}",
        },
        rows,
    )
    # The mean distance of a normal deviate from 0 is sqrt(2 / pi).
    spreads = [sqrt(one["accuracy"] * (1 - one["accuracy"]) / one["texts"]) for one in months]
    text = MONTHS.format(
        rows=part["rows"],
        accuracy=part["accuracy"],
        texts=sum(one["texts"] for one in months),
        months=len(months),
        width=100 * median((one["high"] - one["low"]) / 2 for one in months if one["value"]),
        noise=100 * sqrt(2 / pi) * mean(spreads),
    )
    return f"{text}\n{table}{MONTHS_MEANS}{YEARS}\n{_years(months)}{_swapped(part)}"


def _years(months: Sequence[Part]) -> str:
    years = []
    for year, group in groupby(months, key=lambda one: one["month"][:4]):
        some = [one for one in group if one["value"] is not None]
        texts = sum(one["texts"] for one in some)

        def pooled(name: str, some: Iterable[Part] = some, texts: int = texts) -> float:
            return 100 * sum(one[name] * one["texts"] for one in some) / texts

        off = 100 * mean(abs(one["value"] - one["accuracy"]) for one in some)
        held = sum(one["low"] <= one["accuracy"] <= one["high"] for one in some)
        years.append(
            [
                year,
                f"{texts:,}",
                f"{pooled('accuracy'):.1f}",
                f"{pooled('value'):.1f}",
                f"{off:.2f}",
                f"{held} of {len(some)}",
                f"{pooled('unfamiliar'):.1f}",
            ]
        )
    header = ["", "texts", "accuracy, %", "estimate, %", "off", "in interval", "unfamiliar, %"]
    return harness.markdown_table(header, years)


def _swapped(part: Part) -> str:
    reviewed, swapped = part["reviewed"], part["swapped"]
    unseen = 100 * mean(abs(one["value"] - one["accuracy"]) for one in swapped)
    usual = _by_method(part["months"])[OURS]["error"]
    rows = []
    for name, without in (("as they are", usual), ("swapped", unseen)):
        figures = {key: mean(one[key] for one in reviewed[name]) for key in reviewed[name][0]}
        rows.append(
            [
                name,
                f"{without:.2f}",
                f"{100 * figures['error']:.2f}",
                f"{100 * figures['held']:.0f}",
                f"{100 * figures['width']:.1f}",
                f"{100 * figures['plain']:.2f}",
            ]
        )
    header = ["labels", "error without reviews", "with reviews", "in interval, %", "±"]
    text = SWAPPED.format(
        labels=" and ".join(reviewed["labels"]),
        reviewed=reviewed["texts"],
        months=len(part["months"]),
    )
    return f"{text}\n{harness.markdown_table([*header, 'by them alone'], rows)}"


def _other_texts(part: Part) -> str:
    months = part["months"]
    texts = sum(one["texts"] for one in months)

    def pooled(name: str) -> float:
        return sum(one[name] * one["texts"] for one in months) / texts

    return OTHER.format(
        reference=part["accuracy"],
        accuracy=pooled("accuracy"),
        value=pooled("value"),
        unfamiliar=pooled("unfamiliar"),
        held=mean(one["low"] <= one["accuracy"] <= one["high"] for one in months),
        error=100 * mean(abs(one["value"] - one["accuracy"]) for one in months),
        width=100 * median((one["high"] - one["low"]) / 2 for one in months),
        most=max(one["unfamiliar"] for one in months),
        known=sum(not one["reason"] for one in months),
        months=len(months),
    )


def _alarm(part: Part) -> str:
    def times(one: Part) -> str:
        low, middle, high = (
            harness.NONE if one[name] is None else f"{one[name]:,}"
            for name in ("low", "median", "high")
        )
        return f"{middle} ({low} to {high})"

    kinds = [{"name": name, **one} for name, one in part["kinds"].items()]
    table = harness.table(
        {
            "foreign texts": lambda one: (
                f"**{one['name']}**" if one["name"] == ALL else one["name"]
            ),
            "number": lambda one: f"{one['texts']:,}",
            "texts until the alarm": times,
            "found, %": lambda one: f"{100 * one['found']:.0f}",
        },
        kinds,
    )
    concepts = harness.table(
        {
            "texts": lambda one: one["kind"],
            "until the alarm": lambda one: f"{one['texts']:,}" if one["texts"] else "no alarm",
            "the line": lambda one: one["told"] or harness.NONE,
        },
        part["concepts"],
    )
    names = ("rows", "quiet", "share", "trials", "most")
    text = ALARM.format(**{name: part[name] for name in names})
    return f"{text}\n{table}{SILENT.format(**part['silent'], unseen=part['unseen'])}\n{concepts}"


def _cost(part: Part) -> str:
    def column(name: str, digits: int) -> Callable[[str], str]:
        return lambda case: f"{median(one[name] for one in part['cases'][case]):,.{digits}f}"

    def ratio(on: str, off: str) -> Callable[[str], str]:
        return lambda case: _with_interval(_ratios(part["cases"][case], on, off))

    columns = {
        "observing": str,
        "slices": lambda case: f"4 × {len(part['cases'][case])}",
        "texts/s, off": column("off", 0),
        "on to off": ratio("on", "off"),
        "CPU ms per text, off": column("off_cpu_ms", 3),
        "on to off ": ratio("on_cpu_ms", "off_cpu_ms"),
    }
    names = ("clients", "seconds", "starts", "slice_s")
    least = _interval(_ratios(part["cases"][ON], "on", "off"))[0]
    text = COST.format(**{name: part[name] for name in names}, most=1 - least)
    return f"{text}\n{harness.table(columns, part['cases'])}"


def _with_interval(values: Sequence[float]) -> str:
    low, high = _interval(values)
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which the true median lies with 95%: how many of n values are below it has a binomial
    distribution, whose standard deviation is half of the root of n.
    """
    ordered, n = sorted(values), len(values)
    place = max(0, int(n / 2 - 1.96 * sqrt(n) / 2) - 1)
    return ordered[place], ordered[-1 - place]
