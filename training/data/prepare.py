"""Before the first step: texts, tokens, splits and the model, the same on every rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from torch import nn

from common.errors import UserError, first_line
from common.escaping import some_of
from common.files import write_json
from common.seen_texts import SeenTexts
from common.text import PAIR_KEY, TextTokenizer
from common.tokenizer_files import SETTINGS_FILE, combined
from common.windows import WINDOWS_KEY, Windows
from training.config import STARTER, STARTER_FOLDER, TrainConfig, model_place
from training.data.dataset import (
    SAMPLE,
    LoadOptions,
    TextData,
    cleaning_of_data,
    load_data,
    row_numbers,
    split_rows,
)
from training.data.duplicates import Repeats
from training.data.earlier import with_earlier_rows
from training.data.hub_access import cache_is_shared, download_once, hub_may_have
from training.data.kept import read_known, remembered, writing_to
from training.data.report import lines_of, measure_run
from training.data.source_cache import repeats_file, source_file
from training.data.stored_texts import ChosenTexts
from training.data.teacher import TeacherAnswers, ask_teachers
from training.data.teacher_vectors import (
    VectorTeacher,
    vectors_file,
    with_copies,
    with_vectors,
    write_vectors,
)
from training.data.token_check import check_tokens
from training.data.tokenized import (
    Blocks,
    Copies,
    TokenizedData,
    TokenizedRows,
    cache_key,
    check_model_name,
    load_from,
    load_tokenizer,
    make_tokenizer,
    read_texts,
    read_tokens,
    write_tokens,
)
from training.data.unlabelled import add_unlabelled, names_of_labels, rows_of_names
from training.distributed.ranks import Ranks
from training.facts import TINY
from training.model.classifier import (
    PROBE_PADDING,
    Loading,
    NewsClassifier,
    try_half_precision,
    try_unknown_family,
)
from training.model.layers import check_depths, freeze_layers
from training.model.lora import add_adapters
from training.model.own import NOTHING_OWN, Own
from training.model.precision import choose_precision
from training.model.window_attention import add_window_attention
from training.tasks import (
    TASKS,
    Embedding,
    LanguageModel,
    MaskedLanguageModel,
    Regression,
    Vocabulary,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_TO_TRY = 4
# Up to so many rows all are trained on, see run/recipe.py; unless a flag is given that needs
# validation rows.
FEW_ROWS = 1_000
NEED_VALIDATION = {"validation_fraction", "best_metric", "evaluate_every", "early_stopping"}
UNCUT = 2**31 - 1  # tokens


@dataclass(frozen=True)
class PreparedData:
    """Tokens, and which rows are used for training and for validation.

    ``train_index``: row numbers of the training split, ascending; ``validation_index``: of
    :attr:`validation_rows`.
    ``cleaning``: how texts were cleaned, ``data`` or ``none``. ``separator``: the id of the token
    between the texts of a pair; None if there are no pairs. ``vocabulary``: of a language model.
    ``texts`` and ``tokenizer`` are only on the first rank of each machine. ``teacher``: its answers
    to the training rows, with ``--distill``. ``figures``: of the data report, on the first rank.
    ``seen_before``: by the model that training begins with, on rank 0; None if it does not say so.
    """

    tokens: TokenizedData
    train_index: np.ndarray
    validation_index: np.ndarray
    cleaning: str
    texts: TextData | None
    tokenizer: PreTrainedTokenizerBase | None
    separator: int | None
    vocabulary: Vocabulary | None
    teacher: TeacherAnswers | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    seen_before: SeenTexts | None = None

    @property
    def validation_rows(self) -> TokenizedRows:
        return self.tokens.validation or self.tokens.train

    def cut(self, length: int) -> PreparedData:
        """The same rows with at most ``length`` tokens each."""
        tokens = self.tokens
        validation = tokens.validation and tokens.validation.cut(length)
        train, test = tokens.read_in_training.cut(length), tokens.test.cut(length)
        return replace(
            self, tokens=replace(tokens, read_in_training=train, test=test, validation=validation)
        )

    @cached_property
    def epoch_index(self) -> np.ndarray:
        """What an epoch reads: the training rows, and behind them the rough copies of some."""
        return self.tokens.read_in_training.with_copies(self.train_index)

    @property
    def labelled_index(self) -> np.ndarray:
        """The training rows that have a label."""
        return self.train_index[self.train_index < self.tokens.num_labelled]

    @property
    def num_unlabelled(self) -> int:
        return len(self.train_index) - len(self.labelled_index)

    def seen_texts(self) -> SeenTexts:
        """The texts that have shaped the model: of the training rows, without a label (also those
        that only the head has read), of the validation rows, which chose the best epoch, and those
        seen before. On rank 0, and not of a language model, whose rows are blocks.
        """
        train, tokens = self.texts.train, self.tokens
        unlabelled = np.arange(tokens.num_labelled, len(tokens.train))
        read = [ChosenTexts(train.texts, rows) for rows in (self.labelled_index, unlabelled)]
        validation = (self.texts.validation or train).texts
        read.append(ChosenTexts(validation, self.validation_index))
        return SeenTexts.of(chain.from_iterable(read), self.seen_before)


def settle_model(
    config: TrainConfig, ranks: Ranks, earlier: Mapping[str, Any], say: Callable[[str], None]
) -> TrainConfig:
    """The configuration with the model that a run without ``--model`` gets: what it ``earlier``
    with if it is resumed, the default one if it can be had, and otherwise the starter. A collective
    call.
    """
    # A model that the user names is never replaced, and a missing one is an error.
    if "model" in config.model_fields_set:
        return config

    def choose() -> str:
        if earlier:
            return earlier["config"]["model"]
        if (
            not STARTER_FOLDER.is_dir()
            or config.task_facts.needs_decoder
            or hub_may_have(config.model, config.model_revision)
        ):
            return config.model
        say(
            f"The hub cannot be reached and {config.model} is not in its cache: training --model "
            f"{STARTER} instead"
        )
        return STARTER

    model = ranks.from_first(choose)
    return config if model == config.model else config.model_copy(update={"model": model})


@dataclass(frozen=True)
class Found:
    """What the first rank of a machine found and wrote into the cache, for the other ranks.

    ``key``: of the tokens in the cache; ``cleaning``, ``separator`` and ``vocabulary``: as in
    :class:`PreparedData`; ``vectors``: the file of the teacher's vectors, for ``--task embedding``.
    """

    key: str
    cleaning: str
    separator: int | None
    vocabulary: Vocabulary | None
    vectors: Path | None


def prepare_data(
    config: TrainConfig, ranks: Ranks, say: Callable[[str], None], own: Own = NOTHING_OWN
) -> PreparedData:
    """Read and tokenize on the first rank of each machine; then every rank maps the tokens.

    Raises:
        UserError: the data or the tokenizer cannot be found or do not fit each other, or there are
            too few rows.
    """
    # Read now: at the end of the run, a damaged file would cost the time of training.
    seen_before = ranks.run_on_all_ranks(lambda: _seen_before(config) if ranks.is_first else None)
    asks_hub = not (_is_local(config.dataset) and _is_local(config.model))
    shared = ranks.any(asks_hub) and cache_is_shared(ranks)
    find = partial(_find, config, ranks, say, for_own_network=bool(own.network))
    found, texts, tokenizer = download_once(ranks, find, shared=shared)
    # Ranks that did not lead have found nothing. The key says what a file holds, so rank 0's is
    # right on all machines.
    found = ranks.broadcast(found)
    assert found is not None
    # Memory-mapped: all ranks of a machine share the same pages.
    tokens = read_tokens(config.cache_folder, found.key)
    if found.vectors:
        tokens = with_vectors(tokens, found.vectors)

    # What follows compares texts, which takes long: rank 0 does it, for all ranks.
    about_tokens = ranks.from_first(
        lambda: check_tokens(
            config, tokenizer.backend_tokenizer.to_str(), found.cleaning, texts, tokens
        )
    )
    dropped, about_dropped = _rows_to_drop(config, ranks, found.key, texts)
    kept = np.delete(row_numbers(len(tokens.train)), dropped)
    # Every rank splits by itself, and the seed makes it the same split everywhere.
    train, validation = ranks.run_on_all_ranks(
        lambda: _split(config, tokens, ranks.world_size, kept)
    )
    # Measured once per split: another seed or share of validation rows has a file of its own.
    report = repeats_file(config.cache_folder, found.key, config, f"report-{len(validation)}")
    measure = partial(_measure, config, texts, train[train < tokens.num_labelled], validation)
    figures = ranks.run_on_all_ranks(lambda: remembered(report, measure) if ranks.is_first else {})

    lines = [*about_tokens, *about_dropped]
    for line in [*lines, *lines_of(figures, config)]:
        say(line)
    tokens = replace(tokens, notes=[*tokens.notes, *lines])
    teacher = None
    if config.is_distilled:
        teacher = ask_teachers(config, ranks, texts, tokens, train, say)
    return PreparedData(
        tokens=tokens,
        train_index=train,
        validation_index=validation,
        cleaning=found.cleaning,
        texts=texts,
        tokenizer=tokenizer,
        separator=found.separator,
        vocabulary=found.vocabulary,
        teacher=teacher,
        figures=figures,
        seen_before=seen_before,
    )


def _seen_before(config: TrainConfig) -> SeenTexts | None:
    # Its weights are random, even beside a folder that is named tiny.
    return None if config.model == TINY else SeenTexts.read(Path(model_place(config.model)))


def _find(
    config: TrainConfig, ranks: Ranks, say: Callable[[str], None], *, for_own_network: bool
) -> tuple[Found | None, TextData | None, PreTrainedTokenizerBase | None]:
    """Read the texts, choose the tokenizer, write the tokens into the cache; once per machine."""
    if ranks.local_rank != 0:
        return None, None, None
    check_model_name(config.model, config.model_revision)
    say(f"Reading {config.dataset or config.unlabelled or 'the names of the labels'} ...")
    with writing_to(config.cache_folder, only_full=True):
        source = source_file(config.cache_folder, config)
        data, known = _read_texts(config, read_known(source), say)
        cleaning = cleaning_of_data(config, data)
        if "tokenizer" in known:
            tokenizer = make_tokenizer(known["tokenizer"], config.max_length)
        else:
            texts, limit, revision = data.train.texts, config.max_length, config.model_revision
            tokenizer = load_tokenizer(
                config.model, texts, limit, say, cleaning, revision, for_own_network=for_own_network
            )
        separator = _separator_of(tokenizer, config)
        vocabulary = _vocabulary_of(tokenizer, config)
        # transformers keeps the side on which texts are cut outside of the tokenizer itself.
        side = {SETTINGS_FILE: {"truncation_side": tokenizer.truncation_side}}
        tokenizer_json = combined(tokenizer.backend_tokenizer.to_str(), side)
        digest = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        # The key is a hash of all texts. If neither the files nor the tokenizer have changed since
        # an earlier start, it is known already.
        if known.get("tokenizer_sha256") == digest:
            key = known["tokens"]
        else:
            key = _write_tokens(config, data, tokenizer_json, cleaning, vocabulary, say)
            # From here on the texts are read from the cache, and the temporary files are gone.
            data = read_texts(config.cache_folder, key)
            if source:
                # The tokenizer of tiny would have to be learned from all texts again.
                learned = {"tokenizer": tokenizer_json} if config.model == TINY else {}
                write_json(source, {"tokens": key, "tokenizer_sha256": digest} | learned)
        vectors = None
        if TASKS[config.task] is Embedding:
            vectors = _write_vectors(config, data, cleaning, ranks.device, say)
    return Found(key, cleaning, separator, vocabulary, vectors), data, tokenizer


def _read_texts(
    config: TrainConfig, known: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[TextData, Mapping[str, Any]]:
    """The rows, from the cache if an earlier start put them there, and what is known of it."""
    data = read_texts(config.cache_folder, known["tokens"]) if known else None
    if data is None:  # the first time, or somebody cleared a part of the cache
        data, known = _read_data(config, say), {}
    for note in data.notes:
        say(note[0].upper() + note[1:])
    return data, known


def _read_data(config: TrainConfig, say: Callable[[str], None]) -> TextData:
    """The rows of ``--dataset``, or the names of ``--labels``, with what other flags add."""
    names = names_of_labels(config.labels) if config.labels else []
    if config.from_model:
        data = with_earlier_rows(config, say)
    elif config.dataset:
        data = load_data(config.dataset, replace(LoadOptions.of(config), labels=names), say)
    else:
        data = rows_of_names(names)
    if config.distill_texts or config.unlabelled:
        data = add_unlabelled(data, config, config.cache_folder)
    return data


def _separator_of(tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> int | None:
    if not config.columns.pair:
        return None
    if tokenizer.sep_token_id is None:
        raise UserError(
            f"--model {config.model}: its tokenizer has no separator to put between two texts; "
            "use an encoder such as BERT",
            code="pairs-not-read",
        )
    return tokenizer.sep_token_id


def _vocabulary_of(tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> Vocabulary | None:
    task = TASKS[config.task]
    if not issubclass(task, LanguageModel):
        return None
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    special = tuple(sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}))
    vocabulary = Vocabulary(len(tokenizer), special, tokenizer.mask_token_id, end)
    task.check_vocabulary(config.model, vocabulary)
    return vocabulary


def _write_tokens(
    config: TrainConfig,
    data: TextData,
    tokenizer_json: str,
    cleaning: str,
    vocabulary: Vocabulary | None,
    say: Callable[[str], None],
) -> str:
    """Tokenize the texts into the cache unless it has their tokens; returns their key."""
    blocks = Blocks(config.max_length, vocabulary.end) if vocabulary else None
    copies = Copies(config.rough_share, config.seed)
    key = cache_key(data, tokenizer_json, config.max_length, cleaning, blocks, config.long, copies)
    length = UNCUT if blocks else config.max_length
    windows = Windows.of_length(config.max_length) if config.long == "windows" else None
    text_tokenizer = TextTokenizer.from_json(tokenizer_json, length, cleaning, windows)
    write_tokens(config.cache_folder, key, data, text_tokenizer, say, blocks, copies)
    return key


def _write_vectors(
    config: TrainConfig,
    data: TextData,
    cleaning: str,
    device: torch.device,
    say: Callable[[str], None],
) -> Path:
    """What the teacher of ``--task embedding`` makes of the texts."""
    asked = with_copies(data, Copies(config.rough_share, config.seed), cleaning)
    precision = choose_precision(config.precision, device)
    teacher = VectorTeacher(config.distill, cleaning, config.max_length, device, precision)
    path = vectors_file(config.cache_folder, asked, teacher)
    write_vectors(path, teacher, asked, say)
    return path


def _asked(duplicates: str) -> tuple[bool, bool]:
    """Whether duplicates are left out, and whether near ones count."""
    return duplicates.startswith("drop"), duplicates.endswith("_near")


def _rows_to_drop(
    config: TrainConfig, ranks: Ranks, key: str, texts: TextData | None
) -> tuple[list[int], list[str]]:
    """The training rows that ``--duplicates`` leaves out, and lines about them."""
    drops, near = _asked(config.duplicates)
    if not drops:
        return [], []
    file = repeats_file(config.cache_folder, key, config, "repeats")
    found = ranks.from_first(lambda: remembered(file, lambda: Repeats(texts, near=near).drop()))
    return found["dropped"], found["lines"]


def _measure(
    config: TrainConfig, texts: TextData, train: np.ndarray, validation: np.ndarray
) -> dict[str, Any]:
    task = TASKS[config.task]
    if task.is_language_model or not config.dataset:
        return {}
    # Rows that are left out are not counted a second time.
    drops, near = _asked(config.duplicates)
    repeats = None if drops else Repeats(texts, near=near)
    return measure_run(repeats, texts, task, train, validation)


def class_weights_of(
    config: TrainConfig, data: PreparedData, earlier: Sequence[float] | None = None
) -> np.ndarray | None:
    """What a training row of each label weighs in the loss, float64 (labels,); None = all alike.

    With auto, the rows of all labels together weigh the same (King & Zeng, 2001, "Logistic
    regression in rare events data"), and a row weighs 1 on average. ``earlier``: what a run that is
    resumed began with, which it keeps.

    Raises:
        UserError: the file cannot be read, or does not give each label a positive number.
    """
    names = data.tokens.label_names
    if config.class_weights == "none":
        return None
    if earlier is not None:
        return np.array(earlier)
    if config.class_weights == "auto":
        counts = np.bincount(data.tokens.train.labels[data.train_index], minlength=len(names))
        # A label without training rows gets any weight: no row asks for it.
        return len(data.train_index) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    given = _read_weights(config, names)
    if unknown := sorted(given.keys() - set(names)):
        raise _wrong_weights(
            config, f"{unknown[0]!r} is not a label of the data, which has {some_of(names)}"
        )
    if missing := [name for name in names if name not in given]:
        raise _wrong_weights(config, f"has no weight for the label {missing[0]!r}")
    weights = {name: _positive(config, name, weight) for name, weight in given.items()}
    return np.array([weights[name] for name in names])


def _read_weights(config: TrainConfig, names: Sequence[str]) -> dict[str, Any]:
    """What ``--class_weights`` says, by label."""
    try:
        # Names stay text: yes and no are labels here.
        given = yaml.load(
            Path(config.class_weights).expanduser().read_text(encoding="utf-8"), _TextKeys
        )
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _wrong_weights(config, f"cannot be read ({first_line(error)})") from error
    if not isinstance(given, dict):
        raise _wrong_weights(
            config, f"must hold a weight for each label, such as `{names[0]}: 2.5`"
        )
    return given


def _positive(config: TrainConfig, name: str, weight: Any) -> float:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not (is_number and 0 < weight < math.inf):
        raise _wrong_weights(
            config, f"the weight of {name!r} is {weight!r}; it must be a number above 0"
        )
    return float(weight)


class _TextKeys(yaml.SafeLoader):
    """Reads the names of a mapping as text, also yes and no, which are truth values in YAML 1.1."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        pairs = ((key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode))
        return {key.value: self.construct_object(value, deep=deep) for key, value in pairs}


def _wrong_weights(config: TrainConfig, what: str) -> UserError:
    return UserError(
        f"--class_weights {config.class_weights}: {what}; give none, auto or a YAML or JSON file",
        code="class-weights",
    )


@torch.no_grad()
def _scale_can_be_moved(model: NewsClassifier, head: nn.Linear, ids: torch.Tensor) -> bool:
    """Whether the task can finish the model by its last layer; of an own network it is a guess."""
    if model.architecture or not isinstance(model.task, Regression):
        return True
    # Tried and not derived: an own network may use its last layer in any way, so its scores are
    # compared before and after the layer is scaled.
    mask, was_training, task = torch.ones_like(ids), model.training, model.task
    kept = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    model.eval()
    with torch.random.fork_rng(devices=[]):
        before = model(ids, mask).double()
        weight, bias = task.finish(head.weight, head.bias)
        head.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        after = model(ids, mask).double()
    head.load_state_dict(kept)
    model.train(was_training)
    return torch.allclose(
        after, before * task.deviation + task.mean, rtol=1e-3, atol=1e-3 * task.deviation
    )


def _is_local(name: str) -> bool:
    return name in (SAMPLE, STARTER, TINY) or Path(name).expanduser().exists()


def _split(
    config: TrainConfig, tokens: TokenizedData, world_size: int, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``chosen``: rows to choose from, ascending; those without a label are all trained on."""
    # Rows without a label are behind all others, so one position separates them.
    chosen, unlabelled = np.split(chosen, [np.searchsorted(chosen, tokens.num_labelled)])
    labels = TASKS[config.task].strata(tokens.train.labels[: tokens.num_labelled])
    if len(chosen) == 0:
        raise UserError(
            f"--duplicates {config.duplicates}: leaves no training rows", code="rows-too-few"
        )
    if 0 < config.max_train_rows < len(chosen):
        # A seeded sample, in ascending order; the 3 gives it a stream of its own, apart from the
        # other uses of the seed.
        chosen = np.sort(
            np.random.default_rng([config.seed, 3]).permutation(chosen)[: config.max_train_rows]
        )
    fraction = validation_fraction(config, len(chosen))
    if tokens.validation:
        train, validation = chosen, row_numbers(len(tokens.validation))
    elif not fraction:
        _check_no_validation_needed(config)
        train, validation = chosen, chosen[:0]
    else:
        kept, held_out = split_rows(labels[chosen], fraction, config.seed)
        train, validation = chosen[kept], chosen[held_out]
    if len(validation) == 0 and fraction:
        raise UserError(
            f"--dataset {config.dataset}: no label has two rows, so none can be kept for "
            "validation; add more rows, or separate validation rows (validation.csv beside "
            "train.csv), or train on all rows with --validation_fraction 0",
            code="rows-too-few",
        )
    if not config.unlabelled:  # which only the head learns from, before the first step
        train = np.concatenate([train, unlabelled])
    if len(train) < world_size:
        raise UserError(
            f"{world_size} ranks for {len(train)} training rows: start fewer processes",
            code="rows-too-few",
        )
    return train, validation


def validation_fraction(config: TrainConfig, num_rows: int) -> float:
    """The share of so many labelled rows that is kept for validation: none if folds validate the head."""
    has_folds = config.fits_head and (config.method == "head" or num_rows <= FEW_ROWS)
    if has_folds and not NEED_VALIDATION & config.model_fields_set:
        return 0.0
    return config.validation_fraction


def _check_no_validation_needed(config: TrainConfig) -> None:
    """Not a check of the flags alone, because the data may bring validation rows."""
    defaults = TrainConfig(task=config.task, distill=config.distill)
    for name in ("best_metric", "evaluate_every", "early_stopping"):
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise UserError(
                f"--{name} {value} and --validation_fraction 0: without validation rows no epoch "
                f"is better than another, and --dataset {config.dataset} has none; drop one",
                code="flags-conflict",
            )


def prepare_model(
    config: TrainConfig,
    ranks: Ranks,
    data: PreparedData,
    precision: str,
    say: Callable[[str], None],
    own: Own = NOTHING_OWN,
    pooling: str = "",
) -> tuple[NewsClassifier, str]:
    """Build or load the model; download it once per machine, or once if they share the hub's cache.

    ``pooling``: what its head reads, see :class:`NewsClassifier`.

    Returns:
        The model, and the precision in which it can be trained: ``precision``, or fp32 if the flag
        leaves it open.

    Raises:
        UserError: no such model, its weights do not fit it, it has fewer positions than
            ``max_length``, or not the layers that flags speak of.
    """

    def load() -> tuple[NewsClassifier, str]:
        stored = partial(_stored_model, config, data, pooling, say)
        model = _network_of(config, ranks, data, own) if own.network else stored()
        _fit_to_rows(model, config, data, own)
        possible = _try_out(model, config, data, precision, own, say)
        if config.lora:
            add_adapters(model, config)
        freeze_layers(model.network, config)
        return model, possible

    # Without a download no rank has to go first.
    if not ranks.any(not _is_local(config.model)):
        return ranks.run_on_all_ranks(load)
    return download_once(ranks, load, shared=cache_is_shared(ranks))


def _network_of(config: TrainConfig, ranks: Ranks, data: PreparedData, own: Own) -> NewsClassifier:
    assert own.network
    labels = data.tokens.label_names
    model = NewsClassifier.around(
        own.network(data.tokens.vocab_size, len(labels)), TASKS[config.task](labels)
    )
    needs_gpu = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if needs_gpu and ranks.is_distributed and ranks.device.type == "cpu":
        raise UserError(
            "--network: nn.SyncBatchNorm runs on GPUs only; use BatchNorm, or a single process",
            code="own-code",
        )
    return model


def _stored_model(
    config: TrainConfig, data: PreparedData, pooling: str, say: Callable[[str], None]
) -> NewsClassifier:
    def read() -> NewsClassifier:
        return NewsClassifier(
            len(data.tokens.label_names),
            config.model,
            data.tokens.label_names,
            vocab_size=data.tokens.vocab_size,
            task=TASKS[config.task],
            loading=Loading(
                config.model_revision, as_stored=True, layers=config.layers, pooling=pooling
            ),
        )

    model = load_from(config.model, read, say)
    for note in model.notes:
        say(note)
    return model


def _fit_to_rows(model: NewsClassifier, config: TrainConfig, data: PreparedData, own: Own) -> None:
    """Set what the flags and the training rows say of the model, its task and its layers."""
    if config.max_length > model.max_positions:
        raise UserError(
            f"--max_length {config.max_length}: --model {config.model} has positions for "
            f"{model.max_positions} tokens",
            code="max-length",
        )
    if isinstance(model.task, MaskedLanguageModel):
        model.task.vocabulary = data.vocabulary
    check_depths(model.network, config)
    if config.dropout is not None and not model.set_dropout(config.dropout):
        raise UserError(
            f"--dropout {config.dropout:g}: --model {config.model} has no dropout layers; leave "
            "it out",
            code="model-layers-unknown",
        )
    targets = data.tokens.train.labels[data.labelled_index]
    if not own.loss:  # which compares scores and targets as they are
        model.task.fit(targets, _head_of(model))
    # From everywhere, because rows may be sorted by label.
    some = np.linspace(0, len(targets) - 1, min(ROWS_TO_TRY, len(targets))).astype(int)
    own.apply_to(model.task, targets[some], config.best_metric)
    for key in (WINDOWS_KEY, PAIR_KEY):  # of the run that trained --model
        model.config.__dict__.pop(key, None)
    if data.separator is not None:
        setattr(model.config, PAIR_KEY, data.separator)
    if config.long == "windows":
        add_window_attention(model, config)


def _head_of(model: NewsClassifier) -> nn.Linear | None:
    return model.network.get_submodule(model.head) if model.head else None


def _try_out(
    model: NewsClassifier,
    config: TrainConfig,
    data: PreparedData,
    precision: str,
    own: Own,
    say: Callable[[str], None],
) -> str:
    """Compute the shortest row, so that what cannot be computed is told before the first step;
    returns the precision in which it can be.
    """
    rows = data.tokens.train
    row = int(np.argmin(rows.lengths))
    start, end = rows.offsets[row], rows.offsets[row + 1]
    ids = torch.from_numpy(rows.ids[start:end].astype(np.int64))[None]  # (1, tokens)
    flag = "--network" if own.network else f"--model {config.model}"
    if end - start + PROBE_PADDING <= model.max_positions:
        if unused := try_unknown_family(model, flag, ids):
            say(
                f"{len(unused)} parameters that no answer depends on are left as they are "
                f"({unused[0]}, ...)"
            )
        head = _head_of(model)
        if head is not None and not _scale_can_be_moved(model, head, ids):
            model.task.fit(np.zeros(1), head)  # train on the numbers as they are
    if precision == "fp32" or not (reason := try_half_precision(model, ids)):
        return precision
    what = f"{flag}: cannot be computed in {precision} ({reason})"
    if config.precision != "auto":
        raise UserError(f"{what}; use --precision fp32", code="precision-unsupported")
    say(f"{what}, so it is trained in fp32")
    return "fp32"
