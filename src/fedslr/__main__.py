"""The entry point of the command line."""

from __future__ import annotations

from fedslr.cli.main import main as run_command_line
from fedslr.core import startup


def main() -> None:
    """Run the command line."""
    startup.finish_importing()
    run_command_line()


if __name__ == "__main__":
    main()
