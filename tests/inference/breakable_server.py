"""The real server with the torch engine, whose device a test can break; run by tests.

BREAK_WHEN=FILE python -m tests.inference.breakable_server --port PORT: once FILE exists, a pass reads beyond the end of
a tensor. On a GPU that is a device-side assert, after which every CUDA call of the process fails, FILE or not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from inference import serve
from inference.engines.model_loader import ModelLoader

BREAK_WHEN = Path(os.environ["BREAK_WHEN"])


def _breakable(path: Path, engine: str) -> ModelLoader:
    model = ModelLoader(path, "torch")
    answer, device = model.engine.logits, model.engine.device

    def logits(*arguments: Any, **more: Any) -> Any:
        if BREAK_WHEN.exists():
            beyond = torch.zeros(1, device=device)[torch.tensor([9], device=device)]
            beyond.cpu()
        return answer(*arguments, **more)

    model.engine.logits = logits
    return model


if __name__ == "__main__":
    sys.exit(serve.main(load_model=_breakable))
