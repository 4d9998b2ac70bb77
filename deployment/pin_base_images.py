"""Pin the base images to what their tags name now: each NAME:TAG@sha256:... in the files below gets
its newest digest.

python deployment/pin_base_images.py [--registry https://mirror] [FILE ...]: all files below if none
is named.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode

# A script finds only its own folder by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.errors import ForeseenError, OneLineParser, run_command
from common.files import write_whole
from deployment.client import fetch, fetch_json
from deployment.image_context import DOCKERFILE, ROOT, TORCH_DOCKERFILE

FILES = (DOCKERFILE, TORCH_DOCKERFILE, ROOT / "deployment" / "compose.yaml")
PINNED = re.compile(
    r"(?P<name>[a-z0-9][\w./-]*(?::\d+/[\w./-]+)?):(?P<tag>[\w.-]+)@(?P<digest>sha256:[0-9a-f]{64})"
)
# A list of one image per platform; a single image would leave ARM out.
_LISTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_PLATFORMS = {"amd64", "arm64"}


class BaseUnknown(ForeseenError):
    code = "base-unknown"


def main() -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        default=FILES,
        help="default: the Dockerfiles and compose.yaml",
    )
    parser.add_argument(
        "--registry", help="ask this address (https://...) instead of each image's own registry"
    )
    options = parser.parse_args()
    texts = {path: path.read_text() for path in options.files}
    # By the whole pinned name: an image that several files use is asked for once, and they get the
    # same digest even if its tag moves meanwhile.
    found = {match[0]: match for text in texts.values() for match in PINNED.finditer(text)}
    # All are known before one file changes.
    newest = {
        old: newest_digest(match["name"], match["tag"], options.registry)
        for old, match in found.items()
    }
    for old, match in found.items():
        state = "is the newest" if newest[old] == match["digest"] else f"was {match['digest']}"
        print(f"{match['name']}:{match['tag']}@{newest[old]} ({state})")
    for path, text in texts.items():
        renewed = PINNED.sub(
            lambda match: f"{match['name']}:{match['tag']}@{newest[match[0]]}", text
        )
        if renewed != text:
            write_whole(path, renewed.encode())


def newest_digest(name: str, tag: str, registry: str | None = None) -> str:
    """Ask a registry for the digest that a tag names now; checked against the bytes that it belongs
    to.

    Raises:
        BaseUnknown: it does not answer, refuses, or has no list with x86-64 and ARM.
    """
    host, repository = _place(name)
    address = f"{registry or f'https://{host}'}/v2/{repository}/manifests/{tag}"
    headers = {"Accept": ", ".join(_LISTS)}
    try:
        try:
            # Asked without a token first: only the refusal says where one is to be had.
            content = fetch(address, headers=headers)
        except HTTPError as error:
            if error.code != 401:
                raise
            headers["Authorization"] = f"Bearer {_token(error.headers.get('WWW-Authenticate', ''))}"
            content = fetch(address, headers=headers)
    except (OSError, ValueError) as error:  # HTTPError is an OSError
        raise BaseUnknown(
            f"{name}:{tag}: {address} does not report its digest ({error}); the files are unchanged"
        ) from error
    listed = {
        entry.get("platform", {}).get("architecture")
        for entry in json.loads(content).get("manifests", [])
    }
    if missing := _PLATFORMS - listed:
        raise BaseUnknown(
            f"{name}:{tag}: has no image for {', '.join(sorted(missing))}; the files are unchanged"
        )
    # A digest is the hash of the list's bytes. Computed and not read from a header, so that what
    # is pinned is what was seen.
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _place(name: str) -> tuple[str, str]:
    """The registry's host and the repository of an image's name, as Docker reads it."""
    first, _, rest = name.partition("/")
    if not rest or not ("." in first or ":" in first or first == "localhost"):
        first, rest = "docker.io", name
    if first != "docker.io":
        return first, rest
    return "registry-1.docker.io", rest if "/" in rest else f"library/{rest}"


def _token(challenge: str) -> str:
    # A public repository gives a token for reading to everyone who asks where the challenge says.
    terms = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = terms.pop("realm", "")
    if not challenge.startswith("Bearer ") or not realm:
        raise ValueError("it needs a login")
    return fetch_json(f"{realm}?{urlencode(terms)}")["token"]


if __name__ == "__main__":
    run_command(main)
