from __future__ import annotations

import html
import re

import fedslr
from conftest import make_federation, mlp
from fedslr import report


def test_a_report_is_one_escaped_file(tmp_path):
    federation = fedslr.Federation.from_arrays(
        [{"x": c.x, "y": c.y, "x_test": c.x_test, "y_test": c.y_test} for c in make_federation([6, 7]).clients],
        name="<script>alert(1)</script>",
    )
    fedslr.run(fedslr.FedSLR(), federation, mlp(), rounds=1, out=tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert html.escape("<script>alert(1)</script>") in page
    assert "<svg" in page
    assert not re.search(r'(src|href)="https?:', page)
    assert "accuracy, personal models" in page


def test_amounts_read_well():
    assert [report.amount(n) for n in (0, 999, 1000, 1.5e6, 2e9, 7e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "2.0 GB",
        "7.0 TB",
    ]
    assert report.percent(0.9555) == "95.5 %"
    assert report.percent(None) == "–"
