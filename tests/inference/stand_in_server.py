"""The real server in a process of its own, with a stand-in for the model; run by tests.

SECONDS_PER_TOKEN=0.001 python -m tests.inference.stand_in_server --port PORT
SECONDS_PER_TOKEN=0.001 uvicorn tests.inference.stand_in_server:app
"""

from __future__ import annotations

import os
import sys

from inference import serve
from inference.app import create_app
from inference.settings import Settings
from tests.inference.stand_in_model import stand_in

load_model = stand_in(float(os.environ["SECONDS_PER_TOKEN"]))
app = create_app(Settings(), load_model)

if __name__ == "__main__":
    sys.exit(serve.main(load_model=load_model))
