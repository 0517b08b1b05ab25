"""Numbers as text for people."""

from __future__ import annotations


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign, such as "+0.25"."""
    return f"{value:+.{digits}f}".replace("-", "−")


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(size: float) -> str:
    """Return a number of bytes in the largest fitting unit, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_count(value: float) -> str:
    """Return a number of parameters with three digits, such as "11.2M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
