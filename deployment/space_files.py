"""The files of a Space: the image's build context, with the Dockerfile and the Space card at its root."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, RepoFile, SpaceCard
from huggingface_hub.errors import HTTPError

from common.errors import UserError
from common.model_folder import WEIGHTS_FILE
from deployment.image_context import DOCKERFILE, ROOT, DeploymentError, build_arguments, image_files
from training.publishing.hub_upload import Files, Target, content_of
from training.publishing.model_card import TAG, is_on_the_hub
from training.publishing.published_files import without_local_paths

_CARD, _METRICS = "README.md", "model/metrics.json"


def space_files(model: Path) -> Files:
    try:
        files = image_files(model)
        arguments = build_arguments(model)
    except DeploymentError as error:
        raise UserError(str(error), code=error.code) from error
    metrics = json.loads(content_of(files[_METRICS])) if _METRICS in files else {}
    return {"Dockerfile": _dockerfile(arguments), _CARD: _card(metrics), **without_local_paths(files)}


def linked(files: Files, published: str) -> Files:
    """Link the card to the model's own repository."""
    card = SpaceCard(content_of(files[_CARD]).decode())
    card.data.models = [published]
    return {**files, _CARD: str(card).encode()}


def published_model(api: HfApi, target: Target, weights_sha256: str) -> str | None:
    """The account's model repository that has exactly these weights and that every viewer of the Space may see."""
    with suppress(HTTPError):  # a Space without a link is as good
        for model in api.list_models(author=target.name.split("/")[0], filter=TAG):
            if model.private and not target.private:
                continue
            for file in api.get_paths_info(model.id, [WEIGHTS_FILE]):
                if isinstance(file, RepoFile) and file.lfs is not None and file.lfs.sha256 == weights_sha256:
                    return model.id
    return None


def _dockerfile(arguments: dict[str, str]) -> bytes:
    # The hub passes no build arguments, so their values become the defaults.
    text = DOCKERFILE.read_text(encoding="utf-8")
    for name, value in arguments.items():
        text = re.sub(rf"(?m)^ARG {name}=.*$", f"ARG {name}={value}", text)
    return text.encode()


def _card(metrics: dict[str, str]) -> bytes:
    card = SpaceCard((ROOT / "deployment" / _CARD).read_text(encoding="utf-8"))
    base, dataset = metrics.get("base_model"), metrics.get("dataset")
    card.data.models = [base] if base and is_on_the_hub(base) else None
    card.data.datasets = [dataset] if dataset and is_on_the_hub(dataset) else None
    return str(card).encode()
