"""Runs work in background threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Workers:
    """Daemon threads that run submitted tasks in order. They do not keep the program alive."""

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._tasks.get()()

    def submit[Result](self, make: Callable[..., Result], *args: Any) -> Future[Result]:
        """Schedules `make(*args)`. The future's `result` raises any error."""
        future: Future[Result] = Future()

        def task() -> None:
            try:
                future.set_result(make(*args))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(task)
        return future
