"""JSON columns of event rows as values, exactly as the standard decoder would give them, but fast."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

import orjson

from noetl_grpc.core.canonical import Json, JsonObject

#: Deeper documents can't be written back by a recursive encoder, wherever in a state they end up.
DEPTH_MAX = 400

_DIGITS_TO_ZERO = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))
# orjson reads an integer beyond 64 bits as a float. The shortest of them has nineteen digits, behind a minus.
_LONG_NUMBER = b"0" * 19
_BEFORE_A_NUMBER = b" ,:[-\n"

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')

OnMalformed = Callable[[int, str], None]


def decode_column(texts: Sequence[str | None], on_malformed: OnMalformed) -> list[Json]:
    """Decode one JSON column of a page of rows; SQL NULL gives None.

    A text that can't be decoded is reported with its row's index and what is wrong, and gives None.
    """
    if not any(texts):
        return [None] * len(texts)
    longest = max(map(len, filter(None, texts)), default=0)
    if longest <= 2 * DEPTH_MAX or not any(is_too_deep(text) for text in texts if text):
        # PostgreSQL writes a jsonb value without line breaks, so they tell the rows apart.
        lines = ",\n".join([text or "null" for text in texts]).encode()
        try:
            values: list[Json] = orjson.loads(b"[" + lines + b"]")
        except orjson.JSONDecodeError:
            pass
        else:
            long = _lines_with_long_numbers(lines)
            if not long:
                return values
            if lines.count(b"\n") == len(texts) - 1:
                for index in long:
                    values[index] = _decode_one(index, texts[index], on_malformed)
                return values
    return [_decode_one(index, text, on_malformed) for index, text in enumerate(texts)]


def decode_object(text: str) -> JsonObject | None:
    """One JSON object, exactly as the standard decoder would give it; None if the text is something else."""
    encoded = text.encode()
    try:
        value = orjson.loads(encoded)
        if any(_long_numbers(encoded)):
            value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _lines_with_long_numbers(lines: bytes) -> list[int]:
    """Lines that may hold a number which orjson can't read exactly."""
    found: list[int] = []
    line = counted = 0
    for place in _long_numbers(lines):
        line += lines.count(b"\n", counted, place)
        counted = place
        if line not in found[-1:]:
            found.append(line)
    return found


def _long_numbers(text: bytes) -> Iterator[int]:
    """Where so many digits stand in a row that they may be such a number; never inside a hash or behind a quote."""
    zeros = text.translate(_DIGITS_TO_ZERO)
    place = zeros.find(_LONG_NUMBER)
    while place >= 0:
        if place == 0 or text[place - 1] in _BEFORE_A_NUMBER:
            yield place
        place = zeros.find(_LONG_NUMBER, place + len(_LONG_NUMBER))


def is_too_deep(text: str) -> bool:
    """Whether a JSON text nests deeper than DEPTH_MAX."""
    if len(text) <= 2 * DEPTH_MAX or text.count("{") + text.count("[") <= DEPTH_MAX:
        return False
    depth = 0
    for token in _STRING_OR_BRACKET.findall(text):
        if token in ("[", "{"):
            depth += 1
            if depth > DEPTH_MAX:
                return True
        elif token in ("]", "}"):
            depth -= 1
    return False


def _decode_one(index: int, text: str | None, on_malformed: OnMalformed) -> Json:
    if text is None:
        return None
    if is_too_deep(text):
        on_malformed(index, f"nests deeper than {DEPTH_MAX} levels")
        return None
    try:
        return json.loads(text)
    except ValueError:
        on_malformed(index, "holds a number that is too long")
        return None
