"""Make a starter: a small encoder to fine-tune, from a large one and your own texts.

    python -m training.starter --dataset data/ag_news --teacher checkpoints/minilm

Three steps, each of which you could start by hand: shrink the teacher, pretrain the result on the
texts (--task masked_lm), then let it learn the vectors that the teacher gives them, whole and as
people may type them (--task embedding). No label is read. Start the same command again if it was
stopped: the runs resume, and what is done is not repeated. With --start, only the last step is
trained, from an earlier starter, for example on your own texts.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from common.encoders import FAMILIES, EncoderFamily
from common.errors import OneLineParser, TrainingFailure, UserError, positive, run_command
from common.escaping import code_span, printable
from common.files import sha256_of, write_json, write_whole, writing_folder
from common.model_folder import WEIGHTS_FILE
from common.rows import Columns
from common.text import cleaner
from training.data.dataset import LoadOptions, TextData, default_cleaning, load_data
from training.data.stored_texts import in_chunks
from training.data.tokenized import check_vocabulary, load_from
from training.model.layers import keep_blocks
from training.model.shrink import choose_ids, count_ids, shrink, smaller_tokenizer
from training.model.weights import read_network
from training.quiet import quiet_libraries
from training.tasks import Embedding, MaskedLanguageModel

ROOT = Path(__file__).resolve().parents[1]
SEED = 42
ABOUT = "about.json"
FILES = ("config.json", WEIGHTS_FILE, "tokenizer.json")  # without which no encoder can be read
# The flags that decide what shrinking gives.
SHRINKING = ("dataset", "text_column", "teacher", "vocabulary", "width", "layers", "start")
COMMON = ("--batch_size", "64", "--max_length", "64", "--validation_fraction", "0.02")
# Too small to overfit in a few epochs. Without dropout it comes much closer to the teacher, in two
# thirds of the time; fine-tuning on few rows is another matter, so the folder that is written says
# nothing of it.
COMMON += ("--dropout", "0")
RATE_TO_GO_ON = "6e-4"  # with --start; of two flags the last one counts
TERMS = {"ag_news": "AG News is offered for research and other non-commercial use."}
STEPS = {
    MaskedLanguageModel.name: ("--learning_rate", "5e-4"),
    Embedding.name: ("--learning_rate", "1e-3", "--rough_share", "1"),
}


def main() -> None:
    options = _parser().parse_args()
    quiet_libraries()
    began = time.monotonic()
    parts = options.output_dir.with_name(f"{options.output_dir.name}.parts")
    small = parts / "shrunk"
    # The folder appears as a whole, with this file in it. So if it is there, shrinking is done, and
    # the file says with which flags.
    if (small / ABOUT).exists():
        _check_same(options, small)
    elif options.start:
        _go_on(options, small)
    else:
        _shrink(options, small)
    model = small
    for task, flags in STEPS.items():
        if options.start and task != Embedding.name:
            continue
        epochs = getattr(options, f"{task}_epochs")
        if epochs:
            _train(options, task, model, parts / task, epochs, flags)
            model = parts / task
    _write(options, small, model, time.monotonic() - began)


def _check_same(options: Namespace, small: Path) -> None:
    """Refuse to continue what was begun with other flags."""
    for name, value in json.loads((small / ABOUT).read_text(encoding="utf-8"))["flags"].items():
        if (now := getattr(options, name)) != value:
            raise UserError(
                f"--{name} {now}: {small.parent} was begun with --{name} {value}; give the same "
                "flag, or remove that "
                "folder to start from scratch",
                code="flags-conflict",
            )


def _shrink(options: Namespace, folder: Path) -> None:
    """Write the small encoder that training begins with."""
    teacher = _folder(options.teacher, "--teacher", "the folder of an encoder")
    data = _texts(options)
    texts, cleaning = data.train.texts, default_cleaning(options.dataset, data.label_names)
    asked = f"--teacher {options.teacher}"
    read = partial(read_network, AutoModelForSequenceClassification, str(teacher), asked)
    reading, notes = load_from(options.teacher, read, print, "--teacher")
    print(*notes, sep="\n", end="\n" * bool(notes))
    network = reading.network
    family = _family_to_shrink(options, network)
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    highest = max(tokenizer.get_vocab().values())
    check_vocabulary(asked, highest, network.get_input_embeddings().num_embeddings)
    # Every word piece of a text is to be counted, and nothing else.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # The texts themselves choose the vocabulary: the table of word pieces is a large part of a
    # small encoder's weights, and texts of one subject use few of a large encoder's.
    counts = count_ids(tokenizer, in_chunks(map(cleaner(cleaning), texts)))
    ids = choose_ids(tokenizer, counts, options.vocabulary)
    # For the new head, whose weights are drawn, so that the same flags make the same starter.
    torch.manual_seed(SEED)
    keep_blocks(network, options.layers, options.teacher)
    small = shrink(network, family, ids, counts, options.width)
    about = _about(options, len(texts), small.distilbert.num_parameters())
    known = sum(counts[id_] for id_ in ids) / counts.total()
    print(
        f"Shrunk: {about['parameters']:,} parameters; {len(ids):,} word pieces cover {known:.1%} "
        "of those in the texts"
    )
    with writing_folder(folder) as aside:
        small.save_pretrained(aside)
        write_whole(aside / "tokenizer.json", smaller_tokenizer(tokenizer, ids).encode())
        write_json(aside / "tokenizer_config.json", _tokenizer_config(teacher))
        write_json(aside / ABOUT, about)


def _go_on(options: Namespace, folder: Path) -> None:
    """Let training begin with an earlier starter."""
    start = _folder(options.start, "--start", "a starter's folder")
    data, weights = _texts(options), load_file(start / WEIGHTS_FILE)
    encoder = (one for name, one in weights.items() if name.startswith("distilbert."))
    about = _about(options, len(data.train.texts), sum(tensor.numel() for tensor in encoder))
    with writing_folder(folder) as aside:
        for name in (*FILES, "tokenizer_config.json"):
            shutil.copy(start / name, aside / name)
        write_json(aside / ABOUT, about)


def _folder(given: str, flag: str, wanted: str) -> Path:
    folder = Path(given).expanduser()
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{flag} {given}: has no {name}; give {wanted}", code="model-not-found")
    return folder


def _texts(options: Namespace) -> TextData:
    columns = Columns(options.text_column, "")
    return load_data(options.dataset, LoadOptions(seed=SEED, columns=columns, task=Embedding))


def _about(options: Namespace, num_texts: int, num_parameters: int) -> dict[str, Any]:
    flags = {name: getattr(options, name) for name in SHRINKING}
    return {"texts": num_texts, "parameters": num_parameters, "flags": flags}


def _family_to_shrink(options: Namespace, network: PreTrainedModel) -> EncoderFamily:
    family = next((one for one in FAMILIES if one.network_class == type(network).__name__), None)
    # What is left becomes a DistilBERT, which has no gate, no last norm, and a table of positions.
    if family is None or family.gate or family.final_norm or not family.position_embeddings:
        raise UserError(
            f"--teacher {options.teacher}: {type(network).__name__} cannot be shrunk; give BERT or "
            "a close relative of it",
            code="model-layers-unknown",
        )
    hidden, heads = (
        getattr(network.config, key) for key in (family.hidden_size_key, family.num_heads_key)
    )
    if options.width % (hidden // heads):
        raise UserError(
            f"--width {options.width}: must be a multiple of {hidden // heads}, the width of the "
            "teacher's heads",
            code="flag-value",
        )
    return family


def _tokenizer_config(teacher: Path) -> dict[str, Any]:
    file = teacher / "tokenizer_config.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    names = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "do_lower_case")
    kept = {name: kept[name] for name in names if name in kept}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | kept


def _train(
    options: Namespace, task: str, model: Path, output: Path, epochs: int, more: tuple[str, ...]
) -> None:
    flags = [*("--task", task, "--dataset", options.dataset, "--text_column", options.text_column)]
    flags += ["--model", str(model), "--epochs", str(epochs), "--output_dir", str(output)]
    flags += [*COMMON, *more]
    flags += ["--distill", options.teacher] if task == Embedding.name else []
    flags += ["--learning_rate", RATE_TO_GO_ON] if options.start else []
    print(f"\ntraining/run_ddp.sh {options.processes} {' '.join(flags)}", flush=True)
    # An ordinary run, started as a user would: its ranks need a launcher, and resuming, checkpoints
    # and reports come with it.
    code = subprocess.run(
        [ROOT / "training" / "run_ddp.sh", str(options.processes), *flags], check=False
    ).returncode
    if code:
        raise TrainingFailure(
            f"--task {task} ended with code {code}; rerun the same command to resume",
            code="starter-failed",
        )
    if not (output / WEIGHTS_FILE).is_file():
        # It was asked to stop, and has saved: the same command goes on from there.
        raise SystemExit(0)


def _write(options: Namespace, small: Path, model: Path, seconds: float) -> None:
    """Write the starter, its weights in half precision, and its card."""
    # Without the last layer, which answers with the teacher's vectors: a user's labels get one of
    # their own. Half precision halves the file.
    weights = {
        name: tensor.half().contiguous()
        for name, tensor in load_file(model / WEIGHTS_FILE).items()
        if name.startswith(("distilbert.", "pre_classifier."))
    }
    with writing_folder(options.output_dir) as aside:
        save_file(weights, aside / WEIGHTS_FILE, {"format": "pt"})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / name, aside / name)
        # One that began with stored halves says that it is to be loaded as such, and CPUs compute
        # them slowly.
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        write_json(aside / "config.json", config | {"dtype": "float32"})
        (aside / "README.md").write_text(_card(options, small, model), encoding="utf-8")
    size = sum(file.stat().st_size for file in options.output_dir.iterdir())
    print(f"\nWritten: {options.output_dir}, {size / 1e6:.1f} MB, after {seconds / 60:.0f} minutes")
    print(f"Next: training/run_ddp.sh --model {options.output_dir} --dataset YOUR_ROWS.csv")


def _card(options: Namespace, small: Path, model: Path) -> str:
    about = json.loads((small / ABOUT).read_text(encoding="utf-8"))
    teacher, data = Path(options.teacher), Path(options.dataset)
    terms = TERMS.get(data.name, "The terms of those texts apply to what was learned from them.")
    files = [data] if data.is_file() else sorted(data.glob("train.*"))
    # Names of files can be given to anything. The digests say what exactly the starter was made
    # from.
    read = {f"{data.name}/{file.name}": sha256_of(file) for file in files}
    read[f"{teacher.name}/{WEIGHTS_FILE}"] = sha256_of(teacher / WEIGHTS_FILE)
    shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
    began = (
        f"It began as a part of {code_span(teacher.name)}, learned to fill in hidden words in "
        "those texts, and then"
    )
    if options.start:
        began = f"It began as the starter {code_span(options.start)}, and"
        read[f"{Path(options.start).name}/{WEIGHTS_FILE}, before"] = sha256_of(small / WEIGHTS_FILE)
    # In a table a bar ends the cell even within code, unless it is escaped.
    cells = [(code_span(name).replace("|", r"\|"), sha) for name, sha in read.items()]
    hashes = "\n".join(f"| {name} | `{sha}` |" for name, sha in cells)
    metrics = model / "metrics.json"
    learned = ""
    if metrics.is_file() and "cosine" in (
        test := json.loads(metrics.read_text(encoding="utf-8"))["test"]
    ):
        learned = (
            f" On {test['rows']:,} texts that it was not trained on, the cosine similarity is "
            f"{test['cosine']:.3f}."
        )
    return f"""---
library_name: transformers
tags: [distrinews, text-classification]
---

# A starter encoder

A small DistilBERT to fine-tune: {shape["n_layers"]} blocks of width {shape["dim"]}, {shape["vocab_size"]:,} word
pieces, {about["parameters"]:,} parameters, stored in float16. It is not a classifier yet;
{code_span(f"--model {options.output_dir}")} trains a head on your rows.

## How it was made

{began} learned the vectors that {code_span(teacher.name)} gives {about["texts"]:,} texts, whole and as people may type
them: only the title or the first clause, the first ten words, without punctuation, in upper case, with typing
errors.{learned} No label was read.

```bash
{_command(options)}
```

| file | SHA-256 |
| --- | --- |
{hashes}

## Terms

The texts are those of {code_span(data.name)}. {terms}
"""


def _command(options: Namespace) -> str:
    defaults = vars(_parser().parse_args(["--dataset", "-", "--teacher", "-"]))
    given = {name: value for name, value in vars(options).items() if value != defaults[name]}
    return printable(
        "python -m training.starter "
        + " ".join(f"--{name} {value}" for name, value in given.items())
    )


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m training.starter", description=__doc__)
    parser.add_argument(
        "--dataset",
        required=True,
        help="texts: a file or folder, as for training; labels are not read",
    )
    parser.add_argument(
        "--text_column", default="text", help="column with the text, if the columns have names"
    )
    parser.add_argument("--teacher", required=True, help="folder of BERT or a close relative of it")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("checkpoints/starter"), help="default: %(default)s"
    )
    parser.add_argument(
        "--vocabulary",
        type=positive,
        default=8_800,
        help="word pieces to keep (default: %(default)s)",
    )
    parser.add_argument(
        "--width", type=positive, default=256, help="of the hidden states (default: %(default)s)"
    )
    parser.add_argument("--layers", type=positive, default=3, help="blocks (default: %(default)s)")
    for task, epochs in zip(STEPS, (1, 12), strict=True):
        text = f"epochs of --task {task} (default: %(default)s)"
        parser.add_argument(f"--{task}_epochs", type=int, default=epochs, help=text)
    parser.add_argument(
        "--start",
        default="",
        help="folder of a starter to train further, instead of making a new one",
    )
    parser.add_argument(
        "--processes", type=positive, default=2, help="ranks of each run (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    run_command(main)
