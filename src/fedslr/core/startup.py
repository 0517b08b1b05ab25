"""Handling of ctrl-C while the command line imports PyTorch, which takes seconds."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fedslr.core.errors import INTERRUPTED


def exit_on_ctrl_c_while_importing() -> None:
    """Let ctrl-C end the `fedslr` program with one line until `finish_importing` is called; ignore other programs.

    A KeyboardInterrupt would pass through half-imported modules, and some of them treat it as their own failure.
    """
    is_program = any(Path(word).stem == "fedslr" for word in sys.orig_argv[1:3])
    if is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def finish_importing() -> None:
    """Restore the usual meaning of ctrl-C."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: object) -> None:
    print("stopped before anything was done", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
