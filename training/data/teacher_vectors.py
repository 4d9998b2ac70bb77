"""The vectors that a larger encoder gives texts: the targets of ``--task embedding``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common.encoders import max_positions
from common.errors import UserError
from common.files import sha256_of
from common.model_folder import WEIGHTS_FILE
from common.text import VERSION, Text, TextTokenizer, cleaner
from training.data.array_file import ArrayFile, write_arrays
from training.data.dataset import Rows, TextData
from training.data.kept import digest_of, kept, measured
from training.data.stored_texts import JoinedTexts
from training.data.tokenized import (
    Copies,
    TokenizedData,
    TokenizedRows,
    check_vocabulary,
    load_from,
)
from training.model.pooling import FIRST, POOLER, trained_pooling
from training.model.precision import autocast, why_not_in_half
from training.model.weights import read_network

BATCH_TOKENS = 8192
TEXTS_AT_ONCE = 20_000  # sorted by length


def with_copies(data: TextData, copies: Copies, cleaning: str) -> TextData:
    """``data`` with the rough copies of training rows, which get vectors of their own."""
    numbers, rough = copies.of(data, cleaner(cleaning))
    if not len(numbers):
        return data
    return replace(data, train=Rows(JoinedTexts(data.train.texts, rough), data.train.labels))


@dataclass(frozen=True)
class VectorTeacher:
    """An encoder, named by its folder, how it reads texts, and how it is computed."""

    name: str
    cleaning: str
    max_length: int
    device: torch.device
    precision: str

    @property
    def folder(self) -> Path:
        return Path(self.name).expanduser()


def vectors_file(cache: Path, data: TextData, teacher: VectorTeacher) -> Path:
    """Where the vectors of these texts by this teacher are kept, for students of any vocabulary.

    Raises:
        UserError: the teacher is not a folder with weights and a tokenizer.
    """
    pieces: list[Iterable[str]] = [[f"{VERSION} {teacher.cleaning} {teacher.max_length}"]]
    for name in ("config.json", WEIGHTS_FILE, "tokenizer.json"):
        if not (teacher.folder / name).is_file():
            raise UserError(
                f"--distill {teacher.name}: has no {name}; give the folder of an encoder",
                code="model-not-found",
            )
        pieces.append([sha256_of(teacher.folder / name)])
    for split, rows in data.splits.items():
        pieces += [[split], measured(rows.texts)]
    return cache / f"vectors-{digest_of(chain.from_iterable(pieces))}.safetensors"


def write_vectors(
    file: Path, teacher: VectorTeacher, data: TextData, say: Callable[[str], None]
) -> None:
    """Ask the teacher for all texts, unless an undamaged file has its answers.

    Raises:
        UserError: the teacher cannot be loaded, or the file cannot be written.
    """

    def make(damage: str) -> None:
        encoder = _Encoder.load(teacher, say)
        done, total = 0, sum(len(rows.texts) for rows in data.splits.values())
        arrays = {}
        for split, rows in data.splits.items():
            arrays[split] = np.zeros((len(rows.texts), encoder.width), np.float32)
            for start in range(0, len(rows.texts), TEXTS_AT_ONCE):
                some = encoder.vectors(rows.texts[start : start + TEXTS_AT_ONCE])
                arrays[split][start : start + len(some)] = some
                done += len(some)
                say(f"{teacher.name} has read {done:,} of {total:,} texts")
        write_arrays(file, arrays, {"teacher": teacher.name})

    kept(file, make)


@dataclass(frozen=True)
class _Encoder:
    """``reads_first``: a text's vector is that of its first token, and not the mean of all."""

    network: torch.nn.Module
    tokenizer: TextTokenizer
    reads_first: bool
    device: torch.device
    precision: str

    @classmethod
    def load(cls, teacher: VectorTeacher, say: Callable[[str], None]) -> _Encoder:
        from transformers import AutoModel

        asked, device, precision = f"--distill {teacher.name}", teacher.device, teacher.precision
        read = partial(read_network, AutoModel, str(teacher.folder), asked)
        reading, notes = load_from(teacher.name, read, say, "--distill")
        for note in notes:
            say(note)
        network = reading.network.eval().to(device)
        probe = torch.zeros((1, 1), dtype=torch.int64, device=device)
        # Some encoders overflow in half precision, and a teacher's NaN would become every target.
        if precision != "fp32" and why_not_in_half(
            device.type, lambda: network(input_ids=probe).last_hidden_state
        ):
            precision = "fp32"
        positions = max_positions(network.config.to_dict()) or teacher.max_length
        tokenizer = TextTokenizer.from_file(
            teacher.folder / "tokenizer.json", min(teacher.max_length, positions), teacher.cleaning
        )
        check_vocabulary(asked, tokenizer.highest_id, network.get_input_embeddings().num_embeddings)
        reads_first = trained_pooling(teacher.folder) in (FIRST, POOLER)
        return cls(network, tokenizer, reads_first, device, precision)

    @property
    def width(self) -> int:
        return self.network.config.hidden_size

    def vectors(self, texts: Sequence[Text]) -> np.ndarray:
        """Of length 1, float32, (texts, width)."""
        ids = [one.ids for one in self.tokenizer.encode(texts)]
        # Texts of similar length together need little padding. The longest come first, so that too
        # little memory shows at once and not after an hour.
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
        found = np.zeros((len(ids), self.width), np.float32)
        while order:
            size = max(1, BATCH_TOKENS // len(ids[order[0]]))
            batch, order = order[:size], order[size:]
            found[batch] = self._batch([ids[i] for i in batch])
        return found

    @torch.inference_mode()
    def _batch(self, rows: list[list[int]]) -> np.ndarray:
        ids = torch.full((len(rows), max(map(len, rows))), self.network.config.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        with autocast(self.precision, self.device):
            hidden = self.network(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        # (rows, seq, width) to (rows, width). The sum over the tokens is as good as their mean,
        # because only its direction is kept.
        pooled = hidden[:, 0] if self.reads_first else (hidden * mask[..., None]).sum(dim=1)
        return F.normalize(pooled, dim=1).cpu().numpy()


def with_vectors(tokens: TokenizedData, file: Path) -> TokenizedData:
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
