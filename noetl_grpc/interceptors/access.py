"""What a call leaves behind: the `grpc_server_*` series and a log line, never a token or payload."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

import grpc

from noetl_grpc.calls import Call
from noetl_grpc.metrics import Metrics

logger = logging.getLogger("noetl_grpc.access")

_NUMBERS = {code: code.value[0] for code in grpc.StatusCode}


class MethodObserver:
    """Counts and logs the calls of one method; its series are looked up once, not per call."""

    def __init__(self, metrics: Metrics, *, service: str, method: str, kind: str) -> None:
        self._series = metrics.rpc.of(kind=kind, service=service, method=method)

    def start(self) -> float:
        """Count a call and return when it began."""
        self._series.started += 1
        return time.perf_counter()

    def finish(self, call: Call, code: grpc.StatusCode, began: float, *, reason: str = "") -> None:
        """Count and log how it ended."""
        seconds = time.perf_counter() - began
        self._series.finish(_NUMBERS[code], seconds)
        level = logging.DEBUG if code is grpc.StatusCode.OK else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "%s %s",
                call.method,
                code.name,
                extra={
                    "method": call.method,
                    "code": code.name,
                    "reason": reason,
                    "duration_ms": round(seconds * 1000, 3),
                    "request_id": call.request_id,
                    "caller": call.caller.name,
                },
            )


class Observers:
    """One observer per method that is served; all others share one, so that a caller can't invent series."""

    def __init__(
        self,
        metrics: Metrics,
        methods: Iterable[tuple[str, str, str]],
        *,
        makers: Mapping[str, Callable[..., MethodObserver]] | None = None,
    ) -> None:
        """`makers` are what makes the observers of these services; MethodObserver makes the others."""
        makers = makers or {}
        self._by_method = {
            f"/{service}/{method}": makers.get(service, MethodObserver)(
                metrics, service=service, method=method, kind=kind
            )
            for service, method, kind in methods
        }
        self._other = MethodObserver(metrics, service="unknown", method="unknown", kind="unknown")

    def of(self, method: str) -> MethodObserver:
        """The observer of `/package.Service/Method`."""
        return self._by_method.get(method, self._other)
