"""Compares the protos with those already given away: of the last tag, else of the merge base with main.

A clone may have neither (fresh, shallow, no protos yet); then there is nothing to break, and this says so.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def git(*arguments: str) -> bytes | None:
    """What git prints, or None where it fails: no repository, no such commit, no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=60)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def commit_of(name: str) -> str | None:
    found = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    return found.decode().strip() if found else None


def baseline() -> str | None:
    """The commit to compare with. On main itself the merge base is HEAD, so its parent is taken instead."""
    answers = [git("describe", "--tags", "--abbrev=0")]
    answers += [git("merge-base", "HEAD", branch) for branch in ("origin/main", "main")]
    names = [answer.decode().strip() for answer in answers if answer]
    head = commit_of("HEAD")
    for name in [*names, "HEAD~"]:
        commit = commit_of(name)
        if commit and commit != head and git("cat-file", "-e", f"{commit}:buf.yaml") is not None:
            return commit
    return None


def main() -> None:
    against = baseline()
    archive = git("archive", "--format=tar", against, "protos", "buf.yaml") if against else None
    if archive is None:
        sys.stdout.write("buf breaking: no earlier protos to compare with\n")
        return
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or "buf"
    with tempfile.TemporaryDirectory() as earlier:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(earlier, filter="data")
        done = subprocess.run([buf, "breaking", "--against", earlier], cwd=ROOT, timeout=120)
    if done.returncode:
        sys.exit(f"buf breaking: these protos would break callers of {against}")


if __name__ == "__main__":
    main()
