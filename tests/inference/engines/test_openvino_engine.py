from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from inference import export
from inference.engines.base import TokenBatch
from inference.engines.model_loader import ModelLoader

# NNCF takes ten seconds to import, so it is only looked for here.
MISSING = [name for name in ("openvino", "nncf") if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")]


@pytest.fixture(scope="module")
def openvino_folder(exported_folder: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(exported_folder, tmp_path_factory.mktemp("openvino") / "tiny"))
    arguments = ["--engine", "openvino", "--rows", str(rows_file), "--max_drop", "100"]
    assert export.main([str(folder), *arguments]) == 0
    return folder


def test_auto_takes_openvino_before_onnx(openvino_folder: Path) -> None:
    info = ModelLoader(openvino_folder).info
    assert info["engine"] == "openvino int8"
    assert "openvino is the fastest artefact" in info["reason"]


def test_int8_disagrees_with_the_reference_as_its_manifest_says(openvino_folder: Path, rows_file: Path) -> None:
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    answers = ModelLoader(openvino_folder, "openvino").predict_batch([row["text"] for row in rows])
    changed = np.mean([answer["label"] != row["label"] for answer, row in zip(answers, rows, strict=True)])
    accuracy = json.loads((openvino_folder / "openvino" / "manifest.json").read_text())["accuracy"]
    # Static ranges: unlike dynamic ones they do not depend on a text's neighbours.
    assert accuracy["disagreement_percent"] == pytest.approx(100 * changed, abs=1e-3)


def test_no_text_is_longer_than_the_position_table_after_rounding(openvino_folder: Path) -> None:
    from inference.engines.openvino_engine import LENGTH_STEP, OpenVinoEngine

    config = json.loads((openvino_folder / "config.json").read_text())
    longest = LENGTH_STEP + 3
    engine = OpenVinoEngine(openvino_folder / "openvino", {**config, "max_position_embeddings": longest}, 1)
    ids = list(range(2, 2 + longest))
    alone = engine.logits(TokenBatch.of([ids]))
    beside_a_short_one = engine.logits(TokenBatch.of([ids, ids[:4]]))
    np.testing.assert_allclose(alone[0], beside_a_short_one[0], atol=1e-4)
