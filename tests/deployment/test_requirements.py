from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deployment.image_context import DOCKERFILE, EXTRAS, ROOT, SERVING_EXTRAS, TORCH_DOCKERFILE

DEPLOYMENT = ROOT / "deployment"
SERVING = DEPLOYMENT / "requirements.txt"
LOCKS = sorted(DEPLOYMENT.glob("requirements*.txt"))
IMAGE = {**default_environment(), "python_version": "3.11", "python_full_version": "3.11.9", "sys_platform": "linux"}


def _requirements(path: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def _locked(path: Path) -> list[tuple[Requirement, list[str]]]:
    """Return each package of a lock with its hashes."""
    text = re.sub(r"^ *#.*\n", "", path.read_text(), flags=re.MULTILINE)
    entries = [line for line in text.replace("\\\n", " ").splitlines() if line]
    return [(Requirement(entry.partition(" --hash")[0]), re.findall(r"--hash=(\S+)", entry)) for entry in entries]


def _versions(*paths: Path) -> dict[str, Version]:
    """Return what the image installs."""
    return {
        canonicalize_name(requirement.name): Version(str(requirement.specifier).removeprefix("=="))
        for path in paths
        for requirement, _ in _locked(path)
        if requirement.marker is None or requirement.marker.evaluate(IMAGE)
    }


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_every_package_to_one_version_with_hashes(lock: Path) -> None:
    for requirement, hashes in _locked(lock):
        assert re.fullmatch(r"==[\w.+!-]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", value) for value in hashes), requirement


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_names_no_registry(lock: Path) -> None:
    assert "://" not in lock.read_text()
    assert "--index" not in lock.read_text()


def test_what_is_served_is_a_part_of_what_the_project_needs() -> None:
    project = {requirement.name for requirement in _requirements(ROOT / "requirements.txt")}
    assert {requirement.name for requirement in _requirements(DEPLOYMENT / "requirements.in")} <= project


def test_the_served_lock_holds_what_was_asked_for_within_the_projects_bounds() -> None:
    versions = _versions(SERVING)
    assert versions.keys() >= {requirement.name for requirement in _requirements(DEPLOYMENT / "requirements.in")}
    _assert_within_bounds(versions)


def test_the_served_lock_holds_no_pytorch_and_no_client_of_the_hub() -> None:
    assert not _versions(SERVING).keys() & {"torch", "transformers", "huggingface-hub", "datasets"}


@pytest.mark.parametrize("build", ["cuda", "cpu"])
def test_the_torch_locks_together_hold_all_that_the_project_needs(build: str) -> None:
    versions = _versions(DEPLOYMENT / "requirements-torch.txt", DEPLOYMENT / f"requirements-torch-{build}.txt")
    assert versions.keys() >= {
        canonicalize_name(requirement.name) for requirement in _requirements(ROOT / "requirements.txt")
    }
    _assert_within_bounds(versions)


def _assert_within_bounds(versions: dict[str, Version]) -> None:
    for requirement in _requirements(ROOT / "requirements.txt"):
        name = canonicalize_name(requirement.name)
        assert name not in versions or versions[name] in requirement.specifier, requirement


def test_the_lock_of_an_extra_holds_what_the_extra_asks_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in EXTRAS:
        versions = _versions(DEPLOYMENT / f"requirements-with-{extra}.txt")
        for requirement in map(Requirement, extras[extra]):
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_ray_service_starts_a_cluster_of_the_ray_that_its_image_has() -> None:
    service = (DEPLOYMENT / "kubernetes/ray/service.yaml").read_text()
    assert f"rayVersion: {_versions(DEPLOYMENT / 'requirements-with-ray.txt')['ray']} " in service


@pytest.mark.parametrize(
    ("image", "extras"),
    [(("",), SERVING_EXTRAS), (("-torch", "-torch-cpu"), EXTRAS), (("-torch", "-torch-cuda"), EXTRAS)],
    ids=["served", "torch cpu", "torch cuda"],
)
def test_no_package_has_two_versions_in_an_image_with_all_extras(
    image: tuple[str, ...], extras: tuple[str, ...]
) -> None:
    found: dict[str, Version] = {}
    for part in (*image, *(f"-with-{extra}" for extra in extras)):
        for name, version in _versions(DEPLOYMENT / f"requirements{part}.txt").items():
            assert found.setdefault(name, version) == version, name


def test_the_locks_are_for_a_python_that_the_project_supports() -> None:
    minimum = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    for dockerfile in (DOCKERFILE, TORCH_DOCKERFILE):
        assert f"/python:{minimum}-slim@" in dockerfile.read_text()


def _installed_by(target: str) -> list[str]:
    """Return what `make TARGET` would install into a new environment."""
    # make is told of marks that do not exist, so that it prints the installation as in a fresh clone.
    marks = [f"{name}=build/absent/{name}" for name in ("INSTALLED", "INSTALLED_DEV")]
    command = ["make", "--dry-run", *marks, "BIN=build/absent/bin", target]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return re.findall(r'/uv pip install .*--editable "(.*?)"', printed)


@pytest.mark.parametrize("target", ["demo", "install", "bench-serving", "image"])
def test_make_installs_for_users_nothing_that_only_tests_need(target: str) -> None:
    assert _installed_by(target) == ["."]


@pytest.mark.parametrize("target", ["test", "lint"])
def test_make_installs_what_the_tests_need_before_it_runs_them(target: str) -> None:
    assert _installed_by(target) == [".", ".[dev]"]
