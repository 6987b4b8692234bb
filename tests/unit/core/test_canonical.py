from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from noetl_grpc.core.canonical import canonical_json, checksum, copy_json
from noetl_grpc.core.checksums import id_order


@pytest.mark.parametrize(
    ("value", "text", "digest"),
    [
        ({"a": "é"}, r'{"a":"\u00e9"}', "57e512a1ff02f75e"),
        ({"a": "\U0001f600"}, r'{"a":"\ud83d\ude00"}', "ecbc324dfaa36b60"),
        ({"a": '\x7f\x01\n"\\/'}, r'{"a":"\u007f\u0001\n\"\\/"}', "eb7b58af4495f7ec"),
        (
            {"a": 1.0, "b": 1e16, "c": 1e15, "d": 0.1, "e": -0.0, "f": 1e-7, "g": 123456789012345678901},
            '{"a":1.0,"b":1e+16,"c":1000000000000000.0,"d":0.1,"e":-0.0,"f":1e-07,"g":123456789012345678901}',
            "db7959ad49babea9",
        ),
        (
            {"b": None, "a": True, "A": 1, "é": 2, "_": 3},
            r'{"A":1,"_":3,"a":true,"b":null,"\u00e9":2}',
            "8be78ee0eaf63fe8",
        ),
    ],
)
def test_documented_texts_and_digests(value: Any, text: str, digest: str) -> None:
    assert canonical_json(value).decode() == text
    assert checksum(value).startswith(digest)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2026, 5, 20, 4, 30), '"2026-05-20T04:30:00Z"'),
        (datetime(2026, 5, 20, 4, 30, 0, 5), '"2026-05-20T04:30:00.000005Z"'),
        (datetime(2026, 5, 20, 4, 30, tzinfo=timezone(timedelta(hours=2))), '"2026-05-20T02:30:00Z"'),
        (Decimal("1.50"), '"1.50"'),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (2**64, "18446744073709551616"),
        (-(2**63) - 1, "-9223372036854775809"),
        ("\ud800", r'"\ud800"'),
    ],
)
def test_what_json_alone_does_not_know(value: Any, text: str) -> None:
    assert canonical_json([value]).decode() == f"[{text}]"


@pytest.mark.parametrize(
    ("ids", "ordered"),
    [
        (["10", "2", "100", "9"], ["2", "9", "10", "100"]),
        (["stage-2", "100", "stage-1", "9"], ["9", "100", "stage-1", "stage-2"]),
        (["5", "05"], ["5", "05"]),
        (["05", "5"], ["05", "5"]),
    ],
)
def test_ids_are_ordered_as_numbers_first(ids: list[str], ordered: list[str]) -> None:
    assert sorted(ids, key=id_order) == ordered


def test_the_order_of_ids_puts_null_among_the_texts() -> None:
    assert id_order(42)[0] == 0
    assert id_order(None) == (1, 0, "")


@pytest.mark.parametrize(
    "value",
    [
        {"b": [1, {"a": "é\ud800"}], "a": 123456789012345678901, "": [-0.0, 1e16, 5e-324, True, None]},
        # What an upcaster may have put there is passed on as it is.
        {"at": datetime(2026, 1, 1), "in": [{"amount": Decimal("1.10")}]},
    ],
)
def test_a_copy_is_equal_and_shares_no_container(value: Any) -> None:
    copied = copy_json(value)

    assert repr(copied) == repr(value)
    copied[next(key for key, item in value.items() if isinstance(item, list))][0] = "changed"
    assert repr(copied) != repr(value)
