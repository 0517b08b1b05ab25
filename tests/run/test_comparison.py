"""`fedslr.compare`: several methods from Python."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import fedslr
from conftest import make_federation, mlp
from fedslr.report.certainty import student_t
from fedslr.run import comparison, python_jobs

OPTIONS: dict[str, Any] = {"rounds": 3, "clients_per_round": 2, "lr": 0.05, "engine": "eager"}
FILES = {"accuracy.png", "report.html", "table.csv", "table.md", "table.tex"}


@dataclass(frozen=True)
class Sulking(fedslr.FedAvg):
    """A method that fails in its first round."""

    name: ClassVar[str] = "sulking"

    def aggregate(self, *args: Any) -> Any:
        raise RuntimeError("no mood")


def same(a: fedslr.Result, b: fedslr.Result) -> bool:
    return all(torch.equal(x, b.personal_params(1)[name]) for name, x in a.personal_params(1).items())


def test_runs_are_those_of_run(ragged):
    methods = [fedslr.FedSLR(eta_g=5), "fedavg"]
    found = fedslr.compare(methods, ragged, mlp(), seeds=[0, 3], **OPTIONS)
    assert list(found.results) == ["fedslr", "fedavg"]
    for method in (fedslr.FedSLR(eta_g=5), fedslr.FedAvg()):
        for result, seed in zip(found.results[method.name], (0, 3), strict=True):
            assert same(result, fedslr.run(method, ragged, mlp(), seed=seed, **OPTIONS))


def test_tables_are_those_of_the_command(ragged, tmp_path, command):
    found = fedslr.compare([fedslr.FedSLR(), "fedavg"], ragged, mlp(), seeds=[0, 1], out=tmp_path / "c", **OPTIONS)
    assert {p.name for p in (tmp_path / "c").iterdir()} - {".lock"} == FILES | {
        f"{method}-seed{seed}" for method in ("fedslr", "fedavg") for seed in (0, 1)
    }
    for format, suffix in (("markdown", "md"), ("latex", "tex"), ("csv", "csv")):
        text = found.table(format)
        assert text == (tmp_path / "c" / f"table.{suffix}").read_text()
        code, printed, _ = command("show", tmp_path / "c", "--format", format)
        assert code == 0
        assert sorted(printed.splitlines()) == sorted(text.splitlines())
    assert repr(found) == found.table()
    assert [line.split()[0] for line in found.table().splitlines()] == ["method", "fedslr", "fedavg"]


def test_names_of_ones_own_tell_hyperparameters_apart(ragged):
    methods = {"small": fedslr.FedSLR(eta_g=1), "large": fedslr.FedSLR(eta_g=10), "mean": "fedavg"}
    found = fedslr.compare(methods, ragged, mlp(), **OPTIONS)
    assert [line.split()[0] for line in found.table().splitlines()] == ["method", *methods]
    assert found.results["small"][0].algorithm == fedslr.FedSLR(eta_g=1)
    drawn = {line.get_label() for line in found.plot().axes[0].lines}
    assert {name.partition(",")[0] for name in drawn} == set(methods)


def test_differences_are_paired_by_seed(ragged):
    found = fedslr.compare(["fedslr", "local"], ragged, mlp(), seeds=[0, 1, 2], **OPTIONS)
    frame = found.to_frame().pivot(index="seed", columns="method", values="accuracy_personal")
    best, other = sorted(frame, key=lambda name: -frame[name].mean())
    differences = 100 * (frame[other] - frame[best])
    half = student_t(2) * differences.std() / 3**0.5
    (row,) = [row for row in csv_rows(found.differences("markdown")) if row[0] == other]
    assert float(row[3].replace("−", "-")) == pytest.approx(differences.mean(), abs=0.006)
    low = float(row[4].partition(" to ")[0].replace("−", "-"))
    assert low == pytest.approx(differences.mean() - half, abs=0.006)
    assert "95 % interval" in found._repr_html_()
    assert "<script" not in found._repr_html_()


def csv_rows(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in row[1:-1]] for row in csv.reader(io.StringIO(markdown), delimiter="|")]


def test_data_may_follow_the_seed():
    splits = {seed: make_federation([5, 6, 4 + seed]) for seed in (0, 1)}
    found = fedslr.compare(["fedavg"], splits.__getitem__, mlp(), seeds=[0, 1], **OPTIONS)
    assert [result.federation for result in found.results["fedavg"]] == list(splits.values())


def test_processes_give_the_same_models(ragged, tmp_path):
    alone = fedslr.compare([fedslr.FedSLR()], ragged, mlp(), seeds=[0, 1], **OPTIONS)
    found = fedslr.compare([fedslr.FedSLR()], ragged, mlp(), seeds=[0, 1], out=tmp_path / "c", jobs=2, **OPTIONS)
    for a, b in zip(alone.results["fedslr"], found.results["fedslr"], strict=True):
        assert same(a, b)
        assert a.summary["accuracy"] == b.summary["accuracy"]


def test_a_comparison_goes_on(ragged, tmp_path):
    ask: dict[str, Any] = {"federation": ragged, "model": mlp(), "out": str(tmp_path / "c"), **OPTIONS}
    fedslr.compare(["fedavg"], **ask)
    with pytest.raises(fedslr.FedslrError, match=r"already holds runs \(fedavg-seed0\); .*resume=True"):
        fedslr.compare(["fedavg", "local"], **ask)
    with pytest.raises(fedslr.FedslrError, match=r"resume: .* holds another run: lr was"):
        fedslr.compare(["fedavg"], **{**ask, "lr": 0.01}, resume=True)
    found = fedslr.compare(["fedavg", "local"], **ask, resume=True)
    assert same(found.results["local"][0], fedslr.run(fedslr.Local(), ragged, mlp(), **OPTIONS))


def test_a_comparison_that_is_stopped_goes_on(ragged, tmp_path, monkeypatch):
    stops = iter([False, False, False, False, True])  # in the second round of the second run
    monkeypatch.setattr(comparison.Stop, "__bool__", lambda self: next(stops, False))
    ask: dict[str, Any] = {"federation": ragged, "model": mlp(), "out": tmp_path, **OPTIONS}
    with pytest.raises(KeyboardInterrupt, match="go on with resume=True"):
        fedslr.compare(["fedavg", "local"], **ask)
    assert not (tmp_path / "table.md").exists()
    found = fedslr.compare(["fedavg", "local"], **ask, resume=True)
    for name, method in (("fedavg", fedslr.FedAvg()), ("local", fedslr.Local())):
        assert same(found.results[name][0], fedslr.run(method, ragged, mlp(), **OPTIONS))


def test_rounds_are_tracked(ragged, tmp_path):
    fedslr.compare(["fedavg"], ragged, mlp(), out=tmp_path, track=["tensorboard"], **OPTIONS)
    assert list((tmp_path / "fedavg-seed0" / "tensorboard").glob("events.out.tfevents.*"))
    with pytest.raises(fedslr.FedslrError, match="track: got 'tensorbord'"):
        fedslr.compare(["fedavg"], ragged, mlp(), track=["tensorbord"], **OPTIONS)


def test_a_run_that_fails_does_not_stop_the_others(ragged):
    warned: list[str] = []
    found = fedslr.compare([Sulking(), "fedavg"], ragged, mlp(), warn=warned.append, **OPTIONS)
    assert found.failed.keys() == {"sulking-seed0"}
    assert warned == [f"1 of 2 runs failed; sulking-seed0: {found.failed['sulking-seed0']}"]
    assert [line.split()[0] for line in found.table().splitlines()] == ["method", "fedavg"]
    with pytest.raises(fedslr.FedslrError, match=r"1 of 1 runs failed; sulking-seed0: .*no mood"):
        fedslr.compare([Sulking()], ragged, mlp(), **OPTIONS)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"seed": 3}, r"^seed: .*expected seeds=\[3\]$"),
        ({"jobs": 2}, r"^jobs: .* need a folder"),
        ({"seeds": []}, "^seeds: got no values"),
        ({"methods": []}, "^methods: got no values"),
        ({"methods": ["fedavg", fedslr.FedAvg()]}, "^methods: got 'fedavg,fedavg', .*different values"),
        ({"methods": ["fedavgg"]}, "methods: got \"fedavgg\", no such method; did you mean 'fedavg'"),
        ({"roundz": 3}, "unknown key 'roundz'"),
    ],
)
def test_mistakes_are_answered_before_anything_starts(asked, says, ragged, tmp_path):
    with pytest.raises(fedslr.FedslrError, match=says):
        fedslr.compare(**{"methods": ["fedavg"], "federation": ragged, "model": mlp(), **asked})


def test_what_cannot_be_sent_to_a_process_is_one_line(ragged, tmp_path):
    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, y)

    with pytest.raises(fedslr.FedslrError, match=r"jobs: another process cannot load .*; put them in a module"):
        fedslr.compare(["fedavg"], ragged, mlp(), out=tmp_path / "c", jobs=2, loss=loss, **OPTIONS)
    lost = python_jobs.PackedJob("a", 1, b"c__main__\nGone\n.", b"N.")
    with pytest.raises(fedslr.FedslrError, match="put them in a module that you import"):
        lost.run()
