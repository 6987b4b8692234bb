"""What order costs: ordered claims against unordered ones, without and with rows that fail."""

from __future__ import annotations

from noetl_grpc.benches.frame import Case, Options, faster
from noetl_grpc.benches.outbox import TOKEN, Bench, databases, fill, held_snapshot, rate, through_grpc
from noetl_grpc.dev.child import server_process

SUMMARY = "ordered claims of 16 claimers over 1000 executions, against unordered claims"

CLAIMERS = 16
LIMIT = 100


async def run(options: Options) -> list[Case]:
    """Interleaved rounds on fresh tables: ordered, unordered, ordered …"""
    async with databases(options) as (ours, control), server_process(ours, token=TOKEN) as server:
        bench = Bench(ours, control, server.line, options.progress)
        cases = [
            await _against_unordered(bench, options, failing=0.0, goal=0.6),
            await _against_unordered(bench, options, failing=0.02, goal=0.4),
        ]
        cases.append(await held_snapshot(bench, quick=options.quick, ordered=True))
        return cases


async def _against_unordered(bench: Bench, options: Options, *, failing: float, goal: float) -> Case:
    rows, rounds = (6000, 2) if options.quick else (40_000, 5)
    name = f"{failing:.0%} failing rows" if failing else "no failing rows"
    measured = []
    async with (
        through_grpc(bench.address, CLAIMERS, ordered=True, failing=failing) as ordered,
        through_grpc(bench.address, CLAIMERS, failing=failing) as unordered,
    ):
        for number in range(-1, rounds):
            bench.progress(name, max(number, 0), rounds)
            pair = []
            for ways in (ordered, unordered):
                await fill(bench.ours, pending=rows + rows // 4)
                pair.append(await rate(ways, limit=LIMIT, rows=rows))
            if number >= 0:  # the first round warms both up
                measured.append((pair[0], pair[1]))
    return faster(name, "rows/s", measured, goal=None if options.quick else goal)
