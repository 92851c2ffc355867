"""Stopwatch and memory readings for the command-line tools."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


class Stopwatch:
    """Seconds of named stages, in the order they were first timed. A stage timed again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def peak_bytes() -> int | None:
    """The most memory this process ever held, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Memory this process holds now, in bytes; its peak where the system only tells that."""
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return peak_bytes()
    import resource

    return pages * resource.getpagesize()


def gigabytes(size: int | None) -> str:
    return "unknown on this system" if size is None else f"{size / 1e9:.2f} GB"
