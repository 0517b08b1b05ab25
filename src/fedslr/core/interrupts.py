"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a run to stop."""
ECHO_SECONDS = 0.1
"""A signal that arrives again within this time is the same request.

Launchers and `timeout` send a signal to a process and again to its group.
"""


class Stop:
    """Whether and when somebody asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False
        self.at = 0.0

    def __bool__(self) -> bool:
        return self.asked


def stop_on_ctrl_c(stop: Stop, warn: Callable[[str], None]) -> AbstractContextManager[object]:
    """Let ctrl-C end a run after its current round, unless the caller has a handler of its own."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return stop_on_signal(warn, stop, [signal.SIGINT])
    return nullcontext()


@contextmanager
def stop_on_signal(
    warn: Callable[[str], None],
    stop: Stop | None = None,
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
    ignore_afterwards: bool = False,
) -> Iterator[Stop]:
    """Let ctrl-C or SIGTERM end a run after its current round; a second signal ends it at once.

    With `ignore_afterwards` the process ignores the signals once the run has ended. Several processes need this,
    because their launcher ends all of them as soon as one ends.
    """
    stop = Stop() if stop is None else stop

    def ask(number: int, frame: object) -> None:
        if not stop.asked:
            stop.asked, stop.at = True, monotonic()
            warn("stopping after this round; once more to stop at once")
        elif monotonic() - stop.at > ECHO_SECONDS:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ignore_afterwards else handler)
