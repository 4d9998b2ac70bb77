"""The real server in a process of its own, with a stand-in for the model; run by tests.

python -m tests.inference.stand_in_server PORT SECONDS_PER_TOKEN
"""

from __future__ import annotations

import sys

import inference.app
from inference import serve
from inference.settings import Settings
from tests.inference.stand_in_model import stand_in

if __name__ == "__main__":
    port, seconds_per_token = sys.argv[1:]
    inference.app.app = inference.app.create_app(Settings(), stand_in(float(seconds_per_token)))
    sys.exit(serve.main(["--host", "127.0.0.1", "--port", port]))
