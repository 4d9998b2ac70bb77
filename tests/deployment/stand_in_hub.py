"""A stand-in for the Hugging Face hub: its HTTP API on this machine, for the real client library.

It keeps repositories in memory, takes large files the old way (LFS) and the new one (Xet, whose bytes it cannot
unpack), builds Spaces through the stages it is given, and can refuse, or break connections, as the real one does.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import Request, urlopen

from tests.deployment.card_rules import card_errors
from tests.deployment.hub_contents import Hub, Repository, file_entry
from tests.http_servers import JsonHandler, served

LARGE_FILES = (".safetensors", ".onnx", ".bin")
WRITER, READER = "hf_writer_of_alice", "hf_reader_of_alice"
ACCOUNT = "alice"


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """Serve on a free port."""
    handler = type("ThisHub", (_Handler,), {"hub": hub})
    with served(handler) as hub.address:
        yield hub


class _Refusal(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(JsonHandler):
    hub: Hub

    def do_GET(self) -> None:
        """Answer by the first route that matches."""
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        body = self.body()
        try:
            for pattern, route in _ROUTES:
                if match := re.fullmatch(pattern, f"{self.command} {path}"):
                    answer = route(self, body, *match.groups())
                    return None if answer is None else self.send(200, answer)
            raise _Refusal(404, "no such route")
        except _Refusal as refusal:
            headers = {"X-Error-Code": refusal.code} if refusal.code else {}
            return self.send(refusal.status, {"error": str(refusal)}, headers)

    do_HEAD = do_POST = do_PUT = do_GET

    def whoami(self, body: bytes) -> dict[str, Any]:
        self._account()
        return {"type": "user", "name": ACCOUNT, "orgs": []}

    def validate(self, body: bytes) -> dict[str, Any] | None:
        asked = json.loads(body)
        if errors := card_errors(asked["content"], asked["repoType"]):
            return self.send(400, {"errors": [{"message": error} for error in errors]})
        return {"warnings": []}

    def create(self, body: bytes) -> dict[str, Any]:
        asked = json.loads(body)
        kind, name = f"{asked.get('type') or 'model'}s", f"{asked['organization'] or ACCOUNT}/{asked['name']}"
        self._may_write(name)
        if (kind, name) in self.hub.repositories:
            raise _Refusal(409, "You already created this repo")
        if kind == "spaces" and asked["sdk"] != "static" and not self.hub.has_plan:
            raise _Refusal(402, "A PRO subscription is required")
        new = Repository(kind, name, asked.get("visibility") == "private", asked.get("sdk"))
        new.files[".gitattributes"] = b"*.safetensors filter=lfs\n"
        self.hub.repositories[kind, name] = new
        return {"url": f"{self.hub.address}/{'spaces/' if kind == 'spaces' else ''}{name}"}

    def facts(self, body: bytes, kind: str, name: str) -> dict[str, Any]:
        repository = self._repository(kind, name)
        is_space = {"host": f"{self.hub.address}/app/{name}", "subdomain": name.replace("/", "-")}
        return repository.facts() | (is_space if kind == "spaces" else {})

    def models(self, body: bytes) -> list[dict[str, Any]]:
        (author,) = parse_qs(urlsplit(self.path).query)["author"]
        found = (repo for (kind, _), repo in self.hub.repositories.items() if kind == "models")
        return [repo.facts() for repo in found if repo.name.startswith(f"{author}/")]

    def tree(self, body: bytes, kind: str, name: str) -> list[dict[str, Any]]:
        return self._repository(kind, name).tree()

    def paths_info(self, body: bytes, kind: str, name: str) -> list[dict[str, Any]]:
        wanted = parse_qs(body.decode())["paths"]
        return [entry for entry in self._repository(kind, name).tree() if entry["path"] in wanted]

    def preupload(self, body: bytes, kind: str, name: str) -> dict[str, Any]:
        self._may_write(name)
        oids = {entry["path"]: entry.get("lfs", entry)["oid"] for entry in self._repository(kind, name).tree()}
        self.hub.meanwhile(self._repository(kind, name))
        files = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(LARGE_FILES) else "regular" for path in files}
        described = [
            {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oids.get(path)}
            for path, mode in modes.items()
        ]
        return {"files": described}

    def lfs_batch(self, body: bytes, name: str) -> dict[str, Any]:
        self._may_write(name)
        objects = json.loads(body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.hub.large:
                wanted["actions"] = {"upload": {"href": f"{self.hub.address}/lfs/{wanted['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    def lfs_put(self, body: bytes, oid: str) -> dict[str, Any] | None:
        if self.hub.breaks_after == 0:
            self.close_connection = True
            return None
        if self.hub.breaks_after is not None:
            self.hub.breaks_after -= 1
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refusal(400, "these bytes have another SHA-256")
        self.hub.large[oid] = body
        return {}

    def xet_token(self, body: bytes, name: str) -> dict[str, Any]:
        self._may_write(name)
        expiry = int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": self.hub.address,
            "X-Xet-Access-Token": "xet",
            "X-Xet-Token-Expiration": str(expiry),
        }
        self.send(200, {"casUrl": self.hub.address, "accessToken": "xet", "exp": expiry}, headers)

    def xet_xorb(self, body: bytes) -> dict[str, Any] | None:
        if self.hub.breaks_after == 0:
            self.close_connection = True
            return None
        return {"was_inserted": True}

    def xet_shard(self, body: bytes) -> dict[str, Any]:
        self.hub.xet_shards.append(body)
        return {"result": 1}

    def commit(self, body: bytes, kind: str, name: str) -> dict[str, Any]:
        self._may_write(name)
        repository = self._repository(kind, name)
        operations = [json.loads(line) for line in body.splitlines()]
        if operations[0]["value"].get("parentCommit", repository.head) != repository.head:
            raise _Refusal(412, "A commit has happened since. Please refresh and try again.")
        repository.commits.append([f"{line['key']} {line['value'].get('path', '')}".strip() for line in operations])
        for line in operations:
            self._apply(repository, line["key"], line["value"])
        self.hub.corrupt(repository)
        url = f"{self.hub.address}/{'spaces/' if kind == 'spaces' else ''}{name}/commit/{repository.head}"
        return {"success": True, "commitUrl": url, "commitOid": repository.head}

    def resolve(self, body: bytes, name: str, file: str) -> None:
        repository = self._repository("models", name)
        headers = {"X-Repo-Commit": repository.head}
        if file in repository.large:
            oid = repository.large[file][0]
            self.send(200, self.hub.large[oid], {**headers, "ETag": f'"{oid}"'})
        elif file in repository.files:
            oid = file_entry(file, repository.files[file])["oid"]
            self.send(200, repository.files[file], {**headers, "ETag": f'"{oid}"'})
        else:
            raise _Refusal(404, "Entry not found", "EntryNotFound")

    def runtime(self, body: bytes, name: str) -> dict[str, Any]:
        repository = self._repository("spaces", name)
        stage = self.hub.stages.pop(0) if len(self.hub.stages) > 1 else self.hub.stages[0]
        stage, _, old = stage.partition("@")
        return {"stage": stage, "hardware": {"current": "cpu-basic"}, "sha": "0" * 40 if old else repository.head}

    def build_log(self, body: bytes, name: str) -> None:
        lines = (json.dumps({"data": f"{line}\n", "timestamp": ""}) for line in self.hub.build_log)
        self.send(200, "".join(f"data: {line}\n\n" for line in lines).encode())

    def app(self, body: bytes, name: str, route: str) -> None:
        """Pass a request on to the Space's own server; a private one shows itself to its owner alone."""
        headers = {"Content-Type": "application/json"} if body else {}
        if self._repository("spaces", name) and self.hub.app:
            with urlopen(Request(self.hub.app + route, body or None, headers), timeout=30) as answer:
                self.send(answer.status, answer.read())
        else:
            raise _Refusal(503, "the Space sleeps")

    def hardware(self, body: bytes) -> list[dict[str, Any]]:
        about = {"cpu": "8 vCPU", "ram": "32 GB", "ephemeralStorage": "50 GB", "accelerator": None}
        return [
            {
                "name": name,
                "prettyName": name,
                **about,
                "unitCostMicroUSD": micro_dollars,
                "unitCostUSD": micro_dollars / 1e6,
                "unitLabel": "minute",
            }
            for name, micro_dollars in self.hub.prices.items()
        ]

    def run_job(self, body: bytes, account: str) -> dict[str, Any] | None:
        self._may_write(f"{account}/")
        if not self.hub.has_plan:
            raise _Refusal(402, "Pre-paid credit balance is insufficient")
        job = {"id": f"job{len(self.hub.jobs)}", "account": account, **json.loads(body)}
        self.hub.jobs.append(job)
        if len(self.hub.jobs) == self.hub.breaks_after:  # it runs, and nobody hears of it
            self.close_connection = True
            return None
        owner = {"id": "1", "name": account, "type": "user"}
        return job | {"createdAt": "2026-11-23T12:00:00Z", "owner": owner, "status": {"stage": "SCHEDULING"}}

    def _apply(self, repository: Repository, key: str, value: dict[str, Any]) -> None:
        if key == "file":
            repository.files[value["path"]] = b64decode(value["content"])
        elif key == "lfsFile":
            if value["oid"] not in self.hub.large and not self._came_by_xet(value["oid"]):
                raise _Refusal(400, f"{value['path']} was not uploaded")
            repository.large[value["path"]] = (value["oid"], value["size"])
        elif key == "deletedFile":
            repository.files.pop(value["path"], None) or repository.large.pop(value["path"])

    def _came_by_xet(self, oid: str) -> bool:
        # A shard holds a SHA-256 as four numbers of 64 bits, lowest byte first.
        digest = bytes.fromhex(oid)
        turned = b"".join(digest[i : i + 8][::-1] for i in range(0, 32, 8))
        return any(turned in shard for shard in self.hub.xet_shards)

    def _account(self) -> str:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            raise _Refusal(401, f"Invalid credentials in Authorization header: {token}")
        return token

    def _may_write(self, name: str) -> None:
        if self._account() != WRITER or not name.startswith(f"{ACCOUNT}/"):
            raise _Refusal(403, f"You don't have the rights to write to {name}")

    def _repository(self, kind: str, name: str) -> Repository:
        found = self.hub.repositories.get((kind, name))
        if found is None or (found.private and "Authorization" not in self.headers):
            raise _Refusal(404, "Repository not found", "RepoNotFound")
        return found


_NAME = r"([\w.-]+/[\w.-]+)"
_REPOSITORY = rf"/api/(models|spaces)/{_NAME}"
_ROUTES: list[tuple[str, Callable[..., Any]]] = [
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/validate-yaml", _Handler.validate),
    (r"POST /api/repos/create", _Handler.create),
    (r"GET /api/models", _Handler.models),
    (r"GET /api/jobs/hardware", _Handler.hardware),
    (r"POST /api/jobs/([\w.-]+)", _Handler.run_job),
    (rf"GET {_REPOSITORY}(?:/revision/\w+)?", _Handler.facts),
    (rf"GET {_REPOSITORY}/tree/\w+", _Handler.tree),
    (rf"POST {_REPOSITORY}/paths-info/\w+", _Handler.paths_info),
    (rf"POST {_REPOSITORY}/preupload/main", _Handler.preupload),
    (rf"POST {_REPOSITORY}/commit/main", _Handler.commit),
    (rf"GET /api/(?:models|spaces)/{_NAME}/xet-write-token/main", _Handler.xet_token),
    (r"POST /v1/xorbs/default/\w+", _Handler.xet_xorb),
    (r"POST /v1/shards", _Handler.xet_shard),
    (rf"POST /(?:spaces/)?{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"PUT /lfs/(\w+)", _Handler.lfs_put),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/\w+/(.+)", _Handler.resolve),
    (rf"GET /api/spaces/{_NAME}/runtime", _Handler.runtime),
    (rf"GET /api/spaces/{_NAME}/logs/build", _Handler.build_log),
    (rf"(?:GET|POST) /app/{_NAME}(/[\w./-]+)", _Handler.app),
]
