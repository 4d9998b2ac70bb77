"""The model folder and the one-file model: what training hands to serving."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import UserError, first_line
from common.files import (
    nearest_folder,
    remove_unfinished,
    write_json,
    writing_folder,
    writing_whole,
)
from common.model_folder import (
    CLEANING_KEY,
    METRICS_FILE,
    PRECISIONS,
    WEIGHTS_FILE,
    read_tokenizer,
)
from common.seen_texts import SeenTexts
from training.distributed.ranks import Ranks
from training.model.pooling import POOLER, POOLING_KEY
from training.publishing.model_card import model_card
from training.tasks import Classification, Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DEFAULT_LABELS = 2  # as transformers writes of a model without a head
# What a model folder holds, written here or by transformers; besides it, the folders of exports.
_OF_A_MODEL = re.compile(
    r"README\.md"
    r"|(config|generation_config|metrics|added_tokens|special_tokens_map)\.json"
    r"|(tokenizer|tokenizer_config|vocab)\.json|vocab\.txt|merges\.txt|chat_template\.jinja"
    r"|[\w.-]+\.model|seen_texts\.bin|model[\w-]*\.safetensors(\.index\.json)?"
)


def check_output(model_folder: Path) -> None:
    """Refuse an output folder that holds something other than a model, or that cannot be written.

    The finished model takes the place of the whole folder, and what else was in it would be gone.
    """
    for problem in _in_the_way(model_folder):
        raise UserError(f"--output_dir {model_folder}: {problem}", code="output-not-empty")
    # All is written beside the folder and renamed, so what counts is the folder above. It may not
    # exist either, so try where the first missing one would be created. A random name: runs that
    # start together must not remove each other's file.
    nearest = nearest_folder(model_folder.absolute().parent)
    try:
        NamedTemporaryFile(prefix=".distrinews-", dir=nearest).close()
    except OSError as error:
        raise UserError(
            f"--output_dir {model_folder}: {nearest} cannot be written ({error.strerror})",
            code="not-writable",
        ) from error


def _in_the_way(model_folder: Path) -> Iterator[str]:
    """What the finished model could not replace, or would remove."""
    if model_folder.is_file():
        yield "is a file; name a folder"
    of_a_run = ((".pt", Path.is_dir, "is no file"), (".run", Path.is_file, "is no folder"))
    for suffix, is_wrong, what in of_a_run:
        if is_wrong(beside := model_folder.with_name(model_folder.name + suffix)):
            yield f"{beside}, which the run would write, {what}; move it, or name another folder"
    entries = sorted(model_folder.iterdir()) if model_folder.is_dir() else []
    if entries and not (model_folder / "config.json").is_file():
        yield "holds files that are not a model; name a new or empty folder"
    for entry in entries:
        if not (entry.name in PRECISIONS if entry.is_dir() else _OF_A_MODEL.fullmatch(entry.name)):
            yield (
                f"holds {entry.name}, which the finished model would remove; move it, or "
                "name another folder"
            )


def check_shared(model_folder: Path, ranks: Ranks) -> None:
    """Refuse a run whose machines do not share the output folder.

    After a restart, rank 0 may be on another machine.
    """
    if ranks.world_size == ranks.local_world_size:
        return
    # Rank 0's nearest folder: another machine may have fewer of the folders above it.
    folder = ranks.broadcast(nearest_folder(model_folder.absolute().parent))

    def look(name: str) -> None:
        if not (folder / name).exists():
            raise UserError(
                f"--output_dir {model_folder}: {socket.gethostname()} does not see what rank 0 "
                f"writes to {folder}; name a folder that all machines share",
                code="folder-not-shared",
            )

    with ranks.probing(
        lambda name: (folder / name).touch(), lambda name: (folder / name).unlink()
    ) as probe:
        ranks.run_on_all_ranks(lambda: look(probe))


@dataclass(frozen=True)
class FinishedModel:
    """A trained model and what its folder tells about it.

    ``weights``: the whole state dict on the CPU. ``metrics`` becomes ``metrics.json``. ``settings``
    go into config.json, so that serving cleans and answers texts as training did. ``seen``: None
    for a language model, which is no classifier to be calibrated.
    """

    architecture: PreTrainedConfig
    weights: Mapping[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerBase
    metrics: dict[str, Any]
    settings: Mapping[str, Any]
    task: type[Task] = Classification
    seen: SeenTexts | None = None


def write_model(model: FinishedModel, model_folder: Path) -> None:
    """Write the model folder and, beside it, the same model as one ``.pt`` file.

    Each is complete or absent. The file is for serving, so a model without labels has none.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    remove_unfinished(model_folder)
    # Renamed last, with the .pt file already there: a reader sees the old model or the new one.
    with writing_folder(model_folder) as aside:
        with _system_errors():
            _write_network(model, aside)
            model.tokenizer.save_pretrained(aside)
        write_json(aside / METRICS_FILE, model.metrics)
        (aside / "README.md").write_text(
            model_card(model.metrics, model_folder.name, model.settings[CLEANING_KEY]),
            encoding="utf-8",
        )
        if model.seen:
            model.seen.write(aside)
        if model.task.has_labels:
            one_file = _one_file(model, aside)
            beside = model_folder.with_name(f"{model_folder.name}.pt")
            with writing_whole(beside) as file, _system_errors():
                torch.save(one_file, file)


def _write_network(model: FinishedModel, folder: Path) -> None:
    """Write config.json and the weights, under the names that transformers reads."""
    architecture, task = model.architecture, model.task
    whole = {
        name.removeprefix("network."): tensor.contiguous() for name, tensor in model.weights.items()
    }
    if hasattr(architecture, "own_network"):
        architecture.update(model.settings)
        architecture.save_pretrained(folder)
        save_file(whole, folder / WEIGHTS_FILE)
        return
    # The network is only needed for its names and its configuration, and on the meta device it
    # takes no memory. The one that was trained may lie in parts on many ranks.
    with torch.device("meta"):
        network = getattr(transformers, task.auto_class).from_config(
            architecture, dtype=torch.float32
        )
    network.config.update(model.settings)
    if not task.keeps_head:
        network.config.num_labels = DEFAULT_LABELS
    network.save_pretrained(folder, state_dict=whole)
    if not task.keeps_head:  # an encoder, which nobody should take for a classifier
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        about["architectures"] = [type(network.base_model).__name__]
        about[POOLING_KEY] = POOLER
        write_json(folder / "config.json", about)


def _one_file(model: FinishedModel, folder: Path) -> dict[str, Any]:
    """What the .pt file holds, complete in itself: architecture and tokenizer are JSON in it."""
    architecture, metrics = model.architecture, model.metrics
    labels = [architecture.id2label[i] for i in range(architecture.num_labels)]
    return {
        "epoch": metrics["best_epoch"],
        "model_state_dict": model.weights,
        "loss": metrics["test"].get("loss"),  # of a model without test rows
        "accuracy": metrics["test"].get("accuracy"),  # of a task that has one
        "config": {
            "model_name": metrics["base_model"],
            "num_labels": len(labels),
            "max_length": metrics["max_length"],
            "labels": labels,
            "encoder_config": json.loads((folder / "config.json").read_text(encoding="utf-8")),
            "tokenizer_json": read_tokenizer(folder, architecture.to_dict()),
            "metrics": metrics,
        },
    }


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """Turn what safetensors, tokenizers and torch each raise when a write fails into OSError."""
    try:
        yield
    except Exception as error:
        # torch.save hides a full disk behind an error of its own.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        # tokenizers has no class of its own: it raises Exception itself.
        if isinstance(error, SafetensorError) or type(error) is Exception:
            raise OSError(first_line(error)) from error
        raise
