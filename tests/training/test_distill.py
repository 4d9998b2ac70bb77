"""Distillation: a teacher's answers as targets, texts without labels, fewer blocks, and the export at the end."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from common.errors import UserError
from common.model_folder import read_saved_model
from inference.engines.model_loader import ModelLoader
from tests.deployment.documented import REPOSITORY, documented
from tests.training.parallelism.cases import ALONE
from tests.training.parallelism.small_models import LABELS, small_batch, small_model
from training.config import TrainConfig
from training.data.array_file import ArrayFile
from training.data.batching import MicroBatch
from training.data.dataset import Rows, TextData
from training.data.prepare import prepare_data
from training.data.teacher import TeacherAnswers
from training.data.unlabelled import add_unlabelled
from training.model.classifier import Loading, NewsClassifier
from training.parallelism.strategy import row_losses
from training.tasks import Classification, MultiLabelClassification, Regression, Task

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
ALL_ROWS = ("--max_train_rows", 0, "--batch_size", 8)


@pytest.fixture(scope="module")
def weather(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data that is easy to learn; its labels are in alphabetical order: calm, storm."""
    folder = tmp_path_factory.mktemp("weather")
    for split, count in (("train", 40), ("validation", 8), ("test", 8)):
        rows = [
            ("a storm breaks" if i % 2 else "the sea sleeps", i, "storm" if i % 2 else "calm") for i in range(count)
        ]
        lines = "".join(f"{text} {split} {i};{label}\n" for text, i, label in rows)
        (folder / f"{split}.csv").write_text(f"text;label\n{lines}")
    more = [f"a storm breaks again {i}" if i % 2 else f"the sea sleeps again {i}" for i in range(14)]
    # Of these two, one is a test row and the other repeats the first line.
    more += ["a storm breaks test 1", more[0]]
    (folder.with_name("more.txt")).write_text("\n".join(more))
    return folder


@pytest.fixture(scope="module")
def teacher(weather: Path, launch_shared: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained on it."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    flags = ("--dataset", weather, *ALL_ROWS, "--learning_rate", "5e-3", "--output_dir", folder)
    run = launch_shared(1, *map(str, flags))
    assert run.process.returncode == 0, run.err
    return folder


def _losses(metrics_of: Metrics, run: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(run)]


def _probabilities(folder: Path, texts: list[str]) -> np.ndarray:
    """What a model answers, in fp32 by PyTorch."""
    saved = read_saved_model(folder)
    model = NewsClassifier.from_saved(saved).eval()
    answers = []
    for encoded in saved.tokenizer().encode(texts):
        with torch.no_grad():
            answers.append(model(torch.tensor([encoded.ids]), None).softmax(dim=1)[0].numpy())
    return np.array(answers)


def test_a_teacher_is_asked_once_and_another_student_finds_its_answers(
    weather: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def answers_for(**fields: Any) -> np.ndarray:
        said.clear()
        asked = {"dataset": str(weather), "model": "tiny", "distill": str(teacher), "cache_dir": tmp_path, **fields}
        data = prepare_data(TrainConfig(**asked), ALONE, said.append)
        return data.teacher.of(data.train_index)

    # A start that fails leaves no answers.
    with monkeypatch.context() as patch:
        patch.setenv("ENGINE", "nonsense")
        failed = rf"--distill {teacher}: python -m inference\.score failed: ENGINE: must be"
        with pytest.raises(UserError, match=failed):
            answers_for()
    assert not list(tmp_path.glob("teacher-*.safetensors"))

    answers = answers_for()
    assert [line for line in said if line.startswith("40 rows in")]
    [file] = tmp_path.glob("teacher-*")
    texts = [line.partition(";")[0] for line in (weather / "train.csv").read_text().splitlines()[1:]]
    assert answers == pytest.approx(_probabilities(teacher, texts), abs=1e-4)
    assert answers.argmax(axis=1).tolist() == [0, 1] * 20

    # A student of another length, with other validation rows.
    written = file.stat().st_mtime_ns
    assert answers_for(max_length=16, seed=7).tolist() == answers.tolist()
    assert [line for line in said if "to 40 texts are already known" in line]
    assert file.stat().st_mtime_ns == written

    # A damaged file is not used.
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    assert answers_for().tolist() == answers.tolist()
    assert [line for line in said if line.startswith("40 rows in")]
    assert list(tmp_path.glob("teacher-*")) == [file]


def test_answers_are_given_in_the_order_of_the_labels_of_the_data() -> None:
    raw = np.array([[0.9, 0.1], [0.2, 0.8]], dtype=np.float32)
    teacher = TeacherAnswers("key", [raw], rows=np.array([3, 7]), orders=[np.array([1, 0])], num_labelled=5)

    assert teacher.of(np.array([7, 3, 7])).tolist() == raw[[1, 0, 1]][:, ::-1].tolist()
    assert teacher.has_label(np.array([7, 3])).tolist() == [False, True]


def test_several_teachers_answer_with_their_mean_whatever_the_order_of_their_labels() -> None:
    first = np.array([[0.75, 0.25], [0.25, 0.75]], dtype=np.float32)
    second = np.array([[0.5, 0.5], [1.0, 0.0]], dtype=np.float32)  # its labels are the other way round
    orders = [np.array([0, 1]), np.array([1, 0])]
    teachers = TeacherAnswers("key", [first, second], rows=np.array([3, 7]), orders=orders, num_labelled=8)

    assert teachers.of(np.array([3, 7])).tolist() == [[0.625, 0.375], [0.125, 0.875]]
    assert teachers.of(np.array([3])).dtype == np.float32


@pytest.mark.slow
def test_a_student_of_two_teachers_learns_from_the_mean_of_both(
    weather: Path, teacher: Path, tmp_path: Path, train_here: Train
) -> None:
    second = tmp_path / "second"
    flags = ("--dataset", weather, *ALL_ROWS, "--epochs", 1)
    assert train_here(*flags, "--seed", 5, "--output_dir", second) == 0
    both = f"{teacher},{second}"
    texts = [line.partition(";")[0] for line in (weather / "train.csv").read_text().splitlines()[1:]]
    asked = {"dataset": str(weather), "model": "tiny", "distill": both, "cache_dir": tmp_path / "cache"}

    data = prepare_data(TrainConfig(**asked), ALONE, lambda line: None)

    mean = np.mean([_probabilities(folder, texts) for folder in (teacher, second)], axis=0)
    assert data.teacher.of(data.train_index) == pytest.approx(mean, abs=1e-4)
    assert len(list((tmp_path / "cache").glob("teacher-*"))) == 2  # each has a file of its own
    student = tmp_path / "student"
    assert train_here(*flags, "--distill", both, "--cache_dir", tmp_path / "cache", "--output_dir", student) == 0
    assert json.loads((student / "metrics.json").read_text())["distilled_from"] == both
    assert "which learned from the answers of `model` and `second` to its rows" in (student / "README.md").read_text()


@pytest.mark.slow
def test_a_student_is_the_same_on_two_ranks_and_after_a_resume_and_with_no_other_teacher(
    weather: Path,
    teacher: Path,
    train_here: Train,
    launch: Callable[..., Any],
    metrics_of: Metrics,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    texts = weather.with_name("more.txt")
    flags = ("--dataset", weather, "--max_train_rows", 0, "--distill", teacher, "--distill_texts", texts)
    flags += ("--save_every", 4, "--keep_last", 9)
    assert train_here(*flags, "--batch_size", 8, "--output_dir", tmp_path / "one") == 0
    out = capfd.readouterr().out
    assert "14 texts without a label" in out
    assert "2 are left out" in out
    assert "54 training (14 of them without a label), 8 validation, 8 test rows" in out
    one = _losses(metrics_of, tmp_path / "one.run")
    assert len(one) == 14

    shutil.copytree(tmp_path / "one.run", tmp_path / "resumed.run")
    resume = ("--resume", tmp_path / "resumed.run" / "checkpoints" / "step_00000004")
    assert train_here(*flags, "--batch_size", 8, *resume, "--output_dir", tmp_path / "resumed") == 0
    two = launch(2, *map(str, (*flags, "--batch_size", 4, "--output_dir", tmp_path / "two")))

    assert two.process.returncode == 0, two.err
    assert _losses(metrics_of, tmp_path / "resumed.run") == one
    assert (tmp_path / "resumed/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()
    assert _losses(metrics_of, tmp_path / "two.run") == pytest.approx(one, rel=1e-4)
    accuracies = [[step["accuracy"] for step in metrics_of(tmp_path / f"{name}.run")] for name in ("one", "two")]
    assert accuracies[0] == accuracies[1]

    other = shutil.copytree(teacher, tmp_path / "other_teacher")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "dropout": 0.2}))
    for changed, what in ((("--distill", other), "has changed"), ((), "is no longer given")):
        again = ("--dataset", weather, "--max_train_rows", 0, "--batch_size", 8, "--save_every", 4, *changed)
        again += ("--distill_texts", texts) if changed else ()
        assert train_here(*again, *(("--keep_last", 9)), "--output_dir", tmp_path / "one") == 2
        expected = f"the teacher (--distill) {what}" if changed else "have changed"
        assert expected in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--strategy", "zero3", "--batch_size", 4),
        ("--strategy", "tp", "--batch_size", 8),
        ("--strategy", "pp", "--batch_size", 4, "--gradient_accumulation", 2),
    ],
    ids=lambda flags: flags[1],
)
def test_a_student_is_the_same_under_every_strategy(
    flags: tuple[object, ...],
    weather: Path,
    teacher: Path,
    train_here: Train,
    launch: Callable[..., Any],
    metrics_of: Metrics,
    tmp_path: Path,
) -> None:
    asked = ("--dataset", weather, "--max_train_rows", 0, "--distill", teacher, "--epochs", 1)
    asked += ("--distill_texts", weather.with_name("more.txt"))
    assert train_here(*asked, "--batch_size", 8, "--output_dir", tmp_path / "one") == 0
    two = launch(2, *map(str, (*asked, *flags, "--output_dir", tmp_path / "two")))

    assert two.process.returncode == 0, two.err
    steps = [metrics_of(tmp_path / f"{name}.run") for name in ("one", "two")]
    assert [step["loss"] for step in steps[1]] == pytest.approx([step["loss"] for step in steps[0]], rel=1e-3)
    assert [step["accuracy"] for step in steps[1]] == [step["accuracy"] for step in steps[0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "row", "count"),
    [
        ("pair", lambda i: {"text": f"is {i} even", "text_pair": f"it is {i}", "label": ["yes", "no"][i % 2]}, 2),
        ("multi_label", lambda i: {"text": f"a text {i}", "label": ["a", "b"][: i % 3]}, 2),
        ("regression", lambda i: {"text": f"a text {i % 5}", "label": i % 5}, 1),
    ],
    ids=["pair", "multi_label", "regression"],
)
def test_every_task_that_gives_labels_has_teachers(
    task: str, row: Callable[[int], dict[str, Any]], count: int, train_here: Train, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(60)))
    more = [{name: f"{text} more" for name, text in row(i).items() if name != "label"} for i in range(6)]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(texts) + "\n" for texts in more))
    flags = ("--task", task, "--dataset", tmp_path / "rows.jsonl", *ALL_ROWS, "--epochs", 1)
    cache = ("--cache_dir", tmp_path / "cache")
    assert train_here(*flags, *cache, "--output_dir", tmp_path / "teacher") == 0
    distill = ("--distill", tmp_path / "teacher", "--distill_texts", tmp_path / "more.jsonl")
    assert train_here(*flags, *cache, *distill, "--output_dir", tmp_path / "student") == 0

    [file] = (tmp_path / "cache").glob("teacher-*")
    answers = ArrayFile.open(file)["answers"]
    assert answers.shape[1] == count
    assert np.isfinite(answers).all()
    assert json.loads((tmp_path / "student" / "metrics.json").read_text())["unlabelled_rows"] == len(
        {json.dumps(texts) for texts in more}
    )


def _batch(labels: torch.Tensor, teacher: torch.Tensor, is_labelled: list[bool]) -> MicroBatch:
    ids, rows = torch.ones(len(labels), 4, dtype=torch.int64), np.arange(len(labels))
    weights = torch.full((len(labels),), 1 / len(labels))
    return MicroBatch(
        ids, None, labels, weights, rows, 0, ids.numel(), teacher=teacher, is_labelled=torch.tensor(is_labelled)
    )


@pytest.mark.parametrize(
    ("task", "labels", "answers"),
    [
        (Classification(["a", "b", "c"]), torch.tensor([0, 2]), torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])),
        (
            MultiLabelClassification(["a", "b", "c"]),
            torch.tensor([[1, 0, 0], [0, 1, 1]], dtype=torch.uint8),
            torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]),
        ),
        (Regression(["stars"]), torch.tensor([1.0, 4.0], dtype=torch.float64), torch.tensor([[1.5], [3.0]])),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_row_with_a_label_learns_from_both_and_one_without_from_the_teacher_alone(
    task: Task, labels: torch.Tensor, answers: torch.Tensor
) -> None:
    if isinstance(task, Regression):
        task.fit(np.array([1.0, 2.0, 4.0]), torch.nn.Linear(2, 1))
    scores = torch.randn(2, answers.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
    config = TrainConfig(distill="teacher", distill_share=0.75)

    losses = row_losses(task, scores, _batch(labels, answers, [True, False]), config)

    by_label = task.row_losses(scores, labels, 0.0)
    if isinstance(task, Regression):
        by_teacher = ((scores[:, 0] * task.deviation + task.mean - answers[:, 0]) / task.deviation) ** 2
    elif isinstance(task, MultiLabelClassification):
        p = scores.sigmoid()
        by_teacher = -(answers * p.log() + (1 - answers) * (1 - p).log()).mean(dim=1)
    else:
        by_teacher = -(answers * scores.log_softmax(dim=1)).sum(dim=1)
    expected = torch.stack([0.25 * by_label[0] + 0.75 * by_teacher[0], by_teacher[1]])
    torch.testing.assert_close(losses, expected)
    # The best scores for a row without a label are the teacher's answer, whatever its placeholder says.
    (gradient,) = torch.autograd.grad(losses[1], scores)
    (wanted,) = torch.autograd.grad(by_teacher[1], scores)
    torch.testing.assert_close(gradient, wanted)


def _data(train: list[str], test: list[str], validation: list[str]) -> TextData:
    def rows(texts: list[str]) -> Rows:
        return Rows(texts, np.arange(len(texts)) % 2)

    return TextData("news", ["a", "b"], rows(train), rows(test), validation=rows(validation))


def test_no_text_of_the_test_or_validation_rows_is_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("t1", "new 1", "x1")))
    (folder / "b.txt").write_text("v1\nnew 2\nnew 1\n")
    (folder / "c.csv").write_text("id,Text\n1,new 3\n2,x2\n")
    data = _data(["x1", "x2"], ["t1", "t2"], ["v1", "v2"])

    found = add_unlabelled(data, TrainConfig(distill="teacher", distill_texts=str(folder)), tmp_path / "cache")

    assert list(found.train.texts) == ["x1", "x2", "new 1", "new 2", "new 3"]
    assert found.train.texts[1:4] == ["x2", "new 1", "new 2"]
    assert [found.train.texts[i] for i in range(5)] == list(found.train.texts)
    assert (found.num_unlabelled, len(found.train.labels), len(found.test)) == (3, 5, 2)
    [note] = found.notes
    assert note.startswith(f"3 texts without a label from {folder}; 5 are left out")


@pytest.mark.parametrize("family", ["distilbert", "bert", "roberta", "llama"])
def test_the_kept_blocks_are_evenly_spaced_and_everything_else_is_as_it_was(family: str, tmp_path: Path) -> None:
    whole = small_model(family, layers=6)
    whole.network.save_pretrained(tmp_path)

    student = NewsClassifier(len(LABELS), str(tmp_path), LABELS, loading=Loading(layers=3))

    assert student.config.num_hidden_layers == len(student.blocks) == 3
    for place, block in zip((0, 2, 5), student.blocks, strict=True):
        expected = whole.blocks[place].state_dict()
        assert all(tensor.equal(expected[name]) for name, tensor in block.state_dict().items())
    blocks = {id(parameter) for block in student.blocks for parameter in block.parameters()}
    outside = [name for name, parameter in student.network.named_parameters() if id(parameter) not in blocks]
    before = whole.network.state_dict()
    assert outside
    assert all(student.network.get_parameter(name).equal(before[name]) for name in outside)

    # The folder that it is written to is an ordinary one of three blocks.
    student.network.save_pretrained(tmp_path / "student")
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "student").eval()
    ids, mask, _ = small_batch()
    with torch.no_grad():
        torch.testing.assert_close(read(ids, mask).logits, student.eval()(ids, mask), rtol=1e-4, atol=1e-5)


def test_twelve_blocks_give_those_from_which_distilbert_began(tmp_path: Path) -> None:
    whole = small_model("bert", layers=12)
    whole.network.save_pretrained(tmp_path)
    kept = NewsClassifier(len(LABELS), str(tmp_path), LABELS, loading=Loading(layers=6)).blocks

    queries = [block.attention.self.query.weight for block in whole.blocks]
    places = [next(i for i, query in enumerate(queries) if query.equal(b.attention.self.query.weight)) for b in kept]
    assert places == [0, 2, 4, 7, 9, 11]


@pytest.mark.slow
def test_the_documented_command_leads_from_a_teacher_to_a_student_that_is_served(
    weather: Path,
    teacher: Path,
    train_here: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training").symlink_to(REPOSITORY / "training")
    shutil.copytree(teacher, tmp_path / "checkpoints" / "teacher")
    (tmp_path / "my_rows.csv").write_bytes((weather / "train.csv").read_bytes())
    words = shlex.split(documented("docs/methods.md", "distill"))
    flags = words[words.index("--config") :]

    # The flags of all these runs name a model, which wins over the file's.
    quick = ("--model", "checkpoints/teacher", "--epochs", 2, "--batch_size", 8, "--learning_rate", "1e-3")
    assert train_here(*flags, *quick) == 0

    out = capfd.readouterr().out
    assert "Next: MODEL_CHECKPOINT=checkpoints/student" in out
    assert "  Next " not in out.partition("--export: ")[0]
    student = tmp_path / "checkpoints" / "student"
    served = ModelLoader(student)
    assert served.info["precision"] == "int8"
    assert served.predict("a storm breaks")["label"] == "storm"
    assert read_saved_model(student).config["n_layers"] == 3
    metrics = json.loads((student / "metrics.json").read_text())
    assert (metrics["distilled_from"], metrics["unlabelled_rows"]) == ("./checkpoints/teacher", 0)
    assert "which learned from the answers of `teacher` to its rows" in (student / "README.md").read_text()


def test_a_refused_export_leaves_the_model_and_ends_with_its_reason(
    weather: Path, train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "renamed"
    folder.mkdir()
    for old, new in (("train", "train"), ("validation", "validation"), ("test", "held_out")):
        shutil.copy(weather / f"{old}.csv", folder / f"{new}.csv")
    flags = ("--dataset", folder, "--test_split", "held_out", *ALL_ROWS, "--epochs", 1, "--export")

    # Without a test.csv the export takes the sample news, whose labels this model does not have.
    assert train_here(*flags, "--output_dir", tmp_path / "model") == 2
    error = capfd.readouterr().err
    assert (
        f"error: --export: the model in {tmp_path / 'model'} is complete and is kept: python -m inference.export"
        in error
    )
    assert "[command-failed]" in error
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--distill", "nowhere"), "--distill nowhere: no such model"),
        (("--distill", "TEACHER"), "its labels are calm, storm, those of --dataset sample are World, Sports"),
        (
            ("--distill", "TEACHER", "--task", "multi_label"),
            "a single_label_classification model of single texts, which does not answer what --task multi_label asks",
        ),
        (("--distill", "TEACHER", "--task", "pair"), "does not answer what --task pair --pair_column text_pair asks"),
        (("--distill", "TEACHER", "--output_dir", "TEACHER"), "the student would replace its teacher"),
        (("--distill", "first,second", "--output_dir", "second"), "the student would replace its teacher"),
        (("--distill", "TEACHER", "--distill_share", "0"), "--distill_share 0: must be greater than 0"),
        (("--distill", "TEACHER", "--loss", "torch:mean"), "--loss and --distill"),
        (("--distill", "TEACHER", "--distill_texts", "none.txt", "--dataset", "WEATHER"), "none.txt: no such file"),
        (("--layers", "9", "--model", "TEACHER", "--dataset", "WEATHER"), "has 4 blocks; keep at most that many"),
        (("--layers", "2", "--model", "TEACHER", "--network", "torch:nn"), "--network and --layers 2"),
        (("--export", "--network", "torch:nn"), "--network and --export"),
    ],
)
def test_what_cannot_be_distilled_is_refused_in_one_line(
    flags: tuple[str, ...],
    message: str,
    weather: Path,
    teacher: Path,
    train_here: Train,
    capfd: pytest.CaptureFixture[str],
) -> None:
    known = {"TEACHER": str(teacher), "WEATHER": str(weather)}
    assert train_here(*(known.get(flag, flag) for flag in flags)) == 2

    assert message in capfd.readouterr().err
