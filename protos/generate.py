"""protos/ -> generated/: messages, stubs and their types.

`--check` generates into a temporary folder instead, lists what differs from generated/ and then exits 1.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
GENERATED = PROTOS.parent / "generated"
PACKAGES = ("noetlpb", "externalscaler")
MESSAGE_TYPES = "readable_stubs,quiet"
#: We speak grpc.aio alone, so the types say so. A method that is not overridden is no type error: at run time
#: it answers UNIMPLEMENTED.
SERVICE_TYPES = "readable_stubs,quiet,only_async,generate_concrete_servicer_stubs"


def plugin(name: str) -> str:
    """The plugin beside this interpreter, so that an inactive virtual environment works too."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed; run: make generate")
    return f"--plugin={name}={found}"


def has_service(proto: Path) -> bool:
    return re.search(r"^service ", proto.read_text(encoding="utf-8"), re.MULTILINE) is not None


def protoc(out: Path, protos: list[Path], **outputs: str) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}"]
    command += [plugin("protoc-gen-mypy"), plugin("protoc-gen-mypy_grpc")]
    command += [f"--{name}={options}{':' if options else ''}{out}" for name, options in outputs.items()]
    command += [str(proto.relative_to(PROTOS)) for proto in protos]
    subprocess.run(command, check=True, cwd=PROTOS, timeout=120)


def generate(out: Path) -> None:
    """Write everything that belongs into `out`, which may hold nothing of it yet."""
    protos = sorted(proto for package in PACKAGES for proto in (PROTOS / package).rglob("*.proto"))
    protoc(out, protos, python_out="", mypy_out=MESSAGE_TYPES)
    protoc(out, [p for p in protos if has_service(p)], grpc_python_out="", mypy_grpc_out=SERVICE_TYPES)
    for folder in {out / proto.relative_to(PROTOS).parent for proto in protos}:
        while folder != out:
            (folder / "__init__.py").touch()
            folder = folder.parent
    for package in PACKAGES:
        (out / package / "py.typed").touch()


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def drift() -> list[str]:
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        wanted = contents(Path(fresh))
    present = contents(GENERATED)
    problems = dict.fromkeys(wanted.keys() - present.keys(), "missing")
    problems |= dict.fromkeys(present.keys() - wanted.keys(), "extra")
    problems |= {name: "differs" for name in wanted.keys() & present.keys() if wanted[name] != present[name]}
    return [f"{problem}: generated/{name}" for name, problem in sorted(problems.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="report drift instead of writing")
    if parser.parse_args().check:
        if problems := drift():
            sys.exit("\n".join([*problems, "generated/ is not what the protos say; run: make generate"]))
        return
    # Renamed protos must not leave their old modules behind.
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        for package in PACKAGES:
            shutil.rmtree(GENERATED / package, ignore_errors=True)
            shutil.copytree(Path(fresh) / package, GENERATED / package)


if __name__ == "__main__":
    main()
