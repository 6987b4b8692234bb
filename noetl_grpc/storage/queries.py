"""Every statement of storage/sql/, by its name, loaded once at import.

A statement starts at its `-- name: x` line and ends before the next one; names are unique across the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Final

SQL_FOLDER: Final = Path(__file__).with_name("sql")
_NAME_LINE: Final = re.compile(r"^-- name: *(.*?) *$", re.MULTILINE)


def load(files: Iterable[Path]) -> dict[str, str]:
    """Read the named statements of these files; a name that is no identifier or occurs twice is an error."""
    statements: dict[str, str] = {}
    for file in files:
        _, *parts = _NAME_LINE.split(file.read_text(encoding="utf-8"))
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            if not name.isidentifier() or name in statements:
                raise ValueError(f"{file.name}: {name!r} is not a new statement name")
            statements[name] = body.strip().removesuffix(";")
    return statements


queries: Final = MappingProxyType(load(sorted(SQL_FOLDER.glob("*.sql"))))
