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
from pathlib import Path
from urllib.error import HTTPError

# A script finds only its own folder by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deployment.client import attempts, fetch, fetch_json

HEADLINES = (
    "Oil prices climb to a record as refiners report falling stocks and traders fear a winter "
    "shortage",
    "Striker scores twice in the final minutes to send the visitors into the semi-finals of the "
    "cup",
    "Scientists say new images from the orbiter show dried river beds on Mars, NASA announced",
)
ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model folder or .pt file")
    parser.add_argument("--port", type=int, default=7860, help="default: 7860")
    options = parser.parse_args()
    flags = f"--host 127.0.0.1 --port {options.port}".split()
    settings = {"MODEL_CHECKPOINT": str(options.model.resolve()), "LOG_LEVEL": "error"}
    command = [sys.executable, "-m", "inference.serve", *flags]
    server = subprocess.Popen(command, env=os.environ | settings, cwd=ROOT)
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
        answer = fetch_json(f"{address}/predict", {"text": headline})
        print(f"{answer['label']:9} {answer['confidence']:6.1%}  {headline}")
    engine = fetch_json(f"{address}/model")["engine"]["engine"]
    print(f"\nServed by the {engine} engine.", flush=True)
    # Only where somebody can press Ctrl-C: in a pipe or a script it would serve for ever.
    if sys.stdout.isatty():
        print(f"Open {address}/demo to try your own headlines. Serving until Ctrl-C ...")
        server.wait()
    else:
        setting, port = f"MODEL_CHECKPOINT={shlex.quote(str(model))}", address.rpartition(":")[2]
        print(f"Next: {setting} uvicorn inference.app:app --port {port}")
    return 0


def _wait_until_healthy(server: subprocess.Popen[bytes], address: str) -> str | None:
    """Poll /health; returns what went wrong, or None once a model is loaded."""
    reason = "no answer"
    for _ in attempts(START_SECONDS, pause=0.2):
        if server.poll() is not None:
            port = address.rpartition(":")[2]
            return f"the server ended with code {server.returncode}; is port {port} taken?"
        try:
            fetch(f"{address}/health", timeout=5)
            return None
        except HTTPError as error:
            # A server without a model answers 503 with its reason, which says more than that it did
            # not start in time.
            reason = json.load(error).get("error") or "still loading"
        except OSError:
            pass  # it does not listen yet
    return f"the server at {address} is not healthy after {START_SECONDS} s ({reason})"


if __name__ == "__main__":
    sys.exit(main())
