"""Calls as spans, for whoever wants them: what an observer sees of a call is all that a span needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from noetl_grpc import calls
from noetl_grpc.calls import Call
from noetl_grpc.interceptors.access import MethodObserver
from noetl_grpc.metrics import Metrics

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans


class TracedObserver(MethodObserver):
    """Also makes a span of each call of its method."""

    def __init__(self, metrics: Metrics, *, spans: Spans, service: str, method: str, kind: str) -> None:
        super().__init__(metrics, service=service, method=method, kind=kind)
        self._spans = spans
        self._name = f"{service}/{method}"

    def start(self) -> float:
        call = calls.current()
        call.span = self._spans.begin_call(
            self._name, traceparent=call.traceparent, tracestate=call.header("tracestate")
        )
        return super().start()

    def finish(self, call: Call, code: grpc.StatusCode, began: float, *, reason: str = "") -> None:
        super().finish(call, code, began, reason=reason)
        if call.span is not None:
            call.span.end(code, reason=reason)
