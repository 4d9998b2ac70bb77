"""A Space on the hub: the real command and the real client library, against a stand-in for the hub.

The Space's own server is a real one, started from the very files that a dry run writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from benchmarks import containers
from common.errors import ModelLoadError
from common.files import sha256_of
from common.model_folder import read_manifest
from common.problem_types import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType
from deployment.image_context import DOCKERFILE, image_files
from deployment.running_space import Expected, ask
from inference.engines.model_loader import ModelLoader
from tests.deployment.card_rules import card_errors, front_matter
from tests.deployment.documented import REPOSITORY, documented
from tests.deployment.hub_contents import Hub, Repository
from tests.deployment.publishing import IMPATIENTLY, error_line, run_against, run_page
from tests.deployment.stand_in_hub import READER, WRITER, running_hub
from tests.deployment.test_image import BASE, build_flags
from tests.http_servers import JsonHandler, served_answers
from tests.inference.cascades import NEWS, make_cascade
from tests.inference.conftest import StartServer
from tests.inference.servers import Server, free_port, metric, running, serving
from training.publishing.hub_upload import PublishFailure

PUBLISH = "deployment/publish_space.py"
NAME = "alice/headlines"
IMAGE = "localhost/distrinews-space-test:latest"
TEXTS = [
    "The striker scored twice as the home side won the cup final",
    "Apple sues a football club",
    "Oil prices rise again as stocks fall on Wall Street",
    "Nobody knows what this is about",
]
BY_LFS = {"HF_HUB_DISABLE_XET": "1"}


@dataclass(frozen=True)
class Assembled:
    """What a dry run wrote, what it said, and a server started from it."""

    folder: Path
    said: str
    address: str


@pytest.fixture(scope="module")
def assembled(exported_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assembled]:
    place = tmp_path_factory.mktemp("space")
    commands = documented("docs/deployment.md", "space-dry-run")
    run = run_page(commands, "http://127.0.0.1:9", place, exported_folder, token=None)
    folder = place / "build" / "space"
    assert run.returncode == 0, run.stderr
    with _server_of(folder, place / "log") as server:
        yield Assembled(folder, run.stdout, server.address)


@contextmanager
def _server_of(folder: Path, log: Path) -> Iterator[Server]:
    """Start the server from the files of a Space, as its image would."""
    port = free_port()
    settings = {"PYTHONPATH": str(folder), "MODEL_CHECKPOINT": str(folder / "model"), "HOST": "127.0.0.1"}
    serve = [sys.executable, "-P", "-m", "inference.serve", "--port", str(port)]
    with running(serve, port, log, **settings) as server:
        yield server


@pytest.fixture
def hub(assembled: Assembled) -> Iterator[Hub]:
    with running_hub(Hub(app=assembled.address)) as hub:
        yield hub


@pytest.fixture
def command(exported_folder: Path) -> tuple[str, ...]:
    return (PUBLISH, NAME, "--model", str(exported_folder))


def test_a_dry_run_writes_what_the_image_is_built_from_and_a_card(assembled: Assembled, exported_folder: Path) -> None:
    written = {path.relative_to(assembled.folder).as_posix() for path in assembled.folder.rglob("*") if path.is_file()}
    written = {name for name in written if "__pycache__" not in name}  # another test may have run what is there

    assert written == {"Dockerfile", "README.md", *image_files(exported_folder)}
    assert f"bytes in {len(written)} files" in assembled.said
    assert "needs a paid plan" in assembled.said
    assert card_errors((assembled.folder / "README.md").read_text(), "space") == []


@pytest.mark.slow  # builds an image
def test_what_a_dry_run_writes_is_built_without_arguments(assembled: Assembled, exported_folder: Path) -> None:
    if reason := containers.why_not():
        pytest.skip(reason)
    if not containers.has_image(BASE):
        pytest.skip(f"no local {BASE}: buildah pull {BASE}")

    command = ["buildah", "bud", *build_flags(), "--tag", IMAGE, str(assembled.folder)]
    build = subprocess.run(command, capture_output=True, text=True, timeout=900)

    assert build.returncode == 0, build.stderr[-2000:]
    with containers.opened(IMAGE) as container:
        labels = container.config["Labels"]
    subprocess.run(["buildah", "rmi", IMAGE], capture_output=True, timeout=120)
    assert labels["distrinews.model.sha256"] == sha256_of(exported_folder / "model.safetensors")


def test_a_space_s_dockerfile_differs_in_nothing_but_the_defaults_of_its_arguments(assembled: Assembled) -> None:
    ours, theirs = DOCKERFILE.read_text().splitlines(), (assembled.folder / "Dockerfile").read_text().splitlines()

    changed = [new for old, new in zip(ours, theirs, strict=True) if old != new]

    names = [line.partition("=")[0].removeprefix("ARG ") for line in changed]
    assert names == ["FORWARDED_ALLOW_IPS", "MODEL", "VERSION", "MODEL_SHA256"]
    assert "10.0.0.0/8" in changed[0]  # the hub's proxy says who asks
    assert changed[1] == "ARG MODEL=model"


def test_a_space_is_published_in_one_commit_built_and_asked(
    hub: Hub, exported_folder: Path, assembled: Assembled, tmp_path: Path
) -> None:
    run = run_page(documented("docs/deployment.md", "space"), hub.address, tmp_path, exported_folder)

    assert run.returncode == 0, run.stderr
    assert WRITER not in run.stdout + run.stderr
    space = hub.repository("spaces", NAME)
    assert len(space.commits) == 1
    assert "model/onnx/model.onnx" in space.large
    assert space.files["Dockerfile"] == (assembled.folder / "Dockerfile").read_bytes()
    for told in ("BUILDING", "APP_STARTING", "RUNNING", f"/spaces/{NAME}\n", f"/app/{NAME}\n"):
        assert told in run.stdout


def _publish_privately(hub: Hub, name: str, sha256: str) -> None:
    model = Repository("models", name, private=True, files={"README.md": b"---\ntags: [distrinews]\n---\n"})
    model.large["model.safetensors"] = (sha256, 1)
    hub.repositories["models", model.name] = model


def test_a_cascade_becomes_a_space_that_answers_as_its_folder_does(exported_folder: Path, tmp_path: Path) -> None:
    cascade = make_cascade(exported_folder / "onnx", NEWS, tmp_path / "cascade")
    command = (PUBLISH, NAME, "--model", str(cascade))
    folder = tmp_path / "space"
    run = run_against("http://127.0.0.1:9", tmp_path, *command, "--dry-run", str(folder), token=None)
    assert run.returncode == 0, run.stderr

    with _server_of(folder, tmp_path / "log") as server, running_hub(Hub(app=server.address)) as hub:
        weights = {name: read_manifest(cascade / name).source["weights_sha256"] for name in ("", "small")}
        _publish_privately(hub, "alice/big", weights[""])
        _publish_privately(hub, "alice/small", weights["small"])
        run = run_against(hub.address, tmp_path, *command, "--private")
        answers = server.client.post("/predict/batch", json={"texts": TEXTS}).json()
        by_whom = [metric(server.client, "cascade_texts_total", model=model) for model in ("small", "big")]

    assert run.returncode == 0, run.stderr  # it has asked the server for its revision, and for an answer
    space = hub.repository("spaces", NAME)
    assert {"model/model.onnx", "model/small/manifest.json"} <= {*space.files, *space.large}
    assert front_matter(space.files["README.md"].decode())["models"] == ["alice/big", "alice/small"]
    expected = ModelLoader(cascade).predict_batch(TEXTS)
    assert [one["label"] for one in answers] == [one["label"] for one in expected]
    assert min(by_whom) > 0
    (folder / "model" / "small" / "model_int8.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match=r"small/model_int8\.safetensors: is not the file that was exported"):
        ModelLoader(folder / "model")


def test_a_private_space_is_asked_with_the_token_and_its_card_links_to_the_published_model(
    hub: Hub, command: tuple[str, ...], exported_folder: Path, tmp_path: Path
) -> None:
    _publish_privately(hub, "alice/news", sha256_of(exported_folder / "model.safetensors"))

    run = run_against(hub.address, tmp_path, *command, "--private")

    assert run.returncode == 0, run.stderr
    space = hub.repository("spaces", NAME)
    assert space.private
    assert front_matter(space.files["README.md"].decode())["models"] == ["alice/news"]


def test_a_public_space_that_sleeps_is_woken_and_names_no_private_model(
    hub: Hub, command: tuple[str, ...], exported_folder: Path, tmp_path: Path
) -> None:
    _publish_privately(hub, "alice/news", sha256_of(exported_folder / "model.safetensors"))
    hub.stages = ["SLEEPING"]

    run = run_against(hub.address, tmp_path, *command)

    assert run.returncode == 0, run.stderr
    assert "alice/news" not in hub.repository("spaces", NAME).files["README.md"].decode()


@pytest.mark.slow  # two more runs of what the model's test shows in `make test`
def test_a_broken_upload_goes_on_where_it_stopped(hub: Hub, command: tuple[str, ...], tmp_path: Path) -> None:
    hub.breaks_after = 0
    broken = run_against(hub.address, tmp_path, "-c", IMPATIENTLY, *command, **BY_LFS)
    assert f"space {NAME}: the connection failed" in error_line(broken)
    assert hub.repository("spaces", NAME).commits == []

    hub.breaks_after = None
    run = run_against(hub.address, tmp_path, *command, **BY_LFS)

    assert run.returncode == 0, run.stderr
    assert len(hub.repository("spaces", NAME).commits) == 1


@pytest.mark.slow  # waits between stages
def test_the_stage_of_what_ran_before_is_not_taken_for_the_new_one(
    hub: Hub, command: tuple[str, ...], tmp_path: Path
) -> None:
    hub.stages = ["BUILD_ERROR@old", "RUNNING@old", "RUNNING_BUILDING", "RUNNING"]

    run = run_against(hub.address, tmp_path, *command)

    assert run.returncode == 0, run.stderr
    assert "RUNNING_BUILDING" in run.stdout


def test_a_build_that_fails_shows_the_end_of_its_log(hub: Hub, command: tuple[str, ...], tmp_path: Path) -> None:
    hub.stages = ["BUILDING", "BUILD_ERROR"]
    hub.build_log = [f"step {i}" for i in range(90)]

    run = run_against(hub.address, tmp_path, *command)

    assert f"space {NAME}: BUILD_ERROR, the build failed; see" in error_line(run, code=1)
    assert "| step 89" in run.stdout
    assert "| step 5\n" not in run.stdout


@pytest.mark.parametrize(
    ("token", "has_plan", "there", "message"),
    [
        (WRITER, False, None, r"a Docker Space needs a paid plan: PRO for an account"),
        (READER, True, None, r"the token has no right to write there"),
        (WRITER, True, Repository("spaces", NAME, sdk="gradio"), r"runs gradio, not docker; choose another name"),
    ],
)
def test_what_the_hub_does_not_allow_is_one_line(
    hub: Hub,
    command: tuple[str, ...],
    tmp_path: Path,
    token: str,
    has_plan: bool,
    there: Repository | None,
    message: str,
) -> None:
    hub.has_plan = has_plan
    if there:
        hub.repositories["spaces", NAME] = there

    line = error_line(run_against(hub.address, tmp_path, *command, token=token))

    assert line.startswith(f"error: space {NAME}: ")
    assert message in line
    assert hub.count("POST .*/commit/") == 0


def test_what_another_publisher_committed_meanwhile_is_not_overwritten(
    hub: Hub, command: tuple[str, ...], tmp_path: Path
) -> None:
    hub.meanwhile = lambda repository: repository.commits.append(["file theirs"])

    line = error_line(run_against(hub.address, tmp_path, *command))

    assert line.startswith(f"error: space {NAME}: it was changed meanwhile; start again")
    assert hub.repository("spaces", NAME).commits == [["file theirs"]]


def test_a_folder_without_an_artefact_is_refused_before_anything_is_asked(
    hub: Hub, model_folder: Path, tmp_path: Path
) -> None:
    run = run_against(hub.address, tmp_path, PUBLISH, NAME, "--model", str(model_folder))

    assert "write one with python -m inference.export" in error_line(run)
    assert not hub.asked


def test_a_space_with_another_model_is_found_out(model_folder: Path) -> None:
    with serving(model_folder) as client, pytest.raises(PublishFailure, match=r"serves the model .*, not 0123456789ab"):
        ask(str(client.base_url).rstrip("/"), None, Expected(["World"], "0123456789ab"))


@pytest.mark.parametrize(
    ("kind", "answer", "described"),
    [
        (SINGLE_LABEL, {"label": "World", "confidence": 0.9}, "World 90.0%"),
        (SINGLE_LABEL, {"label": "Weather", "confidence": 0.9}, None),
        (MULTI_LABEL, {"labels": ["World", "Sports"]}, "World, Sports"),
        (MULTI_LABEL, {"labels": []}, "no label"),
        (MULTI_LABEL, {"labels": ["Weather"]}, None),
        (REGRESSION, {"value": 3.25}, "3.25"),
        (REGRESSION, {"value": None}, None),
        (REGRESSION, {"label": "World", "confidence": 0.9}, None),
    ],
)
def test_each_kind_of_model_has_its_valid_answers(
    kind: ProblemType, answer: dict[str, Any], described: str | None
) -> None:
    assert Expected(["World", "Sports"], "0123456789ab", kind).describe(answer) == described


def test_a_space_whose_model_reads_pairs_is_asked_for_a_pair() -> None:
    asked = []

    def answer(request: JsonHandler) -> dict[str, Any]:
        asked.append(request.body())
        return {"revision": "0123456789ab", "label": "World", "confidence": 0.9}

    with served_answers(answer) as space:
        ask(space, None, Expected(["World"], "0123456789ab", reads_pairs=True))
    assert json.loads(asked[-1]).keys() == {"text", "text_pair"}


def test_a_space_with_an_api_key_is_not_asked_for_a_prediction(model_folder: Path) -> None:
    with serving(model_folder, api_key="a key of the space") as client:
        revision = client.get("/model").json()["revision"]

        answer = ask(str(client.base_url).rstrip("/"), None, Expected(["World"], revision))

    assert answer == "healthy; /predict wants the Space's API_KEY and was not tried"


@contextmanager
def _recording_server(elsewhere: str = "") -> Iterator[tuple[str, list[Message]]]:
    """Redirects each question to the server whose address it is given, and keeps the headers; without one, answers."""
    seen: list[Message] = []

    def answer(request: JsonHandler) -> dict[str, str] | None:
        seen.append(request.headers)
        if not elsewhere:
            return {"revision": "of a thief"}
        return request.send(302, b"", {"Location": elsewhere + request.path})

    with served_answers(answer) as address:
        yield address, seen


def test_the_token_does_not_follow_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    with _recording_server() as (thief, stolen), _recording_server(elsewhere=thief) as (space, seen):
        monkeypatch.setenv("HF_ENDPOINT", space)
        with pytest.raises(PublishFailure, match="serves the model of a thief"):
            ask(space, WRITER, Expected(["World"], "0123456789ab"))
    assert {headers["Authorization"] for headers in seen} == {f"Bearer {WRITER}"}
    assert stolen
    assert not any(headers["Authorization"] for headers in stolen)


def test_the_token_is_not_sent_without_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    not_sent = pytest.raises(PublishFailure, match="is not https, so the token is not sent there")
    with _recording_server() as (space, seen), not_sent:
        ask(space, WRITER, Expected(["World"], "0123456789ab"))
    assert not seen


CARD = (REPOSITORY / "deployment" / "README.md").read_text()


def test_the_hub_would_accept_the_card() -> None:
    assert card_errors(CARD, "space") == []


def test_the_card_opens_the_page_on_the_port_that_the_image_serves() -> None:
    card = front_matter(CARD)

    assert (card["sdk"], card["app_port"], card["base_path"]) == ("docker", 7860, "/demo")
    assert (card["license"], card["suggested_hardware"]) == ("apache-2.0", "cpu-basic")
    assert "distrinews" in card["tags"]
    assert "EXPOSE 7860" in (REPOSITORY / "deployment" / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("colorFrom: blue", "colorFrom: teal"), "colorFrom"),
        (("emoji: 📰", "emoji: news"), "emoji"),
        (("base_path: /demo", "base_path: demo"), "base_path"),
        (("app_port: 7860", "app_port: seven"), "app_port"),
        (("pinned: false", "pined: false"), "pined"),
        (("headline is about", "headline is about, in a great many words more than fit"), "short_description"),
    ],
)
def test_a_card_that_the_hub_refuses_is_found(change: tuple[str, str], error: str) -> None:
    (found,) = card_errors(CARD.replace(*change), "space")

    assert error in found


def test_the_commands_of_the_card_work_as_they_stand(start_server: StartServer, exported_folder: Path) -> None:
    with start_server(exported_folder) as client:
        settings = {**os.environ, "SPACE": str(client.base_url).rstrip("/"), "NO_PROXY": "127.0.0.1"}
        commands = documented("deployment/README.md", "space-requests").replace("\ncurl", "\necho; curl")
        run = subprocess.run(["bash", "-euc", commands], env=settings, capture_output=True, text=True, timeout=60)

    assert run.returncode == 0, run.stderr
    single, batch, explained, model = (json.loads(line) for line in run.stdout.split("\n") if line)
    assert single["label"] in model["labels"]
    assert len(batch) == 2
    assert explained["words"]
