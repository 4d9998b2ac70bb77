"""The page: every figure from the rounds, every version from the Python that ran it."""

from __future__ import annotations

from statistics import median

from benchmarks.serving import tables
from benchmarks.serving.goals import REFERENCE, goals_table
from benchmarks.serving.measure import BATCH, MOST_NOISE, OVERLOAD_SHARE, PATIENCE, STEADY_SHARE
from benchmarks.serving.results import LOADS, Results
from benchmarks.serving.servers import SERVERS
from benchmarks.tables import fact_list

MODULE = "benchmarks.serving_load"

INTRODUCTION = f"""# Serving under load

Written by `python -m {MODULE}`; the rounds behind it are in the JSON file beside it. Every server classifies the same
texts with the same weights on the same cores, asked by the same client; they take turns within a round, in another
order each round, one alive at a time, each started afresh. Figures are medians over rounds; a ratio is the median of
the ratios within a round.
"""

CLOSED = f"""
## Closed loop: each client sends when it has its answer

*texts/s*: each client's answers over the time that they took it, summed. *1, 8, 64 clients* send single texts,
*lists* are one client's requests of {BATCH} texts. *not answered*: anything but a 200, over all loads and rounds.
Nothing is cached.

"""

OPEN_STEADY = f"""
## Open loop below capacity

Texts are sent at {STEADY_SHARE:.0%} of what the server itself reached with 64 clients in the same round, whatever it
answers. Latency counts from the instant at which a text *should* have been sent, so a late client does not flatter
the server.

"""

OPEN_OVERLOAD = f"""
## Open loop at {OVERLOAD_SHARE:.0f} times the capacity

*answered in time*: answers of 200 while texts were being sent. *refused*: 429 or 503. *taken in and lost*: requests
that were neither refused nor answered with 200: too late by the server's own clock (408, 504), failed, broken off, or
still without a word {PATIENCE:.0f} s after the last was sent. A server with no bound on its queue refuses nothing and
loses what it cannot do.

"""

RESOURCES = """
## What it takes

*start*: from the start of the process to its first answer to a text, files in the page cache. *memory*: resident, of
all its processes, shared pages counted once (PSS), before the first load and after the last. *CPU-s*: of all its
processes, at 64 clients. *$*: at 64 clients, for a machine of {dollars:.2f} dollars an hour (an assumption:
`--dollars_per_hour`) that is kept busy.

"""

LIMIT = """
## The machine's own int8 limit

The encoder's matrix products in int8 and nothing else, through every library at hand, in the same run; the best of
them all in any round is the rate taken. The *saving*: only the first token is read by the classifier, so the last
block's query, output projection and feed-forward are needed for it alone; the logits are the same.

"""

SHARES = """
Texts a second as a share of that limit, unpadded; with the saving (which makes the limit higher and the share lower)
and without:

"""

ACCURACY = """
## Accuracy

From the manifests of the artefacts of {model}, which were compared with fp32 on the same rows when they were
exported.{note} In this run, each server's labels for the same {batch} texts:

"""

TRUST = """
## How far to trust it

- Client and server share the cores. The client took {client} of them at most, other processes {others} in the median
  and {others_most} at most, the machine's host {stolen} at most, over all loads and rounds.
  {disturbed} of {loads} loads were disturbed (others and host took more than {most_noise:.0%}): their figures are too
  low, and by how much differs from server to server.
- A difference smaller than the spread of the rounds is not a finding; p99 of a load with fewer than some hundred
  answers (a lone client of a slow server, lists) is close to its maximum.
- The client's p99 of lateness in the open loops was {lateness:.1f} ms at most; it is part of the latencies.
- Loopback only: no network, no TLS, no proxy.
- Peers are measured as their documentation sets them up, tuned where it says so; another setting may suit another
  machine better.
"""

PEERS = """
## The servers and their settings

Peers with an int8 artefact clean and tokenise as ours do and answer with the same JSON. They run in a Python of their
own:

```
python -m venv peers                       # torch first, in its CPU build
peers/bin/pip install torch openvino onnxruntime transformers fastapi uvicorn litserve mosec bentoml "ray[serve]"
python -m venv infinity                    # Infinity needs version 4 of transformers
infinity/bin/pip install torch "infinity_emb[server,torch]" "transformers<5" optimum "optimum-onnx[onnxruntime]"
python -m benchmarks.serving.widen checkpoints/minilm_agnews MODEL    # or a model of base size, where there is one
python -m inference.export MODEL && python -m inference.export MODEL --engine openvino
python -m inference.export MODEL --engine onnx
python -m benchmarks.serving_load --model MODEL --peer_python peers/bin/python --infinity_python infinity/bin/python
```

"""


def render(run: dict) -> str:
    """The whole page."""
    results = Results(run)
    goals = goals_table(results)
    return "".join(
        [
            INTRODUCTION,
            f"\n{_facts(results)}",
            f"\n## Goals\n\n{goals}" if goals else "",
            CLOSED,
            tables.closed_loop(results),
            f"\n{tables.latencies(results)}",
            f"\n{tables.ratios(results, REFERENCE)}" if REFERENCE in results.names else "",
            OPEN_STEADY,
            tables.steady(results),
            OPEN_OVERLOAD,
            tables.overload(results),
            RESOURCES.format(dollars=run["dollars_per_hour"]),
            tables.resources(results),
            LIMIT,
            tables.limits(results),
            SHARES,
            tables.shares(results),
            _accuracy(results),
            _trust(results),
            PEERS,
            *_settings(results),
        ]
    )


def _facts(results: Results) -> str:
    run = results.run
    work, size = run["workload"], run["workload"]["size"]
    return fact_list(
        run["facts"]
        | {
            "Model": f"{run['model']}: {size['n_layers']} blocks of {size['dim']} ({size['hidden_dim']}), "
            f"{size['n_heads']} heads",
            "Texts": f"{work['texts']:,} test texts of {work['dataset']}, {work['tokens_mean']:.1f} tokens in the "
            f"mean, cut at {work['limit']}",
            "Rounds": f"{len(run['rounds'])} of {run['wanted_rounds']}, {run['seconds']:g} s a load "
            "(half of it for 1 client)",
            "Open loops": "random gaps (Poisson)" if run["poisson"] else "equal gaps",
        }
    )


def _accuracy(results: Results) -> str:
    run = results.run
    note = ""
    if run["accuracy_model"] != run["model"]:
        note = (
            f" {run['model']} is that model made wider by doubling its channels, for the time it takes alone: its "
            "twin columns make quantisation look unlike a real model's, so its accuracy is not given."
        )
    text = ACCURACY.format(model=run["accuracy_model"], note=note, batch=BATCH)
    manifests = f"\n{tables.accuracy(results)}" if run["accuracy"] else ""
    return f"{text}{tables.agreement(results)}{manifests}"


def _trust(results: Results) -> str:
    loads = [one[load] for name in results.names for one in results.all(name) for load in LOADS if load in one]
    if not loads:
        return ""
    others = [load["others_share"] for load in loads]
    return TRUST.format(
        client=f"{max(load['client_share'] for load in loads):.1%}",
        others=f"{median(others):.1%}",
        others_most=f"{max(others):.1%}",
        disturbed=sum(load["others_share"] + load["stolen_share"] > MOST_NOISE for load in loads),
        loads=len(loads),
        most_noise=MOST_NOISE,
        stolen=f"{max(load['stolen_share'] for load in loads):.1%}",
        lateness=max(load["lateness_p99"] for load in loads) * 1e3,
    )


def _settings(results: Results) -> list[str]:
    lines = []
    for name in results.names:
        server = SERVERS[name]
        versions = ", ".join(f"{package} {version}" for package, version in results.run["versions"][name].items())
        served = f"`MODEL/{server.artefact}`" if server.artefact else "the model folder"
        engine = next((one["engine"] for one in results.all(name) if one.get("engine")), "")
        parts = [versions, f"serves {served}{f', with {engine}' if engine else ''}", server.settings]
        lines.append(f"- {server.title} (`{name}`): {'; '.join(filter(None, parts))}.\n")
    lines += [f"- {SERVERS[name].title} (`{name}`): not measured: {why}\n" for name, why in results.left_out.items()]
    return lines
