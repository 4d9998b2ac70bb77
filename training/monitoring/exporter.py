"""Exporter: what one rank counts and measures, for Prometheus, on a port of its own."""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.process_collector import ProcessCollector

from common.errors import UserError, in_one_line
from training.monitoring.events import (
    CheckpointFailed,
    CollectivesRecorded,
    Event,
    RanksCompared,
    Rescheduled,
    RolledBack,
    RunStarted,
    StepDone,
    StepsAgreed,
    StepStarted,
    Subscriber,
    read_events,
)
from training.monitoring.records import METRICS, CollectiveUse, EpochMetrics, SavedCheckpoint

if TYPE_CHECKING:
    from training.config import TrainConfig
    from training.distributed.ranks import Ranks
    from training.monitoring.phases import Phases

# Without this, half the page says when each series began.
disable_created_metrics()

_STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# A phase is a part of a step, often a small one, so its buckets begin a hundred times lower.
_PHASE_SECONDS = (0.0001, 0.001, 0.0025, 0.005, *_STEP_SECONDS)
_CHECKPOINT_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
Value = Callable[[Any], float | None]  # reads a metric's new value from an event
# Phases in which a rank may be slower than the others.
COMPARED = (
    "data",
    "forward",
    "backward",
    "compute",
)


class Exporter(Subscriber):
    """Metrics of one rank, in a registry of their own; ``--metrics_port`` 0 serves no page of them.

    Counters begin at 0 with the process. Rows and tokens are this rank's own and add up over ranks;
    everything else about steps is the same on each. Unknown values are NaN.

    Raises:
        UserError: the port cannot be listened on.
    """

    # The start of a step closes the phases of the one before; its end has this rank's own rows.
    follows_steps = True

    def __init__(self, config: TrainConfig, ranks: Ranks, phases: Phases) -> None:
        # The registry that prometheus_client shares would refuse the names of a second run in this
        # process, as a notebook starts one.
        self.registry = CollectorRegistry()
        # Of the ranks that hold parts of one replica, only one counts its rows.
        self.counts_rows = True
        self.phases = phases
        self._run_dir = config.run_dir
        # By type of event: what it updates, and how the new value is read from it.
        self._updates: defaultdict[type, list[tuple[Callable[[float], None], Value]]] = defaultdict(
            list
        )
        # Finding a histogram by its label takes as long as observing, so each is found once.
        self._by_phase: dict[str, Histogram] = {}
        ProcessCollector(registry=self.registry)
        self._kinds = tuple(partial(self._register, kind) for kind in (Counter, Gauge, Histogram))
        self._register_steps(config)
        self._register_validation(config.task_facts.metrics)
        self._register_times()
        self._register_checks()
        self._register_process(config, ranks)
        # The port opens last: from then on another thread reads the registry, which is complete.
        self._stop_listening = _listen(config, ranks.local_rank, self.registry)

    # One call per metric, in the order of the page: its name, its help and the events that update
    # it. StepsAgreed updates with each of its steps. What no event updates is set in `receive` or
    # by other parts of the run.

    def _register_steps(self, config: TrainConfig) -> None:
        counter, gauge, histogram = self._kinds
        counter("steps", "Optimizer steps of this process.", StepsAgreed)
        self._samples = counter("samples", "Rows that this rank has trained on.")
        self._tokens = counter("tokens", "Tokens that this rank has trained on, without padding.")
        histogram(
            "step_seconds", "Seconds of an optimizer step.", StepsAgreed, buckets=_STEP_SECONDS
        )
        self._phase_seconds = histogram(
            "phase_seconds",
            "Seconds of this rank in each phase of a step: data = waiting for rows, agree = for "
            "other ranks, step = "
            "the rest of the step besides forward, backward and optimizer (a pipeline's passes), "
            "other = between "
            "steps; outside of steps evaluate and save.",
            buckets=_PHASE_SECONDS,
            label="phase",
        )
        text = "Optimizer steps of the run, including those before a resume."
        gauge("step", text, StepsAgreed, RolledBack, RunStarted, first=0)
        gauge(
            "total_steps",
            "Optimizer steps that the run will have in all.",
            Rescheduled,
            RunStarted,
            first=0,
        )
        gauge("epoch", "Epoch of the last step, from 1.", StepsAgreed, first=0)
        gauge("loss", "Mean loss of the last global batch.", StepsAgreed)
        gauge(
            "accuracy",
            "Share of the last global batch answered correctly, with dropout.",
            StepsAgreed,
        )
        gauge("grad_norm", "Global gradient norm of the last step, before clipping.", StepsAgreed)
        gauge("learning_rate", "Learning rate of the last step.", StepsAgreed)
        gauge(
            "samples_per_second", "Rows of all ranks per second, over the last steps.", StepsAgreed
        )
        gauge(
            "tokens_per_second", "Tokens of all ranks per second, over the last steps.", StepsAgreed
        )
        text = (
            "What all ranks achieve, divided by what they would achieve if none waited for "
            "another, as measured under "
            "ddp; NaN if it is not known."
        )
        gauge("scaling_efficiency", text, RanksCompared)
        gauge(
            "gpu_utilization",
            "Share of the last second in which the GPU computed, 0 to 1.",
            StepsAgreed,
        )
        if config.is_language_model:
            text = (
                "Operations that the tokens of the last steps need, divided by what the devices "
                "could do, 0 to 1."
            )
            gauge("mfu", text, StepsAgreed)

    def _register_validation(self, metrics: Iterable[str]) -> None:
        texts = {"loss": "Loss on the validation rows after the last epoch."}
        for name in metrics:
            if name != "loss":
                title, unit = METRICS[name].title, ", 0 to 1" if METRICS[name].is_share else ""
                texts[name] = f"{title[0].upper() + title[1:]} there{unit}."
        # `name=name` keeps the name of this round. A plain closure would look it up when an event
        # comes, and find the last one for all of them.
        for name, text in texts.items():
            self._register(
                Gauge,
                f"validation_{name}",
                text,
                EpochMetrics,
                value=lambda epoch, name=name: epoch.validation[name],
            )

    def _register_times(self) -> None:
        counter, gauge, histogram = self._kinds
        text = "Unix time of the last step; before the first one, of the start."
        gauge(
            "last_step_timestamp_seconds",
            text,
            StepsAgreed,
            RunStarted,
            value=lambda _: time.time(),
        )
        text = (
            "Unix time of this process's last checkpoint; before the first one, of the run's "
            "first start that has led "
            "to no checkpoint."
        )
        self._last_checkpoint = gauge(
            "last_checkpoint_timestamp_seconds", text, SavedCheckpoint, value=lambda _: time.time()
        )
        text, buckets = "Seconds until a checkpoint was complete.", _CHECKPOINT_SECONDS
        histogram("checkpoint_seconds", text, SavedCheckpoint, value="seconds", buckets=buckets)
        text, buckets = (
            "Seconds for which a checkpoint held up training.",
            (0.01, *_CHECKPOINT_SECONDS),
        )
        histogram(
            "checkpoint_blocked_seconds",
            text,
            SavedCheckpoint,
            value="blocked_seconds",
            buckets=buckets,
        )
        counter("checkpoint_failures", "Checkpoints that could not be written.", CheckpointFailed)
        gauge(
            "checkpoint_bytes",
            "Bytes of the last checkpoint, of all ranks.",
            SavedCheckpoint,
            value="num_bytes",
        )

    def _register_checks(self) -> None:
        # Every series exists from the start, with 0: Prometheus sees no increase in the first value
        # of a series that appears later.
        counter, gauge, histogram = self._kinds
        text = "Steps that did not update the weights, including those that the loss scale skipped."
        counter("skipped_steps", text, StepsAgreed, value="skipped")
        self.bad_steps = counter(
            "bad_steps", "Steps skipped because the loss or gradient was not finite."
        )
        self.loss_spikes = counter(
            "loss_spikes", "Steps whose loss was far above that of the steps before."
        )
        text = "Comparisons of the copies that ranks hold."
        self.replica_checks = counter("replica_checks", text, label="outcome")
        for outcome in ("equal", "different"):
            self.replica_checks.labels(outcome)
        text = (
            "Seconds of this rank in a phase divided by the median of all, at the last "
            "check; NaN if none is compared."
        )
        self.slowness = gauge("slowness", text, label="phase")
        self.straggler = gauge("straggler", "1 while this rank is reported as slow.", label="phase")
        for phase in COMPARED:
            self.slowness.labels(phase).set(math.nan)
            self.straggler.labels(phase).set(0)
        text = "Steps whose collectives were recorded."
        counter("collective_steps", text, CollectivesRecorded)
        text = "Collectives of this rank in those steps."
        self._collective_calls = counter("collective_calls", text, label="operation")
        self._collective_bytes = counter(
            "collective_bytes", "Bytes that it handed to them.", label="operation"
        )
        text = (
            "Seconds of each, including the wait for other ranks; with NCCL, of each kernel on "
            "the GPU."
        )
        self._collective_seconds = histogram(
            "collective_seconds", text, buckets=_PHASE_SECONDS, label="operation"
        )

    def _register_process(self, config: TrainConfig, ranks: Ranks) -> None:
        _, gauge, _ = self._kinds
        gauge("world_size", "Ranks of the run.", first=ranks.world_size)
        gauge(
            "restarts", "How often torchrun has restarted the run's processes.", first=ranks.restart
        )
        labels = {
            "run": config.output_dir.name,
            "rank": str(ranks.rank),
            "strategy": config.strategy,
            "device": ranks.device.type,
        }
        # Prometheus has numbers only. So facts in words are the labels of a metric that is always
        # 1, with which queries can join the others.
        info = Gauge(
            "distrinews_training_run_info", "1 for this rank.", labels, registry=self.registry
        )
        info.labels(**labels).set(1)

        import torch  # here, so that readers of a run's files do not load it

        cuda, device = torch.cuda, ranks.device
        readings: dict[str, tuple[str, Callable[[], float]]] = {
            "allocated": (
                "Bytes that tensors take on the GPU; 0 on a CPU.",
                lambda: cuda.memory_allocated(device),
            ),
            "reserved": (
                "Bytes of the GPU's memory that PyTorch holds.",
                lambda: cuda.memory_reserved(device),
            ),
            "total": (
                "Bytes of memory that the GPU has.",
                lambda: cuda.get_device_properties(device).total_memory,
            ),
        }
        for name, (text, read) in readings.items():
            memory = gauge(f"device_memory_{name}_bytes", text, first=0)
            # Read when somebody asks for the page, so that steps pay nothing for it.
            if device.type == "cuda":
                memory.set_function(read)

    def receive(self, event: Event) -> None:
        match event:
            # At the start and not at the end of a step: so the time between two steps is seen too.
            case StepStarted():
                self._observe_phases()
            # A row with the number -1 is a dummy, which a rank without rows of its own computes to
            # take part in the collectives. It is nobody's sample.
            case StepDone(micro_batches=batches) if self.counts_rows:
                self._samples.inc(sum(int((batch.rows >= 0).sum()) for batch in batches))
                self._tokens.inc(sum(batch.num_tokens for batch in batches))
            case CollectivesRecorded(operations=operations):
                self._observe_collectives(operations)
            case EpochMetrics() if not event.validation:
                return
            case RanksCompared(scaling_efficiency=None):  # not measured this time
                return
            case RunStarted(epochs=epochs):
                # A resumed run shows what it last measured until it validates again. The time of
                # the start belongs to no step, so it is read here and dropped.
                self._last_checkpoint.set(_unsaved_since(self._run_dir))
                for epoch in epochs[-1:]:
                    self.receive(epoch)
                self.phases.elapsed("exporter")
        for one in event.steps if isinstance(event, StepsAgreed) else [event]:
            for update, value_of in self._updates[type(event)]:
                value = value_of(one)
                update(math.nan if value is None else value)

    def _observe_phases(self) -> None:
        """Where the time since the last step began has gone."""
        for phase, seconds in self.phases.elapsed("exporter").items():
            if seconds:
                # Between two steps the main thread is in the phase that it began in, "start".
                if phase not in self._by_phase:
                    self._by_phase[phase] = self._phase_seconds.labels(
                        "other" if phase == "start" else phase
                    )
                self._by_phase[phase].observe(seconds)

    def _observe_collectives(self, operations: Mapping[str, CollectiveUse]) -> None:
        for name, use in operations.items():
            self._collective_calls.labels(name).inc(use.calls)
            self._collective_bytes.labels(name).inc(use.num_bytes)
            seconds_of = self._collective_seconds.labels(name)
            for seconds in use.seconds:
                seconds_of.observe(seconds)

    def close(self) -> None:
        self._stop_listening()

    def _register(
        self,
        kind: type[Counter | Gauge | Histogram],
        name: str,
        text: str,
        *on: type,
        value: str | Value = "",
        first: float = math.nan,
        label: str = "",
        **more: Any,
    ) -> Any:
        """Add a metric to the page. Events of the types ``on`` update it with ``value``, a field or
        a function of the event: by default, a counter counts them, and others take the field of
        their own name. None becomes NaN. ``first``: what a gauge shows before the first of them.
        """
        metric = kind(
            f"distrinews_training_{name}",
            text,
            [label] if label else [],
            registry=self.registry,
            **more,
        )
        # Without this a gauge shows 0 until its first event, which looks like a measurement.
        if kind is Gauge and not label:
            metric.set(first)
        update = getattr(metric, {Counter: "inc", Gauge: "set", Histogram: "observe"}[kind])
        value = value or ((lambda event: 1) if kind is Counter else name)
        for event in on:
            self._updates[event].append((update, value if callable(value) else attrgetter(value)))
        return metric


def _unsaved_since(run_dir: Path) -> float:
    """Unix time of the first start after the last checkpoint, so that a run that keeps crashing does not look new."""
    since = None
    with contextlib.suppress(OSError):
        for event in read_events(run_dir):
            if event["kind"] == "checkpoint":
                since = None
            elif event["kind"] == "start" and since is None:
                since = event["time"]
    return time.time() if since is None else since


def _listen(
    config: TrainConfig, local_rank: int, registry: CollectorRegistry
) -> Callable[[], None]:
    """Serve a registry's page on a thread; returns the function that ends that."""
    if not config.metrics_port:
        return lambda: None
    # The ranks of one machine share its addresses, so each listens on a port of its own.
    port = config.metrics_port + local_rank
    try:
        server, thread = start_http_server(port, config.metrics_host, registry)
    except (OSError, UnicodeError) as error:  # the second for what cannot be a host's name
        if (
            not isinstance(error, OSError)
            or isinstance(error, socket.gaierror)
            or error.errno == errno.EADDRNOTAVAIL
        ):
            why = in_one_line(error)
            raise UserError(
                f"--metrics_host {config.metrics_host}: is no address of this machine ({why})",
                code="flag-value",
            ) from error
        raise UserError(
            f"--metrics_port {config.metrics_port}: cannot listen on port {port} "
            f"({error.strerror}); "
            "choose another, or 0 for no metrics",
            code="port-in-use",
        ) from error

    def stop() -> None:
        # The loop ends first. Then the socket is closed, or the port would stay taken for the next
        # run of this process.
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
