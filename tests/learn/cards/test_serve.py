"""The server of the page: it steps, runs, sets and resets real cards, and refuses what cannot be done now."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.learn.cards.small_runs import TOKEN, is_idle, served, small_pipeline, state_when, step, step_to

CARDS = [sys.executable, "-m", "learn.cards"]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with served(tmp_path) as (_, client):
        yield client


def test_the_wiring_comes_with_schemas_configurations_and_states(client: httpx.Client) -> None:
    pipeline = client.get("/api/pipeline").json()

    assert (len(pipeline["nodes"]), pipeline["workers"]) == (12, 2)
    assert pipeline["loop"] == ["forward", "backward", "allreduce", "step"]
    prepare = pipeline["nodes"][1]
    assert prepare["inputs"] == {"dataset": {"node": "load", "output": "dataset"}}
    assert prepare["config"]["batch_size"] == 120
    assert prepare["schema"]["properties"]["batch_size"]["minimum"] == 1
    assert {card["state"] for card in pipeline["state"]["cards"].values()} == {"waiting"}


def test_a_step_runs_one_card_and_what_it_made_can_be_seen(client: httpx.Client) -> None:
    assert client.get("/api/nodes/load").json() == []
    state = step(client)

    assert (state["cards"]["load"]["state"], state["next"]) == ("done", "prepare")
    [picture] = client.get("/api/nodes/load").json()
    assert picture["preview"]["summary"]["rows"] == 150
    assert client.get("/api/nodes/nothing").status_code == 404


def test_the_shards_are_seen_as_the_batches_that_they_are_dealt_from(client: httpx.Client) -> None:
    step_to(client, "strategy")
    [picture] = client.get("/api/nodes/shard").json()
    shards = picture["shards"]

    assert [len(batch) for batch in shards["batches"]] == [120]
    assert sorted(shards["batches"][0] + shards["test_rows"]) == list(range(150))


def test_every_field_that_a_card_does_not_take_is_answered_with_a_line(client: httpx.Client) -> None:
    values = {"batch_size": "many", "test_ratio": 2, "colour": "red", "normalize": False}
    answer = client.put("/api/nodes/prepare/config", json=values)

    assert answer.status_code == 422
    assert list(answer.json()["fields"]) == ["test_ratio", "batch_size", "colour"]
    assert "less than 1" in answer.json()["fields"]["test_ratio"]
    assert client.get("/api/pipeline").json()["nodes"][1]["config"]["normalize"] is True


def test_a_card_set_otherwise_starts_the_run_over(client: httpx.Client) -> None:
    step(client)
    client.put("/api/nodes/prepare/config", json={"batch_size": 30}).raise_for_status()
    step_to(client, "strategy")

    assert client.get("/api/pipeline").json()["state"]["run"] == 2
    [picture] = client.get("/api/nodes/shard").json()
    assert len(picture["shards"]["batches"]) == 4


def test_a_reset_takes_another_number_of_workers(client: httpx.Client) -> None:
    step(client)
    state = client.post("/api/reset", json={"workers": 3}).json()

    assert (state["run"], state["next"], state["cards"]["load"]["state"]) == (2, "load", "waiting")
    assert client.get("/api/pipeline").json()["workers"] == 3
    assert client.post("/api/reset", json={"workers": 0}).status_code == 422


def test_what_cannot_be_done_while_a_card_runs_is_refused(client: httpx.Client, tmp_path: Path) -> None:
    # A pipe that nobody has written to: the card that reads it is at work for as long as we like.
    os.mkfifo(tmp_path / "slow.csv")
    client.put("/api/nodes/load/config", json={"source_url": str(tmp_path / "slow.csv")}).raise_for_status()
    client.post("/api/step").raise_for_status()
    refused = [
        client.post("/api/step"),
        client.post("/api/run"),
        client.put("/api/nodes/load/config", json={"target_column": "0"}),
    ]
    (tmp_path / "slow.csv").write_text("size,kind\n1,a\n2,b\n")

    assert [answer.status_code for answer in refused] == [409] * 3
    assert refused[0].json()["detail"] == "a run is already in progress"
    assert state_when(client, is_idle)["cards"]["load"]["state"] == "done"


def test_a_card_that_fails_says_why_and_only_a_reset_goes_on(client: httpx.Client, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.csv"
    client.put("/api/nodes/load/config", json={"source_url": str(missing)}).raise_for_status()
    state = step(client)

    assert state["cards"]["load"]["state"] == "failed"
    assert (
        state["failure"] == f"source_url {missing}: cannot be read ([Errno 2] No such file or directory: '{missing}')"
    )
    answer = client.post("/api/step")
    assert (answer.status_code, answer.json()["detail"]) == (409, "a card has failed; reset to start over")
    assert client.post("/api/reset", json={}).json()["failure"] == ""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8420", "Origin": "http://localhost:8420"}, 200),
        ({"Host": "evil.example:8420"}, 403),
        ({"Host": "localhost:8420; x=1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_only_the_servers_own_page_may_ask(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    query = {"token": TOKEN}
    assert client.post("/api/reset", params=query, json={}, headers=headers).status_code == status
    assert client.get("/", params=query, headers=headers).status_code == status


REQUESTS = [
    *(
        ("GET", path)
        for path in ("/", "/api/pipeline", "/api/nodes/load", "/api/cards", "/api/events", "/no/such/page")
    ),
    *(("POST", f"/api/{name}") for name in ("step", "run", "reset", "wiring/check", "wiring/yaml", "wiring/load")),
    *(("PUT", path) for path in ("/api/wiring", "/api/nodes/load/config")),
    *(("HEAD", "/"), ("OPTIONS", "/api/step")),
]


@pytest.mark.parametrize("presented", ["nothing", "a wrong token", "a wrong cookie", "another port's cookie"])
def test_every_request_without_the_token_is_refused_with_a_line(client: httpx.Client, presented: str) -> None:
    [(name, _)] = client.cookies.items()
    cookies = {"a wrong cookie": {name: "wrong"}, "another port's cookie": {f"{name}0": TOKEN}}.get(presented, {})
    query = {"token": f"{TOKEN}\u00e9"} if presented == "a wrong token" else {}
    with httpx.Client(base_url=client.base_url, cookies=cookies, params=query) as stranger:
        answers = [stranger.request(method, path, content=b"{") for method, path in REQUESTS]

    assert {answer.status_code for answer in answers} == {403}
    line = "open the address that the server printed when it started, which ends in ?token=..."
    assert (answers[0].text, answers[1].json()) == (f"{line}\n", {"detail": line})
    assert not any("set-cookie" in answer.headers for answer in answers)
    assert client.get("/api/pipeline").json()["state"]["run"] == 1


def test_the_cookie_of_the_page_is_of_its_port_and_no_script_or_other_site_has_it(client: httpx.Client) -> None:
    cookie = client.get("/").headers["set-cookie"]

    assert cookie.startswith(f"cards-{client.base_url.port}={TOKEN};")
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))


def sources_outside(folder: Path) -> list[str]:
    """Names of a file that is outside a folder."""
    (folder.parent / f"{folder.name}-private.csv").write_text("size,kind\n1,secret\n2,b\n")
    private = folder.parent / f"{folder.name}-private.csv"
    (folder / "link.csv").symlink_to(private)
    (folder / "up").symlink_to(folder.parent)
    inside = [folder / "link.csv", folder / "up" / private.name, folder / ".." / private.name]
    addresses = [private.as_uri(), (folder / "rows.csv").as_uri(), "http://127.0.0.1:1/x", "https://127.0.0.1:1/x"]
    return [str(private), *map(str, inside), *addresses, "/dev/stdin", "../x.csv", "a\0b"]


def test_the_page_reads_no_file_outside_the_servers_folder_and_no_address(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    says = f"the page may read only iris and files below {tmp_path}"
    for source in sources_outside(tmp_path):
        nodes = wiring_of(client)
        nodes[0]["config"]["source_url"] = source
        field = client.put("/api/nodes/load/config", json={"source_url": source})
        wiring = client.put("/api/wiring", json={"nodes": nodes})
        [mistake] = client.post("/api/wiring/check", json={"nodes": nodes}).json()["mistakes"]

        assert (field.status_code, wiring.status_code) == (422, 422), source
        assert says in field.json()["fields"]["source_url"]
        assert wiring.json()["mistakes"] == [mistake]
        assert (mistake["node"], mistake["place"]) == ("load", "config.source_url")
        assert says in mistake["message"]
    assert client.get("/api/pipeline").json()["state"]["run"] == 1


@pytest.mark.parametrize("source", ["iris", "mine.csv", "sub/mine.csv", "sub/../mine.csv", "inner.csv"])
def test_the_page_reads_iris_and_files_below_the_servers_folder(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("mine.csv", "sub/mine.csv"):
        (tmp_path / name).write_text("size,species\n1,a\n2,b\n")
    (tmp_path / "inner.csv").symlink_to("sub/mine.csv")
    client.put("/api/nodes/load/config", json={"source_url": source, "target_column": "species"}).raise_for_status()

    assert step(client)["cards"]["load"]["state"] == "done"


def test_what_the_pipelines_file_names_stays_usable_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    pipeline = small_pipeline(tmp_path).configured("group", init_method="tcp://127.0.0.1:29555")
    with served(folder, pipeline=pipeline) as (_, client):
        source = wiring_of(client)[0]["config"]["source_url"]
        for value in ("iris", source):  # away from it, and back
            client.put("/api/nodes/load/config", json={"source_url": value}).raise_for_status()
        client.put("/api/wiring", json={"nodes": wiring_of(client)}).raise_for_status()
        client.put("/api/nodes/prepare/config", json={"batch_size": 30}).raise_for_status()

        assert step(client)["cards"]["load"]["state"] == "done"


def test_the_page_cannot_have_the_ranks_call_another_machine(client: httpx.Client) -> None:
    answer = client.put("/api/nodes/group/config", json={"init_method": "tcp://192.0.2.1:80"})

    assert answer.status_code == 422
    assert "only env://" in answer.json()["fields"]["init_method"]


@pytest.mark.slow
def test_a_rank_that_dies_makes_its_card_fail(client: httpx.Client) -> None:
    step_to(client, "forward")
    [victim] = [process for process in multiprocessing.active_children() if process.name == "rank 1"]
    os.kill(victim.pid, signal.SIGKILL)
    state = step(client)

    assert state["cards"]["forward"]["state"] == "failed"
    assert state["failure"] == "rank 1, card dist_forward (node forward): the process ended (killed by SIGKILL)"


@pytest.mark.slow
def test_a_reset_ends_a_run_in_the_middle_and_its_ranks(tmp_path: Path) -> None:
    with served(tmp_path, epochs=10_000) as (_, client):
        client.post("/api/run").raise_for_status()
        running = state_when(client, lambda state: state["losses_from"] > 20)
        ranks = [process for process in multiprocessing.active_children() if process.name.startswith("rank ")]
        state = client.post("/api/reset", json={}).json()

        assert (running["busy"], len(ranks)) == (True, 2)
        assert (state["run"], state["busy"], state["losses"]) == (2, False, [])
        assert not any(process.is_alive() for process in ranks)


@pytest.mark.slow
def test_events_tell_every_loss_once(tmp_path: Path) -> None:
    losses: list[float] = []

    def take(state: dict[str, Any]) -> bool:
        assert state["losses_from"] == len(losses)
        losses.extend(state["losses"])
        return state["next"] is None

    with served(tmp_path, batch_size=16, epochs=5) as (session, client):
        client.post("/api/run").raise_for_status()
        state_when(client, take)
        assert losses == session.history.losses

    assert len(losses) == 5 * 8


@pytest.mark.slow
def test_serve_says_where_and_ends_with_ctrl_c(start: Callable[..., Any], tmp_path: Path) -> None:
    run = start([*CARDS, "serve", "--port", "0", "--output", tmp_path], wait=False)
    run.wait_until(lambda: "Ctrl-C" in run.out)
    address = run.out.split("http://")[1].split()[0]
    address, _, token = address.partition("/?token=")
    with httpx.Client(base_url=f"http://{address}", params={"token": token}, timeout=60) as client:
        step_to(client, "forward")
        with client.stream("GET", "/api/events") as events:
            next(events.iter_lines())
            os.killpg(run.process.pid, signal.SIGINT)
            assert (run.wait(), run.err) == (130, "interrupted\n")


@pytest.mark.slow
def test_a_run_beside_a_server_takes_another_folder(start: Callable[..., Any], tmp_path: Path) -> None:
    server = start([*CARDS, "serve", "--port", "0", "--output", tmp_path], wait=False)
    server.wait_until(lambda: "http://127.0.0.1:" in server.out)
    run = start([*CARDS, "run", "--output", tmp_path])

    assert run.process.returncode == 2
    assert (
        run.err
        == f"error: {tmp_path}: another run is training into this folder; use another --output [folder-in-use]\n"
    )


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(start: Callable[..., Any], client: httpx.Client) -> None:
    run = start([*CARDS, "serve", "--port", str(client.base_url.port)])

    assert run.process.returncode == 2
    assert run.err == (
        f"error: --port {client.base_url.port}: cannot listen there (Address already in use); "
        "choose another [port-in-use]\n"
    )


def wiring_of(client: httpx.Client) -> list[dict[str, Any]]:
    return [
        {
            "id": node["id"],
            "card": node["card_type"],
            "config": node["config"],
            "inputs": {name: f"{source['node']}.{source['output']}" for name, source in node["inputs"].items()},
        }
        for node in client.get("/api/pipeline").json()["nodes"]
    ]


def test_a_wiring_is_checked_as_a_file_is_and_every_mistake_has_its_place(client: httpx.Client) -> None:
    nodes = wiring_of(client)
    nodes[1]["config"]["test_ratio"] = "1.5"
    del nodes[5]["inputs"]["process_group"]
    answer = client.put("/api/wiring", json={"nodes": nodes})

    assert answer.status_code == 422
    assert [(one["node"], one["place"]) for one in answer.json()["mistakes"]] == [
        ("prepare", "config.test_ratio"),
        ("forward", "inputs.process_group"),
    ]
    assert client.get("/api/pipeline").json()["state"]["run"] == 1


def test_a_wiring_without_mistakes_starts_the_run_over(client: httpx.Client) -> None:
    nodes = wiring_of(client)[:2]
    picture = client.post("/api/wiring/check", json={"nodes": nodes}).json()["pipeline"]
    state = client.put("/api/wiring", json={"nodes": nodes}).json()

    assert [node["id"] for node in picture["nodes"]] == ["load", "prepare"]
    assert (state["run"], state["next"], list(state["cards"])) == (2, "load", ["load", "prepare"])


def test_an_upload_cannot_have_code_imported(client: httpx.Client, tmp_path: Path) -> None:
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    text = "nodes: [{id: trap, card: 'trap:Card'}]"
    sys.path.append(str(tmp_path))
    try:
        nodes = client.post("/api/wiring/load", json={"yaml": text}).json()["nodes"]
        answer = client.put("/api/wiring", json={"nodes": nodes})
    finally:
        sys.path.remove(str(tmp_path))

    assert answer.status_code == 422
    assert "unknown card 'trap:Card'; the cards are dist_load_dataset" in answer.json()["mistakes"][0]["message"]
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("nodes: [", "not valid YAML: while parsing"),
        ("[" * 20_000, "more than 500 brackets"),
        ("- " * 20_000, "not valid YAML: maximum recursion depth"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML: could not determine a constructor"),
        ("nodes: 1", "not a pipeline: nodes: "),
        (f"nodes: [{'{id: a, card: b}, ' * 51}]", "not a pipeline: nodes: List should have at most 50 items"),
        ("nodes: [{id: a, card: b, config: {x: .inf}}]", "not a pipeline: nodes.0.config.x"),
    ],
    ids=["broken", "brackets", "deep", "python", "none", "many", "infinite"],
)
def test_a_file_that_is_no_wiring_is_one_line(client: httpx.Client, text: str, detail: str) -> None:
    answer = client.post("/api/wiring/load", json={"yaml": text})

    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(detail)


def test_a_body_has_a_bound(client: httpx.Client) -> None:
    def in_parts() -> Iterator[bytes]:
        yield b'{"yaml": "nodes: []"}'

    large = client.post("/api/wiring/load", json={"yaml": "x" * 70_000})
    unknown = client.post("/api/wiring/load", content=in_parts(), headers={"Content-Type": "application/json"})

    assert (large.status_code, unknown.status_code) == (413, 411)
