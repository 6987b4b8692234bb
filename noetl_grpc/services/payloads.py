"""Fetches the payloads that a state refers to, within bounds, and says of each whether it is what was recorded.

Nothing is called resolved that was not fetched, and whose bytes do not have the recorded SHA-256.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from noetl_grpc.core.canonical import Json, JsonObject, canonical_json
from noetl_grpc.core.payloads import (
    NO_LOCATOR,
    PayloadUse,
    locator_of,
    payload_uses,
    resolution_row,
    resolution_summary,
    resolved,
    summarise,
    unresolved,
)

logger = logging.getLogger("noetl_grpc")

PAYLOADS_MAX = 1000
PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
SECONDS_MAX = 20.0
PAYLOAD_SECONDS_MAX = 5.0
CONCURRENCY = 4


class PayloadError(Exception):
    """A payload can't be fetched; the text is shown to the caller."""


class PayloadResolver(Protocol):
    """Knows some kind of locator. Deployments add theirs by the entry point `noetl_grpc.payload_resolvers`."""

    def accepts(self, locator: str) -> bool:
        """Whether this resolver is the one to ask."""
        ...

    async def fetch(self, locator: str, reference: Json, *, bytes_max: int) -> bytes:
        """The payload's bytes as they are stored; raises PayloadError."""
        ...


class FileResolver:
    """SHA-256-addressed files under one folder, as `<hex>`, `<first two digits>/<hex>` or `sha256/<hex>`."""

    _LOCATOR = re.compile(r"(?:[a-z][a-z0-9+.-]*://\S*/sha256/|sha256:)?([0-9a-fA-F]{64})")

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def accepts(self, locator: str) -> bool:
        return self._LOCATOR.fullmatch(locator) is not None

    async def fetch(self, locator: str, reference: Json, *, bytes_max: int) -> bytes:
        match = self._LOCATOR.fullmatch(locator)
        assert match is not None
        return await asyncio.to_thread(self._read, match[1].lower(), bytes_max)

    def _read(self, digest: str, bytes_max: int) -> bytes:
        for path in (self._root / digest, self._root / digest[:2] / digest, self._root / "sha256" / digest):
            # A link may lead anywhere; only what lies inside the folder is ours to read.
            found = path.resolve()
            if found.is_file() and found.is_relative_to(self._root):
                try:
                    with found.open("rb") as file:
                        content = file.read(bytes_max + 1)
                except OSError:
                    raise PayloadError("payload can't be read") from None
                if len(content) > bytes_max:
                    raise PayloadError(f"payload is larger than {bytes_max} bytes")
                return content
        raise PayloadError("payload not found")


async def resolve_payloads(state: Mapping[str, Any], resolvers: Sequence[PayloadResolver]) -> bytes:
    """The report as JSON text: `payload_resolution` rows and their `payload_resolution_summary`."""
    uses = list(payload_uses(state))
    resolutions = await _resolve_each(uses, resolvers)
    rows = [resolution_row(use, resolutions[use.key]) for use in uses]
    report = {"payload_resolution": rows, "payload_resolution_summary": resolution_summary(rows)}
    return canonical_json(report)


async def _resolve_each(
    uses: Iterable[PayloadUse], resolvers: Sequence[PayloadResolver]
) -> dict[str, JsonObject]:
    """The resolution of every distinct payload; of several references to one the first is asked for."""
    first: dict[str, Json] = {}
    for use in uses:
        first.setdefault(use.key, use.reference)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SECONDS_MAX
    slots = asyncio.Semaphore(CONCURRENCY)

    async def resolve(number: int, reference: Json) -> JsonObject:
        if number >= PAYLOADS_MAX:
            return unresolved(reference, f"not looked up: more than {PAYLOADS_MAX} payloads are referred to")
        async with slots:
            seconds = min(deadline - loop.time(), PAYLOAD_SECONDS_MAX)
            return await _resolve_one(reference, resolvers, seconds=seconds)

    answers = await asyncio.gather(*map(resolve, range(len(first)), first.values()))
    return dict(zip(first, answers, strict=True))


async def _resolve_one(
    reference: Json, resolvers: Sequence[PayloadResolver], *, seconds: float
) -> JsonObject:
    locator = locator_of(reference)
    if not isinstance(locator, str) or not locator:
        return unresolved(reference, NO_LOCATOR)
    resolver = next((each for each in resolvers if each.accepts(locator)), None)
    if resolver is None:
        return unresolved(reference, "no resolver for this locator")
    recorded = _recorded_digest(reference, locator)
    if recorded is None:
        return unresolved(reference, "no sha256 is recorded, so the payload can't be checked")
    if seconds <= 0:
        return unresolved(reference, f"not looked up: the others took {SECONDS_MAX:g} s")
    try:
        async with asyncio.timeout(seconds):
            content = await resolver.fetch(locator, reference, bytes_max=PAYLOAD_BYTES_MAX)
    except PayloadError as error:
        return unresolved(reference, str(error))
    except TimeoutError:
        return unresolved(reference, f"payload did not come within {seconds:.3g} s")
    except Exception:
        # Not ours, so it may raise anything; one payload must not cost the caller the whole state.
        logger.exception("a payload resolver failed")
        return unresolved(reference, "the payload resolver failed")
    if len(content) > PAYLOAD_BYTES_MAX:
        return unresolved(reference, f"payload is larger than {PAYLOAD_BYTES_MAX} bytes")
    digest = hashlib.sha256(content).hexdigest()
    if digest != recorded:
        return unresolved(reference, f"payload has sha256 {digest}, recorded is {recorded}")
    return await asyncio.to_thread(lambda: resolved(reference, _value_of(content)))


def _recorded_digest(reference: Json, locator: str) -> str | None:
    """What the reference says, else what a bare text locator is itself."""
    recorded = summarise(reference)["sha256"] if isinstance(reference, dict) else locator.rpartition("/")[2]
    if not isinstance(recorded, str):
        return None
    digest = recorded.lower().removeprefix("sha256:")
    return digest if not isinstance(reference, str) or re.fullmatch("[0-9a-f]{64}", digest) else None


def _value_of(content: bytes) -> Json | bytes:
    """The JSON in it, if it is JSON; else the bytes themselves."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content
