import pytest

from noetl_grpc.storage.pool import shard_of


@pytest.mark.parametrize(
    ("execution_id", "shards", "expected"),
    [
        (1, 1, 0),
        (1, 2, 1),
        (1, 4, 1),
        (1, 16, 5),
        (1, 64, 21),
        (1, 1024, 405),
        (42, 4, 3),
        (325, 4, 0),
        (325, 8, 4),
        (320816801799737344, 16, 14),
        (2**63 - 1, 4, 0),
    ],
)
def test_placement_is_that_of_gateway_and_workers(execution_id: int, shards: int, expected: int) -> None:
    assert shard_of(execution_id, shards) == expected
