"""Pages of a list: how large one is, and the opaque token that says where the next begins.

A token holds the place and a hash of the filters, so that one used with other filters is refused instead of
silently giving rows from the middle of another list.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

from noetl_grpc.errors import InvalidRequest

SIZE_DEFAULT = 50
SIZE_MAX = 1000

_ALTERED = "is not a next_page_token of this list with the same filters"


def page_size(asked: int, *, field: str = "page_size") -> int:
    """How many items a page has; 0 asks for the default."""
    if asked < 0:
        raise InvalidRequest(field, "must not be negative")
    return min(asked or SIZE_DEFAULT, SIZE_MAX)


def encode_token(place: Sequence[int | str], filters: object) -> str:
    """The token of the page that begins behind this place."""
    text = orjson.dumps([_digest(filters), *place])
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def decode_token(token: str, filters: object, *, shape: Sequence[type]) -> list[Any] | None:
    """The place in a token, one value of each type in `shape`; None for the first page."""
    if not token:
        return None
    try:
        digest, *rest = orjson.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError):
        raise InvalidRequest("page_token", _ALTERED) from None
    place: list[Any] = rest
    if digest != _digest(filters) or [type(value) for value in place] != list(shape):
        raise InvalidRequest("page_token", _ALTERED)
    return place


def _digest(filters: object) -> str:
    return hashlib.sha256(orjson.dumps(filters, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
