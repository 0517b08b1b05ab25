"""Results in Python: progress, callbacks, tables, figures and pages for notebooks."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console
from rich.errors import LiveError

import fedslr
from conftest import make_arrays, mlp
from fedslr.run import execution, progress

NAMES = ["north", "south", "east", "west", "centre"]
OPTIONS: dict[str, Any] = {"rounds": 4, "clients_per_round": 2, "lr": 0.05, "evaluate_every": 2, "engine": "eager"}


@pytest.fixture(scope="module")
def federation() -> fedslr.Federation:
    arrays = make_arrays([5, 11, 3, 8, 7], (6,))
    return fedslr.Federation.from_arrays(arrays, num_classes=3, client_names=NAMES)


@pytest.fixture(scope="module")
def result(federation) -> fedslr.Result:
    return fedslr.run(fedslr.FedSLR(), federation, mlp(), **OPTIONS)


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_shown_to_a_person_or_on_request(federation, monkeypatch, capsys):
    fedslr.run(fedslr.FedAvg(), federation, mlp(), **OPTIONS)
    assert capsys.readouterr().err == ""
    fedslr.run(fedslr.FedAvg(), federation, mlp(), **OPTIONS, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["round 2/4", "round 4/4"]
    assert all("global " in line and "personal " in line for line in lines)
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(progress, "err_console", screen)
    fedslr.run(fedslr.FedAvg(), federation, mlp(), **OPTIONS, progress=False)
    assert screen.file.getvalue() == ""
    fedslr.run(fedslr.FedAvg(), federation, mlp(), **OPTIONS)
    assert "round 4/4" in screen.file.getvalue()


def test_a_second_display_of_a_terminal_is_left_out(federation, monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)

    def refuse(live: Any) -> None:
        raise LiveError("only one")

    monkeypatch.setattr(screen, "set_live", refuse)
    monkeypatch.setattr(progress, "err_console", screen)
    assert fedslr.run(fedslr.FedAvg(), federation, mlp(), **OPTIONS).summary["rounds"] == 4


def test_a_notebook_shows_one_output_that_is_replaced(federation, monkeypatch):
    shown: list[str] = []

    def display(content: dict[str, str], **options: Any) -> SimpleNamespace:
        shown.append(content["text/plain"])
        return SimpleNamespace(update=lambda content, raw: shown.append(content["text/plain"]))

    notebook = ModuleType("IPython.display")
    notebook.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr(progress, "err_console", Console(file=io.StringIO(), force_jupyter=True))
    fedslr.run(fedslr.FedAvg(), federation, mlp(), **OPTIONS)
    assert shown[0].startswith("round 0/4")
    assert shown[-1].startswith("round 4/4")
    assert "personal" in shown[-1]
    assert all("\n" not in text and "\x1b" not in text for text in shown)
    fedslr.compare([fedslr.FedAvg(), "local"], federation, mlp(), **OPTIONS)
    assert shown[-1].startswith("2 runs")


# --- callbacks --------------------------------------------------------------------------------------------------------


def test_a_callback_sees_the_models_of_its_round(federation, result):
    seen: dict[int, Any] = {}

    def look(record, run):
        seen[record.round] = run.global_params, run.personal_params("south"), run.sizes(), run.global_model()

    watched = fedslr.run(fedslr.FedSLR(), federation, mlp(), **OPTIONS, on_round=look)
    assert list(seen) == [1, 2, 3, 4]
    for rounds in (2, 4):
        shorter = fedslr.run(fedslr.FedSLR(), federation, mlp(), **{**OPTIONS, "rounds": rounds})
        shared, own, sizes, model = seen[rounds]
        assert sizes == shorter.summary["parameters"]
        for name, x in shorter.global_params.items():
            assert torch.equal(x, shared[name])
            assert torch.equal(x, model.state_dict()[name])
            assert torch.equal(shorter.personal_params(1)[name], own[name])
    # Looking changes nothing.
    untimed = {"seconds": 0, "seconds_by": {}}
    assert watched.records[-1] | untimed == result.records[-1] | untimed


def test_callbacks_of_one_argument_get_the_record(federation):
    found: list[Any] = []
    for call in (found.append, lambda record, rows=found: rows.append(record), lambda *given: found.extend(given)):
        fedslr.run(fedslr.FedAvg(), federation, mlp(), **{**OPTIONS, "rounds": 1}, on_round=call)
    assert [asdict(record)["round"] for record in found] == [1, 1, 1]
    assert not execution.takes_models(print)
    assert not execution.takes_models(dict)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_frame_has_a_row_per_round(result):
    frame = result.to_frame()
    assert list(frame.index) == [1, 2, 3, 4]
    for key in ("lr", "bytes_down", "accuracy_global", "accuracy_personal", "parameters_global", "seconds"):
        found = [r[key] for r in result.records]
        assert [None if pd.isna(v) else v for v in frame[key]] == found
    assert frame["parameters_personal"].iloc[-1] == result.summary["parameters"]["personal"]
    assert frame["rank"].iloc[-1] == sum(result.records[-1]["rank"].values())
    assert all(pd.api.types.is_scalar(value) for value in frame.to_numpy().ravel())


def test_a_frame_of_clients_has_a_row_per_client(federation, result):
    frame, last = result.clients_frame(), result.records[-1]
    assert list(frame["name"]) == NAMES
    assert list(frame["samples"]) == [5, 11, 3, 8, 7]
    assert list(frame["accuracy_personal"]) == last["accuracy_personal_per_client"]
    assert list(frame["accuracy_global"]) == last["accuracy_global_per_client"]
    assert list(frame["parameters"]) == last["parameters_personal"]
    some = fedslr.run(fedslr.Local(), federation, mlp(), **OPTIONS, evaluate_clients=2).clients_frame()
    assert len(some) == 5
    assert some["accuracy_personal"].notna().sum() == some["parameters"].notna().sum() == 2
    assert some["accuracy_global"].isna().all()


def test_a_frame_without_pandas_is_one_line(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fedslr.FedslrError, match=r"^pandas: .*pip install 'fedslr\[table\]'$"):
        result.to_frame()


def test_models_are_found_by_the_clients_name(result):
    for number, name in enumerate(NAMES):
        by_name, by_number = result.personal_params(name), result.personal_model(number).state_dict()
        assert all(torch.equal(x, by_number[key]) for key, x in by_name.items())
    with pytest.raises(fedslr.FedslrError, match=r"client: got 'nort', expected .*; did you mean 'north'"):
        result.personal_model("nort")


# --- figures and pages ------------------------------------------------------------------------------------------------


def test_a_plot_has_the_accuracies_and_the_sizes(result):
    figure = result.plot()
    left, right = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for axes in (left, right) for line in axes.lines}
    evaluated = [r for r in result.records if r["accuracy_personal"] is not None]
    personal, shared = ([100 * r[f"accuracy_{model}"] for r in evaluated] for model in ("personal", "global"))
    assert drawn["fedslr, personal"] == pytest.approx(personal)
    assert drawn["fedslr, global"] == pytest.approx(shared)
    assert drawn["global"] == [r["parameters_global"] for r in evaluated]
    assert set(drawn["dense"]) == {result.summary["parameters"]["dense"]}
    assert figure._repr_png_().startswith(b"\x89PNG")


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        assert set(dict(attributes)) <= {"style"}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_is_a_table_without_scripts(result):
    page = _Page(result._repr_html_())
    assert set(page.tags) == {"table", "caption", "thead", "tbody", "tr", "td"}
    assert f"{100 * result.summary['accuracy']['personal']:.1f} %" in page.words


def test_a_hostile_name_is_only_text(federation):
    hostile = fedslr.Federation(federation.clients, 3, name="<script>alert(1)</script>")
    page = fedslr.run(fedslr.FedAvg(), hostile, mlp(), **{**OPTIONS, "rounds": 1})._repr_html_()
    assert "<script" not in page
