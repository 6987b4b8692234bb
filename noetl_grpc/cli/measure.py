"""`check` and `bench`: fault scenarios at full size, and measurements against a control."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Table

from noetl_grpc.benches import frame as benches
from noetl_grpc.checks import frame as checks
from noetl_grpc.cli.loop import run as run_loop
from noetl_grpc.cli.progress import bar

app = typer.Typer()

T = TypeVar("T")

_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Which scenario; without it they are listed.")] = "",
    seed: Annotated[int, typer.Option(help="Repeat a run; 0 draws a new one.", min=0)] = 0,
    small: Annotated[bool, typer.Option("--small", help="The size that the tests run.")] = False,
    as_json: _AsJson = False,
) -> None:
    """Run a fault scenario on temporary servers. Exits with 1 on a violation.

    Example: noetl-grpc check outbox --seed 7
    """
    if not name:
        _list({known: checks.load(known).SUMMARY for known in checks.names()}, as_json)
        return
    _require_known(name, checks.names())
    seed = seed or secrets.randbelow(2**31 - 1) + 1
    with _progress() as progress:
        scenario = checks.load(name)
        verdict = _run(scenario.run(size="small" if small else "full", seed=seed, progress=progress))
    if as_json:
        typer.echo(_text(verdict.document()))
    else:
        console = Console()
        console.print(
            f"[bold]{name}[/bold] with seed {seed}: {'[green]ok' if verdict.ok else '[red]violated'}"
        )
        for key, value in verdict.figures.items():
            console.print(f"  {key}: {value}")
        for violation in verdict.violations:
            console.print(f"  [red]{violation}")
    raise typer.Exit(0 if verdict.ok else 1)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark; without it all of them run.")] = "",
    as_json: _AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small enough for CI; the figures are rough.")
    ] = False,
    database_url: Annotated[str, typer.Option(help="Use this database instead of a temporary one.")] = "",
    nats_url: Annotated[str, typer.Option(help="Use this broker instead of a temporary one.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="outbox: nothing published yet.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="outbox: against our own statements without gRPC.")
    ] = False,
    latency: Annotated[bool, typer.Option("--latency", help="tail: time from commit to ack.")] = False,
) -> None:
    """Measure against a control in the same run. Ratios count; absolute figures are for orientation.

    Example: noetl-grpc bench rpc --json
    """
    if name:
        _require_known(name, benches.names())
    flags = frozenset(flag for flag, given in (("fresh", fresh), ("raw", raw), ("latency", latency)) if given)
    documents = []
    for one in [name] if name else benches.names():
        with _progress() as progress:
            options = benches.Options(
                quick=quick, database_url=database_url, nats_url=nats_url, flags=flags, progress=progress
            )
            cases = _run(benches.load(one).run(options))
        documents.append({"bench": one, "cases": [case.document() for case in cases]})
        if not as_json:
            _show_cases(one, cases)
    if as_json:
        typer.echo(_text(documents[0] if name else documents))


def _run(job: Awaitable[T]) -> T:
    from noetl_grpc.dev.process import LaunchError

    async def work() -> T:
        return await job

    try:
        return run_loop(work())
    except LaunchError as error:
        typer.echo(f"noetl-grpc: {error}", err=True)
        raise typer.Exit(1) from None


def _list(summaries: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(_text({"checks": [{"check": name, "summary": text} for name, text in summaries.items()]}))
        return
    table = Table("check", "what it shows", box=None, pad_edge=False)
    for name, summary in summaries.items():
        table.add_row(name, summary)
    Console().print(table)


def _require_known(name: str, known: list[str]) -> None:
    if name not in known:
        typer.echo(f"noetl-grpc: there is no {name!r}; there are: {', '.join(known)}", err=True)
        raise typer.Exit(2)


def _show_cases(name: str, cases: list[benches.Case]) -> None:
    table = Table(name, "unit", "ours", "control", "ratio", "goal", "holds", box=None, pad_edge=False)
    for case in cases:
        table.add_row(
            case.case,
            case.unit,
            f"{case.value:,.1f}",
            f"{case.control:,.1f}",
            f"{case.ratio:.2f}",
            "" if case.goal is None else f"{case.goal:g}",
            "yes" if case.holds else "[red]no",
        )
    Console().print(table)


def _text(document: object) -> str:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


@contextmanager
def _progress() -> Iterator[benches.Progress]:
    with bar(Console(stderr=True)) as shown:
        task = shown.add_task("starting", total=None)

        def show(text: str, done: int = 0, total: int = 0) -> None:
            shown.update(task, description=text, completed=done, total=total or None)

        yield show
