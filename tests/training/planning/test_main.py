"""The planner's command: its answers, its files and its complaints."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from tests.deployment.documented import documented
from training.planning.__main__ import ask, dry_runs_of, main
from training.planning.answer import Answer, no_layout_fits
from training.planning.host_memory import estimate_host_memory
from training.planning.text import BEGIN, END, markdown, write_page

REPOSITORY = Path(__file__).resolve().parents[3]
QUESTION = ("--model", "llama-13b", "--gpus", "32", "--nodes", "4", "--gpu", "a100-80gb")
SMALL = ("--model", "distilbert-base", "--gpus", "2", "--gpu", "t4-16gb")


PAGE = REPOSITORY / "docs" / "PLANNING.md"


def founding_flags() -> list[str]:
    """The flags of the documented command."""
    return documented("docs/PLANNING.md", "founding").replace("\\\n", " ").split()[3:]


@pytest.fixture(scope="module")
def founding() -> Answer:
    """The project's founding question."""
    return ask(founding_flags())


def test_the_fastest_that_fit_come_first(founding: Answer) -> None:
    fits = [plan.fits for plan in founding.plans]
    speeds = [plan.tokens_per_second for plan in founding.plans if plan.fits]

    assert fits == sorted(fits, reverse=True)
    assert speeds == sorted(speeds, reverse=True)
    assert all(plan.memory.total <= plan.available for plan in founding.plans if plan.fits)


def test_a_whole_copy_of_13_billion_parameters_fits_no_gpu_of_80_gib(founding: Answer) -> None:
    reasons = {plan.layout.strategy: plan.reason for plan in founding.plans}

    assert re.fullmatch(r"needs 2\d\d\.\d GiB of 74\.1, 97\.0 of them for the optimizer", reasons["ddp"])
    assert reasons["zero3"] == ""


def test_a_machine_holds_one_copy_of_the_model_while_its_ranks_load_it(founding: Answer) -> None:
    host = estimate_host_memory(founding.shape, founding.cluster)

    file = 4 * founding.shape.num_parameters
    assert file < host.loading < 1.3 * file  # not one for each of the 8 ranks
    assert host.saving == pytest.approx(file + 3 * file / 4)
    table = markdown(founding, {})
    assert f"| memory of a machine while loading | {host.loading / 1e9:,.0f} GB, " in table
    assert f"| memory of a machine while saving | {host.saving / 1e9:,.0f} GB, " in table


def test_no_layout_is_faster_than_ideal_gpus(founding: Answer) -> None:
    assert all(0 < plan.share_of_ideal < 1 for plan in founding.plans)
    alone = ask(("--model", "bert-base", "--gpus", "1", "--gpu", "a100-80gb")).best[0]
    assert alone.share_of_ideal == pytest.approx(1)


def scaling_rows(printed: str) -> tuple[list[str], list[list[str]]]:
    """The table from 1 to N GPUs of a Markdown answer: its header, and its rows."""
    table = printed.partition("\nFrom 1 to ")[2].split("\n\n")[1].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return header, rows


@pytest.mark.parametrize(("model", "gpu"), [("distilbert-base", "t4-16gb"), ("bert-large", "a100-80gb")])
def test_the_efficiency_column_is_the_ratio_of_the_column_beside_it(model: str, gpu: str) -> None:
    found = ask(("--model", model, "--gpus", "8", "--gpu", gpu))

    header, rows = scaling_rows(markdown(found, {}))

    assert header[-2:] == ["tokens/s per GPU", "efficiency"]
    per_gpu = [float(row[-2].replace(",", "")) for row in rows]
    assert [row[-1] for row in rows] == [f"{speed / per_gpu[0]:.0%}" for speed in per_gpu]
    assert rows[0][-1] == "100%"


def test_without_one_gpu_that_holds_the_model_there_is_no_efficiency(founding: Answer) -> None:
    printed = markdown(founding, {})

    assert scaling_rows(printed)[0][-1] == "share of ideal"
    assert all(founding.efficiency(plan) is None for plan in founding.plans)
    assert "% of the ideal speed" in printed


def test_parts_that_are_faster_than_a_whole_are_explained(founding: Answer) -> None:
    few_tokens = ask(("--model", "llama-7b", "--gpus", "8", "--gpu", "a100-80gb", "--seq_len", "8"))

    assert few_tokens.best[0].share_of_ideal > 1.1
    assert "Faster than ideal" in markdown(few_tokens, {})
    assert "Faster than ideal" not in markdown(founding, {})


def test_the_target_is_what_the_other_run_computes(founding: Answer) -> None:
    # Six operations a parameter and token but for the attention: 21 days at 60% of 312 TFLOP/s.
    assert founding.target_tokens == pytest.approx(0.6 * 312e12 * 21 * 86_400 / (6 * 6.74e9), rel=0.1)
    assert founding.best[0].days(founding.target_tokens) < 21


def test_every_table_that_is_printed_says_that_it_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    run(*SMALL)

    printed = capsys.readouterr().out
    titles = [line for line in map(str.rstrip, printed.splitlines()) if line[:1].isupper() and line.endswith(")")]
    assert len(titles) >= 5
    assert all(line.endswith("(simulated)") for line in titles)


def run(*flags: str) -> None:
    """The command, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["planning", *flags, "--no_dry_run"])
        main()


def test_json_and_the_report_hold_the_plans_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*SMALL, "--json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html"))

    record = json.loads((tmp_path / "plan.json").read_text())
    page = (tmp_path / "plan.html").read_text()
    launches = [plan["launch"] for plan in record["plans"] if plan["fits"]][:3]
    assert record["simulated"] is True
    assert all(launch in capsys.readouterr().out for launch in launches[:1])
    assert all(launch in page for launch in launches)
    assert "http" not in page.replace('http-equiv="', "")


def test_a_hostile_models_name_stays_text_in_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    config = {"model_type": "distilbert", "n_layers": 2, "dim": 64, "n_heads": 4, "hidden_dim": 128}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100, "max_position_embeddings": 128}))

    run(*SMALL[2:], "--model", str(folder), "--html", str(tmp_path / "plan.html"))

    assert "<script" not in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--gpu", "a100"), "--gpu a100: not known; did you mean a100-"),
        (("--gpus", "30", "--nodes", "4"), "--gpus 30 on --nodes 4: not divisible; take 28 GPUs"),
        (("--gpus", "0"), "argument --gpus: 0: must be a whole number, at least 1 (see --help)"),
        (("--seq_len", "9000"), "--seq_len 9000: llama-13b has 4096 positions"),
        (("--batch_tokens", "5000"), "--batch_tokens 5000 and --seq_len 2048: not whole rows; take 4096"),
        (("--batch_tokens", "4096", "--strategy", "ddp"), "2 rows of 2048 tokens cannot be split evenly over 32"),
        (
            ("--micro_batch", "3"),
            "--micro_batch 3: does not fill a global batch of 128 rows of 2048 tokens; take one of",
        ),
        (("--strategy", "tp", "--gpus", "1", "--nodes", "1"), "--strategy tp: has no layout of llama-13b on 1 x 1"),
        (("--strategy", "3d", "--gpus", "2", "--nodes", "1"), "--strategy 3d: has no layout of llama-13b on 1 x 2"),
        (("--gpus", "20000"), "--gpus 20000: at most 8192 can be planned"),
        (("--batch_tokens", "2048000000000000"), "--batch_tokens 2048000000000000: at most 268435456"),
        (("--seq_len", "7"), "--seq_len 7: the trainer takes rows of 8 tokens or more"),
        (("--gpu", "v100-32gb", "--precision", "bf16"), "--precision bf16: v100-32gb has fp32, fp16"),
        (("--target_tokens", "many"), "many: must be a number of tokens, such as 2e9"),
        (("--target_run", "llama-7b"), "llama-7b: must be MODEL:DAYS:UTILISATION"),
        (("--target_run", "llama-7b:21:60"), "the utilisation above 0 and at most 1"),
        (("--target_run", "llama-7b:inf:0.6"), "the days must be above 0 and at most 36500"),
        (("--target_run", "llama-7b:21:nan"), "the utilisation above 0 and at most 1"),
        (("--target_run", "llama-6b:21:0.6"), "--model llama-6b: neither a known model"),
    ],
)
def test_bad_input_is_one_clear_line(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        ask((*QUESTION, *flags))

    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_where_nothing_fits_the_smallest_lack_is_named() -> None:
    found = ask(("--model", "gpt3-175b", "--gpus", "8", "--gpu", "t4-16gb"))

    assert not found.best
    assert "simulated" in str(no_layout_fits(found))
    lack = float(re.search(r"lacks ([\d.]+) GiB per GPU", str(no_layout_fits(found)))[1])
    assert lack == pytest.approx(min(plan.memory.total - plan.available for plan in found.plans) / 2**30, abs=0.05)


@pytest.mark.parametrize("flag", ["--json", "--html", "--page"])
@pytest.mark.parametrize(
    ("place", "complaint"), [("missing/plan", "there is no folder"), ("", "is a folder; name a file")]
)
def test_a_file_that_cannot_be_written_is_said_before_anything_is_planned(
    flag: str, place: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as raised:
        run("--model", "no such model", *SMALL[2:], flag, str(tmp_path / place))

    assert str(raised.value).startswith(f"{flag} {tmp_path / place}: {complaint}")
    assert capsys.readouterr().out == ""


def test_a_page_that_is_no_text_is_one_clear_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(b"\xff\xfe")

    with pytest.raises(UserError, match=f"--page {page}: is not UTF-8 text"):
        run(*SMALL, "--page", str(page))


def test_a_model_of_dimensions_alone_is_planned_without_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--model", "gpt3-175b", "--gpus", "64", "--gpu", "h100-80gb", "--json", str(tmp_path / "plan.json"))

    printed = capsys.readouterr().out
    assert "of gpt3-175b there are dimensions alone" in printed
    assert "training/train" not in printed
    assert all(plan["launch"] is None for plan in json.loads((tmp_path / "plan.json").read_text())["plans"])


def test_a_page_without_marks_is_left_alone(tmp_path: Path, founding: Answer) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n")

    with pytest.raises(UserError, match="has no lines <!-- begin"):
        write_page(page, founding, {})

    assert page.read_text() == "# A page\n"


def documented_answer() -> str:
    """What the command wrote into the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def test_the_documented_answer_is_what_its_command_prints(founding: Answer) -> None:
    assert founding_flags()[-2:] == ["--page", "docs/PLANNING.md"]
    formulas = re.sub(r"\|  \| dry run \|.*\n|.*the formula is .* off the dry run.*\n+", "", documented_answer())

    assert re.sub(r"\n{2,}", "\n\n", formulas) == re.sub(r"\n{2,}", "\n\n", markdown(founding, {}))


def test_the_documented_answer_sets_a_dry_run_beside_each_formula(founding: Answer) -> None:
    assert documented_answer().count("| dry run |") == documented_answer().count("off the dry run") == 3
    assert len(founding.best) == 3


@pytest.mark.slow
def test_the_documented_dry_runs_are_what_they_count(founding: Answer) -> None:
    def figures(text: str) -> list[str]:
        return re.findall(r"\|  \| dry run \|.*", text)

    assert figures(markdown(founding, dry_runs_of(founding))) == figures(documented_answer())


def test_formulas_need_no_torch() -> None:
    program = f"""
import sys
from training.planning.__main__ import ask
from training.planning.host_memory import estimate_host_memory
from training.planning.text import markdown
print(markdown(ask({SMALL!r}), {{}}))
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout


def test_markdown_has_a_cell_for_every_column(founding: Answer) -> None:
    rows = [line for line in markdown(founding, {}).splitlines() if line.startswith("|")]
    tables = re.findall(r"(?:^\|.*\n?)+", markdown(founding, {}), re.MULTILINE)

    assert len(rows) > 30
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)
