import json

import pytest

from noetl_grpc.core.decode import DEPTH_MAX, decode_column, decode_object
from noetl_grpc.core.fold import Fold, Identity
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.errors import EventMalformed


def no_problem(row: int, problem: str) -> None:
    raise AssertionError(f"row {row} {problem}")


@pytest.mark.parametrize(
    "text",
    [
        "12345678901234567890123",
        "-18446744073709551617",
        "18446744073709551615",
        "0.12345678901234567890123",
        '{"a": [1, {"b": 100000000000000000000}], "c": 1.5}',
        "1" + "0" * 400 + ".5",
        '"98765432109876543210987"',
        "[" * DEPTH_MAX + "]" * DEPTH_MAX,
        '"' + "[" * 2000 + '"',
    ],
)
def test_values_are_those_of_the_standard_decoder(text: str) -> None:
    decoded = decode_column([text, None, '{"plain": 1}'], no_problem)

    assert repr(decoded) == repr([json.loads(text), None, {"plain": 1}])


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 12345678901234567890123, "b": [-18446744073709551617,18446744073709551616]}',
        '{"sha": "%s", "n":  99999999999999999999}' % ("1" * 64),
        '{"a": 1.5, "b": "é"}',
    ],
)
def test_an_object_is_that_of_the_standard_decoder(text: str) -> None:
    assert repr(decode_object(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["[]", "null", "{", "1" * 30, '{"a":' * 5000, '{"a": %s}' % ("9" * 5000)])
def test_what_is_no_object_is_none(text: str) -> None:
    assert decode_object(text) is None


def test_only_rows_with_a_long_number_are_decoded_slowly() -> None:
    texts = [
        '{"sha": "%s"}' % ("1" * 64),
        None,
        "5",
        "[100000000000000000000]",
        '"é"',
        "99999999999999999999",
    ]

    assert decode_column(texts, no_problem) == [{"sha": "1" * 64}, None, 5, [10**20], "é", 10**20 - 1]


def test_line_breaks_inside_a_text_do_not_confuse_rows() -> None:
    texts = ['{\n "a": 1\n}', "100000000000000000000"]

    assert decode_column(texts, no_problem) == [{"a": 1}, 10**20]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("9" * 5000, "holds a number that is too long"),
        ("[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1), f"nests deeper than {DEPTH_MAX} levels"),
        ('{"a":' * 3000 + "1" + "}" * 3000, f"nests deeper than {DEPTH_MAX} levels"),
    ],
)
def test_what_cannot_be_decoded_is_reported_and_the_rest_is_kept(text: str, problem: str) -> None:
    problems = []

    decoded = decode_column(["1", text, "2"], lambda row, what: problems.append((row, what)))

    assert decoded == [1, None, 2]
    assert problems == [(1, problem)]


def row(event_id: int, meta: str | None) -> tuple[object, ...]:
    return (event_id, "note", None, None, meta, None, None, None, None, None, None, None)


def test_an_undecodable_meta_is_a_warning_under_union_and_an_error_under_the_strict_rules() -> None:
    rows = [row(1, '{"stage_id": 1}'), row(2, "9" * 5000)]
    folded = Fold(Identity(1), FoldRules.UNION)

    folded.apply_rows(rows)

    assert folded.state["event_count"] == 2
    assert list(folded.state["stages"]) == ["1"]
    assert [(warning.event_id, warning.path) for warning in folded.warnings] == [(2, "meta")]
    with pytest.raises(EventMalformed) as refused:
        Fold(Identity(1), FoldRules.PYTHON_4_26).apply_rows(rows)
    assert refused.value.metadata == {"event_id": "2", "path": "meta"}
