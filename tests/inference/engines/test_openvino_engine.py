from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
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
    export.main([str(folder), *arguments])
    return folder


def test_auto_measures_openvino_and_onnx(openvino_folder: Path) -> None:
    info = ModelLoader(openvino_folder).info
    assert info["engine"] in ("openvino int8", "onnx int8")
    assert re.search(r"openvino(?: makes)? [\d,]+", info["reason"])
    assert re.search(r"onnx(?: makes)? [\d,]+", info["reason"])


def test_the_weights_are_in_memory_and_not_mapped_from_their_file(openvino_folder: Path) -> None:
    model = ModelLoader(openvino_folder, "openvino")
    assert str(openvino_folder) not in Path("/proc/self/maps").read_text()
    assert model.predict("oil")["label"]


def test_int8_disagrees_with_the_reference_as_its_manifest_says(openvino_folder: Path, rows_file: Path) -> None:
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    answers = ModelLoader(openvino_folder, "openvino").predict_batch([row["text"] for row in rows])
    changed = np.mean([answer["label"] != row["label"] for answer, row in zip(answers, rows, strict=True)])
    accuracy = json.loads((openvino_folder / "openvino" / "manifest.json").read_text())["accuracy"]
    # Static ranges: unlike dynamic ones they do not depend on a text's neighbours.
    assert accuracy["disagreement_percent"] == pytest.approx(100 * changed, abs=1e-3)


def test_passes_that_run_at_the_same_time_answer_as_alone(openvino_folder: Path, texts: list[str]) -> None:
    model = ModelLoader(openvino_folder, "openvino")
    alone = [model.predict(text) for text in texts * 10]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(model.predict, texts * 10)) == alone


def test_no_text_is_longer_than_the_position_table_after_rounding(openvino_folder: Path) -> None:
    from inference.engines.openvino_engine import LENGTH_STEP, OpenVinoEngine

    config = json.loads((openvino_folder / "config.json").read_text())
    longest = LENGTH_STEP + 3
    engine = OpenVinoEngine(openvino_folder / "openvino", {**config, "max_position_embeddings": longest}, 1)
    ids = list(range(2, 2 + longest))
    alone = engine.logits(TokenBatch.of([ids]))
    beside_a_short_one = engine.logits(TokenBatch.of([ids, ids[:4]]))
    np.testing.assert_allclose(alone[0], beside_a_short_one[0], atol=1e-4)
