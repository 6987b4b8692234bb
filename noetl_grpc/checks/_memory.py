"""How much memory a process takes."""

from __future__ import annotations

from pathlib import Path


class Memory:
    """How far a process has grown above what it had at the beginning, at most; 0 where there is no /proc."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._idle_kb = self._read("VmRSS")

    def grown_mb(self) -> float:
        return round(max(0, self._read("VmHWM") - self._idle_kb) / 1024, 1)

    def _read(self, name: str) -> int:
        if not self._status.exists():
            return 0
        lines = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        return int(lines[name].split()[0])
