"""A caller's trace, and what is none."""

from __future__ import annotations

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
OTHER_TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

MALFORMED = [
    "",
    "00",
    TRACEPARENT.upper(),
    f"{TRACEPARENT}-01",
    f" {TRACEPARENT}",
    f"{TRACEPARENT}\n",
    f"ff{TRACEPARENT[2:]}",
    f"00-{'0' * 32}-b7ad6b7169203331-01",
    f"00-{TRACE}-{'0' * 16}-01",
    TRACEPARENT.replace("a", "g"),
    TRACEPARENT.replace("0", "٠"),
]
