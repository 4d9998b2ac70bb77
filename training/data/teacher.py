"""What a teacher answers to the training rows (``--distill``): computed once, by the engine.

The answers depend on the teacher and on the texts alone. So students of any tokenizer, length, seed
or number of blocks find them in ``--cache_dir``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common.commands import run_module
from common.errors import UserError
from common.escaping import some_of
from common.files import sha256_of, writing_whole
from common.model_folder import (
    DESCRIPTION_FILES,
    MANIFEST_FILE,
    PRECISIONS,
    SavedModel,
    artefact_folder,
    read_saved_model,
    weights_file,
)
from common.problem_types import REGRESSION, SINGLE_LABEL
from common.text import Text, counted, texts_in
from training.config import TrainConfig
from training.data.array_file import ArrayFile, write_arrays
from training.data.dataset import TextData
from training.data.kept import digest_of, kept, measured
from training.data.tokenized import TokenizedData
from training.distributed.ranks import Ranks
from training.tasks import TASKS

# Raise it whenever the same teacher may answer the same texts differently.
ANSWERS_VERSION = 1


@dataclass(frozen=True)
class TeacherAnswers:
    """The answers to some training rows: probabilities, or of a regression model the number.

    ``key`` identifies teachers and texts together. ``answers``: of each teacher, float32, (rows,
    labels), mapped from a file; ``rows``: the number of each row, ascending; ``orders``: of each
    teacher, at which place it has each label of the data. Rows from number ``num_labelled`` on have
    no label.
    """

    key: str
    answers: Sequence[np.ndarray]
    rows: np.ndarray
    orders: Sequence[np.ndarray]
    num_labelled: int

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The mean over the teachers: (rows, labels), in the order of the data's labels."""
        # The rows are ascending, so a search takes the place of a table as long as the data.
        positions = np.searchsorted(self.rows, rows)
        return np.mean(
            [
                answers[positions][:, order]
                for answers, order in zip(self.answers, self.orders, strict=True)
            ],
            axis=0,
        )

    def has_label(self, rows: np.ndarray) -> np.ndarray:
        return rows < self.num_labelled


def read_teachers(config: TrainConfig) -> dict[str, SavedModel]:
    """Read the models that ``--distill`` names.

    Raises:
        UserError: one is missing, or has another task.
    """
    return {name: _read_teacher(name, config) for name in config.teachers}


def _read_teacher(name: str, config: TrainConfig) -> SavedModel:
    path, task = Path(name).expanduser(), TASKS[config.task]
    if not path.exists():
        raise UserError(
            f"--distill {name}: no such model; name the folder of a model that was trained here",
            code="model-not-found",
        )
    saved = read_saved_model(path)
    if saved.problem_type is not task.problem_type or saved.reads_pairs is not bool(
        config.columns.pair
    ):
        texts = "pairs of texts" if saved.reads_pairs else "single texts"
        kind = f"a {saved.problem_type.name} model of {texts}"
        pair = f" --pair_column {config.columns.pair}" if config.columns.pair else ""
        raise UserError(
            f"--distill {name}: is {kind}, which does not answer what --task {config.task}{pair} "
            "asks",
            code="teacher-unlike",
        )
    return saved


def notes_on_teachers(config: TrainConfig, unlabelled: int) -> Iterator[str]:
    """What the report says about the teachers, and about rows that only they answer."""
    if config.is_distilled:
        names, share = ", ".join(config.teachers), f"{config.distill_share:.0%} of a row's loss"
        several = len(config.teachers) > 1
        whose = "mean answer of the teachers" if several else "answer of the teacher"
        more = f", and all of it for {counted(unlabelled, 'row')} without a label"
        yield f"Distilled from {names}: {share} comes from the {whose}{more if unlabelled else ''}."


def ask_teachers(
    config: TrainConfig,
    ranks: Ranks,
    texts: TextData | None,
    tokens: TokenizedData,
    train_index: np.ndarray,
    say: Callable[[str], None],
) -> TeacherAnswers:
    """The teachers' answers to the training rows; on each machine its first rank computes them.

    ``texts``: on the first rank of each machine.

    Raises:
        UserError: a teacher has other labels, does not answer a text, or cannot be run.
    """
    # All rows of the split are asked, because another seed trains on others, and the answers are
    # kept. With --max_train_rows only the chosen ones are.
    rows = train_index if config.max_train_rows else np.arange(len(tokens.train))

    def ask() -> list[tuple[str, list[int]]] | None:
        if texts is None:
            return None
        chosen = texts.train.take(rows).texts if len(rows) < len(texts.train) else texts.train.texts
        answered = []
        for name, saved in read_teachers(config).items():
            order = _places_of_labels(name, saved.labels, config, tokens.label_names)
            key = _key(saved.path, chosen)
            _compute(name, saved, chosen, _file(config, key), say)
            answered.append((key, order))
        return answered

    # All machines name their answers by the teacher's files. If the names differ, the teachers do,
    # and the mean gradient would have two targets.
    found = [one for one in ranks.gather(ranks.run_on_all_ranks(ask)) if one]
    if any(one != found[0] for one in found):
        raise UserError(
            f"--distill {config.distill}: is a different model on another machine; copy the same "
            "folder to all of them",
            code="teacher-unlike",
            quiet=not ranks.is_first,
        )
    keys, orders = zip(*found[0], strict=True)
    answers = [ArrayFile.open(_file(config, key))["answers"] for key in keys]
    return TeacherAnswers(
        "+".join(keys), answers, rows, [np.array(order) for order in orders], tokens.num_labelled
    )


def _places_of_labels(
    teacher: str, of_teacher: Sequence[str], config: TrainConfig, of_data: Sequence[str]
) -> list[int]:
    if TASKS[config.task].problem_type is REGRESSION:
        return [0]  # one number, whatever the column is called
    # The order may differ: columns are exchanged when answers are read.
    if sorted(of_teacher) != sorted(of_data):
        raise UserError(
            f"--distill {teacher}: its labels are {some_of(of_teacher)}, those of --dataset "
            f"{config.dataset} are {some_of(of_data)}; a teacher must answer with the same labels",
            code="teacher-unlike",
        )
    return [of_teacher.index(name) for name in of_data]


def _file(config: TrainConfig, key: str) -> Path:
    return config.cache_folder / f"teacher-{key}.safetensors"


def _key(teacher: Path, texts: Sequence[Text]) -> str:
    """A name for exactly this teacher and these texts."""
    # An exported artefact counts, because the engine prefers it.
    artefacts = [artefact_folder(teacher, engine) / MANIFEST_FILE for engine in PRECISIONS]
    inside = (
        [teacher / name for name in (*DESCRIPTION_FILES, MANIFEST_FILE)] if teacher.is_dir() else []
    )
    files = [*inside, weights_file(teacher), *artefacts]
    contents = (sha256_of(file) if file.is_file() else "-" for file in files)
    return digest_of(chain([str(ANSWERS_VERSION)], contents, measured(texts)))


def _compute(
    name: str, teacher: SavedModel, texts: Sequence[Text], file: Path, say: Callable[[str], None]
) -> None:
    """Write the answers to the file, unless it is there and undamaged."""
    what = f"--distill {name}"

    def make(damage: str) -> None:
        say(f"Asking {what} about {counted(len(texts), 'text')} ...")
        asked, answered = (file.with_suffix(f".{kind}.jsonl") for kind in ("texts", "answers"))
        with writing_whole(asked) as lines:
            for text in texts:
                row = dict(zip(("text", "text_pair"), texts_in(text), strict=False))
                lines.write(json.dumps(row).encode() + b"\n")
        flags = ["--model", str(teacher.path), "--bad_rows", "keep"]
        flags += ["--probabilities"] if teacher.problem_type is not REGRESSION else []
        # It keeps finished parts beside its output. So the next start continues one that was
        # interrupted, and machines that share the cache share the work.
        run_module("inference.score", [str(asked), str(answered), *flags], what, say, quiet=True)
        about = {"teacher": str(teacher.path), "labels": teacher.labels}
        write_arrays(file, {"answers": _read_answers(name, answered, teacher, len(texts))}, about)
        for left_over in (asked, answered, Path(f"{answered}.job.json")):
            left_over.unlink(missing_ok=True)

    if kept(file, make):
        say(
            f"The answers of {what} to {counted(len(texts), 'text')} are already known, from {file}"
        )


def _read_answers(name: str, path: Path, teacher: SavedModel, num_texts: int) -> np.ndarray:
    # One answer per line, in the order of the texts.
    answers = np.empty((num_texts, len(teacher.labels)), dtype=np.float32)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                reason = answer["error"].partition(": ")[2] or answer["error"]
                raise UserError(
                    f'--distill {name}: does not answer the training text "{answer["text"][:80]}" '
                    f"({reason}); remove that row from the data",
                    code="row-unusable",
                )
            by_label = answer.get("probabilities")
            answers[number] = (
                [by_label[label] for label in teacher.labels] if by_label else answer["value"]
            )
    if teacher.problem_type is SINGLE_LABEL:
        # They are written with six digits, so they do not quite add up to 1.
        answers /= answers.sum(axis=1, keepdims=True)
    return answers
