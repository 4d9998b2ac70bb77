"""RunContext: what the parts of a run can use, so that none of them needs the Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig

from common.escaping import some_of
from common.text import in_one_line
from training.checkpointing import Storage
from training.config import TrainConfig
from training.data.balance import Balance
from training.data.batching import LengthBucketSampler
from training.data.prepare import PreparedData
from training.distributed.ranks import Ranks
from training.fault_tolerance.interruption import Interruption
from training.monitoring.monitors import Monitors
from training.monitoring.phases import Phases
from training.parallelism.strategy import Strategy
from training.run.budget import Budget
from training.run.head_start import Start
from training.run.state import RunState
from training.run.suspects import Suspects


def stop_agreed(ranks: Ranks, phases: Phases, interruption: Interruption) -> bool:
    """:meth:`RunContext.stop_agreed`, for who needs it before there is a context."""
    phases.heartbeat()
    return ranks.any(interruption.asked)


@dataclass
class StepPlan:
    """How many steps of which size a run has, the same on all ranks. Only ``total_steps`` changes,
    with a time budget.

    ``global_batch_size``: rows per optimizer step over all ranks; ``accumulation``: micro-batches
    per rank and step; ``tokens_per_step``: of a global batch on average, without padding;
    ``class_weights``: what a row of each label weighs in the loss, (labels,), None if all weigh the
    same; ``sources``: hashes of what checkpoints leave out and a resumed run must find unchanged,
    by their names in the checkpoint: the data, the weights that are not trained (None if
    checkpoints hold all), the teacher's answers (None without a teacher);
    ``ideal_seconds``: that the devices would need for a token of a language model at their peak,
    otherwise None; ``start``: the fitted head that the run began with, None if it began with a
    random one.
    """

    global_batch_size: int
    accumulation: int
    tokens_per_step: float
    steps_per_epoch: int
    total_steps: int
    peak_learning_rate: float
    class_weights: np.ndarray | None
    sources: Mapping[str, str | None]
    ideal_seconds: float | None
    start: Start | None

    def notes(self, label_names: Sequence[str]) -> Iterator[str]:
        """What the report says about the plan."""
        if (weights := self.class_weights) is not None:
            each = some_of(
                [f"{name} {weight:.3g}" for name, weight in zip(label_names, weights, strict=True)]
            )
            yield f"Weight of a training row by its label: {each}. The training loss is weighted, others are not."
        if self.start and self.start.by_folds:
            yield f"The head was fitted before the first step: {self.start.by_folds}."


@dataclass(frozen=True)
class RunContext(Monitors):
    """One rank's view of a run, created before the first step, when everything is known to fit
    together.

    The objects in it may change, as ``state`` does in every step; which objects it holds does not.
    """

    config: TrainConfig
    data: PreparedData
    strategy: Strategy
    plan: StepPlan
    sampler: LengthBucketSampler  # of the global batches of an epoch
    precision: str  # of the training steps
    model_config: PreTrainedConfig
    num_parameters: int
    num_trained: int  # of them
    state: RunState
    storage: Storage
    interruption: Interruption
    balance: Balance
    budget: Budget | None  # of --budget
    suspects: Suspects | None  # of --suspects

    @property
    def samples_done(self) -> int:
        """Rows trained on so far, those of a batch counted as often as it was seen."""
        epochs_done, steps = divmod(self.state.step, self.plan.steps_per_epoch)
        return epochs_done * len(self.data.epoch_index) + steps * self.plan.global_batch_size

    def validates_at(self, step: int) -> bool:
        """Whether the run validates after this step; step 0 tells what the fitted head is worth without training."""
        every, plan, has_budget = self.config.evaluate_every, self.plan, bool(self.config.budget)
        if step == 0:
            return plan.start is not None and not has_budget
        ends_epoch = step % plan.steps_per_epoch == 0 and not has_budget
        return step == plan.total_steps or ends_epoch or (every > 0 and step % every == 0)

    def steps_left(self) -> int:
        """How many more steps this rank's clock allows."""
        assert self.budget
        return self.budget.steps_left(self.plan.tokens_per_step)

    def end_in(self, steps: int) -> bool:
        """Let the run end after so many more steps, if its epochs have as many; returns whether
        that is a change.

        Called with the same number on all ranks, whose learning rates follow from it.
        """
        before, plan = self.plan.total_steps, self.plan
        most = self.config.epochs * plan.steps_per_epoch
        # The schedule never ends before a step that was already taken, and has at least one.
        plan.total_steps = max(1, self.state.step, min(self.state.step + steps, most))
        return plan.total_steps != before

    def stop_agreed(self) -> bool:
        """Whether any rank was asked to stop; a collective call, for long phases such as an evaluation."""
        return stop_agreed(self.ranks, self.phases, self.interruption)

    def describe_row(self, row: int) -> str:
        """How a training row begins, if this rank has its text; otherwise nothing."""
        texts = self.data.texts
        return f'; row {row} reads "{in_one_line(texts.train.texts[row])[:80]}"' if texts else ""
