"""Which folder a data file's media lie in; those below an address such as s3://bucket/images are fetched one by one."""

from __future__ import annotations

import os
import posixpath
import tempfile
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from trimtab.address import Address
from trimtab.errors import SampleError
from trimtab.options import Exif
from trimtab.samples.media import MediaFolder, outside_media, unreadable_media
from trimtab.samples.problems import shorten


class AddressFolder(MediaFolder):
    """A media folder behind an address; a name that leads out of it is refused unless `allow_outside`."""

    def __init__(self, root: Address, *, allow_outside: bool, exif: Exif) -> None:
        super().__init__(root, allow_outside=allow_outside, exif=exif)
        self._root = str(root)

    def _descriptor(self, image: str | bytes, kind: Literal["image", "video"] = "image") -> int:
        """An open file with the content, which goes when it is closed."""
        assert isinstance(image, str), "bytes are carried"
        address = self._address(image, kind)
        try:
            content = address.read_bytes()
        except (OSError, SampleError) as error:
            raise unreadable_media(f"{kind} {shorten(image)}", "read", self._root, error) from None
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            return os.dup(file.fileno())

    def _address(self, name: str, kind: str) -> Address:
        """Root and name as one address, `..` resolved, quoted ones too."""
        scheme, _, root = self._root.partition("://")
        own, mark, inner = name.partition("://")
        path = f"/{inner}" if mark else posixpath.join(f"/{root}", name)
        spellings = (path, unquote(path))
        below = f"/{root.rstrip('/')}/".replace("//", "/")
        lies_in = all(f"{posixpath.normpath(spelling)}/".startswith(below) for spelling in spellings)
        if (mark and own != scheme) or not (lies_in or self._allow_outside):
            raise outside_media(f"{kind} {shorten(name)}", self._root)
        return Address(f"{scheme}:/{posixpath.normpath(path)}")


class MediaFolders:
    """The media folder of each data file: the one stated for it, or else `root`, or else the file's own folder."""

    def __init__(self, root: Path | None, *, allow_outside: bool, exif: Exif) -> None:
        self._root = root
        self._made: dict[Path, MediaFolder] = {}
        self._how: dict[str, Any] = {"allow_outside": allow_outside, "exif": exif}

    def of(self, file: Path, stated: Path | None = None) -> MediaFolder:
        root = stated or self._root or file.parent
        if root not in self._made:
            if isinstance(root, Address):
                self._made[root] = AddressFolder(root, **self._how)
            else:
                self._made[root] = MediaFolder(root, **self._how)
        return self._made[root]
