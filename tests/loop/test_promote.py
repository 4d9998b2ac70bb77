from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ForeseenError, UserError
from common.model_folder import read_manifest, revision_of, verified_manifest, write_manifest
from common.verdicts import NotPromoted, Undecided, digest_of, identity_of
from loop import promote
from loop.promote import LiveFolder, NotSwitched
from loop.record import Artefact, write_verdict
from tests.http_servers import JsonHandler, served_answers
from tests.inference.cascades import make_artefact_with_head, make_cascade
from tests.inference.servers import Server, metric, running
from tests.processes import free_port, wait_until

KEY = "open sesame"


@pytest.fixture(scope="module")
def artefacts(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models, of which nobody has compared any."""
    folder = tmp_path_factory.mktemp("artefacts")
    return [make_artefact_with_head(model_folder, folder / name, seed) for seed, name in enumerate("abc")]


@pytest.fixture
def live(artefacts: list[Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(artefacts[0], tmp_path / "live"))


Judge = Callable[..., Path]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Writes a copy of a model with the verdict of a comparison; ``changes`` are made before it is hashed."""

    def write(new: Path, parent: Path, /, **changes: Any) -> Path:
        folder = Path(shutil.copytree(new, tmp_path / f"judged_{new.name}_{len(list(tmp_path.iterdir()))}"))
        manifest = read_manifest(folder)
        record = {
            "verdict": "PROMOTE",
            "parent": identity_of(read_manifest(parent)),
            "artefact": identity_of(manifest),
            **changes,
        }
        write_manifest(folder, replace(manifest, verdict=record | {"sha256": digest_of(record)}))
        return folder

    return write


def run(*arguments: object) -> None:
    promote.main([str(one) for one in arguments])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def served(model: Path, log: Path, *, key: str = KEY) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "inference.serve", "--port", str(port)]
    with running(command, port, log, warm=True, MODEL_CHECKPOINT=str(model), API_KEY=key) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def _key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("API_KEY", KEY)
        yield


# ---------------------------------------------------------------- with a running server


def test_a_promotion_and_its_roll_back_lose_no_request(
    artefacts: list[Path], live: Path, judge: Judge, tmp_path: Path
) -> None:
    old, new = revision_of(live), judge(artefacts[1], live)
    stopped, statuses = threading.Event(), []
    with served(live, tmp_path / "log") as server:

        def ask_on() -> None:
            with server.new_client(KEY) as client:
                while not stopped.is_set():
                    statuses.append(client.post("/predict", json={"text": "Oil prices rise again"}).status_code)

        clients = [threading.Thread(target=ask_on) for _ in range(4)]
        for one in clients:
            one.start()
        try:
            wait_until(lambda: len(statuses) > 20)
            run(new, "--live", live, "--server", server.address)
            assert server.client.get("/model").json()["revision"] == revision_of(artefacts[1])
            assert metric(server.client, "model_info", replaces=old) == 1
            run("--back", "--live", live, "--server", server.address)
            assert server.client.get("/model").json()["revision"] == old
            before = len(statuses)
            wait_until(lambda: len(statuses) > before + 20)
        finally:
            stopped.set()
            for one in clients:
                one.join()
    assert set(statuses) == {200}


def test_a_server_without_a_key_is_reloaded_by_a_signal(
    artefacts: list[Path], live: Path, judge: Judge, tmp_path: Path
) -> None:
    with served(live, tmp_path / "log", key="") as server:
        asks = "--live", live, "--server", server.address
        with pytest.raises(NotSwitched, match="needs its key for a reload"):
            run(judge(artefacts[1], live), *asks)
        assert revision_of(live) == revision_of(artefacts[0])
        run(judge(artefacts[1], live), *asks, "--pid", server.process.pid)
        assert server.client.get("/model").json()["revision"] == revision_of(artefacts[1])


def test_a_model_that_the_server_refuses_is_taken_back(
    artefacts: list[Path], live: Path, judge: Judge, tmp_path: Path
) -> None:
    new = judge(artefacts[1], live)
    manifest = read_manifest(new)
    probes = [one | {"probabilities": one["probabilities"][::-1]} for one in manifest.probes]
    write_manifest(new, replace(manifest, probes=probes))
    old = revision_of(live)
    with served(live, tmp_path / "log") as server:
        with pytest.raises(NotSwitched, match="is live as before") as refused:
            run(new, "--live", live, "--server", server.address)
        assert refused.value.exit_code == 1
        assert "\n" not in refused.value.line
        assert server.client.get("/model").json()["revision"] == revision_of(live) == old
        with pytest.raises(UserError, match="no version was live before"):
            run("--back", "--live", live, "--server", server.address)


def test_a_server_that_serves_another_folder_is_not_reloaded(artefacts: list[Path], live: Path, judge: Judge) -> None:
    asked = []

    def answer(request: JsonHandler) -> dict[str, str]:
        asked.append(request.path)
        return {"revision": "0" * 12}

    with served_answers(answer) as address, pytest.raises(UserError, match="serves revision 000000000000"):
        run(judge(artefacts[1], live), "--live", live, "--server", address)
    assert asked == ["/model"]
    assert not live.is_symlink()


# ---------------------------------------------------------------- without one


@pytest.mark.parametrize(
    ("changes", "reason", "code"),
    [
        ({"verdict": "HOLD"}, "its verdict is 'HOLD'", 10),
        ({"verdict": "REJECT"}, "its verdict is 'REJECT'", 11),
        ({"parent": {"weights_sha256": "0" * 64}}, "another model than the live one", 11),
        ({"artefact": {"weights_sha256": "0" * 64}}, "about another artefact", 11),
    ],
)
def test_a_model_whose_verdict_does_not_allow_it_changes_nothing(
    artefacts: list[Path], live: Path, judge: Judge, changes: dict[str, Any], reason: str, code: int
) -> None:
    before = contents(live)

    with pytest.raises(NotPromoted, match=reason) as refused:
        run(judge(artefacts[1], live, **changes), "--live", live)

    assert refused.value.exit_code == code
    assert contents(live) == before
    assert not live.is_symlink()
    assert [one.name for one in live.with_name("live.versions").iterdir()] == [".lock"]


def test_a_verdict_that_was_changed_by_hand_is_refused(artefacts: list[Path], live: Path, judge: Judge) -> None:
    new = judge(artefacts[1], live, verdict="REJECT")
    manifest = read_manifest(new)
    write_manifest(new, replace(manifest, verdict=manifest.verdict | {"verdict": "PROMOTE"}))

    with pytest.raises(NotPromoted, match="the verdict in its manifest was changed"):
        run(new, "--live", live)


def test_a_model_without_a_verdict_is_refused_unless_nothing_is_live(artefacts: list[Path], live: Path) -> None:
    with pytest.raises(NotPromoted, match="has no verdict"):
        run(artefacts[1], "--live", live)
    shutil.rmtree(live)
    run(artefacts[1], "--live", live)
    assert revision_of(live) == revision_of(artefacts[1])


def test_files_that_are_not_those_that_were_exported_are_refused(
    artefacts: list[Path], live: Path, judge: Judge
) -> None:
    new = judge(artefacts[1], live)
    with (new / "model_int8.safetensors").open("ab") as file:
        file.write(b"more")

    with pytest.raises(UserError, match="its SHA-256 differs"):
        run(new, "--live", live)


def test_versions_are_rolled_back_one_after_another_until_the_oldest(
    artefacts: list[Path], live: Path, judge: Judge
) -> None:
    a, b, c = artefacts
    for new, parent in ((b, a), (c, b), (b, c)):
        run(judge(new, parent), "--live", live)
    for expected in (c, b, a):
        run("--back", "--live", live)
        assert revision_of(live) == revision_of(expected)
    with pytest.raises(UserError, match="no version was live before"):
        run("--back", "--live", live)
    run(judge(c, a), "--live", live)
    run("--back", "--live", live)
    assert revision_of(live) == revision_of(a)
    # Again, as nobody has removed its copy.
    run(judge(c, a), "--live", live)
    lines = live.with_name("live.versions") / "journal.jsonl"
    entries = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [one["what"] for one in entries] == [*["promote"] * 3, *["back"] * 3, "promote", "back", "promote"]
    assert all(one["who"] and one["when"] for one in entries)
    assert {bool(one["verdict"]) for one in entries if one["what"] == "promote"} == {True}


def test_a_roll_back_needs_no_server_that_answers(
    artefacts: list[Path], live: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    run(judge(artefacts[1], live), "--live", live)

    run("--back", "--live", live, "--server", f"http://127.0.0.1:{free_port()}")

    assert revision_of(live) == revision_of(artefacts[0])
    assert "it serves this version when it starts" in capsys.readouterr().out


def test_a_damaged_version_is_not_rolled_back_to(artefacts: list[Path], live: Path, judge: Judge) -> None:
    old = revision_of(live)
    run(judge(artefacts[1], live), "--live", live)
    (live.with_name("live.versions") / old / "tokenizer.json").unlink()

    with pytest.raises(UserError, match=r"tokenizer\.json: is missing"):
        run("--back", "--live", live)

    assert revision_of(live) == revision_of(artefacts[1])


def test_a_link_of_somebody_else_becomes_a_version_and_its_folder_stays(
    artefacts: list[Path], live: Path, judge: Judge
) -> None:
    elsewhere = live.rename(live.with_name("elsewhere"))
    live.symlink_to("elsewhere")

    run(judge(artefacts[1], elsewhere), "--live", live)
    assert revision_of(live) == revision_of(artefacts[1])
    run("--back", "--live", live)

    assert live.resolve() == elsewhere.resolve()


def test_of_two_promotions_at_once_one_is_refused(artefacts: list[Path], live: Path, judge: Judge) -> None:
    new = judge(artefacts[1], live)
    with LiveFolder(live).locked(), pytest.raises(UserError, match="another promotion is running"):
        run(new, "--live", live)


def test_check_only_says_whether_a_model_may_go_live(artefacts: list[Path], live: Path, judge: Judge) -> None:
    run(judge(artefacts[1], live), "--live", live, "--check")
    run(artefacts[0], "--live", live, "--check")  # the same model
    with pytest.raises(Undecided):
        run(judge(artefacts[1], live, verdict="HOLD"), "--live", live, "--check")
    assert not live.with_name("live.versions").exists()


def test_the_record_that_a_comparison_writes_is_what_a_promotion_reads(artefacts: list[Path], live: Path) -> None:
    new = Path(shutil.copytree(artefacts[1], live.with_name("new")))
    write_verdict(Artefact.at(new), {"verdict": "PROMOTE", "parent": Artefact.at(live).identity})

    run(new, "--live", live)

    assert revision_of(live) == revision_of(new)


def test_the_revision_of_a_folder_is_the_one_that_a_server_shows(artefacts: list[Path], tmp_path: Path) -> None:
    from inference.engines.model_loader import ModelLoader

    cascade = make_cascade(artefacts[0], artefacts[1], tmp_path / "cascade")
    for folder in (artefacts[0], cascade):
        assert revision_of(folder) == ModelLoader(folder).info["revision"]


_STEPS = ("os.rename", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "ctypes.dlsym")


def _run_until(number: int, arguments: tuple[object, ...]) -> int:
    """Run the command in a process that is killed before the step of this number; returns its exit code."""
    if (child := os.fork()) == 0:
        steps = iter(range(number))

        def kill(event: str, values: tuple[Any, ...]) -> None:
            writes = event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR)
            if (event in _STEPS or writes) and next(steps, None) is None:
                os._exit(9)

        try:
            sys.addaudithook(kill)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
            run(*arguments)
        except ForeseenError as error:
            os._exit(error.exit_code)
        except BaseException:
            os._exit(70)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("way", ["promote", "back"])
def test_a_kill_at_any_step_leaves_one_version_live_and_the_command_can_be_repeated(
    artefacts: list[Path], live: Path, judge: Judge, way: str, tmp_path: Path
) -> None:
    new = judge(artefacts[1], live)
    expected = {revision_of(live), revision_of(new)}
    command: tuple[object, ...] = (new, "--live", live)
    if way == "back":
        run(*command)
        command = ("--back", "--live", live)
    done = revision_of(live if way == "promote" else new)
    found = []
    for number in range(200):
        shutil.copytree(tmp_path, copy := tmp_path.with_name(f"{tmp_path.name}_{number}"), symlinks=True)
        here = tuple(copy / one.relative_to(tmp_path) if isinstance(one, Path) else one for one in command)
        code = _run_until(number, here)
        assert code in (0, 9)
        verified_manifest(copy / "live", None)
        found.append(revision_of(copy / "live"))
        if code == 0:
            break
        if way == "promote" or found[-1] == done:
            run(*here)
        shutil.rmtree(copy)
    assert code == 0
    assert len(found) > 3
    assert set(found) == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--live", "live"], "give NEW to promote it, or --back"),
        (["new", "--live", "live"], "no such folder"),
        (["--back", "--live", "live", "--pid", "1"], "--pid needs --server"),
        (["--back", "--live", "live", "--server", "localhost"], "must begin with http"),
        (["--back", "--live", "live"], "no version was live before"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=reason):
        promote.main(arguments)
