"""Executions as NoETL's workers would tell them: fan-out, a loop, a failure that is tried again, business objects.

Pure: ids and times are handed in, so the same arguments tell the same story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import orjson

from noetl_grpc.client.events import EventEnvelope


@dataclass(frozen=True, slots=True)
class Story:
    """One execution: what it is about, and its events in order."""

    title: str
    execution_id: int
    events: tuple[EventEnvelope, ...]


class _Teller:
    """Collects the events of one execution."""

    def __init__(
        self, next_id: Callable[[], int], *, catalog_id: int, parent_id: int, began: datetime
    ) -> None:
        self._next_id = next_id
        self._catalog_id = catalog_id
        self._parent_id = parent_id
        self._now = began
        self.execution_id = next_id()
        self.events: list[EventEnvelope] = []

    def new_id(self) -> int:
        return self._next_id()

    def tell(self, event_type: str, step: str = "", *, after_ms: int = 40, **fields: Any) -> int:
        """One event, so many milliseconds after the one before."""
        self._now += timedelta(milliseconds=after_ms)
        event_id = self._next_id()
        for name in ("context", "result", "meta", "payload_ref"):
            if name in fields:
                fields[f"{name}_json"] = orjson.dumps(fields.pop(name)).decode()
        self.events.append(
            EventEnvelope(
                execution_id=self.execution_id,
                event_id=event_id,
                catalog_id=self._catalog_id,
                parent_execution_id=self._parent_id,
                event_type=event_type,
                node_id=step or None,
                node_name=step or None,
                node_type="step" if step else None,
                created_at=self._now,
                event_time=self._now,
                producer="noetl-grpc demo",
                prev_event_id=self.events[-1].event_id if self.events else None,
                **fields,
            )
        )
        return event_id

    def command(self, step: str, worker: str, *, took_ms: int, fails: str = "", **meta: Any) -> None:
        """A command from its issue to its end."""
        command_id = self.new_id()
        given: dict[str, Any] = {"command_id": command_id, "meta": {**meta, "worker_id": worker}}
        self.tell("command.issued", step, after_ms=5, **given)
        self.tell("command.claimed", step, after_ms=15, worker_id=worker, **given)
        self.tell("command.started", step, after_ms=5, worker_id=worker, **given)
        if fails:
            self.tell("command.failed", step, after_ms=took_ms, worker_id=worker, error=fails, **given)
            return
        result = {"status": "success", "context": {"took_ms": took_ms}}
        self.tell("command.completed", step, after_ms=took_ms, worker_id=worker, result=result, **given)


def tell_hello(teller: _Teller) -> str:
    """The shortest that there is."""
    teller.tell("playbook.initialized", context={"workload": {"name": "world"}})
    teller.tell("step.enter", "start")
    teller.command("start", "worker-a", took_ms=80)
    teller.tell("step.exit", "start", result={"status": "success", "context": {"greeting": "Hello, world!"}})
    teller.tell("playbook.completed")
    return "hello"


def tell_order(teller: _Teller) -> str:
    """A loop over the lines of an order, with the order as a business object."""
    order = f"A-{teller.execution_id % 10_000:04d}"
    lines = ("tea", "cup", "spoon")
    loop_id = str(teller.new_id())

    def about(**change: Any) -> dict[str, Any]:
        return {"business_object": {"type": "order", "id": order, **change}}

    teller.tell("playbook.initialized", context={"workload": {"order_id": order}})
    teller.tell("order.created", "start", meta=about(state={"lines": len(lines), "paid": False}))
    teller.tell("loop.started", "reserve", meta={"loop_id": loop_id, "collection_size": len(lines)})
    for index, sku in enumerate(lines):
        worker = f"worker-{'abc'[index % 3]}"
        teller.command("reserve", worker, took_ms=60 + 30 * index, loop_id=loop_id, sku=sku)
    teller.tell("loop.done", "reserve", meta={"loop_id": loop_id})
    teller.tell("order.updated", "pay", after_ms=120, meta=about(patch={"paid": True, "total": "23.50"}))
    teller.tell("playbook.completed")
    return f"order {order}: a loop, a business object"


def tell_import(teller: _Teller) -> str:
    """A fan-out into frames of rows, gathered again, with results that are kept elsewhere."""
    stage_id = teller.new_id()
    frames = [teller.new_id() for _ in range(4)]
    teller.tell("playbook.initialized", context={"workload": {"table": "customers"}})
    teller.tell("stage.opened", "import", stage_id=stage_id, meta={"kind": "fanout"})
    for number, frame_id in enumerate(frames):
        given: dict[str, Any] = {"stage_id": stage_id, "frame_id": frame_id}
        teller.tell("frame.dispatched", "import", after_ms=10, meta={"attempt": 1}, **given)
        teller.tell("frame.started", "import", after_ms=15, worker_id=f"worker-{'abc'[number % 3]}", **given)
    for number, frame_id in enumerate(frames):
        rows = 250 + 10 * number
        teller.tell(
            "frame.committed",
            "import",
            after_ms=70,
            stage_id=stage_id,
            frame_id=frame_id,
            meta={"row_count": rows, "events_emitted": 1, "cursor": {"offset": 250 * number, "limit": 250}},
            payload_ref={
                "ref": f"noetl://results/{frame_id}",
                "media_type": "application/json",
                "row_count": rows,
            },
        )
    closing = {
        "frame_count": len(frames),
        "row_count": 1060,
        "events_emitted": len(frames),
        "failed_count": 0,
    }
    teller.tell("stage.closed", "import", stage_id=stage_id, meta=closing)
    teller.tell("playbook.completed")
    return "import of 1,060 rows: a fan-out"


def tell_retry(teller: _Teller) -> str:
    """A step that fails twice before it succeeds."""
    teller.tell("playbook.initialized", context={"workload": {"url": "https://example.org/rates"}})
    teller.tell("step.enter", "fetch")
    for attempt, wait_ms in ((1, 200), (2, 400)):
        teller.command("fetch", "worker-b", took_ms=150, fails="503 Service Unavailable", attempt=attempt)
        teller.tell("step.retry", "fetch", after_ms=wait_ms, meta={"attempt": attempt + 1})
    teller.command("fetch", "worker-c", took_ms=90, attempt=3)
    teller.tell("step.exit", "fetch", result={"status": "success", "context": {"rates": 31}})
    teller.tell("playbook.completed")
    return "fetch: fails twice, then succeeds"


def tell_failure(teller: _Teller) -> str:
    """One that ends badly."""
    teller.tell("playbook.initialized", context={"workload": {"to": "ann@example.org"}})
    teller.tell("step.enter", "send")
    teller.command("send", "worker-a", took_ms=300, fails="mailbox does not exist")
    teller.tell("playbook.failed", "send", error="mailbox does not exist", status="FAILED")
    return "send: fails for good"


TELLERS = (tell_hello, tell_order, tell_import, tell_retry, tell_failure)


def stories(
    next_id: Callable[[], int], *, catalog_id: int, parent_id: int, now: Callable[[], datetime]
) -> Iterator[Story]:
    """One after the other, for ever."""
    while True:
        for tell in TELLERS:
            # It has just happened: replays then show a past, not a future.
            teller = _Teller(
                next_id, catalog_id=catalog_id, parent_id=parent_id, began=now() - timedelta(seconds=3)
            )
            title = tell(teller)
            yield Story(title, teller.execution_id, tuple(teller.events))
