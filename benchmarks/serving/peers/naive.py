"""The plain recipe: FastAPI and transformers in fp32, every text padded to 128, one forward pass per request."""

from __future__ import annotations

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.serving.peers.classifier import FOLDER, PORT

app = FastAPI()
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER).eval()


class Text(BaseModel):
    text: str


class Texts(BaseModel):
    texts: list[str]


# Not `async`, as in most tutorials: FastAPI then calls them in threads, several at a time, and
# these compete for the cores in PyTorch.
@app.post("/predict")
def predict(request: Text) -> dict:
    return classify([request.text])[0]


@app.post("/predict/batch")
def predict_batch(request: Texts) -> list[dict]:
    return classify(request.texts)


def classify(texts: list[str]) -> list[dict]:
    inputs = tokenizer(
        texts, padding="max_length", truncation=True, max_length=128, return_tensors="pt"
    )
    with torch.no_grad():
        rows = model(**inputs).logits.softmax(dim=-1).tolist()
    labels = model.config.id2label
    return [
        {
            "label": labels[row.index(max(row))],
            "confidence": max(row),
            "probabilities": {labels[i]: value for i, value in enumerate(row)},
        }
        for row in rows
    ]


if __name__ == "__main__":
    uvicorn.run(app, port=PORT, log_level="warning", access_log=False)
