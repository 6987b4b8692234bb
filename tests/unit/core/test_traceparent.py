"""What counts as a trace, and whose trace an event is noted under."""

from __future__ import annotations

import pytest

from noetl_grpc.core.traceparent import is_traceparent, trace_id, traced_components
from tests.traces import MALFORMED, TRACE, TRACEPARENT


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_traceparent(text: str) -> None:
    assert not is_traceparent(text)


def test_a_traceparent_names_its_trace() -> None:
    assert is_traceparent(TRACEPARENT)
    assert trace_id(TRACEPARENT) == TRACE


def test_the_callers_trace_is_noted_where_an_event_says_nothing() -> None:
    noted = f'{{"traceparent": "{TRACEPARENT}"}}'
    batch = {
        "trace_component": [None, '{"span": "x"}', None, None],
        "meta": [None, None, '{"traceparent": "theirs"}', '{"a": 1}'],
    }

    assert traced_components(batch, TRACEPARENT) == [noted, '{"span": "x"}', None, noted]
