"""Connections: a pool per shard and one for the cluster database. Only here do driver errors become ours."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import asyncpg
import xxhash

from noetl_grpc.errors import Conflict, DatabaseUnavailable, Overloaded
from noetl_grpc.storage.traced import traced

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans

Connection: TypeAlias = Any  # asyncpg.Connection or its pool proxy; asyncpg ships no types for either

CONNECT_SECONDS = 5.0
CONFLICT_TRIES = 3

T = TypeVar("T")

_GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleSessionTimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server said that it ends this session just when a statement was sent
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ObjectNotInPrerequisiteStateError,  # it takes no connections just now
    ssl.SSLError,
    OSError,
)


class _Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg ships no types
    """Has no session state to reset (we only use SET LOCAL), so giving one back costs no round trip."""

    def get_reset_query(self) -> str:
        return ""


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn what the driver raises into what a caller can act on. A wrong statement stays what it is: a bug."""
    try:
        yield
    except (asyncpg.SerializationError, asyncpg.DeadlockDetectedError) as error:
        raise Conflict("another transaction was faster; retry the whole operation") from error
    except asyncpg.TooManyConnectionsError as error:
        raise Overloaded("the database has no connection left; try again later") from error
    except asyncpg.InsufficientResourcesError as error:
        raise DatabaseUnavailable("the database is out of resources; try again later") from error
    except (asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError) as error:
        raise Conflict("the database gave up waiting; retry the whole operation") from error
    except TimeoutError as error:
        raise DatabaseUnavailable("the database does not answer; try again later") from error
    except _GONE as error:
        if isinstance(error, asyncpg.InterfaceError) and not _is_closed(error):
            raise
        raise DatabaseUnavailable("the database is out of reach; try again later") from error


def _is_closed(error: asyncpg.InterfaceError) -> bool:
    """InterfaceError is also what a wrong argument raises; that one is not the database's fault."""
    text = str(error)
    return "closed" in text or "closing" in text or "released" in text or "terminated" in text


class Pool:
    """The connections to one database."""

    def __init__(self, pool: Any, *, name: str, size_max: int, wait_seconds: float) -> None:
        self._pool = pool
        self._slots = asyncio.Semaphore(size_max)
        self._wait_seconds = wait_seconds
        self.name = name
        self.size_max = size_max

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """A connection for the length of the block; Overloaded when none becomes free in time."""
        # Waited for here and not inside the driver, whose timeout can't tell a full pool from a dead host.
        await self._take_slot()
        try:
            with translate_errors():
                async with self._pool.acquire() as conn:
                    yield conn
        finally:
            self._slots.release()

    async def _take_slot(self) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded(
                f"no database connection became free within {self._wait_seconds:g} s; try again later",
                metadata={"wait_seconds": f"{self._wait_seconds:g}"},
            ) from None

    @asynccontextmanager
    async def transaction(
        self, *, isolation: str | None = None, readonly: bool = False
    ) -> AsyncIterator[Connection]:
        """A connection in a transaction that commits when the block ends well."""
        async with self.acquire() as conn, conn.transaction(isolation=isolation, readonly=readonly):
            yield conn

    def connections(self) -> tuple[int, int]:
        """Idle and used connections."""
        idle = self._pool.get_idle_size()
        return idle, self._pool.get_size() - idle

    async def close(self) -> None:
        """Wait for running statements briefly, then close every connection."""
        try:
            async with asyncio.timeout(5):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()


async def create_pool(
    url: str,
    *,
    name: str,
    size_min: int = 0,
    size_max: int = 10,
    wait_seconds: float = 30,
    statement_cache_size: int = 100,
    spans: Spans | None = None,
) -> Pool:
    """A pool that connects when it is first used, so that a process can start before its database."""
    with translate_errors():
        pool = await asyncpg.create_pool(
            url,
            min_size=0,
            max_size=size_max,
            max_inactive_connection_lifetime=300.0 if size_min == 0 else 0,
            timeout=CONNECT_SECONDS,
            statement_cache_size=statement_cache_size,
            connection_class=_Connection if spans is None else traced(_Connection, spans, database=name),
            server_settings={"application_name": "noetl_grpc", "timezone": "UTC"},
        )
    return Pool(pool, name=name, size_max=size_max, wait_seconds=wait_seconds)


def shard_of(execution_id: int, shards: int) -> int:
    """Which shard holds an execution; the gateway and the workers compute the same."""
    if shards <= 1:
        return 0
    digest: int = xxhash.xxh64_intdigest(execution_id.to_bytes(8, "little", signed=True), seed=0)
    return digest % shards


@dataclass(frozen=True, slots=True)
class Shards:
    """All databases of the service."""

    pools: Sequence[Pool]
    #: Catalog and machine leases; with one database the same pool as shard 0.
    cluster: Pool

    def __len__(self) -> int:
        return len(self.pools)

    def shard_of(self, execution_id: int) -> int:
        """The number of the shard that holds an execution."""
        return shard_of(execution_id, len(self.pools))

    def pool_for(self, execution_id: int) -> Pool:
        """The pool of the shard that holds an execution."""
        return self.pools[self.shard_of(execution_id)]

    async def close(self) -> None:
        """Close every pool."""
        for pool in {id(pool): pool for pool in (*self.pools, self.cluster)}.values():
            await pool.close()


async def open_shards(
    urls: Sequence[str],
    *,
    cluster_url: str,
    size_min: int = 0,
    size_max: int = 10,
    wait_seconds: float = 30,
    statement_cache_size: int = 100,
    spans: Spans | None = None,
) -> Shards:
    """One pool per distinct database."""

    async def open_pool(url: str, name: str) -> Pool:
        return await create_pool(
            url,
            name=name,
            size_min=size_min,
            size_max=size_max,
            wait_seconds=wait_seconds,
            statement_cache_size=statement_cache_size,
            spans=spans,
        )

    pools = [await open_pool(url, str(number)) for number, url in enumerate(urls)]
    if cluster_url in urls:
        return Shards(pools=tuple(pools), cluster=pools[list(urls).index(cluster_url)])
    return Shards(pools=tuple(pools), cluster=await open_pool(cluster_url, "cluster"))


async def retry_conflicts(operation: Callable[[], Awaitable[T]], *, tries: int = CONFLICT_TRIES) -> T:
    """Run a whole operation again when another transaction was faster; whoever calls it has written nothing yet."""
    for _ in range(tries - 1):
        try:
            return await operation()
        except Conflict:
            continue
    return await operation()
