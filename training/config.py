"""TrainConfig: one typed object = command-line flags + a YAML file + environment variables.

Flags win over variables (``DISTRINEWS_<FIELD>``), variables over the file, the file over the
defaults.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from common.errors import OneLineParser, UserError, invalid_value, near_names
from common.escaping import without_user
from common.rows import Columns
from common.windows import MOST_WINDOWS
from training.conflicts import CONFLICTS
from training.deepspeed_file import flags_of_file
from training.facts import (
    DEFAULT_TASK,
    EPSILON,
    FLAGS_OF_STRATEGIES,
    FLAGS_OF_TASKS,
    STRATEGY_FACTS,
    TASK_FACTS,
    TINY,
    TaskFacts,
)
from training.other_names import FORMER_FIELDS, NOT_FLAGS, OTHER_NAMES, OTHER_VALUES

ENVIRONMENT_PREFIX = "DISTRINEWS_"
STARTER = "starter"
STARTER_FOLDER = Path(__file__).resolve().parents[1] / "checkpoints" / STARTER
# What --help shows; the others are in --help all.
MOST_USED = (
    *("task", "dataset", "labels", "text_column", "label_column"),
    *("model", "from_model", "budget", "epochs", "batch_size", "learning_rate"),
    *("strategy", "output_dir", "export", "resume"),
)
EXAMPLES = """examples:

  training/run_ddp.sh 2 --dataset sample --model starter
  training/run_ddp.sh 2 --dataset tickets.csv --budget 10m --export
  training/run_ddp.sh 2 --config training/configs/laptop_cpu.yaml --epochs 5"""
LONGEST_CHOICES = 60  # that fit into a line of the help
TRACKERS = ("wandb", "mlflow", "trackio")
# What decides, beside the dataset, which rows there are and how they are read.
DATA_FLAGS = (
    *(
        "task",
        "text_column",
        "label_column",
        "pair_column",
        "train_split",
        "validation_split",
        "test_split",
    ),
    *(
        "dataset_config",
        "dataset_revision",
        "bad_rows",
        "max_length",
        "clean",
        "model",
        "model_revision",
        "seed",
    ),
)
# What training.data_report finds, and --fail_on may name.
FAULTS = ("duplicates", "leakage", "conflicts")


# More rows to train on, and fewer to wait for. Epochs are the most that help; most budgets end
# before.
DEFAULTS_WITH_BUDGET = {"epochs": 10, "validation_fraction": 0.02}


# What may change about a field when a run resumes. "any": it changes neither rows nor updates, such
# as paths, or how the model is distributed over ranks. "same global batch": the product batch_size
# x data ranks x gradient_accumulation decides the row order, so its factors may change but not
# their product. "longer": a run may be extended, but not end before what it has trained.
OnResume = Literal["same", "any", "same global batch", "longer"]


def _field(default: Any, group: str, on_resume: OnResume = "same", **limits: Any) -> Any:
    about = {"group": group, "on_resume": on_resume}
    # Defaults are validated like any other value, so what a validator makes of one, such as an
    # expanded path, is true of all.
    return Field(default, json_schema_extra=about, validate_default=True, **limits)


# What the recipe chooses where it is not given, see run/recipe.py.
CHOSEN = ("method", "learning_rate", "epochs", "batch_size", "validation_fraction", "best_metric")


# A number or the word. Without the discriminator a wrong number would also be told that it is not
# the word.
BATCH_SIZE = Annotated[int, Field(ge=1), Tag("rows")] | Annotated[Literal["auto"], Tag("auto")]
BatchSize = Annotated[
    BATCH_SIZE, Discriminator(lambda value: "auto" if value == "auto" else "rows")
]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a dataset is read, as the flags of these names say; empty for the dataset's own default."""

    dataset_config: str = ""
    dataset_revision: str = ""
    train_split: str = "train"
    validation_split: str = ""
    test_split: str = ""


def _is_within(address: str, folder: Path) -> bool:
    """Whether a path is in a folder, as written or by where links lead."""
    path = Path(address.removeprefix("file://")).expanduser()
    path_as_written, folder_as_written = (
        Path(os.path.normpath(one.absolute())) for one in (path, folder)
    )
    return path_as_written.is_relative_to(folder_as_written) or path.resolve().is_relative_to(
        folder.resolve()
    )


class TrainConfig(BaseModel):
    """Everything that a training run can be told. What is written below a field is the help text of its flag."""

    # Frozen, because all parts of a run and all ranks hold it: who decides something later makes a
    # copy with `model_copy`. The texts below the fields become descriptions, and so the help.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    task: Literal[tuple(TASK_FACTS)] = _field(DEFAULT_TASK, "task")
    """what the model answers; classification = one label per text, pair = one label per pair of
    texts, multi_label = each label that applies, from none to all, regression = a number; on plain
    text without labels, embedding = the vector that --distill gives a text, to make a small encoder
    from a large one, masked_lm = hidden tokens, to pretrain or adapt an encoder, causal_lm = the
    next token (decoders such as Llama)"""

    loss: str = _field("", "task")
    """import path of your own loss, which turns scores and labels into the loss of each row; unset
    = that of the task"""

    metric: str = _field("", "task")
    """import path of your own metric, which turns the scores and labels of all rows into figures by
    name, the larger the better; --best_metric may name one of them; unset = only those of the
    task"""

    dataset: str = _field("ag_news", "data")
    """ag_news (from the hub), sample (built in), a hub name owner/data, or a local folder or file:
    AG News' train.csv/test.csv, a folder saved by `datasets`, or CSV/TSV/JSONL/Parquet with columns
    text and label; for language models also .txt, each line a text"""

    dataset_config: str = _field("", "data")
    """which configuration (subset) of a dataset on the hub, such as sst2 of nyu-mll/glue; unset =
    its default"""

    dataset_revision: str = _field("", "data")
    """branch, tag or commit of a dataset on the hub; unset = its main branch"""

    train_split: str = _field("train", "data", min_length=1)
    """split to train on; in a folder, the file of that name"""

    validation_split: str = _field("", "data")
    """split to validate on; unset = validation, valid, val or dev if the data has it, otherwise
    training rows are kept for it"""

    test_split: str = _field("", "data")
    """split to test on; unset = test if the data has it, otherwise training rows are set aside"""

    labels: str = _field("", "data")
    """names of the labels, separated by commas, such as "billing, login, refund", or a file with
    one per line: without --dataset, the model learns from these names and from --unlabelled texts
    alone; with it, labels that have no rows learn from their names"""

    unlabelled: str = _field("", "data")
    """a file or folder of more texts, without labels, which show the head how texts of each label
    read: .txt with one text per line, or CSV, TSV, JSONL or Parquet with the text columns; helps
    with no rows or few"""

    text_column: str = _field("text", "data", min_length=1, on_resume="any")
    """column with the text, if the columns have names; case-insensitive; if you name several, such
    as title,body, their texts are joined"""

    label_column: str = _field("label", "data", min_length=1, on_resume="any")
    """column with the label; for multi_label also several columns of 0 and 1, such as
    billing,login, each named after its label"""

    pair_column: str = _field("", "data", on_resume="any")
    """column with a second text that the model reads together with the first, such as the answer to
    a question, for pair, multi_label and regression; unset = text_pair for --task pair, otherwise
    none"""

    max_length: int = _field(128, "data", ge=8, le=8192)
    """tokens per text; longer texts are cut, and the report says how many; for language models,
    tokens per block, into which all texts are joined"""

    long: Literal["cut", "windows"] = _field("cut", "data")
    """what happens to texts of more than max_length tokens: cut = only their beginning is read;
    windows = they are read in up to 16 windows of max_length tokens, each of which repeats the last
    quarter of the one before, and learned attention weights the answers of the windows"""

    clean: Literal["auto", "news", "none"] = _field("auto", "data")
    """how texts are cleaned before tokenization, in training and in serving: news = decode
    character references, drop HTML tags and backslashes, collapse white space; none = as they are;
    auto = news for AG News (recognized by its name, CSV layout or four labels) and sample,
    otherwise none; a resumed run keeps its own"""

    validation_fraction: float = _field(0.1, "data", ge=0, lt=0.9)
    """share of the training rows kept for choosing the best epoch, stratified; unset = 0.1, or 0
    for few rows, where folds validate the fitted head; 0 = train on all rows and keep the last
    epoch; not used if the data has validation rows"""

    rough_share: float = _field(0.0, "data", ge=0, le=1)
    """share of the training texts that each epoch reads a second time as people may type them: only
    the title or the first clause, the first ten words, without punctuation, in upper case, with
    typing errors; drawn with the seed; 0 = none"""

    duplicates: Literal["report", "drop", "report_near", "drop_near"] = _field("report", "data")
    """texts that occur more than once, ignoring case and white space: report = count them; drop =
    also leave out training rows that repeat an earlier one, or a validation or test text;
    report_near and drop_near = also near duplicates, which have 80% of all their word triples in
    common (12 s for 100,000 short texts)"""

    max_train_rows: int = _field(0, "data", ge=0)
    """train on at most this many rows, drawn with the seed; 0 = all"""

    suspects: Literal["none", "list", "drop", "reweight"] = _field("none", "data")
    """training rows whose label the run itself doubts: list = the report and
    OUTPUT_DIR.run/suspects.csv name them; drop = the run also leaves them out from the second epoch
    on; reweight = it gives them a tenth of the weight in the loss from then on; none = do not look
    for them"""

    cache_dir: Path = _field(Path("~/.cache/distrinews"), "data", on_resume="any")
    """where tokenized data is cached"""

    model: str = _field("distilbert-base-uncased", "model")
    """a hub name or local folder of an encoder, or of a decoder for causal_lm; starter = the small
    encoder that comes with this repository and needs no network; tiny = a small, randomly
    initialized DistilBERT (for causal_lm Llama), for tests; if unset and the hub cannot be reached,
    starter is used instead of the default"""

    from_model: str = _field("", "model")
    """the folder of a model that was trained here: it learns the rows of --dataset too, also labels
    that it does not know, in seconds, and the run says what each of its labels has lost"""

    model_revision: str = _field("", "model")
    """branch, tag or commit of a model on the hub; unset = its main branch"""

    network: str = _field("", "model")
    """import path of a class or function that builds a network of your own from (vocabulary size,
    number of scores), such as my_models:TextCNN; --model then only gives the tokenizer; unset = the
    network of --model"""

    activation_checkpointing: Literal["none", "selective", "full"] = _field(
        "none",
        "model",
        on_resume="any",
    )
    """recompute activations in the backward pass: full keeps only the input of each block (a third
    more work), selective also the outputs of matrix products (little more work)"""

    compile: bool = _field(False, "model", on_resume="any")
    """torch.compile each block; pays off on GPUs in long runs"""

    float8: bool = _field(False, "model", on_resume="any")
    """matrix products of the blocks in float8, on GPUs that have it (Ada, Hopper and newer); needs
    the extra float8"""

    layers: int = _field(0, "model", ge=0)
    """keep this many blocks of --model, evenly spaced, including the first and the last, for a
    smaller model; 0 = all"""

    lora: int = _field(0, "model", ge=0, le=1024)
    """rank of LoRA adapters: the encoder is frozen, and only the head and small matrices beside the
    linear layers of its blocks are trained, then merged into the written model; 0 = off, train all
    weights; needs the extra lora"""

    lora_alpha: float | None = _field(None, "model", gt=0)
    """what the adapters add is multiplied by lora_alpha / lora; unset = 2 x lora"""

    distill: str = _field("", "distillation", on_resume="any")
    """a teacher: the folder of a trained model of the same task and labels, whose answers to the
    training rows are targets too; several, separated by commas, answer with their mean; for
    embedding, the folder of an encoder whose vectors for the texts are the targets; they are
    computed once and kept in --cache_dir; unset = train on the labels only"""

    distill_share: float = _field(0.9, "distillation", gt=0, le=1)
    """share of the teacher's answer in the loss of a row that has a label; the label gets the rest;
    1 = labels do not count"""

    distill_texts: str = _field("", "distillation", on_resume="any")
    """a file or folder of more texts, without labels, which become training rows with the teacher's
    answer as their only target: .txt with one text per line, or CSV, TSV, JSONL or Parquet with the
    text columns"""

    class_weights: str = _field("none", "imbalance")
    """weight of each label in the training loss: none = all rows count equally; auto = rows of rare
    labels count more, so that every label has the same total weight; or a YAML or JSON file with a
    weight for each label"""

    sampling: Literal["shuffled", "balanced"] = _field("shuffled", "imbalance")
    """shuffled = each row once per epoch; balanced = every label equally often, so rows of rare
    labels repeat and some rows of frequent labels wait for a later epoch"""

    best_metric: str = _field("", "imbalance")
    """the metric on the validation rows that decides which epoch is best: accuracy, macro_f1 (every
    label has the same weight, however rare) or loss; for multi_label micro_f1, macro_f1,
    exact_match or loss; for regression rmse, mae, r2, spearman or loss; for embedding cosine or
    loss; for language models perplexity, token_accuracy or loss; unset = the first of the task, or
    macro_f1 if some label is rare"""

    evaluate_every: int = _field(0, "imbalance", ge=0)
    """optimizer steps between evaluations on the validation rows, in addition to those at the end
    of each epoch; 0 = only those"""

    early_stopping: int = _field(0, "imbalance", ge=0, on_resume="any")
    """stop after this many evaluations in a row without a better score; there is one per epoch, or
    more with --evaluate_every; 0 = train to the end"""

    method: Literal["auto", "fine_tune", "head"] = _field("auto", "optimization")
    """how the model is fitted to the rows: fine_tune = all weights, beginning with a head that
    logistic regression has fitted to what the encoder says of the rows; head = only that head, in
    seconds; auto = fine_tune, but with a random head where you give --learning_rate, --budget,
    --lora, --loss or --long windows"""

    budget: str = _field("", "optimization", on_resume="any")
    """how long the run may take, from its start to the written and tested model, such as 90s, 10m
    or 1h: it trains as many steps as fit, at most 10 epochs unless --epochs says how many, with a
    learning rate that ends at zero in time; it chooses --max_length, --learning_rate, --dropout and
    --freeze, and keeps 2% of the rows for validation, unless you set them; unset = --epochs
    decides"""

    epochs: int = _field(3, "optimization", ge=1, on_resume="longer")
    """passes over the training rows; unset = 3, or as many more as few rows or many labels need; a
    larger number extends a run that has stopped or finished"""

    batch_size: BatchSize = _field(32, "optimization", on_resume="same global batch")
    """rows per rank in one micro-batch; the global batch = batch_size x data ranks x
    gradient_accumulation; unset = 32, or 8 or 16 for few rows; auto = the most that fit, found at
    the start and kept (ddp, zero1, zero2, zero3)"""

    gradient_accumulation: int = _field(1, "optimization", ge=1, on_resume="same global batch")
    """micro-batches per optimizer step; 1 = off"""

    learning_rate: float | None = _field(None, "optimization", gt=0, lt=1)
    """peak learning rate; unset = by the width and depth of the encoder, or 2e-4 with --lora, or
    1e-3 for a network that begins at random"""

    scale_lr: Literal["none", "linear", "sqrt"] = _field("none", "optimization")
    """multiply the learning rate by the number of data ranks or its square root"""

    schedule: Literal["linear", "cosine", "inverse_sqrt", "constant"] = _field(
        "linear",
        "optimization",
    )
    """how the learning rate falls after the warm-up: linear and cosine fall to 0 at the end,
    inverse_sqrt falls with the square root of the step, constant does not fall"""

    warmup: float = _field(0.06, "optimization", ge=0)
    """steps over which the learning rate rises: below 1 it is a share of all steps, from 1 on a
    number of steps; 0 = off"""

    weight_decay: float = _field(0.01, "optimization", ge=0, lt=1)
    """AdamW's weight decay, except for biases and LayerNorm; 0 = off"""

    betas: tuple[float, float] = _field((0.9, 0.999), "optimization")
    """AdamW's decay rates per step for the averages of gradients and of their squares, such as
    0.9,0.98; the closer to 1, the longer the memory"""

    layer_decay: float = _field(1.0, "optimization", gt=0, le=1)
    """factor by which the learning rate changes from each block to the one below it, and on to the
    embeddings, which get the smallest; 1 = off"""

    freeze: str = _field("none", "optimization")
    """what keeps its pretrained weights: none, embeddings, or a number of blocks = the embeddings
    and that many of the lowest blocks"""

    ema: float = _field(0.0, "optimization", ge=0, lt=1)
    """decay per step of a moving average of the weights, such as 0.999, which is validated, tested
    and written instead of the weights of single steps; 0 = off"""

    clip_norm: float = _field(1.0, "optimization", ge=0)
    """largest global gradient norm; 0 = no clipping"""

    label_smoothing: float = _field(0.0, "optimization", ge=0, lt=1)
    """probability spread over the other labels; 0 = off"""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = _field("auto", "optimization")
    """auto = bf16 if the processor is faster with it, fp16 with a loss scale on older GPUs,
    otherwise fp32"""

    tf32: bool = _field(False, "optimization", on_resume="any")
    """round the inputs of fp32 matrix products to TF32 on GPUs that have it (Ampere and newer),
    also in the final test: faster, with 10 instead of 23 bits of precision; off = exact"""

    dropout: float | None = _field(None, "optimization", ge=0, lt=1)
    """share of values that the model's dropout layers leave out in training; 0 = none, which is
    also faster to compute, for a small model or a single pass over many rows; unset = what the
    model's configuration says"""

    seed: int = _field(42, "optimization", ge=0, lt=2**32)
    """seed of the validation split, the row order, new weights and dropout"""

    deterministic: bool = _field(False, "optimization")
    """refuse operations that are not reproducible bit for bit; slower on GPUs"""

    strategy: Literal[tuple(STRATEGY_FACTS)] = _field("ddp", "processes", on_resume="any")
    """how the model is distributed over the ranks: ddp = a full copy on each; zero1, zero2, zero3 =
    sharded optimizer state, then also gradients, then also weights; deepspeed = the same with
    DeepSpeed; tp = each matrix split; pp = blocks in stages; 3d = all of them combined"""

    dp_shard: int = _field(0, "processes", ge=0, on_resume="any")
    """how many of the dp ranks shard one copy of the state (zero2, zero3, 3d); 0 = all of them, 1 =
    a full copy on each"""

    tp: int = _field(0, "processes", ge=0, on_resume="any")
    """tensor-parallel degree, a divisor of the ranks of one machine; 0 = 1, or for tp all ranks of
    a machine"""

    pp: int = _field(0, "processes", ge=0, on_resume="any")
    """ranks per pipeline; 0 = 1, or for pp all ranks"""

    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = _field(
        "1f1b", "processes", on_resume="any"
    )
    """order of the micro-batches (their number is gradient_accumulation) in the pipeline; the last
    three give each rank two stages"""

    sequence_parallel: bool = _field(False, "processes", on_resume="any")
    """with tp, split norms and residuals by tokens: less memory for long texts"""

    compress: str = _field("none", "processes", on_resume="any")
    """compress gradients for the all-reduce (ddp, zero1): none, fp16, bf16 or powersgd[:rank], such
    as powersgd:4"""

    cpu_offload: bool = _field(False, "processes", on_resume="any")
    """offload sharded state to host memory (zero2, zero3, deepspeed)"""

    balance: Literal["none", "auto"] = _field("none", "processes", on_resume="any")
    """auto = measure the speed of the ranks from time to time, and give slower ones fewer rows
    (ddp, zero1)"""

    deepspeed_stage: int = _field(2, "processes", ge=0, le=3, on_resume="any")
    """what DeepSpeed shards: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also
    weights"""

    deepspeed_config: Path | None = _field(None, "processes", on_resume="any")
    """a DeepSpeed JSON file, for settings without a flag here; if it sets what a flag also sets,
    such as the learning rate, the file counts unless the flag is given"""

    device: Literal["auto", "cpu", "cuda"] = _field("auto", "processes")
    """auto = one GPU per process if available, else the CPU"""

    output_dir: Path = _field(Path("checkpoints/distilbert_agnews"), "output", on_resume="any")
    """the model folder; the one-file model OUTPUT_DIR.pt and the run folder OUTPUT_DIR.run are
    written next to it"""

    export: bool = _field(False, "output", on_resume="any")
    """when the model is written, also export it for serving, as python -m inference.export
    OUTPUT_DIR does: in int8, if that loses at most half a point"""

    model_version: str = _field("", "output", on_resume="any")
    """a version of your own for the model, such as 2026-11 or v3: letters, digits, . _ + and -; it
    is in the model card, in metrics.json and in the server's /model"""

    examples: bool = _field(True, "output", on_resume="any")
    """keep one short test text per label in metrics.json, which the server's page offers to its
    visitors; false for texts that nobody else may see"""

    resume: str = _field("auto", "output", on_resume="any")
    """auto = resume from the run folder's newest complete checkpoint, if it has one; none = start
    from scratch (an older run is moved aside, not deleted); or the path of a checkpoint"""

    log_every: int = _field(10, "output", ge=1, on_resume="any")
    """optimizer steps between lines in metrics.jsonl and TensorBoard"""

    metrics_port: int = _field(0, "output", ge=0, le=65_000, on_resume="any")
    """port for Prometheus metrics; each rank adds its local rank; 0 = off"""

    metrics_host: str = _field("127.0.0.1", "output", min_length=1, on_resume="any")
    """address of this machine at which they are served, without a key; 0.0.0.0 = every one, for a
    Prometheus elsewhere"""

    stopped_exit_code: int = _field(0, "output", ge=0, le=255, on_resume="any")
    """exit code of a run that was asked to stop and has saved; for schedulers that restart what
    failed, use a number such as 75"""

    checkpoint_dir: str = _field("", "fault tolerance", on_resume="any")
    """where checkpoints are kept: a folder that all machines share, or an address such as
    s3://bucket/run; unset = OUTPUT_DIR.run/checkpoints"""

    save_every: int = _field(500, "fault tolerance", ge=0, on_resume="any")
    """optimizer steps between checkpoints, in addition to one at the end of each epoch; 0 = only
    those"""

    save_minutes: float = _field(0, "fault tolerance", ge=0, on_resume="any")
    """minutes between checkpoints, in addition to those by steps; 0 = off"""

    keep_last: int = _field(2, "fault tolerance", ge=1, on_resume="any")
    """newest checkpoints to keep, in addition to the best one"""

    keep_every: int = _field(0, "fault tolerance", ge=0, on_resume="any")
    """keep the checkpoint of every Nth step permanently; 0 = off"""

    bad_steps: int = _field(5, "fault tolerance", ge=0, on_resume="any")
    """consecutive steps that may be skipped because loss or gradient norm is not finite; after one
    more, the run is rolled back to its newest checkpoint and leaves the bad rows out; 0 = stop at
    the first"""

    collective_timeout: float = _field(1800, "fault tolerance", ge=1, on_resume="any")
    """seconds without progress after which a rank ends the run and names the missing ranks; must
    exceed anything that one rank does while others wait; at least an hour until the first steps are
    done"""

    bad_rows: Literal["stop", "skip"] = _field("stop", "fault tolerance", on_resume="any")
    """malformed rows (truncated line, empty text, unknown label ...): stop = report the first one
    and do not start; skip = leave them out and report them"""

    check_replicas_every: int = _field(500, "monitoring", ge=0, on_resume="any")
    """optimizer steps between comparisons of all replicas, which are also compared at the start and
    before each checkpoint; 0 = off"""

    check_gradient_sync: int = _field(0, "monitoring", ge=0, on_resume="any")
    """compare the reduced gradients of all replicas in the first N steps, in case a model's own
    code breaks their synchronization; 0 = off"""

    trackers: str = _field("", "monitoring", on_resume="any")
    """also send metrics to wandb, mlflow or trackio, several separated by commas; each needs the
    extra of that name; unset = none"""

    profile: int = _field(0, "monitoring", ge=0, le=1000, on_resume="any")
    """optimizer steps to record with PyTorch's profiler, into OUTPUT_DIR.run/profile and the
    report; 0 = off"""

    @field_validator("*", mode="before")
    @classmethod
    def _read_path(cls, value: Any) -> Any:
        """From Python, a path may be given wherever a flag names one."""
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_serializer("checkpoint_dir", "resume", when_used="json")
    def _without_user(self, address: str) -> str:
        """Records, reports and trackers get no password."""
        return without_user(address)

    @field_validator("warmup")
    @classmethod
    def _check_warmup(cls, value: float) -> float:
        if value >= 1 and not value.is_integer():
            raise ValueError("must be a share below 1, or a whole number of steps")
        return value

    @field_validator("compress")
    @classmethod
    def _check_compress(cls, value: str) -> str:
        if not re.fullmatch(r"none|fp16|bf16|powersgd(:[1-9]\d*)?", value):
            raise ValueError("must be none, fp16, bf16 or powersgd[:rank], such as powersgd:4")
        return value

    @field_validator("betas", mode="before")
    @classmethod
    def _read_betas(cls, value: Any) -> Any:
        """From a flag, two numbers with a comma between them; a file may hold a list."""
        numbers = value.split(",") if isinstance(value, str) else value
        if not isinstance(numbers, Sequence) or len(numbers) != 2:
            raise ValueError("must be two numbers, such as 0.9,0.999")
        return numbers

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must be at least 0 and below 1")
        return value

    @field_validator("freeze", mode="before")
    @classmethod
    def _check_freeze(cls, value: Any) -> str:
        # Any value is read as text, because YAML reads a number of blocks as a number.
        if not re.fullmatch(r"none|embeddings|[1-9]\d*", str(value)):
            raise ValueError("must be none, embeddings or a number of blocks, such as 3")
        return str(value)

    @field_validator("trackers")
    @classmethod
    def _check_trackers(cls, value: str) -> str:
        if unknown := [name for name in _names(value) if name not in TRACKERS]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(TRACKERS)}")
        return value

    @field_validator("model_version")
    @classmethod
    def _check_model_version(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", value):
            raise ValueError(
                "must be 1 to 64 letters, digits, . _ + or -, and begin with a letter or digit"
            )
        return value

    @field_validator("output_dir")
    @classmethod
    def _check_output_dir(cls, value: Path) -> Path:
        if not value.name:
            raise ValueError("must name a folder")
        if str(value).startswith(("s3:/", "gs:/", "hf:/")):
            raise ValueError(
                "must be a folder of this machine; only --checkpoint_dir may be an address"
            )
        return value.expanduser()

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, value: str) -> str:
        if value and not (re.fullmatch(r"\d+(\.\d+)?[smh]", value) and float(value[:-1])):
            raise ValueError("must be a time with its unit: s, m or h, such as 90s, 10m or 1h")
        return value

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_budget(cls, values: Any) -> Any:
        # Before the fields are read, and below what was given: a flag still wins over these.
        return {**DEFAULTS_WITH_BUDGET, **values} if values.get("budget") else values

    @model_validator(mode="after")
    def _check_across(self) -> TrainConfig:
        # What follows from other fields comes first: the conflicts are those of what the run will
        # do.
        self._settle_by_others()
        for conflict in CONFLICTS:
            if conflict.when(self):
                raise ValueError(
                    conflict.message.format_map(
                        {name: self.shown(name) for name in type(self).model_fields}
                    )
                )
        self._check_uses()
        self._check_places()
        return self

    # The last of the validators and around all of them, so that it sees what the others find.
    @model_validator(mode="wrap")
    @classmethod
    def _as_user_error(
        cls, values: Any, validate: Callable[[Any], TrainConfig], info: ValidationInfo
    ) -> TrainConfig:
        """Report in one line what is wrong. ``info.context``: where each value comes from, if not from Python."""
        origins = info.context
        if origins is None and isinstance(values, Mapping):
            check_fields(values, cls.__name__)
            origins = dict.fromkeys(values, cls.__name__)
        try:
            return validate(values)
        except ValidationError as error:
            problems = error.errors()
            code = "flag-value" if problems[0]["loc"] else "flags-conflict"
            raise UserError(
                "; ".join(_describe(problem, origins or {}) for problem in problems), code=code
            ) from None

    def _settle_by_others(self) -> None:
        """Decide what follows from other fields."""
        if not self.best_metric:  # every configuration names it; it does not count as given
            self.__dict__["best_metric"] = self.task_facts.metrics[0]
        # The model is frozen for everybody else. Here, while it is being made, fields are written
        # past pydantic.
        if self.labels and not self.gives("dataset"):
            self._settle("dataset", "")
        if not self.dataset and self.method == "auto":
            self._settle("method", "head")
        if self.from_model:
            if not self.gives("model"):
                self._settle("model", self.from_model)
            if self.method == "auto":
                self._settle("method", "head" if self.learning_rate is None else "fine_tune")

    def _settle(self, name: str, value: Any) -> None:
        """Decide a field as if it had been given."""
        self.__dict__[name] = value
        self.__pydantic_fields_set__.add(name)

    def _check_uses(self) -> None:
        """What the task or the strategy has no use for."""
        if self.best_metric not in self.task_facts.metrics and not self.metric:
            raise ValueError(
                f"--best_metric {self.best_metric} and --task {self.task}: this task has "
                f"{', '.join(self.task_facts.metrics)}"
            )
        for table, choice in ((FLAGS_OF_STRATEGIES, "strategy"), (FLAGS_OF_TASKS, "task")):
            for flag, wanted in table.items():
                if self.is_changed(flag) and getattr(self, choice) not in wanted:
                    raise ValueError(
                        f"{flag_of(flag)} {getattr(self, flag)}: does nothing with "
                        f"{self.shown(choice)}, only with "
                        f"{', '.join(wanted)}"
                    )

    def _check_places(self) -> None:
        """The finished model replaces what is in its folder."""
        # A run that is resumed reads its teachers and its data again, and the finished model takes
        # the place of the whole folder.
        for name in self.teachers:
            if Path(name).expanduser().absolute() in (
                self.output_dir.absolute(),
                self.checkpoint_file.absolute(),
            ):
                raise ValueError(
                    f"--distill {name} and --output_dir {self.output_dir}: the student would "
                    "replace its teacher; "
                    "name another --output_dir"
                )
        if self.checkpoint_dir and _is_within(self.checkpoint_dir, self.output_dir):
            raise ValueError(
                f"--checkpoint_dir {self.checkpoint_dir}: is in --output_dir {self.output_dir}, "
                "which the finished "
                "model replaces; name another folder"
            )
        for flag in (
            "model",
            "from_model",
            "dataset",
            "distill_texts",
            "unlabelled",
            "class_weights",
        ):
            path = Path(getattr(self, flag) or "none").expanduser()
            if path.exists() and _is_within(str(path), self.output_dir):
                raise ValueError(
                    f"{flag_of(flag)} {getattr(self, flag)}: is in --output_dir "
                    f"{self.output_dir}, which the finished "
                    "model replaces; name another --output_dir"
                )

    @property
    def budget_seconds(self) -> float:
        return float(self.budget[:-1]) * {"s": 1, "m": 60, "h": 3600}[self.budget[-1]]

    @property
    def teachers(self) -> tuple[str, ...]:
        return _names(self.distill)

    @property
    def is_distilled(self) -> bool:
        """Whether a teacher's answers are targets beside the labels."""
        return bool(self.distill) and self.task_facts.has_labels

    @property
    def task_facts(self) -> TaskFacts:
        return TASK_FACTS[self.task]

    @property
    def is_pretrained(self) -> bool:
        """Whether the run fine-tunes an encoder for labels."""
        return self.model != TINY and not self.network and self.task_facts.has_labels

    @property
    def fits_head(self) -> bool:
        """Whether a head is fitted before the first step.

        A run whose flags name a learning rate has its own recipe, and its results must stay what
        they were.
        """
        asked = self.method != "auto" or self.learning_rate is None
        others = self.budget or self.lora or self.loss or self.long != "cut"
        return asked and self.is_pretrained and not others

    @property
    def is_language_model(self) -> bool:
        return self.task_facts.is_language_model

    @property
    def longest_text(self) -> str:
        """Where longer texts are cut, in words."""
        return (
            f"{MOST_WINDOWS} windows of " * (self.long == "windows") + f"{self.max_length} tokens"
        )

    @property
    def columns(self) -> Columns:
        label = self.label_column if self.task_facts.has_labels else ""
        return Columns(self.text_column, label, self.pair_column or self.task_facts.pair_column)

    @property
    def selection(self) -> Selection:
        return Selection(**{field.name: getattr(self, field.name) for field in fields(Selection)})

    @property
    def how_to_resume(self) -> str:
        # With `--resume none` the same command would begin again, and move what there is aside.
        same = self.resume == "auto"
        return (
            "rerun the same command"
            if same
            else f"rerun the command without --resume {self.resume}"
        )

    @property
    def run_dir(self) -> Path:
        return self.output_dir.with_name(self.output_dir.name + ".run")

    @property
    def cache_folder(self) -> Path:
        return self.cache_dir.expanduser()

    @property
    def checkpoint_file(self) -> Path:
        return self.output_dir.with_name(self.output_dir.name + ".pt")

    @property
    def not_saved_exit_code(self) -> int:
        """The exit code of a run that was asked to stop and had nothing to save; never that of a finished run."""
        return self.stopped_exit_code or os.EX_TEMPFAIL

    @property
    def adapter_alpha(self) -> float:
        """LoRA's alpha: what the adapters add is multiplied by this over their rank."""
        return 2.0 * self.lora if self.lora_alpha is None else self.lora_alpha

    @property
    def frozen_depth(self) -> int:
        """The depth up to which parameters are not trained: 0 for the embeddings, n for the n-th block, -1 for none."""
        return (
            int(self.freeze)
            if self.freeze.isdigit()
            else {"none": -1, "embeddings": 0}[self.freeze]
        )

    @property
    def tracker_names(self) -> tuple[str, ...]:
        return _names(self.trackers)

    def gives(self, name: str) -> bool:
        """Whether a field was given; one that a file gives as null was not."""
        return name in self.model_fields_set and getattr(self, name) is not None

    def is_changed(self, name: str) -> bool:
        """Whether a field has another value than by default."""
        return getattr(self, name) != type(self).model_fields[name].default

    def shown(self, name: str) -> str:
        """The flag of a field with its value, as one would write it; a switch has none."""
        value = getattr(self, name)
        words = "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
        return f"{flag_of(name)} {words}".strip()

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flag_of(name: str) -> str:
    """The flag of a field; one cannot be called as it is, because that is a word of Python's."""
    return "--from" if name == "from_model" else f"--{name}"


def on_resume(name: str) -> OnResume:
    """What the field ``name`` may be when a run resumes from a checkpoint."""
    return TrainConfig.model_fields[name].json_schema_extra["on_resume"]


def model_place(model: str) -> str:
    """Where ``--model`` is, if it is one of this machine's: a path; otherwise its name."""
    if model == STARTER:
        return str(STARTER_FOLDER)
    # A folder of this name wins over a model on the hub, whose name looks like a relative path.
    path = Path(model).expanduser()
    return str(path) if path.is_dir() else model


def parse_config(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, description: str = ""
) -> TrainConfig:
    """Make the configuration from flags, environment and ``--config``; ``--print_config`` prints it and exits."""
    arguments = [_normalise(argument) for argument in arguments]
    shown = TrainConfig.model_fields if _asks_for_all_help(arguments) else MOST_USED
    flags = vars(_build_parser(description, shown).parse_args(arguments))
    config_file, print_config = flags.pop("config"), flags.pop("print_config")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    environment = os.environ if environment is None else environment
    in_file = _read_config_file(config_file) if config_file else {}
    # The later source wins. Where each value came from is kept, so that an error can name the file
    # or the variable in which to correct it.
    for origin, source in (
        (str(config_file), in_file),
        ("environment", _read_environment(environment)),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ):
        values |= source
        origins |= dict.fromkeys(source, origin)
    if values.get("deepspeed_config") and values.get("strategy") == "deepspeed":
        # What such a file says of a flag's subject counts where the flag is not given. The ranks
        # have not met yet, but torchrun tells each of them how many there are.
        file = Path(values["deepspeed_config"])
        in_file = flags_of_file(file, int(environment.get("WORLD_SIZE", 1)))
        values = in_file | values
        origins = dict.fromkeys(in_file, f"--deepspeed_config {file}") | origins
    config = make_config(values, origins)
    if print_config:
        _print_with_remarks(config)
        raise SystemExit(0)
    return config


def _read_config_file(file: str) -> dict[str, Any]:
    what = f"--config {file}"
    values = {
        name: value
        for name, value in read_yaml(Path(file), what).items()
        if not _is_of_earlier_version(name, value)
    }
    check_fields(values, what)
    return values


def _print_with_remarks(config: TrainConfig) -> None:
    # A field that the recipe chooses stands there as a comment. Written out, its default would
    # count as given when somebody starts a run from this file.
    for line in config.to_yaml().splitlines():
        name = line.partition(":")[0]
        is_open = name in CHOSEN and not config.gives(name)
        print(f"# {line}  # unset: chosen from the rows" if is_open else line)


def _asks_for_all_help(arguments: Sequence[str]) -> bool:
    return "--help=all" in arguments or any(
        pair in (("--help", "all"), ("-h", "all")) for pair in pairwise(arguments)
    )


class _Help(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _: Any, value: Any, flag: str | None = None
    ) -> None:
        if value not in (None, "all"):
            raise UserError(f"{flag} {value}: must be all, or nothing", code="usage")
        parser.print_help()
        parser.exit()


def _build_parser(description: str, shown: Collection[str]) -> OneLineParser:
    """A parser of all flags, whose help has those that are ``shown``."""
    more = len(TrainConfig.model_fields) - len(shown)
    parser = OneLineParser(
        usage="%(prog)s [flags]",
        description=description,
        epilog=f"{EXAMPLES}\n\n--help all shows {more} more flags." if more else "",
        add_help=False,
    )
    parser.add_argument(
        "-h", "--help", nargs="?", metavar="all", action=_Help, help="show help and exit"
    )
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="read fields from a file; flags win over it"
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print the configuration as YAML and exit"
    )
    groups: dict[str, Any] = {}
    for name, field in TrainConfig.model_fields.items():
        title = field.json_schema_extra["group"]
        group = (
            groups.setdefault(title, parser.add_argument_group(title))
            if title not in groups
            else groups[title]
        )
        add_flag(group, name, is_shown=name in shown)
    return parser


def add_flag(parser: Any, name: str, *, is_shown: bool = True) -> None:
    """Add the flag of a field to a parser or a group of one; without it the value is None."""
    field = TrainConfig.model_fields[name]
    help_text = _help_text(field) if is_shown else argparse.SUPPRESS
    # Without a type: argparse leaves flags as text, so pydantic reads flags, variables and files
    # alike, and says the same about the same mistake.
    parser.add_argument(flag_of(name), dest=name, help=help_text, **_argument_form(field))


def _argument_form(field: FieldInfo) -> dict[str, Any]:
    # `--compile` alone switches on; `--compile false` switches off what a file has switched on.
    if field.annotation is bool:
        return {"nargs": "?", "const": "true", "metavar": "true|false"}
    choices = "|".join(
        get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    )
    # Words that do not fit into a line are in the help text.
    if len(choices) > LONGEST_CHOICES:
        return {"metavar": "NAME"}
    return {
        "metavar": choices
        or {
            int: "N",
            BATCH_SIZE: "N|auto",
            str: "TEXT",
            tuple[float, float]: "X,X",
            Path: "PATH",
            Path | None: "PATH",
        }.get(field.annotation, "X")
    }


def _help_text(field: FieldInfo) -> str:
    default = "" if field.default is None else f" (default: {str(field.default).lower()})"
    if isinstance(field.default, tuple):
        default = f" (default: {','.join(map(str, field.default))})"
    if isinstance(field.default, Path | str):
        default = f" (default: {field.default})" if str(field.default) else ""
    # A percent sign would begin one of argparse's own placeholders.
    return f"{field.description}{default}".replace("%", "%%")


def _normalise(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    # Hyphens are underscores to us. Unknown flags are refused here and not by argparse, because the
    # names that other trainers use for ours are known here.
    name, equals, value = argument.partition("=")
    name = "--" + name[2:].replace("-", "_")
    known = ["--config", "--print_config", "--help", *map(flag_of, TrainConfig.model_fields)]
    if name not in known:
        hint = _hint(name[2:], [flag[2:] for flag in known], "--{}".format)
        raise UserError(f"{argument}: no such flag{hint or ' (see --help)'}", code="flag-unknown")
    return name + equals + value


def _hint(name: str, known: Iterable[str], written: Callable[[str], str]) -> str:
    """What to use instead of a name that is no field, for the end of an error message."""
    if name in NOT_FLAGS:
        return f"; {NOT_FLAGS[name]}"
    near = [OTHER_NAMES[name]] if name in OTHER_NAMES else near_names(name, known)
    return f"; did you mean {' or '.join(map(written, near))}?" if near else ""


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The keys of a YAML file with their values; ``what`` names the file in errors, such as ``--config run.yaml``."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}", code="config-unreadable") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"{what}: not valid YAML: {' '.join(str(error).split())}", code="config-unreadable"
        ) from error
    if not isinstance(values, dict):
        raise UserError(
            f"{what}: must hold fields with values, such as `epochs: 3`", code="config-unreadable"
        )
    # YAML 1.1 reads 2e-5 as text; pydantic then reads the text as the number that was meant.
    return values


def _is_of_earlier_version(name: str, value: Any) -> bool:
    """Whether a run of an earlier version wrote this field into its config.yaml, and a run without it is the same."""
    # A run with another epsilon was another run. Its field is refused, where the others are
    # dropped.
    return name in FORMER_FIELDS and (name != "epsilon" or str(value) in ("1e-8", str(EPSILON)))


def check_fields(names: Iterable[str], what: str) -> None:
    """Refuse names that are no fields of the configuration; ``what`` says where they stand."""
    for name in names:
        if name not in TrainConfig.model_fields:
            hint = _hint(str(name), TrainConfig.model_fields, repr)
            raise UserError(f"{what}: no field {name!r}{hint}", code="flag-unknown")


def _read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    values = {}
    for variable, value in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name not in TrainConfig.model_fields:
                hint = _hint(name, TrainConfig.model_fields, repr)
                raise UserError(
                    f"environment variable {variable}: no such field{hint}", code="flag-unknown"
                )
            values[name] = value
    return values


def make_config(values: Mapping[str, Any], origins: Mapping[str, str]) -> TrainConfig:
    """The configuration of these values; ``origins`` says of each where it comes from: flag, environment or a file."""
    return TrainConfig.model_validate(values, context=origins)


def _describe(problem: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    if not problem["loc"]:  # of several fields: the message names their flags
        return invalid_value(problem)
    name = str(problem["loc"][0])
    origin = origins.get(name, "flag")
    where = {"flag": flag_of(name), "environment": f"{ENVIRONMENT_PREFIX}{name.upper()}"}.get(
        origin, f"{origin}: {name}"
    )
    return f"{where} {problem['input']}: {invalid_value(problem)}{_hint_of_value(name, problem)}"


def _hint_of_value(name: str, problem: Mapping[str, Any]) -> str:
    """Which of a field's words was meant."""
    if problem["type"] != "literal_error":
        return ""
    # Case and hyphens aside, since what is meant by BF16 or full-shard is plain.
    value = str(problem["input"]).lower().replace("-", "_")
    choices = get_args(TrainConfig.model_fields[name].annotation)
    near = (
        [OTHER_VALUES[name][value]]
        if value in OTHER_VALUES.get(name, ())
        else near_names(value, choices)
    )
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
