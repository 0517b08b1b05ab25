"""Whatever happens to a run, its last finished round is there, and going on from it is as if nothing had happened."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedslr
import own_methods
from conftest import make_arrays, make_federation, mlp
from fedslr.core import interrupts
from fedslr.storage import checkpoint, record, run_folder, tree_files
from fedslr.storage.client_store import ClientStore
from fedslr.storage.tree_files import Entry

STORES = pytest.mark.parametrize("kind", ["memory", "disk"])


def run(out: Path | None = None, resume: bool = False, **changes: Any) -> fedslr.Result:
    options = {"rounds": 5, "clients_per_round": 2, "batch_size": 4, "evaluate_every": 2, "lr": 0.05, **changes}
    return fedslr.run(
        fedslr.FedSLR(eta_g=2, rank_penalty=0.01),
        make_federation([5, 8, 3, 7]),
        model=mlp(),
        out=out,
        resume=resume,
        **options,
    )


def contents(folder: Path) -> dict[str, Any]:
    """What a finished run leaves, without clocks: every tensor's file, and the records."""
    newest = max((folder / "checkpoint").glob("manifest-*.json"))
    manifest = json.loads(newest.read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "server": manifest["server"][1],
        "clients": {c: e[1] for c, e in manifest["clients"].items()},
        "records": [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in records],
    }


class Killed(BaseException):
    """The process dies here: nothing catches it, nothing is cleaned up."""


def die_at(monkeypatch: pytest.MonkeyPatch, number: int, after: bool = False) -> list[str]:
    """Let the number-th operation on the disk be the last one, in any thread: the process dies before or after it."""
    log: list[str] = []
    turn = threading.Lock()

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            with turn:
                log.append(name)
                count = len(log)
            if count > number or (count == number and not after):
                raise Killed
            out = real(*args, **kwargs)
            if count == number:
                raise Killed
            return out

        monkeypatch.setattr(owner, name, operation)

    wrap(Path, "replace")
    wrap(Path, "unlink")
    wrap(os, "fsync")
    wrap(run_folder.RunFolder, "append")
    return log


def assert_clean(out: Path) -> None:
    """Every generation there is whole, and no file lies about that none of them names."""
    folder = out / "checkpoint"
    kept = checkpoint.Checkpoints(folder)
    named = set()
    for number in kept.rounds():
        generation = kept._read(number)
        tree_files.read_verified(folder, generation.server)
        for entry in generation.clients.values():
            tree_files.read_verified(folder / "clients", entry)
            named.add(entry.file)
    assert len(kept.rounds()) <= checkpoint.KEPT_GENERATIONS
    assert {p.name for p in (folder / "clients").iterdir()} == named
    expected = {f"manifest-{n:06d}.json" for n in kept.rounds()} | {
        f"server-{n:06d}.safetensors" for n in kept.rounds()
    }
    assert {p.name for p in folder.iterdir()} == expected | {"clients"}


@STORES
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_disk_operation_and_resumed(kind, every, after, tmp_path, monkeypatch):
    """Die at the 1st, 2nd, 3rd … operation on the disk; the resumed run ends as the one that never stopped."""
    options = {"store": kind, "checkpoint_every": every, "rounds": 4}
    whole = tmp_path / "whole"
    with monkeypatch.context() as patch:
        log = die_at(patch, 10**9)
        run(whole, **options)
    expected = contents(whole)
    assert_clean(whole)
    assert len(log) > 30
    for number in range(1, len(log) + 1):
        out = tmp_path / f"{number}"
        with monkeypatch.context() as patch:
            die_at(patch, number, after)
            with pytest.raises(Killed):
                run(out, **options)
        run(out, resume=True, **options, warn=lambda text: None)
        assert contents(out) == expected, f"killed at operation {number} ({log[number - 1]})"
        assert_clean(out)


@STORES
@pytest.mark.parametrize("every", [1, 3])
def test_an_interrupt_keeps_both_generations(kind, every, tmp_path):
    """Saving a round that is saved already must not cost the generation before it."""
    rounds = iter(range(4))
    with pytest.raises(fedslr.Interrupted):
        run(tmp_path, rounds=9, store=kind, checkpoint_every=every, should_stop=lambda: next(rounds, None) is None)
    assert_clean(tmp_path)
    assert checkpoint.Checkpoints(tmp_path / "checkpoint").rounds()[0] == 5
    newest = tmp_path / "checkpoint" / "server-000005.safetensors"
    newest.write_bytes(b"damaged")
    run(tmp_path, resume=True, rounds=9, store=kind, checkpoint_every=every, warn=lambda text: None)
    run(tmp_path / "whole", rounds=9, store=kind, checkpoint_every=every)
    assert contents(tmp_path) == contents(tmp_path / "whole")
    assert_clean(tmp_path)


def test_a_disk_store_without_a_folder_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run(store="disk", rounds=8)
    (scratch,) = tmp_path.iterdir()
    assert len(list(scratch.iterdir())) == 4
    del result
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_other_peoples_files_are_left_alone(tmp_path):
    mine = tmp_path / "checkpoint" / "clients"
    mine.mkdir(parents=True)
    (mine / "patients.csv").write_text("mine")
    (mine / "folder").mkdir()
    run(tmp_path, rounds=2)
    run(tmp_path, rounds=4, resume=True)
    assert (mine / "patients.csv").read_text() == "mine"
    assert (mine / "folder").is_dir()


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_again(tmp_path):
    run(tmp_path, rounds=3)
    for path in (tmp_path / "checkpoint").glob("*-0*"):
        path.unlink()
    (tmp_path / "summary.json").unlink()
    told: list[str] = []
    run(tmp_path, rounds=3, resume=True, warn=told.append)
    assert len(told) == 1
    assert re.fullmatch(".* has no checkpoint: this run starts again from the first round", told[0])


def test_a_full_disk_for_metrics_is_one_line(tmp_path):
    """A real ENOSPC, from /dev/full; closing the file afterwards must not hide what was said."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    folder = run_folder.RunFolder(tmp_path)
    folder._metrics.close()
    folder._metrics = Path("/dev/full").open("ab")  # noqa: SIM115
    with pytest.raises(
        fedslr.CheckpointError,
        match=r"No space left on device; make room on the disk, then try again \(a run: with --resume\)",
    ):
        folder.append(record.Record(1, 0.1, [0]))
    folder.close()


def start(out: Path, *options: str, by: Sequence[str] = ("-m", "fedslr")) -> subprocess.Popen[bytes]:
    recipe = Path(__file__).parent.parent.parent / "recipes" / "demo" / "compare.toml"
    sets = [f"--set={c}" for c in ("rounds=12", "data.clients=8", "clients_per_round=3", "evaluate.every=4")]
    command = [sys.executable, *by, "run", str(recipe), *sets, "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def wait_until(process: subprocess.Popen[bytes], done: Callable[[], bool]) -> None:
    """Wait for something that a running process is about to do."""
    while not done():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def test_sigkill_at_random_moments(tmp_path):
    """A real process, killed with SIGKILL again and again, ends bit-identical to one never stopped."""
    assert start(tmp_path / "whole").wait(600) == 0
    chance = random.Random(0)
    out, kills = tmp_path / "killed", 0
    for _ in range(30):
        dying = (str(Path(__file__).parent.parent / "dying.py"), "calls", str(chance.randrange(60_000)))
        resume = ["--resume"] if out.exists() else []
        process = start(out, *resume, by=dying if kills < 5 else ("-m", "fedslr"))
        code = process.wait(600)
        if code == 0:
            break
        assert code == -signal.SIGKILL, process.stderr.read()
        kills += 1
    assert kills >= 3
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_stops_at_once(second, tmp_path):
    out = tmp_path / "run"
    process = start(out, "--set=rounds=5000", "--set=data.samples_per_client=160", "--set=epochs=500")
    wait_until(process, lambda: (out / "config.toml").exists())
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert b"stopping after this round" in process.stderr.readline()
    time.sleep(2 * interrupts.ECHO_SECONDS)
    process.send_signal(second)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert err.strip().splitlines()[-1] == b"stopped; go on from the last checkpoint with --resume"


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_an_echo_of_ctrl_c_is_not_a_second_one(seconds, monkeypatch):
    """`timeout` sends a signal twice: to the process, then to its group."""
    now, said = [0.0], list[str]()
    monkeypatch.setattr(interrupts, "monotonic", lambda: now[0])
    with interrupts.stop_on_signal(said.append) as stop:
        signal.raise_signal(signal.SIGTERM)
        now[0] += seconds
        signal.raise_signal(signal.SIGTERM)
        assert stop
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert said == ["stopping after this round; press ctrl-C again to stop at once"]


def test_ctrl_c_finishes_the_round_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--set=rounds=5000", "--set=checkpoint.every=1000")
    wait_until(process, lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert b"Traceback" not in err
    lines = err.decode().strip().splitlines()
    assert lines[-1].startswith("stopped after round ")
    assert f"--out {out} --resume" in lines[-1]
    finished = len((out / "metrics.jsonl").read_text().splitlines())
    assert json.loads(max((out / "checkpoint").glob("manifest*")).read_text())["rounds"] == finished


@STORES
@pytest.mark.parametrize("victim", ["manifest", "server", "client"])
@pytest.mark.parametrize("damage", ["flip", "half", "empty", "gone"])
def test_a_damaged_newest_generation_gives_way_to_the_one_before(kind, victim, damage, tmp_path):
    run(tmp_path / "whole", rounds=7, store=kind)
    out = tmp_path / "run"
    run(out, rounds=5, store=kind)
    folder = out / "checkpoint"
    if victim == "client":
        # One that only the newest generation names.
        newest, older = (
            {e[0] for e in json.loads((folder / f"manifest-{n:06d}.json").read_text())["clients"].values()}
            for n in (5, 4)
        )
        path = folder / "clients" / sorted(newest - older)[0]
    else:
        path = next(folder.glob(f"{victim}-000005*"))
    data = path.read_bytes()
    match damage:
        case "flip":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
        case "half":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
    warnings: list[str] = []
    run(out, resume=True, rounds=7, warn=warnings.append, store=kind)
    if not (victim == "manifest" and damage == "gone"):
        assert "the checkpoint of round 5 is damaged" in warnings[0]
    assert contents(out) == contents(tmp_path / "whole")


def test_when_every_generation_is_damaged_it_says_so(tmp_path):
    run(tmp_path)
    for path in (tmp_path / "checkpoint").glob("server*"):
        path.write_bytes(b"x")
    with pytest.raises(fedslr.CheckpointError, match=r"every checkpoint in .* is damaged; restore it from a backup"):
        run(tmp_path, resume=True, warn=lambda text: None)


@pytest.mark.parametrize("failing", range(1, 40, 3))
@STORES
def test_a_full_disk_stops_the_run_with_one_line_and_keeps_the_last_checkpoint(kind, failing, tmp_path, monkeypatch):
    run(tmp_path / "whole", store=kind)
    out, writes = tmp_path / "run", [0]
    real = os.fsync

    def full(handle: int) -> None:
        writes[0] += 1
        if writes[0] >= failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(fedslr.CheckpointError, match=r"cannot write .*No space left on device") as stopped:
            run(out, store=kind)
    assert "\n" not in str(stopped.value)
    run(out, resume=True, store=kind, warn=lambda text: None)
    assert contents(out) == contents(tmp_path / "whole")


def test_two_generations_are_kept_and_nothing_else(tmp_path):
    for kind in ("memory", "disk"):
        out = tmp_path / kind
        run(out, rounds=9, store=kind)
        folder = out / "checkpoint"
        manifests = sorted(p.name for p in folder.glob("manifest*"))
        assert manifests == ["manifest-000008.json", "manifest-000009.json"]
        assert sorted(p.name for p in folder.glob("server*")) == [
            "server-000008.safetensors",
            "server-000009.safetensors",
        ]
        named = {e[0] for m in manifests for e in json.loads((folder / m).read_text())["clients"].values()}
        assert {p.name for p in (folder / "clients").iterdir()} == named


def test_checkpoints_can_be_rare(tmp_path):
    run(tmp_path, rounds=7, checkpoint_every=3)
    assert sorted(p.name for p in (tmp_path / "checkpoint").glob("manifest*")) == [
        "manifest-000006.json",
        "manifest-000007.json",
    ]


def saved_rounds(out: Path, seconds: list[int], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """The rounds that a run saves, given the seconds that each of its rounds takes."""
    now, saved = [0.0], []
    takes = iter(seconds)
    monkeypatch.setattr("fedslr.engine.saving.monotonic", lambda: now[0])
    real = checkpoint.Checkpoints.save

    def save(self: checkpoint.Checkpoints, rounds: int, *args: Any) -> None:
        saved.append(rounds)
        real(self, rounds, *args)

    def train(*args: Any) -> Any:
        now[0] += next(takes)
        return aggregate(*args)

    aggregate = fedslr.FedSLR.aggregate
    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    monkeypatch.setattr(fedslr.FedSLR, "aggregate", train)
    run(out, rounds=len(seconds), **options)
    return saved


@pytest.mark.parametrize(
    ("every", "minutes", "seconds", "expected"),
    [
        (2, 0, [0] * 5, [2, 4, 5]),
        (1, 1, [60] * 3, [1, 2, 3]),
        (1, 1, [25] * 8, [3, 6, 8]),
        (2, 1, [25] * 11, [3, 6, 9, 11]),
        (3, 1, [60, 60, 1, 1, 1, 60, 60], [3, 6, 7]),
        (2, 1, [1, 58, 1, 1, 1, 1], [3, 6]),
        (2, 0.5, [15, 15, 15, 14, 1, 1, 1], [2, 5, 7]),
        (1, 5, [1] * 4, [4]),
    ],
)
def test_checkpoints_can_be_some_minutes_apart(every, minutes, seconds, expected, tmp_path, monkeypatch):
    """One that the clock holds back is made up for as soon as there is time; the last round is always saved."""
    options = {"checkpoint_every": every, "checkpoint_minutes": minutes}
    assert saved_rounds(tmp_path, seconds, monkeypatch, **options) == expected


def test_a_run_is_saved_when_it_is_interrupted_whatever_the_clock_says(tmp_path):
    rounds = iter(range(2))
    with pytest.raises(fedslr.Interrupted, match="after round 3"):
        run(tmp_path, rounds=9, checkpoint_minutes=60, should_stop=lambda: next(rounds, None) is None)
    assert checkpoint.Checkpoints(tmp_path / "checkpoint").rounds() == [3]
    run(tmp_path, rounds=9, checkpoint_minutes=5, resume=True)
    run(tmp_path / "whole", rounds=9)
    assert contents(tmp_path) == contents(tmp_path / "whole")


def test_rounds_can_be_added_to_a_finished_run(tmp_path):
    run(tmp_path / "a", rounds=3)
    run(tmp_path / "a", resume=True, rounds=6, evaluate_every=2)
    run(tmp_path / "b", rounds=6)
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert (a["server"], a["clients"]) == (b["server"], b["clients"])


def test_another_loss_or_selection_is_told(tmp_path):
    """No file can hold a function: the run goes on, and says what is not as it was."""
    federation, told = make_federation([8, 8, 8]), []

    def mine(outputs, y):
        return 2 * torch.nn.functional.cross_entropy(outputs, y)

    asked = {
        "federation": federation,
        "model": mlp(),
        "clients_per_round": 2,
        "out": tmp_path / "a",
        "warn": told.append,
    }
    fedslr.run(fedslr.FedAvg(), loss=mine, rounds=1, **asked)
    fedslr.run(fedslr.FedAvg(), loss=mine, rounds=2, resume=True, **asked)
    assert not told

    def others(outputs, y):
        return mine(outputs, y)

    made = fedslr.run(fedslr.FedAvg(), loss=others, rounds=3, resume=True, **asked)
    assert len(told) == 1
    assert re.fullmatch("resume: loss is .*others, but the run began with .*mine", told[0])
    assert (made.summary["rerunnable"], made.summary["given"]["loss"].split(".")[-1]) == (False, "others")
    with pytest.raises(fedslr.FedslrError, match='loss was "custom", now "cross_entropy"'):
        fedslr.run(fedslr.FedAvg(), rounds=4, resume=True, **asked)


@pytest.fixture
def ctrl_c():
    """What Ctrl-C sends, to a Python that answers it by itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_python_loses_no_round(tmp_path, ctrl_c):
    told = []

    def press(record):
        if record.round == 3:
            ctrl_c()

    options = {"rounds": 6, "checkpoint_every": 1000, "warn": told.append}
    with pytest.raises(KeyboardInterrupt, match="stopped after round 3 of 6; go on with resume=True"):
        run(tmp_path / "a", on_round=press, **options)
    assert told == ["stopping after this round; press ctrl-C again to stop at once"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert contents(tmp_path / "a")["records"][-1]["round"] == 3
    run(tmp_path / "a", resume=True, **options)
    run(tmp_path / "b", **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_divergence_by_inputs_is_not_blamed_on_the_step_alone():
    clients = make_arrays([8, 8], (6,))
    clients[1]["x"][:2], clients[1]["y"][:2] = 1e30, [0, 1]  # one of the two is wrong, whatever a model says
    federation = fedslr.Federation.from_arrays(clients, num_classes=3)
    with pytest.raises(fedslr.FedslrError, match=r"client 1: .*a lower lr helps \(now 0\.1\), or inputs of a smaller"):
        fedslr.run(fedslr.FedAvg(), federation, torch.nn.Linear(6, 3), rounds=1, batch_size=4)


def test_ctrl_c_in_the_last_round_is_heard(tmp_path, ctrl_c):
    """Whoever loops over runs and wants to stop does not want the next one."""
    with pytest.raises(KeyboardInterrupt, match="came to its end"):
        run(tmp_path, rounds=2, on_round=lambda record: ctrl_c() if record.round == 2 else None, warn=print)
    assert (tmp_path / "summary.json").exists()


def test_without_a_folder_ctrl_c_is_pythons(tmp_path, ctrl_c):
    federation = make_federation([8, 8])
    with pytest.raises(KeyboardInterrupt) as stopped:
        fedslr.run(fedslr.FedAvg(), federation, mlp(), rounds=2, on_round=lambda record: ctrl_c())
    assert not stopped.value.args


def test_a_loss_by_its_name_is_the_loss(tmp_path, command):
    """In a recipe as in Python; a run that was given a function has no recipe."""
    lines = ("rounds = 2", 'algorithm = { name = "fedavg" }', "data = { clients = 3 }", 'model = { name = "mlp" }')
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    call = ("run", tmp_path / "recipe.toml", "--out")
    assert command(*call, tmp_path / "a", "--set", "loss=own_methods:doubled")[0] == 0
    assert command(*call, tmp_path / "b")[0] == 0
    federation = fedslr.load("digits", clients=3)
    asked = {"federation": federation, "model": "mlp", "rounds": 2}
    fedslr.run(fedslr.FedAvg(), loss=own_methods.doubled, out=tmp_path / "c", **asked)
    fedslr.run(fedslr.FedAvg(), loss="own_methods:doubled", out=tmp_path / "d", seed=0, **asked)
    found = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in "abcd"}
    assert found["a"]["accuracy"] == found["c"]["accuracy"] == found["d"]["accuracy"] != found["b"]["accuracy"]
    assert {name: one["rerunnable"] for name, one in found.items()} == {"a": True, "b": True, "c": False, "d": True}
    code, _, err = command("run", tmp_path / "c" / "config.toml", "--out", tmp_path / "e")
    assert (
        code,
        "loss: got 'custom', expected one of cross_entropy, bce, mse, mae, huber, or" in err,
    ) == (
        2,
        True,
    )
    code, _, err = command(*call, tmp_path / "e", "--set", "loss=own_methods:NOT_A_LOSS")
    assert (code, "loss: got 'own_methods:NOT_A_LOSS', which is a int, expected a function" in err) == (2, True)
    with pytest.warns(UserWarning, match="this run was given a loss in Python"):
        fedslr.open_run(tmp_path / "c")
    assert fedslr.open_run(tmp_path / "c", loss=own_methods.doubled).summary == found["c"]


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = run(tmp_path)
    before = contents(tmp_path)
    second = run(tmp_path, resume=True)
    assert contents(tmp_path) == before
    assert first.summary["accuracy"] == second.summary["accuracy"]
    assert first.summary["bytes"] == second.summary["bytes"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lr": 0.2}, "lr was 0.05, now 0.2"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"clients_per_round": 3}, "clients_per_round was 2, now 3"),
    ],
)
def test_another_run_is_not_resumed(change, says, tmp_path):
    run(tmp_path, rounds=2)
    with pytest.raises(fedslr.FedslrError, match=says):
        run(tmp_path, resume=True, rounds=2, **change)


def test_other_data_or_another_model_are_noticed(tmp_path):
    run(tmp_path, rounds=2)
    method, options = (
        fedslr.FedSLR(eta_g=2, rank_penalty=0.01),
        {"rounds": 4, "clients_per_round": 2, "batch_size": 4, "lr": 0.05},
    )
    with pytest.raises(fedslr.CheckpointError, match="the data are not the ones"):
        fedslr.run(method, make_federation([5, 8, 3, 6]), mlp(), out=tmp_path, resume=True, **options)
    moved = make_federation([5, 8, 3, 7])
    moved.clients[2].x.mul_(3)
    with pytest.raises(fedslr.CheckpointError, match="the data are not the ones"):
        fedslr.run(method, moved, mlp(), out=tmp_path, resume=True, **options)
    other = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    with pytest.raises(fedslr.CheckpointError, match="the model is not the one"):
        fedslr.run(method, make_federation([5, 8, 3, 7]), other, out=tmp_path, resume=True, **options)
    wider = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    with pytest.raises(fedslr.CheckpointError, match="the model is not the one"):
        fedslr.run(method, make_federation([5, 8, 3, 7]), wider, out=tmp_path, resume=True, **options)


def test_a_folder_holds_one_run_of_one_process(tmp_path):
    run(tmp_path, rounds=1)
    with pytest.raises(fedslr.FedslrError, match="already holds a run; resume it"):
        run(tmp_path, rounds=1)
    with pytest.raises(fedslr.FedslrError, match="holds no run to resume"):
        run(tmp_path / "nowhere", resume=True)
    busy = run_folder.RunFolder(tmp_path / "busy")
    with pytest.raises(fedslr.FedslrError, match="another process is running"):
        run(tmp_path / "busy", rounds=1)
    busy.close()


def test_changed_metrics_are_noticed(tmp_path):
    run(tmp_path, rounds=2)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"round": 1', '"round": 9'))
    with pytest.raises(fedslr.CheckpointError, match="was changed since its checkpoint"):
        run(tmp_path, resume=True, rounds=3)


@pytest.mark.parametrize("budget", [None, 0, 48, 100])
def test_stores_give_back_what_they_were_given(budget, tmp_path):
    kept = ClientStore(tmp_path, budget=budget)
    states = [{"state": {"p": {"w": torch.randn(4, 3) * i}, "n": i}} for i in range(4)]
    for version, client in enumerate([3, 1, 3, 0], start=1):
        kept.put(client, states[version - 1], version)
    entries = kept.save()
    named = {e.file for e in entries.values()}
    kept.collect(named)
    again = ClientStore(tmp_path, budget=budget)
    again.load(entries, named)
    for client, version in ((3, 3), (1, 2), (0, 4)):
        for found in (kept.get(client), again.get(client)):
            assert torch.equal(found["state"]["p"]["w"], states[version - 1]["state"]["p"]["w"])
            assert found["state"]["n"] == version - 1
    assert kept.get(2) is None


def test_sparse_states_take_little_room(tmp_path):
    x = torch.zeros(100_000)
    x[:50] = 1.0
    tree_files.write_tree(tmp_path / "sparse.safetensors", {"p": x})
    assert (tmp_path / "sparse.safetensors").stat().st_size < 2_000


def test_a_state_file_is_plain_safetensors(tmp_path):
    import safetensors.torch

    entry = tree_files.write_tree(tmp_path / "state.safetensors", {"w": torch.ones(3)})
    assert torch.equal(safetensors.torch.load_file(tmp_path / "state.safetensors")["0"], torch.ones(3))
    assert torch.equal(tree_files.read_tree(tmp_path, entry)["w"], torch.ones(3))
    with pytest.raises(fedslr.CheckpointError, match="SHA-256 does not match"):
        tree_files.read_tree(tmp_path, Entry(entry.file, "0" * 64))
    with pytest.raises(fedslr.CheckpointError, match="cannot read"):
        tree_files.read_tree(tmp_path, Entry("nothing", "0" * 64))


def test_generations_that_are_not_json_are_damaged(tmp_path):
    kept = checkpoint.Checkpoints(tmp_path)
    (tmp_path / "manifest-000001.json").write_text("[1, 2")
    with pytest.raises(fedslr.CheckpointError, match="every checkpoint"):
        kept.load(lambda text: None)


def test_a_finished_run_without_its_checkpoint_is_left_alone(tmp_path):
    run(tmp_path / "run", rounds=3)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").glob("*.*")}
    with pytest.raises(fedslr.CheckpointError, match="is finished, but its checkpoint/ is missing"):
        run(tmp_path / "run", rounds=3, resume=True)
    after = {p.name: p.read_bytes() for p in (tmp_path / "run").glob("*.*")}
    assert {k: v for k, v in after.items() if k != "report.html"} == {
        k: v for k, v in before.items() if k != "report.html"
    }


def test_the_folder_of_a_federation_is_no_run_to_go_on_with(tmp_path):
    run(tmp_path / "run", rounds=2)
    (tmp_path / "run" / "ledger.sqlite").touch()
    with pytest.raises(fedslr.FedslrError, match="is the folder of a federation"):
        run(tmp_path / "run", rounds=3, resume=True)
