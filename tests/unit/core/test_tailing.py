import hashlib
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noetl_grpc.core.following import Key
from noetl_grpc.core.messages import Refused, encode_headers, is_subject, refusal
from noetl_grpc.core.tailing import (
    BODY_BYTES_MAX,
    Event,
    fitting,
    is_reference,
    key_of,
    message_id,
    message_of,
    repair_id,
    settled,
    subject_of,
)

MEBIBYTE = 1024 * 1024


def event(body: str = "{}", event_type: str | None = "step.exit", traceparent: str | None = None) -> Event:
    encoded = body.encode()
    return Event(7, 8, event_type, "acme", "emea", traceparent, encoded, len(encoded))


def headers_of(encoded: bytes) -> dict[str, str]:
    first, *lines = encoded.decode().removesuffix("\r\n\r\n").split("\r\n")
    assert first == "NATS/1.0"
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize(
    ("event_type", "subject"),
    [
        ("step.exit", "noetl.events.step.exit"),
        (None, "noetl.events.unknown"),
        ("", "noetl.events.unknown"),
        ("two words", "noetl.events.two_words"),
        (" ", "noetl.events._"),
        ("*", "noetl.events._"),
        ("a.*.>", "noetl.events.a._._"),
        (".a.", "noetl.events._.a._"),
        ("a..b", "noetl.events.a._.b"),
        ("line\r\nbreak\ttab", "noetl.events.line__break_tab"),
        ("größe.日本", "noetl.events.größe.日本"),
    ],
)
def test_a_type_becomes_a_legal_subject(event_type: str | None, subject: str) -> None:
    assert subject_of(event_type) == subject


def test_a_long_type_is_cut_and_told_apart_by_a_hash() -> None:
    one, other = subject_of("x" * 10_000), subject_of("x" * 10_001)

    assert len(one.encode()) < 250
    assert one != other
    assert one.startswith("noetl.events." + "x" * 200 + "-")


@given(st.text(max_size=300))
def test_every_text_becomes_a_legal_subject(event_type: str) -> None:
    try:
        event_type.encode()
    except UnicodeEncodeError:
        return  # PostgreSQL holds no such text
    assert is_subject(subject_of(event_type))


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a..b", "a b", "a.*", ">", "a\r\nPUB x", "x" * 2000])
def test_what_is_no_subject(text: str) -> None:
    assert not is_subject(text)


def test_headers_name_the_event_and_its_type() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    message = message_of(event(traceparent=trace), identifier="7-8", message_bytes_max=MEBIBYTE)

    assert headers_of(message.headers) == {
        "Nats-Msg-Id": "7-8",
        "Noetl-Event-Id": "8",
        "Noetl-Event-Type": "step.exit",
        "traceparent": trace,
    }
    assert message.body == b"{}"
    assert not is_reference(message)


@pytest.mark.parametrize(
    ("event_type", "header"),
    [
        ("a * b >", "a * b >"),
        ("", ""),
        ("x" * 10_000, "x" * 10_000),
        ("a\r\nNats-Msg-Id: 9", "a  Nats-Msg-Id: 9"),
    ],
)
def test_a_type_can_add_no_header(event_type: str, header: str) -> None:
    message = message_of(event(event_type=event_type), identifier="7-8", message_bytes_max=MEBIBYTE)

    assert headers_of(message.headers)["Noetl-Event-Type"] == header


def test_an_event_without_type_or_trace_has_no_such_header() -> None:
    message = message_of(
        event(event_type=None, traceparent="nonsense\r\nx: y"), identifier="7-8", message_bytes_max=MEBIBYTE
    )

    assert headers_of(message.headers).keys() == {"Nats-Msg-Id", "Noetl-Event-Id"}


def test_headers_fit_however_long_the_type_is() -> None:
    message = message_of(event(event_type="é" * 1_000_000), identifier="7-8", message_bytes_max=MEBIBYTE)

    assert len(message.headers) < 65_535


def test_a_large_body_goes_by_reference() -> None:
    fits, too_large = "x" * BODY_BYTES_MAX, "x" * (BODY_BYTES_MAX + 1)

    assert message_of(event(fits), identifier="7-8", message_bytes_max=MEBIBYTE).body == fits.encode()
    message = message_of(event(too_large), identifier="7-8", message_bytes_max=MEBIBYTE)

    assert is_reference(message)
    assert headers_of(message.headers)["Noetl-Payload"] == "reference"
    assert orjson.loads(message.body) == {
        "event_id": 8,
        "execution_id": 7,
        "tenant_id": "acme",
        "organization_id": "emea",
        "event_type": "step.exit",
        "sha256": hashlib.sha256(too_large.encode()).hexdigest(),
        "byte_length": len(too_large),
    }


def test_the_servers_limit_counts_headers_too() -> None:
    body = "é" * 500
    whole = message_of(event(body), identifier="7-8", message_bytes_max=MEBIBYTE)

    assert not is_reference(message_of(event(body), identifier="7-8", message_bytes_max=whole.byte_length))
    assert is_reference(message_of(event(body), identifier="7-8", message_bytes_max=whole.byte_length - 1))


def test_a_body_left_in_the_database_goes_by_its_digest() -> None:
    left = Event(7, 8, None, "default", "default", None, None, 5_000_000, "ab" * 32)

    message = message_of(left, identifier="7-8", message_bytes_max=MEBIBYTE)

    assert orjson.loads(message.body)["sha256"] == "ab" * 32


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_a_key_is_read_back_from_its_message_ids(execution_id: int, event_id: int) -> None:
    assert key_of(message_id(execution_id, event_id)) == (execution_id, event_id)
    assert key_of(repair_id(execution_id, event_id, now_ms=12)) == (execution_id, event_id)


@pytest.mark.parametrize("text", ["", "7", "7-", "a-b", "7-8-9", "7-8-r", "outbox-0-7"])
def test_other_ids_are_nobodys(text: str) -> None:
    assert key_of(text) is None


def test_header_values_stay_on_their_line() -> None:
    assert encode_headers({"A": "b\r\nC: d"}) == b"NATS/1.0\r\nA: b  C: d\r\n\r\n"


@pytest.mark.parametrize(
    ("code", "error_code", "about"),
    [
        (400, 10054, Refused.MESSAGE),
        (400, 10077, Refused.STREAM),
        (404, 10059, Refused.STREAM),
        (503, 10077, Refused.STREAM),
        (503, 99_999, Refused.STREAM),
        (400, 99_999, Refused.UNCLEAR),
    ],
)
def test_refusals_are_blamed_on_the_right_one(code: int, error_code: int, about: Refused) -> None:
    assert refusal(code=code, error_code=error_code, text="no").about is about


def keys(*places: tuple[int, int]) -> list[Key]:
    return [Key(xact, event_id, number, None) for number, (xact, event_id) in enumerate(places)]


def test_a_cursor_stands_behind_the_part_that_is_done() -> None:
    page = keys((1, 1), (1, 2), (2, 1), (2, 2))

    assert settled(page, {0, 1, 2, 3}) == 4
    assert settled(page, {0, 1, 3}) == 2
    assert settled(page, {1, 2, 3}) == 0


def test_a_cursor_never_stands_between_events_that_share_a_place() -> None:
    page = keys((1, 1), (1, 2), (1, 2), (1, 2))

    assert settled(page, {0, 1, 2}) == 1
    assert settled(page, {0, 1, 2, 3}) == 4


def test_a_batch_takes_what_fits_but_at_least_something() -> None:
    page = keys((1, 1), (1, 2), (1, 2), (1, 3))

    assert fitting(page, [1, 1, 1, 1], bytes_max=10) == 4
    assert fitting(page, [1, 1, 1, 1], bytes_max=3) == 3
    assert fitting(page, [1, 1, 1, 1], bytes_max=2) == 1
    assert fitting(page, [50, 1, 1, 1], bytes_max=2) == 1
    assert fitting(page[1:], [5, 5, 1], bytes_max=2) == 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30),
    st.sets(st.integers(0, 29)),
)
def test_the_cursor_passes_nothing_that_is_not_done(places: list[tuple[int, int]], done: set[int]) -> None:
    page = keys(*sorted(places))

    count = settled(page, done)

    assert set(range(count)) <= done
    passed = {(key.xact_id, key.event_id) for key in page[:count]}
    assert not passed & {(key.xact_id, key.event_id) for key in page[count:]}


def test_hash_and_cut_leave_no_dot_at_the_end() -> None:
    subject = subject_of("a" * 199 + "." + "b" * 100)

    assert is_subject(subject)
    assert re.fullmatch(r"noetl\.events\.a{199}-[0-9a-f]{16}", subject)
