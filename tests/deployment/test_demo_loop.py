"""The demonstration of the loop: a model grows old, is reviewed, and a better one takes its place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from deployment import demo_loop

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_parts_of_the_sample_share_no_row_and_new_topics_come_late() -> None:
    parts = demo_loop.split_news()

    assert {name: len(rows) for name, rows in parts.items()} == demo_loop.EARLY | demo_loop.LATE
    texts = [row.text for rows in parts.values() for row in rows]
    assert len(set(texts)) == len(texts)
    for name, rows in parts.items():
        for row in rows:
            if topics := demo_loop.EARLY_TOPICS.get(row.label):
                assert bool(re.search(topics, row.text.lower())) == (name in demo_loop.EARLY)


def test_a_folder_that_is_not_the_demonstrations_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="is not from an earlier demonstration"):
        demo_loop.begin(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_folder_that_a_shell_would_split_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without spaces"):
        demo_loop.begin(tmp_path / "my demo")
    assert not (tmp_path / "my demo").exists()


def test_an_earlier_demonstration_makes_room(tmp_path: Path) -> None:
    demo_loop.begin(tmp_path / "demo")
    (tmp_path / "demo" / "observed.sqlite").touch()
    demo_loop.begin(tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [demo_loop.MARK]


@pytest.mark.slow
def test_the_demonstration_ends_with_a_better_model_and_no_failed_request(tmp_path: Path) -> None:
    command = [sys.executable, REPOSITORY / "deployment" / "demo_loop.py", "--output_dir", tmp_path / "demo"]

    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert run.returncode == 0, run.stdout + run.stderr
    assert "\x1b" not in run.stdout
    assert re.search(r"week 2, new topics .* ALARM", run.stdout)
    assert "PROMOTE: better" in run.stdout
    assert re.search(r"[1-9]\d* requests were answered meanwhile; 0 failed\.", run.stdout)
    before, after = re.findall(r"week 3, .*? (\d+\.\d)%", run.stdout)
    assert float(after) > float(before)
