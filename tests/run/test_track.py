"""Trackers hear of every round, for real where their package is installed, and can never hurt a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedslr
from conftest import make_federation, mlp
from fedslr.run import trackers

OPTIONS: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "clients_per_round": 2}


def train(out: Path | None, *names: str, **options: Any) -> fedslr.Result:
    return fedslr.run(fedslr.FedSLR(), make_federation([6, 7, 5]), mlp(), out=out, track=names, **OPTIONS | options)


class Notebook:
    """A tracker that keeps what it is told."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.rounds: list[int] = []
        self.ends: list[Mapping[str, Any] | None] = []

    def start(self, run: trackers.TrackedRun) -> None:
        self.run = run

    def log(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self.fail_at:
            raise OSError("no network")
        self.rounds.append(record["round"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.ends.append(summary)


def given(monkeypatch: pytest.MonkeyPatch, notebook: Notebook) -> Notebook:
    monkeypatch.setitem(trackers.TRACKERS, "notebook", lambda: notebook)
    return notebook


def test_every_round_is_told_once(monkeypatch, tmp_path):
    notebook = given(monkeypatch, Notebook())
    result = train(tmp_path / "mine", "notebook", "notebook")
    assert notebook.rounds == [1, 2, 3, 4]
    assert notebook.ends == [result.summary]
    assert notebook.run.name == "mine"
    assert notebook.run.recipe == (tmp_path / "mine" / "config.toml").read_text()
    assert notebook.run.config["algorithm.name"] == "fedslr"


def test_a_resumed_run_is_told_from_its_first_round(monkeypatch, tmp_path):
    train(tmp_path, rounds=2)
    notebook = given(monkeypatch, Notebook())
    train(tmp_path, "notebook", resume=True)
    assert notebook.rounds == [1, 2, 3, 4]
    again = given(monkeypatch, Notebook())
    train(tmp_path, "notebook", resume=True)
    assert (again.rounds, again.ends) == ([], [])


def test_a_run_that_stops_has_no_summary_to_tell(monkeypatch, tmp_path):
    notebook = given(monkeypatch, Notebook())
    with pytest.raises(fedslr.core.errors.Interrupted):
        train(tmp_path, "notebook", should_stop=lambda: True)
    assert (notebook.rounds, notebook.ends) == ([1], [None])


def test_a_tracker_that_fails_is_left_out(monkeypatch, tmp_path):
    failing, other = Notebook(fail_at=2), Notebook()
    monkeypatch.setitem(trackers.TRACKERS, "failing", lambda: failing)
    given(monkeypatch, other)
    with pytest.warns(UserWarning, match="track: failing failed and is left out: no network") as warned:
        result = train(tmp_path, "failing", "notebook")
    assert len(warned) == 1
    assert result.summary["rounds"] == 4
    assert (failing.rounds, failing.ends, other.rounds) == ([1], [], [1, 2, 3, 4])


def test_scalars_are_the_records_numbers(tmp_path):
    result = train(None)
    found = trackers.scalars(result.records[-1])
    last = result.records[-1]
    assert found["accuracy/personal"] == last["accuracy_personal"]
    assert found["rank"] == sum(last["rank"].values())
    assert found["parameters/personal"] == pytest.approx(sum(last["parameters_personal"]) / 3)
    assert "accuracy/personal" not in trackers.scalars(result.records[0])
    assert all(isinstance(value, float) for value in found.values())


def test_mistakes_are_answered_before_anything_starts(command, monkeypatch, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('rounds = 1\ndata = { name = "digits", clients = 3 }\nclients_per_round = 1')
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for verb in ("run", "compare"):
        for name, words in [
            ("tensorbored", "track: got 'tensorbored', no such tracker; did you mean 'tensorboard'?"),
            ("mlflow", "track: mlflow is not installed; pip install 'fedslr[track]'"),
        ]:
            code, _, err = command(verb, recipe, "--out", tmp_path / "out", "--track", name)
            assert (code, err.splitlines()) == (2, [f"error: {words}"])
    assert not (tmp_path / "out").exists()


# --- for real -------------------------------------------------------------------------------------------------------


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs TensorBoard"
    )
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_has_the_records(tmp_path):
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    result = train(tmp_path, "tensorboard")
    found = events(tmp_path / "tensorboard")
    assert [step for step, _ in found["bytes/down"]] == [1, 2, 3, 4]
    assert found["accuracy/personal"] == [
        (r["round"], pytest.approx(r["accuracy_personal"]))
        for r in result.records
        if r["accuracy_personal"] is not None
    ]
    train(tmp_path, "tensorboard", rounds=6, resume=True)
    assert [step for step, _ in events(tmp_path / "tensorboard")["bytes/down"]] == [1, 2, 3, 4, 5, 6]


def test_tensorboard_needs_a_folder():
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    with pytest.warns(UserWarning, match="tensorboard writes to the run folder"):
        train(None, "tensorboard")


def test_tensorboard_follows_a_comparison(command, tmp_path):
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('rounds = 2\ndata = { name = "digits", clients = 3 }\nclients_per_round = 1')
    out = tmp_path / "out"
    assert (
        command("compare", recipe, "--out", out, "--methods", "fedslr,local", "--track", "tensorboard", "--jobs", 1)[0]
        == 0
    )
    for name in ("fedslr-seed0", "local-seed0"):
        assert [step for step, _ in events(out / name / "tensorboard")["lr"]] == [1, 2]


def test_mlflow_has_the_records(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(None)
    result = train(tmp_path / "mine", "mlflow")
    with pytest.raises(fedslr.core.errors.Interrupted):
        train(tmp_path / "stopped", "mlflow", should_stop=lambda: True)
    client = mlflow.MlflowClient()
    home = client.get_experiment_by_name("fedslr")
    runs = {run.info.run_name: run for run in client.search_runs([home.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {"mine": "FINISHED", "stopped": "FAILED"}
    assert runs["mine"].data.params["algorithm.name"] == "fedslr"
    history = client.get_metric_history(runs["mine"].info.run_id, "bytes/down")
    assert [(m.step, m.value) for m in history] == [(r["round"], r["bytes_down"]) for r in result.records]


def test_wandb_keeps_the_records_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs Weights & Biases")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    train(tmp_path / "mine", "wandb")
    (kept,) = (tmp_path / "wandb").glob("offline-run-*")
    (log,) = kept.glob("run-*.wandb")
    assert b"accuracy/personal" in log.read_bytes()
    written = [p for p in (tmp_path / "mine").rglob("*") if p.is_file()]
    assert written
    assert not [p for p in written if b"0123456789012345" in p.read_bytes()]
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["rounds"] == 4
