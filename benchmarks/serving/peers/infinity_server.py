"""Infinity: its optimum engine over our ONNX int8 file, in a folder laid out as it looks for one.

Two of its bugs are worked around here: it passes optimum an absolute file name where a relative one
is expected, and its warm-up sends texts longer than the model's positions (so warm-up is off).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from infinity_emb.transformer.classifier import optimum as engine

from benchmarks.serving.peers.classifier import FOLDER, PORT

MODEL_FILE = "model_quantized.onnx"


def make_folder(folder: Path) -> Path:
    """Make the folder that Infinity loads: the ONNX file under its name for int8, and a tokenizer
    it can read.

    In the current folder, which the benchmark removes.
    """
    made = Path("infinity_model").absolute()
    made.mkdir()
    (made / MODEL_FILE).symlink_to(next(folder.glob("*.onnx")).resolve())
    for name in ("config.json", "tokenizer.json"):
        (made / name).symlink_to((folder / name).resolve())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    # Version 5 of transformers writes one that version 4 lacks.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


if __name__ == "__main__":
    # The first bug: the engine asks this function for the file, and gives its answer to optimum. It
    # is replaced in the module that calls it, before the command line loads a model.
    engine.get_onnx_files = lambda **_: Path(MODEL_FILE)
    from infinity_emb.cli import cli

    options = (
        "--engine optimum --device cpu --no-model-warmup --batch-size 32 --onnx-disable-optimize"
    )
    options += f" --served-model-name model --log-level error --host 127.0.0.1 --port {PORT}"
    sys.argv = ["infinity_emb", "v2", "--model-id", str(make_folder(FOLDER)), *options.split()]
    cli()
