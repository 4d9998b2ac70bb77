"""Publish a model as a Hugging Face Space: python deployment/publish_space.py NAME --model FOLDER.

The image's build context and the exported model go up in one commit; the hub builds them. Creating
a Docker Space needs a paid plan of the hub: PRO for an account, Team or Enterprise for an
organization. With --static the Space is a page that runs the model in the visitor's browser, which
costs nothing. The token comes from HF_TOKEN or the hub's login (hf auth login).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# A script finds only its own folder by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from huggingface_hub import HfApi, SpaceInfo

from common.errors import run_command
from common.model_folder import read_saved_model
from deployment.image_context import build_arguments, exported_artefacts
from deployment.running_space import Expected, ask, wait_until_running, wait_until_shown
from deployment.space_files import linked, published_model, space_files, static_files
from training.publishing.hub_upload import (
    Target,
    full_name,
    hub_errors,
    publishing_parser,
    show,
    sign_in,
    upload,
    write_files,
)

DRY_RUN_FOLDER, STATIC_DRY_RUN_FOLDER = Path("build/space"), Path("build/page")
PLAN = (
    "a Docker Space needs a paid plan: PRO for an account, Team or Enterprise for an organization"
)
PRICES = "https://huggingface.co/pricing"


def main() -> None:
    options = _parse()
    if options.static:
        _publish_page(options)
        return
    files = space_files(options.model)
    if options.dry_run:
        show(files)
        write_files(files, options.dry_run, replaces=options.dry_run == DRY_RUN_FOLDER)
        build = f"docker build {options.dry_run}"
        print(f"Written to {options.dry_run}: {build} builds it. Nothing was sent.")
        print(f"On the hub {PLAN} ({PRICES}).")
        return
    digest, model = build_arguments(options.model)["MODEL_SHA256"], read_saved_model(options.model)
    api, account = sign_in()
    target = Target(full_name(options.name, account), "space", options.private)
    manifests = exported_artefacts(options.model).values()
    weights = dict.fromkeys(one.source["weights_sha256"] for one in manifests)
    found = (published_model(api, target, one) for one in weights)
    if published := list(filter(None, found)):
        files = linked(files, published)
    show(files)
    # What these folders hold besides is of an earlier version, and the commit deletes it; files of
    # the owner elsewhere in the Space stay.
    folders = {name.partition("/")[0] for name in files if "/" in name}
    reasons = {402: f"{PLAN}, see {PRICES}; --dry-run writes the same files into a folder"}
    commit = upload(api, target, files, folders, reasons)
    print(f"Sent as {commit[:12]}; the hub builds it:")
    wait_until_running(api, target.name, commit)
    _ask(api, target, Expected(model.labels, digest[:12], model.problem_type, model.reads_pairs))


def _publish_page(options: argparse.Namespace) -> None:
    files = static_files(options.model)
    if folder := options.dry_run:
        show(files)
        write_files(files, folder, replaces=folder == STATIC_DRY_RUN_FOLDER)
        print(f"Written to {folder}: python -m http.server -d {folder} shows it. Nothing was sent.")
        return
    api, account = sign_in()
    target = Target(full_name(options.name, account), "space", options.private, "static")
    show(files)
    commit = upload(api, target, files, {"demo", "model"})
    print(f"Sent as {commit[:12]}")
    with hub_errors(str(target)):
        space = api.space_info(target.name)
    address = space.host or f"https://{space.subdomain}.static.hf.space"
    # This file names the weights by their hash: once it is the new one, visitors get the new model.
    wait_until_shown(
        address, api.token if space.private else None, "model/model.json", files["model/model.json"]
    )
    print(f"The Space: {api.endpoint}/spaces/{target.name}\nIts page: {address}")


def _parse() -> argparse.Namespace:
    static = "--static" in sys.argv[1:]
    folder = STATIC_DRY_RUN_FOLDER if static else DRY_RUN_FOLDER
    parser = publishing_parser("deployment/publish_space.py", str(__doc__), folder)
    parser.add_argument(
        "--static", action="store_true", help="a page that runs the model in the visitor's browser"
    )
    parser.add_argument(
        "name", metavar="NAME", help="the Space: ACCOUNT/NAME, or NAME in your own account"
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        type=Path,
        required=True,
        help="an exported model folder, or, without --static, a cascade",
    )
    return parser.parse_args()


def _ask(api: HfApi, target: Target, expected: Expected) -> None:
    with hub_errors(str(target)):
        space = api.space_info(target.name)
    address = _address(space)
    print(ask(address, api.token if space.private else None, expected))
    print(f"The Space: {api.endpoint}/spaces/{target.name}\nIts server: {address}")


def _address(space: SpaceInfo) -> str:
    return space.host or f"https://{space.subdomain}.hf.space"


if __name__ == "__main__":
    run_command(main)
