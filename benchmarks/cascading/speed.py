"""How much faster do both models together answer, in files and over HTTP?"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.cascading.scores import read_rows, scored
from benchmarks.distillation import score, write_texts
from benchmarks.serving.client import Load
from benchmarks.serving.running import Running, started
from benchmarks.serving.servers import SERVERS
from common.errors import UserError
from common.model_folder import read_manifest
from inference.engines.model_loader import ModelLoader
from inference.exporting.cascading import default_target

BIG, SMALL, CASCADE = "big", "small", "cascade"
MANY = 64
# Clients of each load, by the texts that they send.
LOADS = {"all": MANY, "easy": 1, "hard": 1}
_SEED = 7
_OURS = SERVERS["ours"]
Round = dict[str, Any]


def measure_bulk(options: Namespace) -> Iterator[dict[str, Any]]:
    """Rows per second of each model alone and of both, by `python -m inference.score`.

    Yields the results so far after each round.
    """
    cascades = {big: _cascade(big) for big in options.big}
    texts = _shuffled(options)[: options.bulk_rows]
    results: dict[str, Any] = {"rows": len(texts), "cases": []}
    with tempfile.TemporaryDirectory(prefix="cascade-") as name:
        folder = Path(name)
        write_texts(folder / "texts.csv", texts)
        for big, cascade in cascades.items():
            models = {BIG: big, SMALL: options.small, CASCADE: cascade}
            case, labels = _begin(results, big), {}

            def measure(model: Path, number: int, labels: dict[Path, list[str]] = labels) -> Round:
                found, speed = score((model, "auto"), folder / "texts.csv", folder)
                labels[model] = found
                return {"rows_per_second": speed}

            for one in harness.run_rounds(models, options.rounds, measure, _describe_rows):
                case["rounds"].append(one)
                pairs = zip(labels[big], labels[cascade], strict=True)
                case["other"] = float(np.mean([ours != theirs for ours, theirs in pairs]))
                yield results


def measure_serving(options: Namespace) -> Iterator[dict[str, Any]]:
    """The big model alone against both, asked single texts: by many clients, and by a lone one that
    sends only texts of one kind. Yields the results so far after each round.
    """
    cascades = {big: _cascade(big) for big in options.big}
    texts = _shuffled(options)
    results: dict[str, Any] = {"seconds": options.seconds, "cases": []}
    for big, cascade in cascades.items():
        models, case = {BIG: big, CASCADE: cascade}, _begin(results, big)
        kinds = _by_kind(options, cascade, texts)
        case["passed_on"] = len(kinds["hard"]) / len(texts)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cascade-")))
            for kind, some in kinds.items():
                _OURS.write_bodies(folder / kind, some, 1)
            # Both wait all the time for a request, which costs nothing, and take turns.
            running = {
                name: stack.enter_context(started(_OURS, model, sys.executable))
                for name, model in models.items()
            }

            def measure(server: Running, number: int, folder: Path = folder) -> Round:
                return {kind: _load(server, folder / kind, number, options) for kind in LOADS}

            for server in running.values():  # the first requests let buffers grow
                measure(server, 0)
            for one in harness.run_rounds(running, options.rounds, measure, _describe_load):
                case["rounds"].append(one)
                yield results


def _begin(results: dict[str, Any], big: Path) -> dict[str, Any]:
    config = json.loads((big / "config.json").read_text())
    blocks = config.get("num_hidden_layers", config.get("n_layers"))
    case = {"name": read_manifest(big).source["name"], "blocks": blocks, "rounds": []}
    results["cases"].append(case)
    return case


def _cascade(big: Path) -> Path:
    folder = default_target(big)
    if not folder.is_dir():
        what = f"does not exist; write it with `python -m inference.cascade {big} SMALL`"
        raise UserError(f"{folder}: {what}", code="benchmark-input")
    return folder


def _shuffled(options: Namespace) -> list[str]:
    # Test rows are often sorted, and neighbours resemble one another.
    texts = list(read_rows(options)[0].texts)
    random.Random(_SEED).shuffle(texts)
    return texts


def _by_kind(options: Namespace, folder: Path, texts: Sequence[str]) -> dict[str, Sequence[str]]:
    """All texts, those that the small model answers, and those that it passes on."""
    cascade = ModelLoader(folder).cascade
    if cascade is None:
        what = "is not a cascade; `python -m inference.cascade BIG SMALL` writes one"
        raise UserError(f"{folder}: {what}", code="benchmark-input")
    values, is_cut = scored(options.small, texts, options.cache)
    kinds: dict[str, list[str]] = {"easy": [], "hard": []}
    for text, one, cut in zip(texts, values.tolist(), is_cut.tolist(), strict=True):
        kinds["easy" if cascade.is_sure(one, cut) else "hard"].append(text)
    if not all(kinds.values()):
        what = f"the small model answers {len(kinds['easy']):,} of {len(texts):,} texts"
        raise UserError(f"{folder}: {what}; some of each kind are needed", code="benchmark-failed")
    return {"all": texts, **kinds}


def _load(server: Running, bodies: Path, number: int, options: Namespace) -> Round:
    # Each round starts elsewhere in the texts, so that medians are not those of one sequence.
    path, clients = _OURS.paths[0], LOADS[bodies.name]
    first = number * 1009
    load = Load(str(bodies), server.port, path, 1, options.seconds, clients=clients, first=first)
    found = server.apply(load)
    outcomes = found["outcomes"]
    # A server that is too slow for its clients refuses some of them, which is an outcome too.
    if "200" not in outcomes or not outcomes.keys() <= {"200", "503"}:
        what = f"{bodies.name} texts, {clients} clients: answered {outcomes}"
        raise UserError(what, code="benchmark-failed")
    latency = found["latency"]["200"]
    return {
        "texts_per_second": found["texts_per_second"],
        **{f"{name}_ms": 1e3 * latency[name] for name in ("p50", "p99")},
        "refused": outcomes.get("503", 0) / sum(outcomes.values()),
        "others": found["others_share"] + found["stolen_share"],
    }


def _describe_rows(found: Mapping[str, float]) -> str:
    return f"{found['rows_per_second']:,.0f} rows/s"


def _describe_load(found: Mapping[str, Round]) -> str:
    lone = ", ".join(f"{kind} {one['p50_ms']:.1f} ms" for kind, one in list(found.items())[1:])
    return f"{found['all']['texts_per_second']:,.0f} texts/s, a lone client: {lone}"
