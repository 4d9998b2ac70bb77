"""What every variant of a comparison trains: the same rows and random weights, and how much arithmetic that is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from benchmarks.harness import report
from common.errors import UserError
from common.rows import Columns
from common.text import TextTokenizer
from training.data.dataset import LoadOptions, TextData, load_data
from training.data.tokenized import (
    TokenizedRows,
    cache_key,
    load_tokenizer,
    read_tokens,
    write_tokens,
)
from training.facts import TINY
from training.tasks import TASKS, Classification

GLOBAL_BATCH = 64
MAX_LENGTH = 128
WARMUP_STEPS = 3
VOCABULARY = 30522
SEED = 42


@dataclass(frozen=True)
class Size:
    """The width and depth of a DistilBERT."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int

    def training_work(self, tokens: int, squares: int, rows: int = 0, vocabulary: int = 0) -> float:
        """Floating-point operations of the blocks' matrix products, forward and backward; see
        ``forward_work``.

        ``vocabulary``: of a language model, whose head multiplies too.
        """
        return 3.0 * (
            self.forward_work(tokens, squares, rows) + 2.0 * tokens * self.dim * vocabulary
        )

    def forward_work(self, tokens: int, squares: int, rows: int = 0) -> float:
        """Floating-point operations of the blocks' matrix products in a forward pass.

        Embeddings, head, normalisation and softmax are left out.

        Args:
            tokens: tokens that pass through the blocks.
            squares: the sum of their rows' squared lengths, for attention.
            rows: if above 0, the last block computes only keys and values for all tokens, and the
                rest for that many first tokens.
        """
        # A product of (tokens, a) with (a, b) is 2 * tokens * a * b operations. A block has four
        # projections (queries, keys, values, output), two products in the feed-forward, and two in
        # attention, which are quadratic in length.
        projection, feed_forward = 2 * self.dim**2, 4 * self.dim * self.hidden_dim
        block = tokens * (4 * projection + feed_forward) + 4 * self.dim * squares
        # Keys and values for all tokens; queries, output and feed-forward only for the first one of
        # each row.
        last = (
            2 * tokens * projection + rows * (2 * projection + feed_forward) + 4 * self.dim * tokens
        )
        return float((self.n_layers - 1) * block + (last if rows else block))


SIZES = {"minilm": Size(384, 1536, 6, 12), "base": Size(768, 3072, 6, 12)}


@dataclass(frozen=True)
class Workload:
    """Rows and weights in a folder, which parent and ranks read alike.

    ``timed``: the rows of the measured epoch; ``warmup``: other rows, for the steps before it.
    """

    folder: Path
    size: str
    dataset: str
    task: str
    label_names: list[str]
    global_batch: int
    timed: TokenizedRows
    warmup: TokenizedRows

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    @property
    def nominal_work(self) -> float:
        """Operations of the real tokens, with every block computed in full."""
        lengths = self.timed.lengths
        head = VOCABULARY if self.is_language_model else 0
        return SIZES[self.size].training_work(
            int(lengths.sum()), int((lengths**2).sum()), vocabulary=head
        )

    @property
    def is_language_model(self) -> bool:
        return TASKS[self.task].is_language_model


def make_workload(
    folder: Path,
    size: str,
    dataset: str,
    tokenizer: str,
    num_rows: int,
    task: str = Classification.name,
    global_batch: int = GLOBAL_BATCH,
) -> Workload:
    """Tokenise rows and write random weights into ``folder``.

    Args:
        size: a key of ``SIZES``.
        dataset: as for training: ``sample`` or a folder in AG News' layout.
        tokenizer: a folder, a ``tokenizer.json``, or ``tiny`` for one trained on the dataset.
        num_rows: rows of the timed epoch, repeated if the dataset has fewer.
        task: a key of ``TASKS``; with multi_label, each row has its one label of the dataset; of a
            language model, a row is a text, which its end token ends.
        global_batch: rows per step.

    Raises:
        UserError: no such data or tokenizer, or too few rows.
    """
    columns = Columns(label="") if TASKS[task].is_language_model else Columns()
    data = load_data(dataset, LoadOptions(columns=columns, task=TASKS[task]))
    found = read_tokenizer(tokenizer, data.train.texts)
    if len(found) > VOCABULARY:
        message = f"--tokenizer {tokenizer}: {len(found)} entries, but the models have {VOCABULARY}"
        raise UserError(message, code="benchmark-input")
    warmup_rows = WARMUP_STEPS * global_batch
    most = len(data.train) - warmup_rows
    if most < global_batch:
        message = (
            f"--dataset {dataset}: {len(data.train)} rows; at least {warmup_rows + global_batch} "
            "needed"
        )
        raise UserError(message, code="rows-too-few")
    if most < num_rows:
        report(f"{data.name}: {most} rows are timed repeatedly: the others are needed to warm up")
    # Drawn with a fixed seed, so that runs on different days time the same rows; warm-up rows come
    # from the other end.
    order = np.random.default_rng([SEED, 4]).permutation(len(data.train))
    timed, warmup = np.resize(order[:most], num_rows), order[most:]
    # A data set has training and test rows and nothing else, so the warm-up's rows take the test's
    # place.
    chosen = TextData(
        Path(data.name).name, data.label_names, data.train.take(timed), data.train.take(warmup)
    )
    # Tokens are written once, by the trainer's own code, and all variants read them: what differs
    # between them is the training and not how texts become numbers.
    written = found.backend_tokenizer.to_str()
    key = cache_key(chosen, written, MAX_LENGTH)
    write_tokens(
        folder, key, chosen, TextTokenizer.from_json(written, MAX_LENGTH), lambda text: None
    )
    found.save_pretrained(folder / "tokenizer")
    if TASKS[task].is_language_model:
        write_language_model(folder / "model", size)
    else:
        write_weights(folder / "model", size, len(data.label_names), TASKS[task].problem_type.name)
    about = {"size": size, "key": key, "task": task, "global_batch": global_batch}
    (folder / "workload.json").write_text(json.dumps(about))
    return read_workload(folder)


def read_workload(folder: Path) -> Workload:
    """Read what :func:`make_workload` wrote."""
    about = json.loads((folder / "workload.json").read_text())
    tokens = read_tokens(folder, about["key"])
    return Workload(
        folder,
        about["size"],
        tokens.name,
        about["task"],
        tokens.label_names,
        about["global_batch"],
        tokens.train,
        tokens.test,
    )


def read_tokenizer(tokenizer: str, texts: list[str]) -> PreTrainedTokenizerBase:
    """A tokenizer from a folder or a ``tokenizer.json``, or with ``tiny`` one trained on ``texts``.

    Raises:
        UserError: there is none.
    """
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if tokenizer == TINY:
        return load_tokenizer(TINY, texts, MAX_LENGTH)
    if not path.is_file():
        message = f"--tokenizer {tokenizer}: no folder with a tokenizer.json and no such file"
        raise UserError(message, code="benchmark-input")
    found = PreTrainedTokenizerFast(
        tokenizer_file=str(path), pad_token="[PAD]", model_max_length=MAX_LENGTH
    )
    # The collator pads; a file may bring padding of its own, to another length.
    found.backend_tokenizer.no_padding()
    found.backend_tokenizer.no_truncation()
    return found


def write_weights(
    folder: Path,
    size: str,
    num_labels: int,
    problem_type: str | None = None,
    vocabulary: int = VOCABULARY,
) -> None:
    """Write a DistilBERT of that size with random weights, always the same ones."""
    blocks = SIZES[size]
    config = DistilBertConfig(
        vocab_size=vocabulary,
        dim=blocks.dim,
        hidden_dim=blocks.hidden_dim,
        n_layers=blocks.n_layers,
        n_heads=blocks.n_heads,
        num_labels=num_labels,
        problem_type=problem_type,
    )
    transformers_logging.disable_progress_bar()
    torch.manual_seed(SEED)
    DistilBertForSequenceClassification(config).save_pretrained(folder)


def write_language_model(folder: Path, size: str) -> None:
    """Write a Llama of that size with random weights, always the same ones."""
    blocks = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=blocks.dim,
        # Of three matrices instead of two, so that a block multiplies as much as DistilBERT's.
        intermediate_size=blocks.hidden_dim * 2 // 3,
        num_hidden_layers=blocks.n_layers,
        num_attention_heads=blocks.n_heads,
        max_position_embeddings=512,
    )
    transformers_logging.disable_progress_bar()
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).save_pretrained(folder)
