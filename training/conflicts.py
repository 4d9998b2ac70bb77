"""Flags that do not go together: when, and what is then said. :meth:`TrainConfig._check_across` walks the table."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

from training.facts import TINY, WHOLE_MODEL


class Conflict(NamedTuple):
    """``when`` takes the configuration. In ``message``, {lora} stands for that flag with its value."""

    when: Callable[[Any], object]
    message: str


# What asks for a head that logistic regression fits, and where none can be fitted. Each of the
# first with each of the second is a conflict; the names are those of the fields.
_ASKS_FOR_HEAD: dict[str, Callable[[Any], object]] = {
    "unlabelled": lambda c: c.unlabelled,
    "from_model": lambda c: c.from_model,
    "method": lambda c: c.method != "auto",
}
_HAS_NO_HEAD: dict[str, Callable[[Any], object]] = {
    "task": lambda c: not c.task_facts.has_labels,
    "model": lambda c: c.model == TINY,
    "network": lambda c: c.network,
    "lora": lambda c: c.lora,
    "budget": lambda c: c.budget,
    "loss": lambda c: c.loss,
    "long": lambda c: c.long != "cut",
}

# The first that applies is reported.
CONFLICTS = (
    Conflict(
        lambda c: c.precision == "fp16" and c.device == "cpu",
        "{precision} and {device}: fp16 trains on GPUs only; use fp32 or bf16",
    ),
    # Two splits that are both unset are equal as well, and no conflict: hence the last comparison.
    # The lambdas of a loop keep their names as defaults, or all of them would see the last ones.
    *(
        Conflict(
            lambda c, one=one, other=other: getattr(c, one) == getattr(c, other) != "",
            f"{{{one}}} and {{{other}}}: must be two different splits",
        )
        for one, other in combinations(("train_split", "validation_split", "test_split"), 2)
    ),
    Conflict(
        lambda c: c.task_facts.needs_teacher and not c.distill,
        "{task}: give the encoder whose vectors are to be learned, with --distill FOLDER",
    ),
    Conflict(
        lambda c: c.tf32 and c.device == "cpu",
        "{tf32} and {device}: only GPUs have TF32; leave it out",
    ),
    Conflict(
        lambda c: c.loss and c.label_smoothing,
        "{loss} and {label_smoothing}: your own loss does not apply it; drop one",
    ),
    Conflict(
        lambda c: c.class_weights != "none" and c.sampling == "balanced",
        "{class_weights} and {sampling}: rare labels would count twice; drop one",
    ),
    Conflict(
        lambda c: c.lora_alpha is not None and not c.lora,
        "{lora_alpha}: does nothing without --lora",
    ),
    Conflict(
        lambda c: c.is_changed("metrics_host") and not c.metrics_port,
        "{metrics_host}: does nothing without --metrics_port",
    ),
    Conflict(
        lambda c: c.lora and c.strategy in ("tp", "deepspeed"),
        "{lora} and {strategy}: adapters train under ddp, zero1, zero2, zero3 and pp",
    ),
    Conflict(
        lambda c: c.lora and c.tp > 1,
        "{lora} and {tp}: adapters train under ddp, zero1, zero2, zero3 and pp",
    ),
    Conflict(
        lambda c: c.lora and c.freeze != "none",
        "{lora} and {freeze}: adapters freeze the whole encoder; drop one",
    ),
    Conflict(
        lambda c: c.lora and c.float8,
        "{lora} and {float8}: adapters are too narrow for float8; drop one",
    ),
    Conflict(
        lambda c: c.layers and c.model == TINY,
        "{layers} and {model}: its blocks are random, so there is nothing to keep; leave out "
        "--layers",
    ),
    # A teacher's answers.
    *(
        Conflict(
            lambda c, flag=flag: not c.distill and c.is_changed(flag),
            f"{{{flag}}}: does nothing without --distill",
        )
        for flag in ("distill_texts", "distill_share")
    ),
    Conflict(
        lambda c: c.task_facts.needs_teacher and len(c.teachers) > 1,
        "{distill}: vectors of different encoders have no useful mean; for --task embedding name "
        "one",
    ),
    Conflict(
        lambda c: c.distill_share == 1 and c.label_smoothing,
        "{distill_share} and {label_smoothing}: the labels do not count; drop one",
    ),
    *(
        Conflict(
            lambda c, flag=flag: c.distill_texts and c.is_changed(flag),
            f"{{distill_texts}} and {{{flag}}}: this needs a label for every row, and these texts "
            "have none; drop one",
        )
        for flag in ("class_weights", "sampling", "suspects")
    ),
    # Names of labels and an earlier model instead of labelled rows.
    Conflict(
        lambda c: not c.dataset and not c.labels,
        "{dataset}: names no data; without labelled rows give --labels",
    ),
    Conflict(
        lambda c: not c.dataset and c.method == "fine_tune",
        "{method} and --labels without --dataset: there are no rows to train on",
    ),
    Conflict(
        lambda c: c.unlabelled and c.distill_texts,
        "--unlabelled and --distill_texts: the head or a teacher labels more texts; drop one",
    ),
    Conflict(
        lambda c: c.from_model and c.model != c.from_model,
        "{from_model} and {model}: two models to begin with; drop one",
    ),
    *(
        Conflict(
            lambda c, flag=flag: c.from_model and getattr(c, flag),
            f"{{from_model}} and {{{flag}}}: do not go together; drop one",
        )
        for flag in ("labels", "unlabelled", "distill")
    ),
    Conflict(
        lambda c: c.from_model and not c.gives("dataset"),
        "{from_model}: give the rows that it shall learn, with --dataset",
    ),
    *(
        Conflict(
            lambda c, asks=asks, has_none=has_none: asks(c) and has_none(c),
            f"{{{asking}}} and {{{flag}}}: no head can be fitted here; drop one",
        )
        for asking, asks in _ASKS_FOR_HEAD.items()
        for flag, has_none in _HAS_NO_HEAD.items()
    ),
    Conflict(
        lambda c: c.unlabelled and c.method == "auto" and c.learning_rate is not None,
        "{unlabelled} and {learning_rate}: with a rate of your own the head begins at random, and "
        "learns nothing from "
        "these texts; add --method fine_tune",
    ),
    # Windows of long texts.
    Conflict(
        lambda c: c.long == "windows" and c.network,
        "{long} and {network}: windows are pooled by a row that is added to the last layer, and "
        "only encoders of "
        "transformers are known to have such a layer; drop one",
    ),
    Conflict(
        lambda c: c.long == "windows" and c.pair_column and not c.task_facts.pair_column,
        "{long} and {pair_column}: windows are cut from single texts; drop one",
    ),
    Conflict(
        lambda c: c.long == "windows" and c.batch_size == "auto",
        "{long} and {batch_size}: rows have different numbers of windows, so there is no largest "
        "number of rows that "
        "always fits; give a number",
    ),
    # What is measured in the run itself.
    Conflict(
        lambda c: c.batch_size == "auto" and c.strategy not in WHOLE_MODEL,
        "{batch_size} and {strategy}: sizes are tried under ddp, zero1, zero2 and zero3 only; "
        "give a number",
    ),
    Conflict(
        lambda c: c.batch_size == "auto" and c.deterministic,
        "{batch_size} and {deterministic}: a measured size is not reproducible; give a number",
    ),
    Conflict(
        lambda c: c.batch_size == "auto" and c.balance == "auto",
        "{batch_size} and {balance}: faster ranks would get more rows than fit; drop one",
    ),
    Conflict(
        lambda c: c.budget and c.suspects in ("drop", "reweight"),
        "{budget} and {suspects}: a run with a budget may end in its first epoch; use --suspects "
        "list",
    ),
    Conflict(
        lambda c: c.budget and c.deterministic,
        "--budget and {deterministic}: how many steps fit into a time is not reproducible; drop "
        "one",
    ),
    Conflict(
        lambda c: c.budget and c.schedule in ("inverse_sqrt", "constant"),
        "{budget} and {schedule}: the learning rate must end at zero; use linear or cosine",
    ),
    Conflict(
        lambda c: c.suspects in ("drop", "reweight") and c.epochs == 1,
        "{suspects} and {epochs}: this takes effect from the second epoch on; raise --epochs",
    ),
    Conflict(
        lambda c: c.balance == "auto" and c.deterministic,
        "{balance} and {deterministic}: shares by measured speeds are not reproducible; drop one",
    ),
)
