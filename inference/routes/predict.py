"""Classifying texts. These routes are plain functions: FastAPI runs them in threads, off its event loop."""

from __future__ import annotations

from fastapi import APIRouter

from inference.error_responses import REFUSALS
from inference.errors import RefusedTextError
from inference.model_loader import Prediction
from inference.routes.dependencies import LoadedModelDep, SettingsDep
from inference.schemas import BatchRequest, PredictionResponse, PredictRequest
from inference.settings import Settings

router = APIRouter(prefix="/predict", tags=["predict"], responses=REFUSALS)


@router.post("", response_model=PredictionResponse)
def predict(request: PredictRequest, model: LoadedModelDep, settings: SettingsDep) -> Prediction:
    """Classify one text."""
    _refuse_long("text", request.text, settings)
    return model.predict(request.text)


@router.post("/batch", response_model=list[PredictionResponse])
def predict_batch(request: BatchRequest, model: LoadedModelDep, settings: SettingsDep) -> list[Prediction]:
    """Classify texts; the answers come in the order of the texts."""
    if len(request.texts) > settings.max_batch_texts:
        raise RefusedTextError(
            "too_many_texts",
            f"texts has {len(request.texts)} entries > maximum {settings.max_batch_texts}; send more batches",
        )
    for position, text in enumerate(request.texts):
        _refuse_long(f"texts[{position}]", text, settings)
    return model.predict_batch(request.texts)


def _refuse_long(name: str, text: str, settings: Settings) -> None:
    if len(text) > settings.max_text_chars:
        raise RefusedTextError(
            "text_too_long",
            f"{name} has {len(text)} characters > maximum {settings.max_text_chars}; shorten it",
        )
