"""Facts about tasks, strategies and built-in models, without PyTorch: flags are checked at once."""

from __future__ import annotations

TINY = "tiny"
EPSILON = 1e-8  # what AdamW adds to the square root of the averaged squares before it divides by the sum

# The strategies that each of these flags is for; with any other it is refused instead of ignored.
FLAGS_OF_STRATEGIES = {
    "dp_shard": ("zero2", "zero3", "3d"),
    "tp": ("tp", "3d"),
    "pp": ("pp", "3d"),
    "pp_schedule": ("pp", "3d"),
    "sequence_parallel": ("tp", "3d"),
    "compress": ("ddp", "zero1"),
    "cpu_offload": ("zero2", "zero3", "deepspeed"),
    "balance": ("ddp", "zero1"),
    "check_gradient_sync": ("ddp", "zero1", "zero2", "zero3", "tp", "pp", "3d"),
    "deepspeed_stage": ("deepspeed",),
    "deepspeed_config": ("deepspeed",),
    "freeze": ("ddp", "zero1", "zero2", "zero3", "tp", "pp", "3d"),
    "ema": ("ddp", "zero1", "zero2", "zero3", "tp", "pp", "3d"),
    "long": ("ddp", "zero1", "zero2", "zero3"),
}


# The metrics that can choose the best epoch of a task; the first is the default.
METRICS_OF_TASKS = {
    "classification": ("accuracy", "macro_f1", "loss"),
    "pair": ("accuracy", "macro_f1", "loss"),
    "multi_label": ("micro_f1", "macro_f1", "exact_match", "loss"),
    "regression": ("rmse", "mae", "r2", "spearman", "loss"),
    "embedding": ("cosine", "loss"),
    "masked_lm": ("perplexity", "token_accuracy", "loss"),
    "causal_lm": ("perplexity", "token_accuracy", "loss"),
}
LANGUAGE_MODELS = ("masked_lm", "causal_lm")
UNLABELLED = ("embedding", *LANGUAGE_MODELS)
LABELLED = tuple(task for task in METRICS_OF_TASKS if task not in UNLABELLED)

TASKS_WITH_ONE_LABEL = ("classification", "pair")

# The tasks that each of these flags is for.
FLAGS_OF_TASKS = {
    "class_weights": TASKS_WITH_ONE_LABEL,
    "sampling": TASKS_WITH_ONE_LABEL,
    "label_smoothing": TASKS_WITH_ONE_LABEL,
    "suspects": TASKS_WITH_ONE_LABEL,
    "labels": ("classification",),
    "from_model": ("classification",),
    "unlabelled": TASKS_WITH_ONE_LABEL,
    "rough_share": (*LABELLED, "embedding"),
    "distill": (*LABELLED, "embedding"),
    "distill_share": LABELLED,
    "distill_texts": LABELLED,
    "export": LABELLED,
    "pair_column": ("pair", "multi_label", "regression"),
    "label_column": LABELLED,
    "duplicates": LABELLED,
    "network": LABELLED,
    "loss": LABELLED,
    "metric": LABELLED,
    "long": ("classification", "multi_label", "regression"),
}
