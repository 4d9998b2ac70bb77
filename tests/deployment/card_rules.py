"""What the hub asks of a card's front matter, after its reference of Spaces' configuration and of model cards."""

from __future__ import annotations

import re
from typing import Any

import yaml

COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
SPACE_FIELDS: dict[str, type | tuple[type, ...]] = {
    "title": str,
    "emoji": str,
    "colorFrom": str,
    "colorTo": str,
    "sdk": str,
    "app_file": str,
    "custom_headers": dict,
    "app_port": int,
    "base_path": str,
    "license": str,
    "models": list,
    "datasets": list,
    "tags": list,
    "short_description": str,
    "suggested_hardware": str,
    "pinned": bool,
}
MODEL_FIELDS: dict[str, type | tuple[type, ...]] = {
    "base_model": str,
    "datasets": list,
    "language": (str, list),
    "library_name": str,
    "license": str,
    "metrics": list,
    "model-index": list,
    "pipeline_tag": str,
    "tags": list,
}
_REPOSITORY = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")


def card_errors(content: str, kind: str) -> list[str]:
    """Return what is wrong with a README's front matter, as the hub's validation would."""
    front = front_matter(content)
    fields = SPACE_FIELDS if kind == "space" else MODEL_FIELDS
    errors = [f'"{name}" is not allowed' for name in front.keys() - fields.keys()]
    for name, kinds in fields.items():
        if name in front and not isinstance(front[name], kinds):
            errors.append(f'"{name}" is of the wrong type')
    for name in ("models", "datasets"):
        errors += [f'"{name}": {one!r} is no name' for one in front.get(name, []) if not _REPOSITORY.fullmatch(one)]
    return errors + (_space_errors(front) if kind == "space" else _model_errors(front))


def front_matter(content: str) -> dict[str, Any]:
    """Read the block at the top of a README."""
    match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    return yaml.safe_load(match[1]) if match else {}


def _space_errors(front: dict[str, Any]) -> list[str]:
    rules = {
        '"title" is required': bool(front.get("title")),
        '"emoji" must be one emoji': bool(re.fullmatch(r"[\U0001F000-\U0001FAFF\u2600-\u27BF]\ufe0f?", front["emoji"])),
        '"colorFrom" must be one of the colours': front["colorFrom"] in COLOURS,
        '"colorTo" must be one of the colours': front["colorTo"] in COLOURS,
        '"sdk" must be docker, gradio or static': front["sdk"] in ("docker", "gradio", "static"),
        '"short_description" must be at most 60 characters': len(front.get("short_description", "")) <= 60,
        '"base_path" must start with /': front.get("base_path", "/").startswith("/"),
        '"suggested_hardware" must be a flavour': front.get("suggested_hardware") in (None, "cpu-basic", "cpu-upgrade"),
    }
    return [message for message, holds in rules.items() if not holds]


def _model_errors(front: dict[str, Any]) -> list[str]:
    base = front.get("base_model", "a/b")
    results = [result for entry in front.get("model-index", []) for result in entry["results"]]
    rules = {
        f'"base_model": {base!r} is no name': bool(_REPOSITORY.fullmatch(base)),
        '"model-index" has a result without task, dataset or metrics': all(
            result["task"]["type"] and result["dataset"]["type"] and result["metrics"] for result in results
        ),
    }
    return [message for message, holds in rules.items() if not holds]
