"""`noetl-grpc check restart`, small."""

from __future__ import annotations

import pytest

from noetl_grpc.checks import restart
from noetl_grpc.checks.frame import silent


@pytest.mark.timeout(60)  # four servers are started
async def test_no_caller_sees_a_restart(database_url: str) -> None:
    verdict = await restart.run_on(database_url, size="small", seed=3, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["restarts"] == 2
    assert verdict.figures["calls"] > 100
