"""report.html in a real browser: it loads without errors, shows its charts, fits a phone, answers the pointer."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from fedslr.report import live_report
from fedslr.report.html_report import write_report
from test_report import HOSTILE, ROOT, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

PROBE = """<body style="margin:0"><iframe id="f" style="border:0;width:{width}px;height:800px" src="{source}"></iframe>
<pre id="out"></pre><script>
document.getElementById("f").onload = () => {{
  const view = document.getElementById("f").contentWindow, page = view.document, found = {{}};
  const style = (e) => view.getComputedStyle(e);
  const text = page.querySelector(".chart text").getBoundingClientRect();
  found.overflow = page.documentElement.scrollWidth - view.innerWidth;
  found.charts = [...page.querySelectorAll("svg.chart")].map((s) => s.getBoundingClientRect().width);
  found.letter = text.height;
  found.background = style(page.body).backgroundColor;
  found.alerts = page.querySelectorAll("main script, main img").length;
  const svg = page.querySelector("svg.lines"), box = svg.getBoundingClientRect();
  const moved = {{ bubbles: true, clientX: box.left + box.width - 8, clientY: box.top + 50 }};
  svg.dispatchEvent(new view.PointerEvent("pointermove", moved));
  found.tip = page.getElementById("tip").hidden ? "" : page.getElementById("tip").innerText;
  const edge = page.getElementById("tip").getBoundingClientRect();
  found.inside = edge.left >= 0 && edge.right <= view.innerWidth;
  svg.focus();
  svg.dispatchEvent(new view.KeyboardEvent("keydown", {{ bubbles: true, key: "ArrowLeft" }}));
  found.keyed = page.getElementById("tip").innerText;
  const first = page.querySelector(".legend input");
  if (first) {{
    first.click();
    found.hidden = [...page.querySelectorAll("main ." + first.id)].every((e) => style(e).display === "none");
    svg.dispatchEvent(new view.PointerEvent("pointermove", moved));
    found.without = page.getElementById("tip").innerText;
  }}
  document.getElementById("out").textContent = JSON.stringify(found);
}};
</script>"""


def browse(address: str, folder: Path, *options: str) -> tuple[str, str]:
    """The page's elements after its scripts have run, and what the browser complained about."""
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    fixed += [f"--user-data-dir={folder / 'profile'}", "--allow-file-access-from-files", "--enable-logging=stderr"]
    call = [str(CHROMIUM), *fixed, "--virtual-time-budget=3000", *options, "--dump-dom", address]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(complaints)


def probe(report: Path, width: int, *options: str) -> dict[str, Any]:
    """Open a report in a frame of some width, use it, and say what was seen."""
    path = report.parent / f"probe-{width}.html"
    path.write_text(PROBE.format(width=width, source=report.as_uri()))
    dom, complaints = browse(path.as_uri(), report.parent, *options)
    assert complaints == ""
    found = re.search(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("comparison")
    for name in ("fedslr", "fedavg", HOSTILE):
        write_run(home / f"run{len(list(home.iterdir()))}", name=name, rounds=8)
    write_report([home], home / "report.html")
    return home / "report.html"


def test_a_comparison_on_a_desk(comparison):
    seen = probe(comparison, 1200)
    assert seen["overflow"] <= 0
    assert len(seen["charts"]) >= 7
    assert min(seen["charts"]) > 300
    assert "communication round 8" in seen["tip"]
    assert "fedavg" in seen["tip"]
    assert "communication round" in seen["keyed"]
    assert seen["hidden"]
    assert seen["without"] != seen["tip"]
    assert seen["alerts"] == 0


def test_a_comparison_on_a_phone(comparison):
    seen = probe(comparison, 360)
    assert seen["overflow"] <= 0
    assert min(seen["charts"]) > 300
    assert max(seen["charts"]) <= 360
    assert seen["letter"] >= 10
    assert seen["inside"]


def test_a_report_in_the_dark(comparison):
    light = probe(comparison, 800)["background"]
    dark = probe(comparison, 800, "--blink-settings=preferredColorScheme=0")["background"]
    assert light == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", dark))) < 60


def test_a_thousand_rounds(tmp_path):
    report, runs = tmp_path / "report.html", ROOT / "results" / "cifar10-dirichlet0.1"
    write_report([runs / "fedslr", runs / "fedavg"], report)
    seen = probe(report, 360)
    assert seen["overflow"] <= 0
    accuracy = json.loads((runs / "fedslr" / "summary.json").read_text())["accuracy"]["personal"]
    assert "fedslr, personal" in seen["tip"]
    assert f"{100 * accuracy:.4g}" in seen["tip"]


def test_a_smuggled_script_does_not_run(comparison, tmp_path):
    """What the page's policy is for; and that the other tests would hear a complaint."""
    report = tmp_path / "report.html"
    report.write_text(comparison.read_text().replace("<main>", "<main><script>document.title = 'taken'</script>"))
    dom, complaints = browse(report.as_uri(), tmp_path)
    assert "<title>taken" not in dom
    assert "Content Security Policy" in complaints


def test_a_watched_page_renews_itself(tmp_path, monkeypatch):
    """A round comes in between two looks, and the page shows it."""
    folder = write_run(tmp_path / "run", rounds=2, planned=9)
    metrics = folder / "metrics.jsonl"
    third = json.dumps(json.loads(metrics.read_text().splitlines()[-1]) | {"round": 3}) + "\n"
    seen: list[str] = []
    look = live_report.stamp

    def stamp(place: Path) -> str:
        # The first look is the page's own.
        if len(seen) == 1:
            with metrics.open("a") as file:
                file.write(third)
        seen.append(look(place))
        return seen[-1]

    monkeypatch.setattr(live_report, "stamp", stamp)
    with live_report.ReportServer(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        dom, complaints = browse(f"http://127.0.0.1:{server.server_port}/", tmp_path, "--virtual-time-budget=9000")
        server.shutdown()
        thread.join()
    assert complaints == ""
    assert "3 of 9 rounds" in dom
    assert "2 of 9 rounds" not in dom
