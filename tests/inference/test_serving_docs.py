from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

import inference
from inference.app import create_app
from inference.batching.classifier import QueueLimits
from inference.metrics import ServerMetrics
from inference.settings import Settings
from tests.inference.conftest import StartServer
from tests.inference.test_pairs import make_pair_folder

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDE = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")


def _settings_table() -> str:
    lines = ["| variable | default | what it does |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = "off" if field.default is None else f"`{field.default}`" if str(field.default) else "empty"
        lines.append(f"| `{name.upper()}` | {default} | {field.description} |")
    return "\n".join(lines)


def test_the_guide_has_every_setting_as_it_is() -> None:
    found = re.search(r"<!-- settings[^>]*-->\n(.*?)\n?<!-- /settings -->", GUIDE, re.DOTALL)
    assert found
    assert found[1] == _settings_table(), f"put this table there:\n{_settings_table()}"


def _operations() -> dict[str, dict[str, Any]]:
    paths = create_app(Settings()).openapi()["paths"]
    return {f"{method.upper()} {path}": one for path, methods in paths.items() for method, one in methods.items()}


def test_the_guide_has_every_route_and_every_status() -> None:
    routes = GUIDE.partition("## Routes")[2].partition("## Errors")[0]
    refusals = GUIDE.partition("## Errors")[2].partition("## Settings")[0]
    for name, operation in _operations().items():
        assert f"`{name}`" in routes, name
        for status in set(operation["responses"]) - {"200", "204", "4XX"}:
            assert re.search(rf"^\|[\d, ]*\b{status}\b", refusals, re.MULTILINE), (name, status)


def test_the_guide_has_every_code_of_a_refusal() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "inference").rglob("*.py"))
    codes = re.findall(r'(?:\b[45]\d\d[,:] |RefusedTextError\(\s*)"(\w+)"', sources)
    assert len(set(codes)) > 15
    for code in codes:
        assert f"`{code}`" in GUIDE, code


def test_the_guide_has_every_metric() -> None:
    table = GUIDE.partition("### Metrics")[2]
    for family in ServerMetrics().registry.collect():
        if family.name.startswith("distrinews_"):
            assert f"`{family.name.removeprefix('distrinews_')}" in table, family.name


def test_every_operation_of_the_document_says_what_it_does() -> None:
    operations = _operations()
    assert len(operations) > 15
    assert all(operation["description"] for operation in operations.values())
    assert len({operation["operationId"] for operation in operations.values()}) == len(operations)


def test_the_queue_has_the_same_defaults_with_and_without_a_server() -> None:
    settings, limits = Settings(), QueueLimits()
    for name in ("max_batch_tokens", "max_wait_seconds", "cache_entries"):
        assert getattr(settings, name) == getattr(limits, name)


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert inference.__version__ == project["version"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_curl_command_of_the_guide_gets_an_answer(
    server: httpx.Client, start_server: StartServer, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "Shares fall"}\n{"text": "Goal!", "top_k": 1}\n')
    commands = re.findall(r"^curl .*$", GUIDE, re.MULTILINE)
    assert len(commands) >= 4
    pairs = make_pair_folder(model_folder, tmp_path / "pairs", "bert")
    with start_server(pairs) as of_pairs, start_server(REPOSITORY / "checkpoints" / "news") as calibrated:
        for command in commands:
            news = "coverage" in command or "/models/news/" in command
            able = of_pairs if "text_pair" in command else calibrated if news else server
            address = able.base_url
            command = command.replace("localhost:7860", str(address).rstrip("/"))
            run = subprocess.run(
                f"{command} --fail", shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=30
            )
            assert run.returncode == 0, command
            assert '"label"' in run.stdout


def test_the_python_client_of_the_guide_gets_an_answer(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    client = re.search(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert client
    with start_server(REPOSITORY / "checkpoints" / "news") as server:
        exec(client[1].replace("http://localhost:7860", str(server.base_url).rstrip("/")), {})
    assert capsys.readouterr().out.startswith("Business 0.9")
