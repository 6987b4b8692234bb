"""Catalog entries copied from the cluster database into a shard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import asyncpg

from noetl_grpc.storage import catalog_entries


async def _copy(cluster: asyncpg.Connection, shard: asyncpg.Connection, *catalog_ids: int) -> None:
    async with shard.transaction():
        await catalog_entries.copy(shard, await catalog_entries.read(cluster, catalog_ids))


async def test_a_copied_entry_is_the_whole_entry_with_its_kind(
    new_database: Callable[[], Awaitable[str]],
) -> None:
    cluster = await asyncpg.connect(await new_database())
    shard = await asyncpg.connect(await new_database())
    try:
        await cluster.execute("INSERT INTO noetl.resource (name, meta) VALUES ('Listener', '{\"a\": 1}')")
        catalog_id = await cluster.fetchval(
            """
            INSERT INTO noetl.catalog (path, version, kind, content, layout, payload, meta, credential_id)
            VALUES ('jobs/nightly', 3, 'Listener', 'kind: Listener', '{"x": [1]}', '{"y": 2}', '{"z": null}', 7)
            RETURNING catalog_id
            """
        )

        for _ in range(2):
            await _copy(cluster, shard, catalog_id, 12345)

        for table, key in (("catalog", catalog_id), ("resource", "Listener")):
            column = "catalog_id" if table == "catalog" else "name"
            rows = f"SELECT * FROM noetl.{table} WHERE {column} = $1"
            assert await shard.fetch(rows, key) == await cluster.fetch(rows, key) != []
        assert await catalog_entries.known_ids(shard, [catalog_id, 12345]) == {catalog_id}
    finally:
        await cluster.close()
        await shard.close()
