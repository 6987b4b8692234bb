"""`noetl-grpc check workers`, small."""

from __future__ import annotations

import pytest

from noetl_grpc.checks import workers
from noetl_grpc.checks.frame import silent


@pytest.mark.timeout(90)
async def test_killed_workers_lose_nothing_and_mix_up_nothing() -> None:
    verdict = await workers.run(size="small", seed=5, progress=silent)

    assert verdict.violations == []
    assert (verdict.figures["publisher_kills"], verdict.figures["projector_kills"]) == (2, 1)
