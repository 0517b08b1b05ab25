"""Comparisons and sweeps: which runs they make, that they can be stopped and resumed, and the tables they end in."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedslr
from fedslr import config, experiments, metrics
from fedslr.report import tables

RECIPE = """
rounds = 2
clients_per_round = 2
algorithm = { name = "fedslr", eta_g = 5, rank_penalty = 5e-3 }
data = { name = "digits", clients = 4, samples_per_client = 20 }
evaluate = { every = 1 }
methods = { ditto = { lam = 0.7 } }
compare = { methods = ["fedslr", "ditto", "local"], seeds = [0, 1] }
sweep = { rank_penalty = [1e-3, 1e-2], "data.alpha" = [0.1, 1.0] }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def test_a_comparison_shares_everything_but_the_method(recipe, tmp_path):
    request = config.read(recipe)
    jobs = experiments.comparison(request, ["fedslr", "ditto", "fedavg"], [0, 5], tmp_path)
    assert [j.name for j in jobs] == [f"{m}-seed{s}" for m in ("fedslr", "ditto", "fedavg") for s in (0, 5)]
    assert [j.recipe.algorithm for j in jobs[::2]] == [
        fedslr.FedSLR(eta_g=5, rank_penalty=5e-3),
        fedslr.Ditto(lam=0.7),
        fedslr.FedAvg(),
    ]
    for job, seed in zip(jobs, [0, 5] * 3, strict=True):
        assert (job.recipe.settings.seed, job.recipe.data.seed) == (seed, seed)
        assert job.recipe.settings == jobs[0 if seed == 0 else 1].recipe.settings


def test_a_sweep_is_every_combination(recipe, tmp_path):
    request = config.read(recipe)
    jobs = experiments.sweep(request, request.sweep, [0], tmp_path)
    found = [(j.recipe.algorithm.rank_penalty, j.recipe.data.alpha) for j in jobs]
    assert found == [(1e-3, 0.1), (1e-3, 1.0), (1e-2, 0.1), (1e-2, 1.0)]
    assert len({j.folder for j in jobs}) == 4
    (epochs,) = experiments.sweep(request, {"epochs": [3]}, [0], tmp_path)
    assert epochs.recipe.settings.epochs == 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_compare_and_its_tables(jobs, recipe, tmp_path, command):
    out = tmp_path / "out"
    code, printed, _ = command("compare", recipe, "--out", out, "--jobs", jobs)
    assert code == 0
    assert "ditto" in printed
    folders = sorted(p.name for p in out.iterdir() if p.is_dir())
    assert folders == sorted(f"{m}-seed{s}" for m in ("fedslr", "ditto", "local") for s in (0, 1))
    cohorts = {
        (p.name[-1], tuple(tuple(json.loads(x)["clients"]) for x in (p / "metrics.jsonl").read_text().splitlines()))
        for p in out.iterdir()
        if p.is_dir()
    }
    assert len(cohorts) == 2
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO((out / "table.csv").read_text()))}
    assert set(rows) == {"fedslr", "ditto", "local"}
    expected = [
        json.loads((out / f"ditto-seed{s}" / "summary.json").read_text())["accuracy"]["personal"] for s in (0, 1)
    ]
    assert float(rows["ditto"]["accuracy_personal"]) == pytest.approx(sum(expected) / 2)
    assert float(rows["ditto"]["accuracy_personal_std"]) == pytest.approx(abs(expected[0] - expected[1]) / 2**0.5)
    assert rows["ditto"]["seeds"] == "2"
    assert rows["local"]["accuracy_global"] == ""
    assert (out / "table.md").read_text().startswith("| method |")
    assert r"\begin{tabular}{lrrrrrrrr}" in (out / "table.tex").read_text()
    assert (out / "accuracy.png").stat().st_size > 1000
    # As a whole it is not started twice, and resuming what is done changes nothing.
    code, _, err = command("compare", recipe, "--out", out)
    assert code == 2
    assert "already holds runs (fedslr-seed0); go on with --resume" in err
    before = (out / "table.csv").read_text()
    assert command("compare", recipe, "--out", out, "--resume", "--jobs", 1)[0] == 0
    assert (out / "table.csv").read_text() == before


def test_a_comparison_that_was_stopped_goes_on(recipe, tmp_path):
    """Ctrl-C on a comparison of two workers: no traceback, finished rounds kept, --resume ends as if never stopped."""
    out = tmp_path / "out"
    options = [
        "--methods",
        "fedavg,local,feddyn",
        "--seeds",
        "0",
        "--jobs",
        "2",
        "--set",
        "rounds=60",
        "--out",
        str(out),
    ]
    command = [sys.executable, "-m", "fedslr", "compare", str(recipe), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while process.poll() is None and not any(p.stat().st_size for p in out.glob("*/metrics.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert b"--resume" in err.splitlines()[-1]
    done = subprocess.run([*command, "--resume"], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    whole = fedslr.run(
        fedslr.FedDyn(),
        fedslr.load("digits", clients=4, samples_per_client=20, seed=0),
        rounds=60,
        clients_per_round=2,
        evaluate_every=1,
    )
    lines = [json.loads(x) for x in (out / "feddyn-seed0" / "metrics.jsonl").read_text().splitlines()]
    assert [r["accuracy_personal"] for r in lines] == [r["accuracy_personal"] for r in whole.records]


def test_sweep_and_its_table(recipe, tmp_path, command):
    out = tmp_path / "out"
    code, printed, _ = command("sweep", recipe, "--over", "rank_penalty=1e-3,1e-2", "--out", out, "--jobs", 1)
    assert code == 0
    assert "rank_penalty" in printed
    rows = list(csv.DictReader(io.StringIO((out / "table.csv").read_text())))
    assert [row["rank_penalty"] for row in rows] == ["0.001", "0.01"]
    code, printed, _ = command("show", out, "--format", "csv", "--pick", "best", "--clients", "sampled")
    assert code == 0
    assert len(printed.splitlines()) == 3
    code, printed, _ = command("show", out, "--format", "latex")
    assert r"\toprule" in printed
    assert r"rank\_penalty" in printed


def test_a_run_that_fails_does_not_stop_the_others(recipe, tmp_path, command):
    broken = ["--set", "methods.perfedavg.beta=1e30", "--methods", "fedavg,perfedavg,local"]
    code, printed, err = command("compare", recipe, *broken, "--seeds", "0", "--out", tmp_path / "out", "--jobs", 1)
    assert code == 2
    assert "1 of 3 runs failed; perfedavg-seed0: round 1, client" in err.splitlines()[-1]
    assert "local" in printed


WRONG = [
    (["compare", "--methods", "fedavg,fedsrl"], "methods: got 'fedsrl', no such method; did you mean 'fedslr'?"),
    (["compare", "--methods", "fedavg,fedavg"], "methods: got 'fedavg,fedavg', expected each one once"),
    (["compare", "--methods", ""], "methods: got none"),
    (["compare", "--seeds", "a"], "seeds: got 'a', expected whole numbers such as 0,1,2"),
    (["compare", "--jobs", "0"], "jobs: got 0, expected a whole number 1 or above"),
    (["compare", "--pick", "first"], "--pick: got 'first', expected last or best"),
    (["sweep", "--over", "rank_penalty"], "--over: got 'rank_penalty', expected key=value,value"),
    (["sweep", "--over", "rank_penlty=1,2"], "sweep: unknown key 'rank_penlty'; did you mean 'rank_penalty'?"),
    (["sweep", "--over", "name=a,b"], "sweep: 'name' may be algorithm.name or data.name or model.name"),
    (["sweep", "--over", "lr=0.1,-1"], "lr: got -1, expected a number above 0"),
    (["compare", "--set", "compare.seeds=3"], "compare.seeds: got 3, expected a list of whole numbers"),
    (["compare", "--set", "compare.method=3"], "unknown key 'method' in compare; did you mean 'methods'?"),
    (["compare", "--set", "methods.dito.lam=3"], "methods.dito: got \"dito\", no such method; did you mean 'ditto'?"),
    (["compare", "--set", "methods.ditto.mu=3"], "unknown key 'mu' in methods.ditto"),
    (["sweep", "--set", "sweep.lr=3"], "sweep.lr: got 3, expected a list of values"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_wrong_experiments(args, says, recipe, tmp_path, command):
    code, _, err = command(args[0], recipe, *args[1:], "--out", tmp_path / "out")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert says in err


def test_methods_and_their_own_hyperparameters_are_labelled():
    def run(name: str, seed: int, **options: float) -> tables.Run:
        flat = {"algorithm.name": name, "seed": seed, "lr": 0.1} | {f"algorithm.{k}": v for k, v in options.items()}
        return tables.Run(Path("x"), flat, {"algorithm": name}, [])

    several = [run("fedslr", 0, eta_g=5.0), run("fedslr", 1, eta_g=5.0), run("ditto", 0, lam=0.1)]
    assert [(g.labels, len(g.runs)) for g in tables.group(several)] == [
        ({"method": "fedslr"}, 2),
        ({"method": "ditto"}, 1),
    ]
    swept = [run("fedslr", 0, eta_g=5.0), run("fedslr", 0, eta_g=7.0), run("ditto", 0, lam=0.1)]
    assert [g.labels for g in tables.group(swept)] == [
        {"eta_g": "5", "method": "fedslr"},
        {"eta_g": "7", "method": "fedslr"},
        {"eta_g": "–", "method": "ditto"},
    ]
    assert tables.group([run("local", 0)])[0].labels == {"method": "local"}


def test_accuracy_over_clients_and_rounds():
    records = [
        {
            "clients": [0],
            "accuracy_personal_per_client": [0.9, 0.7, None],
            "accuracy_global_per_client": [0.5, 0.1, None],
        },
        {"clients": [1]},
        {"clients": [1], "accuracy_personal_per_client": [0.6, 0.8, None]},
    ]
    assert metrics.accuracy(records)["personal"] == pytest.approx(0.7)
    assert metrics.accuracy(records, pick="best")["personal"] == pytest.approx(0.8)
    assert metrics.accuracy(records, clients="sampled")["personal"] == pytest.approx(0.8)
    assert metrics.accuracy(records, "best", "sampled")["personal"] == pytest.approx(0.9)
    assert metrics.accuracy(records)["global"] == pytest.approx(0.3)
    assert metrics.accuracy([{"clients": [0]}]) == {"global": None, "personal": None}


def test_fairness_is_the_worst_tenth_and_the_deviation():
    each = [i / 20 for i in range(20)]
    found = metrics.fairness({"accuracy_personal_per_client": each})
    assert found["personal"]["worst_decile"] == pytest.approx(0.025)
    assert found["personal"]["std"] == pytest.approx(0.288, abs=1e-3)
    assert found["global"] is None


def test_the_summary_has_them(recipe, tmp_path, command):
    assert command("run", recipe, "--out", tmp_path / "out")[0] == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for key in ("accuracy", "accuracy_best", "accuracy_sampled", "fairness"):
        assert set(summary[key]) == {"global", "personal"}


def test_selections():
    from fedslr.engine import cohort

    sizes = [1] * 50 + [9] * 50
    for select in cohort.SELECTIONS.values():
        drawn = [cohort.draw(select, 10, sizes, 0, t) for t in range(300)]
        assert drawn == [cohort.draw(select, 10, sizes, 0, t) for t in range(300)]
        assert drawn[0] != drawn[1]
        assert sum(map(len, drawn)) / 300 == pytest.approx(10, rel=0.1)
    large = [sum(c >= 50 for c in cohort.draw(cohort.by_size, 10, sizes, 0, t)) for t in range(300)]
    assert sum(large) / 3000 > 0.8
    assert {len(cohort.draw(cohort.bernoulli, 10, sizes, 0, t)) for t in range(50)} != {10}
    assert all(cohort.draw(cohort.bernoulli, 1, [1] * 3, 0, t) for t in range(50))
    assert all(len(cohort.draw(cohort.uniform, 10, sizes, 0, t)) == 10 for t in range(50))


def test_ones_own_selection():
    federation = fedslr.load("digits", clients=4, samples_per_client=10)
    result = fedslr.run(fedslr.FedAvg(), federation, rounds=3, selection=lambda rng, size, examples: [2, 0])
    assert [r["clients"] for r in result.records] == [[0, 2]] * 3
    for wrong in ([], [0, 0], [7], [-1]):
        with pytest.raises(fedslr.FedslrError, match="selection: round 1 got"):
            fedslr.run(fedslr.FedAvg(), federation, rounds=1, selection=lambda rng, size, examples, wrong=wrong: wrong)
    with pytest.raises(fedslr.FedslrError, match="give the function itself"):
        fedslr.run(fedslr.FedAvg(), federation, rounds=1, selection="custom")
    with pytest.raises(fedslr.FedslrError, match="own functions go to"):
        config.parse({"selection": "custom"})
