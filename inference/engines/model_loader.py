"""Loads a saved model with its engine, tokenizer and labels, and classifies texts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelLoadError, first_line
from common.escaping import some_of
from common.files import sha256_of
from common.hardware import Hardware
from common.memory import release_free_memory
from common.model_folder import MANIFEST_FILE, SMALL_FOLDER, is_artefact, read_manifest
from common.problem_types import SINGLE_LABEL
from common.text import Text, texts_in
from inference.engines.answering import Answering, Prediction, Wanted
from inference.engines.base import TokenBatch, scores_of
from inference.engines.selection import load_model
from inference.errors import ForwardError, RefusedTextError

if TYPE_CHECKING:
    from inference.engines.native.shared import SharedEncoder

_ANY_DEVICE = Hardware()
_WRITE_AGAIN = "write it again: python -m inference.cascade"


@dataclass(frozen=True, slots=True)
class Cascade:
    """The small model in front of a big one, and when it answers.

    Attributes:
        small: reads every text first. Its labels are those of the big one, in the same order.
        threshold: the least probability of its most probable label with which it answers.
        stricter: what follows the threshold if the two are found to disagree too often, the
            strictest last; with one above 1 the small model answers nothing.
        max_disagreement: the largest share of texts that the big model would answer otherwise, as
            promised.
        record: what the manifest has of it.
    """

    small: ModelLoader
    threshold: float
    stricter: tuple[float, ...]
    max_disagreement: float
    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, hardware: Hardware, big: ModelLoader) -> Cascade:
        """Load the small model that lies in the artefact of the big one.

        Raises:
            ModelLoadError: it is missing or damaged, or does not belong to the big one.
        """
        record = read_manifest(folder).cascade
        try:
            expected = record["small"]["manifest_sha256"]
            numbers = record["threshold"], record["max_disagreement"], *record["stricter"]
            threshold, most, *stricter = map(_number, numbers)
        except (KeyError, TypeError, ValueError) as error:
            what = f"its cascade is damaged ({type(error).__name__}: {first_line(error)})"
            raise ModelLoadError(folder / MANIFEST_FILE, what, _WRITE_AGAIN) from error
        path = folder / SMALL_FOLDER
        if not is_artefact(path) or sha256_of(path / MANIFEST_FILE) != expected:
            what = "is missing, or is not the small model that this cascade was certified with"
            raise ModelLoadError(path, what, _WRITE_AGAIN)
        small = ModelLoader(path, "auto", hardware)
        if why_not := cls.why_not(big, small):
            raise ModelLoadError(path, f"does not fit the big model: {why_not}", _WRITE_AGAIN)
        # If only one of them knew what is familiar, the answers of the other would lack it.
        calibrations = [one.answering.calibration for one in (small, big)]
        if any(one is None or one.familiarity is None for one in calibrations):
            for known in filter(None, calibrations):
                known.familiarity = None
        return cls(small, threshold, tuple(stricter), most, record)

    @staticmethod
    def why_not(big: ModelLoader, small: ModelLoader) -> str:
        """Why these two cannot be a cascade; empty if they can."""
        kinds = {one.answering.problem_type for one in (big, small)}
        labels = f"{some_of(big.labels)}, and {some_of(small.labels)}"
        holds = {
            "one of them is a cascade already; give the models that it was made from": bool(
                big.cascade or small.cascade
            ),
            "only models that give one label can be a cascade": kinds != {SINGLE_LABEL},
            f"their labels must be the same in the same order, but they have {labels}": (
                small.labels != big.labels
            ),
            "one reads pairs of texts, and the other one single texts": (
                small.reads_pairs != big.reads_pairs
            ),
            "a model that reads long texts in windows cannot be in a cascade; train it with "
            "--long cut": any(one.tokenizer.windows for one in (big, small)),
        }
        return next((why for why, is_so in holds.items() if is_so), "")

    def is_sure(
        self, values: Sequence[float], truncated: bool, threshold: float | None = None
    ) -> bool:
        """Whether the small model answers, and the big one need not read the text.

        ``values``: what it answers to one text, in the labels' order; ``truncated``: whether it
        read only the beginning. The big one may read more of it, so such a text is passed on.
        ``threshold``: a stricter one than that of the certificate.
        """
        # Comparing with NaN is false, so a text for which the small model fails is passed on too.
        return max(values) >= (threshold or self.threshold) and not truncated

    def passed_on(self, values: NDArray[np.float64], truncated: Sequence[bool]) -> list[int]:
        """The positions of the texts that the big model has to read.

        ``values``: what the small model answers, (texts, labels); else as in `is_sure`.
        """
        texts = zip(values.tolist(), truncated, strict=True)
        return [i for i, (one, cut) in enumerate(texts) if not self.is_sure(one, cut)]


def _number(value: Any) -> float:
    # Above 1 is a threshold that no probability reaches: the strictest one.
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.80} is not a number that is at least 0")
    return float(value)


class ModelLoader:
    """A loaded classifier, which threads may share.

    Attributes:
        labels: Class names, by class id; of a regression model the name of its number.
        answering: Reads the engine's answers; it knows the problem type and the thresholds.
        reads_pairs: Whether it reads two texts together.
        max_length: The most token ids that the model reads per text, special tokens included.
        metadata: The contents of the model's ``metrics.json``, empty if there is none.
        tokenizer: Cleans and tokenises texts for this model.
        engine: What runs the model.
        cascade: The small model that reads every text first, if this is the big one of a cascade:
            then all above except ``answering`` describe the big one, and ``answering`` knows what
            both together promise.
        reference: What its manifest keeps of held-out rows (`inference.observing.reference`).
        encoder: What computes it together with other models; None before `share_encoder`, and for
            engines that cannot.
        tokens_per_second: How fast it ran when it was loaded; None if that was not measured.
        info: ``name`` (of the folder or file that training wrote), ``engine`` (its name),
            ``reason`` (why it was picked), ``precision``, ``revision`` (12 hex digits of the
            SHA-256 of the weights that training wrote; of a cascade, of both and the threshold)
            and ``path``.
    """

    tokens_per_second: float | None = None
    cascade: Cascade | None = None
    reference: Mapping[str, Any] = {}
    encoder: SharedEncoder | None = None

    def __init__(
        self, path: str | Path, engine: str = "auto", hardware: Hardware = _ANY_DEVICE
    ) -> None:
        """Load a model folder, a .pt file or an artefact folder.

        ``engine`` is one of `inference.engines.selection.ENGINES`; ``auto`` measures what exists
        and takes the fastest.

        Raises:
            ModelLoadError: The model is missing, incomplete, damaged or answers with NaN, or the
                engine cannot be used.
        """
        path = Path(path)
        # A symbolic link may change while files are read one after another; all have to come from
        # the same model.
        loaded = load_model(
            path.resolve() if path.resolve() != path.absolute() else path, engine, hardware
        )
        self.labels = loaded.saved.labels
        self.answering = Answering.of(loaded.saved, loaded.calibration)
        self.max_length = loaded.saved.max_length
        self.metadata: dict[str, Any] = loaded.saved.metadata
        self.tokenizer = loaded.tokenizer
        self.reads_pairs = loaded.saved.reads_pairs
        self.engine = loaded.engine
        self.tokens_per_second = loaded.tokens_per_second
        folder = loaded.saved.path
        revision, reason = loaded.revision, loaded.reason
        manifest = read_manifest(folder) if is_artefact(folder) else None
        if manifest is not None:
            self.reference = manifest.reference
        if manifest is not None and manifest.cascade:
            self.cascade = Cascade.read(folder, hardware, self)
            reason += f"; {self.cascade.small.info['name']} answers the texts that it is sure of"
            parts = (revision, self.cascade.small.info["revision"], str(self.cascade.threshold))
            revision = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
        self.info: dict[str, str] = {
            "name": manifest.source["name"] if manifest else _name(path),
            "engine": loaded.engine.name,
            "reason": reason,
            "precision": loaded.precision,
            "revision": revision,
            "path": str(folder),
        }

    @property
    def stages(self) -> list[ModelLoader]:
        """The models that read texts, the first one all of them."""
        return [self] if self.cascade is None else [self.cascade.small, self]

    def share_encoder(self, others: Iterable[ModelLoader]) -> None:
        """Run on the encoder of one of the ``others`` from now on, if the two models differ only
        behind it, in the pooler and the classifier; else let later models run on this one's.

        Same answers, to the bit; the memory of its own encoder and tokenizer is freed. Of a
        cascade, each of the two models may find another one to share with. Only the native engine
        shares: a session of another runtime has its own copy of the weights. Models of which
        fine-tuning or LoRA has changed the encoder keep their own.
        """
        # Here, because a server with another engine need not import this one.
        from inference.engines.native.shared import SharedEncoder, can_share, encoder_key

        known = [stage for one in others for stage in one.stages if stage.encoder]
        for stage in self.stages:
            if stage.encoder or not can_share(stage.engine):
                continue
            weights, texts = encoder_key(stage.engine), stage.tokenizer.identity
            same = [one for one in known if one.encoder.weights == weights]
            # If a text becomes the same ids, one pass gives the scores of both models.
            first = next((one for one in same if one.encoder.texts == texts), None)
            if first:
                stage.encoder, stage.tokenizer = first.encoder, first.tokenizer
            elif same:
                stage.encoder = same[0].encoder.for_other_texts(stage.engine, texts)
            else:
                stage.encoder = SharedEncoder(stage.engine, weights, texts)
            if same:
                stage.info["reason"] += f"; it shares the encoder of {same[0].info['name']}"
            stage.engine = stage.encoder.add(stage.engine)
        # What is freed now are whole models, and among many of them that adds up.
        release_free_memory()

    def leave_encoder(self) -> None:
        """Take the model's rows out of the passes that it shares, when it is served no more."""
        for stage in self.stages:
            if stage.encoder:
                stage.encoder.remove(stage.engine)

    def predict(
        self,
        text: Text,
        coverage: float | None = None,
        max_error: float | str | None = None,
        *,
        familiarity: bool = False,
    ) -> Prediction:
        """Classify one text, or if the model reads pairs, two; otherwise as `predict_batch`."""
        wanted = self.answering.wanted(coverage, max_error, familiarity)
        self._refuse_unreadable("text", text)
        return self._classify([text], ["text"], wanted)[0]

    def predict_batch(
        self,
        texts: Sequence[Text],
        coverage: float | None = None,
        max_error: float | str | None = None,
        *,
        familiarity: bool = False,
    ) -> list[Prediction]:
        """Classify texts, or pairs of texts; the answers come in their order.

        A calibrated model also answers with a set or an interval of this ``coverage``, abstains
        where more than ``max_error`` of its answers might be wrong, and says how familiar a text
        is: `Answering.honest` has the fields.

        Raises:
            CalibrationError: The model cannot promise what is asked for.
            ForwardError: The model answers one of them with NaN.
            ValueError: A text is blank, or is a pair and the model reads single texts, or the other
                way round; the message gives its position.
        """
        wanted = self.answering.wanted(coverage, max_error, familiarity)
        names = [f"texts[{position}]" for position in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            self._refuse_unreadable(name, text)
        return self._classify(texts, names, wanted) if names else []

    def _classify(
        self, texts: Sequence[Text], names: Sequence[str], wanted: Wanted
    ) -> list[Prediction]:
        answers, familiarity, truncated = self.stages[0]._read(texts, names, wanted)
        if self.cascade and (rest := self.cascade.passed_on(answers, truncated)):
            some = [texts[i] for i in rest], [names[i] for i in rest]
            answers[rest], of_these, _ = self._read(*some, wanted)
            for i, known in zip(rest, of_these, strict=True):
                familiarity[i] = known
        if not np.isfinite(answers).all():
            raise ForwardError("the model answers this text with NaN")
        predictions = (
            self.answering.predict(values, known, wanted)
            for values, known in zip(answers.tolist(), familiarity, strict=True)
        )
        return cast("list[Prediction]", list(predictions))

    def _read(
        self, texts: Sequence[Text], names: Sequence[str], wanted: Wanted
    ) -> tuple[NDArray[np.float64], list[float | None], list[bool]]:
        """What this model alone answers, (texts, labels), how familiar each text is, and whether
        it was truncated.
        """
        encoded = self.tokenizer.encode(texts)
        for name, one in zip(names, encoded, strict=True):
            if one.blank:
                raise _blank(name)
        token_ids = [one.ids for one in encoded]
        scores = scores_of(self.engine, token_ids)
        answers, familiarity = self.answering.read(TokenBatch.of(token_ids), scores, wanted)
        return answers, list(familiarity), [one.truncated for one in encoded]

    def _refuse_unreadable(self, name: str, text: Text) -> None:
        if self.reads_pairs is isinstance(text, str):
            expected = "pairs (text, text_pair)" if self.reads_pairs else "single texts"
            raise RefusedTextError("wrong_kind_of_text", f"{name}: this model reads {expected}")
        if not all(map(self.stages[0].tokenizer.clean, texts_in(text))):
            raise _blank(name)


def load_shared(
    paths: Iterable[str | Path], engine: str = "auto", hardware: Hardware = _ANY_DEVICE
) -> list[ModelLoader]:
    """Load models one after the other; those that differ only behind their encoder share one.

    Each goes through every check as if it were loaded alone, and needs its own encoder until then.

    Raises:
        ModelLoadError: See `ModelLoader`.
    """
    models: list[ModelLoader] = []
    for path in paths:
        model = ModelLoader(path, engine, hardware)
        model.share_encoder(models)
        models.append(model)
    return models


def _blank(name: str) -> RefusedTextError:
    return RefusedTextError("blank_text", f"{name} is blank: there is nothing to classify")


def _name(path: Path) -> str:
    path = path.absolute()
    return path.name if path.is_dir() else path.stem
