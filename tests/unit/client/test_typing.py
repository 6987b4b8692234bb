"""A program that uses the client is checked as its author would check it: `mypy --strict` on the installed package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

RIGHT = """
from noetl_grpc import (
    Consumption, Cutoff, NoetlClient, NotFound, OutboxRow, Release, ReplayedState, SubscriptionState, Tls,
)


async def deliver(row: OutboxRow) -> None:
    reveal_type(row.execution_id)
    raise Release


async def main(tls: Tls) -> ReplayedState | None:
    async with NoetlClient("127.0.0.1:1", token="x", tls=tls) as client:
        reveal_type((await client.outbox.stats()).oldest_pending_age)
        async for one in client.subscription.list(states=[SubscriptionState.ACTIVE]):
            reveal_type(one.state)
        try:
            return await client.replay.state(1, as_of=Cutoff(event_id=2))
        except NotFound as error:
            reveal_type(error.metadata)
        await client.outbox.consume(deliver, concurrency=4, tally=Consumption())
"""

WRONG = """
from noetl_grpc import NoetlClient, Nonsense


async def handle(row: int) -> None: ...


async def main(client: NoetlClient) -> None:
    print((await client.outbox.stats()).pendin)
    await client.subscription.pause("7")
    await client.outbox.consume(handle)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of each program, line by line."""
    (readme,) = re.findall(r"```python\n(.+?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("programs")
    programs = {"right.py": RIGHT, "wrong.py": WRONG, "readme.py": readme}
    for name, text in programs.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", *programs]
    lines = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.splitlines()
    assert "checked 3 source files" in lines[-1]
    return {name: [line for line in lines if line.startswith(name)] for name in programs}


def test_a_program_is_typed_from_end_to_end(said: dict[str, list[str]]) -> None:
    revealed = [line.partition("Revealed type is ")[2] for line in said["right.py"]]

    assert revealed == [
        '"int | None"',
        '"datetime.timedelta | None"',
        '"noetl_grpc.client.subscription.SubscriptionState"',
        '"dict[str, str]"',
    ]


def test_the_worker_of_the_readme_is_typed(said: dict[str, list[str]]) -> None:
    assert said["readme.py"] == []


def test_a_wrong_program_is_told_so(said: dict[str, list[str]]) -> None:
    codes = [line.rpartition("[")[2].rstrip("]") for line in said["wrong.py"]]

    assert codes == ["attr-defined", "attr-defined", "arg-type", "arg-type"]
