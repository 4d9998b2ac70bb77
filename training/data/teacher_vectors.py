"""The vectors that a larger encoder gives texts: the targets of ``--task embedding``, computed once and kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common.encoders import max_positions
from common.errors import UserError
from common.files import sha256_of
from common.model_folder import WEIGHTS_FILE
from common.text import VERSION, TextTokenizer, cleaner
from training.data.array_file import ArrayFile, find_damage, write_arrays
from training.data.dataset import NewsData, Rows
from training.data.stored_texts import JoinedTexts
from training.data.tokenized import (
    Copies,
    TokenizedNews,
    TokenizedRows,
    check_vocabulary,
    load_from,
)
from training.model.pooling import FIRST, POOLER, trained_pooling
from training.model.precision import autocast, why_not_in_half
from training.model.weights import read_network

BATCH_TOKENS = 8192
TEXTS_AT_ONCE = 20_000  # sorted by length


def with_copies(data: NewsData, copies: Copies, cleaning: str) -> NewsData:
    """``data`` with the rough copies of its training rows, for which the teacher has vectors of their own."""
    numbers, rough = copies.of(data, cleaner(cleaning))
    return (
        replace(data, train=Rows(JoinedTexts(data.train.texts, rough), data.train.labels))
        if len(numbers)
        else data
    )


def vectors_file(
    folder: Path, data: NewsData, teacher: str, cleaning: str, max_length: int
) -> Path:
    """Where the vectors of these texts by this teacher are kept, for students of any vocabulary.

    Raises:
        UserError: the teacher is not a folder with weights and a tokenizer.
    """
    place = Path(teacher).expanduser()
    digest = hashlib.sha256(f"{VERSION} {cleaning} {max_length}".encode())
    for name in ("config.json", WEIGHTS_FILE, "tokenizer.json"):
        if not (place / name).is_file():
            raise UserError(
                f"--distill {teacher}: has no {name}; give the folder of an encoder",
                code="model-not-found",
            )
        digest.update(sha256_of(place / name).encode())
    for split, rows in data.splits.items():
        digest.update(split.encode())
        for text in rows.texts:
            digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return folder / f"vectors-{digest.hexdigest()[:24]}.safetensors"


def write_vectors(
    file: Path,
    teacher: str,
    data: NewsData,
    cleaning: str,
    max_length: int,
    device: torch.device,
    precision: str,
    say: Callable[[str], None],
) -> None:
    """Ask the teacher for all texts, unless an undamaged file has its answers.

    Raises:
        UserError: the teacher cannot be loaded, or the file cannot be written.
    """
    from transformers import AutoModel

    if file.exists() and find_damage(file) is None:
        return
    place = Path(teacher).expanduser()
    asked = f"--distill {teacher}"
    reading, notes = load_from(
        teacher, lambda: read_network(AutoModel, str(place), asked), say, "--distill"
    )
    for note in notes:
        say(note)
    network = reading.network.eval().to(device)
    probe = torch.zeros((1, 1), dtype=torch.int64, device=device)
    if precision != "fp32" and why_not_in_half(
        device.type, lambda: network(input_ids=probe).last_hidden_state
    ):
        precision = "fp32"
    longest = min(max_length, max_positions(network.config.to_dict()) or max_length)
    tokenizer = TextTokenizer.from_file(place / "tokenizer.json", longest, cleaning)
    check_vocabulary(asked, tokenizer.highest_id, network.get_input_embeddings().num_embeddings)
    reads_first = trained_pooling(place) in (FIRST, POOLER)

    @torch.inference_mode()
    def vectors(rows: list[list[int]]) -> np.ndarray:
        length = max(map(len, rows))
        ids = torch.full((len(rows), length), network.config.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        ids, mask = ids.to(device), mask.to(device)
        with autocast(precision, device):
            hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        # The mean over the tokens, (rows, width), unless the teacher was trained to say it all in the first one.
        pooled = hidden[:, 0] if reads_first else (hidden * mask[..., None]).sum(dim=1)
        return F.normalize(pooled, dim=1).cpu().numpy()

    arrays, done, total = {}, 0, sum(len(rows.texts) for rows in data.splits.values())
    for split, rows in data.splits.items():
        found = np.zeros((len(rows.texts), network.config.hidden_size), np.float32)
        for start in range(0, len(rows.texts), TEXTS_AT_ONCE):
            ids = [one.ids for one in tokenizer.encode(rows.texts[start : start + TEXTS_AT_ONCE])]
            order = sorted(
                range(len(ids)), key=lambda i: len(ids[i]), reverse=True
            )  # too little memory shows at once
            while order:
                size = max(1, BATCH_TOKENS // len(ids[order[0]]))
                batch, order = order[:size], order[size:]
                found[start + np.array(batch)] = vectors([ids[i] for i in batch])
            done += len(ids)
            say(f"{teacher} has read {done:,} of {total:,} texts")
        arrays[split] = found
    try:
        write_arrays(file, arrays, {"teacher": teacher})
    except OSError as error:
        raise UserError(
            f"--cache_dir {file.parent}: cannot be written ({error.strerror})", code="not-writable"
        ) from error


def with_vectors(tokens: TokenizedNews, file: Path) -> TokenizedNews:
    """The same rows with the teacher's vectors as their targets, mapped from the file."""
    vectors = ArrayFile.open(file)

    def rows(split: str, old: TokenizedRows) -> TokenizedRows:
        return replace(old, labels=vectors[split])

    width = vectors["train"].shape[1]
    return replace(
        tokens,
        key=f"{tokens.key}-{file.stem}",
        label_names=[str(i) for i in range(width)],
        read_in_training=rows("train", tokens.read_in_training),
        test=rows("test", tokens.test),
        validation=tokens.validation and rows("validation", tokens.validation),
    )
