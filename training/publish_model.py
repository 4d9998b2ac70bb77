"""Publish a model folder or a cascade on the Hugging Face hub: python -m training.publish_model
MODEL --name ACCOUNT/NAME.

Weights, tokenizer, metrics, exported artefacts and model card go up in one commit and are read
back, of a cascade the artefacts of both models. Models are free to publish. The token comes from
HF_TOKEN or the hub's login (hf auth login).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by path: the imports below need the folder above this one
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from huggingface_hub import ModelCard

from common.errors import run_command
from common.model_folder import is_artefact
from training.publishing.hub_upload import (
    Target,
    full_name,
    publishing_parser,
    show,
    sign_in,
    upload,
    write_files,
)
from training.publishing.published_files import OWNED, model_files, named

DRY_RUN_FOLDER = Path("build/model")


def main() -> None:
    parser = publishing_parser("python -m training.publish_model", str(__doc__), DRY_RUN_FOLDER)
    parser.add_argument("model", metavar="MODEL", type=Path, help="a model folder, or a cascade")
    parser.add_argument(
        "--name", required=True, help="the repository: ACCOUNT/NAME, or NAME in your own account"
    )
    options = parser.parse_args()
    # What is wrong with the folder shows before anyone needs a token.
    files = model_files(options.model)
    if options.dry_run:
        files = named(files, options.model, options.name)
        show(files)
        write_files(files, options.dry_run, replaces=options.dry_run == DRY_RUN_FOLDER)
        print(f"Written to {options.dry_run}; nothing was sent.")
        return
    api, account = sign_in()
    target = Target(full_name(options.name, account), "model", options.private)
    files = named(files, options.model, target.name)
    show(files)
    commit = upload(api, target, files, OWNED)
    print(f"Published {api.endpoint}/{target.name} at {commit[:12]}; every file was read back.")
    if is_artefact(options.model):
        print(f"python -m inference.fetch hf://{target.name} FOLDER fetches it for a server.")
    else:
        print(f'transformers.pipeline("text-classification", model="{target.name}") loads it.')
    if not ModelCard(bytes(files["README.md"]).decode(), ignore_metadata_errors=True).data.get(
        "license"
    ):
        print("The card names no licence: add `license:` to the front matter of its README.md.")


if __name__ == "__main__":
    run_command(main)
