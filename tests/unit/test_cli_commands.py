"""The command line as a whole: every command is listed, explained by an example, and starts without the others."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import noetl_grpc.cli
from noetl_grpc.cli import app
from noetl_grpc.cli.lazy import COMMANDS, load

LISTED = {name: (module, summary) for rows in COMMANDS.values() for name, module, summary in rows}


def leaves(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below this one that does something, with the words that call it."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield path, command
        return
    for name, subcommand in subcommands.items():
        yield from leaves(subcommand, *path, name)


ALL = dict(item for name in LISTED for item in leaves(load(name), name))


@pytest.mark.parametrize("name", LISTED)
def test_a_command_is_listed_with_the_first_words_of_its_own_help(name: str) -> None:
    _, summary = LISTED[name]

    assert load(name).help.startswith(summary)


def test_no_command_of_a_module_is_left_out() -> None:
    for module in pkgutil.iter_modules(noetl_grpc.cli.__path__):
        part = getattr(import_module(f"noetl_grpc.cli.{module.name}"), "app", None)
        for name in typer.main.get_group(part).commands if part else ():
            assert (name,) in ALL or (module.name, name) in ALL, f"{module.name}.{name}"


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_each_command_has_an_example_that_names_it(path: tuple[str, ...]) -> None:
    text = ALL[path].help

    assert "Example" in text
    assert " ".join(("noetl-grpc", *path)) in text


def _spoken(call: ast.Call) -> list[object]:
    """The constant arguments of a call, those of a tuple that is unpacked into it as well."""
    arguments = [
        one
        for argument in call.args
        for one in (
            argument.value.elts
            if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
            else (argument,)
        )
    ]
    return [one.value for one in arguments if isinstance(one, ast.Constant)]


CALLS = [
    _spoken(node)
    for file in (Path(__file__).parent.parent / "e2e").glob("*.py")
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.Call)
]


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_each_command_is_tried_end_to_end_and_its_json_read(path: tuple[str, ...]) -> None:
    calls = [words for words in CALLS if any(tuple(words[n : n + len(path)]) == path for n in range(6))]
    has_json = any("--json" in option.opts for option in ALL[path].params)

    assert [words for words in calls if "--json" in words or not has_json]
    assert has_json or path in (("serve",), ("dev",))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_it_starts_without_what_only_its_commands_need(arguments: list[str]) -> None:
    heavy = {"asyncpg", "google.protobuf", "grpc", "nats", "noetl_grpc.client", "orjson"}
    program = (
        "import sys\n"
        "from noetl_grpc.cli import main\n"
        "try:\n"
        f"    sys.argv = ['noetl-grpc', *{arguments}]\n"
        "    main()\n"
        "finally:\n"
        f"    print(sorted({heavy} & set(sys.modules)), file=sys.stderr)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["dev"], "sys.modules['yaml'] = None"),
        (["check", "purge"], "postgres._installed_binaries = lambda: iter(())"),
    ],
)
def test_without_the_embedded_servers_it_says_how_to_get_them(
    arguments: list[str], missing: str, tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from noetl_grpc.cli import main\n"
        "from noetl_grpc.dev import postgres\n"
        f"{missing}\n"
        f"sys.argv = ['noetl-grpc', *{arguments}]\n"
        "main()\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'noetl-grpc[embedded]'" in done.stderr


def test_a_typing_error_is_understood() -> None:
    result = CliRunner().invoke(app, ["subscripton", "list"])

    assert result.exit_code == 2
    assert "subscription" in result.output
