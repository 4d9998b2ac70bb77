"""Exporter: what one rank counts and measures, for Prometheus, on a port of its own."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, start_http_server
from prometheus_client.process_collector import ProcessCollector

from common.errors import UserError
from training.monitoring.events import read_events
from training.monitoring.observer import Observer
from training.monitoring.records import EpochMetrics, SavedCheckpoint, StepMetrics

if TYPE_CHECKING:
    import torch

    from training.config import TrainConfig
    from training.data.batching import MicroBatch
    from training.parallelism.distributed import Ranks
    from training.parallelism.strategy import StepResult
    from training.run.phases import Phases

# Half the page otherwise: when each series began.
disable_created_metrics()

_STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PHASE_SECONDS = (0.0001, 0.001, 0.0025, 0.005, *_STEP_SECONDS)
COMPARED = ("data", "forward", "backward", "compute")  # phases in which a rank may be slower than the others
_CHECKPOINT_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Exporter(Observer):
    """Metrics of one rank, in a registry of their own; with ``--metrics_port`` 0 there is no page of them.

    Counters begin at 0 with the process. Rows and tokens are this rank's own and add up over ranks; all else about
    steps is the same on each. What is not known yet is NaN.

    Raises:
        UserError: the port cannot be listened on.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, phases: Phases) -> None:
        self.registry = CollectorRegistry()
        self.leads = True  # of the ranks that hold parts of one replica, one counts its rows
        self.phases = phases
        self._run_dir = config.run_dir
        self.ideal_rate = ranks.world_size * config.one_rank_rate
        ProcessCollector(registry=self.registry)
        self._make_step_metrics()
        self._make_checkpoint_metrics()
        self._make_watched_metrics()
        self._describe(config, ranks)
        self._watch_memory(ranks.device)
        self._stop_listening = _listen(config.metrics_port, ranks.local_rank, self.registry)

    def _make_step_metrics(self) -> None:
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self._steps = counter("steps", "Optimizer steps of this process.")
        self._samples = counter("samples", "Rows that this rank has trained on.")
        self._tokens = counter("tokens", "Tokens that this rank has trained on, without padding.")
        self._step_seconds = histogram("step_seconds", "Seconds of an optimizer step.", _STEP_SECONDS)
        self._phase_seconds = histogram(
            "phase_seconds",
            "Seconds of this rank in each phase of a step: data = waiting for rows, agree = for other ranks, step = "
            "what forward, backward and optimizer leave of it (a pipeline's passes), other = between steps; beside "
            "steps evaluate and save.",
            _PHASE_SECONDS,
            "phase",
        )
        self._by_phase: dict[str, Histogram] = {}  # to look one up by its label takes as long as to observe
        self._step = gauge("step", "Optimizer steps of the run, those before a resume included.", 0)
        self._total_steps = gauge("total_steps", "Optimizer steps that the run is to have.", 0)
        self._epoch = gauge("epoch", "Epoch of the last step, from 1.", 0)
        self._loss = gauge("loss", "Mean loss of the last global batch.")
        self._grad_norm = gauge("grad_norm", "Global gradient norm of the last step, before clipping.")
        self._learning_rate = gauge("learning_rate", "Learning rate of the last step.")
        self._samples_rate = gauge("samples_per_second", "Rows of all ranks a second, over the last steps.")
        self._tokens_rate = gauge("tokens_per_second", "Tokens of all ranks a second, over the last steps.")
        self._efficiency = gauge(
            "scaling_efficiency", "Rows a second over what as many ranks would make at --one_rank_rate; else NaN."
        )
        self._validation_loss = gauge("validation_loss", "Loss on the validation rows after the last epoch.")
        self._validation_accuracy = gauge("validation_accuracy", "Accuracy there, 0 to 1.")
        self._last_step = gauge("last_step_timestamp_seconds", "Unix time of the last step, first of the start.")

    def _make_checkpoint_metrics(self) -> None:
        histogram, buckets = self._histogram, _CHECKPOINT_SECONDS
        self._last_checkpoint = self._gauge(
            "last_checkpoint_timestamp_seconds",
            "Unix time of this process's last checkpoint; before it, of the run's first start that has led to none.",
        )
        self._checkpoint_seconds = histogram("checkpoint_seconds", "Seconds until a checkpoint stood.", buckets)
        self._checkpoint_blocked = histogram(
            "checkpoint_blocked_seconds", "Seconds for which a checkpoint held up training.", (0.01, *buckets)
        )
        self._checkpoint_failures = self._counter("checkpoint_failures", "Checkpoints that could not be written.")
        self._checkpoint_bytes = self._gauge("checkpoint_bytes", "Bytes of the last checkpoint, of all ranks.")

    def _make_watched_metrics(self) -> None:
        """What others find and count here; all begin at 0: the first of a series that was not there is no increase."""
        counter = self._counter
        self._skipped = counter("skipped_steps", "Steps that left the weights alone, the loss scale's included.")
        self.bad_steps = counter("bad_steps", "Steps skipped for a loss or gradient that is not finite.")
        self.loss_spikes = counter("loss_spikes", "Steps whose loss was far above those before.")
        self.replica_checks = counter("replica_checks", "Comparisons of what ranks hold copies of.", "outcome")
        for outcome in ("equal", "different"):
            self.replica_checks.labels(outcome)
        text = "Seconds of this rank in a phase over the median of all, at the last look; NaN where none is compared."
        self.slowness = self._gauge("slowness", text, math.nan, "phase")
        self.straggler = self._gauge("straggler", "1 while this rank is said to be slow.", 0, "phase")
        for phase in COMPARED:
            self.slowness.labels(phase).set(math.nan)
            self.straggler.labels(phase).set(0)
        self.collective_steps = counter("collective_steps", "Steps whose collectives were looked at, one in so many.")
        self._collective_calls = counter("collective_calls", "Collectives of this rank in those steps.", "operation")
        self._collective_bytes = counter("collective_bytes", "Bytes that it handed to them.", "operation")
        self._collective_seconds = self._histogram(
            "collective_seconds",
            "Seconds of each, the wait for other ranks included. Gloo's alone: NCCL's run on the GPU (see --profile).",
            _PHASE_SECONDS,
            "operation",
        )

    def run_starts(self, step: int, total_steps: int, epochs: Sequence[EpochMetrics]) -> None:
        """Show what earlier processes have done."""
        self._step.set(step)
        self._total_steps.set(total_steps)
        self._last_step.set_to_current_time()
        self._last_checkpoint.set(_unsaved_since(self._run_dir))
        for epoch in epochs[-1:]:
            self.epoch_ends(epoch)
        self.phases.take("exporter")

    def step_begins(self, step: int) -> None:
        """Measure where the time since the last step began has gone."""
        for phase, seconds in self.phases.take("exporter").items():
            if seconds:
                if phase not in self._by_phase:
                    self._by_phase[phase] = self._phase_seconds.labels("other" if phase == "start" else phase)
                self._by_phase[phase].observe(seconds)

    def step_ends(self, step: int, micro_batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Count this rank's share of a global batch."""
        if not self.leads:
            return
        self._samples.inc(sum(int((batch.rows >= 0).sum()) for batch in micro_batches))
        self._tokens.inc(sum(batch.num_tokens for batch in micro_batches))

    def rolled_back(self, step: int) -> None:
        """Show where the run stands again."""
        self._step.set(step)

    def steps_agreed(self, steps: Sequence[StepMetrics]) -> None:
        """Count steps, and show the last one."""
        for metrics in steps:
            self._steps.inc()
            self._skipped.inc(metrics.skipped)
            self._step_seconds.observe(metrics.step_seconds)
        for metrics in steps[-1:]:
            self._step.set(metrics.step)
            self._epoch.set(metrics.epoch)
            self._loss.set(metrics.loss)
            self._grad_norm.set(metrics.grad_norm)
            self._learning_rate.set(metrics.learning_rate)
            self._samples_rate.set(metrics.samples_per_second)
            self._tokens_rate.set(metrics.tokens_per_second)
            if self.ideal_rate:
                self._efficiency.set(metrics.samples_per_second / self.ideal_rate)
            self._last_step.set_to_current_time()

    def epoch_ends(self, epoch: EpochMetrics) -> None:
        """Show an epoch's validation."""
        self._validation_loss.set(epoch.validation["loss"])
        self._validation_accuracy.set(epoch.validation["accuracy"])

    def checkpoint_failed(self, step: int) -> None:
        """Count a checkpoint that is not there."""
        self._checkpoint_failures.inc()

    def checkpoint_saved(self, saved: SavedCheckpoint) -> None:
        """Count a checkpoint."""
        self._checkpoint_seconds.observe(saved.seconds)
        self._checkpoint_blocked.observe(saved.blocked_seconds)
        self._checkpoint_bytes.set(saved.num_bytes)
        self._last_checkpoint.set_to_current_time()

    def collective(self, operation: str, num_bytes: int, seconds: float | None) -> None:
        """Count a collective of a step that is looked at; without seconds if they are not known."""
        self._collective_calls.labels(operation).inc()
        self._collective_bytes.labels(operation).inc(num_bytes)
        if seconds is not None:
            self._collective_seconds.labels(operation).observe(seconds)

    def close(self) -> None:
        """Let go of the port."""
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

    def _describe(self, config: TrainConfig, ranks: Ranks) -> None:
        self._gauge("world_size", "Ranks of the run.", ranks.world_size)
        self._gauge("restarts", "How often torchrun has started the run's processes again.", ranks.restart)
        labels = {
            "run": config.output_dir.name,
            "rank": str(ranks.rank),
            "strategy": config.strategy,
            "device": ranks.device.type,
        }
        info = Gauge("distrinews_training_run_info", "1 for this rank.", labels, registry=self.registry)
        info.labels(**labels).set(1)

    def _watch_memory(self, device: torch.device) -> None:
        import torch  # here, so that reading a run's files does not load it

        is_gpu = device.type == "cuda"
        readings: dict[str, tuple[str, Callable[[], float]]] = {
            "allocated": (
                "Bytes that tensors take on the GPU; 0 on a CPU.",
                lambda: torch.cuda.memory_allocated(device),
            ),
            "reserved": ("Bytes that PyTorch holds of the GPU.", lambda: torch.cuda.memory_reserved(device)),
            "total": ("Bytes that the GPU has.", lambda: torch.cuda.get_device_properties(device).total_memory),
        }
        for name, (text, read) in readings.items():
            gauge = self._gauge(f"device_memory_{name}_bytes", text, 0)
            if is_gpu:
                gauge.set_function(read)


def _unsaved_since(run_dir: Path) -> float:
    """Unix time of the first start after the last checkpoint: a run that crashes before each one does not look new."""
    since = None
    with contextlib.suppress(OSError):
        for event in read_events(run_dir):
            if event["kind"] == "checkpoint":
                since = None
            elif event["kind"] == "start" and since is None:
                since = event["time"]
    return time.time() if since is None else since


def _listen(first_port: int, local_rank: int, registry: CollectorRegistry) -> Callable[[], None]:
    """Serve a registry's page on a thread; returns what ends that."""
    if not first_port:
        return lambda: None
    port = first_port + local_rank
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise UserError(
            f"--metrics_port {first_port}: cannot listen on port {port} ({error.strerror}); "
            "choose another, or 0 for no metrics",
            code="port-in-use",
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
