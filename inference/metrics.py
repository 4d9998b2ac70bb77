"""What the server counts and measures for Prometheus; called from any thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

# The creation time of each series would make up half the page.
disable_created_metrics()

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
_CONFIDENCE = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


# All metrics of a process: name, documentation, type and samples, each with its name, labels and
# value.
Snapshot = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]
# What several processes have together is the sum, but for these gauges.
_LEAST = ("distrinews_model_ready", "process_start_time_seconds")
_MOST = (
    "distrinews_api_key_required",
    "distrinews_cascade_evidence",
    "distrinews_cascade_threshold",
    "distrinews_cascade_tightened",
    # All processes read the same store.
    "distrinews_drift_alarm",
    "distrinews_drift_evidence",
    "distrinews_estimated_accuracy",
    "distrinews_estimated_accuracy_high",
    "distrinews_estimated_accuracy_low",
    "distrinews_model_info",
    "distrinews_queue_seconds",
    "distrinews_reference_accuracy",
    "process_max_fds",
    "python_info",
)


class ModelMetrics:
    """What is counted about one model, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        stage = histogram(
            "stage_seconds", "Seconds of a text or batch in each stage.", _SECONDS, "stage"
        )
        self._tokenize, self._queue, self._forward = (
            stage.labels(name) for name in ("tokenize", "queue", "forward")
        )
        self._batch_texts = histogram("batch_texts", "Texts in a forward pass.", _TEXTS)
        self._batch_tokens = histogram("batch_tokens", "Tokens in a forward pass.", _TOKENS)
        self._tokenized = counter("tokenized_texts", "Texts cleaned and tokenized.")
        self._deduplicated = counter(
            "deduplicated_texts", "Texts answered by the same text already in flight."
        )
        cache = counter("cache_lookups", "Texts looked up among remembered answers.", "result")
        self._cache_hit, self._cache_miss = cache.labels("hit"), cache.labels("miss")
        self._dropped = counter(
            "dropped_texts", "Texts that left the queue before a forward pass.", "reason"
        )
        self._worker_failures = counter("worker_failures", "Forward passes that failed.")
        self._predictions = counter(
            "predictions", "Texts classified, by label: watch it for drift.", "label"
        )
        self._unlabelled = counter(
            "unlabelled_texts", "Texts of which no label reached its threshold."
        )
        self._abstained = counter(
            "abstained_texts", "Texts without an answer, by the reason.", "reason"
        )
        for reason in ("uncertain", "unfamiliar"):
            self._abstained.labels(reason)
        self._confidence = histogram(
            "confidence", "Probability of the label: watch it for drift.", _CONFIDENCE
        )
        by_stage = counter(
            "cascade_texts", "Texts that a cascade answers, by which of its models.", "model"
        )
        self._by_stage = {name: by_stage.labels(name) for name in ("small", "big")}
        checks = counter(
            "cascade_checks",
            "Answers of the small model that were compared with the big one's.",
            "result",
        )
        self._checks = {name: checks.labels(name) for name in ("same", "differs")}
        shadow = counter(
            "shadow_texts",
            "Texts drawn for the candidate in shadow: whether it gave the same label; dropped, if "
            "the server was busy or the candidate failed.",
            "result",
        )
        self._shadow = {name: shadow.labels(name) for name in ("same", "differs", "dropped")}
        self._truncated = counter("truncated_texts", "Texts longer than what the model reads.")
        self.reloads = counter("model_reloads", "Attempts to load a model.", "result")
        # Shown as 0 from the start: to Prometheus, a series that appears with 1 has not increased.
        for result in ("served", "refused"):
            self.reloads.labels(result)
        self._model = gauge(
            "model_info",
            "1 for the model that is served.",
            *("name", "revision", "engine", "replaces"),
        )
        self._label_children: dict[str, Counter] = {}
        self._add_observations()

    def _add_observations(self) -> None:
        """What is seen of the stream, and follows from it."""
        counter, gauge = self._counter, self._gauge
        self._observed = counter("observed_texts", "Texts whose counts are in the store.")
        self._unseen = counter(
            "unseen_texts", "Texts that were answered, but not counted: too many waited."
        )
        about = "Share of right answers, estimated without labels; absent if it cannot be known."
        self._accuracy = {
            "accuracy": gauge("estimated_accuracy", about, "window"),
            "low": gauge("estimated_accuracy_low", "Where its 90% interval begins.", "window"),
            "high": gauge("estimated_accuracy_high", "Where its 90% interval ends.", "window"),
        }
        self._reference_accuracy = gauge(
            "reference_accuracy", "Share of right answers on the rows kept for comparison; else 0."
        )
        self._drift_evidence = gauge(
            "drift_evidence", "Evidence that texts have changed; an alarm at 1,000,000.", "what"
        )
        self._drift_alarm = gauge("drift_alarm", "1 for a day after the alarm; 0 if not observed.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"distrinews_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"distrinews_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"distrinews_{name}", text, labels, buckets=buckets, registry=self.registry
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read when the metrics are requested."""
        self._gauge(name, text).set_function(value)

    def predicted(self, given: Sequence[tuple[str, float | None]], truncated: bool) -> None:
        """Count an answer: its labels with their probabilities, none for a text without a label."""
        for label, confidence in given:
            child = self._label_children.get(label)
            if child is None:
                child = self._label_children[label] = self._predictions.labels(label)
            child.inc()
            if confidence is not None:
                self._confidence.observe(confidence)
        if not given:
            self._unlabelled.inc()
        if truncated:
            self._truncated.inc()

    def abstained(self, reason: str, truncated: bool) -> None:
        self._abstained.labels(reason).inc()
        if truncated:
            self._truncated.inc()

    def observed(self, texts: int) -> None:
        self._observed.inc(texts)

    def unseen(self, texts: int) -> None:
        self._unseen.inc(texts)

    def saw(self, summary: Mapping[str, Any]) -> None:
        """Show what `inference.observing.summary` says; what it cannot say stays as it was."""
        for window in ("hour", "day", "week"):
            for figure, gauge in self._accuracy.items():
                if (value := summary.get(window, {}).get(figure)) is not None:
                    gauge.labels(window).set(value)
                elif window in summary:
                    with suppress(KeyError):  # it was not there
                        gauge.remove(window)
        self._reference_accuracy.set(summary.get("reference_accuracy", 0.0))
        if alarm := summary.get("alarm"):
            self._drift_alarm.set(float(alarm["active"]))
            for what, evidence in alarm["by_score"].items():
                self._drift_evidence.labels(what).set(evidence)

    def answered_by(self, model: str) -> None:
        self._by_stage[model].inc()

    def checked(self, result: str) -> None:
        self._checks[result].inc()

    def in_shadow(self, result: str, texts: int = 1) -> None:
        self._shadow[result].inc(texts)

    def serves(self, name: str, revision: str, engine: str, replaces: str) -> None:
        """``replaces``: the revision that a verdict lets it replace; empty if none does."""
        # The labels of the model before would stay as a second series that is 1.
        self._model.clear()
        self._model.labels(name, revision, engine, replaces).set(1)

    def tokenized(self, texts: int, seconds: float) -> None:
        self._tokenized.inc(texts)
        self._tokenize.observe(seconds)

    def batch_done(self, texts: int, tokens: int, seconds: float) -> None:
        self._batch_texts.observe(texts)
        self._batch_tokens.observe(tokens)
        self._forward.observe(seconds)

    def waited(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def deduplicated(self) -> None:
        self._deduplicated.inc()

    def cache_hit(self) -> None:
        self._cache_hit.inc()

    def cache_miss(self) -> None:
        self._cache_miss.inc()

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()

    def worker_failed(self) -> None:
        self._worker_failures.inc()


class ServerMetrics(ModelMetrics):
    """The metrics of one server, those of its model among them. If there are several models, each
    has its own, which are shown with the label ``model_name``.
    """

    def __init__(self) -> None:
        super().__init__()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        counter, histogram = self._counter, self._histogram
        self._requests = counter(
            "requests", "Requests by route, method and status.", "route", "method", "status"
        )
        self._request_seconds = histogram(
            "request_seconds", "Seconds of a request.", _SECONDS, "route"
        )
        self._refusals = counter(
            "refusals", "Requests refused or failed, by the code of the error shape.", "code"
        )
        self._feedback = counter("feedback", "Corrections sent by users, by the result.", "result")
        for result in ("recorded", "known", "failed"):
            self._feedback.labels(result)
        # One dictionary lookup per request instead of prometheus_client's check of all label
        # values.
        self._request_children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._refusal_children: dict[str, Counter] = {}
        self._of_models: dict[str, ModelMetrics] = {}

    def of_model(self, name: str) -> ModelMetrics:
        """The metrics of one of several models."""
        return self._of_models.setdefault(name, ModelMetrics())

    def forget_model(self, name: str) -> None:
        self._of_models.pop(name, None)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that an Accept header asks for."""
        if self._of_models:
            return render_merged([self.snapshot()], accept)
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def snapshot(self) -> Snapshot:
        families = _snapshot(self.registry, {})
        if not self._of_models:
            return families
        of_models = [
            family
            for name, one in list(self._of_models.items())
            for family in _snapshot(one.registry, {"model_name": name})
        ]
        # What there is of each model, the server as a whole has not.
        theirs = {family[0] for family in of_models}
        return [one for one in families if one[0] not in theirs] + of_models

    def fed_back(self, result: str) -> None:
        self._feedback.labels(result).inc()

    def request_done(
        self, route: str, method: str, status: int, seconds: float, error_code: str | None
    ) -> None:
        """Count a request; `route` and `method` must come from a bounded set."""
        children = self._request_children.get((route, method, status))
        if children is None:
            children = (
                self._requests.labels(route, method, status),
                self._request_seconds.labels(route),
            )
            self._request_children[route, method, status] = children
        children[0].inc()
        children[1].observe(seconds)
        if error_code is not None:
            refusals = self._refusal_children.get(error_code)
            if refusals is None:
                refusals = self._refusal_children[error_code] = self._refusals.labels(error_code)
            refusals.inc()


def _snapshot(registry: CollectorRegistry, more: dict[str, str]) -> Snapshot:
    families = []
    for family in registry.collect():
        # Plain values, which can be sent from one process to another.
        samples = [(one.name, one.labels | more, one.value) for one in family.samples]
        families.append((family.name, family.documentation, family.type, samples))
    return families


def merged(snapshots: Sequence[Snapshot], *, only_counts: bool = False) -> Snapshot:
    """What several processes count and measure together; ``only_counts`` for ended ones."""
    families: dict[str, tuple[str, str, dict[Any, tuple[str, dict[str, str], float]]]] = {}
    for name, documentation, kind, samples in itertools.chain.from_iterable(snapshots):
        # A gauge says what is now, and an ended process has nothing now. Its counts stay: a counter
        # that falls looks to Prometheus like a server that has started again.
        if only_counts and kind not in ("counter", "histogram"):
            continue
        found = families.setdefault(name, (documentation, kind, {}))[2]
        for sample, labels, value in samples:
            key = (sample, *sorted(labels.items()))
            before = found[key][2] if key in found else None
            found[key] = (sample, labels, _combined(name, before, float(value)))
    return [
        (name, text, kind, list(found.values())) for name, (text, kind, found) in families.items()
    ]


def _combined(name: str, before: float | None, value: float) -> float:
    if before is None:
        return value
    # For example: several processes are ready once all of them are.
    if name in _LEAST:
        return min(before, value)
    return max(before, value) if name in _MOST else before + value


def render_merged(snapshots: Sequence[Snapshot], accept: str) -> tuple[bytes, str]:
    """Like `ServerMetrics.render`, for several processes together."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Collected(merged(snapshots))), content_type


class _Collected(CollectorRegistry):
    """A registry of metrics whose values are known."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        for name, documentation, kind, samples in self._snapshot:
            metric = Metric(name, documentation, kind)
            for sample, labels, value in samples:
                metric.add_sample(sample, labels, value)
            yield metric
