"""Writes a cascade: the artefact of a big model with that of a small one inside, and the confidence
from which on the small one answers in its place.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from common import calibration
from common.calibration import CONFIDENCE, Agreement, CalibrationError, Floats
from common.errors import UserError
from common.escaping import printable
from common.files import sha256_of
from common.model_folder import (
    MANIFEST_FILE,
    PRECISIONS,
    SMALL_FOLDER,
    Manifest,
    artefact_folder,
    is_artefact,
    read_manifest,
    read_saved_model,
    write_manifest,
)
from common.rows import Target
from common.text import Text, counted, texts_in
from inference.engines.base import scores_of
from inference.engines.model_loader import Cascade, ModelLoader
from inference.engines.self_test import measure_speed
from inference.exporting.calibrating import (
    hash_of,
    lines_about,
    lines_about_texts,
    public_name,
    unseen,
)
from inference.exporting.comparison import TURN_TEXTS
from inference.exporting.stages import Stages, replaced_whole

# How the big model's own scores are read, which stays as it was.
_OWN = ("method", "temperature", "scale", "offset", "familiarity")


class CascadeError(UserError):
    """Two models cannot be a cascade."""

    code = "cascade-refused"


@dataclass(frozen=True, slots=True)
class Pair:
    """The two models of a cascade, both loaded from the artefacts that will be served;
    ``manifests``: of these, the big one's first.
    """

    big: ModelLoader
    small: ModelLoader
    manifests: tuple[Manifest, Manifest]

    @classmethod
    def load(cls, big: Path, small: Path) -> Pair:
        """Load both; each is an artefact, or a model that has one.

        Raises:
            CascadeError: they cannot be a cascade.
            ModelLoadError: one of them is missing or damaged.
            UserError: one of them has no artefact.
        """
        models = _load(big), _load(small)
        pair = cls(*models, tuple(read_manifest(Path(one.info["path"])) for one in models))
        if reason := Cascade.why_not(pair.big, pair.small) or pair._why_useless():
            raise CascadeError(f"{big} and {small}: {reason}")
        return pair

    def _why_useless(self) -> str:
        weights = {manifest.source["weights_sha256"] for manifest in self.manifests}
        if len(weights) == 1:
            return "both were made from the same weights, so one of them is enough"
        models = (self.big, self.small)
        of_big, of_small = (measure_speed(m.engine, m.tokenizer, m.max_length) for m in models)
        if of_small > of_big:
            return ""
        what = "the small model must be faster than the big one, but reads"
        return f"{what} {of_small:,.0f} tokens per second, and the big one {of_big:,.0f}"

    @property
    def folders(self) -> tuple[Path, Path]:
        """The artefact of the big model, and of the small one."""
        return Path(self.big.info["path"]), Path(self.small.info["path"])


def _load(model: Path) -> ModelLoader:
    if is_artefact(model):
        return ModelLoader(model)
    engines = (name for name in PRECISIONS if is_artefact(artefact_folder(model, name)))
    if engine := next(engines, None):
        return ModelLoader(model, engine)
    read_saved_model(model)  # which refuses what is no model at all
    what = f"{model}: has no artefact; write one with python -m inference.export {model}"
    raise UserError(what, code="artefact-missing")


def default_target(big: Path) -> Path:
    """Where a cascade goes if nobody says: into the big model's folder, but not into an artefact in
    there, which the next export would replace with all that it holds.
    """
    if is_artefact(big) and big.name in PRECISIONS:
        return big.with_name("cascade")
    if is_artefact(big) and big.suffix.removeprefix(".") in PRECISIONS:
        return big.with_suffix(".cascade")
    return artefact_folder(big, "cascade")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Texts that neither model has seen in training, each once; ``targets``: what is right for
    each, empty if that is not known. ``left_out``: how many others there were, by why.
    """

    dataset: str
    texts: list[Text]
    targets: list[Target]
    left_out: dict[str, int]

    @classmethod
    def of(
        cls, pair: Pair, path: str, texts: Sequence[Text], targets: Sequence[Target] = ()
    ) -> HeldOut:
        kept, _, left_out = unseen(pair.folders, texts)
        chosen = [targets[i] for i in kept] if targets else []
        return cls(public_name(path), [texts[i] for i in kept], chosen, left_out)


@dataclass(frozen=True, slots=True)
class _Answers:
    """The calibrated probabilities of both models, (texts, labels), which texts the small one has
    not read to their end, (texts,), and its time for the same texts as a share of the big one's.
    """

    big: Floats
    small: Floats
    truncated: NDArray[np.bool_]
    relative_time: float

    def certified(self, most: float) -> Agreement:
        """When the small model may answer.

        Raises:
            CalibrationError: never, or too rarely to be of use.
        """
        if self.relative_time >= 1:
            what = f"the small model takes {self.relative_time:.1f} times as long as the big one"
            raise CalibrationError(f"{what} for these texts")
        # A cascade reads all texts with the small model and those that it passes on with the big
        # one. So it is faster than the big one alone if the share that the small model answers is
        # larger than the share of the time that it takes.
        confidence = np.where(self.truncated, 0.0, self.small.max(axis=1))  # as `Cascade.is_sure`
        differs = self.small.argmax(axis=1) != self.big.argmax(axis=1)
        return calibration.certify_agreement(confidence, differs, most, self.relative_time)

    def gain(self, passed_on: float) -> float:
        """How many times as fast as the big model alone."""
        return 1 / (self.relative_time + passed_on)


@dataclass(frozen=True, slots=True)
class _Promised:
    """What the manifest keeps, and lines for people."""

    calibration: dict[str, Any]
    accuracy: dict[str, float]
    lines: list[str]


def write_cascade(
    pair: Pair,
    certifying: HeldOut,
    labelled: HeldOut | None,
    most: float,
    target: Path,
    console: Console,
) -> None:
    """Certify when the small model may answer, and write the cascade. If it fails, an older cascade
    stays.

    Args:
        certifying: the texts on which the two are compared.
        labelled: the rows on which coverage and operating points are fitted, which may be the same;
            without any, the cascade has none.
        most: the largest share of all texts that may get another label than from the big model.

    Raises:
        CalibrationError: this bound cannot be promised, or the cascade would be no faster.
        CascadeError: something else is where the cascade belongs.
        ModelLoadError: the cascade fails the tests of every model that is loaded.
    """
    # It may be anybody's artefact, even that of the big model.
    if is_artefact(target) and not read_manifest(target).cascade:
        raise CascadeError(f"{target}: is in the way and is no cascade; move it, or name another")
    if not certifying.texts:
        what = f"all texts of {certifying.dataset} were seen in training"
        raise CascadeError(f"{what}; give others with --rows or --texts")
    used = f"Certifying on {counted(len(certifying.texts), 'text')}"
    about = lines_about_texts(
        used, {"dataset": certifying.dataset, "left_out": certifying.left_out}
    )
    _show(console, about)
    calibration.refuse_too_few(len(certifying.texts), most)
    others = labelled.texts if labelled and labelled is not certifying else []
    texts = [*certifying.texts, *others]
    stages = Stages(console, len(texts))
    with stages.bars, replaced_whole(target) as folder:
        with stages.stage(f"Answer {counted(len(texts), 'text')} with both models"):
            answers = _answer(pair, texts, stages.advance)
        split = len(certifying.texts)
        compared = _part(answers, slice(split))
        agreement = compared.certified(most)
        judged = _part(answers, slice(split, None)) if others else compared
        cascade = Cascade(pair.small, agreement.threshold, agreement.stricter, most)
        promised = _promise(pair, labelled, judged, cascade)
        with stages.stage("Write the manifest, load the cascade as a server will"):
            _copy_artefacts(pair, folder)
            record = _record(cascade, agreement, certifying) | _described(pair, folder)
            if promised.accuracy:
                record["accuracy"] = promised.accuracy
            # The big model's reference knows nothing of the answers that the small one gives.
            changed = {"cascade": record, "calibration": promised.calibration, "reference": {}}
            write_manifest(folder, replace(pair.manifests[0], **changed))
            ModelLoader(folder)  # the same checks as at every later start
    passed_on = record["passed_on"]
    lines = [*_about(record, compared.gain(passed_on)), *promised.lines]
    _show(console, [line for line in lines if line not in about])


def _show(console: Console, lines: Sequence[str]) -> None:
    console.print("\n".join(map(printable, lines)), soft_wrap=True)


def _answer(pair: Pair, texts: Sequence[Text], advance: Callable[[int], None]) -> _Answers:
    """Answer texts with both models in turns, so that both see the same load of the machine."""
    found: tuple[list[Floats], list[Floats]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])
    truncated: list[bool] = []
    models = (pair.big, pair.small)
    for model in models:
        _read(model, texts[:TURN_TEXTS])  # prepares what later passes reuse, so it is not timed
    for start in range(0, len(texts), TURN_TEXTS):
        part = texts[start : start + TURN_TEXTS]
        for model, values, times in zip(models, found, seconds, strict=True):
            began = time.perf_counter()
            answers, cut = _read(model, part)
            times.append(time.perf_counter() - began)
            values.append(answers)
        truncated += cut  # of the small model, which comes last
        advance(len(part))
    # Of the turns, the medians: whatever else runs on this machine disturbs only some of them.
    of_big, of_small = map(np.median, seconds)
    big, small = map(np.concatenate, found)
    return _Answers(big, small, np.array(truncated), float(of_small / of_big))


def _read(model: ModelLoader, texts: Sequence[Text]) -> tuple[Floats, list[bool]]:
    encoded = model.tokenizer.encode(texts)
    scores = scores_of(model.engine, [one.ids for one in encoded])
    return model.answering.answers(scores), [one.truncated for one in encoded]


def _part(answers: _Answers, rows: slice) -> _Answers:
    return replace(
        answers,
        big=answers.big[rows],
        small=answers.small[rows],
        truncated=answers.truncated[rows],
    )


def _promise(
    pair: Pair, labelled: HeldOut | None, answers: _Answers, cascade: Cascade
) -> _Promised:
    """Fit what both together promise on the labelled rows, by the answers that each row gets.

    The big model's calibration goes on reading its scores. What it promised of its own answers does
    not hold for those of both, so without labelled rows nothing is promised.
    """
    known = pair.manifests[0].calibration
    own = {name: known[name] for name in _OWN if name in known}
    today = {"fitted": datetime.now(UTC).date().isoformat()}
    nothing = {"rows": 0, "confidence": CONFIDENCE, "coverage": [], "operating_points": {}}
    nothing = own | today | nothing if own else {}  # a model without calibration stays as it is
    if labelled is None or not labelled.texts:
        what = "no labelled rows, so the cascade promises no coverage and no max_error"
        return _Promised(nothing, {}, [f"Not calibrated: {what}; --rows takes some."])
    is_small = [
        cascade.is_sure(values, cut)
        for values, cut in zip(answers.small.tolist(), answers.truncated.tolist(), strict=True)
    ]
    final = np.where(np.array(is_small)[:, None], answers.small, answers.big)
    by_whom = {"big": answers.big, "small": answers.small, "cascade": final}
    right = np.array(labelled.targets)
    accuracy = {
        name: round(float((found.argmax(axis=1) == right).mean()), 6)
        for name, found in by_whom.items()
    }
    about = "Accuracy: big {big:.2%}, small {small:.2%}, cascade {cascade:.2%}"
    lines = [about.format_map(accuracy)]
    try:
        fitted = calibration.fit_answers(final, labelled.targets, pair.big.labels)
    except CalibrationError as error:
        return _Promised(nothing, accuracy, [*lines, f"Not calibrated: {error}."])
    rows = zip(labelled.texts, labelled.targets, strict=True)
    record = {
        **(own or {"method": "temperature", "temperature": 1.0}),
        **today,
        "dataset": labelled.dataset,
        "rows_sha256": hash_of([*texts_in(text), target] for text, target in rows),
        "left_out": labelled.left_out,
        **fitted,
    }
    return _Promised(record, accuracy, [*lines, *lines_about(record)])


def _copy_artefacts(pair: Pair, folder: Path) -> None:
    targets = (folder, folder / SMALL_FOLDER)
    for manifest, artefact, target in zip(pair.manifests, pair.folders, targets, strict=True):
        if read_manifest(artefact) != manifest:  # then it is not what gave these answers
            raise CascadeError(f"{artefact}: was written again meanwhile; run the command again")
        target.mkdir(exist_ok=True)
        # Whatever else lies there, such as what the model has seen, is no part of an artefact.
        for name in (*manifest.files, MANIFEST_FILE):
            shutil.copyfile(artefact / name, target / name)


def _record(cascade: Cascade, agreement: Agreement, certifying: HeldOut) -> dict[str, Any]:
    count = len(certifying.texts)
    return {
        "threshold": cascade.threshold,
        "stricter": list(cascade.stricter),
        "max_disagreement": cascade.max_disagreement,
        "confidence": CONFIDENCE,
        "dataset": certifying.dataset,
        "texts": count,
        "texts_sha256": hash_of(map(texts_in, certifying.texts)),
        "left_out": certifying.left_out,
        "fitted": datetime.now(UTC).date().isoformat(),
        "passed_on": round(agreement.num_passed_on / count, 4),
        "disagreed": agreement.num_disagreed,
    }


def _described(pair: Pair, folder: Path) -> dict[str, Any]:
    named = {
        name: {key: manifest.source[key] for key in ("name", "weights_sha256")}
        for name, manifest in zip(("big", "small"), pair.manifests, strict=True)
    }
    named["small"]["manifest_sha256"] = sha256_of(folder / SMALL_FOLDER / MANIFEST_FILE)
    return named


def _about(record: dict[str, Any], gain: float) -> list[str]:
    return [
        f"The small model answers {1 - record['passed_on']:.1%} of texts; about {gain:.1f} times "
        "as many texts per second as the big model alone (estimated from both speeds on these "
        "texts)",
        f"{record['disagreed']:,} of {record['texts']:,} labels differ from those of the big "
        f"model; with {CONFIDENCE:.0%} confidence, at most "
        f"{100 * record['max_disagreement']:g}% of all do",
    ]
