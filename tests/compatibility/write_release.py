"""Write what a release leaves with its users, for `test_earlier_releases.py`: run this in a checkout of the release.

    git worktree add build/v1.0.0 v1.0.0 && (cd build/v1.0.0 && python deployment/compile_kernels.py)
    python -m tests.compatibility.write_release build/v1.0.0 1.0.0

It trains, exports and serves with the code of that checkout, and writes two files into this folder. VERSION.tar.xz has
a model folder with its artefacts, the .pt file, the rows, and the run with one checkpoint. VERSION.json has the logits
of each engine, the loss of each step, and requests with their responses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast

from tests.processes import free_port, wait_until

FOLDER = Path(__file__).resolve().parent
ENGINES = ("torch", "native", "onnx")
# In the middle of an epoch, so that resuming also has to find the row to continue with.
CHECKPOINT = "model.run/checkpoints/step_00000012"
KEPT = ("model", "model.pt", "rows", "model.run/config.yaml", CHECKPOINT)
WORDS = ("storm", "wind", "rain", "sun", "sand", "heat", "at", "and", "noon", "sea")
TEXTS = ["Storm and rain at noon", "Sun, sand & heat", "sea " * 30, "Köln 😀 <b>wind</b>"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)  # sent as a stream
TENSOR = {"name": "text", "shape": [2], "datatype": "BYTES", "data": TEXTS[:2]}
LOGITS = {"inputs": TEXTS, "parameters": {"function_to_apply": "none"}}
# What clients send. A path that the release does not have is left out.
REQUESTS: list[tuple[str, Any]] = [
    *((path, None) for path in ("/health", "/readyz", "/model", "/models", "/v2", "/v2/models/model")),
    ("/predict", {"text": TEXTS[0]}),
    ("/predict", {"text": TEXTS[2], "top_k": 1}),
    ("/predict", {"text": " "}),
    ("/predict", {"txt": "rain"}),
    ("/predict/batch", {"texts": TEXTS}),
    ("/predict/batch", LINES),
    ("/explain", {"text": TEXTS[0]}),
    ("/hub", LOGITS),
    ("/hub", {"inputs": TEXTS[0]}),
    ("/v2/models/model/infer", {"id": "mine", "inputs": [TENSOR]}),
    ("/classify", {"input": TEXTS}),
    ("/classify", {"inputs": TEXTS[0]}),
    ("/classify", {"text": TEXTS[0]}),
    ("/v1/classify", {"input": TEXTS[0], "top_k": 1}),
]


def main(tree: Path, version: str) -> None:
    """Write the two files of a release whose source is in `tree`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_rows(folder / "rows")
        write_encoder(folder / "encoder")
        train_and_export(tree, folder)
        logits = {}
        for engine in ENGINES:
            with serving(tree, folder, engine) as client:
                found = client.post("/hub", json=LOGITS).raise_for_status().json()
                logits[engine] = [{one["label"]: one["score"] for one in scores} for scores in found]
                exchanges = [one for path, body in REQUESTS if (one := exchange(client, path, body))["status"] != 404]
        steps = [json.loads(line) for line in (folder / "model.run/metrics.jsonl").read_text().splitlines()]
        losses = {one["step"]: one["loss"] for one in steps if one["kind"] == "step"}
        record = {"texts": TEXTS, "logits": logits, "losses": losses, "exchanges": exchanges}
        (FOLDER / f"{version}.json").write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n")
        with tarfile.open(FOLDER / f"{version}.tar.xz", "w:xz") as archive:
            for name in KEPT:
                archive.add(folder / name, name, filter=without_owner)


def write_rows(folder: Path) -> None:
    folder.mkdir()
    for split, count in (("train", 40), ("test", 20)):
        rows = [f"{WORDS[i % 6]} and {WORDS[i * 5 % 6]} at {i},{'storm' if i % 6 < 3 else 'sun'}" for i in range(count)]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")


def write_encoder(folder: Path) -> None:
    """A DistilBERT with random weights, as small as the int8 kernels allow, and without dropout.

    Without dropout, the losses of a resumed run do not depend on how a release draws it.
    """
    letters = [prefix + letter for prefix in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(0)
    sizes = {"dim": 32, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 16}
    dropouts = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    config = DistilBertConfig(vocab_size=len(pieces), initializer_range=0.3, **sizes, **dropouts)
    DistilBertModel(config).save_pretrained(folder)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), pieces, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **names).save_pretrained(folder)


def train_and_export(tree: Path, folder: Path) -> None:
    flags = "--dataset rows --model encoder --output_dir model --max_length 16 --epochs 4 --batch_size 8"
    flags += " --learning_rate 0.01 --device cpu --precision fp32 --save_every 6 --keep_every 6 --log_every 1"
    commands = [["training.train_single", *flags.split()]]
    for engine in ENGINES[1:]:
        # Any drop is allowed: what matters is that later releases give the same answers.
        export = ["inference.export", "model", "--engine", engine]
        commands.append([*export, "--rows", "rows/test.csv", "--max_drop", "100"])
    for command in commands:
        subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment_of(tree), check=True)


def environment_of(tree: Path, **settings: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree.resolve()), **settings}


@contextmanager
def serving(tree: Path, folder: Path, engine: str) -> Iterator[httpx.Client]:
    """Serve the model with this engine, as the release does."""
    port = free_port()
    environment = environment_of(tree, MODEL_CHECKPOINT="model", ENGINE=engine)
    process = subprocess.Popen(
        [sys.executable, "-m", "inference.serve", "--port", str(port)], cwd=folder, env=environment
    )

    def is_ready() -> bool:
        assert process.poll() is None, "the server has ended"
        try:
            return client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_until(is_ready)
            yield client
    finally:
        process.terminate()
        process.wait()


def exchange(client: httpx.Client, path: str, body: Any) -> dict[str, Any]:
    """Send one request; returns it with what came back, where a stream is a list with one value per line."""
    if body is None:
        response = client.get(path)
    elif isinstance(body, str):
        response = client.post(path, content=body.encode(), headers={"content-type": "application/x-ndjson"})
    else:
        response = client.post(path, json=body)
    lines = response.text.splitlines() if isinstance(body, str) else [response.text]
    values = [json.loads(line) for line in lines]
    answer = values if isinstance(body, str) else values[0]
    return {"path": path, "body": body, "status": response.status_code, "answer": answer}


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
