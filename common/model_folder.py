"""What a model on disk holds: a model folder, one .pt file, or an artefact folder with its
manifest.

Training writes the first two. An export writes an artefact: the same model for one engine, in its
own folder inside the model folder, with a manifest that says what it was made from and what was
measured.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from common.encoders import max_positions
from common.errors import ModelLoadError, first_line
from common.files import sha256_of, write_json
from common.problem_types import (
    DEFAULT_THRESHOLD,
    MULTI_LABEL,
    PROBLEM_TYPES,
    REGRESSION,
    SINGLE_LABEL,
    THRESHOLDS_KEY,
    ProblemType,
)
from common.text import CLEANINGS, PAIR_KEY, TextTokenizer, vocabulary_misfit
from common.tokenizer_files import (
    OPTIONAL_FILES,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    class_of,
    combined,
    is_built_by_its_class,
    without_unused_tokens,
)
from common.windows import Windows

WEIGHTS_FILE = "model.safetensors"
# Some models have their weights in this file of PyTorch instead.
OLD_WEIGHTS_FILE = "pytorch_model.bin"
METRICS_FILE = "metrics.json"
# Hashes of what training has read; it stays in the model folder.
SEEN_TEXTS_FILE = "seen_texts.bin"
# What training writes there.
METRICS_KEYS = {
    *("task", "dataset", "text_column", "label_column", "pair_column", "dataset_config"),
    *("dataset_revision", "train_split", "validation_split", "test_split", "seed", "bad_rows"),
    *("base_model", "max_length", "best_epoch", "created", "version", "train_rows"),
    *("distilled_from", "unlabelled_rows", "rows_left_out", "test", "test_precision"),
    *("validation", "baseline", "hints", "method", "fitted_head"),
    "examples",
}
# What a model folder has besides its weights; an artefact folder has a copy of each. Of the files
# of the tokenizer only the first is always there.
DESCRIPTION_FILES = ("config.json", TOKENIZER_FILE, SETTINGS_FILE, *OPTIONAL_FILES)
_NEEDED_FILES = ("config.json", TOKENIZER_FILE)
CHECKPOINT_KEYS: dict[str, type] = {"model_state_dict": dict, "config": dict}
CHECKPOINT_CONFIG_KEYS: dict[str, type] = {
    "labels": list,
    "max_length": int,
    "encoder_config": dict,
    "tokenizer_json": str,
}
# With these keys a config.json makes transformers run code from elsewhere: modules next to the
# model or on the hub, kernels from the hub, packages for quantised weights.
_CODE_KEYS = {
    *("auto_map", "custom_pipelines", "quantization_config", "trust_remote_code", "use_kernels"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
}
# Classes of transformers with another head than a classifier of texts: of tokens, spans, pairs,
# images and so on.
_OTHER_TASK = re.compile(r"For(?!.*SequenceClassification)[A-Z]")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
# The key of config.json in which training notes how texts were cleaned.
CLEANING_KEY = "text_cleaning"
# The .pt file holds the trainer's module, which keeps the classifier in an attribute of this name.
_TRAINER_PREFIX = "network."
MANIFEST_FILE = "manifest.json"
# Beside it, if the export had enough texts: the table of `common/familiarity.py`.
FAMILIARITY_FILE = "familiarity.bin"
# The artefact of a cascade's small model, inside that of the big one.
SMALL_FOLDER = "small"
MANIFEST_FORMAT = 1
# The precisions that each engine's artefact may have.
PRECISIONS = {"native": ("int8",), "openvino": ("int8",), "onnx": ("int8", "fp32")}
EXPORT_AGAIN = "write it again with python -m inference.export"
CERTIFY_AGAIN = "write it again: python -m inference.cascade"
_SAVE_AGAIN = "AutoModelForSequenceClassification.from_pretrained({0}).save_pretrained({0})"
_SAVE_TOKENIZER = "AutoTokenizer.from_pretrained({0}).save_pretrained({0})"
# The files from which transformers makes a tokenizer.json, and those that say how weights are
# spread over several.
_VOCABULARY_FILES = (
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)
_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MOST_NESTED = 100  # levels; the libraries that read or write JSON after us fail at some hundreds
_UNLIMITED = 1_000_000  # tokenizers that know no limit are saved with 1e30
_RIGHT_FILE = "give the .pt file that training wrote beside its model folder, or write it again"


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model on disk, before any of it is built."""

    path: Path  # the folder or file that was read
    config: dict[str, Any]  # the transformers config.json
    # A safetensors file, the state dict of a .pt file, None for an artefact.
    weights: Path | dict[str, Any] | None
    tokenizer_json: str
    labels: list[str]  # by class id
    max_length: int  # token ids per text, special tokens included
    metadata: dict[str, Any]  # metrics.json, empty if there is none

    @property
    def cleaning(self) -> str:
        """How texts are cleaned, in training and before every answer; one of `CLEANINGS`."""
        # Older models do not say. Training cleaned all texts as news then; a model from elsewhere
        # takes texts as is.
        written_here = (
            isinstance(self.weights, dict) or {"dataset", "max_length"} <= self.metadata.keys()
        )
        return self.config.get(CLEANING_KEY, "news" if written_here else "none")

    @property
    def problem_type(self) -> ProblemType:
        """What the model answers; without a word about it, one label."""
        return PROBLEM_TYPES[self.config.get("problem_type") or SINGLE_LABEL.name]

    @property
    def thresholds(self) -> list[float]:
        """The probability from which on each label applies, of a multi-label model."""
        return self.config.get(THRESHOLDS_KEY, [DEFAULT_THRESHOLD] * len(self.labels))

    @property
    def windows(self) -> Windows | None:
        """How long texts are cut into windows; None if the model reads only their beginning."""
        return Windows.of(self.config)

    @property
    def reads_pairs(self) -> bool:
        """Whether the model reads two texts together."""
        return PAIR_KEY in self.config

    def tokenizer(self) -> TextTokenizer:
        try:
            tokenizer = TextTokenizer.from_json(
                self.tokenizer_json,
                self.max_length,
                self.cleaning,
                self.windows,
                reads_pairs=self.reads_pairs,
            )
        except (TypeError, ValueError) as error:
            raise ModelLoadError(self.path, str(error).strip().splitlines()[0]) from error
        highest = tokenizer.highest_id
        num_embeddings = self.config.get("vocab_size", highest + 1)
        if type(num_embeddings) is not int:
            raise ModelLoadError(
                self.path,
                f"vocab_size {num_embeddings!r:.80} in config.json: must be a whole number",
            )
        if what := vocabulary_misfit(highest, num_embeddings):
            raise ModelLoadError(
                self.path, what, "use the tokenizer and the model of the same training run"
            )
        return tokenizer


def is_artefact(path: Path) -> bool:
    """Whether this is a folder that an export wrote, and not a model."""
    return (path / MANIFEST_FILE).is_file()


def artefact_folder(model: Path, engine: str) -> Path:
    """The folder of a model's artefact for an engine: ``MODEL/onnx``, ``X.onnx`` for ``X.pt``."""
    return model.with_suffix(f".{engine}") if model.is_file() else model / engine


def weights_file(model: Path) -> Path:
    if model.is_file():
        return model
    names = (WEIGHTS_FILE, OLD_WEIGHTS_FILE)
    return next((model / name for name in names if (model / name).is_file()), model / WEIGHTS_FILE)


def weights_sha256(model: Path) -> str:
    """The SHA-256 of the weights that training wrote.

    Raises:
        ModelLoadError: there are none.
    """
    if not (file := weights_file(model)).is_file():
        raise ModelLoadError(model, "no such model", "name a model folder or an artefact")
    return sha256_of(file)


def file_inside(folder: Path, name: str) -> Path:
    """A file of a model folder, which may be a link only to files of the same model.

    A link may lead into the folder itself, as Kubernetes mounts them (``config.json ->
    ..data/config.json``), and from a snapshot in the hub's cache into its ``blobs``. A link to
    anywhere else may have come with a downloaded model, and would publish a file of this machine.

    Raises:
        ModelLoadError: it leads elsewhere.
    """
    path = folder / name
    home, found = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
    if any(found.is_relative_to(root) for root in (home, *blobs)):
        return path
    raise ModelLoadError(
        path, f"is a link to {found}, outside of the model", "put the file itself into the folder"
    )


def read_saved_model(path: Path) -> SavedModel:
    """Read a model folder, a .pt file or an artefact folder.

    Raises:
        ModelLoadError: It does not exist, something is missing or damaged, or its answers would
            mean nothing.
    """
    try:
        if path.is_dir():
            return _checked(_read_folder(path))
        if path.is_file():
            return _checked(_read_checkpoint(path))
    # Many functions read config.json, and each relies on the types that transformers writes. One
    # message for all of them is less exact, but no file can cause a traceback.
    except RecursionError as error:
        raise ModelLoadError(path, f"its {TOKENIZER_FILE} is nested too deeply") from error
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        what = f"a value in its config.json is of the wrong type ({first_line(error)})"
        raise ModelLoadError(path, what) from error
    raise ModelLoadError(
        path,
        "no such model",
        "train one (python -m training.train_single) or set MODEL_CHECKPOINT to a model folder or "
        ".pt file",
    )


def _read_folder(folder: Path) -> SavedModel:
    weights = None if is_artefact(folder) else weights_file(folder)
    _refuse_incomplete(folder, weights)
    # Before anything is read: in a downloaded folder, a link may lead to any file of this machine.
    for name in filter(None, (*DESCRIPTION_FILES, METRICS_FILE, weights and weights.name)):
        file_inside(folder, name)
    config = without_code(_read_json(folder / "config.json"))
    labels = _labels(folder / "config.json", config)
    metrics = folder / METRICS_FILE
    return SavedModel(
        path=folder,
        config={
            **config,
            "id2label": {str(class_id): label for class_id, label in enumerate(labels)},
        },
        weights=weights,
        tokenizer_json=read_tokenizer(folder, config),
        labels=labels,
        max_length=_max_length(folder / SETTINGS_FILE, config),
        metadata=_read_json(metrics) if metrics.is_file() else {},
    )


def _refuse_incomplete(folder: Path, weights: Path | None) -> None:
    """Name what a model folder lacks, and what would make it complete."""
    needed = (*_NEEDED_FILES, *([weights.name] if weights else []))
    missing = sorted(name for name in needed if not (folder / name).is_file())
    has = {path.name for path in folder.iterdir()}
    if TOKENIZER_FILE in missing and has.intersection(_VOCABULARY_FILES):
        missing.remove(TOKENIZER_FILE)  # it can be made
    if missing:
        what, remedy = _how_to_complete(folder, has, missing)
        lacks = f"not a complete model folder, it lacks {', '.join(missing)}"
        raise ModelLoadError(folder, lacks + what, remedy)


def _how_to_complete(folder: Path, has: set[str], missing: list[str]) -> tuple[str, str]:
    """What else to say of missing files, and what to do."""
    if (snapshots := folder / "snapshots").is_dir():
        models = [one for one in sorted(snapshots.iterdir()) if (one / "config.json").is_file()]
        return "", f"give the folder of the model in it: {(models or [snapshots])[0]}"
    if missing == [WEIGHTS_FILE] and (sharded := has.intersection(_SHARDED)):
        save = _SAVE_AGAIN.format(repr(str(folder)))
        what = f" (the weights are in several files, named in {min(sharded)})"
        return what, f"write them into one with transformers: {save}"
    if missing == [TOKENIZER_FILE]:
        save = _SAVE_TOKENIZER.format("NAME")
        return "", f"copy it from the model that this one was trained from, or write it: {save}"
    return "", ""


def read_tokenizer(folder: Path, config: dict[str, Any]) -> str:
    """The tokenizer of a model folder as one tokenizer.json, with what its other files say.

    Raises:
        ModelLoadError: they contradict each other, or there is no tokenizer.
    """
    files = {
        name: _read_json(folder / name)
        for name in DESCRIPTION_FILES[2:]
        if (folder / name).is_file()
    }
    settings = files.get(SETTINGS_FILE, {})
    try:
        text = _read_text(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).is_file() else ""
        # An artefact has the tokenizer as it was when it was exported.
        if not text or (not is_artefact(folder) and is_built_by_its_class(text, settings, config)):
            text, settings = _made_by_transformers(folder, text, settings, config)
            files = {SETTINGS_FILE: settings}
        return combined(text, files, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # A plain ValueError is our own and says what is wrong; its subclasses come from elsewhere.
        what = f"the files of the tokenizer are damaged ({error!r})"
        what = str(error) if type(error) is ValueError else what
        remedy = "write them from the tokenizer that the model was trained with: "
        raise ModelLoadError(folder, what, remedy + _SAVE_TOKENIZER.format("NAME")) from error


def _made_by_transformers(
    folder: Path, text: str, settings: dict[str, Any], config: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The tokenizer that transformers makes of a vocabulary, or of a tokenizer.json of which it
    takes only parts.

    Returns:
        A whole tokenizer.json, and the settings that it cannot contain.
    """
    try:
        # Here, because a server with an exported model has no transformers, nor needs it.
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        made_text = made.backend_tokenizer.to_str()
    # No transformers, a vocabulary that it cannot read, or a tokenizer in Python.
    except Exception as error:
        why, save = first_line(error), _SAVE_TOKENIZER.format(repr(str(folder)))
        what = f"it lacks {TOKENIZER_FILE}, and it cannot be made from its vocabulary here ({why})"
        if text:
            name = class_of(settings, config) or f"the class for {config['model_type']}"
            file = SETTINGS_FILE if name in settings.values() else "config.json"
            what = f"{file} and {TOKENIZER_FILE} disagree: {name} builds its tokenizer in its own "
            what += f"way, and that failed here ({why})"
        remedy = f"write it where transformers is installed: {save}"
        raise ModelLoadError(folder, what, remedy) from error
    if text:
        _refuse_another_kind(text, made_text, made.__class__.__name__, settings)
    if num_weights := config.get("vocab_size"):
        made_text = without_unused_tokens(made_text, text or made_text, num_weights)
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", "truncation_side": made.truncation_side}
    return made_text, whole | {"split_special_tokens": made.split_special_tokens}


def _refuse_another_kind(
    text: str, made_text: str, class_name: str, settings: dict[str, Any]
) -> None:
    before, after = (json.loads(one)["model"].get("type") for one in (text, made_text))
    if before and before != after:
        what = f"its vocabulary is that of {before}, and {class_name} reads it as that of {after}"
        if not settings.get("tokenizer_class"):
            what += (
                f' (if {TOKENIZER_FILE} is right, add "tokenizer_class": '
                f'"PreTrainedTokenizerFast" to {SETTINGS_FILE})'
            )
        raise ValueError(f"{SETTINGS_FILE} and {TOKENIZER_FILE} disagree: {what}")


def without_code(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys, at any depth, that make transformers run code from elsewhere."""
    return {
        key: without_code(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _CODE_KEYS
    }


# A fault that a model may have: whether it has it, what is wrong, and what to do.
_Fault = tuple[Any, str, str]


def _refuse(path: Path, faults: Iterable[_Fault]) -> None:
    """Refuse a model for its first fault."""
    for is_there, what, remedy in faults:
        if is_there:
            raise ModelLoadError(path, what, remedy)


def _labels(path: Path, config: dict[str, Any]) -> list[str]:
    _refuse(path.parent, _faults_of_kind(path.parent, config))
    if "id2label" not in config:
        # transformers leaves its own default names out, and two is its default number of labels.
        return [f"LABEL_{i}" for i in range(config.get("num_labels", 2))]
    names = config["id2label"]
    if not isinstance(names, dict) or sorted(names) != sorted(str(i) for i in range(len(names))):
        raise ModelLoadError(
            path, f"id2label must name the classes 0, 1, 2 and so on, got {names!r}"
        )
    return [str(names[str(i)]) for i in range(len(names))]


def _faults_of_kind(folder: Path, config: dict[str, Any]) -> Iterator[_Fault]:
    """Whether the network has another head than a classifier of texts, or none."""
    kinds = [str(name) for name in config.get("architectures") or []]
    train = f"python -m training.train_single --model {folder}"
    classifies = any("Classif" in name for name in kinds)
    is_language_model = any(name.endswith(_LANGUAGE_MODELS) for name in kinds)
    yield (
        is_language_model and not classifies,
        "a language model, which does not label texts",
        f"train it to classify: {train}",
    )
    has_classes = classifies or "id2label" in config
    yield not has_classes, "an encoder without classes", f"train it: {train}"
    other = next((name for name in kinds if _OTHER_TASK.search(name)), None)
    yield (
        other,
        f"a {other}, which does not give a whole text one answer",
        f"serve a ...ForSequenceClassification, or train one: {train}",
    )


def _max_length(path: Path, config: dict[str, Any]) -> int:
    """Where the tokenizer cuts a text, else the number of positions that the model has."""
    named = _read_json(path).get("model_max_length") if path.is_file() else None
    try:
        number = float(named) if named is not None and not isinstance(named, bool) else float("inf")
    except (OverflowError, TypeError, ValueError):
        number = 0.5  # no whole number, so it is refused below
    if number != float("inf") and number != int(number):
        what = f"model_max_length must be a number of tokens, got {named!r}"
        raise ModelLoadError(path, what, "set it to the number of tokens that a text may have")
    return _within_positions(path.parent, number, config)


def _within_positions(path: Path, max_length: float, config: dict[str, Any]) -> int:
    max_length = min(max_length, max_positions(config) or max_length)
    if max_length > _UNLIMITED:
        what = f"model_max_length {max_length:g}: no limit, and config.json has no "
        what += "max_position_embeddings"
        raise ModelLoadError(
            path, what, f"set it in {SETTINGS_FILE} to the number of tokens that a text may have"
        )
    return int(max_length)


def _checked(saved: SavedModel) -> SavedModel:
    _refuse(saved.path, _faults(saved))
    return saved


def _faults(saved: SavedModel) -> Iterator[_Fault]:
    """One after the other, because each relies on the model not having those before it."""
    own = saved.config.get("own_network")
    yield (
        own,
        f"holds a network of your own ({own}), and code that a model folder names is never run",
        "load its model.safetensors into the network yourself",
    )
    # What the scores mean depends on it, so a guess would be silently wrong.
    named = saved.config.get("problem_type")
    yield (
        named is not None and named not in PROBLEM_TYPES,
        f"problem_type {named!r} in config.json: must be one of {', '.join(PROBLEM_TYPES)}",
        "set it to what the model was trained for",
    )
    is_regression, count = saved.problem_type is REGRESSION, len(saved.labels)
    yield (
        is_regression and count != 1,
        f"a regression model with {count} outputs: only one number per text is supported",
        "train it with one output",
    )
    yield (
        not is_regression and count < 2,
        "a model with one label gives every text the same answer",
        "train it with two labels or more; if it answers with a number, set problem_type to "
        "regression in config.json",
    )
    if saved.problem_type is MULTI_LABEL:
        yield from _faults_of_thresholds(saved)
    yield from _faults_of_windows(saved)
    separator = saved.config.get(PAIR_KEY, 0)
    yield (
        type(separator) is not int or separator < 0,
        f"{PAIR_KEY} {separator!r} in config.json: must be the id of the token between two texts",
        "copy config.json from the training run again",
    )
    yield from _faults_of_names(saved.labels)
    yield (
        saved.cleaning not in CLEANINGS,
        f"{CLEANING_KEY} {saved.cleaning!r} in config.json: must be {' or '.join(CLEANINGS)}",
        "set it to how the training texts were cleaned",
    )


def _faults_of_names(labels: list[str]) -> Iterator[_Fault]:
    twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
    remedy = "give each class its own name in id2label of config.json"
    yield twice is not None, f"two classes are named {twice!r}", remedy
    half = next((label for label in labels if any(map(_is_surrogate, label))), None)
    what = f"the label {half!r} contains half of a surrogate pair, which no file and no answer can "
    what += "carry"
    yield half is not None, what, "correct id2label in config.json"


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _faults_of_windows(saved: SavedModel) -> Iterator[_Fault]:
    remedy = "copy config.json and tokenizer_config.json from the training run again"
    try:
        windows = saved.windows
    except ValueError as error:
        raise ModelLoadError(saved.path, f"{error} (in config.json)", remedy) from error
    what = (
        "windows of pairs of texts in config.json, but only windows of single texts are supported"
    )
    yield windows and saved.reads_pairs, what, remedy
    length = windows.length if windows else saved.max_length
    what = (
        f"windows of {length} tokens in config.json, but a model_max_length of {saved.max_length}"
    )
    yield length != saved.max_length, what, remedy


def _faults_of_thresholds(saved: SavedModel) -> Iterator[_Fault]:
    found, where = saved.thresholds, f"{THRESHOLDS_KEY} in config.json"
    remedy = "remove it to answer with every label whose probability is at least 0.5"
    is_list = isinstance(found, list) and len(found) == len(saved.labels)
    what = f"{where} must be a list of {len(saved.labels)} numbers, one per label"
    yield not is_list, what, remedy
    for one in found:
        is_wrong = not isinstance(one, int | float) or not 0 <= one <= 1
        yield is_wrong, f"{where} has {one!r}: must be probabilities, 0 to 1", remedy


def _read_checkpoint(path: Path) -> SavedModel:
    checkpoint = _load_tensors(path)
    if not isinstance(checkpoint, dict):
        what = f"holds a {type(checkpoint).__name__}, not a dict with {', '.join(CHECKPOINT_KEYS)}"
        raise ModelLoadError(path, what, _RIGHT_FILE)
    _check_keys(path, "", checkpoint, CHECKPOINT_KEYS)
    config = checkpoint["config"]
    _check_keys(path, "config.", config, CHECKPOINT_CONFIG_KEYS)
    encoder_config = without_code(config["encoder_config"])
    state_dict = checkpoint["model_state_dict"]
    return SavedModel(
        path=path,
        config=encoder_config,
        weights={name.removeprefix(_TRAINER_PREFIX): tensor for name, tensor in state_dict.items()},
        tokenizer_json=config["tokenizer_json"],
        labels=config["labels"],
        max_length=_within_positions(path, config["max_length"], encoder_config),
        metadata=config.get("metrics", {}),
    )


def _load_tensors(path: Path) -> Any:
    import torch  # a server with another engine need not have it

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # torch raises all kinds of errors, depending on which byte is damaged.
    except Exception as error:
        what = f"not a readable .pt file of tensors and plain values ({type(error).__name__})"
        raise ModelLoadError(path, what, _RIGHT_FILE) from error


def _check_keys(path: Path, prefix: str, found: dict[str, Any], wanted: dict[str, type]) -> None:
    missing = [prefix + key for key in wanted if key not in found]
    if missing:
        raise ModelLoadError(path, f"lacks {', '.join(missing)}", _RIGHT_FILE)
    for key, kind in wanted.items():
        if not isinstance(found[key], kind):
            what = f"{prefix}{key} must be of type {kind.__name__}, got {type(found[key]).__name__}"
            raise ModelLoadError(path, what, _RIGHT_FILE)


def _read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelLoadError(path, f"not valid JSON ({error})", remedy) from error
    except RecursionError as error:
        raise _too_deep(path, remedy) from error
    if not isinstance(content, dict):
        raise ModelLoadError(path, "is not a JSON object", remedy)
    if _is_too_deep(content):
        raise _too_deep(path, remedy)
    return content


def _too_deep(path: Path, remedy: str) -> ModelLoadError:
    return ModelLoadError(path, f"is nested more than {_MOST_NESTED} levels deep", remedy)


def _is_too_deep(content: dict[str, Any]) -> bool:
    # Level by level, because a recursion would itself fail on what is too deep.
    level: list[Any] = [content]
    for _ in range(_MOST_NESTED):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        values = itertools.chain.from_iterable(inside)
        level = [value for value in values if isinstance(value, dict | list)]
    return bool(level)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(path, f"cannot be read ({error})") from error


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of an artefact's ``manifest.json``, apart from the format number."""

    engine: str  # a key of PRECISIONS
    precision: str  # int8 or fp32
    created: str  # ISO 8601, UTC
    # `name` and `weights_sha256` of the model it was made from; also `bytes` and `modified_ns` of
    # the weights file, by which an unchanged file is recognised without hashing it, and of a model
    # folder `described`: the SHA-256 of each description file.
    source: dict[str, Any]
    # `sha256` and `bytes` of every other file in the folder, by name.
    files: dict[str, dict[str, Any]]
    versions: dict[str, str]  # of the packages that made it
    options: dict[str, Any]  # how it was made
    # Of the reference and the artefact on the same rows, and how often they disagree.
    accuracy: dict[str, Any]
    size: dict[str, int]  # `before_bytes` and `after_bytes` of the weights
    speed: dict[str, Any]  # texts per second of both, and the machine they were measured on
    # Texts with the reference's `probabilities` or `value`, and how much the artefact's may differ
    # when it is loaded (values in units of the accuracy's `spread`). Another processor may round
    # differently, but a kernel that computes wrong answers must not serve.
    probes: list[dict[str, Any]]
    probe_tolerance: float
    # What `common.calibration.fit` found on held-out rows, with their hash and date, and under
    # `familiarity` what `common.familiarity.fit` found. Older artefacts have none.
    calibration: dict[str, Any] = field(default_factory=dict)
    # Of those rows, as `inference.observing.reference` keeps them for a comparison with the texts of
    # a stream: of models that give one label only. Older artefacts have none.
    reference: dict[str, Any] = field(default_factory=dict)
    # Of a cascade, whose small model lies in the folder SMALL_FOLDER beside this manifest:
    # `threshold`, the least probability with which it answers; `stricter`, the thresholds after it;
    # `max_disagreement`, the promise; `small`, with the SHA-256 of its manifest; and what was
    # measured.
    cascade: dict[str, Any] = field(default_factory=dict)
    # What `python -m loop.verdict` found when it compared this artefact with the one before it, and
    # the SHA-256 of that record.
    verdict: dict[str, Any] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST_FILE, {"format": MANIFEST_FORMAT, **asdict(manifest)})


def read_manifest(folder: Path) -> Manifest:
    """Read an artefact's manifest."""
    path = folder / MANIFEST_FILE
    content = _read_json(file_inside(folder, MANIFEST_FILE), EXPORT_AGAIN)
    if (found := content.get("format")) != MANIFEST_FORMAT:
        raise ModelLoadError(
            path, f"format {found!r:.80}, this version reads format {MANIFEST_FORMAT}", EXPORT_AGAIN
        )
    # The types of the fields are strings here, because annotations are not evaluated.
    kinds = {"str": str, "float": float}
    values: dict[str, Any] = {}
    for one in fields(Manifest):
        kind = kinds.get(str(one.type), list if str(one.type).startswith("list") else dict)
        # later than the format
        optional = one.name in ("calibration", "reference", "cascade", "verdict")
        values[one.name] = content.get(one.name, {} if optional else None)
        if not isinstance(values[one.name], kind):
            raise ModelLoadError(path, f"{one.name} must be a {kind.__name__}", EXPORT_AGAIN)
    digest = values["source"].get("weights_sha256")
    # It becomes a part of tags and Dockerfiles, and a model's author may have written anything
    # here.
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ModelLoadError(
            path, f"source.weights_sha256 must be 64 hex digits, got {digest!r:.80}", EXPORT_AGAIN
        )
    return Manifest(**values)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Of the files only: an artefact in a folder inside has a manifest of its own."""
    return {
        path.name: {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != MANIFEST_FILE
    }


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare an artefact's files with its manifest, and look where links lead."""
    for path in folder.iterdir():  # a runtime may read more files than the manifest lists
        file_inside(folder, path.name)
    is_small = folder.name == SMALL_FOLDER and is_artefact(folder.parent)
    remedy = CERTIFY_AGAIN if manifest.cascade or is_small else EXPORT_AGAIN
    for name, wanted in manifest.files.items():
        # A path would have files compared, and later read, that are not in the folder.
        path = folder / name
        if Path(name).name != name:
            raise ModelLoadError(
                folder / MANIFEST_FILE, f"{name!r} is not a plain file name", remedy
            )
        if not file_inside(folder, name).is_file():
            raise ModelLoadError(path, "is missing", remedy)
        if sha256_of(path) != wanted.get("sha256"):
            what = "is not the file that was exported, its SHA-256 differs"
            raise ModelLoadError(path, what, remedy)


def describe_source(name: str, weights: Path, described: Iterable[str] = ()) -> dict[str, Any]:
    status = weights.stat()
    return {
        "name": name,
        "weights_sha256": sha256_of(weights),
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "described": {
            name: sha256_of(weights.parent / name)
            for name in described
            if (weights.parent / name).is_file()
        },
    }


def revision_of(folder: Path) -> str:
    """The revision under which a server shows this model folder or artefact.

    Raises:
        ModelLoadError: it is neither.
    """
    inside = (folder / engine for engine in PRECISIONS)
    found = next((one for one in (folder, *inside) if is_artefact(one)), None)
    if found is None:
        return weights_sha256(folder)[:12]
    manifest = read_manifest(found)
    if not manifest.cascade:
        return manifest.source["weights_sha256"][:12]
    return cascade_sha256(manifest, read_manifest(found / SMALL_FOLDER))[:12]


def is_from(manifest: Manifest, weights: Path) -> bool:
    """Whether an artefact was made from the weights that are now in this file."""
    status = weights.stat()
    if status.st_size != manifest.source.get("bytes"):
        return False
    # An unchanged file is not hashed again: hundreds of MB would slow a start by up to a second.
    untouched = status.st_mtime_ns == manifest.source.get("modified_ns")
    return untouched or sha256_of(weights) == manifest.source.get("weights_sha256")


def verified_manifest(folder: Path, model: Path | None) -> Manifest:
    """Read an artefact's manifest, and check its files and that it belongs to the model.

    Raises:
        ModelLoadError: A file is missing or has changed, or the artefact was made from other
            weights or another tokenizer than ``model`` has.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    if model is None:
        return manifest
    weights = weights_file(model)
    if weights.is_file() and not is_from(manifest, weights):
        raise ModelLoadError(
            folder, f"was made from other weights than {weights.name}", EXPORT_AGAIN
        )
    for name in DESCRIPTION_FILES:
        file = model / name  # not there if the model is a .pt file
        # A fetched folder of artefacts has a copy of what the artefact has, not of what the model
        # had.
        known = (
            manifest.source.get("described", {}).get(name),
            manifest.files.get(name, {}).get("sha256"),
        )
        if file.is_file() and sha256_of(file_inside(model, name)) not in known:
            raise ModelLoadError(folder, f"was made before {name} changed", EXPORT_AGAIN)
    return manifest


def small_artefact(folder: Path, manifest_sha256: Any) -> Path:
    """The small model of a cascade, which must be the one that it was certified with.

    Raises:
        ModelLoadError: It is missing, or its manifest is another one.
    """
    path = folder / SMALL_FOLDER
    if not is_artefact(path) or sha256_of(path / MANIFEST_FILE) != manifest_sha256:
        what = "is missing, or is not the small model that this cascade was certified with"
        raise ModelLoadError(path, what, CERTIFY_AGAIN)
    return path


def artefact_files(folder: str, manifest: Manifest) -> list[str]:
    """The files of an artefact, by their paths from where its folder is."""
    return [f"{folder}/{name}".lstrip("/") for name in sorted({*manifest.files, MANIFEST_FILE})]


def verified_cascade(folder: Path) -> dict[str, Manifest]:
    """Read both manifests of a cascade, and check the files of both models: by the folder in it,
    ``""`` for the big model and `SMALL_FOLDER` for the small one.

    Raises:
        ModelLoadError: A file is missing or has changed, or the models do not belong together.
    """
    big = verified_manifest(folder, None)
    small, threshold = big.cascade.get("small"), big.cascade.get("threshold")
    if not isinstance(small, dict) or not isinstance(threshold, int | float):
        raise ModelLoadError(folder / MANIFEST_FILE, "its cascade is damaged", CERTIFY_AGAIN)
    path = small_artefact(folder, small.get("manifest_sha256"))
    return {"": big, SMALL_FOLDER: verified_manifest(path, None)}


def cascade_sha256(big: Manifest, small: Manifest) -> str:
    """What names a cascade as the hash of its weights names a single model: it changes with the
    weights of either model, and with the threshold.
    """
    weights = (one.source["weights_sha256"][:12] for one in (big, small))
    parts = (*weights, str(float(big.cascade["threshold"])))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
