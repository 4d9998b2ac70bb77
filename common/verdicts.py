"""What a verdict in an artefact's manifest says, and whether it is about this artefact and about
the model that is live.

A verdict is the record that `python -m loop.verdict` writes: ``verdict`` (PROMOTE, HOLD or REJECT),
``artefact`` and ``parent`` with the identities of the new model and the old one, what was measured,
and ``sha256`` of all that. The hash shows what was changed by accident or by hand; it is no
signature, so the folder has to come from somebody who is trusted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ForeseenError
from common.model_folder import (
    DESCRIPTION_FILES,
    FAMILIARITY_FILE,
    METRICS_FILE,
    Manifest,
    read_manifest,
)

PROMOTE, HOLD, REJECT = "PROMOTE", "HOLD", "REJECT"
# What an artefact has besides its model.
_OTHER_FILES = {*DESCRIPTION_FILES, FAMILIARITY_FILE, METRICS_FILE}
_JUDGE = "compare it with the live model: python -m loop.verdict"


class NotPromoted(ForeseenError):
    """The verdict does not allow a candidate to replace the live model."""

    exit_code = 11
    code = "not-promoted"


class Undecided(NotPromoted):
    """The comparison has not seen enough rows to decide."""

    exit_code = 10


def identity_of(manifest: Manifest) -> dict[str, str]:
    """Which artefact this is: the weights it was made from, and the file of its model."""
    files = {name: one for name, one in manifest.files.items() if name not in _OTHER_FILES}
    model = max(files.values(), key=lambda one: one["bytes"], default={"sha256": ""})
    return {
        "name": str(manifest.source.get("name", "")),
        "weights_sha256": str(manifest.source["weights_sha256"]),
        "model_sha256": str(model["sha256"]),
    }


def digest_of(record: Mapping[str, Any]) -> str:
    """The SHA-256 of a verdict, apart from the field that holds it."""
    content = {name: value for name, value in record.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verdict_in(folder: Path, name: Path | None = None) -> dict[str, Any]:
    """The verdict in the manifest of an artefact; empty if there is none.

    ``name``: what to call the folder, if it is a copy of another one.

    Raises:
        NotPromoted: it was changed, or is about another artefact.
    """
    manifest = read_manifest(folder)
    record = manifest.verdict
    if not record:
        return {}
    if record.get("sha256") != digest_of(record):
        raise NotPromoted(f"{name or folder}: the verdict in its manifest was changed; {_JUDGE}")
    if record.get("artefact") != identity_of(manifest):
        what = "the verdict in its manifest is about another artefact"
        raise NotPromoted(f"{name or folder}: {what}; {_JUDGE}")
    return record


def refuse_unless_promoted(
    folder: Path, live: Sequence[Mapping[str, str]], name: Path | None = None
) -> dict[str, Any]:
    """Check that the verdict lets this artefact replace the live model; returns the verdict.

    Args:
        live: the identities of the live model's artefacts.
        name: as in `verdict_in`.

    Raises:
        Undecided: the verdict is HOLD.
        NotPromoted: there is none, or another one than PROMOTE, or it is about other models.
    """
    shown, record = name or folder, verdict_in(folder, name)
    if not record:
        raise NotPromoted(f"{shown}: has no verdict; {_JUDGE}")
    if record.get("parent") not in live:
        raise NotPromoted(
            f"{shown}: its verdict compares it with another model than the live one; {_JUDGE}"
        )
    found = record.get("verdict")
    if found != PROMOTE:
        kind = Undecided if found == HOLD else NotPromoted
        raise kind(f"{shown}: its verdict is {found!r:.80}, and only PROMOTE lets it go live")
    return record


def may_replace(folder: Path) -> str:
    """The revision of the model that a valid verdict lets this artefact replace; empty if none."""
    try:
        record = verdict_in(folder)
        parent = record["parent"]["weights_sha256"] if record.get("verdict") == PROMOTE else ""
    except (NotPromoted, KeyError, TypeError):
        return ""
    return str(parent)[:12]
