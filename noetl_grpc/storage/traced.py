"""Connections whose statements are spans, by name. A class of their own, so that others pay nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from noetl_grpc.storage.queries import queries

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans

_NAMES: Final = {text: name for name, text in queries.items()}
#: Every way in which a statement is run.
_METHODS: Final = ("execute", "executemany", "fetch", "fetchrow", "fetchval")


def name_of(statement: str) -> str:
    """A statement's name in storage/sql; of others, such as COMMIT, the first word."""
    name = _NAMES.get(statement)
    if name is not None:
        return name
    first = statement.split(maxsplit=1)[0].rstrip(";") if statement.strip() else ""
    return first.upper() if first.isalpha() else "statement"


def traced(connection_class: type, spans: Spans, *, database: str) -> type:
    """The same connection, with a span around each statement."""

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        async def run_in_span(self: Any, statement: str, *args: Any, **options: Any) -> Any:
            with spans.statement(name_of(statement), database=database):
                return await run(self, statement, *args, **options)

        return run_in_span

    methods = {name: wrap(getattr(connection_class, name)) for name in _METHODS}
    return type("TracedConnection", (connection_class,), methods)
