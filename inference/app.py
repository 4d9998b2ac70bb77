"""The server: `uvicorn inference.app:app`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from inference.body_limit import BodyLimitMiddleware
from inference.error_responses import add_error_handlers
from inference.routes import health, pages, predict
from inference.served_model import ServedModel
from inference.settings import Settings


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    # The port is open at once: /health tells the truth while the model loads beside the event loop.
    loading = asyncio.create_task(asyncio.to_thread(app.state.served_model.load))
    yield
    await loading


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the server; without `settings` they are read from the environment."""
    settings = settings or Settings()
    app = FastAPI(
        title="DistriNews",
        description="Which kind of news is this text?",
        lifespan=_lifespan,
    )
    app.state.settings = settings
    app.state.served_model = ServedModel(settings.model_checkpoint)
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    add_error_handlers(app)
    for group in (pages, health, predict):
        app.include_router(group.router)
    return app


app = create_app()
