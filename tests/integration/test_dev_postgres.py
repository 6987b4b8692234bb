"""The launcher of PostgreSQL: what survives, what ends, and who may use what."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from noetl_grpc.dev.postgres import Postgres, find_binaries, major_version
from noetl_grpc.dev.process import AlreadyRunning, LaunchError, PortTaken, memory_folder
from tests.processes import REPOSITORY, is_alive, is_running, owner, until

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to step down")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every account can reach; those of pytest are closed to others."""
    path = Path(tempfile.mkdtemp(prefix="noetl-test-", dir=memory_folder()))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def closed_folder(folder: Path) -> Path:
    """A folder below one that only its owner can reach."""
    closed = folder / "home"
    closed.mkdir(mode=0o700)
    return closed / "project" / ".noetl" / "postgres"


def facts_of(pid: int) -> list[str]:
    """What the kernel says about a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_pid(pid: int) -> int:
    return int(facts_of(pid)[1])


def cpu_ticks(pid: int) -> int:
    return int(facts_of(pid)[11])


async def execute(postgres: Postgres, statement: str) -> object:
    """The first value that the statement returns, on a connection of its own."""
    connection = await asyncpg.connect(postgres.url(), timeout=5)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def test_a_temporary_cluster_listens_on_loopback_alone_and_leaves_nothing() -> None:
    async with Postgres(durable=False, in_memory=True) as postgres:
        data_dir, pid = postgres.data_dir, postgres.pid

        assert postgres.url("x") == f"postgresql://noetl@127.0.0.1:{postgres.port}/x"
        assert await execute(postgres, "SHOW listen_addresses") == "127.0.0.1"
        assert await execute(postgres, "SHOW unix_socket_directories") == ""
        assert await execute(postgres, "SHOW timezone") == "UTC"
        assert await execute(postgres, "SHOW wal_level") == "replica"
        assert await execute(postgres, "SHOW max_connections") == "300"
        assert await execute(postgres, "SELECT current_user || session_user") == "noetlnoetl"

    assert not data_dir.exists()
    assert not is_alive(pid)


@pytest.mark.skipif(memory_folder() is None, reason="this system keeps no files in memory")
async def test_a_temporary_cluster_can_live_in_memory() -> None:
    async with Postgres(durable=False, in_memory=True) as postgres:
        assert postgres.data_dir.parent == memory_folder()
        assert postgres.relocated_to is None


@pytest.mark.parametrize(("durable", "fsync"), [(True, "on"), (False, "off")])
async def test_durability_is_given_up_only_when_asked(durable: bool, fsync: str) -> None:
    async with Postgres(durable=durable, settings={"work_mem": "5MB"}) as postgres:
        assert await execute(postgres, "SHOW fsync") == fsync
        assert await execute(postgres, "SHOW full_page_writes") == fsync
        assert await execute(postgres, "SHOW synchronous_commit") == "on"
        assert await execute(postgres, "SHOW work_mem") == "5MB"


async def test_data_and_port_survive_restart_stop_and_kill() -> None:
    async with Postgres(durable=False, in_memory=True) as postgres:
        port, first_pid = postgres.port, postgres.pid
        await execute(postgres, "CREATE TABLE kept AS SELECT 1 AS n")

        await postgres.restart()
        assert (postgres.port, await execute(postgres, "SELECT sum(n) FROM kept")) == (port, 1)
        assert postgres.pid != first_pid

        await postgres.stop(mode="immediate")
        assert postgres.pid == 0
        await postgres.start()
        await execute(postgres, "INSERT INTO kept VALUES (2)")

        killed_pid = postgres.pid
        postgres.kill()
        assert not is_alive(killed_pid)
        await postgres.start()
        assert (postgres.port, await execute(postgres, "SELECT sum(n) FROM kept")) == (port, 3)


async def test_a_kill_takes_busy_backends_along() -> None:
    async with Postgres(durable=False, in_memory=True) as postgres:
        connection = await asyncpg.connect(postgres.url())
        backend = await connection.fetchval("SELECT pg_backend_pid()")
        # Never waits, so it would not notice for a long time that its postmaster is gone.
        endless = "SELECT count(*) FROM generate_series(1, 100000000000) AS n WHERE n < 0"
        query = asyncio.ensure_future(connection.fetchval(endless))
        await until(lambda: cpu_ticks(backend) > 5)

        postgres.kill()

        await until(lambda: not is_running(backend), seconds=2)
        with pytest.raises((asyncpg.PostgresConnectionError, ConnectionError)):
            await query
        await postgres.start()
        assert await execute(postgres, "SELECT 1") == 1


@pytest.mark.skipif(not Path("/proc/sysvipc/shm").exists(), reason="shared memory can't be looked at here")
async def test_a_killed_cluster_that_is_removed_leaves_no_shared_memory() -> None:
    def segments() -> set[str]:
        return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}

    async with Postgres(durable=False, in_memory=True) as postgres:
        lines = (postgres.data_dir / "data" / "postmaster.pid").read_text().splitlines()
        segment = lines[6].split()[1]
        postgres.kill()
        assert segment in segments()

    assert segment not in segments()


async def test_starting_again_after_somebody_killed_it_recovers() -> None:
    async with Postgres(durable=False, in_memory=True) as postgres:
        os.kill(postgres.pid, signal.SIGKILL)
        await until(lambda: postgres.pid == 0)

        await postgres.start()

        assert await execute(postgres, "SELECT 1") == 1


async def test_killing_the_keeper_ends_the_server_and_both_can_be_had_again() -> None:
    async with Postgres(durable=False, in_memory=True) as postgres:
        server, folder = postgres.pid, postgres.data_dir
        await execute(postgres, "CREATE TABLE kept AS SELECT 42 AS n")
        os.kill(parent_pid(server), signal.SIGKILL)
        await until(lambda: postgres.pid == 0)

        await postgres.start()

        assert not is_running(server)
        assert (postgres.data_dir, await execute(postgres, "SELECT n FROM kept")) == (folder, 42)
        os.kill(parent_pid(postgres.pid), signal.SIGKILL)
    assert not folder.exists()


async def test_a_folder_of_ones_own_keeps_its_data(folder: Path) -> None:
    async with Postgres(folder / "pg", durable=False) as postgres:
        await execute(postgres, "CREATE TABLE kept AS SELECT 42 AS n")
        assert postgres.relocated_to is None

    async with Postgres(folder / "pg", durable=False) as postgres:
        assert await execute(postgres, "SELECT n FROM kept") == 42


async def test_the_second_on_one_folder_is_told_who_has_it(folder: Path) -> None:
    async with Postgres(folder / "pg", durable=False) as postgres:
        with pytest.raises(AlreadyRunning, match=rf"{folder}/pg is already run by process {os.getpid()}$"):
            await Postgres(folder / "pg").start()

        assert await execute(postgres, "SELECT 1") == 1

    async with Postgres(folder / "pg", durable=False) as postgres:
        assert await execute(postgres, "SELECT 1") == 1


async def test_killing_the_owner_ends_the_servers_and_removes_what_was_temporary() -> None:
    async with owner() as (process, told):
        # Ctrl-C goes to a whole session, and the servers are none of ours.
        assert os.getsid(process.pid) not in map(os.getsid, told["pids"])
        process.kill()

        await until(lambda: not any(map(is_alive, told["pids"])))
        await until(lambda: not any(Path(path).exists() for path in told["folders"]))


async def test_after_the_owner_was_killed_its_folder_can_be_used_at_once(folder: Path) -> None:
    async with owner(folder / "pg", folder / "nats") as (process, told):
        connection = await asyncpg.connect(told["url"])
        await connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
        process.kill()

        async with Postgres(folder / "pg", durable=False) as postgres:
            assert await execute(postgres, "SELECT n FROM kept") == 42
            assert not is_alive(told["pids"][0])
        connection.terminate()


async def test_a_pid_that_belongs_to_somebody_else_by_now_does_not_block(folder: Path) -> None:
    async with Postgres(folder / "pg", durable=False) as postgres:
        pid_file = folder / "pg" / "data" / "postmaster.pid"
        text = pid_file.read_text()
        # Of the same account, or PostgreSQL itself would see that it can't be one of its own.
        uid = NOBODY if os.geteuid() == 0 else os.geteuid()
        step_down = f"import os; os.setuid({uid}); os.execv('/bin/sleep', ['sleep', '30'])"
        stranger = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", step_down)
        await until(lambda: os.stat(f"/proc/{stranger.pid}").st_uid == uid)
        postgres.kill()
        pid_file.write_text(text.replace(text.split("\n")[0], str(stranger.pid), 1))

        await postgres.start()

        assert await execute(postgres, "SELECT 1") == 1
        stranger.kill()
        await stranger.wait()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        with pytest.raises(PortTaken, match=r"port on 127\.0\.0\.1 is taken"):
            async with Postgres(port=port, durable=False):
                pass


async def test_a_folder_that_cannot_be_used_is_named(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(LaunchError, match=f"can't use the folder {folder}/file/pg: .*Not a directory"):
        await Postgres(folder / "file" / "pg").start()

    (folder / "pg" / "data").mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"can't be started: .*No such file or directory: .*PG_VERSION"):
        await Postgres(folder / "pg").start()


async def test_a_failed_start_can_be_tried_again() -> None:
    postgres = Postgres(durable=False, in_memory=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        postgres.port = listener.getsockname()[1]
        with pytest.raises(PortTaken):
            await postgres.start()

    async with postgres:
        assert await execute(postgres, "SELECT 1") == 1


async def test_a_bad_setting_fails_with_the_words_of_the_server() -> None:
    with pytest.raises(LaunchError, match='unrecognized configuration parameter "no_such_thing"'):
        async with Postgres(settings={"no_such_thing": "1"}, durable=False):
            pass


@pytest.mark.parametrize("major", [16, 15])
async def test_other_versions_can_be_chosen_and_their_data_is_recognised(folder: Path, major: int) -> None:
    try:
        binaries = find_binaries(major)
    except LaunchError:
        pytest.skip(f"PostgreSQL {major} is not installed")

    async with Postgres(folder / "pg", binaries=binaries, durable=False) as postgres:
        assert str(await execute(postgres, "SHOW server_version")).startswith(f"{major}.")

    async with Postgres(folder / "pg", durable=False) as postgres:
        assert str(await execute(postgres, "SHOW server_version")).startswith(f"{major}.")
    with pytest.raises(LaunchError, match=f"was made by PostgreSQL {major}"):
        await Postgres(folder / "pg", binaries=find_binaries(18)).start()


def test_the_newest_binaries_of_the_wheel_are_found() -> None:
    assert major_version(find_binaries()) == 18
    with pytest.raises(LaunchError, match=r"PostgreSQL 9.*noetl-grpc\[embedded\]"):
        find_binaries(9)


@as_root
async def test_root_in_a_closed_folder_uses_the_temp_directory_and_keeps_the_data(
    closed_folder: Path,
) -> None:
    modes = [stat.S_IMODE(parent.stat().st_mode) for parent in closed_folder.parents if parent.exists()]
    postgres = Postgres(closed_folder, durable=False)
    try:
        async with postgres:
            await execute(postgres, "CREATE TABLE kept AS SELECT 42 AS n")
            first = postgres.relocated_to
            assert first is not None
            assert first.parent == Path(tempfile.gettempdir())

        async with Postgres(closed_folder, durable=False) as again:
            assert again.relocated_to == first
            assert await execute(again, "SELECT n FROM kept") == 42
            with pytest.raises(AlreadyRunning):
                await Postgres(closed_folder).start()
    finally:
        if postgres.relocated_to:
            shutil.rmtree(postgres.relocated_to)

    existed = [parent for parent in closed_folder.parents if parent.exists()][-len(modes) :]
    assert [stat.S_IMODE(parent.stat().st_mode) for parent in existed] == modes


@as_root
async def test_root_copies_binaries_that_the_account_cannot_reach(folder: Path) -> None:
    installed = find_binaries().parent
    closed = folder / "venv"
    closed.mkdir(mode=0o700)
    package = closed / installed.parent.name
    shutil.copytree(installed, package / installed.name, ignore=shutil.ignore_patterns("include"))
    libraries = installed.parent.with_name(f"{installed.parent.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, closed / libraries.name)
    postgres = Postgres(binaries=package / installed.name / "bin", durable=False)

    try:
        async with postgres:
            assert await execute(postgres, "SELECT 1") == 1
        assert not postgres.binaries.is_relative_to(closed)
    finally:
        shutil.rmtree(postgres.binaries.parents[2])


@as_root
async def test_a_folder_that_somebody_else_planted_in_the_temp_directory_is_refused(
    closed_folder: Path,
) -> None:
    async with Postgres(closed_folder, durable=False) as postgres:
        substitute = postgres.relocated_to
    assert substitute is not None
    try:
        os.chown(substitute, NOBODY, NOBODY)

        with pytest.raises(LaunchError, match=f"{substitute} is not a folder that only root can write to"):
            await Postgres(closed_folder, durable=False).start()
    finally:
        shutil.rmtree(substitute)


def python_of_everybody() -> str:
    """An interpreter that `nobody` can run our modules with; ours may lie in a closed folder."""
    question = (
        f"import os; os.setuid({NOBODY}); import sys, noetl_grpc.dev.nats; print(sys.version_info >= (3, 11))"
    )
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            command = [python, "-c", question]
            answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        if answer.stdout == "True\n":
            return python
    pytest.skip("no interpreter, or not this repository, is open to everybody")


@as_root
async def test_a_normal_user_needs_no_help_and_root_can_take_over(folder: Path) -> None:
    python = python_of_everybody()
    os.chown(folder, NOBODY, NOBODY)
    async with owner(folder / "pg", folder / "nats", uid=NOBODY, python=python) as (process, told):
        assert os.stat(f"/proc/{told['pids'][0]}").st_uid == NOBODY
        connection = await asyncpg.connect(told["url"])
        await connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
        await connection.close()
        process.kill()

        await until(lambda: not any(map(is_alive, told["pids"])))

    async with Postgres(folder / "pg", durable=False) as postgres:
        assert await execute(postgres, "SELECT n FROM kept") == 42
