"""What a verdict in an artefact's manifest says, and whether it is about this artefact and about
the model that is live.

A verdict is the record of a comparison: ``verdict`` (PROMOTE, HOLD or REJECT), ``parent`` and
``candidate`` with the SHA-256 of the trained weights and of the exported model file of each, what
was measured, and ``sha256`` of all that. The hash shows what was changed by accident or by hand; it
is no signature, so the folder has to come from somebody who is trusted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ForeseenError, ModelLoadError
from common.model_folder import EXPORT_AGAIN, MANIFEST_FILE, Manifest

PROMOTE, HOLD = "PROMOTE", "HOLD"
_JUDGE = "compare it with the live model: python -m loop.verdict"


class NotPromoted(ForeseenError):
    """The verdict does not allow a candidate to replace the live model."""

    exit_code = 11
    code = "not-promoted"


class Undecided(NotPromoted):
    """The comparison has not seen enough rows to decide."""

    exit_code = 10


def identity_of(folder: Path, manifest: Manifest) -> dict[str, str]:
    """What tells an artefact from every other one: ``weights_sha256``, of the weights that training
    wrote, and ``file_sha256``, of the model file that was exported from them.

    Raises:
        ModelLoadError: the manifest lists no model file.
    """
    # model_int8.safetensors, model.onnx, or model.bin beside a small model.xml.
    models = [one for name, one in manifest.files.items() if name.startswith("model")]
    if not models:
        raise ModelLoadError(folder / MANIFEST_FILE, "lists no model file", EXPORT_AGAIN)
    file = max(models, key=lambda one: one["bytes"])
    return {"weights_sha256": manifest.source["weights_sha256"], "file_sha256": file["sha256"]}


def digest_of(record: Mapping[str, Any]) -> str:
    """The SHA-256 of a verdict, apart from the field that holds it."""
    content = {name: value for name, value in record.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def refuse_unless_promoted(
    folder: Path, manifest: Manifest, live: Sequence[Mapping[str, str]] | None
) -> None:
    """Check that the verdict lets this artefact replace the live one.

    Args:
        live: the identities of the live model's artefacts; None if it does not matter which they
            are.

    Raises:
        Undecided: the verdict is HOLD.
        NotPromoted: it is another one than PROMOTE, was changed, or is about other models.
    """
    record = manifest.verdict
    if not record:
        raise NotPromoted(f"{folder}: has no verdict; {_JUDGE}")
    if record.get("sha256") != digest_of(record):
        raise NotPromoted(f"{folder}: its verdict was changed after it was written; {_JUDGE}")
    if record.get("candidate") != identity_of(folder, manifest):
        raise NotPromoted(f"{folder}: its verdict is about another model file; {_JUDGE}")
    if live is not None and record.get("parent") not in live:
        raise NotPromoted(
            f"{folder}: its verdict compares it with another model than the live one; {_JUDGE}"
        )
    found = record.get("verdict")
    if found != PROMOTE:
        kind = Undecided if found == HOLD else NotPromoted
        raise kind(f"{folder}: its verdict is {found!r:.80}, and only PROMOTE lets it go live")


def may_replace(folder: Path, manifest: Manifest) -> str:
    """The revision of the model that a valid verdict lets this artefact replace; empty if none."""
    try:
        refuse_unless_promoted(folder, manifest, None)
        return str(manifest.verdict["parent"]["weights_sha256"])[:12]
    except (ForeseenError, KeyError, TypeError):
        return ""
