"""Draw docs/rooms.svg: the rooms of the package from top to bottom, and an arrow from each room to those it imports.

    python docs/rooms.py            write the picture
    python docs/rooms.py --check    exit with 1 if the picture is out of date

Arrows that point down are on the right. An arrow that points up would be drawn on the left, in red.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fedslr"
PICTURE = Path(__file__).with_suffix(".svg")
STEP, BOX, CENTRE, WIDTH = 46, 26, 330, 700
INK, LINE, WRONG = "#1f2933", "#5b7a99", "#c0392b"
SUBJECTS = {
    "cli": "commands and the progress display",
    "deploy": "server and nodes on Flower",
    "export": "models that ship",
    "run": "recipes, run, compare, sweep",
    "report": "HTML report, tables, figures",
    "engine": "the round loop and its engines",
    "storage": "run folders and checkpoints",
    "channel": "all bytes between client and server",
    "algorithms": "one file per method",
    "data": "datasets and partitions",
    "models": "networks",
    "tasks": "losses",
    "core": "types, trees, proximal operators",
}


def layers() -> list[list[str]]:
    """Return the layers that import-linter enforces, from the top."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [layer.split(" | ") for layer in contract["layers"]]


def imports() -> set[tuple[str, str]]:
    """Return all pairs of a room and another room that it imports."""
    found = set()
    for path in PACKAGE.glob("*/**/*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module == "fedslr":
                modules = [f"fedslr.{alias.name}" for alias in node.names]
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                parts = module.split(".")
                if parts[0] == "fedslr" and len(parts) > 1 and parts[1] != room and (PACKAGE / parts[1]).is_dir():
                    found.add((room, parts[1]))
    return found


def draw(rows: list[list[str]], arrows: set[tuple[str, str]]) -> str:
    """Return the picture as SVG."""
    order = [room for row in rows for room in row]
    height = {room: STEP * (i + 1) for i, room in enumerate(order)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {STEP * (len(order) + 1)}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        f'<rect width="100%" height="100%" fill="white"/><defs>{_head("down", LINE)}{_head("up", WRONG)}</defs>',
    ]
    for start, end in sorted(arrows, key=lambda arrow: (height[arrow[0]], height[arrow[1]])):
        a, b = height[start], height[end]
        side, kind, colour = (1, "down", LINE) if b > a else (-1, "up", WRONG)
        x, bend = CENTRE + side * 62, CENTRE + side * (62 + 0.58 * abs(b - a))
        parts.append(
            f'<path d="M{x} {a + 4} C{bend:.0f} {a + 4} {bend:.0f} {b - 4} {x + side * 3} {b - 4}" fill="none" '
            f'stroke="{colour}" stroke-width="1.2" stroke-opacity="0.75" marker-end="url(#{kind})"/>'
        )
    for row in rows:
        for room in row:
            y = height[room]
            parts.append(
                f'<rect x="{CENTRE - 60}" y="{y - BOX / 2}" width="120" height="{BOX}" rx="5" fill="#eef3f8" '
                f'stroke="{LINE}"/><text x="{CENTRE}" y="{y + 5}" text-anchor="middle" fill="{INK}">{room}</text>'
                f'<text x="{CENTRE - 72}" y="{y + 5}" text-anchor="end" font-size="12" fill="{INK}">'
                f"{SUBJECTS[room]}</text>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
    )


def main() -> None:
    picture = draw(layers(), imports())
    if "--check" in sys.argv:
        sys.exit(PICTURE.read_text("utf-8") != picture and f"{PICTURE} is out of date: python docs/rooms.py")
    PICTURE.write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
