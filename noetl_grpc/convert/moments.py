"""Times between protobuf and Python, to the microsecond."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from google.protobuf.timestamp_pb2 import Timestamp

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def timestamp_to_pb(moment: datetime) -> Timestamp:
    """A moment as a message; one without a zone is UTC, as the log's created_at is."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds, microseconds = divmod((moment - _EPOCH) // _MICROSECOND, 1_000_000)
    return Timestamp(seconds=seconds, nanos=microseconds * 1000)
