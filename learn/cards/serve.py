"""The cards on a page: python -m learn.cards serve."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import uvicorn
import yaml
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import UserError, first_line
from learn.cards.base import CardConfig
from learn.cards.data import MAX_RANKS, LoadDatasetConfig
from learn.cards.picture import card_facts, pipeline_picture
from learn.cards.pipeline import Node, Pipeline, WiringError, check_document
from learn.cards.report import render_page
from learn.cards.session import Refused, Session
from learn.cards.strategy import SetupProcessGroupConfig
from learn.cards.tables import is_address

HOST = "127.0.0.1"
# A run has thousands of events per second; the page needs no more updates than this.
UPDATE_INTERVAL = 0.05

router = APIRouter()


def get_session(request: Request) -> Session:
    return request.app.state.session


class PageReach:
    """What a page's settings may have read or called: less than what the pipeline's file may, which
    is the owner's.

    Args:
        pipeline: as the command line gave it; what it names stays usable.
        folder: whose files the page may have read.
    """

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        outward = [_outward(node.config) for node in pipeline.nodes]
        self._given = {setting for settings in outward for setting in settings.items()}

    def refusals(self, config: CardConfig) -> dict[str, str]:
        """The fields that name something out of reach, each with a line."""
        lines = {
            "source_url": f"the page may read only iris and files below {self.folder}, where the server was started",
            "init_method": "the page takes only env://",
        }
        return {
            field: f"{value!r}: {lines[field]}; for another one, name it in the pipeline's file"
            for field, value in _outward(config).items()
            if value not in ("iris", "env://") and (field, value) not in self._given
            if field != "source_url" or not self._is_inside(value)
        }

    def _is_inside(self, source: str) -> bool:
        try:
            # Resolved, so that a link or .. in the folder does not lead out of it.
            path = Path(os.path.realpath(source))
            return not is_address(source) and path.is_relative_to(self.folder)
        except ValueError:  # no path has a null character
            return False


def _outward(config: CardConfig) -> dict[str, str]:
    """The settings that name a file or a machine."""
    if isinstance(config, LoadDatasetConfig):
        return {"source_url": config.source_url}
    if isinstance(config, SetupProcessGroupConfig):
        return {"init_method": config.init_method}
    return {}


def get_reach(request: Request) -> PageReach:
    return request.app.state.reach


Reach = Annotated[PageReach, Depends(get_reach)]
InSession = Annotated[Session, Depends(get_session)]


def get_node(node_id: str, session: InSession) -> Node:
    try:
        return session.pipeline.node(node_id)
    except UserError as error:
        raise HTTPException(404, str(error)) from error


ThisNode = Annotated[Node, Depends(get_node)]


# Far more than a pipeline needs: a page that sends more is not this one.
MAX_BODY_BYTES = 64 * 1024
MAX_NODES = 50
# Of a file: the time to read brackets within brackets grows with their number squared.
MAX_BRACKETS = 500
Name = Annotated[str, Field(max_length=200)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Setting = bool | int | Number | Annotated[str, Field(max_length=1000)] | None


class EditedNode(BaseModel):
    """A node as the page or an uploaded file has it; it is checked with the pipeline."""

    model_config = ConfigDict(extra="forbid")

    id: Name
    card: Name
    config: dict[Name, Setting] = Field({}, max_length=MAX_NODES)
    inputs: dict[Name, Name] = Field({}, max_length=MAX_NODES)


class Wiring(BaseModel):
    model_config = ConfigDict(extra="forbid")

    nodes: list[EditedNode] = Field(max_length=MAX_NODES)


class Upload(BaseModel):
    yaml: str


class Reset(BaseModel):
    workers: int | None = Field(
        None,
        ge=1,
        le=MAX_RANKS,
        description="ranks; by default as many as before",
    )


@router.get("/")
def show_page(request: Request) -> HTMLResponse:
    # Not in a frame of another page, which could trick users into clicking here.
    headers = {"Cache-Control": "no-cache", "Content-Security-Policy": "frame-ancestors 'none'"}
    page = HTMLResponse(render_page(), headers=headers)
    # With it the page's scripts ask.
    page.set_cookie(cookie_name(request), request.app.state.token, httponly=True, samesite="strict")
    return page


@router.get("/api/pipeline")
def show_pipeline(session: InSession) -> dict[str, Any]:
    """Answer with the wiring, how the cards are set, and how far they are."""
    return pipeline_picture(session.pipeline) | {"state": session.state()}


@router.get("/api/nodes/{node_id}")
def show_node(node: ThisNode, session: InSession) -> list[dict[str, Any]]:
    """Answer with what a card made, and what each rank held before and after it."""
    return session.picture(node.id)


@router.put("/api/nodes/{node_id}/config")
def configure(
    node: ThisNode,
    values: dict[str, Any],
    session: InSession,
    reach: Reach,
) -> JSONResponse:
    """Set a card and start over; each field that it does not take is answered with a line."""
    try:
        config = node.card.config_schema.model_validate(node.config.model_dump() | values)
    except ValidationError as error:
        lines = {".".join(map(str, wrong["loc"])): wrong["msg"] for wrong in error.errors()}
        return JSONResponse({"fields": lines}, 422)
    if lines := reach.refusals(config):
        return JSONResponse({"fields": lines}, 422)
    session.configure(node.id, values)
    return JSONResponse(session.state())


@router.get("/api/cards")
def show_cards(session: InSession) -> list[dict[str, Any]]:
    """Answer with the cards that a wiring may use: the twelve, and those in the file."""
    return [card_facts(card) for card in session.pipeline.cards.values()]


@router.post("/api/wiring/check")
def check_wiring(wiring: Wiring, session: InSession, reach: Reach) -> dict[str, Any]:
    """Answer with the mistakes of a wiring, or, if it has none, with its picture."""
    pipeline, mistakes = _checked(wiring, session, reach)
    return {"mistakes": mistakes, "pipeline": pipeline and pipeline_picture(pipeline)}


@router.put("/api/wiring")
def rewire(wiring: Wiring, session: InSession, reach: Reach) -> JSONResponse:
    """Take another wiring, and start over."""
    pipeline, mistakes = _checked(wiring, session, reach)
    if pipeline is None:
        return JSONResponse({"mistakes": mistakes}, 422)
    session.rewire(lambda _: pipeline)
    return JSONResponse(session.state())


@router.post("/api/wiring/yaml")
def write_yaml(wiring: Wiring, session: InSession, reach: Reach) -> dict[str, str]:
    """Answer with the file of a wiring, which need not be right yet."""
    document = wiring.model_dump()
    pipeline, _ = _checked(wiring, session, reach)
    for entry in document["nodes"]:
        if pipeline:  # numbers as numbers; a form has only text
            config = pipeline.node(entry["id"]).config
            entry["config"] = config.model_dump(mode="json", exclude_defaults=True)
        for part in ("config", "inputs"):
            if not entry[part]:
                del entry[part]
    return {"yaml": yaml.safe_dump(document, sort_keys=False, width=120)}


@router.post("/api/wiring/load")
def read_yaml(upload: Upload) -> JSONResponse:
    """Answer with the nodes of a file, for the page to edit. Nothing that it names is imported."""
    if upload.yaml.count("[") + upload.yaml.count("{") > MAX_BRACKETS:
        return JSONResponse({"detail": f"more than {MAX_BRACKETS} brackets"}, 422)
    try:
        document = yaml.safe_load(upload.yaml)
        return JSONResponse(Wiring.model_validate(document).model_dump())
    except ValidationError as error:
        wrong = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "the file"
        return JSONResponse({"detail": f"not a pipeline: {where}: {wrong['msg']}"}, 422)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return JSONResponse({"detail": f"not valid YAML: {first_line(error)}"}, 422)


def _checked(
    wiring: Wiring,
    session: Session,
    reach: PageReach,
) -> tuple[Pipeline | None, list[dict[str, str]]]:
    now = session.pipeline
    # With the cards of the file that the command line names: a page cannot have another one
    # imported.
    pipeline, mistakes = check_document(wiring.model_dump(), now.path, now.cards)
    for node in pipeline.nodes if pipeline else ():
        for field, line in reach.refusals(node.config).items():
            place, detail = f"config.{field}", f"config {field}: {line}"
            mistakes.append(WiringError(now.path, detail, node.id, place))
    answers = [{"node": one.node, "place": one.place, "message": one.detail} for one in mistakes]
    return None if mistakes else pipeline, answers


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


_HOST_HEADER = re.compile(rf"(?:{re.escape(HOST)}|localhost)(?::([0-9]{{1,5}}))?")


def cookie_name(request: Request) -> str:
    """With the port, because a browser sends a host's cookies to all of its ports."""
    return f"cards-{_HOST_HEADER.fullmatch(request.headers['host'])[1]}"


def refusal(request: Request, token: str) -> str | None:
    """Why a request is refused: only the page of the user who started the server may ask, as that
    starts processes.

    The Host header names this machine unless a foreign name was made to lead here (DNS rebinding);
    the Origin header comes with whatever a browser sends for a page. Neither tells this machine's
    users apart, so there is a token, which only its owner has seen.
    """
    host = request.headers.get("host", "")
    if not _HOST_HEADER.fullmatch(host):
        return f"Host {host}: only {HOST} and localhost are answered"
    origin = request.headers.get("origin", f"http://{host}")
    if origin != f"http://{host}":
        return f"Origin {origin}: only this server's own page may ask"
    shown = request.query_params.get("token") or request.cookies.get(cookie_name(request), "")
    if not hmac.compare_digest(shown.encode(), token.encode()):
        return "open the address that the server printed when it started, which ends in ?token=..."
    return None


class OwnersOnly:
    """Refuses a request that is not of the owner's page before anything else looks at it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (line := refusal(Request(scope), self.token)):
            await self.app(scope, receive, send)
        elif scope["path"].startswith("/api/"):
            await JSONResponse({"detail": line}, 403)(scope, receive, send)
        else:
            await PlainTextResponse(f"{line}\n", 403)(scope, receive, send)


class BoundedBody:
    """Rejects a body that is too large, or of unknown length, before any of it is read."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The HTTP server holds a client to the length that it announces.
        headers = dict(scope.get("headers", []))
        if int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:
            too_large = {"detail": f"more than {MAX_BODY_BYTES} bytes"}
            await JSONResponse(too_large, 413)(scope, receive, send)
        elif b"transfer-encoding" in headers:
            await JSONResponse({"detail": "give a Content-Length"}, 411)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def create_app(session: Session, token: str, folder: Path) -> FastAPI:
    """The page's server for the owner of the ``token``; the page may read files in ``folder``."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.session, app.state.token = session, token
    app.state.reach = PageReach(session.pipeline, folder)
    app.include_router(router)
    app.add_middleware(BoundedBody)
    app.add_middleware(OwnersOnly, token=token)  # the last one added is the first one asked

    @app.exception_handler(Refused)
    @app.exception_handler(UserError)
    def refuse(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 409)

    return app


class _Server(uvicorn.Server):
    """Ends the event streams on shutdown instead of waiting for them."""

    def __init__(self, session: Session, token: str) -> None:
        app = create_app(session, token, Path.cwd())
        super().__init__(uvicorn.Config(app, log_level="warning"))
        self.session = session

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.session.end()


def serve_page(pipeline: Pipeline, folder: Path, port: int, cluster: str | None = None) -> None:
    """Serve the page until SIGTERM or Ctrl-C."""
    try:
        listener = socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) else "a port is 0 to 65535"
        problem = f"cannot listen there ({reason})"
        raise UserError(f"--port {port}: {problem}; choose another", code="port-in-use") from error
    with listener, Session(pipeline, folder, cluster) as session:
        token = secrets.token_urlsafe()
        address = f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"
        print(f"The cards of {pipeline.path}: {address} (Ctrl-C ends it)", flush=True)
        _Server(session, token).run(sockets=[listener])
