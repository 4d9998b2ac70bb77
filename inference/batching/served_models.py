"""The models of a server process by name; they share the machine, and the encoder if it is equal."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from pathlib import Path

from common.errors import ModelLoadError
from common.escaping import some_of
from common.model_folder import DESCRIPTION_FILES, METRICS_FILE, WEIGHTS_FILE
from inference.batching.batcher import Workers
from inference.batching.served_model import LoadModel, OneOfSeveral, ServedModel
from inference.batching.tokenizing import TokenizerThreads
from inference.engines.model_loader import ModelLoader
from inference.errors import SettingsError
from inference.metrics import ServerMetrics
from inference.settings import Settings

# A part of an address and of a metric.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_USE_PLAIN = "use letters, digits, . _ and -"


def paths_of(settings: Settings) -> list[Path]:
    """The models that MODEL_CHECKPOINT names, the default first: one path, several with commas
    between them, or all models in a folder that is none itself.
    """
    path = settings.model_checkpoint
    if inside := _models_in(path):
        return inside
    with suppress(OSError):  # a list of paths may be longer than a path can be
        if path.exists():  # also with a comma in its name
            return [path]
    return [Path(part.strip()) for part in str(path).split(",") if part.strip()] or [path]


def _models_in(path: Path) -> list[Path]:
    """The models in a folder that is no model itself, however damaged; none if it is."""
    own = (*DESCRIPTION_FILES, WEIGHTS_FILE, METRICS_FILE)
    try:
        if any((path / name).exists() for name in own):
            return []
        return sorted(one for one in path.iterdir() if (one / own[0]).is_file())
    except OSError:  # no folder, or one that may not be read, which loading it reports
        return []


def folder_of(settings: Settings) -> Path | None:
    """The folder from which models may be put under a name while the server runs, if any.

    Raises:
        SettingsError: MODELS_FOLDER is no folder.
    """
    folder, checkpoint = settings.models_folder, settings.model_checkpoint
    if folder is None:
        return checkpoint if _models_in(checkpoint) else None
    if not folder.is_dir():
        raise SettingsError(f"MODELS_FOLDER: {folder} is no folder; make it, or unset it")
    return folder


def has_several(settings: Settings) -> bool:
    """Whether there may be several models, which then have the names of their folders."""
    return len(paths_of(settings)) > 1 or folder_of(settings) is not None


def named_paths(settings: Settings) -> dict[str, Path]:
    """Several models by the names of their folders.

    Raises:
        SettingsError: two have one name, or a name does not fit into an address.
    """
    if settings.model_name:
        raise SettingsError(
            "MODEL_NAME: it names a single model, and there may be several here; unset it, and "
            "name their folders"
        )
    found: dict[str, Path] = {}
    for path in paths_of(settings):
        name = path.absolute().name
        if not _NAME.fullmatch(name):
            raise SettingsError(
                f"MODEL_CHECKPOINT: {path}: the name of one of several models must be letters, "
                "digits, . _ and -; rename the folder"
            )
        if name in found:
            raise SettingsError(
                f"MODEL_CHECKPOINT: {found[name]} and {path} have the same name; rename a folder"
            )
        found[name] = path
    return found


class ServedModels:
    """What is served, by name; a single model has the name that its manifest or MODEL_NAME says."""

    def __init__(
        self,
        settings: Settings,
        metrics: ServerMetrics,
        load_model: LoadModel,
        *,
        counts_loads: bool = True,
    ) -> None:
        """Raises:
        SettingsError: the models cannot be told apart.
        """
        self._settings = settings
        self._metrics = metrics
        self._load_model = load_model
        self._workers = Workers(0)  # none before the first model says how many it needs
        self._tokenizers = TokenizerThreads()
        self._loading = asyncio.Lock()
        self._is_putting = False
        self._closing: set[asyncio.Task[None]] = set()
        # Where `put` takes models from; None if it must not.
        self.folder = folder_of(settings)
        if has_several(settings):
            paths = named_paths(settings)
            self._weights = weights_of(settings, paths)
            self.all = {name: self._one_of_several(name, path) for name, path in paths.items()}
        else:
            if settings.model_weights:
                raise SettingsError("MODEL_WEIGHTS: there is only one model; unset it")
            only = ServedModel(settings, metrics, load_model, counts_loads=counts_loads)
            self.all = {"": only}
        self.default = next(iter(self.all.values()))
        self.default.shadow_path = settings.shadow

    def _one_of_several(self, name: str, path: Path) -> ServedModel:
        weight = self._weights.get(name, 1.0)
        threads = self._workers, weight, self._tokenizers
        among = OneOfSeveral(name, path, *threads, self._loading, self._loaded)
        metrics = self._metrics.of_model(name)
        return ServedModel(self._settings, metrics, self._load_model, among=among)

    def _loaded(self) -> list[ModelLoader]:
        return [one.current.model for one in self.all.values() if one.current]

    def find(self, name: str | None) -> ServedModel | None:
        """The model of this name, if there is one; the default for None."""
        if name is None:
            return self.default
        # The name of an only model may be known only once it is loaded. Until then it stands for
        # any name, and those who ask are told that it is loading.
        if not self.are_several:
            is_it = self.default.current is None or self.default.name == name
            return self.default if is_it else None
        return self.all.get(name)

    @property
    def are_several(self) -> bool:
        return "" not in self.all

    @property
    def names(self) -> str:
        """The names in one line, cut if there are many."""
        return some_of([one.name for one in self.all.values()])

    @property
    def error(self) -> str | None:
        """Why requests that name no model cannot be answered, or why it is too early for others.

        A model that was refused, or fails, keeps no others from being asked.
        """
        waiting = next((one for one in self.all.values() if not one.is_decided), self.default)
        return waiting.error

    @property
    def dead(self) -> str | None:
        """Why only a new process helps one of the models."""
        return next(filter(None, (one.dead for one in self.all.values())), None)

    @property
    def is_changing(self) -> bool:
        """Whether a model is being loaded, or put under a name."""
        return self._is_putting or self._loading.locked() or self.default.is_loading

    async def load(self) -> None:
        """Load all that MODEL_CHECKPOINT names now, one after another.

        Raises:
            ModelLoadError: some cannot be loaded, and stay as they are; all others are replaced.
        """
        refusals: list[str] = []
        for one in list(self.all.values()):
            try:
                await one.load()
            except ModelLoadError as error:
                refusals.append(str(error))
        if refusals:
            raise ModelLoadError("; ".join(refusals))

    async def put(self, name: str, path: str) -> ModelLoader:
        """Serve a model under a new name, or in place of the one that has it, which still answers
        what it has accepted. Not to be called while one `is_changing`.

        Raises:
            ModelLoadError: the path is not in MODELS_FOLDER, or the model cannot be loaded; what
                was served before still is.
        """
        if not _NAME.fullmatch(name):
            raise ModelLoadError(f"{name:.80}", "no model can have this name", _USE_PLAIN)
        self._is_putting = True
        try:
            found = await asyncio.to_thread(self._path_in_folder, path)
            if (model := self.all.get(name)) is not None:
                return (await model.load(found)).model
            model = self._one_of_several(name, found)
            served = await model.load()
            # Only now, so that no request finds a model that loads for the first time.
            self.all[name] = model
            return served.model
        finally:
            self._is_putting = False
            if name not in self.all:
                self._metrics.forget_model(name)

    def _path_in_folder(self, path: str) -> Path:
        """The path that a request names, if all that is in it lies in MODELS_FOLDER.

        Raises:
            ModelLoadError: it does not.
        """
        assert self.folder is not None
        root = self.folder.resolve()
        found = root / path
        # The path may be too long, lead in a circle, or hold a null byte.
        with suppress(OSError, RuntimeError, ValueError):
            if found.is_dir() and found.resolve() != root:
                ends = (one.resolve() for one in (found, *found.rglob("*")))
                if all(end.is_relative_to(root) for end in ends):
                    return found
        what = "is no folder in MODELS_FOLDER, or has symbolic links that lead out of it"
        raise ModelLoadError(f"{path:.80}", what, "name a model folder that lies there")

    def remove(self, name: str) -> None:
        """Answer what this model has accepted, and forget it."""
        model = self.all.pop(name)
        model.remove()
        self._metrics.forget_model(name)
        task = asyncio.create_task(model.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def load_or_log(self) -> None:
        """Like `load`, but refusals are kept in `ServedModel.error` and logged."""
        with suppress(ModelLoadError):
            await self.load()

    async def close(self) -> None:
        """Answer what was accepted, and stop."""
        await asyncio.gather(*(one.close() for one in self.all.values()), *self._closing)
        self._workers.close()


def weights_of(settings: Settings, paths: dict[str, Path]) -> dict[str, float]:
    """MODEL_WEIGHTS, such as news=2,spam=1.

    Raises:
        SettingsError: it is not in this form, or names no model of MODEL_CHECKPOINT.
    """
    weights: dict[str, float] = {}
    for part in filter(None, map(str.strip, settings.model_weights.split(","))):
        name, _, number = map(str.strip, part.partition("="))
        if name not in paths:
            raise SettingsError(
                f"MODEL_WEIGHTS: {name!r:.80}: no model has this name; they are "
                f"{some_of(list(paths))}"
            )
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = 0.0
        if not 0 < weights[name] < float("inf"):
            raise SettingsError(
                f"MODEL_WEIGHTS: {part!r:.80}: a weight is a number above 0, as in {name}=2"
            )
    return weights
