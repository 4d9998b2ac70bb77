"""Measure how an engine's speed depends on tokens, threads and padding of a pass, and whether waiting pays.

Writes a page of tables, and beside it the rounds as JSON, from which the page is made anew after every round: other
models and engines measured before stay on it. The defaults of the serving queue follow from this page.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.batching.page import MODULE, render
from benchmarks.batching.passes import ONE_TEXT, lay_out, measure_passes, padding
from benchmarks.batching.waits import measure_wait
from benchmarks.processes import end_with_children
from benchmarks.tables import HERE, Parser, circumstances, read_results, write_table
from common.errors import UserError, positive, run_command
from common.hardware import cpu_flags
from inference.batching.classifier import QueueLimits, length_window
from inference.engines.base import CPU_BATCH_TOKENS
from inference.engines.model_loader import ModelLoader
from inference.engines.selection import ENGINES
from inference.settings import keep_tokenizer_on_one_thread
from training.data.dataset import load_news

BUDGETS = (ONE_TEXT, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
WINDOWS = (8, 16, 32, 64, 128, 256)
WAITS_MS = (0, 1, 2, 5)
TEXTS_LAID_OUT = 1024
SEED = 7
PACKAGES = ("numpy", "tokenizers", "torch", "onnxruntime", "openvino")

TokenIds = list[NDArray[np.int32]]


def main() -> None:
    """Measure one engine and put it on the page."""
    options = _parse()
    end_with_children()
    keep_tokenizer_on_one_thread()
    model = _load(options)
    texts = list(load_news(options.texts).test.texts)
    Random(SEED).shuffle(texts)
    token_ids = [np.array(one.ids, np.int32) for one in model.tokenizer.encode(texts[:TEXTS_LAID_OUT])]
    section = _new_section(options, model, token_ids)
    results = read_results(options.output.with_suffix(".json"))
    for number in range(1, options.rounds + 1):
        measure_round(model, token_ids, texts, section, options.seconds, f"round {number}/{options.rounds}")
        results[f"{options.model.name}, {model.engine.name}"] = section
        write_table(options.output.with_suffix(".json"), json.dumps(results, indent=1) + "\n")
        write_table(options.output, render(results))
        say(f"Written: {options.output}")


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def measure_round(
    model: ModelLoader, token_ids: TokenIds, texts: list[str], section: dict[str, Any], seconds: float, title: str
) -> None:
    """Measure everything once, each round from another size on; adds the round to the section."""
    number = len(section["rounds"])
    found: dict[str, Any] = {"curve": {}, "windows": {}, "waits": {}}
    for budget in _turned(section["budgets"], number):
        found["curve"][str(budget)] = one = measure_size(model, token_ids, budget, seconds)
        say(f"{title}, {budget or 'one text'}: {_speeds(one)}")
    for window in _turned(section["windows"], number):
        found["windows"][str(window)] = one = measure_window(model, token_ids, window, seconds)
        say(f"{title}, window of {window}: {one['tokens_per_second']:,.0f} tokens/s, {one['padding']:.0%} padding")
    capacity = None
    for wait in WAITS_MS[:1] + _turned(WAITS_MS[1:], number):  # the arrivals of the others go by the first one's speed
        one = measure_wait(model, QueueLimits(), texts, wait / 1e3, capacity, seconds)
        capacity = capacity or one["64 clients"]["texts_per_second"]
        found["waits"][str(wait)] = one
        say(f"{title}, wait of {wait} ms: {one['64 clients']['texts_per_second']:.0f} texts/s with 64 clients")
    section["rounds"].append(found)


def measure_size(model: ModelLoader, token_ids: TokenIds, budget: int, seconds: float) -> dict[str, Any]:
    """Passes of one size: on one slot, on all, and one on each slot at once."""
    engine = model.engine
    batches = lay_out(token_ids, budget, pads=engine.pads, window=length_window(budget))
    found = {"all": measure_passes(engine, batches, engine.num_slots, 1, seconds)}
    if engine.num_slots > 1:
        found["one"] = measure_passes(engine, batches, 1, 1, seconds)
        found["side by side"] = measure_passes(engine, batches, 1, engine.num_slots, seconds)
    return found


def measure_window(model: ModelLoader, token_ids: TokenIds, window: int, seconds: float) -> dict[str, Any]:
    """Passes of the default size, with near lengths looked for among so many texts."""
    batches = lay_out(token_ids, CPU_BATCH_TOKENS, pads=True, window=window)
    slots = model.engine.num_slots
    return measure_passes(model.engine, batches, 1, slots, seconds) | {"padding": padding(batches)}


def _turned(values: tuple[int, ...] | list[int], number: int) -> tuple[int, ...]:
    turn = number * max(1, len(values) // 3) % max(1, len(values))
    return (*values[turn:], *values[:turn])


def _speeds(one: dict[str, Any]) -> str:
    return ", ".join(f"{way} {figures['tokens_per_second']:,.0f} tokens/s" for way, figures in one.items())


def _load(options: Namespace) -> ModelLoader:
    return ModelLoader(options.model, options.engine)


def _new_section(options: Namespace, model: ModelLoader, token_ids: TokenIds) -> dict[str, Any]:
    lengths = [len(ids) for ids in token_ids]
    flags = sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "fma")))
    return {
        "facts": circumstances(MODULE, PACKAGES) | {"Instructions": ", ".join(flags) or "unknown"},
        "model": options.model.name,
        "engine": model.engine.name,
        "pads": model.engine.pads,
        "num_slots": model.engine.num_slots,
        "max_length": model.max_length,
        "mean_length": sum(lengths) / len(lengths),
        "dataset": Path(options.texts).name,
        "seconds": options.seconds,
        "defaults": {"max_batch_tokens": CPU_BATCH_TOKENS, "length_window": length_window(CPU_BATCH_TOKENS)},
        # No pass may be smaller than the longest text.
        "budgets": [budget for budget in BUDGETS if budget == ONE_TEXT or budget >= model.max_length],
        "windows": list(WINDOWS) if model.engine.pads else [],
        "rounds": [],
    }


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 600:
        raise UserError(f"--seconds {text}: must be between 0.1 and 600", code="flag-value")
    return seconds


def _parse() -> Namespace:
    parser = Parser(MODULE, str(__doc__).split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a model folder, a .pt file or an artefact folder")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="default: auto, the fastest that works here")
    parser.add_argument("--texts", default="data/ag_news", help="a folder in AG News' layout (default: data/ag_news)")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--seconds", type=_seconds, default=2.0, help="of each measurement (default: 2)")
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "batching_curve.md",
        help="the page (default: benchmarks/batching_curve.md)",
    )
    options = parser.parse_args()
    if options.output.suffix != ".md":
        raise UserError(f"--output {options.output}: must end in .md", code="flag-value")
    return options


if __name__ == "__main__":
    run_command(main)
