"""Canonical JSON against its specification, written out here a second time."""

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from noetl_grpc.core.canonical import canonical_json, contains_float
from noetl_grpc.core.decode import decode_column

text = st.text(st.characters(), max_size=8)
numbers = st.one_of(
    st.integers(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, text),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=20,
)

SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\b": r"\b", "\f": r"\f", '"': r"\"", "\\": r"\\"}


def specified(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return specified_float(value)
        case str():
            return '"' + "".join(map(specified_character, value)) + '"'
        case list():
            return "[" + ",".join(map(specified, value)) + "]"
    keys = sorted(value, key=lambda key: [ord(character) for character in key])
    return "{" + ",".join(f"{specified(key)}:{specified(value[key])}" for key in keys) + "}"


def specified_character(character: str) -> str:
    if character in SHORT:
        return SHORT[character]
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    if code > 0xFFFF:
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
    return f"\\u{code:04x}"


def specified_float(value: float) -> str:
    """Shortest digits that read back the same; plain from 1e-4 up to 1e16, else with an exponent."""
    sign, digits, power = shortest(value)
    if value != 0 and not -4 <= power < 16:
        mantissa = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
        return f"{sign}{mantissa}e{'-' if power < 0 else '+'}{abs(power):02d}"
    if power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    digits = digits.ljust(power + 1, "0")
    return f"{sign}{digits[: power + 1]}.{digits[power + 1 :] or '0'}"


def shortest(value: float) -> tuple[str, str, int]:
    """Sign, digits and the power of ten of the first digit, by trying one digit more each time."""
    sign = "-" if math.copysign(1, value) < 0 else ""
    exact = abs(Decimal(value))
    if not exact:
        return sign, "0", 0
    for precision in range(1, 18):
        candidates = []
        for rounding in (ROUND_FLOOR, ROUND_CEILING):
            candidate = Context(prec=precision, rounding=rounding).plus(exact)
            if float(candidate) == abs(value):
                candidates.append(candidate)
        if candidates:
            # Of two that are equally near the one with an even last digit.
            nearest = min(candidates, key=lambda c: (abs(c - exact), c.as_tuple().digits[-1] % 2)).normalize()
            return sign, "".join(map(str, nearest.as_tuple().digits)), nearest.adjusted()
    raise AssertionError(value)


@given(values)
@example(562949953421312.8)
@example({"a": [1.5, "\x7f", "\U0001f600", 2**64, -0.0, 1e22, 5e-324, 1e16, 123456789012345680.0]})
def test_text_is_as_specified(value: Any) -> None:
    assert canonical_json(value).decode() == specified(value)


@given(values)
def test_decoding_a_column_gives_what_was_encoded(value: Any) -> None:
    encoded = canonical_json(value).decode()

    (decoded,) = decode_column([encoded], lambda row, problem: None)

    assert repr(decoded) == repr(json.loads(encoded))


@given(values)
def test_floats_are_found_at_any_depth(value: Any) -> None:
    assert contains_float(value) == ("float" in kinds(value))


def kinds(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(kinds, value.values()))
    if isinstance(value, list):
        return set().union(*map(kinds, value))
    return {type(value).__name__}
