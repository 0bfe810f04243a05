"""Data sets of the Hugging Face hub in the local cache: nothing is fetched.

Layout: HUB/datasets--ORG--NAME/refs/REVISION holds a commit, HUB/datasets--ORG--NAME/snapshots/COMMIT the files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trimtab.address import Address
from trimtab.errors import SampleError

_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w.-]+))?(/(?P<inner>.+))?$")
_SCHEME = "hf://datasets/"


def cached_place(place: Path) -> Path | None:
    """File or folder of ORG/NAME[@REVISION][/INNER], or of that behind hf://datasets/, in the cache.

    None: the place is another, or an address that is not in the cache and may be read over the network.
    """
    text = str(place)
    is_address = isinstance(place, Address)
    if is_address and not text.startswith("hf://"):
        return None
    if is_address and not text.startswith(_SCHEME):
        raise SampleError(
            f"{text} is no data set of the hub: write hf://datasets/ORG/NAME, and a file in it if you like"
        )
    if not is_address and (place.exists() or place.is_absolute()):
        return None
    named = _NAME.match(text.removeprefix(_SCHEME))
    if named is None:
        return None
    folder = _hub() / f"datasets--{named['repo'].replace('/', '--')}"
    revision = named["revision"] or "main"
    cure = f"fetch it with `hf download {named['repo']} --repo-type dataset --revision {revision}`"
    if not folder.is_dir():
        if is_address and os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise SampleError(
                f"{text} was named, HF_HUB_OFFLINE is set, and the data set is not in the cache {_hub()}: {cure}"
            )
        if not is_address and not place.suffix:
            raise SampleError(
                f"{text} is neither a file or folder here nor a data set in the cache {_hub()}: name data that is "
                f"here, or {cure}"
            )
        return None
    ref = folder / "refs" / revision
    commit = ref.read_text(encoding="ascii", errors="replace").strip() if ref.is_file() else revision
    found = folder / "snapshots" / commit
    inner = named["inner"]
    if not re.fullmatch(r"[\w.-]+", commit) or ".." in commit or (inner and ".." in Path(inner).parts):
        raise SampleError(f"{text} leads out of the cached data set {folder}: name a file in it")
    found = found / inner if inner else found
    if not found.exists():
        raise SampleError(f"{text} is not in the cache ({found} is not there): {cure}")
    return found


def _hub() -> Path:
    """The cache's folder, as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
