"""`noetl-grpc check tail` and `check backfill`, small."""

from __future__ import annotations

import pytest

from noetl_grpc.checks import backfill, tail
from noetl_grpc.checks.frame import silent


# Servers of its own, and processes that are killed and started again.
@pytest.mark.timeout(60)
async def test_every_committed_event_reaches_the_stream_whatever_dies() -> None:
    verdict = await tail.run(size="small", seed=3, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["committed"] > 900
    assert verdict.figures["epochs"] > 1


# Servers of its own, and tailers that are killed on their way.
async def test_a_history_is_published_once_and_goes_on_after_a_kill() -> None:
    verdict = await backfill.run(size="small", seed=3, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["events"] == 4_000
