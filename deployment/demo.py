"""Start the server on a model, send it three headlines over HTTP, and show where its page is.

python deployment/demo.py MODEL [--port 7860]. In a terminal it keeps serving until Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HEADLINES = (
    "Oil prices climb to a record as refiners report falling stocks and traders fear a winter shortage",
    "Striker scores twice in the final minutes to send the visitors into the semi-finals of the cup",
    "Scientists say new images from the orbiter show dried river beds on Mars, NASA announced",
)
START_SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder or .pt file")
    parser.add_argument("--port", type=int, default=7860, help="default: 7860")
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "inference.serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(options.port),
    ]
    environment = os.environ | {
        "MODEL_CHECKPOINT": str(options.model.resolve()),
        "LOG_LEVEL": "error",
    }
    root = Path(__file__).resolve().parents[1]
    server = subprocess.Popen(command, env=environment, cwd=root)
    try:
        return _ask(server, options.model, f"http://127.0.0.1:{options.port}")
    except KeyboardInterrupt:
        return 0
    finally:
        server.terminate()
        server.wait()


def _ask(server: subprocess.Popen[bytes], model: Path, address: str) -> int:
    if problem := _wait_until_healthy(server, address):
        print(f"error: {problem} [demo-failed]", file=sys.stderr)
        return 2
    for headline in HEADLINES:
        answer = _post(f"{address}/predict", {"text": headline})
        print(f"{answer['label']:9} {answer['confidence']:6.1%}  {headline}")
    engine = _get(f"{address}/model")["engine"]["engine"]
    print(f"\nServed by the {engine} engine.", flush=True)
    if sys.stdout.isatty():
        print(f"Open {address}/demo to try your own headlines. Serving until Ctrl-C ...")
        server.wait()
    else:
        port = address.rpartition(":")[2]
        print(
            f"Next: MODEL_CHECKPOINT={shlex.quote(str(model))} uvicorn inference.app:app --port {port}"
        )
    return 0


def _wait_until_healthy(server: subprocess.Popen[bytes], address: str) -> str | None:
    """Poll /health; returns what went wrong, or None once a model is loaded."""
    deadline = time.monotonic() + START_SECONDS
    reason = "no answer"
    while time.monotonic() < deadline:
        if server.poll() is not None:
            return f"the server ended with code {server.returncode}; is port {address.rsplit(':', 1)[1]} taken?"
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return None
        except urllib.error.HTTPError as error:
            reason = json.load(error).get("error") or "still loading"
        except OSError:
            pass
        time.sleep(0.2)
    return f"the server at {address} is not healthy after {START_SECONDS} s ({reason})"


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def _post(url: str, body: dict[str, str]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
