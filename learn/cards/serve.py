"""The cards on a page: python -m learn.cards serve."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, Field, ValidationError

from common.errors import UserError
from learn.cards.data import MAX_RANKS
from learn.cards.picture import pipeline_picture
from learn.cards.pipeline import Node, Pipeline
from learn.cards.report import render_page
from learn.cards.session import Refused, Session

HOST = "127.0.0.1"
# A run has thousands of events per second; the page needs no more updates than this.
UPDATE_INTERVAL = 0.05

router = APIRouter()


def get_session(request: Request) -> Session:
    return request.app.state.session


InSession = Annotated[Session, Depends(get_session)]


def get_node(node_id: str, session: InSession) -> Node:
    try:
        return session.pipeline.node(node_id)
    except UserError as error:
        raise HTTPException(404, str(error)) from error


ThisNode = Annotated[Node, Depends(get_node)]


class Reset(BaseModel):
    workers: int | None = Field(None, ge=1, le=MAX_RANKS, description="ranks; by default as many as before")


@router.get("/")
def show_page() -> HTMLResponse:
    # Not in a frame of another page, which could trick users into clicking here.
    headers = {"Cache-Control": "no-cache", "Content-Security-Policy": "frame-ancestors 'none'"}
    return HTMLResponse(render_page(), headers=headers)


@router.get("/api/pipeline")
def show_pipeline(session: InSession) -> dict[str, Any]:
    """Answer with the wiring, how the cards are set, and how far they are."""
    return pipeline_picture(session.pipeline) | {"state": session.state()}


@router.get("/api/nodes/{node_id}")
def show_node(node: ThisNode, session: InSession) -> list[dict[str, Any]]:
    """Answer with what a card made, and what each rank held before and after it."""
    return session.picture(node.id)


@router.put("/api/nodes/{node_id}/config")
def configure(node: ThisNode, values: dict[str, Any], session: InSession) -> JSONResponse:
    """Set a card and start over; each field that it does not take is answered with a line."""
    try:
        node.card.config_schema.model_validate(node.config.model_dump() | values)
    except ValidationError as error:
        lines = {".".join(map(str, wrong["loc"])): wrong["msg"] for wrong in error.errors()}
        return JSONResponse({"fields": lines}, 422)
    session.configure(node.id, values)
    return JSONResponse(session.state())


@router.post("/api/step")
def step(session: InSession) -> dict[str, Any]:
    session.step()
    return session.state()


@router.post("/api/run")
def run(session: InSession) -> dict[str, Any]:
    session.run()
    return session.state()


@router.post("/api/reset")
def reset(asked: Reset, session: InSession) -> dict[str, Any]:
    session.reset(asked.workers)
    return session.state()


@router.get("/api/events", response_class=EventSourceResponse)
async def follow(session: InSession) -> AsyncIterator[dict[str, Any]]:
    """Stream the state whenever it changes, and each loss only once."""
    run, losses = 0, 0
    with session.follow() as changed:
        while not session.is_over:
            changed.clear()
            state = session.state(run, losses)
            run, losses = state["run"], state["losses_from"] + len(state["losses"])
            yield state
            await asyncio.sleep(UPDATE_INTERVAL)
            await changed.wait()


def refuse_other_origins(request: Request) -> None:
    """Refuse requests from other origins' pages, because requests start processes here.

    The Host header names this machine unless a foreign name was made to lead here (DNS rebinding); the Origin header
    comes with whatever a browser sends for a page.
    """
    host = request.headers.get("host", "")
    if host.partition(":")[0] not in (HOST, "localhost"):
        raise HTTPException(403, f"Host {host}: only {HOST} and localhost are answered")
    origin = request.headers.get("origin", f"http://{host}")
    if origin != f"http://{host}":
        raise HTTPException(403, f"Origin {origin}: only this server's own page may ask")


def create_app(session: Session) -> FastAPI:
    app = FastAPI(dependencies=[Depends(refuse_other_origins)], docs_url=None, redoc_url=None, openapi_url=None)
    app.state.session = session
    app.include_router(router)

    @app.exception_handler(Refused)
    @app.exception_handler(UserError)
    def refuse(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 409)

    return app


class _Server(uvicorn.Server):
    """Ends the event streams on shutdown instead of waiting for them."""

    def __init__(self, session: Session) -> None:
        super().__init__(uvicorn.Config(create_app(session), log_level="warning"))
        self.session = session

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.session.end()


def serve_page(pipeline: Pipeline, folder: Path, port: int) -> None:
    """Serve the page until SIGTERM or Ctrl-C."""
    try:
        listener = socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) else "a port is 0 to 65535"
        raise UserError(f"--port {port}: cannot listen there ({reason}); choose another", code="port-in-use") from error
    with listener, Session(pipeline, folder) as session:
        print(f"The cards of {pipeline.path}: http://{HOST}:{listener.getsockname()[1]} (Ctrl-C ends it)", flush=True)
        _Server(session).run(sockets=[listener])
