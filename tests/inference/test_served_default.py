"""The model that a clone serves before anything was trained in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.inference.servers import REPOSITORY, free_port, running

HEADLINES = {
    "Business": "Oil prices climb to a record as refiners report falling stocks and traders fear a winter shortage",
    "Sports": "Striker scores twice in the final minutes to send the visitors into the semi-finals of the cup",
    "Sci/Tech": "Scientists say new images from the orbiter show dried river beds on Mars, NASA announced",
    "World": "Rebels and government troops agree on a ceasefire after a week of talks led by the United Nations",
}


def test_a_server_without_a_model_named_answers_real_headlines_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL_CHECKPOINT", raising=False)
    monkeypatch.chdir(REPOSITORY)
    port = free_port()
    command = [sys.executable, "-m", "inference.serve", "--host", "127.0.0.1", "--port", str(port)]
    with running(command, port, tmp_path / "log") as server:
        answers = server.client.post("/predict/batch", json={"texts": list(HEADLINES.values())}).json()
        engine = server.client.get("/model").json()["engine"]["engine"]

    assert [answer["label"] for answer in answers] == list(HEADLINES)
    assert engine == "native int8"


def test_the_model_of_the_repository_is_small_and_its_card_says_on_what_terms_it_may_be_used() -> None:
    folder = REPOSITORY / "checkpoints" / "news"
    # But for the hashes of its training texts, which no image and no visitor gets.
    served = [file for file in folder.rglob("*") if file.is_file() and file.name != "seen_texts.bin"]
    assert sum(file.stat().st_size for file in served) <= 8.3e6
    assert "research and other non-commercial use" in (folder / "README.md").read_text()
