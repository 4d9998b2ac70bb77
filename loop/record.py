"""The artefacts that a verdict is about, and its record in the new one's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.model_folder import (
    PRECISIONS,
    Manifest,
    SavedModel,
    artefact_folder,
    is_artefact,
    read_manifest,
    read_saved_model,
    verified_manifest,
    write_manifest,
)
from common.problem_types import SINGLE_LABEL
from common.verdicts import digest_of, identity_of


@dataclass(frozen=True, slots=True)
class Artefact:
    """An exported model. ``path``: as it was given; ``folder``: that of the manifest."""

    path: Path
    folder: Path
    manifest: Manifest
    saved: SavedModel

    @classmethod
    def at(cls, path: Path) -> Artefact:
        """The artefact at this path, or the one of this model.

        Raises:
            UserError: there is none, it is damaged, or it gives no single label per text.
        """
        folders = [path, *(artefact_folder(path, engine) for engine in PRECISIONS)]
        folder = next(filter(is_artefact, folders), None)
        if folder is None:
            what = "has no exported artefact" if path.exists() else "no such model"
            raise UserError(
                f"{path}: {what}; write one with python -m inference.export", code="model-not-found"
            )
        manifest = verified_manifest(folder, None if folder == path else path)
        saved = read_saved_model(folder)
        what = ""
        if manifest.cascade:
            what = "is a cascade; compare the models that it is made of"
        elif saved.problem_type is not SINGLE_LABEL:
            what = "only models that give each text one label can be compared"
        elif saved.reads_pairs:
            what = "reads pairs of texts; only models of single texts can be compared"
        if what:
            raise UserError(f"{path}: {what}", code="model-unusable")
        return cls(path, folder, manifest, saved)

    @property
    def identity(self) -> dict[str, str]:
        return identity_of(self.manifest)

    @property
    def texts_per_second(self) -> float:
        return float(self.manifest.speed.get("after_texts_per_second") or 0.0)

    @property
    def machine(self) -> tuple[Any, Any]:
        """On which its speed was measured."""
        return self.manifest.speed.get("processor"), self.manifest.speed.get("threads")

    @property
    def num_bytes(self) -> int:
        return int(self.manifest.size.get("after_bytes") or 0)


def write_verdict(new: Artefact, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write the record of a verdict, with its SHA-256, into the manifest of the new artefact.

    Raises:
        UserError: the artefact has changed since, or its folder cannot be written.
    """
    if read_manifest(new.folder) != new.manifest:
        what = "changed while it was compared; run the same command again"
        raise UserError(f"{new.folder}: {what}", code="model-unusable")
    signed = {**record, "artefact": new.identity}
    signed["sha256"] = digest_of(signed)
    try:
        write_manifest(new.folder, replace(new.manifest, verdict=signed))
    except OSError as error:
        what = f"the verdict cannot be written ({error.strerror})"
        raise UserError(f"{new.folder}: {what}", code="not-writable") from error
    return signed
