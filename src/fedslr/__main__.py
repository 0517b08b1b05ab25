"""Where the command line begins: before anything that takes time to import."""

from __future__ import annotations

import os
import signal
import sys

from fedslr.errors import INTERRUPTED, STOPPED


def main() -> None:
    """Import the command line and run it; ctrl-C ends both alike."""
    patient = signal.getsignal(signal.SIGINT)
    if patient is signal.default_int_handler:
        # An exception would pass through whatever is half imported, which may take it for a failure of its own.
        signal.signal(signal.SIGINT, _leave)
    from fedslr import cli

    signal.signal(signal.SIGINT, patient)
    cli.main()


def _leave(number: int, frame: object) -> None:
    print(STOPPED, file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
