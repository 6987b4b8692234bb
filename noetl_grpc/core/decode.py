"""JSON columns of event rows as values, exactly as the standard decoder would give them, but fast."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import orjson

from noetl_grpc.core.canonical import Json

#: Deeper documents can't be written back by a recursive encoder, wherever in a state they end up.
DEPTH_MAX = 400

_DIGITS_TO_ZERO = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))
# orjson reads an integer beyond 64 bits as a float. The shortest of them has twenty digits.
_LONG_NUMBER = b"0" * 20

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


def _lines_with_long_numbers(lines: bytes) -> list[int]:
    """Lines with so many digits in a row that they may be a number orjson can't read exactly; mostly a hash."""
    zeros = lines.translate(_DIGITS_TO_ZERO)
    found: list[int] = []
    line = start = 0
    while (place := zeros.find(_LONG_NUMBER, start)) >= 0:
        line += zeros.count(b"\n", start, place)
        found.append(line)
        start = zeros.find(b"\n", place)
        if start < 0:
            break
    return found


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
