"""Comparisons and sweeps: which runs they make, that they can be stopped and resumed, and the tables they end in."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedslr
from fedslr.cli import printing
from fedslr.core import interrupts
from fedslr.report import curves
from fedslr.report.result_tables import DROPPED_WHEN_NARROW, Table, columns, result_table
from fedslr.report.run_groups import Group, group_runs
from fedslr.report.saved_runs import Run
from fedslr.report.table_formats import comma_separated, latex, markdown
from fedslr.run import experiments, recipes
from fedslr.storage import locks, statistics

HANGING = 600
"""A process that has not ended after so many seconds hangs."""
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
    request = recipes.read(recipe)
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
    request = recipes.read(recipe)
    jobs = experiments.sweep(request, request.sweep, [0], tmp_path)
    found = [(j.recipe.algorithm.rank_penalty, j.recipe.data.alpha) for j in jobs]
    assert found == [(1e-3, 0.1), (1e-3, 1.0), (1e-2, 0.1), (1e-2, 1.0)]
    assert len({j.folder for j in jobs}) == 4
    (epochs,) = experiments.sweep(request, {"epochs": [3]}, [0], tmp_path)
    assert epochs.recipe.settings.epochs == 3


def test_a_value_is_part_of_its_folders_name(recipe, tmp_path):
    request = recipes.read(recipe)
    short = experiments.sweep(request, {"data.root": ["a/b"]}, [3], tmp_path)
    assert short[0].folder.name == "root=a%2Fb-seed3"


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
    before, runs = (out / "table.csv").read_text(), {p: p.stat().st_mtime_ns for p in out.glob("*/**/*") if p.is_file()}
    assert command("compare", recipe, "--out", out, "--resume", "--jobs", 1)[0] == 0
    assert (out / "table.csv").read_text() == before
    # Nothing of a finished run is written again: the disk may be full.
    assert {p: p.stat().st_mtime_ns for p in out.glob("*/**/*") if p.is_file()} == runs


def test_a_method_more_joins_the_table(recipe, tmp_path, command):
    """Table and report of a folder have the same runs, whichever command made them."""
    out, usual = tmp_path / "out", ["--set", "rounds=1", "--jobs", 1, "--out", tmp_path / "out"]
    assert command("compare", recipe, "--methods", "local", "--seeds", 0, *usual)[0] == 0
    code, printed, _ = command("compare", recipe, "--methods", "fedavg", "--seeds", 0, *usual)
    assert code == 0
    assert "the table also has runs of earlier commands in this folder: local-seed0" in printed
    rows = csv.DictReader(io.StringIO((out / "table.csv").read_text()))
    assert [row["method"] for row in rows] == ["fedavg", "local"]
    assert "<title>local and fedavg on " in (out / "report.html").read_text()
    # What did not come to its end is in the report, which says so, and in no mean.
    (out / "local-seed0" / "summary.json").unlink()
    code, printed, _ = command("compare", recipe, "--methods", "fedavg", "--seeds", 0, *usual, "--resume")
    assert code == 0
    assert "earlier commands" not in printed
    assert "local-seed0: not finished" in (out / "report.html").read_text()


SPARE = """
from torch import nn


class Spare(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.used, self.spare = nn.Linear(shape[-1] * shape[-2], classes), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x.flatten(1))
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_runs_warn_of_is_said_once(jobs, recipe, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "spare", raising=False)
    Path("spare.py").write_text(SPARE)
    own = ("--set", "model.name=spare:Spare", "--set", "rounds=1")
    code, _, err = command("compare", recipe, "--methods", "local,fedavg", *own, "--jobs", jobs, "--out", "c")
    assert code == 0, err
    told = [line for line in err.splitlines() if "got no gradient and will only decay" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: ")
    assert "-seed" in told[0]


THREE_RUNS = ["--methods", "fedavg,local,feddyn", "--seeds", "0", "--jobs", "2"]


def test_a_comparison_says_what_it_does_not_use(recipe, command, tmp_path):
    asked = ("compare", recipe, "--seeds", 0, "--methods", "fedavg", "--jobs", 1, "--set", "algorithm.name=ditto")
    code, _, err = command(*asked, "--out", tmp_path / "out")
    assert code == 0
    assert "--set algorithm.name=ditto: ditto is not compared; set the hyperparameters of a compared method" in (
        " ".join(err.split())
    )


def test_a_comparison_goes_on_as_it_was_begun_or_not_at_all(recipe, command, tmp_path):
    out = tmp_path / "out"
    asked = ("compare", recipe, "--seeds", 0, "--out", out, "--jobs", 1)
    assert command(*asked, "--methods", "fedavg")[0] == 0
    code, _, err = command(*asked, "--methods", "feddyn,fedavg", "--set", "lr=0.05", "--resume")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "fedavg-seed0 holds another run: lr was 0.1, now 0.05" in " ".join(err.split())
    assert not (out / "feddyn-seed0").exists()
    assert command(*asked, "--methods", "feddyn,fedavg", "--resume")[0] == 0


WAITING = """
import os, time
from fedslr.engine import selection
from fedslr.run import jobs

calls = [0]

def uniform(rng, size, examples):
    calls[0] += 1
    while "WAIT_FOR_STOP" in os.environ and calls[0] == 100 and not jobs._stop.is_set():
        time.sleep(0.01)
    return selection.uniform(rng, size, examples)
"""
"""A selection with which workers do not finish before they were asked to stop."""


def test_a_comparison_that_was_stopped_goes_on(recipe, tmp_path):
    """Ctrl-C on a comparison of two workers: no traceback, finished rounds kept, --resume ends as if never stopped."""
    out = tmp_path / "out"
    (tmp_path / "waiting.py").write_text(WAITING)
    options = [*THREE_RUNS, "--set", "rounds=150", "--set", "selection=waiting:uniform", "--out", str(out)]
    command = [sys.executable, "-m", "fedslr", "compare", str(recipe), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    waiting = {**environment, "WAIT_FOR_STOP": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=waiting)
    while process.poll() is None and not any(p.stat().st_size for p in out.glob("*/metrics.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGING)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert b"--resume" in err.splitlines()[-1]
    done = subprocess.run([*command, "--resume"], capture_output=True, timeout=HANGING, env=environment)
    assert done.returncode == 0, done.stderr
    whole = fedslr.run(
        fedslr.FedDyn(),
        fedslr.load("digits", clients=4, samples_per_client=20, seed=0),
        rounds=150,
        clients_per_round=2,
        evaluate_every=1,
    )
    lines = [json.loads(x) for x in (out / "feddyn-seed0" / "metrics.jsonl").read_text().splitlines()]
    assert [r["accuracy_personal"] for r in lines] == [r["accuracy_personal"] for r in whole.records]


LONG = [*THREE_RUNS, "--set", "rounds=1000000", "--set", "checkpoint.every=1"]


def launch(recipe: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """A comparison in a process group of its own, as a terminal would start it."""
    command = [sys.executable, "-m", "fedslr", "compare", str(recipe), *LONG, "--out", str(out), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def wait_until_training(out: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None and not any(p.stat().st_size for p in out.glob("*/metrics.jsonl")):
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
            if int(fields[1]) == process.pid and b"spawn_main" in command:
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
@pytest.mark.parametrize("loaded", ["python", "libtorch_global_deps", "libtorch_cpu"])
def test_ctrl_c_while_workers_start(loaded, recipe, tmp_path):
    """A terminal's ctrl-C goes to the whole group, workers in the middle of their imports too."""
    process = launch(recipe, tmp_path / "out")
    while process.poll() is None and not any(has_loaded(worker, loaded) for worker in workers_of(process)):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=HANGING)
    assert process.returncode == 130, err
    assert b"Traceback" not in err


def has_loaded(process: int, library: str) -> bool:
    """Whether a process has begun to import a library, by its memory."""
    with contextlib.suppress(OSError):
        return library in Path(f"/proc/{process}/maps").read_text()
    return False


def test_a_sigterm_to_the_whole_group_is_a_clean_stop(recipe, tmp_path):
    """As launchers and `timeout` send it: to the workers too."""
    out = tmp_path / "out"
    process = launch(recipe, out)
    wait_until_training(out, process)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=HANGING)
    assert process.returncode == 130, err
    assert b"worker was killed" not in err
    assert b"go on with the same command and --resume" in err.splitlines()[-1]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_a_second_ctrl_c_ends_all_workers_at_once(recipe, tmp_path):
    out = tmp_path / "out"
    process = launch(recipe, out, "--set", "epochs=2000")
    while process.poll() is None and len(list(out.glob("*/config.toml"))) < 2:
        time.sleep(0.02)
    workers = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert b"stopping" in process.stderr.readline()
    time.sleep(2 * interrupts.ECHO_SECONDS)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=HANGING)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_a_killed_worker_is_one_line(recipe, tmp_path):
    out = tmp_path / "out"
    process = launch(recipe, out)
    wait_until_training(out, process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=HANGING)
    assert process.returncode == 2, err
    assert b"Traceback" not in err
    assert b"a worker was killed (out of memory?); go on with --resume" in err


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_workers_do_not_outlive_a_killed_parent(recipe, tmp_path):
    out = tmp_path / "out"
    process = launch(recipe, out)
    wait_until_training(out, process)
    workers = workers_of(process)
    assert workers
    process.kill()
    process.wait()
    for _ in range(10 * HANGING):
        if not any(Path(f"/proc/{pid}").exists() for pid in workers):
            break
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_two_comparisons_do_not_share_a_folder(recipe, tmp_path, command):
    with locks.lock(tmp_path / "out"):
        code, _, err = command("compare", recipe, "--out", tmp_path / "out")
    assert code == 2
    assert "another process is running in" in err


def test_requests_are_honoured_or_refused(recipe, tmp_path):
    request = recipes.parse({"methods": {"fedslr": {"eta_g": 77}}, "seed": 7})
    assert request.method("fedslr").eta_g == 77
    assert experiments.comparison(request, ["fedslr"], [1], tmp_path)[0].recipe.data.seed == 1
    fixed = recipes.parse({"seed": 0, "data": {"seed": 0}})
    assert [j.recipe.data.seed for j in experiments.comparison(fixed, ["fedavg"], [0, 1, 2], tmp_path)] == [0, 0, 0]
    (job,) = experiments.sweep(fixed, {"lr": [0.2]}, [4], tmp_path)
    assert (job.recipe.data.seed, job.recipe.settings.seed) == (0, 4)
    methods = experiments.sweep(recipes.read(recipe), {"algorithm.name": ["fedavg", "ditto"]}, [0], tmp_path)
    assert [j.recipe.algorithm for j in methods] == [fedslr.FedAvg(), fedslr.Ditto()]


def test_the_recipes_seed_is_the_default(recipe, tmp_path, command):
    recipe.write_text(recipe.read_text().replace(", seeds = [0, 1]", "").replace("rounds = 2", "rounds = 1\nseed = 7"))
    assert command("compare", recipe, "--methods", "local", "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "local-seed7").is_dir()


def test_a_planned_run_is_not_made_longer(recipe, tmp_path, command):
    """FedSpa anneals towards its last round: three rounds made six are not six rounds."""
    out = tmp_path / "out"
    assert command("run", recipe, "--set", "algorithm.name=fedspa", "--out", out)[0] == 0
    code, _, err = command(
        "run", recipe, "--set", "algorithm.name=fedspa", "--set", "rounds=4", "--out", out, "--resume"
    )
    assert code == 2
    assert "rounds was 2, now 4; rounds of fedspa depend on it from the first on" in err


def golden() -> list[Run]:
    def run(name: str, seed: int, personal: list[float], **config_: Any) -> Run:
        flat = {"algorithm.name": name, "seed": seed, "lr": 0.1, **config_}
        records = [
            {"round": t, "clients": [t - 1], "accuracy_personal_per_client": own, "accuracy_global_per_client": shared}
            for t, own, shared in ((1, [0.9, 0.9], [0.5, 0.7]), (2, personal, [0.4, 0.6]))
        ]
        summary = {
            "algorithm": name,
            "parameters": {"global": 2_500_000, "personal": 1234.0, "personal_std": 56.0},
            "bytes": {"down": 3_000_000, "up": 4_000},
            "paper_gb": 12.345,
        }
        return Run(Path(name), flat, summary, records)

    return [run("a|b&c_d", 0, [0.2, 0.4]), run("a|b&c_d", 1, [0.4, 0.6]), run("other", 0, [0.5, 0.5])]


def test_a_table_with_known_cells():
    runs = golden()
    groups, figures = group_runs(runs), columns()
    made = result_table(groups, figures)
    assert made.titles[:3] == ["method", "seeds", "global %"]
    assert made.rows == [
        [
            "a|b&c_d",
            "2",
            "50.00",
            "40.00 ± 14.14",
            "30.00 ± 14.14",
            "2.50M",
            "1.2k ± 0.1k",
            "3.0 MB",
            "4.0 kB",
            "12.35",
        ],
        ["other", "1", "50.00", "50.00", "50.00", "2.50M", "1.2k ± 0.1k", "3.0 MB", "4.0 kB", "12.35"],
    ]
    assert markdown(made).splitlines()[2].startswith(r"| a\|b&c_d | 2 | 50.00 | 40.00 ± 14.14 |")
    assert r"a|b\&c\_d & 2 & 50.00 & 40.00 $\pm$ 14.14" in latex(made)
    row = next(csv.DictReader(io.StringIO(comma_separated(groups, figures))))
    assert float(row["bytes_up"]) == 4000
    assert float(row["parameters_personal_std"]) == 56
    both = result_table(groups, columns("best", "sampled"))
    assert both.titles[2:5] == [f"{of} % (best, sampled)" for of in ("global", "personal", "worst 10th")]
    assert [both.column_titled(kind) for kind in DROPPED_WHEN_NARROW] == ["up", "down", both.titles[4], "size global"]
    best = result_table(groups, columns("best", "all")).rows[0]
    assert best[2:5] == ["60.00", "90.00", "90.00"]
    sampled = result_table(groups, columns("last", "sampled")).rows[0]
    assert sampled[2:5] == ["60.00", "50.00 ± 14.14", "50.00 ± 14.14"]


FIGURES = ["83.81 ± 1.32", "92.98 ± 0.73", "79.15 ± 1.39", "11.17M", "3.98M ± 410.9k", "447.0 GB", "447.0 GB", "893.92"]


def printed(made: Table, width: int, monkeypatch: pytest.MonkeyPatch, screen: bool = True) -> str:
    out = Console(file=io.StringIO(), width=width, force_terminal=screen, color_system=None)
    monkeypatch.setattr(printing, "out_console", out)
    printing.print_table(made)
    return out.file.getvalue()


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(160, []), (110, []), (70, []), (62, ["up"]), (50, ["worst 10th %", "down", "up"]), (20, [])],
)
def test_a_table_fits_its_screen(width, left_out, monkeypatch):
    """Words stay whole, and what is not shown is named; where no table fits, rows are paragraphs."""
    made = Table(["method", *(c.title for c in columns())], [["fedslr", *FIGURES]], 1)
    shown = printed(made, width, monkeypatch)
    assert all(len(line) <= width for line in shown.splitlines())
    said = " ".join(shown.split())
    assert ("left out" in said) is bool(left_out)
    assert said.endswith(", ".join(left_out))
    words = {word.strip(",") for word in shown.split()}
    assert {word for title in made.titles if title not in left_out for word in title.split()} <= words
    assert {"fedslr", "83.81", "92.98", "410.9k", "893.92"} <= words


def test_a_sweep_says_what_was_swept_where_runs_failed(recipe, command, tmp_path):
    """And every failure is told, and later which runs are not finished."""
    made = command("sweep", recipe, "--over", "lr=1e9,1e8,0.1", "--out", tmp_path / "runs", "--jobs", 1)
    assert made[0] == 2
    assert all(f"lr={lr}" in made[2].splitlines()[-1] for lr in ("1000000000.0", "100000000.0"))
    code, out, err = command("show", tmp_path / "runs", "--pick", "late")
    assert (code, out.split()[0], out.splitlines()[1].split()[0]) == (0, "lr", "0.1")
    assert "not in the table, since they are not finished: " in err
    assert "late: fewer than 5 evaluations, so the mean of all, in lr=0.1-seed0" in " ".join(err.split())
    code, out, err = command("show", tmp_path / "runs", "--plot", tmp_path / "x.bmp")
    assert (code, out) == (2, "")
    # One that is damaged takes nothing away from the others.
    (tmp_path / "runs" / "lr=100000000.0-seed0" / "config.toml").write_text("x")
    assert command("show", tmp_path / "runs")[0] == 0


def test_two_settings_of_one_name_are_two_columns():
    def run(**flat: Any) -> Run:
        return Run(Path("x"), {"algorithm.name": "a", "seed": 0} | flat, {"algorithm": "a"}, [])

    some = [run(**{"data.name": x, "algorithm.data": y}) for x, y in (("d", 1), ("m", 1), ("d", 2))]
    assert [list(g.labels) for g in group_runs(some)] == [["algorithm.data", "data.name"]] * 3


def test_accuracies_are_shown_however_many_settings_there_are(monkeypatch):
    labels = [f"setting_number_{i}" for i in range(12)]
    made = Table([*labels, *(c.title for c in columns("late"))], [[*map(str, range(12)), *FIGURES]], 12)
    assert "personal % (late) 92.98 ± 0.73" in " ".join(printed(made, 80, monkeypatch).split())
    (titles, row) = printed(made, 80, monkeypatch, screen=False).splitlines()
    assert titles.split()[:12] == labels
    assert row.split()[-1] == "893.92"


def test_runs_that_differ_are_never_merged():
    def run(**flat: Any) -> Run:
        name = "feddyn"
        return Run(Path("x"), {"algorithm.name": name, "seed": 0} | flat, {"algorithm": name}, [])

    four = [run(**{"algorithm.alpha": a, "data.alpha": d}) for a in (0.1, 0.5) for d in (0.1, 1.0)]
    assert [g.labels for g in group_runs(four)] == [
        {"algorithm.alpha": str(a), "data.alpha": str(d)} for a in (0.1, 0.5) for d in (0.1, 1.0)
    ]
    assert len(group_runs([run(lr=0.1234567), run(lr=0.12345678)])) == 2
    assert [g.labels for g in group_runs([run(lr=0.1), run(lr=0.2)])] == [{"lr": "0.1"}, {"lr": "0.2"}]


def test_a_mean_has_no_seed_twice():
    """Whatever it is that runs of one seed differ in, the table says it, even if it is where they are."""

    def run(seed: int, folder: str = "x", **flat: Any) -> Run:
        config_ = {"algorithm.name": "local", "seed": seed, "data.seed": seed} | flat
        return Run(Path(folder), config_, {"algorithm": "local"}, [])

    def rows(runs: list[Run]) -> list[tuple[dict[str, str], int]]:
        return [(g.labels, len(g.runs)) for g in group_runs(runs)]

    for key in ("evaluate.every", "checkpoint.every"):
        swept = [run(seed, **{key: value, "device": f"cuda:{seed}"}) for value in (1, 5) for seed in (0, 1)]
        assert rows(swept) == [({"every": "1"}, 2), ({"every": "5"}, 2)]
    assert rows([run(0, device="cpu"), run(1, device="auto")]) == [({"method": "local"}, 2)]
    assert rows([run(0, device="cpu"), run(0, device="auto")]) == [({"device": "cpu"}, 1), ({"device": "auto"}, 1)]
    assert rows([run(0, "a"), run(0, "b")]) == [
        ({"method": "local", "folder": "a"}, 1),
        ({"method": "local", "folder": "b"}, 1),
    ]
    assert rows([run(0), run(1), run(0, "again")]) == [
        ({"method": "local", "folder": "–"}, 2),
        ({"method": "local", "folder": "again"}, 1),
    ]


def test_a_run_given_twice_is_one_run(recipe, tmp_path, command):
    assert command("compare", recipe, "--methods", "local", "--seeds", "0,1", "--out", tmp_path / "out")[0] == 0
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path / "out" / "local-seed0")
    _, printed, _ = command("show", tmp_path / "out", linked, tmp_path / "out" / "local-seed1", "--format", "csv")
    assert [row["seeds"] for row in csv.DictReader(io.StringIO(printed))] == ["2"]


def test_curves_are_means_over_seeds():
    runs = []
    for x in (0.2, 0.6):
        records: list[dict[str, Any]] = [{"round": 1, "bytes_down": 100 * x, "accuracy_personal": x}, {"round": 2}]
        runs.append(Run(Path("x"), {}, {}, records))
    (sample,) = curves.evaluations(Group({}, runs), "accuracy_personal")
    assert (sample.round, sample.bytes, sample.mean) == (1, pytest.approx(40), pytest.approx(0.4))
    assert curves.evaluations(Group({}, runs), "accuracy_global") == []


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
    (["compare", "--methods", "fedavg,fedsrl"], "--methods: got \"fedsrl\", no such method; did you mean 'fedslr'?"),
    (
        ["compare", "--methods", "fedavg,fedavg"],
        "methods: got 'fedavg,fedavg', expected one or more different values, such as",
    ),
    (
        ["compare", "--methods", ""],
        "methods: got no values, expected one or more different values, such as fedslr,fedavg",
    ),
    (["compare", "--seeds", "a"], 'seeds: got "a", expected a whole number from 0 to'),
    (["compare", "--jobs", "0"], "'--jobs': 0 is not in the range x>=1"),
    (["compare", "--pick", "first"], "--pick: got 'first'; known: best, last, late"),
    (
        ["sweep", "--over", "rank_penalty"],
        "--over rank_penalty: got no values, expected one or more different values, such as ",
    ),
    (["sweep", "--set", "sweep={}"], "--over: got none, expected one or more keys with values"),
    (["sweep", "--over", "rank_penlty=1,2"], "--over rank_penlty: unknown key; did you mean 'rank_penalty'?"),
    (["sweep", "--over", "name=a,b"], "--over name: may be algorithm.name or data.name or model.name; write one"),
    (["sweep", "--over", "lr=1,1.0"], "--over lr: got '1,1.0', expected one or more different values, such as"),
    (
        ["sweep", "--over", "lr=1", "--over", "lr=1"],
        "--over lr: got '1,1', expected one or more different values, such as",
    ),
    (["sweep", "--over", "eta_g=1", "--over", "algorithm.eta_g=2"], "--over eta_g: algorithm.eta_g is given twice"),
    (["sweep", "--over", "seed=1,2"], "give several seeds with --seeds"),
    (["compare", "--set", "compare.seeds=[-1]"], "seeds: got -1, expected a whole number from 0 to"),
    (["sweep", "--over", "lr=0.1,-1"], "--over lr: got -1, expected a number above 0"),
    (["compare", "--set", "compare.seeds=3"], "compare.seeds: got 3, expected a list"),
    (["compare", "--set", "compare.method=3"], "unknown key 'method' in compare; did you mean 'methods'?"),
    (["compare", "--set", "methods.dito.lam=3"], "methods.dito: got \"dito\", no such method; did you mean 'ditto'?"),
    (["compare", "--set", "methods.ditto.mu=3"], "unknown key 'mu' in methods.ditto"),
    (["sweep", "--set", "sweep.lr=3"], "sweep.lr: got 3, expected a list"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_wrong_experiments(args, says, recipe, tmp_path, command):
    code, _, err = command(args[0], recipe, *args[1:], "--out", tmp_path / "out")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert says in err


def test_methods_and_their_own_hyperparameters_are_labelled():
    def run(name: str, seed: int, **options: float) -> Run:
        flat = {"algorithm.name": name, "seed": seed, "lr": 0.1} | {f"algorithm.{k}": v for k, v in options.items()}
        return Run(Path("x"), flat, {"algorithm": name}, [])

    several = [run("fedslr", 0, eta_g=5.0), run("fedslr", 1, eta_g=5.0), run("ditto", 0, lam=0.1)]
    assert [(g.labels, len(g.runs)) for g in group_runs(several)] == [
        ({"method": "fedslr"}, 2),
        ({"method": "ditto"}, 1),
    ]
    swept = [run("fedslr", 0, eta_g=5.0), run("fedslr", 0, eta_g=7.0), run("ditto", 0, lam=0.1)]
    assert [g.labels for g in group_runs(swept)] == [
        {"eta_g": "5.0", "method": "fedslr"},
        {"eta_g": "7.0", "method": "fedslr"},
        {"eta_g": "–", "method": "ditto"},
    ]
    assert group_runs([run("local", 0)])[0].labels == {"method": "local"}


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
    assert statistics.mean_over_clients(records)["personal"] == pytest.approx(0.7)
    assert statistics.mean_over_clients(records, pick="best")["personal"] == pytest.approx(0.8)
    assert statistics.mean_over_clients(records, clients="sampled")["personal"] == pytest.approx(0.8)
    assert statistics.mean_over_clients(records, "best", "sampled")["personal"] == pytest.approx(0.9)
    assert statistics.mean_over_clients(records)["global"] == pytest.approx(0.3)
    assert statistics.mean_over_clients(records, "late")["personal"] == pytest.approx(0.75)
    assert statistics.mean_over_clients(records, "late", "sampled")["personal"] == pytest.approx(0.85)
    assert statistics.worst_decile(records, "late") == pytest.approx(0.75)
    # The last five of six evaluations, client by client.
    many = [{"clients": [1], "accuracy_personal_per_client": [k / 10, 0.5]} for k in range(6)]
    assert statistics.mean_over_clients(many, "late")["personal"] == pytest.approx(0.4)
    assert statistics.worst_decile(many, "late") == pytest.approx(0.3)
    # Clients that come, go or do not answer: every one is itself.
    others = [
        {"clients": [0], "accuracy_personal_per_client": [0.9, 0.1, None]},
        {"clients": [0], "evaluated": [0, 2], "accuracy_personal_per_client": [0.9, 0.7]},
    ]
    assert statistics.mean_over_clients(others, "late")["personal"] == pytest.approx((0.9 + 0.1 + 0.7) / 3)
    assert statistics.worst_decile(others, "late") == pytest.approx(0.1)
    assert statistics.mean_over_clients([{"clients": [0]}]) == {"global": None, "personal": None}


def test_fairness_is_the_worst_tenth_and_the_deviation():
    each = [i / 20 for i in range(20)]
    found = statistics.fairness({"clients": [0], "accuracy_personal_per_client": each})
    assert found["personal"]["worst_decile"] == pytest.approx(0.025)
    assert found["personal"]["std"] == pytest.approx(0.288, abs=1e-3)
    assert found["global"] is None


def test_the_summary_has_them(recipe, tmp_path, command):
    assert command("run", recipe, "--out", tmp_path / "out")[0] == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for key in ("accuracy", "accuracy_best", "accuracy_sampled", "fairness"):
        assert set(summary[key]) == {"global", "personal"}


def test_selections():
    from fedslr.engine import selection

    sizes = [1] * 50 + [9] * 50
    for select in selection.SELECTIONS.values():
        drawn = [selection.draw(select, 10, sizes, 0, t) for t in range(300)]
        assert drawn == [selection.draw(select, 10, sizes, 0, t) for t in range(300)]
        assert drawn[0] != drawn[1]
        assert sum(map(len, drawn)) / 300 == pytest.approx(10, rel=0.1)
    large = [sum(c >= 50 for c in selection.draw(selection.by_size, 10, sizes, 0, t)) for t in range(300)]
    assert sum(large) / 3000 > 0.8
    assert {len(selection.draw(selection.bernoulli, 10, sizes, 0, t)) for t in range(50)} != {10}
    assert all(selection.draw(selection.bernoulli, 1, [1] * 3, 0, t) for t in range(50))
    assert all(len(selection.draw(selection.uniform, 10, sizes, 0, t)) == 10 for t in range(50))
    # What the authors' own lines draw, with NumPy's old generator.
    assert selection.draw(selection.authors, 10, sizes, 0, 999) == [4, 15, 22, 27, 37, 43, 64, 83]
    assert selection.draw(selection.authors, 10, sizes, 7, 992) == [4, 15, 22, 27, 37, 43, 64, 83]
    # Nobody comes in the sixth round, so the seventh's are taken.
    assert selection.draw(selection.authors, 1, [1] * 20, 0, 5) == selection.draw(selection.authors, 1, [1] * 20, 0, 6)


def test_ones_own_selection():
    federation = fedslr.load("digits", clients=4, samples_per_client=10)
    result = fedslr.run(fedslr.FedAvg(), federation, rounds=3, selection=lambda rng, size, examples: [2, 0])
    assert [r["clients"] for r in result.records] == [[0, 2]] * 3
    for wrong in ([], [0, 0], [7], [-1]):
        with pytest.raises(fedslr.FedslrError, match="selection: round 1 got"):
            fedslr.run(fedslr.FedAvg(), federation, rounds=1, selection=lambda rng, size, examples, wrong=wrong: wrong)
    with pytest.raises(fedslr.FedslrError, match="one of uniform, bernoulli, by-size, authors, or module:function"):
        recipes.complete({"selection": "custom"})
