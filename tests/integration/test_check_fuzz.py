"""`noetl-grpc check fuzz`, small."""

from __future__ import annotations

from noetl_grpc.checks import fuzz
from noetl_grpc.checks.frame import silent


async def test_odd_requests_get_documented_answers_only(database_url: str) -> None:
    verdict = await fuzz.run_on(database_url, size="small", seed=5, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["INVALID_ARGUMENT"] > 40
    assert verdict.figures["OK"] > 10
