"""The W3C `traceparent`: which texts are one, and what of a delivery carries its caller's on."""

from __future__ import annotations

import re
from typing import Final

from noetl_grpc.core.envelope import Batch

HEADER: Final = "traceparent"

#: Version, trace, parent span, flags. No version is ff, no trace and no span is all zeros.
_SHAPE: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII
)


def is_traceparent(text: str) -> bool:
    """Whether it names a trace; anything else is treated as if it were not there."""
    return _SHAPE.fullmatch(text) is not None


def trace_id(traceparent: str) -> str:
    """The trace that a valid one belongs to."""
    return traceparent[3:35]


def traced_components(batch: Batch, traceparent: str) -> list[str | None]:
    """The column trace_component with the caller's trace for events that say nothing about theirs.

    What a writer put there himself stays as it is, and one that names a trace in its meta is left alone too: the
    column would win over it.
    """
    component = f'{{"{HEADER}": "{traceparent}"}}'
    mention = f'"{HEADER}"'
    return [
        component if own is None and (meta is None or mention not in meta) else own
        for own, meta in zip(batch["trace_component"], batch["meta"], strict=True)
    ]
