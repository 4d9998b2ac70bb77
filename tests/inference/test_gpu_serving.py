"""Serving on a GPU; without one the same tests run on the CPU, so that they are known to work when they meet one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from common.model_folder import read_saved_model
from common.text import TextTokenizer
from inference.engines.base import TokenBatch
from inference.engines.torch_engine import TorchEngine
from tests.inference.servers import free_port, running
from tests.processes import wait_until

pytestmark = pytest.mark.gpu
HAS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def expected(model_folder: Path, texts: list[str]) -> list[np.ndarray]:
    """The logits of each text, by transformers on the CPU."""
    reference = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    with torch.no_grad():
        return [reference(torch.tensor([ids])).logits.numpy() for ids in _token_ids(model_folder, texts)]


def _token_ids(folder: Path, texts: list[str]) -> list[list[int]]:
    saved = read_saved_model(folder)
    tokenizer = TextTokenizer.from_json(saved.tokenizer_json, saved.max_length)
    return [list(text.ids) for text in tokenizer.encode(texts)]


# Without a GPU half precision runs on the CPU as well: slowly, and by the same code.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-1), ("fp16", 1e-2)])
def test_the_torch_engine_answers_on_its_device_as_transformers_does_on_the_cpu(
    model_folder: Path, texts: list[str], expected: list[np.ndarray], precision: str, tolerance: float
) -> None:
    engine = TorchEngine(read_saved_model(model_folder).config, model_folder / "model.safetensors", precision)
    assert engine.device.type == ("cuda" if HAS_GPU else "cpu")

    for ids, logits in zip(_token_ids(model_folder, texts), expected, strict=True):
        np.testing.assert_allclose(engine.logits(TokenBatch.of([ids])), logits, atol=tolerance * np.abs(logits).max())


def test_a_server_whose_device_broke_is_not_ready_and_answers_503(model_folder: Path, tmp_path: Path) -> None:
    port, broken = free_port(), tmp_path / "broken"
    command = [sys.executable, "-m", "tests.inference.breakable_server", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"MODEL_CHECKPOINT": str(model_folder), "BREAK_WHEN": str(broken)}
    with running(command, port, tmp_path / "log", **settings) as server:
        ask = {"text": "Oil prices rise again"}
        assert server.client.post("/predict", json=ask).status_code == 200
        broken.touch()

        def is_refused() -> bool:
            return server.client.post("/predict", json=ask).status_code == 503

        # The first failing passes are answered with 503 as well; after three of them the server is not ready.
        wait_until(lambda: is_refused() and server.client.get("/readyz").status_code == 503)

        assert "Retry-After" in server.client.post("/predict", json=ask).headers
        broken.unlink()
        if HAS_GPU:  # a CUDA error sticks: nothing but a new process helps, and liveness asks for one
            assert server.client.get("/livez").status_code == 503
        else:
            wait_until(lambda: server.client.post("/predict", json=ask).status_code == 200)
            assert server.client.get("/readyz").status_code == 200
