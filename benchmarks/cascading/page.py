"""The page: what is promised, the figures, what they mean, and where the promise ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.cascading import audit
from benchmarks.cascading.promise import ROWS
from benchmarks.cascading.speed import BIG, CASCADE, MANY, SMALL
from inference.batching.audit import ALARM, CHECKED, CHECKED_AT_FIRST, CHECKS_AT_FIRST

MODULE = "benchmarks.cascade"
Part = dict[str, Any]
INTRODUCTION = """
A cascade is two models that answer as one. The small one reads every text and answers those that it is sure of; the
big one answers the others. It promises that at most a certain share of all texts (0.5% by default) gets another label
than the big model alone would give. The threshold is certified on held-out texts, without labels, so the promise is
for texts like those. They are a sample, so it holds with 95% confidence: for one sample in twenty it may not.

The first section tests the promise where it must hold, the second shows where it ends, and the last two measure
speed. All figures are those of int8 artefacts as they are served. *Small answers* is the share of texts that the
small model answers, *other labels* the share of all texts that get another label than the big model gives.
"""
SPLITS = """
## Is the promise kept?

The {texts:,} test rows of AG News, which neither model was trained on, are divided at random into halves, {splits}
times. The threshold is certified on one half, and the other half judges it. The big model is right for {big:.2%} of
all rows and the small one for {small:.2%}; their labels differ for {differs:.2%} of them.

*No threshold*: the share of splits in which so few other labels cannot be promised. *Small answers*, *other labels*
(with the standard deviation over splits) and *accuracy* are means over the other splits, on the judging half. The
last three are shares of all splits. *More*: the judging half has more other labels than was promised. *Beyond
chance*: more than chance allows in 95% of cases if their rate is exactly what was promised (exact binomial).
*Broken*: there are more over all rows, those of the certificate included. If all rows are taken for the whole world,
this is the promise itself, and 5% are allowed.
"""
SHIFT = """
## Where the promise ends

Titles without their stories, and sentences of Wikipedia's Current Events portal, six to fourteen years younger than
the training texts. The threshold is the one that all rows of AG News certify for {bound:.1%}; the first line is these
rows. *Again* is a certificate from a random half of the same texts, judged by the other half, the mean of {halves}
such halves.

*Noticed after* is **simulated** on the models' real answers: texts are drawn from the set at random, one after the
other, {length:,} in a series, and the server's own audit watches them: at first it lets the big model check
{at_first:.0%} of them, after {checks} checks {share:.0%}, and more again when the share passed on changes. It alarms
once the evidence against the promise reaches {alarm:g}, which happens with a chance of 5% at most if the promise
holds. *Alarms*: the share of series with one.
"""
SHIFT_MEANS = """
**The promise does not hold here.** {titles:.2%} of the titles and {events:.2%} of the events get another label,
instead of {bound:.1%} at most. The small model is less sure of them and answers fewer, {titles_easy:.0%} and
{events_easy:.0%} instead of {rows_easy:.0%}, but not few enough. Another label may be the better one: the big model
is right for {titles_big:.1%} of the titles and {events_big:.1%} of the events, the cascade for {titles_cascade:.1%}
and {events_cascade:.1%}.

What helps is to certify again with texts that are really asked about, which takes no labels. Until then there is the
audit, after whose alarm the server passes on more. The median series has its alarm after {titles_noticed} titles or
{events_noticed} events. On the rows, where the promise holds, {false_alarms:.1%} of the series have a false alarm.
"""
BULK = """
## How fast are files answered?

`python -m inference.score` classifies {rows:,} rows of AG News with the big model alone, the small one alone and the
cascade, which take turns for {rounds} rounds: rows per second, the median and the range. *×*: the median of the
ratios within a round to the big model alone. *Other labels*: of the file, than those of the big model.
"""
SERVING = """
## How fast are requests answered?

The big model alone and the cascade are served over HTTP, each request with a single text, for {seconds:g} seconds per
load. They take turns for {rounds} rounds. *{many} clients* send all kinds of texts, each its next one as soon as the
last is answered. A *lone client* sends only easy texts, which the small model answers, or only hard ones, which it
passes on: median latency in milliseconds. All figures are medians of the rounds; *×*, with the range: of the ratios
within a round to the big model alone. Of the requests of a load, {refused:.1%} at most were refused (503). Other
processes of this machine took {others:.0%} of its cores meanwhile (median).
"""
WIDENED = """
*{name}* is MiniLM widened to DistilBERT-base's 768 channels and matrix products, in a way that keeps its function
([widen.py](serving/widen.py)). It gives MiniLM's answers at the cost of the bigger model. It has {blocks} blocks;
DistilBERT-base has 6.
"""


def render(results: dict[str, Part]) -> str:
    sections: dict[str, Callable[[Part], str]] = {
        "splits": _splits,
        "shift": _shift,
        "bulk": _bulk,
        "serving": _serving,
    }
    page = harness.introduction(MODULE, "A cascade", INTRODUCTION)
    page += "".join(draw(results[part]) for part, draw in sections.items() if part in results)
    return f"{page}\n## Measurements\n" + "".join(
        f"\n*{part}*:\n\n{harness.fact_list(found['facts'])}" for part, found in results.items()
    )


def _share(name: str, digits: int = 1) -> Callable[[Part], str]:
    return lambda one: f"{100 * one[name]:.{digits}f}" if name in one else harness.NONE


def _splits(part: Part) -> str:
    columns: dict[str, Callable[[Part], str]] = {
        "promised, %": _share("bound", 2),
        "no threshold, %": _share("without"),
        "small answers, %": _share("easy"),
        "other labels, %": lambda one: (
            f"{100 * one['other']:.2f} ± {100 * one['sd']:.2f}" if "other" in one else harness.NONE
        ),
        "accuracy, %": _share("accuracy", 2),
        "more, %": _share("more"),
        "beyond chance, %": _share("beyond"),
        "broken, %": _share("broken"),
    }
    text = SPLITS.format(**part, **part["accuracy"])
    return f"{text}\n{harness.table(columns, part['bounds'])}"


def _shift(part: Part) -> str:
    def again(name: str, digits: int) -> Callable[[Part], str]:
        return lambda one: _share(name, digits)(one["certified_again"])

    columns: dict[str, Callable[[Part], str]] = {
        "texts": lambda one: one["name"],
        "number": lambda one: f"{one['texts']:,}",
        "accuracy: big, %": lambda one: _share("big")(one["accuracy"]),
        "cascade, %": lambda one: _share("cascade")(one["accuracy"]),
        "small answers, %": _share("easy"),
        "other labels, %": _share("other", 2),
        "again: small answers, %": again("easy", 1),
        "other labels, % ": again("other", 2),
        "alarms, %": lambda one: _share("alarms")(one["audit"]),
        "noticed after, median": lambda one: noticed(one["audit"]["median"]),
        "90th percentile": lambda one: noticed(one["audit"]["p90"]),
    }
    sets = [{"name": name, **found} for name, found in part["sets"].items()]
    text = SHIFT.format(
        length=audit.TEXTS,
        at_first=CHECKED_AT_FIRST,
        checks=CHECKS_AT_FIRST,
        share=CHECKED,
        alarm=ALARM,
        bound=part["bound"],
        halves=part["halves"],
    )
    means = SHIFT_MEANS.format(
        bound=part["bound"],
        rows_easy=part["sets"][ROWS]["easy"],
        false_alarms=part["sets"][ROWS]["audit"]["alarms"],
        **_figures("titles", part["sets"]["titles"]),
        **_figures("events", part["sets"]["all events"]),
    )
    return f"{text}\n{harness.table(columns, sets)}{means}"


def _figures(name: str, found: Part) -> dict[str, Any]:
    """Those of the text."""
    return {
        name: found["other"],
        f"{name}_easy": found["easy"],
        f"{name}_big": found["accuracy"]["big"],
        f"{name}_cascade": found["accuracy"]["cascade"],
        f"{name}_noticed": noticed(found["audit"]["median"]),
    }


def noticed(texts: int | None) -> str:
    """A number of texts, to two digits; None: more than a series has."""
    if texts is None:
        return f"over {audit.TEXTS:,}"
    return f"{float(f'{texts:.2g}'):,.0f}"


def _bulk(part: Part) -> str:
    def speeds(case: Part, model: str) -> list[float]:
        return [one[model]["rows_per_second"] for one in case["rounds"]]

    def shown(model: str) -> Callable[[Part], str]:
        return lambda case: harness.median_and_spread(speeds(case, model), 0)

    columns: dict[str, Callable[[Part], str]] = {
        "big model": lambda case: case["name"],
        "big alone": shown(BIG),
        "small alone": shown(SMALL),
        "cascade": shown(CASCADE),
        "×": lambda case: _ratios(speeds(case, CASCADE), speeds(case, BIG)),
        "other labels, %": _share("other", 2),
    }
    text = BULK.format(rows=part["rows"], rounds=_rounds(part))
    return f"{text}\n{harness.table(columns, part['cases'])}{_widened(part)}"


def _serving(part: Part) -> str:
    def figures(case: Part, model: str, kind: str, figure: str) -> list[float]:
        return [one[model][kind][figure] for one in case["rounds"]]

    def columns(kind: str, what: str, figure: str, digits: int) -> dict[str, Callable[[Part], str]]:
        return {
            what: lambda row: f"{median(figures(row, row['model'], kind, figure)):,.{digits}f}",
            f"{what}: ×": lambda row: _ratios(
                figures(row, row["model"], kind, figure), figures(row, BIG, kind, figure)
            ),
        }

    rows = [{**case, "model": model} for case in part["cases"] for model in (BIG, CASCADE)]
    table = harness.table(
        {
            "": lambda row: f"{row['name']}, {'alone' if row['model'] == BIG else CASCADE}",
            **columns("all", f"{MANY} clients, texts/s", "texts_per_second", 0),
            f"{MANY} clients, p99 ms": lambda row: (
                f"{median(figures(row, row['model'], 'all', 'p99_ms')):,.0f}"
            ),
            **columns("easy", "lone client, easy texts, ms", "p50_ms", 1),
            **columns("hard", "lone client, hard texts, ms", "p50_ms", 1),
        },
        rows,
    )
    loads = [
        load
        for case in part["cases"]
        for one in case["rounds"]
        for model in one.values()
        for load in model.values()
    ]
    text = SERVING.format(
        seconds=part["seconds"],
        many=MANY,
        rounds=_rounds(part),
        refused=max(one["refused"] for one in loads),
        others=median(one["others"] for one in loads),
    )
    passed_on = ", ".join(f"{one['passed_on']:.1%} with {one['name']}" for one in part["cases"])
    return f"{text}\n{table}\nHard texts are {passed_on}.\n{_widened(part)}"


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return harness.median_and_spread([a / b for a, b in zip(ours, theirs, strict=True)], 2)


def _rounds(part: Part) -> str:
    counts = sorted({len(case["rounds"]) for case in part["cases"]})
    return " or ".join(map(str, counts))


def _widened(part: Part) -> str:
    found = [one for one in part["cases"] if one["name"].endswith("widened")]
    return WIDENED.format(**found[0]) if found else ""
