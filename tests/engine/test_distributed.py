"""Two processes are as good as one: the same numbers, one run folder, and whoever dies leaves a run that can go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import several
from conftest import assert_alike
from fedslr import FedslrError
from fedslr.core import factored
from fedslr.storage import checkpoint, run_folder, tree_files
from test_checkpoint import assert_clean

HERE = Path(__file__).parent.parent
RECIPE = HERE.parent / "recipes" / "demo" / "compare.toml"
ROUNDS = 16
CHANGES = (f"rounds={ROUNDS}", "data.clients=8", "clients_per_round=3", "evaluate.every=4", "dtype=float64")
DIGITS = ["run", RECIPE, *(f"--set={change}" for change in CHANGES)]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(*command: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
    call = [sys.executable, *map(str, command)]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True)


def digits(out: Path, *options: str, by: Sequence[Any] = ("-m", "fedslr")) -> subprocess.Popen[str]:
    return start(*TWO, *by, *DIGITS, "--out", out, *options)


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=600)
    return process.returncode, said


def assert_close(a: Any, b: Any, where: str = "") -> None:
    """Trees of numbers, equal but for rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_close(a[key], b[key], f"{where}/{key}")
    elif not isinstance(a, torch.Tensor):
        assert_alike(a, b)
    else:
        assert a.dtype == b.dtype, where
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=lambda text: f"{where}: {text}")


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes made of every case: by rank, and the folder they worked in."""
    folder = tmp_path_factory.mktemp("two")
    several.long_run(folder / "begun", rounds=3)
    code, said = ends(start(*TWO, HERE / "several.py", folder))
    assert code == 0, said
    ranks = [torch.load(folder / f"rank-{r}.pt", weights_only=False) for r in range(2)]
    return {"ranks": ranks, "folder": folder}


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {**ranks[0], **{part: ranks[0][part] | ranks[1][part] for part in ("personal", "ledgers")}}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_close(found["global"], expected["global"])
    for part in ("personal", "ledgers"):
        assert_close(dict(sorted(found[part].items())), expected[part])
    assert_close(found["mean ledger"], expected["mean ledger"])
    assert_alike(found["records"], expected["records"])
    assert_alike(found["summary"], expected["summary"])


@pytest.mark.parametrize("case", several.CASES)
def test_two_processes_equal_one(case, two):
    ranks = [rank[case] for rank in two["ranks"]]
    assert_same(joined(ranks), several.kept(several.run(case), range(len(several.SIZES))))
    for part in ("global", "mean ledger"):
        own, other = (torch.utils._pytree.tree_leaves(rank[part]) for rank in ranks)
        assert all(torch.equal(x, y) for x, y in zip(own, other, strict=True))
    assert ranks[0]["records"] == ranks[1]["records"]


@pytest.mark.parametrize("case", several.CASES)
def test_a_round_is_one_all_reduce(case, two):
    assert [rank[case]["reduced"] for rank in two["ranks"]] == [several.CASES[case][1]["rounds"]] * 2


def test_one_process_begins_and_two_go_on(two, tmp_path):
    whole = several.kept(several.long_run(tmp_path), range(len(several.SIZES)))
    assert_same(joined([rank["resumed"] for rank in two["ranks"]]), whole)
    assert_clean(two["folder"] / "begun")


def test_two_stop_when_one_is_asked_and_one_goes_on(two, tmp_path):
    """They stop after the same round."""
    assert [rank["interrupted"] for rank in two["ranks"]] == ["stopped after round 4 of 8"] * 2
    assert_clean(two["folder"] / "stopped")
    resumed = several.long_run(two["folder"] / "stopped", resume=True)
    everyone = range(len(several.SIZES))
    assert_same(several.kept(resumed, everyone), several.kept(several.long_run(tmp_path), everyone))


def test_two_save_by_the_clock_of_the_first(two):
    folder = two["folder"] / "clocks"
    assert_clean(folder)
    assert checkpoint.Checkpoints(folder / "checkpoint").rounds() == [several.LONG["rounds"]]


def test_what_several_processes_cannot_do_is_one_line(two):
    for rank, found in enumerate(two["ranks"]):
        assert (
            found["elsewhere"] == f"client: {1 - rank} belongs to rank {1 - rank}; call this function in that process"
        )
        assert found["diagnostics"] == "diagnostics: they need all clients in one process; run without torchrun"
        assert found["one client"] == "torchrun: 2 processes for 1 clients; expected at most one for each"
        assert found["each upload"] == "torchrun: this method's server must see every upload; run it in one process"
        assert found["unequal"].startswith("torchrun: the processes were given different data, models or settings")


# --- failures --------------------------------------------------------------------------------------------------------


def states(out: Path) -> dict[str, Any]:
    """All that the newest checkpoint holds, multiplied out."""
    folder = out / "checkpoint"
    found = checkpoint.Checkpoints(folder).load(pytest.fail)
    assert found is not None
    generation, server = found
    clients = {str(c): tree_files.read_tree(folder / "clients", e) for c, e in sorted(generation.clients.items())}
    server, clients = factored.multiply_out(server), factored.multiply_out(clients)
    return {"rounds": generation.rounds, "server": server, "clients": clients}


def lines(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for(process: subprocess.Popen[str], out: Path, rounds: int) -> None:
    while process.poll() is None and lines(out) < rounds:
        time.sleep(0.01)


def test_a_killed_rank_leaves_a_run_that_two_or_one_go_on_with(command, tmp_path):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    for rank, rounds in ((1, 3), (0, 7)):
        saved = max(checkpoint.Checkpoints(out / "checkpoint").rounds(), default=0) if out.exists() else 0
        dying = [HERE / "dying.py", "record", rounds - saved + 1, rank]
        process = digits(out, *(["--resume"] if out.exists() else []), by=dying)
        code, said = ends(process)
        assert code != 0
        assert said.count("error: ") == 1, said
        assert "error: another process of this run is gone or silent; go on from the last checkpoint" in said
        assert rounds <= lines(out) < ROUNDS
    assert command(*DIGITS, "--out", out, "--resume")[0] == 0
    assert command(*DIGITS, "--out", whole)[0] == 0
    assert_close(states(out), states(whole))
    assert_clean(out)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (out, whole)]
    # Losses are sums of single-precision numbers, which several processes add in another order.
    scores = [summary.pop("scores") for summary in summaries]
    assert_alike(*scores, tolerance=1e-5)
    assert summaries[0] | {"seconds": 0} == summaries[1] | {"seconds": 0}


def test_ctrl_c_stops_all_after_a_round_and_says_how_to_go_on(tmp_path):
    process = digits(tmp_path / "run", "--set=rounds=5000", "--set=checkpoint.every=1000")
    wait_for(process, tmp_path / "run", 2)
    process.send_signal(signal.SIGINT)
    code, said = ends(process)
    assert code != 0
    assert said.count("stopped after round ") == 1, said
    assert f"--out {tmp_path / 'run'} --resume" in said
    assert states(tmp_path / "run")["rounds"] == lines(tmp_path / "run")
    assert_clean(tmp_path / "run")


def test_a_client_that_diverges_stops_all_with_one_line(tmp_path):
    code, said = ends(digits(tmp_path / "run", "--set=lr=1e30"))
    assert code != 0
    assert said.count("error: ") == 1, said
    assert "training diverged" in said
    assert said.count("exitcode  : 2 ") == 2, said


def test_a_folder_is_taken_until_the_last_process_of_its_run_is_gone(tmp_path):
    first = run_folder.RunFolder(tmp_path)
    first.share()
    other = run_folder.SharedFolder(tmp_path)
    first.close()
    with pytest.raises(FedslrError, match="another process is running in"):
        run_folder.RunFolder(tmp_path)
    other.close()
    run_folder.RunFolder(tmp_path).close()


def test_compare_is_refused_in_one_line(command, monkeypatch, tmp_path):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    code, _, said = command("compare", RECIPE, "--out", tmp_path / "out")
    assert code == 2
    assert said == "error: torchrun: several processes work on one run (fedslr run); several runs are --jobs' work\n"
