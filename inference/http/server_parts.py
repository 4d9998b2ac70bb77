"""The parts that a server consists of, and the memory budget for request bodies."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from common.text import Text, texts_in
from inference.batching.served_model import LoadModel, Served, ServedModel
from inference.batching.served_models import ServedModels
from inference.errors import SettingsError
from inference.http.admission import ApiKeys, Refusal, RequestLimits
from inference.http.error_responses import RETRY_AFTER_SECONDS
from inference.http.lifecycle import Lifecycle
from inference.http.request_context import RequestContext
from inference.http.request_log import RequestLog
from inference.http.workers import SupervisorLine
from inference.metrics import ServerMetrics
from inference.observing.feedback import FeedbackWriter
from inference.observing.store import StoreError
from inference.observing.stream import Observer
from inference.observing.summary import Summaries
from inference.settings import Settings

# Where the path says which of several models is asked, and where the body may.
_NAMED = ("/models/", "/v2/models/")
_NAMED_IN_BODY = ("/hub", "/classify", "/v1/classify")
# What a text costs besides its characters: a future, an entry in the queue, an answer.
_BYTES_PER_TEXT = 1024


class BodyBudget:
    """Bounds the memory that the bodies of all current requests take together; only used on the
    event loop.

    ``within``: the budget that this one is a part of.
    """

    # What a request is told if there is no room.
    BUSY = "the bodies in progress fill the memory set aside for them; try again soon"

    def __init__(self, max_bytes: int, within: BodyBudget | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._within = within
        self._released: asyncio.Event = within._released if within else asyncio.Event()

    def has_room(self, num_bytes: int) -> bool:
        fits = self.held_bytes + num_bytes <= self.max_bytes
        return fits and (self._within is None or self._within.has_room(num_bytes))

    def take(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        if self._within:
            self._within.take(num_bytes)

    def release(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
        if self._within:
            self._within.release(num_bytes)
        self._released.set()

    async def wait_for_room(self) -> None:
        while not self.has_room(1):
            self._released.clear()
            await self._released.wait()


class RequestsInProgress:
    """Counts the requests that were admitted and are not answered yet, each in a ``with`` block of
    its own; only used on the event loop.

    ``most``: with as many, requests for answers are refused. It is less than MAX_CONNECTIONS: with
    none to spare, a refusal would need a new connection, which costs several times as much.
    """

    def __init__(self) -> None:
        self.count = 0
        self.most = math.inf
        self._on_the_way = 0

    def on_the_way(self) -> None:
        """Count one that was let through at its headers until its task begins, which is after all
        headers that arrived in the same turn of the event loop.
        """
        if not self._on_the_way:
            asyncio.get_running_loop().call_soon(self._arrive)
        self._on_the_way += 1

    def _arrive(self) -> None:
        self._on_the_way = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1

    @property
    def is_full(self) -> bool:
        """Whether there is no room for one more, which is judged before it is counted."""
        return self.count + self._on_the_way >= self.most


def weight_of(texts: Sequence[Text]) -> int:
    """The bytes of memory that texts take: up to four per character if one of them is an emoji."""
    sizes = (sys.getsizeof(part) for text in texts for part in texts_in(text))
    return sum(sizes) + _BYTES_PER_TEXT * len(texts)


@dataclass(frozen=True, slots=True)
class Parts:
    settings: Settings
    metrics: ServerMetrics
    log: RequestLog
    lifecycle: Lifecycle
    api_keys: ApiKeys
    limits: RequestLimits
    in_progress: RequestsInProgress
    body_budget: BodyBudget
    stream_budget: BodyBudget  # a part of it
    models: ServedModels
    line: SupervisorLine | None  # for one of several workers
    observer: Observer | None = None
    feedback: FeedbackWriter | None = None
    summaries: Summaries | None = None  # of what it has counted

    @classmethod
    def of(cls, settings: Settings, load_model: LoadModel, line: SupervisorLine | None) -> Parts:
        api_keys = ApiKeys(
            settings.api_key.get_secret_value() if settings.api_key else None,
            settings.api_keys_file,
        )
        if settings.require_api_key and not api_keys.is_set:
            problem = (
                "REQUIRE_API_KEY is set, but neither API_KEY nor API_KEYS_FILE is; set one of them"
            )
            raise SettingsError(problem, code="api-key-missing")
        metrics = ServerMetrics()
        metrics.watch(
            "api_key_required", "1 if requests need an API key.", lambda: float(api_keys.is_set)
        )
        in_progress = RequestsInProgress()
        metrics.watch(
            "requests_in_progress", "Requests that are not answered yet.", lambda: in_progress.count
        )
        body_budget = BodyBudget(int(settings.max_pending_mb * 2**20))
        metrics.watch(
            "pending_body_bytes", "Bodies of requests in progress.", lambda: body_budget.held_bytes
        )
        models = ServedModels(settings, metrics, load_model, counts_loads=line is None)
        observer, summaries = _observing(settings, models, line)
        return cls(
            settings=settings,
            metrics=metrics,
            log=RequestLog(),
            lifecycle=Lifecycle(settings),
            api_keys=api_keys,
            limits=RequestLimits(
                api_keys, settings.rate_limit_per_s, line.report_taken if line else None
            ),
            in_progress=in_progress,
            body_budget=body_budget,
            # Streams read ahead as much as they may, for as long as they last; single requests
            # always have room.
            stream_budget=BodyBudget(body_budget.max_bytes // 2, within=body_budget),
            models=models,
            line=line,
            observer=observer,
            feedback=FeedbackWriter(observer.store.address) if observer else None,
            summaries=summaries,
        )

    async def observed(self, served: Served) -> dict[str, Any] | None:
        """What has been counted of a model; None if nothing is."""
        if self.summaries is None:
            return None
        return await asyncio.to_thread(self.summaries.of, served)

    def count_request(self, context: RequestContext, method: str, route: str, status: int) -> None:
        """Count and log a request that has ended; ``method`` and ``route`` are from bounded sets."""
        context.route = route
        seconds = time.perf_counter() - context.started
        self.metrics.request_done(route, method, status, seconds, context.error_code)
        self.log.write(context, method, status, seconds)

    def is_overloaded(self, path: str) -> bool:
        """Whether `overload` would refuse."""
        return self.in_progress.is_full or all(one.is_full for one in self._asked(path))

    def overload(self, path: str) -> Refusal | None:
        """Why no text can be accepted for this route now: status, code, message, seconds to wait;
        if the body may name the model, only if all of them are full.
        """
        errors = [one.full_error() for one in self._asked(path)]
        if errors and (error := errors[0]) is not None and all(errors):
            return 503, error.code, str(error), error.retry_after_s
        if self.in_progress.is_full:
            what = f"{self.in_progress.most:g} requests wait for answers on as many connections"
            return 503, "server_busy", f"{what}; try again soon", RETRY_AFTER_SECONDS
        return None

    def _asked(self, path: str) -> Collection[ServedModel]:
        """The models that a request to this route may be for."""
        models = self.models
        if not models.are_several:
            return (models.default,)
        if path.startswith(_NAMED):
            # An unknown name is left to the route.
            found = models.find(path.partition("/models/")[2].partition("/")[0])
            return () if found is None else (found,)
        return models.all.values() if path in _NAMED_IN_BODY else (models.default,)

    @property
    def served_model(self) -> ServedModel:
        """The only model, or the first of several, which answers requests that name none."""
        return self.models.default

    @property
    def dead(self) -> str | None:
        """Why the process has to be restarted, or None."""
        return self.models.dead

    @property
    def unready(self) -> str | None:
        """Why requests should go elsewhere, or None."""
        return self._unready(self.models.error)

    def why_not_ready(self, model: ServedModel) -> str | None:
        """Why requests for this model should go elsewhere, or None."""
        return self._unready(model.error)

    def _unready(self, error: str | None) -> str | None:
        if self.lifecycle.is_draining:
            return "the server is shutting down"
        if error is None and self.line is not None and not self.line.all_are_ready:
            return (
                "other workers of this server are still loading the model; try again in a few "
                "seconds"
            )
        return error


def _observing(
    settings: Settings, models: ServedModels, line: SupervisorLine | None
) -> tuple[Observer | None, Summaries | None]:
    """Raises:
    SettingsError: the place that OBSERVE names cannot be used.
    """
    if (address := settings.observed_at) is None:
        return None, None

    def served() -> list[Served]:
        return [one.current for one in list(models.all.values()) if one.current]

    def report(one: Served) -> None:
        one.metrics.saw(summaries.of(one))

    most = int(settings.observe_mb * 2**20)
    observer = Observer(address, settings.keep_texts_s, most, served, report)
    summaries = Summaries(observer)
    # Not in each worker, which has to serve even if the store fails now. The connection is closed,
    # because none outlives the fork that may follow.
    if line is None:
        try:
            observer.store.close()
        except StoreError as error:
            raise SettingsError(f"OBSERVE: {error}", code=error.code) from None
    return observer, summaries


def parts_of(request: Request) -> Parts:
    return request.app.state.parts


async def _parts(request: Request) -> Parts:
    return parts_of(request)


PartsDep = Annotated[Parts, Depends(_parts)]
