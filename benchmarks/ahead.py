"""Work that is done elsewhere: in the background, before its result is wanted, or in a new process."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any


class Workers:
    """Threads that take what is submitted in its order. A program may end before they have."""

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._tasks.get()()

    def submit[Result](self, make: Callable[..., Result], *args: Any) -> Future[Result]:
        """Has `make(*args)` called; an error is that of the future's `result`."""
        future: Future[Result] = Future()

        def task() -> None:
            try:
                future.set_result(make(*args))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(task)
        return future


def in_new_process[Result](
    function: Callable[..., Result], *args: Any, begin: Callable[[], None] | None = None
) -> Result:
    """What a function of a module returns in a process that has done nothing before, but to call `begin`."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=begin) as process:
        return process.submit(function, *args).result()
