from __future__ import annotations

import base64

import pytest

from noetl_grpc.core.paging import decode_token, encode_token, page_size
from noetl_grpc.errors import InvalidRequest

FILTERS = {"states": ["ACTIVE"], "path_prefix": "demo/"}


@pytest.mark.parametrize(("asked", "given"), [(0, 50), (1, 1), (1000, 1000), (1001, 1000), (2**31 - 1, 1000)])
def test_a_page_size_has_a_default_and_a_limit(asked: int, given: int) -> None:
    assert page_size(asked) == given


def test_a_negative_page_size_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="page_size must not be negative"):
        page_size(-1)


def test_a_token_brings_back_its_place() -> None:
    token = encode_token((1, 2**63 - 1, "ä/b"), FILTERS)

    assert decode_token(token, FILTERS, shape=(int, int, str)) == [1, 2**63 - 1, "ä/b"]
    assert decode_token("", FILTERS, shape=(int,)) is None


@pytest.mark.parametrize(
    ("token", "filters"),
    [
        (encode_token((1,), FILTERS), {**FILTERS, "path_prefix": ""}),
        (encode_token((1, 2), FILTERS), FILTERS),
        (encode_token(("1",), FILTERS), FILTERS),
        ("garbage", FILTERS),
        ("ä", FILTERS),
        ("AAAAA", FILTERS),
        (base64.urlsafe_b64encode(b"{}").decode(), FILTERS),
        (base64.urlsafe_b64encode(b"7").decode(), FILTERS),
        (base64.urlsafe_b64encode(b"[]").decode(), FILTERS),
    ],
)
def test_a_token_of_another_list_or_none_at_all_is_refused(token: str, filters: object) -> None:
    with pytest.raises(InvalidRequest, match="page_token is not a next_page_token"):
        decode_token(token, filters, shape=(int,))
