"""What a task and a strategy is, as plain facts that flags, classes and planner share; no PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.problem_types import MULTI_LABEL, PLAIN_TEXT, REGRESSION, SINGLE_LABEL, ProblemType

TINY = "tiny"
# What AdamW adds to the square root of the averaged squares before it divides by the sum.
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a task is.

    Attributes:
        problem_type: what its models answer.
        metrics: that can choose the best epoch; the first is the default.
        kind: what a model card calls its models.
        pipeline: of transformers, that runs them.
        pair_column: the second text of its rows by default, if it reads pairs.
        is_language_model: its rows are blocks of plain text.
        needs_decoder: its model reads from left to right.
        needs_teacher: its targets are a teacher's answers alone.
    """

    problem_type: ProblemType
    metrics: tuple[str, ...]
    kind: str
    pipeline: str = "text-classification"
    pair_column: str = ""
    is_language_model: bool = False
    needs_decoder: bool = False
    needs_teacher: bool = False

    @property
    def has_labels(self) -> bool:
        """Whether its rows have labels, and its models can be served."""
        return self.problem_type is not PLAIN_TEXT

    @property
    def has_one_label(self) -> bool:
        return self.problem_type is SINGLE_LABEL


# Plain data in a module without PyTorch, which takes seconds to import: flags are checked, and
# --help is printed, before anything of it is loaded.
_OF_LABELS = ("accuracy", "macro_f1", "loss")
_OF_TOKENS = ("perplexity", "token_accuracy", "loss")
TASK_FACTS = {
    "classification": TaskFacts(SINGLE_LABEL, _OF_LABELS, "A text classifier"),
    "pair": TaskFacts(
        SINGLE_LABEL, _OF_LABELS, "A classifier of pairs of texts", pair_column="text_pair"
    ),
    "multi_label": TaskFacts(
        MULTI_LABEL,
        ("micro_f1", "macro_f1", "exact_match", "loss"),
        "A classifier that gives a text every label that applies",
    ),
    "regression": TaskFacts(
        REGRESSION,
        ("rmse", "mae", "r2", "spearman", "loss"),
        "A model that gives a text a number",
    ),
    "embedding": TaskFacts(
        PLAIN_TEXT,
        ("cosine", "loss"),
        "An encoder of texts",
        pipeline="feature-extraction",
        needs_teacher=True,
    ),
    "masked_lm": TaskFacts(
        PLAIN_TEXT,
        _OF_TOKENS,
        "A masked language model",
        pipeline="fill-mask",
        is_language_model=True,
    ),
    "causal_lm": TaskFacts(
        PLAIN_TEXT,
        _OF_TOKENS,
        "A causal language model",
        pipeline="text-generation",
        is_language_model=True,
        needs_decoder=True,
    ),
}
DEFAULT_TASK = "classification"


@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """How a strategy distributes the model: ``copies`` it whole to every rank; ``shards`` its state
    over data ranks; splits matrices over ``tensor`` ranks or blocks over the stages of a
    ``pipeline``.
    """

    copies: bool = False
    shards: bool = False
    tensor: bool = False
    pipeline: bool = False
    is_deepspeed: bool = False


STRATEGY_FACTS = {
    "ddp": StrategyFacts(copies=True),
    "zero1": StrategyFacts(copies=True),
    "zero2": StrategyFacts(shards=True),
    "zero3": StrategyFacts(shards=True),
    "deepspeed": StrategyFacts(is_deepspeed=True),
    "tp": StrategyFacts(tensor=True),
    "pp": StrategyFacts(pipeline=True),
    "3d": StrategyFacts(shards=True, tensor=True, pipeline=True),
}


def _tasks(are_meant: Callable[[TaskFacts], bool]) -> tuple[str, ...]:
    return tuple(name for name, facts in TASK_FACTS.items() if are_meant(facts))


def _strategies(are_meant: Callable[[StrategyFacts], bool]) -> tuple[str, ...]:
    return tuple(name for name, facts in STRATEGY_FACTS.items() if are_meant(facts))


# What a model that reads from left to right is trained for without labels.
DECODER_TASK, *_ = _tasks(lambda task: task.needs_decoder)
_ONE_LABEL = _tasks(lambda task: task.has_one_label)
_LABELLED = _tasks(lambda task: task.has_labels)
_TEXTS = _tasks(lambda task: not task.is_language_model)  # one by one, not in blocks
_OURS = _strategies(lambda strategy: not strategy.is_deepspeed)
# Each rank runs the whole model, however its state is kept.
WHOLE_MODEL = _strategies(lambda s: (s.copies or s.shards) and not (s.tensor or s.pipeline))
_COPIES = _strategies(lambda strategy: strategy.copies)
_TENSOR = _strategies(lambda strategy: strategy.tensor)
_PIPELINE = _strategies(lambda strategy: strategy.pipeline)

# The tasks and the strategies that each of these flags is for. With any other it is refused instead
# of ignored.
FLAGS_OF_TASKS = {
    **dict.fromkeys(
        ("class_weights", "sampling", "label_smoothing", "suspects", "unlabelled"), _ONE_LABEL
    ),
    **dict.fromkeys(("labels", "from_model"), ("classification",)),
    **dict.fromkeys(("rough_share", "distill"), _TEXTS),
    **dict.fromkeys(
        ("distill_share", "distill_texts", "export", "label_column", "duplicates"), _LABELLED
    ),
    **dict.fromkeys(("network", "loss", "metric"), _LABELLED),
    "pair_column": ("pair", "multi_label", "regression"),
    "long": ("classification", "multi_label", "regression"),
}
FLAGS_OF_STRATEGIES = {
    "dp_shard": _strategies(lambda strategy: strategy.shards),
    **dict.fromkeys(("tp", "sequence_parallel"), _TENSOR),
    **dict.fromkeys(("pp", "pp_schedule"), _PIPELINE),
    **dict.fromkeys(("compress", "balance"), _COPIES),
    "cpu_offload": ("zero2", "zero3", "deepspeed"),
    **dict.fromkeys(("check_gradient_sync", "freeze", "ema"), _OURS),
    **dict.fromkeys(("deepspeed_stage", "deepspeed_config"), ("deepspeed",)),
    "long": WHOLE_MODEL,
}
