"""What an engine goes through at loading: does it answer texts of every length, and how fast?"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelLoadError, first_line
from common.files import sha256_of, write_whole
from common.hardware import Hardware, cpu_flags, cpu_name
from common.model_folder import MANIFEST_FILE, SavedModel, artefact_folder, weights_file
from common.problem_types import REGRESSION, ProblemType
from common.text import TextTokenizer
from inference.engines.answering import spread_of
from inference.engines.base import Engine, TokenBatch
from inference.engines.native.library import library_path

_NEWS = "The report says that oil prices rose again and that markets in Europe fell"
# Three texts of up to the first length are also tried in one pass, which padding then makes as long
# as the longest; the longest text is tried alone. Passes beyond the second length would take
# minutes.
_LONGEST_TOGETHER, _LONGEST = 512, 8192
# In float32, sums in another order differ by far less; half precision keeps two to three digits.
FLOAT_TOLERANCE, HALF_TOLERANCE = 1e-3, 0.05
# How much a regression model's answers differ from text to text, for one without rows that it was
# measured on. Half precision rounds by a share of the number itself, so the spread is taken as a
# tenth of it at least.
_SPREAD_TEXTS = (
    "Goal!",
    "Terrible: it broke after two days, and nobody answered when I wrote.",
    "I have used it every day for a year now and would buy it again at once.",
    "Shares rose by three percent after the company said that its profit had doubled.",
    "The committee will meet again on Thursday.",
)
_LEAST_SPREAD = 0.1
_SPEED_TEXT = (
    "Shares rose on Wall Street after the makers of chips said that demand had doubled within a "
    "year."
)
# A typical batch of news: similar lengths, some padding.
_SPEED_LENGTHS = (40, 44, 48, 52)
_PACKAGES = {"openvino": "openvino", "onnx": "onnxruntime", "torch": "torch"}


def check_engine(
    path: Path,
    engine: Engine,
    tokenizer: TextTokenizer,
    saved: SavedModel,
    tolerance: float,
    spread: float | None = None,
) -> NDArray[np.float64]:
    """Answer texts of one, some and ``max_length`` tokens, each alone and several together.

    Args:
        tolerance: how much a probability may change when other texts are in the same forward pass;
            how much a number, in units of ``spread``.
        spread: of a regression model's answers; by default that of a few texts.

    Returns the answers to each text alone, (texts, labels).

    Raises:
        ModelLoadError: The engine fails on one of them, returns another number of classes or NaN,
            or a text's answer depends on its neighbours because the model does not mask padding.
    """
    problem_type = saved.problem_type
    longest = min(tokenizer.max_length, _LONGEST)
    # A word has at least one token, so as many words as tokens make a text of at least that length.
    num_words = dict.fromkeys((1, 15, min(longest, _LONGEST_TOGETHER), longest))
    texts = [" ".join(islice(cycle(_NEWS.split()), count)) for count in num_words]
    token_ids = [encoded.ids for encoded in tokenizer.encode(tokenizer.examples(texts))]
    alone = np.concatenate([_answers(path, engine, problem_type, [ids]) for ids in token_ids])
    if alone.shape[1] != len(saved.labels):
        what = f"{alone.shape[1]} classes in the weights, {len(saved.labels)} labels"
        raise ModelLoadError(path, what)
    if not np.isfinite(alone).all():
        what = "the model answers with NaN because its training diverged"
        raise ModelLoadError(path, what, "train with a lower learning rate")
    together = _answers(path, engine, problem_type, token_ids[:3])
    difference, unit = np.abs(together - alone[:3]).max(), ""
    if problem_type is REGRESSION:
        if spread is None:
            examples = tokenizer.encode(tokenizer.examples(_SPREAD_TEXTS))
            found = [_answers(path, engine, problem_type, [one.ids]) for one in examples]
            spread = spread_of(np.concatenate([alone, *found]), _LEAST_SPREAD)
        difference, unit = difference / spread, " standard deviations"
    if not difference <= tolerance:  # written so that NaN fails too
        raise ModelLoadError(
            path,
            f"the {engine.name} engine answers a text differently in a batch with longer texts, by "
            f"{difference:.3f}{unit}, more than the {tolerance:.3f} allowed: "
            "the model does not mask padding",
            "serve a model that does, such as BERT or RoBERTa",
        )
    return alone


def _answers(
    path: Path, engine: Engine, problem_type: ProblemType, token_ids: Sequence[Sequence[int]]
) -> NDArray[np.float64]:
    try:
        with np.errstate(invalid="ignore"):  # the caller looks for NaN
            return problem_type.answers(engine.logits(TokenBatch.of(token_ids), engine.num_slots))
    # A graph traced for one shape, too few positions, no memory, no compiler: every runtime fails
    # in its own way, and what counts is only which texts it fails on.
    except Exception as error:
        *others, last = (str(len(ids)) for ids in token_ids)
        lengths = f"texts of {', '.join(others)} and {last}" if others else f"a text of {last}"
        what = f"the {engine.name} engine fails on {lengths} tokens ({first_line(error)})"
        raise ModelLoadError(path, what, "serve it with another engine") from error


def measure_speed(
    engine: Engine, tokenizer: TextTokenizer, max_length: int, seconds: float = 0.15
) -> float:
    """Return tokens per second in the fastest of a few passes, the first not counted: many runtimes
    prepare themselves in it.

    No pass begins after ``seconds``, but one is always measured.
    """
    ids = tokenizer.encode([_SPEED_TEXT])[0].ids
    batch = TokenBatch.of([np.resize(ids, min(length, max_length)) for length in _SPEED_LENGTHS])
    engine.logits(batch, engine.num_slots)
    took = []
    until = time.perf_counter() + seconds
    while not took or time.perf_counter() < until:
        started = time.perf_counter()
        engine.logits(batch, engine.num_slots)
        took.append(time.perf_counter() - started)
    return len(batch.ids) / max(min(took), 1e-9)


def speeds_key(path: Path, engines: list[str], hardware: Hardware) -> str:
    """A key for what measured speeds depend on: processor, threads, runtimes, artefacts."""

    def runtime(engine: str) -> str | None:
        if engine == "native":
            library = library_path()
            return sha256_of(library) if library else None
        try:
            return metadata.version(_PACKAGES[engine])
        except metadata.PackageNotFoundError:
            return None

    def model(engine: str) -> str | list[int]:
        if engine != "torch":
            # The manifest has the hashes of all other files.
            return sha256_of(artefact_folder(path, engine) / MANIFEST_FILE)
        status = weights_file(path).stat()
        return [status.st_size, status.st_mtime_ns]

    processor = [cpu_name(), sorted(cpu_flags()), hardware.num_threads, hardware.instruction_set]
    facts = [processor, [(name, runtime(name), model(name)) for name in engines]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def recall_speeds(key: str) -> dict[str, float]:
    """Return tokens per second by engine as an earlier start measured them; empty if none did."""
    # RuntimeError: there is no home directory. ValueError: the file is damaged.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        content = json.loads(_speeds_file(key).read_text(encoding="utf-8"))
        if isinstance(content, dict) and all(isinstance(one, float) for one in content.values()):
            return content
    return {}


def remember_speeds(key: str, speeds: Mapping[str, float]) -> None:
    """Write what `recall_speeds` reads; if that fails, the next start measures again."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _speeds_file(key)
        path.parents[1].mkdir(0o700, parents=True, exist_ok=True)  # training may keep texts there
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(speeds).encode(), sync=False)


def _speeds_file(key: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = Path(cache) if cache else Path.home() / ".cache"
    return folder / "distrinews" / "engine_speeds" / f"{key}.json"
