"""`noetl-grpc check lifecycle`, small."""

from __future__ import annotations

from noetl_grpc.checks import lifecycle
from noetl_grpc.checks.frame import silent


async def test_one_legal_history_whoever_calls_at_once(database_url: str) -> None:
    verdict = await lifecycle.run_on(database_url, size="small", seed=11, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["accepted"] > 20
    assert verdict.figures["refused"] > 20
