"""The file systems that fsspec opens by address, such as a bucket."""

from __future__ import annotations

from typing import Any

from common.errors import UserError, first_line


def open_remote_files(address: str, flag: str = "") -> Any:
    """The fsspec file system of an address; ``flag``: of training, if one gave it.

    Raises:
        UserError: fsspec or the driver is not installed, or there is no such protocol.
    """
    given = f"{flag} {address}".lstrip()
    try:
        import fsspec  # optional: torch brings it along, the images that serve have none
    except ImportError:
        what = "addresses need fsspec: pip install fsspec, and the driver for this one"
        raise UserError(f"{given}: {what}", code="score-address") from None
    try:
        # Other processes write there too, so a cached listing would be wrong.
        return fsspec.url_to_fs(address, use_listings_cache=False)[0]
    except ImportError as error:
        extra = '; pip install "distrinews[s3]"' if address.startswith("s3") else ""
        what = f"its driver is not installed ({first_line(error)}){extra}"
        raise UserError(f"{given}: {what}", code="package-missing") from error
    except ValueError as error:
        raise UserError(
            f"{given}: {first_line(error)}", code="storage-address" if flag else "score-address"
        ) from error
