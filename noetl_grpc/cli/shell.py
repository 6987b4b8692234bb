"""How a reader can type our commands where he is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def program() -> str:
    """`noetl-grpc` where the shell finds it, else the path to it from this folder."""
    if shutil.which("noetl-grpc"):
        return "noetl-grpc"
    beside = Path(".venv/bin/noetl-grpc")
    if beside.exists():
        return str(beside)
    return sys.argv[0] if Path(sys.argv[0]).name == "noetl-grpc" else f"{sys.executable} -m noetl_grpc"
