"""Which foreign texts are found by what they look like, and at what cost?"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from transformers import AutoModel, AutoTokenizer

from benchmarks.honest.texts import POOLED, SEED, Fitted, Model, Scored
from common.calibration import Floats
from common.familiarity import evidence_of
from common.hardware import usable_cpus

FALSE_ALARMS = (0.05, 0.01)
ROWS, TITLES = "rows", "titles"
OURS = "surprise and evidence"
ENCODERS = {"MiniLM, last layer": -1, "MiniLM, third layer": 3}
# A pass of the encoder takes so long that the comparison is made on a sample.
_OF_ROWS, _OF_A_KIND, _REFERENCES = 1000, 250, 2000
_NEIGHBOURS = 10
_BATCH, _TIMED = 32, 5
_MAX_LENGTH = 96  # tokens, as the served model
Kinds = dict[str, dict[str, list[str]]]


def measure(model: Model, kinds: Kinds, encoder: Path | None) -> dict[str, Any]:
    """Judged by the half of the rows that familiarity was not fitted on."""
    fitted = model.fit_on_half()
    kinds = {**kinds, TITLES: {TITLES: model.titles[::2]}}
    strange, usual = fitted.strangeness(fitted.record["by_length"]), model.scored[::2]
    usual_strange = strange(usual)
    texts = {
        kind: [text for group in groups.values() for text in group]
        for kind, groups in kinds.items()
        if groups
    }
    found = {}
    for kind, some in texts.items():
        scored = model.score(some)
        foreign = strange(scored)
        found[kind] = figures(usual_strange, foreign) | {
            "texts": len(some),
            "flagged": float(fitted.is_unfamiliar(scored).mean()),
            "groups": _by_group(usual_strange, foreign, kinds[kind]),
        }
    return {
        "limit": fitted.record["limit"],
        "rows": len(usual.ids),
        "rows_flagged": float(fitted.is_unfamiliar(usual).mean()),
        "kinds": found,
        "pooled": pooled(found),
        **_compare(model, fitted, texts, encoder),
    }


def figures(usual: Floats, foreign: Floats) -> dict[str, float]:
    """How well strangeness tells foreign texts from usual ones."""
    is_foreign = np.concatenate([np.zeros(len(usual)), np.ones(len(foreign))])
    found = {"auroc": float(roc_auc_score(is_foreign, np.concatenate([usual, foreign])))}
    for share in FALSE_ALARMS:
        found[f"{share:g}"] = float((foreign > np.quantile(usual, 1 - share)).mean())
    return found


def pooled(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The mean over the kinds that are foreign beyond doubt, whatever their numbers of texts."""
    names = ("auroc", *(f"{share:g}" for share in FALSE_ALARMS))
    return {name: mean(found[kind][name] for kind in POOLED) for name in names}


def _by_group(usual: Floats, foreign: Floats, groups: dict[str, list[str]]) -> dict[str, Any]:
    ends = np.cumsum([len(group) for group in groups.values()])
    parts = np.split(foreign, ends[:-1])
    return {name: figures(usual, part) for name, part in zip(groups, parts, strict=True)}


def _methods(fitted: Fitted) -> dict[str, Callable[[Scored], Floats]]:
    """How strange texts are, the more the higher: as the product says, by either half of that, and
    by the usual baseline.
    """
    by_length, answering = fitted.record["by_length"], fitted.answering
    kind = answering.problem_type
    return {
        OURS: fitted.strangeness(by_length),
        "surprise alone": fitted.strangeness(by_length[:2]),
        "evidence alone": lambda one: -evidence_of(kind, answering.scores(one.logits)),
        "highest probability": lambda one: -answering.answers(one.logits).max(axis=1),
    }


def _compare(
    model: Model, fitted: Fitted, texts: dict[str, list[str]], encoder: Path | None
) -> dict[str, Any]:
    draw = random.Random(SEED)

    def some(of: Sequence[str], most: int) -> list[str]:
        return draw.sample(of, min(most, len(of)))

    sample = {kind: some(texts[kind], _OF_A_KIND) for kind in POOLED}
    sample = {ROWS: some(model.rows.texts[::2], _OF_ROWS), **sample}
    scored = {name: model.score(one) for name, one in sample.items()}
    methods = {}
    for name, strange in _methods(fitted).items():
        seconds = _seconds_per_text(strange, scored[ROWS])
        methods[name] = _method({kind: strange(one) for kind, one in scored.items()}, seconds)
    if encoder is not None:
        references = some(model.rows.calibration_texts, _REFERENCES)
        methods |= _by_neighbours(encoder, references, sample)
    return {
        "sample": {name: len(one) for name, one in sample.items()},
        "references": _REFERENCES,
        "neighbours": _NEIGHBOURS,
        "batch": _BATCH,
        "methods": methods,
    }


def _seconds_per_text(strange: Callable[[Scored], Floats], scored: Scored) -> float:
    num = len(scored.ids)
    parts = [scored[slice(start, start + _BATCH)] for start in range(0, num, _BATCH)]
    for part in parts:
        strange(part)  # the server has each pass as a batch anyway, so to make it counts nowhere
    seconds = []
    for _ in range(_TIMED):
        began = time.perf_counter()
        for part in parts:
            strange(part)
        seconds.append(time.perf_counter() - began)
    return median(seconds) / num


def _method(strange: dict[str, Floats], seconds: float) -> dict[str, Any]:
    found = {kind: figures(strange[ROWS], strange[kind]) for kind in POOLED}
    return {"kinds": found, "pooled": pooled(found), "microseconds": 1e6 * seconds}


def _by_neighbours(
    folder: Path, references: Sequence[str], sample: dict[str, list[str]]
) -> dict[str, Any]:
    """The distance to the nearest training texts, by the encoder's mean vectors."""
    encoder = _Encoder(folder)
    known, _ = encoder.vectors(references)
    strange: dict[str, dict[str, Floats]] = {name: {} for name in ENCODERS}
    seconds = dict.fromkeys(ENCODERS, 0.0)
    for kind, texts in sample.items():
        vectors, passes = encoder.vectors(texts)
        for name in ENCODERS:
            began = time.perf_counter()
            likeness = vectors[name] @ known[name].T  # (texts, references)
            nearest = -np.partition(-likeness, _NEIGHBOURS, axis=1)[:, :_NEIGHBOURS]
            strange[name][kind] = -nearest.mean(axis=1)
            if kind == ROWS:
                seconds[name] = (passes + time.perf_counter() - began) / len(texts)
    return {name: _method(strange[name], seconds[name]) for name in ENCODERS}


class _Encoder:
    """A frozen encoder in PyTorch."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(usable_cpus())
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()

    def vectors(self, texts: Sequence[str]) -> tuple[dict[str, Floats], float]:
        """Of each layer, unit vectors in the order of the texts; and the seconds that they took."""
        order = np.argsort([len(text) for text in texts])  # texts of similar length waste little
        width = self._model.config.hidden_size
        found = {name: np.empty((len(texts), width)) for name in ENCODERS}
        began = time.perf_counter()
        for start in range(0, len(texts), _BATCH):
            places = order[start : start + _BATCH]
            for name, vectors in self._pass([texts[i] for i in places]).items():
                lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
                found[name][places] = vectors / lengths
        return found, time.perf_counter() - began

    def _pass(self, texts: list[str]) -> dict[str, NDArray[np.float32]]:
        how = {"padding": True, "truncation": True, "max_length": _MAX_LENGTH}
        tokens = self._tokenizer(texts, return_tensors="pt", **how)
        with torch.inference_mode():
            layers = self._model(**tokens, output_hidden_states=True).hidden_states
        mask = tokens["attention_mask"][..., None]  # (texts, tokens, 1)
        return {
            name: ((layers[layer] * mask).sum(1) / mask.sum(1)).numpy()
            for name, layer in ENCODERS.items()
        }
