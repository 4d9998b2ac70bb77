"""A model of a server process: not loaded yet, served, or refused with a reason; replaced while
requests run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from common.calibration import CalibrationError
from common.errors import ModelLoadError, first_line
from common.memory import limit_memory_pools, release_free_memory
from inference.batching.audit import Audit
from inference.batching.batcher import Workers
from inference.batching.classifier import Classifier
from inference.batching.shadow import Shadow
from inference.batching.stage import QueueLimits
from inference.batching.tokenizing import TokenizerThreads
from inference.engines.answering import NOTHING_MORE, Wanted
from inference.engines.model_loader import ModelLoader
from inference.errors import ModelUnavailableError, QueueFullError
from inference.metrics import ModelMetrics
from inference.settings import Settings

LoadModel = Callable[[Path, str], ModelLoader]
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model and the queue in front of it."""

    model: ModelLoader
    classifier: Classifier
    name: str
    metrics: ModelMetrics
    # What COVERAGE and MAX_ERROR add to answers where a request asks for nothing else.
    wanted: Wanted = NOTHING_MORE
    shadow: Shadow | None = None


def wanted_of(model: ModelLoader, path: Path, settings: Settings) -> Wanted:
    """What COVERAGE and MAX_ERROR add to the answers of this model.

    Raises:
        ModelLoadError: the model cannot do what the settings ask of it.
    """
    budget = settings.max_batch_tokens
    longest = max(one.tokenizer.most_ids for one in model.stages)
    # 0 leaves it to the engine, which takes any model.
    if budget and budget < longest:
        what = f"MAX_BATCH_TOKENS {budget}: one text of this model has up to {longest} tokens"
        raise ModelLoadError(path, what, f"set MAX_BATCH_TOKENS to at least {longest}")
    try:
        return model.answering.wanted(settings.coverage, settings.max_error or None)
    except CalibrationError as error:
        remedy = "calibrate the model, or change COVERAGE or MAX_ERROR"
        raise ModelLoadError(path, str(error), remedy) from error


@dataclass(frozen=True, slots=True)
class OneOfSeveral:
    """What a model has to know that is not the only one of its server.

    ``name``: the one that requests give; ``workers``: run the passes of all models; ``weight``: of
    its share of them; ``tokenizers``: the threads of all tokenizers; ``loading``: held while one of
    the models is loaded, as two at once would each measure a speed that is too low; ``loaded``: all
    models that are served now, of which one may have the same encoder.
    """

    name: str
    path: Path
    workers: Workers
    weight: float
    tokenizers: TokenizerThreads
    loading: asyncio.Lock
    loaded: Callable[[], list[ModelLoader]]


class ServedModel:
    """Holds what is served under one name, or the reason why nothing is."""

    def __init__(
        self,
        settings: Settings,
        metrics: ModelMetrics,
        load_model: LoadModel,
        *,
        counts_loads: bool = True,
        among: OneOfSeveral | None = None,
    ) -> None:
        """Args:
        counts_loads: not for one of several worker processes, whose supervisor counts what all of
            them load together.
        among: None if it is the only model, which MODEL_CHECKPOINT names.
        """
        self.path = among.path if among else settings.model_checkpoint
        self._among = among
        self._load_model = load_model
        self._name = among.name if among else settings.model_name
        self._settings = settings
        self._engine = settings.engine
        self._stuck_after_s = settings.request_timeout_s
        self._dead_after_s = settings.restart_after_s
        self._limits = QueueLimits(
            max_batch_tokens=settings.max_batch_tokens,
            # Nobody waits for an answer beyond the request's own time limit.
            max_wait_seconds=min(settings.max_wait_seconds, settings.request_timeout_s),
            cache_entries=settings.cache_entries,
        )
        self._metrics = metrics
        self._counts_loads = counts_loads
        self._current: Served | None = None
        # What everybody may read names no folder of this machine; the log does.
        self.public_name = among.name if among else self.path.absolute().name
        name = self.public_name
        self._load_error = f"{name}: the model is still loading; try again in a few seconds"
        self._was_refused = False
        self._loading = among.loading if among else asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()
        # The candidate that is to answer a share of the texts too.
        self.shadow_path: Path | None = None
        self._adding_shadow: asyncio.Task[None] | None = None
        readings: tuple[tuple[str, str, Callable[[Classifier], float]], ...] = (
            ("queue_tokens", "Tokens that wait for a forward pass.", lambda c: c.queued_tokens),
            (
                "queue_seconds",
                "Seconds until all that was accepted is answered, at the measured speed.",
                lambda c: c.queue_seconds,
            ),
            ("tokens_per_second", "Measured speed of the model.", lambda c: c.tokens_per_second),
        )
        for name, documentation, read in readings:
            metrics.watch(name, documentation, functools.partial(self._reading, read))
        metrics.watch(
            "cascade_threshold",
            "Of a cascade: the least probability with which the small model answers; 0 for others.",
            lambda: self._of_audit(lambda audit: audit.threshold),
        )
        metrics.watch(
            "cascade_evidence",
            "What 1 has become by betting against the promise of the cascade; 20 breaks it.",
            lambda: self._of_audit(lambda audit: audit.evidence),
        )
        metrics.watch(
            "cascade_tightened",
            "How often the small model was made to answer less since the model was loaded.",
            lambda: self._of_audit(lambda audit: audit.num_tightened),
        )
        metrics.watch(
            "model_ready", "Whether texts can be classified.", lambda: float(self.error is None)
        )

    def _reading(self, read: Callable[[Classifier], float]) -> float:
        return read(self._current.classifier) if self._current else 0.0

    def _of_audit(self, read: Callable[[Audit], float]) -> float:
        audit = self._current.classifier.audit if self._current else None
        return 0.0 if audit is None else read(audit)

    @property
    def error(self) -> str | None:
        """Why no text can be classified now, or None."""
        if self._current is None:
            return self._load_error
        classifier = self._current.classifier
        if not classifier.is_alive:
            return "the worker that runs the model is down and is being restarted; see the log"
        if classifier.heartbeat_age_s > self._stuck_after_s:
            return f"the model has been working on one batch for {classifier.heartbeat_age_s:.0f} s"
        return classifier.health.failure

    @property
    def dead(self) -> str | None:
        """Why only a new process helps: an error that stays with this one, or RESTART_AFTER_S
        without an answer.

        A model that was never loaded is not dead: it may be put right and loaded by a signal.
        """
        if self._current is None:
            return None
        classifier = self._current.classifier
        if classifier.health.needs_restart:
            return classifier.health.failure
        # A pass in shadow that hangs keeps workers from this model, too.
        in_shadow = self._current.shadow.heartbeat_age_s if self._current.shadow else 0.0
        silent_s = max(classifier.heartbeat_age_s, classifier.health.broken_s, in_shadow)
        if silent_s <= self._dead_after_s:
            return None
        return (
            f"the model has answered nothing for {silent_s:.0f} s "
            f"({self.error or 'one batch takes all this time'})"
        )

    @property
    def current(self) -> Served | None:
        return self._current

    @property
    def is_full(self) -> bool:
        return self._current is not None and self._current.classifier.is_full

    def full_error(self) -> QueueFullError | None:
        """What a request with one text would be refused with now; None without a model, too."""
        return self._current.classifier.full_error() if self._current else None

    @property
    def name(self) -> str:
        """What requests call it. The name of an only model is known once it is loaded."""
        return self._current.name if self._current else self._name or self.public_name

    @property
    def is_decided(self) -> bool:
        """Whether it has been loaded, or refused, at least once."""
        return self._current is not None or self._was_refused

    @property
    def is_loading(self) -> bool:
        return self._loading.locked()

    def require(self) -> Served:
        if self._current is None:
            raise ModelUnavailableError(self._load_error)
        return self._current

    async def load(self, path: Path | None = None) -> Served:
        """Load the model that `path` names now, by default the same path as before, and serve it in
        place of the current one, which still answers what it has accepted.

        Raises:
            ModelLoadError: it cannot be loaded; the current one stays.
        """
        path = path or self.path
        async with self._loading:
            try:
                others = self._among.loaded() if self._among else []
                is_first = not others and self._current is None
                if is_first:
                    limit_memory_pools()
                model = await _in_background(lambda: self._load_model(path, self._engine))
                wanted = wanted_of(model, path, self._settings)
                if self._among:
                    await _in_background(lambda: model.share_encoder(others), model.leave_encoder)
                if is_first:
                    _freeze_what_stays()
                served = self._serving(model, wanted)
            except Exception as error:
                self._was_refused = True
                self._count_load("refused")
                refusal = refusal_of(path, error)
                if self._current is None:
                    self._load_error = str(refusal).replace(str(path), self.public_name)
                    logger.error(
                        "the server runs, but without %s gets 503. Fix the model and send SIGHUP "
                        "(kill -HUP %d), or start again with another one",
                        f"the model {self.name}: every request for its answers"
                        if self._among
                        else "a model: every request for an answer",
                        os.getpid(),
                    )
                raise refusal from error
            # Between two awaits, so a request sees either the old one or the new one. It keeps what
            # it has seen: the old one lives until its last answer, and only then its threads end.
            before, self._current, self.path = self._current, served, path
            self._count_load("served")
            info = model.info
            self._metrics.serves(served.name, info["revision"], info["engine"], model.replaces)
            is_calibrated = model.answering.calibration is not None
            logger.info(
                "serving %s: %s%s",
                served.name,
                model.info["reason"],
                "" if is_calibrated else "; its probabilities are not calibrated",
                extra={"fields": {"model": model.info}},
            )
        if before is not None:
            self._retire(before)
        if self.shadow_path is not None:
            # Nothing waits for it: with several workers, not even the start of this one.
            self._adding_shadow = asyncio.create_task(self._add_shadow(served, self.shadow_path))
        return served

    async def _add_shadow(self, served: Served, path: Path) -> None:
        async with self._loading:
            if self._current is not served:
                return
            try:
                candidate = await _in_background(lambda: self._load_model(path, self._engine))
                weight = self._among.weight if self._among else 1.0
                shadow = Shadow(
                    candidate,
                    served.model,
                    served.classifier,
                    self._metrics,
                    self._limits,
                    self._settings.shadow_share,
                    weight,
                )
            except Exception as error:
                logger.error("SHADOW: %s: nothing is in shadow: %s", path, first_line(error))
                return
            self._current = replace(served, shadow=shadow)
            logger.info("%s is in shadow of %s", candidate.info["revision"], served.name)

    def _serving(self, model: ModelLoader, wanted: Wanted) -> Served:
        among = self._among
        machine = (among.workers, among.weight, among.tokenizers) if among else ()
        classifier = Classifier(model, self._limits, self._metrics, *machine)
        name = self._name or model.info["name"]
        return Served(model, classifier, name, self._metrics, wanted)

    def _count_load(self, result: str) -> None:
        if self._counts_loads:
            self._metrics.reloads.labels(result).inc()

    def _retire(self, served: Served) -> None:
        task = asyncio.create_task(_drain(served))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    def remove(self) -> None:
        """Serve nothing under this name any more, once what was accepted is answered."""
        if self._current is not None:
            self._retire(self._current)
        self._current = None
        self._load_error = f"{self.public_name}: the model was removed"

    async def close(self) -> None:
        """Answer what was accepted, and stop."""
        if self._adding_shadow is not None:
            self._adding_shadow.cancel()
        if self._current is not None:
            self._retire(self._current)
        if self._draining:
            await asyncio.wait(self._draining)


async def _in_background(
    load: Callable[[], Result], undo: Callable[[], None] | None = None
) -> Result:
    """Like `asyncio.to_thread`, but a process that is to end does not wait for the thread.

    ``undo``: takes back what the thread has done if nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if loaded.done():  # cancelled
            if undo is not None and error is None:
                undo()
            return
        if error is not None:
            loaded.set_exception(error)
        else:
            loaded.set_result(cast("Result", result))

    def run() -> None:
        result, error = None, None
        try:
            result = load()
        except BaseException as raised:
            error = raised
        # RuntimeError: the loop has ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await loaded


def refusal_of(path: Path, error: Exception) -> ModelLoadError:
    """Log why a model does not load, and return it in one line."""
    if isinstance(error, ModelLoadError):
        logger.error("the model is refused: %s", error)
        return error
    logger.error("the model does not load", exc_info=error)
    what = f"the model does not load ({type(error).__name__}: {first_line(error)})"
    return ModelLoadError(
        path, what, "see the traceback in the server's log, or export the model again"
    )


async def _drain(served: Served) -> None:
    await served.classifier.drain()
    if served.shadow is not None:
        served.shadow.close()
    served.classifier.close()
    served.model.leave_encoder()
    del served
    release_free_memory()


def _freeze_what_stays() -> None:
    # Modules imported by now live as long as the server, so the collector looks at them this once
    # and never again. Otherwise it would go through hundreds of thousands of objects every few
    # thousand requests and at each reload, while all requests wait. The first classifier is created
    # after this, so that the cycles between each and its threads are found when it is retired; the
    # first model, which is frozen here, is then freed by its reference count.
    gc.collect()
    gc.freeze()
