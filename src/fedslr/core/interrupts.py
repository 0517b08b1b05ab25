"""Stopping a run by ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a run to stop."""
ECHO_SECONDS = 0.1
"""A signal that arrives again within this time belongs to the same request.

Launchers and `timeout` send a signal to a process and then to its group.
"""


class Stop:
    """A request to stop a run; false until the first signal."""

    at: float | None = None
    """The time of the first signal."""

    def __bool__(self) -> bool:
        return self.at is not None


def stop_on_ctrl_c(stop: Stop, warn: Callable[[str], None]) -> AbstractContextManager[object]:
    """Let ctrl-C end a run after its current round, unless the program has its own handler of SIGINT."""
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
    """Let a signal end a run after its current round; a second signal raises KeyboardInterrupt.

    With `ignore_afterwards` the process ignores the signals after the block. Several processes need this, because their
    launcher sends signals to all of them as soon as one process ends.
    """
    stop = Stop() if stop is None else stop

    def ask(number: int, frame: object) -> None:
        if stop.at is None:
            stop.at = monotonic()
            warn("stopping after this round; press ctrl-C again to stop at once")
        elif monotonic() - stop.at > ECHO_SECONDS:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ignore_afterwards else handler)
