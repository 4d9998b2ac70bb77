"""The benchmark of many heads on one encoder, with tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.many_heads import measure_process, render
from common.errors import UserError
from inference.engines import native
from inference.engines.native.library import library_path
from tests.inference.cascades import make_artefact
from tests.inference.conftest import TEXTS, TINY, folder_maker

pytestmark = pytest.mark.skipif(library_path() is None, reason=native.is_supported()[1])


def test_each_head_is_compared_with_the_model_alone_and_the_page_has_the_goals(
    model_folder: Path, tmp_path: Path
) -> None:
    artefact = make_artefact(model_folder, tmp_path / "artefact")

    found = {f"{n} models": [measure_process([artefact], n, TEXTS)] for n in (1, 3)}

    assert [one["labels"] for (one,) in found.values()] == [4, 12]
    assert all(one["equal"] and one["single_all"] > 0 for (one,) in found.values())
    page = render("About it.", found)
    assert "| rounds in which all models are equal | at least 1 | 1 | yes |" in page
    assert "| 3 models | 12 |" in page


def test_models_that_do_not_share_an_encoder_are_refused(model_folder: Path, tmp_path: Path) -> None:
    folder_maker(model_folder, tmp_path / "larger")("DistilBert", **TINY | {"hidden_dim": 128})
    artefacts = [make_artefact(path, path / "native") for path in (tmp_path / "larger",)]
    artefacts.append(make_artefact(model_folder, tmp_path / "artefact"))
    with pytest.raises(UserError, match="do not share an encoder"):
        measure_process(artefacts, 2, TEXTS)
