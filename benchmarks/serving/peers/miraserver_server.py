"""lite-server (package miraserver): a Rust front that batches for a Python worker over ZeroMQ."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml
from lite_server import LitAPI

from benchmarks.serving.peers.classifier import PORT, PeerClassifier

SUB_BATCH = int(os.environ.get("SUB_BATCH", "0")) or None
MODEL = "news"
SERVER = {
    "server": {"host": "127.0.0.1", "http_port": PORT},
    "grpc": {"enabled": False},
    "metrics": {"enabled": False},
    "logging": {"level": "error"},
    "model_repository": {"path": "./repository"},
    "orchestration": {"control_mode": "explicit", "load_models": [MODEL]},
}
WORKER = {
    "max_batch_size": int(os.environ.get("MAX_BATCH", "32")),
    "batch_timeout": int(os.environ.get("WAIT_MS", "5")) / 1000,
}


class Classify(LitAPI):
    """One route answers single texts and lists."""

    def setup(self, device: str) -> None:
        self.classifier = PeerClassifier(sub_batch=SUB_BATCH)

    def predict(self, x: Any) -> Any:
        # A request that waits for no other comes as it is, without a batch around it.
        return self.classifier.answer(x) if isinstance(x, list) else self.classifier.answer([x])[0]


def write_repository(folder: Path) -> None:
    """Write the server's configuration and its folder of models, with the one version of one model."""
    version = folder / "repository" / MODEL / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(f"from {__spec__.name} import Classify\n")
    (version / "config.yaml").write_text(yaml.safe_dump(WORKER))
    (folder / "server.yaml").write_text(yaml.safe_dump(SERVER))


if __name__ == "__main__":
    # Into the current folder, which the benchmark removes.
    write_repository(Path.cwd())
    from lite_server.cli import main

    # The worker is whatever `python3` is on the path, which need not be this Python.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    sys.argv = ["lite-server", "serve", "--config", "server.yaml"]
    main()
