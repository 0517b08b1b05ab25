"""Where the command line begins: before anything that takes time to import."""

from __future__ import annotations

import os
import signal
import sys

from fedslr.errors import INTERRUPTED


def main() -> None:
    """Import the command line and run it; ctrl-C ends both alike."""
    usual = signal.default_int_handler
    if signal.getsignal(signal.SIGINT) is usual:
        # An exception would pass through whatever is half imported, which may take it for a failure of its own.
        signal.signal(signal.SIGINT, _leave)
    from fedslr import cli

    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, usual)
    cli.main()


def _leave(number: int, frame: object) -> None:
    print("stopped before anything was done", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
