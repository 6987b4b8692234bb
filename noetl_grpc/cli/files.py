"""Files with secrets in them: readable by their owner alone, never half written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace the file as a whole. One that exists keeps its mode and owner, so that who could read it still can."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            _take_after(handle, path)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _take_after(handle: int, path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(handle, found.st_uid, found.st_gid)
    os.fchmod(handle, found.st_mode & 0o777)
