"""Messages for JetStream as they go over the wire, and what its refusals mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

_SUBJECT: Final = re.compile(r"[^\s\x00.*>]+(?:\.[^\s\x00.*>]+)*")
_SUBJECT_BYTES_MAX: Final = 1024
#: What a header's one line can't hold.
_CONTROLS: Final = dict.fromkeys((*range(32), 127), " ")


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to the broker. The headers are encoded already: they are counted, and sent, as they are."""

    subject: str
    headers: bytes
    body: bytes

    @property
    def byte_length(self) -> int:
        """What the server's max_payload is about."""
        return len(self.headers) + len(self.body)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where messages go or come from, as a trace tells of it: by names of which there are few."""

    #: A stream, or the subject that a sender chose.
    name: str
    #: The subjects in the stream; empty for a subject.
    template: str = ""


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """NATS's header block. Names are ours and plain; values lose their control characters."""
    lines = "".join(f"{name}: {value.translate(_CONTROLS)}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


@lru_cache(maxsize=1024)
def is_subject(text: str) -> bool:
    """Whether NATS takes this as the subject of one message."""
    return _SUBJECT.fullmatch(text) is not None and len(text.encode()) <= _SUBJECT_BYTES_MAX


class Refused(Enum):
    """Whom a refusal by the broker is about."""

    MESSAGE = "message"
    STREAM = "stream"
    #: The message, if the broker took others at the same time.
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the broker did not store a message."""

    about: Refused
    text: str


#: Message or headers above what the stream takes.
_ABOUT_THE_MESSAGE: Final = frozenset({10054, 10097})
#: Not there, not ours, full, out of resources, busy.
_ABOUT_THE_STREAM: Final = frozenset(
    {10002, 10023, 10028, 10039, 10047, 10059, 10060, 10076, 10077, 10158, 10167}
)


def refusal(*, code: int, error_code: int, text: str) -> Refusal:
    """What JetStream's answer means, by its HTTP-like code and its own."""
    if error_code in _ABOUT_THE_MESSAGE:
        return Refusal(Refused.MESSAGE, text)
    if error_code in _ABOUT_THE_STREAM or not 400 <= code < 500:
        return Refusal(Refused.STREAM, text)
    return Refusal(Refused.UNCLEAR, text)
