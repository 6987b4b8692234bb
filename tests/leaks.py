"""Watches what the service says: no log line and no error answer may hold a token, a password or a payload."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from noetl_grpc import status
from noetl_grpc.logs import JsonFormatter

#: Marks that stand nowhere but in what must be kept: the tests' token, their database password, their payloads.
TOKEN = "test-token-7c1f"
PASSWORD = "password-mark-b41d"
PAYLOAD = "payload-mark-51c7"
MARKS = (TOKEN, PASSWORD, PAYLOAD)


class _Listener(logging.Handler):
    """Every record with all its fields, as the log would show it."""

    def __init__(self, leaks: list[str]) -> None:
        super().__init__()
        self._leaks = leaks
        self._formatter = JsonFormatter()

    def emit(self, record: logging.LogRecord) -> None:
        text = self._formatter.format(record)
        if any(mark in text for mark in MARKS):
            self._leaks.append(f"logged: {text}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What leaks while the block runs, of all servers of this process."""
    leaks: list[str] = []
    listener = _Listener(leaks)
    package = logging.getLogger("noetl_grpc")
    level, to_status = package.level, status.to_status

    def checked(error: Any) -> Any:
        answer = to_status(error)
        if any(mark.encode() in answer.SerializeToString() for mark in MARKS):
            leaks.append(f"answered: {answer}")
        return answer

    logging.getLogger().addHandler(listener)
    package.setLevel(logging.DEBUG)
    status.to_status = checked
    try:
        yield leaks
    finally:
        status.to_status = to_status
        package.setLevel(level)
        logging.getLogger().removeHandler(listener)
