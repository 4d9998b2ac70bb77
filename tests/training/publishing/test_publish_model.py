"""A model folder on the hub: the real command and the real client library, against a stand-in for the hub."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from common.model_folder import SEEN_TEXTS_FILE, describe_files, verified_cascade, verified_manifest
from common.seen_texts import SeenTexts
from inference import export, fetch
from inference.engines.model_loader import ModelLoader
from tests.deployment.card_rules import card_errors, front_matter
from tests.deployment.documented import documented
from tests.deployment.hub_contents import Hub, Repository
from tests.deployment.publishing import IMPATIENTLY, error_line, run_against, run_page
from tests.deployment.small_model import write_cascade, write_small_model
from tests.deployment.stand_in_hub import READER, WRITER, running_hub
from tests.inference.cascades import NEWS, make_artefact, make_cascade
from tests.processes import free_port
from tests.training.test_export import write_tiny
from training.publishing.hub_upload import write_files
from training.publishing.published_files import OWNED, model_files, named

PUBLISH = ("-m", "training.publish_model")
NAME = "alice/news"
# The bytes of large files then arrive as they are, and can be looked at.
BY_LFS = {"HF_HUB_DISABLE_XET": "1"}
TEXTS = ["The striker scored twice as the home side won the cup final", "Apple sues a football club"]
PREDICT = f"""
import json
from transformers import pipeline
print(json.dumps(pipeline("text-classification", model="{NAME}")("Shares fall as oil prices rise")))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small_model(tmp_path / "tiny")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub(Hub()) as hub:
        yield hub


@pytest.fixture
def closed_hub() -> str:
    """An address where nobody answers."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.slow  # loads transformers, writes and exports a model that answers
def test_a_published_model_loads_by_its_name_and_answers_the_same(hub: Hub, tmp_path: Path) -> None:
    model = tmp_path / "news"
    write_tiny(model)
    export.main([str(model), "--engine", "onnx", "--limit", "40", "--max_drop", "100"])

    run = run_against(hub.address, tmp_path / "hf", *PUBLISH, str(model), "--name", NAME, **BY_LFS)
    answer = run_against(hub.address, tmp_path / "other", "-c", PREDICT, token=None)

    assert run.returncode == 0, run.stderr
    assert answer.returncode == 0, answer.stderr
    (found,) = json.loads(answer.stdout.splitlines()[-1])
    expected = ModelLoader(model, "torch").predict("Shares fall as oil prices rise")
    assert (found["label"], found["score"]) == (expected["label"], pytest.approx(expected["confidence"], abs=1e-5))


def test_a_model_is_published_whole_in_one_commit(hub: Hub, model: Path, tmp_path: Path) -> None:
    commands = documented("docs/deployment.md", "model")

    run = run_page(commands, hub.address, tmp_path, model, **BY_LFS)

    assert run.returncode == 0, run.stderr
    assert WRITER not in run.stdout + run.stderr
    published = hub.repository("models", NAME)
    assert len(published.commits) == 1
    assert published.large.keys() == {"model.safetensors", "onnx/model.onnx"}
    assert {"README.md", "config.json", "tokenizer.json", "onnx/manifest.json"} <= published.files.keys()


def test_the_library_s_own_way_of_uploading_works_and_a_second_run_changes_nothing(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    command = (*PUBLISH, str(model), "--name", "news", "--private")

    runs = [run_against(hub.address, tmp_path, *command) for _ in range(2)]

    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    published = hub.repository("models", NAME)
    assert published.private
    assert len(published.commits) == 1
    assert published.large.keys() == {"model.safetensors", "onnx/model.onnx"}


def test_a_dry_run_needs_no_token_and_holds_no_path_of_this_machine(
    closed_hub: str, model: Path, tmp_path: Path
) -> None:
    command = (*PUBLISH, str(model), "--name", NAME, "--dry-run", str(tmp_path / "out"))

    run = run_against(closed_hub, tmp_path, *command, token=None)

    assert run.returncode == 0, run.stderr
    card = (tmp_path / "out/README.md").read_text()
    assert card_errors(card, "model") == []
    assert f'model="{NAME}"' in card
    assert front_matter(card)["license"] == "apache-2.0"
    for path in (tmp_path / "out").rglob("*.[jm]*"):
        assert "/home/ada" not in path.read_text(), path
    verified_manifest(tmp_path / "out/onnx", tmp_path / "out")
    assert "bytes in 12 files" in run.stdout


def test_it_is_said_beforehand_that_texts_of_the_test_data_go_with_the_model(
    closed_hub: str, model: Path, tmp_path: Path
) -> None:
    told = shutil.copytree(model, tmp_path / "told")
    metrics = json.loads((told / "metrics.json").read_text()) if (told / "metrics.json").exists() else {}
    (told / "metrics.json").write_text(json.dumps(metrics | {"examples": {"World": "Talks.", "Sports": "A goal."}}))
    command = (*PUBLISH, str(told), "--name", NAME, "--dry-run", str(tmp_path / "out"))

    run = run_against(closed_hub, tmp_path, *command, token=None)

    assert run.returncode == 0, run.stderr
    assert "Everyone who can open it sees 2 example texts." in run.stdout

    (told / "metrics.json").write_text(json.dumps(metrics | {"examples": 2}))
    run = run_against(closed_hub, tmp_path, *command[:-1], str(tmp_path / "again"), token=None)
    assert run.returncode == 0, run.stderr
    assert "example text" not in run.stdout


def test_a_dry_run_replaces_an_older_one_and_nothing_else(model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "README.md").write_text("years of work")

    write_files(model_files(model), tmp_path / "out")
    write_files({"README.md": b"tags: [distrinews]"}, tmp_path / "out", replaces=True)
    for folder, replaces in ((tmp_path / "out", False), (tmp_path / "thesis", True)):
        with pytest.raises(UserError, match="is not empty; name a new or empty folder"):
            write_files(model_files(model), folder, replaces=replaces)

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["README.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "thesis", "tiny"]


def test_what_people_keep_beside_a_model_is_not_published(model: Path) -> None:
    for name in ("notes.txt", "scores.json", ".env", "onnx/old.onnx"):
        (model / name).write_text("mine")

    assert not {"notes.txt", "scores.json", ".env", "onnx/old.onnx"} & model_files(model).keys()


def test_nobody_who_gets_a_published_model_can_test_whether_a_text_was_trained_on(model: Path) -> None:
    SeenTexts.of(["Oil prices rise"]).write(model)

    assert not [name for name in model_files(model) if SEEN_TEXTS_FILE in name]


def test_files_that_no_longer_belong_go_in_the_same_commit(hub: Hub, model: Path, tmp_path: Path) -> None:
    command = (*PUBLISH, str(model), "--name", NAME)
    run_against(hub.address, tmp_path, *command, **BY_LFS)
    published = hub.repository("models", NAME)
    published.files["LICENSE"] = b"by hand, on the hub"
    shutil.rmtree(model / "onnx")

    run = run_against(hub.address, tmp_path, *command, **BY_LFS)

    assert run.returncode == 0, run.stderr
    assert not [name for name in (*published.files, *published.large) if name.startswith("onnx/")]
    assert {".gitattributes", "LICENSE"} <= published.files.keys()
    assert "deletedFile onnx/model.onnx" in published.commits[1]
    assert len(published.commits) == 2


def test_a_cascade_is_published_as_one_repository_from_which_it_serves(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "tiny")
    cascade = make_cascade(make_artefact(tmp_path / "tiny", tmp_path / "big"), NEWS, tmp_path / "cascade")

    run = run_against(hub.address, tmp_path, *PUBLISH, str(cascade), "--name", NAME, **BY_LFS)

    assert run.returncode == 0, run.stderr
    assert f"python -m inference.fetch hf://{NAME} FOLDER fetches it for a server." in run.stdout
    card = hub.repository("models", NAME).files["README.md"].decode()
    assert card_errors(card, "model") == []
    assert f"inference.fetch hf://{NAME} models/cascade" in card
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    fetch.main([f"hf://{NAME}", str(tmp_path / "fetched")])
    here, there = ModelLoader(cascade), ModelLoader(tmp_path / "fetched")
    assert there.cascade is not None
    assert there.info["revision"] == here.info["revision"]
    assert there.predict_batch(TEXTS) == here.predict_batch(TEXTS)


def test_a_repository_holds_a_model_or_a_cascade_and_never_a_mixture(hub: Hub, model: Path, tmp_path: Path) -> None:
    cascade = write_cascade(model, tmp_path / "cascade")
    held = []
    for folder in (model, cascade, model):
        run = run_against(hub.address, tmp_path, *PUBLISH, str(folder), "--name", NAME, **BY_LFS)
        assert run.returncode == 0, run.stderr
        published = hub.repository("models", NAME)
        held.append({*published.files, *published.large} - {".gitattributes"})
        assert held[-1] == {*model_files(folder)}
    assert held[0] == held[2] != held[1]


def test_no_path_of_this_machine_is_in_a_published_cascade_whose_hashes_still_agree(
    model: Path, tmp_path: Path
) -> None:
    cascade = write_cascade(model, tmp_path / "cascade")

    write_files(named(model_files(cascade), cascade, NAME), tmp_path / "out")

    for path in (tmp_path / "out").rglob("*.[jm]*"):
        assert "/home/ada" not in path.read_text(), path
    assert "/home/ada" in (cascade / "small" / "manifest.json").read_text()
    assert verified_cascade(tmp_path / "out").keys() == {"", "small"}


def test_the_uploads_own_every_file_of_a_cascade_that_they_write() -> None:
    assert {*describe_files(NEWS)} - {SEEN_TEXTS_FILE, "README.md"} <= OWNED


def test_a_cascade_without_a_record_is_refused(model: Path, tmp_path: Path) -> None:
    cascade = write_cascade(model, tmp_path / "cascade")
    path = cascade / "manifest.json"
    path.write_text(path.read_text().replace('"disagreed"', '"agreed"'))

    with pytest.raises(UserError, match=r"manifest\.json: its cascade is damaged \(KeyError: 'disagreed'\); write it"):
        model_files(cascade)


def test_a_broken_upload_goes_on_where_it_stopped(hub: Hub, model: Path, tmp_path: Path) -> None:
    command = ("training.publish_model", str(model), "--name", NAME)
    hub.breaks_after = 1

    broken = run_against(hub.address, tmp_path, "-c", IMPATIENTLY, *command, **BY_LFS)

    assert "model alice/news: the connection failed" in error_line(broken)
    assert hub.repository("models", NAME).commits == []
    hub.breaks_after = None
    hub.asked.clear()
    run = run_against(hub.address, tmp_path, "-m", *command, **BY_LFS)
    assert run.returncode == 0, run.stderr
    assert hub.count(r"PUT /lfs/") == 1
    assert len(hub.repository("models", NAME).commits) == 1


@pytest.mark.slow  # the library waits before it tries again
def test_an_upload_of_the_library_s_own_way_that_breaks_is_one_line(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.breaks_after = 0
    command = (*PUBLISH, str(model), "--name", NAME)

    run = run_against(hub.address, tmp_path, *command, HF_XET_CLIENT_RETRY_MAX_ATTEMPTS="1")

    assert "model alice/news: the connection failed" in error_line(run)
    assert hub.repository("models", NAME).commits == []


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, r"no token for the hub; set HF_TOKEN or run hf auth login"),
        ("hf_wrong", r"signing in .*: the hub does not accept the token; make one with write access"),
        (READER, r"model alice/news: the token has no right to write there; .* \(the hub says: .*rights"),
    ],
)
def test_who_may_not_publish_is_told_why(
    hub: Hub, model: Path, tmp_path: Path, token: str | None, message: str
) -> None:
    run = run_against(hub.address, tmp_path, *PUBLISH, str(model), "--name", NAME, token=token)

    assert re.search(message, error_line(run))
    assert "hf_wrong" not in run.stderr
    assert not hub.repositories


def test_a_hub_out_of_reach_is_one_line(closed_hub: str, model: Path, tmp_path: Path) -> None:
    run = run_against(closed_hub, tmp_path, *PUBLISH, str(model), "--name", NAME)

    assert f"signing in to {closed_hub}: the connection failed" in error_line(run)


@pytest.mark.parametrize(
    ("there", "flags", "message"),
    [
        (Repository("models", NAME, files={"thesis.tex": b"years of work"}), (), "holds something else"),
        (Repository("models", NAME), ("--private",), "exists and is public"),
    ],
)
def test_a_repository_that_is_something_else_is_left_alone(
    hub: Hub, model: Path, tmp_path: Path, there: Repository, flags: tuple[str, ...], message: str
) -> None:
    hub.repositories["models", NAME] = there

    run = run_against(hub.address, tmp_path, *PUBLISH, str(model), "--name", NAME, *flags)

    assert f"model {NAME}: {message}" in error_line(run)
    assert there.commits == []


def test_what_the_hub_holds_is_read_back(hub: Hub, model: Path, tmp_path: Path) -> None:
    def lose_a_byte(repository: Repository) -> None:
        repository.files["config.json"] = repository.files["config.json"][:-1]

    hub.corrupt = lose_a_byte

    run = run_against(hub.address, tmp_path, *PUBLISH, str(model), "--name", NAME)

    assert "config.json was not stored as it was sent" in error_line(run, code=1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), r"no such model"),
        (lambda folder: (folder / "onnx/model.onnx").write_bytes(b"x"), r"onnx/model.onnx: is not the file that was"),
        (lambda folder: (folder / "README.md").write_text("on `~/runs/7/x`"), r"README.md: line 1 names ~/runs/7/x, a"),
        (lambda folder: (folder / "README.md").write_text("see /home/ada/x."), r"README.md: line 1 names /home/ada/x"),
    ],
)
def test_a_folder_that_cannot_be_published_is_refused(
    model: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(model)

    with pytest.raises(UserError, match=message):
        model_files(model)
