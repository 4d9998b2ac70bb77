"""Exporter: what one rank counts and measures, for Prometheus, on a port of its own."""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, start_http_server
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
from training.monitoring.records import METRICS, EpochMetrics, SavedCheckpoint

if TYPE_CHECKING:
    import torch

    from training.config import TrainConfig
    from training.parallelism.distributed import Ranks
    from training.run.phases import Phases

# Without this, half the page says when each series began.
disable_created_metrics()

_STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PHASE_SECONDS = (0.0001, 0.001, 0.0025, 0.005, *_STEP_SECONDS)
_CHECKPOINT_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
COMPARED = ("data", "forward", "backward", "compute")  # phases in which a rank may be slower than the others


class Exporter(Subscriber):
    """Metrics of one rank, in a registry of their own; ``--metrics_port`` 0 serves no page of them.

    Counters begin at 0 with the process. Rows and tokens are this rank's own and add up over ranks; everything else
    about steps is the same on each. Unknown values are NaN.

    Raises:
        UserError: the port cannot be listened on.
    """

    follows_steps = True

    def __init__(self, config: TrainConfig, ranks: Ranks, phases: Phases) -> None:
        self.registry = CollectorRegistry()
        self.counts_rows = True  # of the ranks that hold parts of one replica, only one counts its rows
        self.phases = phases
        self._run_dir = config.run_dir
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        ProcessCollector(registry=self.registry)

        # Steps.
        self._steps = counter("steps", "Optimizer steps of this process.")
        self._samples = counter("samples", "Rows that this rank has trained on.")
        self._tokens = counter("tokens", "Tokens that this rank has trained on, without padding.")
        self._step_seconds = histogram("step_seconds", "Seconds of an optimizer step.", _STEP_SECONDS)
        self._phase_seconds = histogram(
            "phase_seconds",
            "Seconds of this rank in each phase of a step: data = waiting for rows, agree = for other ranks, step = "
            "the rest of the step besides forward, backward and optimizer (a pipeline's passes), other = between "
            "steps; outside of steps evaluate and save.",
            _PHASE_SECONDS,
            "phase",
        )
        self._by_phase: dict[str, Histogram] = {}  # finding one by its label takes as long as observing
        self._step = gauge("step", "Optimizer steps of the run, including those before a resume.", 0)
        self._total_steps = gauge("total_steps", "Optimizer steps that the run will have in all.", 0)
        self._epoch = gauge("epoch", "Epoch of the last step, from 1.", 0)
        self._loss = gauge("loss", "Mean loss of the last global batch.")
        self._accuracy = gauge("accuracy", "Share of the last global batch answered correctly, with dropout.")
        self._grad_norm = gauge("grad_norm", "Global gradient norm of the last step, before clipping.")
        self._learning_rate = gauge("learning_rate", "Learning rate of the last step.")
        self._samples_rate = gauge("samples_per_second", "Rows of all ranks per second, over the last steps.")
        self._tokens_rate = gauge("tokens_per_second", "Tokens of all ranks per second, over the last steps.")
        self._efficiency = gauge(
            "scaling_efficiency",
            "What all ranks achieve, divided by what they would achieve if none waited for another, as measured under "
            "ddp; NaN if it is not known.",
        )
        self._utilization = gauge("gpu_utilization", "Share of the last second in which the GPU computed, 0 to 1.")
        self._mfu = None
        if config.is_language_model:
            text = "Operations that the tokens of the last steps need, divided by what the devices could do, 0 to 1."
            self._mfu = gauge("mfu", text)
        self._validation = {"loss": gauge("validation_loss", "Loss on the validation rows after the last epoch.")}
        for name in config.task_facts.metrics:
            if name != "loss":
                title = METRICS[name].title
                title, unit = title[0].upper() + title[1:], ", 0 to 1" if METRICS[name].is_share else ""
                self._validation[name] = gauge(f"validation_{name}", f"{title} there{unit}.")
        self._last_step = gauge(
            "last_step_timestamp_seconds", "Unix time of the last step; before the first one, of the start."
        )

        # Checkpoints.
        self._last_checkpoint = gauge(
            "last_checkpoint_timestamp_seconds",
            "Unix time of this process's last checkpoint; before the first one, of the run's first start that has led "
            "to no checkpoint.",
        )
        self._checkpoint_seconds = histogram(
            "checkpoint_seconds", "Seconds until a checkpoint was complete.", _CHECKPOINT_SECONDS
        )
        text = "Seconds for which a checkpoint held up training."
        self._checkpoint_blocked = histogram("checkpoint_blocked_seconds", text, (0.01, *_CHECKPOINT_SECONDS))
        self._checkpoint_failures = counter("checkpoint_failures", "Checkpoints that could not be written.")
        self._checkpoint_bytes = gauge("checkpoint_bytes", "Bytes of the last checkpoint, of all ranks.")

        # What other parts of the run count here. Every series exists from the start, with 0: Prometheus sees no
        # increase in the first value of a series that appears later.
        self._skipped = counter(
            "skipped_steps", "Steps that did not update the weights, including those that the loss scale skipped."
        )
        self.bad_steps = counter("bad_steps", "Steps skipped because the loss or gradient was not finite.")
        self.loss_spikes = counter("loss_spikes", "Steps whose loss was far above that of the steps before.")
        self.replica_checks = counter("replica_checks", "Comparisons of the copies that ranks hold.", "outcome")
        for outcome in ("equal", "different"):
            self.replica_checks.labels(outcome)
        text = (
            "Seconds of this rank in a phase divided by the median of all, at the last check; NaN if none is compared."
        )
        self.slowness = gauge("slowness", text, math.nan, "phase")
        self.straggler = gauge("straggler", "1 while this rank is reported as slow.", 0, "phase")
        for phase in COMPARED:
            self.slowness.labels(phase).set(math.nan)
            self.straggler.labels(phase).set(0)
        self._collective_steps = counter("collective_steps", "Steps whose collectives were recorded.")
        self._collective_calls = counter("collective_calls", "Collectives of this rank in those steps.", "operation")
        self._collective_bytes = counter("collective_bytes", "Bytes that it handed to them.", "operation")
        self._collective_seconds = histogram(
            "collective_seconds",
            "Seconds of each, including the wait for other ranks; with NCCL, of each kernel on the GPU.",
            _PHASE_SECONDS,
            "operation",
        )

        # The process.
        gauge("world_size", "Ranks of the run.", ranks.world_size)
        gauge("restarts", "How often torchrun has restarted the run's processes.", ranks.restart)
        labels = {
            "run": config.output_dir.name,
            "rank": str(ranks.rank),
            "strategy": config.strategy,
            "device": ranks.device.type,
        }
        info = Gauge("distrinews_training_run_info", "1 for this rank.", labels, registry=self.registry)
        info.labels(**labels).set(1)
        self._watch_memory(ranks.device)
        self._stop_listening = _listen(config, ranks.local_rank, self.registry)

    def receive(self, event: Event) -> None:
        match event:
            case StepStarted():
                self._observe_phases()
            case StepDone():
                if self.counts_rows:
                    self._samples.inc(sum(int((batch.rows >= 0).sum()) for batch in event.micro_batches))
                    self._tokens.inc(sum(batch.num_tokens for batch in event.micro_batches))
            case StepsAgreed(steps):
                for metrics in steps:
                    self._steps.inc()
                    self._skipped.inc(metrics.skipped)
                    self._step_seconds.observe(metrics.step_seconds)
                if steps:
                    last = steps[-1]
                    self._step.set(last.step)
                    self._epoch.set(last.epoch)
                    self._loss.set(last.loss)
                    self._accuracy.set(math.nan if last.accuracy is None else last.accuracy)
                    self._grad_norm.set(last.grad_norm)
                    self._learning_rate.set(last.learning_rate)
                    self._samples_rate.set(last.samples_per_second)
                    self._tokens_rate.set(last.tokens_per_second)
                    self._utilization.set(math.nan if last.gpu_utilization is None else last.gpu_utilization)
                    if self._mfu and last.mfu is not None:
                        self._mfu.set(last.mfu)
                    self._last_step.set_to_current_time()
            case EpochMetrics() if event.validation:
                for name, gauge in self._validation.items():
                    gauge.set(event.validation[name])
            case CollectivesRecorded(operations=operations):
                self._collective_steps.inc()
                for name, use in operations.items():
                    self._collective_calls.labels(name).inc(use.calls)
                    self._collective_bytes.labels(name).inc(use.num_bytes)
                    seconds_of = self._collective_seconds.labels(name)
                    for seconds in use.seconds:
                        seconds_of.observe(seconds)
            case RanksCompared(scaling_efficiency=efficiency):
                if efficiency is not None:
                    self._efficiency.set(efficiency)
            case SavedCheckpoint():
                self._checkpoint_seconds.observe(event.seconds)
                self._checkpoint_blocked.observe(event.blocked_seconds)
                self._checkpoint_bytes.set(event.num_bytes)
                self._last_checkpoint.set_to_current_time()
            case CheckpointFailed():
                self._checkpoint_failures.inc()
            case RolledBack(step):
                self._step.set(step)
            case Rescheduled(total_steps):
                self._total_steps.set(total_steps)
            case RunStarted(step, total_steps, epochs):
                self._step.set(step)
                self._total_steps.set(total_steps)
                self._last_step.set_to_current_time()
                self._last_checkpoint.set(_unsaved_since(self._run_dir))
                for epoch in epochs[-1:]:
                    self.receive(epoch)
                self.phases.elapsed("exporter")

    def _observe_phases(self) -> None:
        """Where the time since the last step began has gone."""
        for phase, seconds in self.phases.elapsed("exporter").items():
            if seconds:
                if phase not in self._by_phase:
                    self._by_phase[phase] = self._phase_seconds.labels("other" if phase == "start" else phase)
                self._by_phase[phase].observe(seconds)

    def close(self) -> None:
        self._stop_listening()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"distrinews_training_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, first: float = math.nan, *labels: str) -> Gauge:
        gauge = Gauge(f"distrinews_training_{name}", text, labels, registry=self.registry)
        if not labels:
            gauge.set(first)
        return gauge

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"distrinews_training_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _watch_memory(self, device: torch.device) -> None:
        import torch  # here, so that readers of a run's files do not load it

        cuda = torch.cuda
        readings: dict[str, tuple[str, Callable[[], float]]] = {
            "allocated": ("Bytes that tensors take on the GPU; 0 on a CPU.", lambda: cuda.memory_allocated(device)),
            "reserved": ("Bytes of the GPU's memory that PyTorch holds.", lambda: cuda.memory_reserved(device)),
            "total": ("Bytes of memory that the GPU has.", lambda: cuda.get_device_properties(device).total_memory),
        }
        for name, (text, read) in readings.items():
            gauge = self._gauge(f"device_memory_{name}_bytes", text, 0)
            if device.type == "cuda":
                gauge.set_function(read)


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


def _listen(config: TrainConfig, local_rank: int, registry: CollectorRegistry) -> Callable[[], None]:
    """Serve a registry's page on a thread; returns the function that ends that."""
    if not config.metrics_port:
        return lambda: None
    port = config.metrics_port + local_rank
    try:
        server, thread = start_http_server(port, config.metrics_host, registry)
    except (OSError, UnicodeError) as error:  # the second for what cannot be a host's name
        if not isinstance(error, OSError) or isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            why = in_one_line(error)
            raise UserError(
                f"--metrics_host {config.metrics_host}: is no address of this machine ({why})", code="flag-value"
            ) from error
        raise UserError(
            f"--metrics_port {config.metrics_port}: cannot listen on port {port} ({error.strerror}); "
            "choose another, or 0 for no metrics",
            code="port-in-use",
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
