"""Run fedslr in a process that kills itself with SIGKILL at a chosen event, so that no test waits for a moment.

python dying.py record N [RANK]  FEDSLR ARGUMENTS…   before it writes its N-th record; only in the process of RANK
python dying.py calls N          FEDSLR ARGUMENTS…   N function calls after it wrote its first record
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner: type, name: str, after: bool, count: int = 0) -> None:
    """Kill this process at a method's call of that number, counted from 0: before the call or after it."""
    real, left = getattr(owner, name), [count]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and not after:
            die()
        made = real(*args, **options)
        if left[0] < 0:
            die()
        return made

    setattr(owner, name, call)


def die_after_calls(count: int) -> None:
    """Kill this process when it has called so many functions, of Python or of C: anywhere, but always at one place."""
    left = [count]

    def look(frame: Any, event: str, argument: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            die()

    sys.setprofile(look)


def _on_record(act: Callable[[int], None]) -> None:
    """Have `act` called with the number of every record, from 1 on, before it is written."""
    from fedslr.storage.run_folder import RunFolder, SharedFolder

    written = [0]
    for kind in (RunFolder, SharedFolder):

        def append(folder: Any, record: Any, real: Any = kind.append) -> None:
            written[0] += 1
            act(written[0])
            real(folder, record)

        kind.append = append  # type: ignore[method-assign]


def main() -> None:
    event, count, *rest = sys.argv[1:]
    if rest[0].isdigit():
        event = event if rest.pop(0) == os.environ.get("RANK") else "never"
    if event == "record":
        _on_record(lambda number: die() if number == int(count) else None)
    if event == "calls":
        _on_record(lambda number: die_after_calls(int(count)) if number == 2 else None)
    from fedslr.__main__ import main as fedslr

    sys.argv = ["fedslr", *rest]
    fedslr()


if __name__ == "__main__":
    main()
