"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic

ASKS = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask."""
ECHO = 0.1
"""Seconds in which a signal that comes again is the same one."""


class Stop:
    """Whether somebody asked the run to stop, and when."""

    def __init__(self) -> None:
        self.asked = False
        self.at = 0.0

    def __bool__(self) -> bool:
        return self.asked


def stop_on_ctrl_c(stop: Stop, warn: Callable[[str], None]) -> AbstractContextManager[object]:
    """Ctrl-C ends a run after the round it is in, where Python itself would answer it."""
    ours = threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return stop_on_signal(warn, stop, [signal.SIGINT])
    return nullcontext()


@contextmanager
def stop_on_signal(
    warn: Callable[[str], None],
    stop: Stop | None = None,
    asks: Sequence[signal.Signals] = ASKS,
    ignore_afterwards: bool = False,
) -> Iterator[Stop]:
    """Ctrl-C or SIGTERM ends a run after the round it is in; a second time, at once.

    A process of several that is about to end ignores the signals afterwards: its launcher ends all processes when one
    does. Launchers and `timeout` send a signal to a process and again to its group: what follows at once is an echo.
    """
    stop = Stop() if stop is None else stop

    def ask(number: int, frame: object) -> None:
        if not stop.asked:
            stop.asked, stop.at = True, monotonic()
            warn("stopping after this round; once more to stop at once")
        elif monotonic() - stop.at > ECHO:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in asks}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ignore_afterwards else handler)
