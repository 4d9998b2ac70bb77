from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from inference.batching.batcher import ASSUMED_TOKENS_PER_SECOND
from tests.inference.servers import metric, serving


@pytest.fixture(scope="module")
def client(model_folder: Path) -> httpx.Client:
    with serving(model_folder, explain_max_passes=16) as client:
        yield client


def test_a_word_weighs_what_the_probability_falls_without_it(client: httpx.Client) -> None:
    text = "Oil prices rise again"
    explained = client.post("/explain", json={"text": text}).json()
    whole = client.post("/predict", json={"text": text}).json()
    assert {name: explained[name] for name in whole} == whole
    assert [text[word["start"] : word["end"]] for word in explained["words"]] == text.split()
    assert [word["word"] for word in explained["words"]] == text.split()
    for i, word in enumerate(explained["words"]):
        others = [one for k, one in enumerate(text.split()) if k != i]
        without = client.post("/predict", json={"text": " ".join(others)}).json()
        expected = whole["confidence"] - without["probabilities"][whole["label"]]
        assert word["weight"] == pytest.approx(expected, abs=1e-9)


def test_the_only_word_weighs_against_knowing_nothing(client: httpx.Client) -> None:
    explained = client.post("/explain", json={"text": " Goal! "}).json()
    (word,) = explained["words"]
    assert (word["start"], word["end"]) == (1, 6)
    assert word["weight"] == pytest.approx(explained["confidence"] - 1 / 4)


def test_a_long_text_takes_no_more_passes_than_the_limit(client: httpx.Client) -> None:
    before = metric(client, "tokenized_texts_total")
    text = "oil prices rise again as stocks fall on wall street " * 300
    words = client.post("/explain", json={"text": text}).json()["words"]
    assert metric(client, "tokenized_texts_total") - before <= 16
    assert len(words) == 3000
    assert any(word["weight"] for word in words[:24])
    assert not any(word["weight"] for word in words[24:])  # the model reads 24 tokens


def test_words_of_a_group_share_its_weight(client: httpx.Client) -> None:
    words = client.post("/explain", json={"text": " ".join(f"oil{i}" for i in range(20))}).json()["words"]
    assert [word["weight"] for word in words[0::2]] == [word["weight"] for word in words[1::2]]


@pytest.mark.parametrize("text", ["", "  ", "&lt;p&gt;", "\x00", "\u200b\u200d\ufeff"])
def test_a_blank_text_cannot_be_explained(client: httpx.Client, text: str) -> None:
    response = client.post("/explain", json={"text": text})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "blank_text"


def test_any_characters_can_be_explained(client: httpx.Client) -> None:
    body = b'{"text": "oil \\ud83d \\u0000 \\ud83d\\ude00 \\u202etxet <b>bold</b> &amp; prices"}'
    response = client.post("/explain", content=body)
    assert response.status_code == 200
    assert [word["word"] for word in response.json()["words"]][:2] == ["oil", "?"]


def test_a_model_explains_in_as_many_passes_as_it_has_time_for(model_folder: Path) -> None:
    text = "oil prices rise again as stocks fall on wall street and ministers meet for talks"
    with serving(model_folder, max_wait_seconds=100 / ASSUMED_TOKENS_PER_SECOND) as client:
        explained = client.post("/explain", json={"text": text})
        assert explained.status_code == 200
        assert 2 <= metric(client, "tokenized_texts_total") < 8
        assert len(explained.json()["words"]) == len(text.split())
        refused = client.post("/predict/batch", json={"texts": [f"{word} {text}" for word in text.split()]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "call_too_large")
