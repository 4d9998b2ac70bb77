"""The real server in a process of its own, with a stand-in for the model; run by tests.

SECONDS_PER_TOKEN=0.001 python -m tests.inference.stand_in_server --port PORT
SECONDS_PER_TOKEN=0.001 uvicorn tests.inference.stand_in_server:app

With LOAD_ONE_AT_ONCE=FOLDER one worker loads at once, and the others wait until there is a file FOLDER/go.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from inference import serve
from inference.app import create_app
from inference.engines.model_loader import ModelLoader
from inference.settings import Settings
from tests.inference.stand_in_model import stand_in
from tests.processes import wait_until


def load_model(path: Path, engine: str) -> ModelLoader:
    if folder := os.environ.get("LOAD_ONE_AT_ONCE"):
        try:
            Path(folder, "one").touch(exist_ok=False)
        except FileExistsError:
            wait_until(Path(folder, "go").exists)
    return stand_in(float(os.environ["SECONDS_PER_TOKEN"]))(path, engine)


app = create_app(Settings(), load_model)

if __name__ == "__main__":
    sys.exit(serve.main(load_model=load_model))
