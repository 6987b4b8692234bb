"""PostgreSQL refuses to run as root: whom it runs as instead, and where that account can reach.

Under a parent folder of mode 0700 the account reaches neither the installed binaries nor the data. Opening
somebody's folders to everybody is no cure, so both then live under the system's temp directory, in folders
that belong to root.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from noetl_grpc.dev.process import Account, LaunchError

_MAY_EXECUTE = """
import os, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[1]))
sys.exit(0 if os.access(sys.argv[3], os.X_OK) else 3)
"""


def account_for(data: Path | None) -> Account | None:
    """Whom to run as: nobody else unless we are root, then the owner of data that exists, else `nobody`."""
    if os.geteuid() != 0:
        return None
    if data and data.exists() and (owner := data.stat()).st_uid != 0:
        return Account(owner.st_uid, owner.st_gid)
    # initdb wants an account that has a name.
    entries = sorted(pwd.getpwall(), key=lambda entry: (entry.pw_name != "nobody", entry.pw_uid))
    for entry in entries:
        if entry.pw_uid != 0:
            return Account(entry.pw_uid, entry.pw_gid)
    raise LaunchError("PostgreSQL refuses to run as root, and this system has no other account")


def can_reach(account: Account | None, path: Path) -> bool:
    """Whether the account may execute the file or search the folder, as the kernel sees it."""
    if account is None:
        return os.access(path, os.X_OK)
    # Not by Popen(user=…): that forks, and a fork of a process with gRPC's threads in it sometimes aborts.
    question = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MAY_EXECUTE, str(account.uid), str(account.gid), path],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    if question.returncode not in (0, 3):
        raise LaunchError(
            f"can't step down to uid {account.uid}, and PostgreSQL refuses root:\n{question.stderr}"
        )
    return question.returncode == 0


@functools.cache
def reachable_temp(account: Account | None) -> Path:
    """The system's temp directory, or the nearest one that the account can use."""
    for candidate in (Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")):
        if candidate.is_dir() and can_reach(account, candidate):
            return candidate
    raise LaunchError(
        f"PostgreSQL runs as uid {account.uid if account else os.geteuid()}: it reaches no temp folder"
    )


def substitute_folder(folder: Path, account: Account) -> Path:
    """Where the data lives when the account can't reach its folder: for one folder always the same place."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return _own(reachable_temp(account) / f"noetl-grpc-{name}")


def reachable_binaries(binaries: Path, account: Account) -> Path:
    """A copy of the binaries for the account. It is kept, and found again the next time."""
    program = (binaries / "postgres").resolve(strict=True)
    facts = program.stat()
    identity = f"{program}\0{facts.st_size}\0{facts.st_mtime_ns}"
    name = hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
    place = reachable_temp(account) / f"noetl-grpc-postgres-{name}"
    prefix = program.parent.parent
    copy = place / prefix.parent.name / prefix.name / program.parent.name
    if not place.exists():
        _copy_installation(prefix, place)
    _own(place)
    if not can_reach(account, copy / program.name):
        raise LaunchError(
            f"{copy} can't be used (a damaged copy, or no programs may run there); remove {place}"
        )
    return copy


def _copy_installation(prefix: Path, place: Path) -> None:
    """Copy what a server needs, the libraries that a wheel keeps beside its package included."""
    scratch = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    try:
        package = prefix.parent
        skip = shutil.ignore_patterns("include", "*.a", "pkgconfig", "pgxs", "man", "doc")
        shutil.copytree(prefix, scratch / package.name / prefix.name, ignore=skip)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, scratch / libraries.name)
        for path in (scratch, *scratch.rglob("*")):
            # An installation made under a strict umask is closed to others in every file.
            path.chmod(0o755)
        os.rename(scratch, place)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not place.exists():
            raise


def _own(folder: Path) -> Path:
    """The folder, made if need be. Where all may write, somebody else may have been there before us."""
    try:
        folder.mkdir()
        folder.chmod(0o755)
    except FileExistsError:
        pass
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise LaunchError(f"{folder} is not a folder that only root can write to; look at it and remove it")
    return folder
