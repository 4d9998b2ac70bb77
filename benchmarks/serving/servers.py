"""The servers that are compared: how each is started, what it is asked, and why its settings are its best."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = "benchmarks.serving.peers"
Body = Callable[[Sequence[str], bool], dict[str, Any]]
Labels = Callable[[Any], list[str]]


def _single_or_list(texts: Sequence[str], batch: bool) -> dict[str, Any]:
    return {"texts": list(texts)} if batch else {"text": texts[0]}


def _always_list(texts: Sequence[str], batch: bool) -> dict[str, Any]:
    return {"texts": list(texts)}


def _infinity_body(texts: Sequence[str], batch: bool) -> dict[str, Any]:
    return {"model": "model", "input": list(texts)}


def _labels(answers: Any) -> list[str]:
    return [answer["label"] for answer in answers]


def _infinity_labels(answers: Any) -> list[str]:
    return [max(scores, key=lambda one: one["score"])["label"] for scores in answers["data"]]


@dataclass(frozen=True)
class Server:
    """One server with one choice of settings.

    Attributes:
        command: arguments of its Python, with ``{port}`` for the port.
        artefact: the folder beside the weights that it serves; empty: the model folder itself, in
        fp32.
        settings: what was chosen and why, for the page.
        packages: the page shows their versions.
        python: which Python runs it: ``own`` (the benchmark's), ``peer`` or ``infinity``.
        paths: routes of a single text and of a list.
        body: the JSON of a request, from its texts and whether it goes to the list's route.
        labels: the labels in the answer to a list.
    """

    title: str
    command: tuple[str, ...]
    artefact: str
    settings: str
    packages: tuple[str, ...] = ()
    python: str = "peer"
    environment: dict[str, str] = field(default_factory=dict)
    paths: tuple[str, str] = ("/predict", "/predict/batch")
    body: Body = _single_or_list
    labels: Labels = _labels

    @property
    def is_ours(self) -> bool:
        return self.python == "own"

    def folder(self, model: Path) -> Path:
        return model / self.artefact

    def write_bodies(self, path: Path, texts: Sequence[str], size: int) -> None:
        """Write one JSON body per line, of ``size`` texts each; an incomplete last group is left out."""
        # All requests of a load have the same number of texts, so that requests can be counted as
        # texts.
        groups = [texts[i : i + size] for i in range(0, len(texts) - size + 1, size)]
        path.write_text("".join(json.dumps(self.body(group, size > 1)) + "\n" for group in groups))


def _ours(title: str, artefact: str, settings: str) -> Server:
    command = ("-m", "inference.serve", "--host", "127.0.0.1", "--port", "{port}")
    return Server(title, command, artefact, settings, python="own")


def _mosec(title: str, artefact: str, settings: str, **environment: str) -> Server:
    command = ("-m", f"{PEERS}.mosec_server", "--port", "{port}", "--log-level", "error")
    return Server(title, command, artefact, settings, ("mosec",), environment=environment)


def _miraserver(title: str, artefact: str, settings: str) -> Server:
    command, paths = ("-m", f"{PEERS}.miraserver_server"), ("/v2/models/news/infer",) * 2
    return Server(
        title, command, artefact, settings, ("miraserver",), environment=TUNED, paths=paths
    )


def _litserve(title: str, settings: str, **environment: str) -> Server:
    command, paths = ("-m", f"{PEERS}.litserve_server"), ("/predict", "/predict")
    return Server(
        title, command, "openvino", settings, ("litserve",), environment=environment, paths=paths
    )


# Of mosec and of those that are tuned as it is.
TUNED = {"SUB_BATCH": "8", "MAX_BATCH": "64", "WAIT_MS": "1"}
_TUNED = (
    "the worker sorts what it is given (up to 64 requests) by length and runs sub-batches of 8, so "
    "that hardly "
    "anything is padded; it waits 1 ms for a batch, because a lone client pays for every extra "
    "millisecond. These are "
    "the best of six settings in an earlier comparison, which included two workers with one thread "
    "each; its deadline "
    "is the default of 3 s"
)
_LITE_SERVER = (
    "a server in Rust with a Python worker, where the same as mosec tuned was the best of three "
    "waits (1, 5 and 20 ms); metrics and gRPC off"
)
_STOCK = "batches of up to 32, as in its documentation, padded to their longest text"

SERVERS = {
    "ours": _ours("**ours**", "", "everything at its default: `auto` picks the engine"),
    "ours_native": _ours("ours, native", "native", "the same as ours, with this artefact"),
    "ours_openvino": _ours("ours, OpenVINO", "openvino", "the same as ours, with this artefact"),
    "ours_onnx": _ours("ours, onnxruntime", "onnx", "the same as ours, with this artefact"),
    "naive": Server(
        "plain FastAPI + PyTorch",
        ("-m", f"{PEERS}.naive"),
        "",
        "the recipe of most tutorials: fp32, every text padded to 128 tokens, one forward pass per "
        "request in "
        "FastAPI's threads",
        ("fastapi", "torch", "transformers"),
    ),
    "bentoml": Server(
        "BentoML",
        (
            "-m",
            "bentoml",
            "serve",
            f"{PEERS}.bentoml_server:Classify",
            "--port",
            "{port}",
            "--host",
            "127.0.0.1",
        ),
        "openvino",
        f"{_STOCK}; its adaptive batcher decides when to run them; one worker with both cores; "
        "metrics and access log "
        "off",
        ("bentoml",),
        # Here and below, reports of usage are off: they would be sent while the server is measured.
        environment={"BENTOML_DO_NOT_TRACK": "true"},
        body=_always_list,
    ),
    "litserve": _litserve(
        "LitServe", f"{_STOCK}; 5 ms wait; one worker with both cores, one API process"
    ),
    "litserve_tuned": _litserve(
        "LitServe, tuned",
        "the same as mosec tuned, with LitServe's 5 ms wait",
        SUB_BATCH="8",
        MAX_BATCH="64",
    ),
    "mosec": _mosec(
        "mosec",
        "openvino",
        f"{_STOCK}; its default wait of 10 ms and deadline of 3 s; one worker with both cores",
    ),
    "mosec_tuned": _mosec("mosec, tuned", "openvino", _TUNED, **TUNED),
    "mosec_tuned_onnx": _mosec(
        "mosec, tuned, onnxruntime", "onnx", "the same as mosec tuned", **TUNED
    ),
    "miraserver_tuned": _miraserver("lite-server, tuned", "openvino", _LITE_SERVER),
    "miraserver_tuned_onnx": _miraserver("lite-server, tuned, onnxruntime", "onnx", _LITE_SERVER),
    "ray": Server(
        "Ray Serve",
        ("-m", f"{PEERS}.ray_server"),
        "openvino",
        f"{_STOCK}; 5 ms wait; one replica with both cores (not tuned further)",
        ("ray",),
        environment={"RAY_USAGE_STATS_ENABLED": "0"},
    ),
    "infinity": Server(
        "Infinity",
        ("-m", f"{PEERS}.infinity_server"),
        "onnx",
        "its optimum engine, the fastest that it has on a CPU, which reads the ONNX artefact; "
        "batches of up to 32, "
        "sorted by length by its own queue. Two of its bugs are worked around (see its script). "
        "Texts are sent as "
        "they are, because it does no cleaning",
        ("infinity_emb", "optimum", "onnxruntime"),
        python="infinity",
        environment={
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        },
        paths=("/classify", "/classify"),
        body=_infinity_body,
        labels=_infinity_labels,
    ),
}
DEFAULT = ["ours", "naive", "bentoml", "litserve", "infinity", "mosec", "mosec_tuned"]


def package_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages in another Python; those that it lacks are left out."""
    code = (
        # One start of the other Python for all packages. Those that it lacks are left out before
        # they are asked for, because asking for them would raise.
        "import importlib.metadata as metadata, json, sys\n"
        "names = {one.metadata['Name'] for one in metadata.distributions()} & set(sys.argv[1:])\n"
        "print(json.dumps({name: metadata.version(name) for name in sys.argv[1:] if name in "
        "names}))"
    )
    done = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}
