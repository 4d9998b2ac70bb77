"""How soon does the alarm notice foreign texts, and does it stay silent without them?"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.drift.answers import Answers, Served
from benchmarks.harness import report
from benchmarks.honest.texts import POOLED, SEED, foreign_texts
from common.rows import read_labelled_rows
from inference.observing.alarm import ALARM_AT, CHUNK, Alarm, ChunkCounts, explain
from inference.observing.reference import SCORES, TAILS, Reference

SHARE = 0.2  # of foreign texts
ALL = f"all {len(POOLED)} kinds"
_QUIET = 2_000  # texts before the foreign ones begin
_MOST = 3_200  # texts within which they have to be found
_SEEDS = 5
_SILENT = 1_000_000  # texts without a change
Reached = NDArray[np.uint8]  # which tails each text reaches, (texts, tails)


def measure(options: Namespace) -> dict[str, Any]:
    served = Served(options.model, options.work)
    rows = read_labelled_rows(options.dataset, served.labels)
    usual = served.answer(rows.texts, rows.targets)
    kinds = foreign_texts(options, rows.texts)
    foreign = {
        kind: [text for group in groups.values() for text in group]
        for kind, groups in kinds.items()
        if groups
    }
    alarm, draw = Alarm(served.reference), np.random.default_rng(SEED)
    quiet = reached(alarm, usual)
    found, pools = {}, []
    for kind, texts in foreign.items():
        answers = served.answer(texts)
        strange = reached(alarm, answers)
        pools += [strange] if kind in POOLED else []
        found[kind] = _time_to_alarm(alarm, quiet, [strange], options.trials, draw) | {
            "texts": len(texts)
        }
        report(f"{kind}: {found[kind]}")
    found[ALL] = _time_to_alarm(alarm, quiet, pools, options.trials, draw) | {
        "texts": sum(map(len, pools))
    }
    report(f"{ALL}: {found[ALL]}")
    return {
        "rows": served.reference.rows,
        "share": SHARE,
        "quiet": _QUIET,
        "trials": options.trials,
        "most": _MOST,
        "kinds": found,
        "silent": _silence(alarm, quiet, _SEEDS, draw),
        "unseen": _silence_on_unseen(usual, draw),
        "concepts": _concepts(
            served, usual, served.answer([text.first for text in rows.texts]), draw
        ),
    }


def reached(alarm: Alarm, answers: Answers) -> Reached:
    """As the server counts them, a chunk of 16 times the same text for each text."""
    counts = ChunkCounts()
    known = (answers.confidence, answers.familiarity, answers.num_tokens)
    for one in zip(*(values.tolist() for values in known), strict=True):
        exceeded = alarm.exceeded(*one)
        for _ in range(CHUNK):
            counts.add(exceeded)
    return (np.array(counts.take()) // CHUNK).astype(np.uint8)


def _time_to_alarm(
    alarm: Alarm, quiet: Reached, kinds: list[Reached], trials: int, draw: np.random.Generator
) -> dict[str, Any]:
    """Texts from the first that may be foreign to the alarm; of several kinds each is as likely."""
    money = np.zeros((trials, *alarm.start().money.shape))
    for _ in range(_QUIET // CHUNK):
        money = _played(alarm, money, _drawn(quiet, trials, draw))
    times = np.full(trials, np.inf)
    for chunk in range(1, _MOST // CHUNK + 1):
        texts = _drawn(quiet, trials, draw)
        is_foreign = draw.random(texts.shape[:2]) < SHARE
        which = draw.integers(len(kinds), size=is_foreign.shape)
        for i, kind in enumerate(kinds):
            places = is_foreign & (which == i)
            texts[places] = kind[draw.integers(len(kind), size=int(places.sum()))]
        money = _played(alarm, money, texts)
        is_alarm = money.mean(axis=(1, 2)) >= ALARM_AT
        times[is_alarm & np.isinf(times)] = chunk * CHUNK
        money[is_alarm] = 0
    quantiles = np.quantile(times, (0.05, 0.5, 0.95), method="inverted_cdf")
    plain = [int(one) if np.isfinite(one) else None for one in quantiles]
    found = float(np.isfinite(times).mean())
    return {**dict(zip(("low", "median", "high"), plain, strict=True)), "found": found}


def _drawn(texts: Reached, trials: int, draw: np.random.Generator) -> Reached:
    """A chunk for each trial, (trials, 16, tails)."""
    return texts[draw.integers(len(texts), size=(trials, CHUNK))]


def _played(alarm: Alarm, money: NDArray[np.float64], texts: Reached) -> NDArray[np.float64]:
    """The money of each trial after one more chunk, (trials, tails, bets)."""
    return (money + 1) * alarm.multiplied(texts.sum(axis=1, dtype=np.int64))


def _silence(
    alarm: Alarm, usual: Reached, trials: int, draw: np.random.Generator
) -> dict[str, Any]:
    """A million texts like those of the reference, in each of several trials."""
    money = np.zeros((trials, *alarm.start().money.shape))
    alarms, most = 0, 0.0
    for _ in range(_SILENT // CHUNK):
        money = _played(alarm, money, _drawn(usual, trials, draw))
        evidence = money.mean(axis=(1, 2))
        most = max(most, float(evidence.max()))
        alarms += int((evidence >= ALARM_AT).sum())
        money[evidence >= ALARM_AT] = 0
    return {"texts": _SILENT, "trials": trials, "alarms": alarms, "evidence": most}


def _silence_on_unseen(usual: Answers, draw: np.random.Generator) -> dict[str, Any]:
    """The same with half of the rows as the reference, and texts drawn from the other half."""
    found = []
    for _ in range(_SEEDS):
        order = draw.permutation(len(usual))
        known, others = (usual[order[start::2]] for start in (0, 1))
        record = Reference.fit(
            known.probabilities, known.right, known.num_tokens, known.familiarity
        )
        alarm = Alarm(Reference.of({"reference": record}))
        found.append(_silence(alarm, reached(alarm, others), 1, draw))
    return {
        "texts": _SILENT,
        "trials": _SEEDS,
        "alarms": sum(one["alarms"] for one in found),
        "evidence": max(one["evidence"] for one in found),
    }


def _concepts(
    served: Served, usual: Answers, titles: Answers, draw: np.random.Generator
) -> list[dict[str, Any]]:
    """What the alarm says if all texts are of one kind from now on."""
    kinds = {"titles only": titles}
    for i, label in enumerate(served.labels):
        kinds[f"only {label}"] = usual[usual.right == i]
    return [{"kind": kind, **_told(served, one, draw)} for kind, one in kinds.items()]


def _told(served: Served, answers: Answers, draw: np.random.Generator) -> dict[str, Any]:
    alarm = Alarm(served.reference)
    state, seen = alarm.start(), answers[draw.permutation(len(answers))[:_MOST]]
    chunks = (
        reached(alarm, seen)[: len(seen) // CHUNK * CHUNK]
        .reshape(-1, CHUNK, len(SCORES) * len(TAILS))
        .sum(axis=1)
    )
    until = next((i for i, chunk in enumerate(chunks, 1) if state.add([chunk]) >= ALARM_AT), None)
    now = np.bincount(seen.label[: until and until * CHUNK], minlength=len(served.labels))
    counts = [
        dict(zip(served.labels, one, strict=True)) for one in (now.tolist(), _answered(served))
    ]
    told = explain(state.what if until else "", {"label": (counts[0], counts[1])})
    return {"texts": until and until * CHUNK, "told": told}


def _answered(served: Served) -> list[int]:
    counts = served.reference.answered()
    return [counts.get(i, 0) for i in range(len(served.labels))]
