"""The page: what is promised, the figures, what they mean, and where the promise ends."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.honest.cost import ALL, CALIBRATED, LOADS, PLAIN
from benchmarks.honest.foreign import ENCODERS, OURS, TITLES
from benchmarks.honest.texts import POOLED

MODULE = "benchmarks.honest_answers"
FIGURE = "honest_answers.png"
Part = dict[str, Any]
# Of `shift`, with the title that each has in the figure.
DRAWN = {"rows": "AG News, rows", "titles": "AG News, titles", "all events": "current events"}
INTRODUCTION = """
A calibrated model promises three things, each for texts like the rows that it was calibrated on:

- **Probabilities**: of the answers with a confidence of 80%, 80% are right.
- **Coverage**: the set for `coverage` 0.95 holds the right label for 95% of the texts.
- **Errors**: with `max_error` 0.02, at most 2% of the answers that are given are wrong. The calibration rows are a
  sample, so this holds with 95% confidence: for one sample in twenty it may not.

*Familiarity* is no promise but a warning: it says which texts are unlike those that the model was trained on. The first
two sections test the promises where they must hold, the next two show where they end, the last one what they cost. All
figures are those of the served artefact.
"""
PROMISES = """
## Are the promises kept?

The test rows of AG News, which the model was not trained on, are divided at random again and again. `calibration.fit`
sees only one part, from the temperature to the last threshold, and the other part judges. *rows*: how many it sees;
*splits*: how often.

*held*: the share of the other rows whose set has the right label, mean and standard deviation over splits. Even exact
coverage varies between samples, by the beta-binomial distribution. *below* and *above* are the shares of splits outside
the middle 95% of it, so up to 2.5% are expected in each. *labels*: mean size of a set. *worst label*: coverage of the
label that has the least.
"""
TOP_LABEL = """
A set always has the most probable label, which is right more often than {least:.0%}, so at that coverage more is held
than was asked for. The promise is about all texts and not about each label: see *worst label*.
"""
ERRORS = """
*no threshold*: the share of splits in which so few errors cannot be promised, so that the model refuses to. *answered*
and *wrong* are means over the others: the share of the other rows that get an answer, and the share of these answers
that is wrong. The last three are shares of all splits. *more*: more of the other rows' answers are wrong than was asked
for. *beyond chance*: more than chance allows in 95% of cases if the rate is exactly what was asked for (binomial).
*broken*: more are wrong over all rows, those of the fit included. If all rows are taken for the whole world, this is
the promise itself, and 5% are allowed.
"""
CALIBRATION = """
## Do the probabilities mean what they say?

The calibration error is the distance between confidence and accuracy, averaged over 15 bins of equally many answers. On
all rows, with each judged by a fit that has not seen it (ten folds), it is **{before:.2%} before** calibration and
**{after:.2%} after**. In the figure, and in the table of the next section, the calibration was fitted on every other
row. The rows are those that it has not seen.

![Accuracy by confidence, before and after calibration]({figure})
"""
SHIFT = """
## Where the promise ends

Titles without their stories, and sentences of Wikipedia's Current Events portal, six to fourteen years younger than the
training texts. Their categories were mapped to AG News' labels, which is not always what an editor meant: a trial of a
company is *law*, so World. The calibration is that of every other row of AG News, asked for `coverage` {coverage:g} and
`max_error` {max_error:g}; *rows* are the others of them.

*error* is the calibration error before and after. *held* and *labels*: of the sets. *answered* and *wrong*: as above.
*uncertain* and *unfamiliar*: the shares of texts without an answer, by the reason that the product gives.
"""
SHIFT_MEANS = """
**The promises do not hold here.** Sets that should hold the right label for {coverage:.0%} of the texts hold it for
{titles_held:.1%} of the titles and {events_held:.1%} of the events. Of the answers at {max_error:.0%},
{titles_wrong:.1%} and {events_wrong:.1%} are wrong. The calibration still helps: it brings confidence closer to
accuracy, and the model answers less, {titles_answered:.0%} of the titles and {events_answered:.0%} of the events
instead of {rows_answered:.0%} of the rows. But nothing in an answer says that the promise is off, and familiarity
does not notice either, because these are ordinary news.

What helps is to calibrate again with labelled rows of the texts that are really asked about. Fitted on {rows:,} of the
events, drawn at random from all years, and judged by the others ({splits} times), sets hold the right label for
{again_held:.1%} of them, with {again_size:.2f} labels on average. {again_with:.0%} of these fits can promise
{max_error:.0%}: they answer {again_answered:.0%} of the events, and {again_wrong:.1%} of the answers are wrong.
"""
FOREIGN = """
## Which foreign texts are noticed?

Familiarity is fitted on every other row and judged by the others. *AUROC*: how often a foreign text looks stranger than
one of these rows. *at 5%*, *at 1%*: the share of the foreign texts that is found if so many of the rows are false
alarms. *flagged*: what the product calls unfamiliar (below {limit:g}), which it does with {rows_flagged:.1%} of the
{rows:,} rows.

*Topics without a label* are arts and health among the current events, *code* is pieces of Python's standard library,
*other languages* are sentences of SIB-200 in {languages} languages, and *nonsense* is random letters, keys and words.
*Other domains* are questions to a bank (Banking77), comments (GoEmotions) and sentences of the STS benchmark, of which
some are news. Titles are short but not foreign, so they should not be found.
"""
FOREIGN_MEANS = """
Most code, other languages and nonsense is found. News on topics that no label is for is hard, because it is written
like the rest: at 1% false alarms, {topics:.0%} of it is found. So a flag is a good reason to look at a text, but a text
without a flag need not fit.
"""
COMPARISON = """
The same by other means, on a sample: {rows:,} rows and {foreign} of each kind, with the mean over the four kinds.
*cost*: µs per text, in batches of {batch}, on top of the model's own answer; other processes had a part of the cores,
so these are upper limits. *MiniLM* is the mean distance to the {neighbours} nearest of {references:,} training texts,
by the mean vector of a frozen encoder (`all-MiniLM-L6-v2`, PyTorch, fp32).
"""
COMPARED = """
A frozen encoder knows topics better than surprise and evidence do. By *{best}*, {found:.1%} of the foreign texts are
found at 5% false alarms instead of {ours:.1%}, at about {times:,.0f} times the cost, because every text needs a second
forward pass, of a bigger model. Familiarity is what costs next to nothing.
"""
COST = """
## What does it cost?

The artefact is served over HTTP: with its calibration taken out of a copy's manifest; as it is; and with coverage,
max_error and familiarity asked for in each request. Single texts come over {single} connections, and lists of {list}
over {list_clients}. *CPU*: processor time of the server per text, in µs, the median of {rounds} rounds of {seconds:g}
seconds each, in which the three take turns. *×*: the median of the ratios within a round to the artefact without
calibration, with the smallest and the largest. Other processes of this machine took {others:.0%} of its cores meanwhile
(median): the ranges are wide, and the texts per second, which are in the JSON file, say little.
"""


def render(results: dict[str, Part]) -> str:
    sections: dict[str, Callable[[Part], str]] = {
        "shift": _shift,
        "foreign": _foreign,
        "cost": _cost,
    }
    sizes = [
        one for part in ("halves", "sizes") if part in results for one in results[part]["sizes"]
    ]
    page = harness.introduction(MODULE, "Honest answers", INTRODUCTION)
    page += _promises(sizes) if sizes else ""
    page += "".join(draw(results[part]) for part, draw in sections.items() if part in results)
    return (
        page
        + "## Measurements\n"
        + "".join(
            f"\n*{part}*:\n\n{harness.fact_list(found['facts'])}" for part, found in results.items()
        )
    )


def _share(name: str, digits: int = 1) -> Callable[[Part], str]:
    return lambda one: f"{100 * one[name]:.{digits}f}" if name in one else harness.NONE


def _promises(sizes: Sequence[Part]) -> str:
    def by_level(name: str) -> list[Part]:
        size = ("rows", "splits")
        return [{key: one[key] for key in size} | level for one in sizes for level in one[name]]

    def of_all(name: str) -> Callable[[Part], str]:
        # A split without a threshold gives no answers, and so breaks no promise.
        return lambda one: f"{100 * (1 - one['without']) * one.get(name, 0):.1f}"

    how: dict[str, Callable[[Part], str]] = {
        "rows": lambda one: f"{one['rows']:,}",
        "splits": lambda one: str(one["splits"]),
    }
    coverages = harness.table(
        {
            **how,
            "coverage, %": _share("coverage", 0),
            "held, %": lambda one: f"{100 * one['held']:.2f} ± {100 * one['sd']:.2f}",
            "below, %": _share("below"),
            "above, %": _share("above"),
            "labels": lambda one: f"{one['size']:.2f}",
            "worst label, %": _share("lowest_label"),
        },
        by_level("coverage"),
    )
    errors = harness.table(
        {
            **how,
            "max_error, %": _share("max_error", 0),
            "no threshold, %": _share("without"),
            "answered, %": _share("answered"),
            "wrong, %": _share("wrong", 2),
            "more, %": of_all("more"),
            "beyond chance, %": of_all("beyond_chance"),
            "broken, %": of_all("more_in_all"),
        },
        by_level("errors"),
    )
    least = min(one["coverage"] for one in by_level("coverage"))
    return f"{PROMISES}\n{coverages}{TOP_LABEL.format(least=least)}{ERRORS}\n{errors}"


def _shift(part: Part) -> str:
    columns: dict[str, Callable[[Part], str]] = {
        "texts": lambda one: one["name"],
        "number": lambda one: f"{one['texts']:,}",
        "accuracy, %": _share("accuracy"),
        "error, %": lambda one: f"{100 * one['error_before']:.1f} → {100 * one['error_after']:.1f}",
        "held, %": _share("held"),
        "labels": lambda one: f"{one['size']:.2f}",
        "answered, %": _share("answered"),
        "wrong, %": _share("wrong", 2),
        "uncertain, %": _share("uncertain"),
        "unfamiliar, %": _share("unfamiliar"),
    }
    sets = [{"name": name, **found} for name, found in part["sets"].items()]
    asked = {key: part[key] for key in ("coverage", "max_error")}
    calibration = CALIBRATION.format(figure=FIGURE, **part["cross_fitted"])
    means = SHIFT_MEANS.format(**asked, **_shift_figures(part))
    return f"{calibration}{SHIFT.format(**asked)}\n{harness.table(columns, sets)}{means}"


def _shift_figures(part: Part) -> dict[str, float]:
    """Those of the text."""
    sets, again = part["sets"], part["calibrated_again"]
    named = {"rows": sets["rows"], "titles": sets["titles"], "events": sets["all events"]}
    [cover] = [one for one in again["coverage"] if one["coverage"] == part["coverage"]]
    [bound] = [one for one in again["errors"] if one["max_error"] == part["max_error"]]
    keys = ("held", "size", "wrong", "answered")
    named["again"] = cover | bound
    found = {f"{name}_{key}": one.get(key, 0.0) for name, one in named.items() for key in keys}
    found["again_with"] = 1 - bound["without"]
    return found | {"rows": again["rows"], "splits": again["splits"]}


def _foreign(part: Part) -> str:
    kinds = part["kinds"]
    figures: dict[str, Callable[[Part], str]] = {
        "AUROC": lambda one: f"{one['auroc']:.3f}",
        "at 5%, %": _share("0.05"),
        "at 1%, %": _share("0.01"),
    }
    rows = [{"name": kind, **found} for kind, found in kinds.items() if kind != TITLES]
    rows.append({"name": f"**mean of {', '.join(POOLED)}**", **part["pooled"]})
    rows.append({"name": TITLES, **kinds[TITLES]})
    table = harness.table(
        {
            "texts": lambda one: one["name"],
            "number": lambda one: f"{one['texts']:,}" if "texts" in one else "",
            **figures,
            "flagged, %": _share("flagged"),
        },
        rows,
    )
    methods = [{"name": name, **found} for name, found in part["methods"].items()]
    compared = harness.table(
        {
            "by": lambda one: f"**{one['name']}**" if one["name"] == OURS else one["name"],
            **{
                name: (lambda one, show=show: show(one["pooled"])) for name, show in figures.items()
            },
            **{
                f"{kind}, at 5%, %": (lambda one, kind=kind: _share("0.05")(one["kinds"][kind]))
                for kind in POOLED
            },
            "cost, µs": lambda one: f"{one['microseconds']:,.1f}",
        },
        methods,
    )
    sample = dict(part["sample"])
    words = {key: part[key] for key in ("references", "neighbours", "batch")}
    comparison = COMPARISON.format(
        rows=sample.pop("rows"),
        foreign=" or ".join(map(str, sorted(set(sample.values())))),
        **words,
    )
    means = FOREIGN_MEANS.format(topics=kinds[POOLED[0]]["0.01"])
    compared += against_encoder(part["methods"])
    text = FOREIGN.format(languages=len(kinds["other languages"]["groups"]), **part)
    return f"{text}\n{table}{means}{comparison}\n{compared}"


def against_encoder(methods: dict[str, Part]) -> str:
    ours = methods[OURS]
    others = {name: methods[name] for name in ENCODERS if name in methods}
    best = max(others, key=lambda name: others[name]["pooled"]["0.05"], default=None)
    if best is None or others[best]["pooled"]["0.05"] <= ours["pooled"]["0.05"]:
        return ""
    return COMPARED.format(
        best=best,
        found=others[best]["pooled"]["0.05"],
        ours=ours["pooled"]["0.05"],
        times=float(f"{others[best]['microseconds'] / ours['microseconds']:.1g}"),
    )


def _cost(part: Part) -> str:
    rounds = part["rounds"]

    def cpu(case: str, size: int) -> list[float]:
        return [one[case][str(size)]["cpu_us"] for one in rounds]

    def columns(size: int) -> dict[str, Callable[[str], str]]:
        what = "single texts" if size == 1 else f"lists of {size}"
        return {
            f"{what}: CPU": lambda case: f"{median(cpu(case, size)):,.0f}",
            f"{what}: ×": lambda case: harness.median_and_spread(
                [
                    ours / plain
                    for ours, plain in zip(cpu(case, size), cpu(PLAIN, size), strict=True)
                ],
                2,
            ),
        }

    single, many = LOADS
    table = harness.table(
        {"": lambda case: case, **columns(single), **columns(many)}, (PLAIN, CALIBRATED, ALL)
    )
    text = COST.format(
        single=LOADS[single],
        list=many,
        list_clients=LOADS[many],
        rounds=len(rounds),
        seconds=part["seconds"],
        others=median(
            one[case][str(size)]["others"] for one in rounds for case in one for size in LOADS
        ),
    )
    return f"{text}\n{table}\n"


def draw(part: Part) -> bytes:
    """PNG of the reliability diagrams: a panel for each kind of text."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3 * len(DRAWN), 2.9), layout="constrained")
        panels = figure.subplots(1, len(DRAWN), sharey=True)
        for panel, (name, title) in zip(panels, DRAWN.items(), strict=True):
            panel.plot([0.3, 1], [0.3, 1], color="#5a6570", linewidth=0.8, linestyle=":")
            for when, colour in (("before", "#d55e00"), ("after", "#0072b2")):
                pairs = part["sets"][name][f"bins_{when}"]
                confidence, accuracy = zip(*pairs, strict=True)
                panel.plot(confidence, accuracy, "o-", color=colour, markersize=3, label=when)
            panel.set(title=title, xlabel="confidence", xlim=(0.35, 1.01), ylim=(0.3, 1.01))
        panels[0].set(ylabel="accuracy")
        panels[0].legend(frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=160)
    return file.getvalue()
