from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from common.errors import UserError
from training.config import MOST_USED, TrainConfig, flag_of, on_resume, parse_config
from training.other_names import FORMER_FIELDS

GROUPS = [
    "task",
    "data",
    "model",
    "distillation",
    "imbalance",
    "optimization",
    "processes",
    "output",
    "fault tolerance",
    "monitoring",
]


def parse(*arguments: str, **environment: str) -> TrainConfig:
    return parse_config(arguments, environment)


def yaml_file(folder: Path, content: str) -> str:
    path = folder / "run.yaml"
    path.write_text(content)
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--batch_size", "8", "--max_length", "64"),
        ("--batch-size", "8", "--max-length", "64"),
        ("--batch-size=8", "--max_length=64"),
    ],
)
def test_flags_are_taken_with_underscore_or_dash(arguments: tuple[str, ...]) -> None:
    config = parse(*arguments)

    assert config == TrainConfig(batch_size=8, max_length=64)


def test_a_dash_in_a_value_stays() -> None:
    config = parse("--model", "acme/tiny-encoder", "--output-dir=my-models/a-b")

    assert config.model == "acme/tiny-encoder"
    assert config.output_dir == Path("my-models/a-b")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [(("--compile",), True), (("--compile", "true"), True), (("--compile=false",), False), ((), False)],
)
def test_switches_need_no_value(arguments: tuple[str, ...], value: bool) -> None:
    assert parse(*arguments).compile is value


def test_the_printed_configuration_fed_back_gives_an_equal_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--learning_rate", "2e-5", "--model", "tiny", "--dataset", "données", "--compile", "--seed", "7")

    text = printed(capsys, *flags, "--print_config")

    assert parse("--config", yaml_file(tmp_path, text)) == parse(*flags)
    assert re.findall(r"^(?:# )?(\w+):", text, re.M) == list(TrainConfig.model_fields)


def test_what_the_rows_decide_is_printed_but_not_given_by_the_printed_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = printed(capsys, "--epochs", "4", "--print_config")

    config = parse("--config", yaml_file(tmp_path, text))
    assert config.gives("epochs")
    assert not any(map(config.gives, ("learning_rate", "batch_size", "validation_fraction", "best_metric", "method")))
    assert "# batch_size: 32  # unset: chosen from the rows" in text


def test_a_learning_rate_without_a_dot_is_read_from_yaml(tmp_path: Path) -> None:
    assert parse("--config", yaml_file(tmp_path, "learning_rate: 2e-5\n")).learning_rate == 2e-5


def test_fields_of_earlier_versions_are_read_from_a_file_but_are_no_flags(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "epochs: 4\ndp: 2\nepsilon: 1.0e-08\nprofile_ranks: all\none_rank_rate: 0\n")

    assert parse("--config", file) == TrainConfig(epochs=4)
    with pytest.raises(UserError, match=r"run.yaml: no field 'epsilon'; AdamW's is always 1e-08, so leave it out$"):
        parse("--config", yaml_file(tmp_path, "epsilon: 1e-6\n"))
    for name, instead in FORMER_FIELDS.items():
        with pytest.raises(UserError, match=rf"^--{name}=2: no such flag; {re.escape(instead)}$"):
            parse(f"--{name}=2")


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert parse("--config", yaml_file(tmp_path, "# nothing set\n")) == TrainConfig()


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "epochs: 4\nbatch_size: 4\nseed: 4\n")
    environment = {"DISTRINEWS_EPOCHS": "5", "DISTRINEWS_BATCH_SIZE": "5", "PATH": "/bin", "EPOCHS": "9"}

    config = parse("--config", file, "--epochs", "6", **environment)

    assert (config.epochs, config.batch_size, config.seed) == (6, 5, 4)
    assert config.max_length == TrainConfig().max_length


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--batchsize", r"--batchsize: no such flag; did you mean --batch_size\?"),
        ("--lerning-rate", r"--lerning-rate: no such flag; did you mean --learning_rate\?"),
        ("--confg", r"--confg: no such flag; did you mean --config\?"),
        ("--lr", r"--lr: no such flag; did you mean --learning_rate\?"),
        ("--data", r"--data: no such flag; did you mean --dataset\?"),
        ("--zzzzzz", r"--zzzzzz: no such flag \(see --help\)"),
        ("--epoch", r"--epoch: no such flag; did you mean --epochs\?"),
        ("--keep_last_n", r"did you mean --keep_last\?"),
        ("--save", r"did you mean --save_every or --save_minutes\?"),
        ("--checkpoint_interval_minutes", r"did you mean --save_minutes\?"),
        ("--checkpoint-interval-minutes=5", r"did you mean --save_minutes\?"),
        ("--gradient_clip_val", r"did you mean --clip_norm\?"),
        ("--resume_from_checkpoint", r"did you mean --resume\?"),
        ("--fsdp", r"^--fsdp: no such flag; use --strategy zero3, or zero2"),
        ("--lr_decay=0.9", r"did you mean --schedule\?"),
        ("--ddp_backend", r"^--ddp_backend: no such flag; it follows from --device .*$"),
        ("--backend", r"^--backend: no such flag; .*--device .* NCCL on GPUs, gloo on CPUs$"),
        ("--num_workers=4", r"^--num_workers=4: no such flag; .* tokenized once .* no workers$"),
        ("--nproc_per_node=2", r"^--nproc_per_node=2: no such flag; it is torchrun's: .* before the script$"),
        ("stray", r"unrecognized arguments: stray"),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest_one(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(argument)


# Each is nearest in letters to a flag that is about something else.
@pytest.mark.parametrize(
    "name", ["momentum", "port", "workers", "amp_level", "max_steps", "broadcast_buffers", "local_size", "prefetch"]
)
def test_a_flag_with_another_meaning_is_not_suggested(name: str) -> None:
    with pytest.raises(UserError, match=rf"^--{name}: no such flag \(see --help\)$"):
        parse(f"--{name}")


@pytest.mark.parametrize(
    ("flag", "value", "suggested"),
    [
        ("strategy", "fsdp", "zero3"),
        ("strategy", "FSDP2", "zero3"),
        ("strategy", "full-shard", "zero3"),
        ("strategy", "shard_grad_op", "zero2"),
        ("strategy", "zero", "zero3"),
        ("strategy", "pipeline", "pp"),
        ("strategy", "tensor_parallel", "tp"),
        ("strategy", "DDP", "ddp"),
        ("precision", "float16", "fp16"),
        ("precision", "bfloat16", "bf16"),
        ("device", "gpu", "cuda"),
        ("schedule", "cosin", "cosine"),
        ("duplicates", "remove", None),
        ("strategy", "horovod", None),
    ],
)
def test_a_value_that_others_call_by_another_name_is_suggested(flag: str, value: str, suggested: str | None) -> None:
    hint = rf"; did you mean {suggested}\?" if suggested else ""
    with pytest.raises(UserError, match=rf"^--{flag} {value}: must be '.*'{hint}$"):
        parse(f"--{flag}", value)


def test_an_unknown_key_and_variable_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run.yaml: no field 'batchsize'; did you mean 'batch_size'\?"):
        parse("--config", yaml_file(tmp_path, "batchsize: 4\n"))
    with pytest.raises(UserError, match=r"variable DISTRINEWS_BATCHSIZE: no such field; did you mean 'batch_size'"):
        parse(DISTRINEWS_BATCHSIZE="4")
    with pytest.raises(UserError, match=r"run.yaml: no field 'num_workers'; .* no workers$"):
        parse("--config", yaml_file(tmp_path, "num_workers: 4\n"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch_size", "0"), r"^--batch_size 0: must be at least 1$"),
        (("--batch_size", "most"), r"^--batch_size most: must be a whole number"),
        (("--max_length", "7"), r"^--max_length 7: must be at least 8$"),
        (("--max_length", "9000"), r"^--max_length 9000: must be at most 8192$"),
        (("--validation_fraction", "-0.1"), r"^--validation_fraction -0.1: must be at least 0$"),
        (("--warmup", "1.5"), r"^--warmup 1.5: must be a share below 1, or a whole number of steps$"),
        (("--warmup", "inf"), r"^--warmup inf: must be a share below 1, or a whole number of steps$"),
        (("--epochs", "many"), r"^--epochs many: must be a whole number$"),
        (("--epochs", "1.5"), r"^--epochs 1.5: must be a whole number$"),
        (("--learning_rate", "fast"), r"^--learning_rate fast: must be a number$"),
        (("--learning_rate", "nan"), r"^--learning_rate nan: must be"),
        (("--betas", "0.9"), r"^--betas 0.9: must be two numbers, such as 0.9,0.999$"),
        (("--betas", "0.9,fast"), r"^--betas fast: must be a number$"),
        (("--betas", "0.9,1"), r"^--betas 0.9,1: both must be at least 0 and below 1$"),
        (("--freeze", "all"), r"^--freeze all: must be none, embeddings or a number of blocks, such as 3$"),
        (("--strategy", "pipes"), r"^--strategy pipes: must be 'ddp', 'zero1', .* or '3d'$"),
        (("--precision", "fp8"), r"^--precision fp8: must be 'auto', 'fp32', 'bf16' or 'fp16'$"),
        (("--compile", "perhaps"), r"^--compile perhaps: must be true or false$"),
        (("--epochs",), r"--epochs: expected one argument"),
        *(
            (("--output_dir", "out/model", "--checkpoint_dir", place), "is in --output_dir out/model")
            for place in ("out/model/ckpt", "out/x/../model/ckpt", f"file://{Path.cwd()}/out/model/ckpt")
        ),
        (("--output_dir", "/"), r"^--output_dir /: must name a folder$"),
        (("--text_column", ""), r"^--text_column : must not be empty$"),
        (("--compress", "zip"), r"^--compress zip: must be none, fp16, bf16 or powersgd"),
        (("--batch_size", "0", "--epochs", "0"), r"--epochs 0: .*; --batch_size 0: |--batch_size 0: .*; --epochs 0: "),
    ],
)
def test_a_value_out_of_its_limits_is_named_with_the_limit(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(*arguments)


def test_the_origin_of_a_bad_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^DISTRINEWS_EPOCHS 0: must be at least 1$"):
        parse(DISTRINEWS_EPOCHS="0")
    with pytest.raises(UserError, match=r"run.yaml: epochs 0: must be at least 1$"):
        parse("--config", yaml_file(tmp_path, "epochs: 0\n"))


@pytest.mark.parametrize(
    ("content", "message"),
    [("- 1\n- 2\n", "must hold fields with values"), ("epochs: [1\n", "not valid YAML"), ("12\n", "must hold fields")],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"--config .*run.yaml: {message}"):
        parse("--config", yaml_file(tmp_path, content))


def test_a_list_where_a_name_belongs_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task.*: must be 'classification', "):
        parse("--config", yaml_file(tmp_path, "task: [classification]\n"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.yaml: No such file or directory"):
        parse("--config", str(tmp_path / "gone.yaml"))


def test_help_lists_every_flag_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help", "all")

    assert re.findall(r"^([a-z][a-z ]*):$", text, re.MULTILINE) == ["options", *GROUPS]
    for name in TrainConfig.model_fields:
        assert re.search(rf"^  {flag_of(name)}\b", text, re.MULTILINE), name
        assert TrainConfig.model_fields[name].description, name


def test_help_without_all_lists_the_flags_that_most_need_and_how_to_see_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "--help")

    assert set(re.findall(r"^  --(\w+)", text, re.M)) == {"config", "print_config", "from", *MOST_USED} - {"from_model"}
    assert len(MOST_USED) <= 16
    more = len(TrainConfig.model_fields) - len(MOST_USED)
    assert text.endswith(f"\n\n--help all shows {more} more flags.\n")
    assert printed(capsys, "-h", "--epochs", "3") == text
    with pytest.raises(UserError, match=r"^--help most: must be all, or nothing$"):
        parse("--help", "most")


def test_help_shows_defaults_choices_and_off_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(capsys, "--help=all").split())

    for words in (
        "0 = all (default: 0)",
        "1 = off (default: 1)",
        "0 = no clipping (default: 1.0)",
        "0 = only those (default: 500)",
        "auto|fp32|bf16|fp16",
        "true|false",
        "unset = by the width and depth of the encoder",
        "(default: ag_news)",
    ):
        assert words in text


@pytest.mark.parametrize("name", ["max_train_rows", "warmup", "weight_decay", "clip_norm", "label_smoothing", "ema"])
def test_the_off_value_that_help_names_is_accepted(name: str) -> None:
    assert "0 = " in " ".join(TrainConfig.model_fields[name].description.split())
    assert getattr(parse(f"--{name}", "0"), name) == 0


@pytest.mark.parametrize("content", ["betas: [0.8, 0.98]\nfreeze: 3\n", "betas: 0.8,0.98\nfreeze: '3'\n"])
def test_two_numbers_and_a_number_of_blocks_are_read_alike_from_a_flag_and_a_file(content: str, tmp_path: Path) -> None:
    config = parse("--config", yaml_file(tmp_path, content))

    assert config == parse("--betas", "0.8,0.98", "--freeze", "3")
    assert (config.betas, config.freeze) == ((0.8, 0.98), "3")


def test_run_folder_and_one_file_model_are_next_to_the_model_folder() -> None:
    config = parse("--output_dir", "models/news.v2")

    assert config.run_dir == Path("models/news.v2.run")
    assert config.checkpoint_file == Path("models/news.v2.pt")


def test_fields_that_decide_rows_or_updates_must_not_change_on_resume() -> None:
    decisive = {
        *("dataset", "dataset_config", "dataset_revision", "train_split", "validation_split", "test_split"),
        *("max_length", "long", "clean", "validation_fraction", "max_train_rows", "duplicates", "suspects"),
        *("model", "from_model", "model_revision", "method", "learning_rate"),
        *("labels", "unlabelled", "rough_share"),
        *("task", "loss", "metric", "network", "class_weights", "sampling", "best_metric", "evaluate_every"),
        *("lora", "lora_alpha", "layers", "distill_share"),
        *("scale_lr", "schedule", "warmup", "weight_decay", "clip_norm", "label_smoothing", "precision", "seed"),
        *("betas", "layer_decay", "freeze", "ema", "dropout"),
        *("deterministic", "device"),
    }

    assert {name for name in TrainConfig.model_fields if on_resume(name) == "same"} == decisive


def test_a_path_may_be_given_from_python_wherever_a_flag_names_one() -> None:
    given = {
        "dataset": Path("rows.csv"),
        "model": Path("a/model"),
        "output_dir": Path("out"),
        "distill": Path("teacher"),
    }

    config = TrainConfig(**given, checkpoint_dir=Path("kept"))  # type: ignore[arg-type]

    assert (config.dataset, config.model, config.distill) == ("rows.csv", "a/model", "teacher")
    assert config == TrainConfig(**{name: str(path) for name, path in given.items()}, checkpoint_dir="kept")
    assert yaml.safe_load(config.to_yaml())["model"] == "a/model"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": 0}, "TrainConfig: learning_rate 0: must be greater than 0"),
        ({"output_dir": "."}, "TrainConfig: output_dir .: must name a folder"),
        ({"epochs": "many"}, "TrainConfig: epochs many: must be a whole number"),
        ({"lr": 1e-3}, "TrainConfig: no field 'lr'; did you mean 'learning_rate'?"),
        ({"distill_share": 0.5}, "--distill_share 0.5: does nothing without --distill"),
    ],
)
def test_a_wrong_value_from_python_is_one_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        TrainConfig(**fields)  # type: ignore[arg-type]

    assert str(refusal.value) == message
    assert refusal.value.code
