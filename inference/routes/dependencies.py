"""What routes ask for: the settings, the served model, the loaded model."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from inference.model_loader import ModelLoader
from inference.served_model import ServedModel
from inference.settings import Settings


async def _settings(request: Request) -> Settings:
    return request.app.state.settings


async def _served_model(request: Request) -> ServedModel:
    return request.app.state.served_model


SettingsDep = Annotated[Settings, Depends(_settings)]
ServedModelDep = Annotated[ServedModel, Depends(_served_model)]


async def _loaded_model(served_model: ServedModelDep) -> ModelLoader:
    return served_model.require()


LoadedModelDep = Annotated[ModelLoader, Depends(_loaded_model)]
