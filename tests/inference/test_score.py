"""Scoring of files: what is written, what survives a kill, and what is refused."""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import inference.score
from common.errors import UserError
from common.rows import TEXT_AND_LABEL, Reading, read_file
from inference.bulk import job as bulk_job
from inference.engines.model_loader import ModelLoader
from inference.score import main
from tests.inference.stand_in_model import text_of
from tests.processes import REPOSITORY, PythonProcess, run_python, wait_until

Score = Callable[..., Path]


@pytest.fixture
def news(tmp_path: Path) -> Path:
    """Rows with a column beside the text, and a text over two lines with a comma and quotes."""
    path = tmp_path / "news.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows([number, text_of(number, 1 + number % 9)] for number in range(60))
        writer.writerow([60, 'oil "prices", rise\nagain'])
    return path


def score(source: object, out: object, model: Path, *flags: str) -> None:
    main([str(source), str(out), "--model", str(model), "--quiet", "--part_rows", "16", *flags])


def refusal(source: object, out: object, model: Path, *flags: str) -> str:
    """The one line that the command ends with."""
    command = ["-m", "inference.score", str(source), str(out), "--model", str(model), "--quiet", *flags]
    done = run_python(command)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


# What is written.


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_row_keeps_its_columns_and_gets_the_label_that_the_model_gives(
    news: Path, model_folder: Path, suffix: str
) -> None:
    out = news.with_name(f"answers{suffix}")
    score(news, out, model_folder)
    expected = ModelLoader(model_folder).predict_batch([row["text"] for row in rows_of(news)])

    found = rows_of(out)
    assert [(row["id"], row["text"]) for row in found] == [(row["id"], row["text"]) for row in rows_of(news)]
    assert [row["label"] for row in found] == [one["label"] for one in expected]
    assert [float(row["confidence"]) for row in found] == pytest.approx(
        [one["confidence"] for one in expected], abs=1e-4
    )
    assert sorted(path.name for path in news.parent.iterdir()) == [out.name, f"{out.name}.job.json", "news.csv"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_all_formats_are_read_alike(news: Path, model_folder: Path, tmp_path: Path, suffix: str) -> None:
    copy = tmp_path / f"copy{suffix}"
    score(news, copy, model_folder, "--prefix", "first_")
    score(copy, tmp_path / "from_copy.jsonl", model_folder)
    score(news, tmp_path / "from_csv.jsonl", model_folder)

    answers = [
        [(row["id"], row["label"], row["confidence"]) for row in rows_of(tmp_path / name)]
        for name in ("from_copy.jsonl", "from_csv.jsonl")
    ]
    assert answers[0] == answers[1]


def test_probabilities_are_an_object_in_json_and_columns_in_a_table(news: Path, model_folder: Path) -> None:
    for suffix in (".jsonl", ".parquet"):
        score(news, news.with_name(f"all{suffix}"), model_folder, "--probabilities")

    lines, table = (rows_of(news.with_name(f"all{suffix}")) for suffix in (".jsonl", ".parquet"))
    for line, row in zip(lines, table, strict=True):
        assert line["probabilities"] == {label: row[f"probability_{label}"] for label in line["probabilities"]}
        assert sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert line["probabilities"][line["label"]] == line["confidence"]


def test_parquet_keeps_the_types_of_its_columns(model_folder: Path, tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "when": pyarrow.array(range(100), pyarrow.timestamp("s")),
            "tags": [["a"], []] * 50,
            "text": pyarrow.array([text_of(number) for number in range(100)]).dictionary_encode(),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=23)
    score(tmp_path / "in.parquet", tmp_path / "out.parquet", model_folder)

    found = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert found.select(["when", "tags"]).equals(
        pyarrow.parquet.read_table(tmp_path / "in.parquet").select(["when", "tags"])
    )
    assert found["text"].to_pylist() == table["text"].to_pylist()


def test_a_file_of_ag_news_needs_no_header(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text('"3","Oil","prices rise"\n"2","Goal","the cup final"\n')
    score(tmp_path / "test.csv", tmp_path / "out.csv", model_folder)

    expected = ModelLoader(model_folder).predict_batch(["Oil prices rise", "Goal the cup final"])
    assert [row["label"] for row in rows_of(tmp_path / "out.csv")] == [one["label"] for one in expected]
    assert list(rows_of(tmp_path / "out.csv")[0]) == ["class", "title", "description", "label", "confidence"]


def test_a_folder_becomes_a_folder_with_a_file_for_each(news: Path, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    news.rename(tmp_path / "in" / "deep" / "a.csv")
    (tmp_path / "in" / "b.json").write_text('{"text": "oil"}\n')
    (tmp_path / "in" / "notes.txt").write_text("not rows")
    score(tmp_path / "in", tmp_path / "out", model_folder)
    score(tmp_path / "in", tmp_path / "tables", model_folder, "--format", "parquet")

    assert len(rows_of(tmp_path / "out" / "deep" / "a.csv")) == 61
    assert [row["text"] for row in rows_of(tmp_path / "out" / "b.jsonl")] == ["oil"]
    found = [str(path.relative_to(tmp_path)) for path in (tmp_path / "tables").rglob("*.*")]
    assert sorted(found) == ["tables/b.parquet", "tables/deep/a.parquet"]


def test_an_fsspec_address_is_read_and_written(news: Path, model_folder: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bulk/in/news.csv", news.read_bytes())
    score("memory://bulk/in", "memory://bulk/out", model_folder)
    score(news, "memory://bulk/one.csv", model_folder)
    score(news, news.with_name("here.csv"), model_folder)

    expected = news.with_name("here.csv").read_bytes()
    assert memory.cat_file("/bulk/out/news.csv") == memory.cat_file("/bulk/one.csv") == expected
    assert [path for path in memory.find("/bulk") if ".parts" in path] == []


# Rows that cannot be used.


def test_a_bad_row_ends_the_job_with_its_line_unless_it_is_to_be_kept(model_folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(
        b'id,text\n1,oil prices\n2, \n3,"oil" prices\n4\n5,caf\xe9\n6,goal,more\n7,goal\n8,"never closed\n'
    )

    assert f"{source} line 3: the text is empty" in refusal(source, out, model_folder)
    assert "bad_rows was refuse and is now keep" in refusal(source, out, model_folder, "--bad_rows", "keep")
    score(source, out, model_folder, "--bad_rows", "keep", "--restart")
    rows = rows_of(out)

    assert [row["id"] for row in rows] == ["1", "2", "", "4", "5", "6", "7", ""]
    assert [bool(row["label"]) for row in rows] == [True, False, False, False, False, False, True, False]
    assert [row["error"].removeprefix(f"{source} ").partition(":")[0] for row in rows if row["error"]] == [
        f"line {number}" for number in (3, 4, 5, 6, 7, 9)
    ]


def test_a_text_of_which_nothing_remains_is_a_bad_row(model_folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("id,text\n1,oil\n2,\u200b\u200d\ufeff\n3,&lt;p&gt;\n4,goal\n", encoding="utf-8")

    assert f"{source} row 2: the text is blank" in refusal(source, out, model_folder)
    score(source, out, model_folder, "--bad_rows", "keep", "--restart")

    rows = rows_of(out)
    assert [bool(row["label"]) for row in rows] == [True, False, False, True]
    assert [row["error"].partition(": ")[2] for row in rows[1:3]] == ["the text is blank"] * 2


def test_bad_json_lines_keep_their_place(model_folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"text": "oil", "x": NaN}\n\n{"text": 5}\nno json\n[1]\n{"other": "oil"}\n{"text": "\\ud83d goal"}\n'
    )
    score(source, out, model_folder, "--bad_rows", "keep")
    rows = rows_of(out)

    assert ["label" in row for row in rows] == [False, False, False, False, False, True]
    assert "a number that JSON cannot hold" in rows[0]["error"]
    assert "not a string" in rows[1]["error"]
    assert "not valid JSON" in rows[2]["error"]


def test_a_json_line_that_python_cannot_hold_is_a_bad_row(model_folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "oil"}\n{"text": "oil", "n": ' + "9" * 5000 + '}\n{"x": ' + "[" * 100_000 + "\n")
    score(source, out, model_folder, "--bad_rows", "keep")
    rows = rows_of(out)

    assert rows[0]["label"]
    assert "a number of too many digits" in rows[1]["error"]
    assert "nested too deep" in rows[2]["error"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_carriage_return_in_a_text_does_not_end_its_row(model_folder: Path, tmp_path: Path, suffix: str) -> None:
    source, out = tmp_path / "in.jsonl", (tmp_path / "out").with_suffix(suffix)
    source.write_text('{"text": "Shares fall\\ron Wall Street", "id": 1}\n{"text": "Cup final", "id": 2}\n')
    score(source, out, model_folder)
    score(out, again := (tmp_path / "again").with_suffix(suffix), model_folder, "--prefix", "again_")

    rows = rows_of(again)
    assert [(row["text"], row["id"]) for row in rows] == [("Shares fall\ron Wall Street", "1"), ("Cup final", "2")]
    assert all(row["label"] == row["again_label"] for row in rows)


def test_a_tsv_has_the_rows_that_training_reads_from_it(model_folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.tsv", tmp_path / "out.jsonl"
    texts = ['"Shares fall on Wall Street', "Cup final goes to penalties", 'Oracle buys PeopleSoft"', '"Fine" says one']
    source.write_text("text\tlabel\n" + "".join(f"{text}\t1\n" for text in texts))
    score(source, out, model_folder, "--prefix", "found_")
    assert [row["text"] for row in rows_of(out)] == texts
    assert [text for _, text, _ in read_file(source, Reading(TEXT_AND_LABEL, skip=False))] == texts

    (tmp_path / "one.tsv").write_text("text\nShares fall, again\nCup final\n")
    score(tmp_path / "one.tsv", tmp_path / "one.jsonl", model_folder)
    assert [row["text"] for row in rows_of(tmp_path / "one.jsonl")] == ["Shares fall, again", "Cup final"]


# Kills and company.


def write_rows(path: Path, num_rows: int) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "id"])
        writer.writerows([text_of(number, 1 + number % 9), number] for number in range(num_rows))
    return path


def start_scoring(source: Path, out: Path, model: Path, engine: str = "torch") -> PythonProcess:
    command = ["-m", "inference.score", str(source), str(out), "--model", str(model), "--engine", engine]
    log = out.with_suffix(".log")
    return PythonProcess([*command, "--part_rows", "64"], {**os.environ}, REPOSITORY, [log, log])


def finished_parts(out: Path) -> dict[str, int]:
    """The parts on disk, each with its inode, which is another one if it is written again."""
    found = {}
    for path in Path(f"{out}.parts").glob("*/*.part"):
        with suppress(FileNotFoundError):  # the job has ended meanwhile
            found[path.name] = path.stat().st_ino
    return found


def is_finished(out: Path) -> bool:
    record = Path(f"{out}.job.json")
    return record.exists() and json.loads(record.read_text())["finished"]


@pytest.mark.parametrize(
    ("num_kills", "num_processes"),
    [pytest.param(3, 1, marks=pytest.mark.slow), (3, 2), pytest.param(50, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("suffix", [".parquet"])
def test_however_often_it_is_killed_the_bytes_are_the_same_and_no_finished_part_is_done_again(
    num_kills: int, num_processes: int, suffix: str, model_folder: Path, tmp_path: Path
) -> None:
    source, generator = write_rows(tmp_path / "in.csv", 300 * num_kills + 1000), random.Random(num_kills)
    undisturbed, out = tmp_path / f"undisturbed{suffix}", tmp_path / f"out{suffix}"
    main(
        [
            str(source),
            str(undisturbed),
            "--model",
            str(model_folder),
            "--engine",
            "torch",
            "--part_rows",
            "64",
            "--quiet",
        ]
    )

    for _ in range(num_kills):
        before = finished_parts(out)
        processes = [start_scoring(source, out, model_folder) for _ in range(num_processes)]
        wanted = len(before) + generator.randint(0, 3)
        wait_until(
            lambda wanted=wanted, processes=processes: (
                len(finished_parts(out)) > wanted or any(process.poll() is not None for process in processes)
            )
        )
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(generator.random() / 20)
            process.kill()
            process.wait()
        after = finished_parts(out)
        # On a busy machine the job may end between two looks, and be killed while it removes its parts.
        assert is_finished(out) or before.items() <= after.items()
    last = [start_scoring(source, out, model_folder) for _ in range(num_processes)]
    codes = [process.wait(120) for process in last]

    assert codes == [0] * num_processes, out.with_suffix(".log").read_text()
    assert out.read_bytes() == undisturbed.read_bytes()
    assert not Path(f"{out}.parts").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_a_part_whose_owner_is_silent_is_taken_over(
    news: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_job, "LEASE_SECONDS", 0.0)
    out = tmp_path / "out.csv"
    folder = killed_before_parts_were_removed(news, out, model_folder, monkeypatch)
    record = json.loads(Path(f"{out}.job.json").read_text())
    Path(f"{out}.job.json").write_text(json.dumps({**record, "finished": False}))
    for path in (out, folder / "done", folder / "1.part"):
        path.unlink()
    (folder / "1.claim").write_text('{"host": "a machine that is gone"}')
    score(news, out, model_folder)

    assert len(rows_of(out)) == 61


def killed_before_parts_were_removed(source: Path, out: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is on disk if the last process is killed at the very end; returns the folder of the parts."""
    with monkeypatch.context() as patch:
        patch.setattr(bulk_job.Job, "_remove_parts", lambda job: None)
        score(source, out, model)
    [folder] = Path(f"{out}.parts").glob("*-0")
    return folder


def test_parts_that_a_kill_at_the_very_end_left_are_removed_by_the_next_start(
    news: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = news.with_name("out.csv")
    killed_before_parts_were_removed(news, out, model_folder, monkeypatch)
    score(news, out, model_folder)

    assert not Path(f"{out}.parts").exists()


def test_parts_of_another_job_are_never_taken_for_this_one(
    news: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.csv"
    killed_before_parts_were_removed(news, out, model_folder, monkeypatch)
    before = out.read_bytes()
    out.unlink()
    score(news, out, model_folder)
    assert out.read_bytes() == before

    killed_before_parts_were_removed(news, tmp_path / "out2.csv", model_folder, monkeypatch)
    out = tmp_path / "out2.csv"
    out.unlink()
    write_rows(news, 61)
    score(news, out, model_folder)

    score(news, tmp_path / "fresh.csv", model_folder)
    assert out.read_bytes() == (tmp_path / "fresh.csv").read_bytes()
    assert not Path(f"{out}.parts").exists()


def test_rows_that_change_while_they_are_scored_make_no_output(
    news: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, begin = news.with_name("out.csv"), bulk_job.Job.begin

    def begin_and_change(job: bulk_job.Job, model: dict[str, Any]) -> None:
        begin(job, model)
        with news.open("a") as file:
            file.write("61,oil\n")

    monkeypatch.setattr(bulk_job.Job, "begin", begin_and_change)
    with pytest.raises(UserError, match="changed while it was scored"):
        score(news, out, model_folder)
    assert not out.exists()


def test_a_refused_restart_or_a_missing_output_costs_no_record(news: Path, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / "in" / name).write_bytes(news.read_bytes())
    out, record = tmp_path / "out", tmp_path / "out.job.json"
    score(tmp_path / "in", out, model_folder)
    before = record.read_bytes()

    with pytest.raises(UserError, match="--restart removes no output"):
        score(tmp_path / "in", out, model_folder, "--restart")
    (out / "a.csv").unlink()
    with pytest.raises(UserError, match="was complete and is gone"):
        score(tmp_path / "in", out, model_folder)
    assert record.read_bytes() == before
    shutil.rmtree(out)
    score(tmp_path / "in", out, model_folder)
    assert sorted(path.name for path in out.iterdir()) == ["a.csv", "b.csv"]


def test_a_mistake_beside_restart_costs_no_finished_part(model_folder: Path, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in.csv", 40), tmp_path / "out.csv"
    source.write_text(source.read_text() + ",bad\n")
    with pytest.raises(UserError, match="the text is empty"):
        score(source, out, model_folder)
    before = finished_parts(out)
    assert before

    with pytest.raises(UserError, match="no column txt"):
        score(source, out, model_folder, "--text_column", "txt", "--restart")
    assert finished_parts(out) == before


def test_a_job_whose_pattern_matches_its_own_files_can_be_started_again(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text('{"text": "oil"}\n{"text": ""}\n')
    for pattern, out in (("*.json", "flat"), ("**/*.json*", "deep")):
        with pytest.raises(UserError, match="the text is empty"):
            score(pattern, out, model_folder)
        (tmp_path / "a.json").write_text('{"text": "oil"}\n')
        score(pattern, out, model_folder, "--restart")
        score(pattern, out, model_folder)
        assert [path.name for path in (tmp_path / out).iterdir()] == ["a.jsonl"]
        shutil.rmtree(tmp_path / out)
        (tmp_path / f"{out}.job.json").unlink()
        (tmp_path / "a.json").write_text('{"text": "oil"}\n{"text": ""}\n')


def test_a_folder_named_in_another_way_is_the_same_job(
    news: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(news.parent)
    Path("in").mkdir()
    news.rename("in/news.csv")
    for name in ("./in", "in", "in/../in/", str(Path("in").absolute())):
        score(name, "out", model_folder)
    assert [str(path) for path in Path("out").rglob("*")] == ["out/news.csv"]


def test_a_finished_job_is_not_done_again_and_a_removed_output_is(news: Path, model_folder: Path) -> None:
    out = news.with_name("out.csv")
    score(news, out, model_folder)
    first, written = out.read_bytes(), out.stat().st_ino
    score(news, out, model_folder)
    assert out.stat().st_ino == written
    out.unlink()
    score(news, out, model_folder)
    assert out.read_bytes() == first


# Refusals.


def test_another_job_does_not_touch_what_is_there(news: Path, model_folder: Path) -> None:
    out = news.with_name("out.csv")
    score(news, out, model_folder)
    before = out.read_bytes()

    assert "probabilities was False and is now True" in refusal(
        news, out, model_folder, "--part_rows", "16", "--probabilities"
    )
    with news.open("a") as file:
        file.write("61,oil\n")
    assert "the input news.csv has changed" in refusal(news, out, model_folder, "--part_rows", "16")
    assert out.read_bytes() == before
    Path(f"{out}.job.json").unlink()
    assert "no job of this command wrote it" in refusal(news, out, model_folder)


def test_bad_input_is_refused_in_one_line(model_folder: Path, tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.csv", 3)
    table = pyarrow.table({"text": ["oil", "goal"] * 500, "label": [1, 2] * 500})
    pyarrow.parquet.write_table(table, tmp_path / "good.parquet")
    whole = (tmp_path / "good.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.csv").touch()
    (tmp_path / "header.csv").write_text("id,text\n")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "binary.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe" * 20)
    (tmp_path / "folder").mkdir()
    out, cases = tmp_path / "out.parquet", [
        ("gone.csv", "no such file or folder"),
        ("gone*.csv", "matches no file"),
        ("folder", "holds no file"),
        ("empty.csv", "holds no rows"),
        ("header.csv", "holds no rows"),
        ("binary.csv", "not UTF-8 text"),
        ("binary.jsonl", "not UTF-8 text"),
        ("cut.parquet", "not a readable Parquet file"),
        ("good.parquet", "has a column label already"),
    ]  # fmt: skip
    for name, message in cases:
        target = tmp_path / "out" if name == "folder" or "*" in name else out
        assert message in refusal(tmp_path / name, target, model_folder), name
        assert not out.exists()
    assert "no column title among text, id" in refusal(good, out, model_folder, "--text_column", "title")
    assert "[model-unusable]" in refusal(good, out, tmp_path / "no_model")
    assert "is IN itself" in refusal(good, good, model_folder)
    assert "is in" in refusal(tmp_path, tmp_path / "folder", model_folder)
    assert "must end in" in refusal(good, tmp_path / "out.txt", model_folder)
    assert "names one file" in refusal(tmp_path / "*.csv", out, model_folder)
    assert "cannot be written" in refusal(good, good / "out.csv", model_folder)
    assert "Protocol not known" in refusal("nothing://in.csv", out, model_folder)


def test_what_the_output_cannot_hold_is_refused_in_one_line(model_folder: Path, tmp_path: Path) -> None:
    far, late, latin = (tmp_path / name for name in ("far.parquet", "late.jsonl", "latin"))
    year_30_000_000 = pyarrow.array([0, 10**15], pyarrow.timestamp("s"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["oil", "goal"], "when": year_30_000_000}), far)
    # The field of an answer comes after the rows whose columns are checked before the job begins.
    late.write_text('{"text": "oil"}\n' * 40 + '{"text": "goal", "label": "MINE"}\n')
    latin.mkdir()
    (latin / os.fsdecode(b"caf\xe9.csv")).write_text("text\noil\n")

    assert "far.parquet rows 1 to 2: cannot all be written as .csv" in refusal(far, tmp_path / "far.csv", model_folder)
    assert "has a column label already" in refusal(late, tmp_path / "late.out.jsonl", model_folder, "--part_rows", "16")
    assert "the name is not UTF-8 text" in refusal(latin, tmp_path / "out", model_folder)


def test_a_full_disk_ends_the_job_in_one_line_and_it_goes_on_with_space(model_folder: Path, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in.csv", 5000), tmp_path / "out.csv"
    command = ["-m", "inference.score", str(source), str(out), "--model", str(model_folder), "--quiet"]
    # No file of this process may be larger than this, which a writer meets as a disk without space.
    limited = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000)); sys.argv = sys.argv[:1] + sys.argv[3:]; "
        "runpy.run_module('inference.score', run_name='__main__')"
    )
    done = run_python(["-c", limited, *command])

    assert done.returncode == 2, done.stderr
    assert "free some space" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()
    score(source, tmp_path / "other.csv", model_folder, "--part_rows", "2048")
    score(source, out, model_folder, "--part_rows", "2048")
    assert out.read_bytes() == (tmp_path / "other.csv").read_bytes()


def test_copies_that_measured_different_engines_at_the_same_moment_agree_on_one(
    news: Path, exported_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, out = inference.score._load_model, news.with_name("answers.csv")

    def load_while_another_begins(options: argparse.Namespace, job: bulk_job.Job) -> ModelLoader:
        model = load(options, job)
        monkeypatch.setattr(inference.score, "_load_model", load)
        score(news, out, exported_folder, "--engine", "torch")
        return model

    monkeypatch.setattr(inference.score, "_load_model", load_while_another_begins)
    score(news, out, exported_folder)

    assert json.loads(out.with_name("answers.csv.job.json").read_text())["model"]["runtime"] == "torch"


def test_names_cannot_command_the_terminal(
    news: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = shutil.copytree(model_folder, tmp_path / "a\n\x1b[2J"), tmp_path / "\x1b[2Jb\r.csv"
    main([str(news), str(out), "--model", str(model), "--part_rows", "16"])
    line = "".join(capsys.readouterr().out)
    assert line.removesuffix("\n").isprintable()
    assert r"\x1b[2Jb\r.csv: 61 rows, a\n\x1b[2J" in line


def test_cells_that_a_spreadsheet_takes_for_formulas_are_written_as_they_are(
    model_folder: Path, tmp_path: Path
) -> None:
    texts = ["=1+1", "+a", "-a", "@a", "\ta", "\ra"]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.csv"
    source.write_text("".join(json.dumps({"text": f"{text} oil prices"}) + "\n" for text in texts))
    score(source, out, model_folder)
    assert [row["text"] for row in rows_of(out)] == [f"{text} oil prices" for text in texts]
