from pathlib import Path

import pytest
from grpc._cython import cygrpc

from noetl_grpc import server
from noetl_grpc.client import channel


@pytest.fixture(scope="module")
def core() -> bytes:
    """gRPC's core as it is installed."""
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize(
    "name", [name for name, _ in (*server.channel_options(), *channel.channel_options())]
)
def test_the_core_knows_the_option(core: bytes, name: str) -> None:
    # A misspelt option changes nothing and says nothing.
    assert name.encode() + b"\0" in core


def test_a_server_allows_the_pings_of_a_client() -> None:
    ours, theirs = dict(server.channel_options()), dict(channel.channel_options())

    assert ours["grpc.http2.min_ping_interval_without_data_ms"] < theirs["grpc.keepalive_time_ms"]
    assert ours["grpc.keepalive_permit_without_calls"] == 1
