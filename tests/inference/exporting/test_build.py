from __future__ import annotations

import threading
from pathlib import Path

from common.model_folder import MANIFEST_FILE
from inference.exporting.build import replaced_whole


def test_an_artefact_exists_at_every_moment_while_it_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "onnx"
    target.mkdir()
    (target / MANIFEST_FILE).touch()
    is_over = threading.Event()
    missed = []

    def look() -> None:
        while not is_over.is_set():
            if not (target / MANIFEST_FILE).is_file():
                missed.append(1)

    watcher = threading.Thread(target=look)
    watcher.start()
    for i in range(300):
        with replaced_whole(target) as folder:
            (folder / MANIFEST_FILE).touch()
            (folder / str(i)).touch()
    is_over.set()
    watcher.join()
    assert not missed
    assert (target / "299").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]
