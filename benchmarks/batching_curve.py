"""How many tokens should a forward pass of an engine take, and how far should it look for texts of near lengths?

Writes a page of tables, and beside it the rounds as JSON, from which the page is written after every round: models and
engines measured earlier stay on it. The defaults of the serving queue follow from this page.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.harness import spread, table
from common.errors import ModelLoadError, UserError
from common.hardware import cpu_flags
from inference.batching.classifier import length_window
from inference.batching.scheduler import FairQueue, Flow, QueuedText
from inference.engines.base import CPU_BATCH_TOKENS, Engine, TokenBatch
from inference.engines.model_loader import ModelLoader
from inference.engines.selection import ENGINES
from inference.settings import keep_tokenizer_on_one_thread
from training.data.dataset import load_news

MODULE = "benchmarks.batching_curve"
ONE_TEXT = 0  # a budget: passes of one text each
BUDGETS = (ONE_TEXT, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)  # tokens per pass
WINDOWS = (8, 16, 32, 64, 128, 256)  # texts
NUM_TEXTS = 1024
SEED = 7
PACKAGES = ("numpy", "tokenizers", "torch", "onnxruntime", "openvino")
# Speeds this close count as equal; the smaller pass or window is then the better one.
EQUAL = 0.03
ALL, ONE, SIDE_BY_SIDE = "all", "one", "side by side"
INTRODUCTION = """
The rounds behind it are in the JSON file beside it. It settles how the serving queue
(`inference/batching/scheduler.py`) groups texts: how many tokens a forward pass takes, when texts share the slots of an
engine, and how far an engine that pads looks for near lengths.

- A *slot* is a forward pass that an engine may run beside others, on its own thread; a pass may also take several
  slots. The server's own queue forms the passes, from texts in random order, each one call.
- *tokens/s* counts the texts' own tokens, never padding. Figures are medians of the rounds, *rounds* their smallest
  and largest.
"""
TokenIds = Sequence[NDArray[np.int32]]
Section = dict[str, Any]


def main() -> None:
    options = _parse()
    keep_tokenizer_on_one_thread()
    try:
        model = ModelLoader(options.model, options.engine)
    except ModelLoadError as error:
        raise UserError(str(error), code="model-unusable") from error
    texts = list(load_news(options.texts).test.texts)
    Random(SEED).shuffle(texts)
    token_ids = [np.array(one.ids, np.int32) for one in model.tokenizer.encode(texts[:NUM_TEXTS])]
    section = new_section(options, model, token_ids)
    results = harness.read_results(options.output.with_suffix(".json"))
    for _ in measure_rounds(model.engine, token_ids, section, options.rounds):
        results[f"{options.model.name}, {model.engine.name}"] = section
        harness.write_page(options.output, render(results), results)


def new_section(options: Namespace, model: ModelLoader, token_ids: TokenIds) -> Section:
    """What the page needs to know about a model and its engine, with no rounds yet."""
    flags = sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "fma")))
    return {
        "facts": harness.measurement_facts(MODULE, PACKAGES) | {"Instructions": ", ".join(flags) or "unknown"},
        "model": options.model.name,
        "engine": model.engine.name,
        "pads": model.engine.pads,
        "num_slots": model.engine.num_slots,
        "max_length": model.max_length,
        "mean_length": sum(map(len, token_ids)) / len(token_ids),
        "dataset": Path(options.texts).name,
        "seconds": options.seconds,
        "defaults": {"max_batch_tokens": CPU_BATCH_TOKENS, "length_window": length_window(CPU_BATCH_TOKENS)},
        # No pass may be smaller than the longest text.
        "budgets": [budget for budget in BUDGETS if budget == ONE_TEXT or budget >= model.max_length],
        "windows": list(WINDOWS) if model.engine.pads else [],
        "rounds": [],
    }


def measure_rounds(engine: Engine, token_ids: TokenIds, section: Section, rounds: int) -> Iterator[Section]:
    """Measure every pass size and every window once per round, and add the round to the section."""

    def measure(case: tuple[str, int], number: int) -> dict[str, Any]:
        kind, size = case
        if kind == "windows":
            batches = form_passes(token_ids, section["defaults"]["max_batch_tokens"], pads=True, window=size)
            return run_passes(engine, batches, 1, engine.num_slots, section["seconds"]) | {"padding": padding(batches)}
        batches = form_passes(token_ids, size, pads=engine.pads, window=length_window(size))
        found = {ALL: run_passes(engine, batches, engine.num_slots, 1, section["seconds"])}
        if engine.num_slots > 1:
            found[ONE] = run_passes(engine, batches, 1, 1, section["seconds"])
            found[SIDE_BY_SIDE] = run_passes(engine, batches, 1, engine.num_slots, section["seconds"])
        return found

    def describe(found: dict[str, Any]) -> str:
        ways = found if ALL in found else {"window": found}
        return ", ".join(f"{way} {figures['tokens_per_second']:,.0f} tokens/s" for way, figures in ways.items())

    cases = {f"{kind} {size}": (kind, size) for kind in ("budgets", "windows") for size in section[kind]}
    for found in harness.run_rounds(cases, rounds, measure, describe):
        curve = {str(size): found[f"budgets {size}"] for size in section["budgets"]}
        windows = {str(size): found[f"windows {size}"] for size in section["windows"]}
        section["rounds"].append({"curve": curve, "windows": windows})
        yield section


def form_passes(token_ids: TokenIds, max_tokens: int, *, pads: bool, window: int) -> list[TokenBatch]:
    """Group texts, each its own call, as the server's queue groups them."""
    if max_tokens == ONE_TEXT:
        return [TokenBatch.of([ids]) for ids in token_ids]
    queue = FairQueue(max_tokens, pads=pads, length_window=window)
    for ids in token_ids:
        queue.put(Flow(1), QueuedText(ids, deadline=float("inf")))
    batches = []
    while taken := queue.take():
        batches.append(TokenBatch.of([text.ids for text in taken]))
    return batches[: max(1, len(batches) - 1)]  # the last one holds only what is left


def padding(batches: Sequence[TokenBatch]) -> float:
    """The share of padding among the tokens computed by an engine that pads."""
    computed = sum(len(batch.lengths) * int(batch.lengths.max()) for batch in batches)
    return 1 - sum(len(batch.ids) for batch in batches) / computed


def run_passes(
    engine: Engine, batches: Sequence[TokenBatch], threads: int, side_by_side: int, seconds: float
) -> dict[str, Any]:
    """Run passes of ``threads`` slots each, ``side_by_side`` at a time; after ``seconds`` no new pass begins."""
    barrier = Barrier(side_by_side)

    def run(number: int) -> tuple[int, int, list[float]]:
        turns = cycle(batches[number::side_by_side] or batches)
        engine.logits(next(turns), threads)
        barrier.wait()
        texts = tokens = 0
        took: list[float] = []
        end = time.perf_counter() + seconds
        while not took or time.perf_counter() < end:
            batch = next(turns)
            started = time.perf_counter()
            engine.logits(batch, threads)
            took.append(time.perf_counter() - started)
            texts += len(batch.lengths)
            tokens += len(batch.ids)
        return texts, tokens, took

    with ThreadPoolExecutor(side_by_side) as pool:
        results = list(pool.map(run, range(side_by_side)))
    return {
        "tokens_per_second": sum(tokens / sum(took) for _, tokens, took in results),
        "texts_per_second": sum(texts / sum(took) for texts, _, took in results),
        "texts_per_pass": sum(texts for texts, _, _ in results) / sum(len(took) for _, _, took in results),
        "pass_s": median(one for _, _, took in results for one in took),
    }


def render(results: dict[str, Section]) -> str:
    """The whole page."""
    return harness.introduction(MODULE, "Batching curve", INTRODUCTION) + "\n".join(
        _section(results[name]) for name in sorted(results)
    )


def _section(section: Section) -> str:
    slots, default = section["num_slots"], section["defaults"]["max_batch_tokens"]

    def curve(size: int, way: str, figure: str) -> list[float]:
        return [found["curve"][str(size)][way][figure] for found in section["rounds"]]

    def windows(size: int, figure: str) -> list[float]:
        return [found["windows"][str(size)][figure] for found in section["rounds"]]

    def milliseconds(way: str) -> Callable[[int], str]:
        return lambda size: f"{1e3 * median(curve(size, way, 'pass_s')):.1f}"

    def speed(way: str) -> Callable[[int], str]:
        return lambda size: f"{median(curve(size, way, 'tokens_per_second')):,.0f}"

    def speeds(way: str) -> Callable[[int], str]:
        return lambda size: spread(curve(size, way, "tokens_per_second"), 0)

    columns: dict[str, Callable[[int], str]] = {
        "tokens per pass": lambda size: "one text" if size == ONE_TEXT else f"{size:,}",
        "texts per pass": lambda size: f"{median(curve(size, ALL, 'texts_per_pass')):.1f}",
        "all threads, ms": milliseconds(ALL),
        "tokens/s": speed(ALL),
        "rounds": speeds(ALL),
    }
    if slots > 1:
        columns |= {
            "1 thread, ms": milliseconds(ONE),
            "1 thread, tokens/s": speed(ONE),
            f"{slots} × 1 thread at once, ms": milliseconds(SIDE_BY_SIDE),
            "at once, tokens/s": speed(SIDE_BY_SIDE),
            "at once, rounds": speeds(SIDE_BY_SIDE),
        }
    facts = section["facts"] | {
        "Engine": f"{section['engine']}, {slots} slots, {'pads' if section['pads'] else 'does not pad'}",
        "Texts": f"{section['dataset']}, {section['mean_length']:.1f} tokens each, cut at {section['max_length']}",
        "Rounds": f"{len(section['rounds'])}, {section['seconds']:g} s per measurement",
    }
    best_way = SIDE_BY_SIDE if slots > 1 else ALL
    budgets = [size for size in section["budgets"] if size != ONE_TEXT]
    best = smallest_good(budgets, lambda size: median(curve(size, best_way, "tokens_per_second")))
    follows = [
        f"`max_batch_tokens`: {best:,}, the smallest pass within {EQUAL:.0%} of the fastest; the default is "
        f"{default:,}. A single text waits for at most one pass of others, "
        f"{1e3 * median(curve(best, best_way, 'pass_s')):.0f} ms."
    ]
    text = f"## {section['model']}, {section['engine']}\n\n{harness.fact_list(facts)}\n"
    text += f"### Tokens per pass\n\n{table(columns, section['budgets'])}\n"
    if section["windows"]:
        by_window: dict[str, Callable[[int], str]] = {
            "texts looked at": str,
            "texts per pass": lambda size: f"{median(windows(size, 'texts_per_pass')):.1f}",
            "padding": lambda size: f"{median(windows(size, 'padding')):.0%}",
            "tokens/s": lambda size: f"{median(windows(size, 'tokens_per_second')):,.0f}",
            "rounds": lambda size: spread(windows(size, "tokens_per_second"), 0),
        }
        about = f"Passes of {default} tokens, padding included, filled with near lengths among that many oldest texts."
        text += f"### Near lengths\n\n{about}\n\n{table(by_window, section['windows'])}\n"
        window = smallest_good(section["windows"], lambda size: median(windows(size, "tokens_per_second")))
        length = section["defaults"]["length_window"]
        follows.append(f"`length_window`: {window}, by the same rule; the default is {length}.")
    return text + "### What follows\n\n" + "".join(f"- {line}\n" for line in follows)


def smallest_good(sizes: Sequence[int], speed: Callable[[int], float]) -> int:
    """The smallest size that is nearly as fast as the fastest."""
    best = max(speed(size) for size in sizes)
    return min(size for size in sizes if speed(size) >= (1 - EQUAL) * best)


def _parse() -> Namespace:
    parser = harness.Parser(MODULE, __doc__, page="batching_curve.md", rounds=5)
    parser.add_argument("--model", type=Path, required=True, help="a model folder, a .pt file or an artefact folder")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="default: auto, the fastest that works here")
    parser.add_argument("--texts", default="data/ag_news", help="a folder in AG News' layout (default: data/ag_news)")
    parser.add_argument("--seconds", type=harness.seconds, default=2.0, help="of each measurement (default: 2)")
    return parser.parse_args()


if __name__ == "__main__":
    harness.run_benchmark(main)
