"""The files of a Space.

A Docker Space is the image's build context, with the Dockerfile and the Space card at its root. A
static one is the demo page with the model beside it, which runs in the visitor's browser.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, RepoFile, SpaceCard
from huggingface_hub.errors import HTTPError

from common.errors import UserError
from common.model_folder import WEIGHTS_FILE, read_saved_model
from deployment.image_context import DOCKERFILE, ROOT, DeploymentError, build_arguments, image_files
from inference.exporting.browser import browser_files
from training.publishing.hub_upload import Files, Target, content_of
from training.publishing.model_card import TAG, is_on_the_hub
from training.publishing.published_files import without_local_paths

# On the hub a proxy with a private address is between a Space and its visitors, and visitors have
# public ones.
_PROXIES = "127.0.0.1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fc00::/7"
_CARD, _METRICS = "README.md", "model/metrics.json"
_WEB = ROOT / "inference" / "web"
_PAGE, _SERVICE_WORKER = "index.html", "service_worker.js"
# The documentation of the API, which only a server has.
_OF_SERVER = ("docs.css", "docs.js")
# Nothing but what lies beside the page, whatever a text or a model says.
_POLICY = (
    "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'"
)
# Threads need shared memory, which browsers allow to pages that are isolated in this way.
_HEADERS = {
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "cross-origin",
}
_STATIC_TEXT = """
# DistriNews

A text classifier that runs in the visitor's browser: the page, the tokenizer and int8 kernels in WebAssembly. Texts and
files stay on the visitor's device, and after the first visit the page needs no connection.

Any web server can hold this folder.
"""


def space_files(model: Path) -> Files:
    try:
        files = image_files(model)
        arguments = {**build_arguments(model), "FORWARDED_ALLOW_IPS": _PROXIES}
    except DeploymentError as error:
        raise UserError(str(error), code=error.code) from error
    metrics = json.loads(content_of(files[_METRICS])) if _METRICS in files else {}
    return {
        "Dockerfile": dockerfile(arguments),
        _CARD: _card(metrics),
        **without_local_paths(files),
    }


def static_files(model: Path) -> Files:
    """A folder for any web server, in which a browser runs the model.

    Raises:
        UserError: the model has no native artefact, or a tokenizer that the page does not have.
        ModelLoadError: the model or its artefact is damaged.
    """
    files: dict[str, Path | bytes] = {
        f"demo/{path.name}": path
        for path in sorted(_WEB.iterdir())
        if path.suffix in (".js", ".css", ".svg", ".wasm")
        and path.name not in (_SERVICE_WORKER, *_OF_SERVER)
    }
    files[_PAGE] = _static_page()
    # The service worker serves what it has kept until its own bytes change, so the version is a
    # hash of the page: if anything in it changes, visitors get all files again, never a mixture.
    content = b"".join(content_of(source) for source in files.values())
    version = hashlib.sha256(content).hexdigest()[:16]
    # Each browser loads one of the kernels, and keeps that one when it has.
    kept = sorted(name for name in files if not name.endswith(".wasm"))
    worker = (_WEB / _SERVICE_WORKER).read_text(encoding="utf-8")
    worker = _replaced(worker, 'VERSION = ""', f'VERSION = "{version}"')
    files[_SERVICE_WORKER] = _replaced(worker, "FILES = []", f"FILES = {json.dumps(kept)}").encode()
    files |= {f"model/{name}": content for name, content in browser_files(model).items()}
    files[_CARD] = _static_card(read_saved_model(model).metadata)
    return files


def _static_page() -> bytes:
    page = (_WEB / _PAGE).read_text(encoding="utf-8")
    page = _replaced(page, "<body>", '<body data-model="model/">')
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    return _replaced(page, '<meta charset="utf-8">', f'<meta charset="utf-8">\n  {policy}').encode()


def _replaced(text: str, old: str, new: str) -> str:
    # A page that was changed so that this no longer fits must not be published without it.
    assert text.count(old) == 1, old
    return text.replace(old, new)


def linked(files: Files, published: list[str]) -> Files:
    """Link the card to the repository of the model, or of each model of a cascade."""
    card = SpaceCard(content_of(files[_CARD]).decode())
    card.data.models = published
    return {**files, _CARD: str(card).encode()}


def published_model(api: HfApi, target: Target, weights_sha256: str) -> str | None:
    """The account's model repository that has exactly these weights and that every viewer of the Space may see."""
    with suppress(HTTPError):  # a Space without a link is as good
        for model in api.list_models(author=target.name.split("/")[0], filter=TAG):
            # A public Space that names a private model would show its name, and a dead link.
            if model.private and not target.private:
                continue
            for file in api.get_paths_info(model.id, [WEIGHTS_FILE]):
                if (
                    isinstance(file, RepoFile)
                    and file.lfs is not None
                    and file.lfs.sha256 == weights_sha256
                ):
                    return model.id
    return None


def dockerfile(arguments: dict[str, str]) -> bytes:
    """The image's Dockerfile with these arguments as defaults, because the hub passes none."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    for name, value in arguments.items():
        # Anything else would end the line, or be more than one word.
        if not re.fullmatch(r"[\w.,:/+-]*", value):
            raise UserError(
                f"Dockerfile: {name}={value!r} is not one plain word", code="model-unusable"
            )
        text = re.sub(rf"(?m)^ARG {name}=.*$", lambda found, line=f"ARG {name}={value}": line, text)
    return text.encode()


def _static_card(metrics: dict[str, str]) -> bytes:
    card = SpaceCard(_card(metrics).decode())
    for name in ("app_port", "base_path", "suggested_hardware"):
        card.data.pop(name)
    card.data.sdk = "static"
    card.data.app_file = _PAGE
    card.data.custom_headers = _HEADERS
    card.text = _STATIC_TEXT
    return str(card).encode()


def _card(metrics: dict[str, str]) -> bytes:
    card = SpaceCard((ROOT / "deployment" / _CARD).read_text(encoding="utf-8"))
    base, dataset = str(metrics.get("base_model", "")), str(metrics.get("dataset", ""))
    card.data.models = [base] if is_on_the_hub(base) else None
    card.data.datasets = [dataset] if is_on_the_hub(dataset) else None
    return str(card).encode()
