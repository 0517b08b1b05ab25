"""States within a budget: nothing is lost, no result depends on where they lie, a round costs what its cohort costs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedslr
from conftest import make_federation, mlp
from fedslr.core.matrix import LowRank
from fedslr.data.client_data import ClientData
from fedslr.storage import checkpoint, client_store, tree_files
from fedslr.storage.client_store import ClientStore
from fedslr.storage.tree_files import Entry
from test_checkpoint import STORES, Killed, assert_clean, contents, die_at, run

# --- budgets --------------------------------------------------------------------------------------------------------

ONE = 2 * 83 * 4
"""Bytes of one client's state: the personal part and the dual of the small model."""


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("unlimited")
    run(out, rounds=6)
    return contents(out)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("budget", [0, "1KB", ONE, 3 * ONE, "1GB"])
def test_no_budget_changes_a_run_or_its_resumption(budget, every, unlimited, tmp_path):
    out, rounds = tmp_path / "stopped", iter(range(2))
    run(tmp_path / "whole", rounds=6, memory_budget=budget, checkpoint_every=every)
    with pytest.raises(fedslr.Interrupted):
        run(out, rounds=6, memory_budget=budget, checkpoint_every=every, should_stop=lambda: next(rounds, None) is None)
    assert_clean(out)
    run(out, rounds=6, memory_budget=budget, checkpoint_every=every, resume=True)
    for found in (tmp_path / "whole", out):
        assert contents(found) == unlimited
        assert_clean(found)


def test_a_budget_may_change_when_a_run_goes_on(unlimited, tmp_path):
    run(tmp_path, rounds=2, memory_budget=ONE)
    run(tmp_path, rounds=4, store="disk", resume=True)
    run(tmp_path, rounds=6, resume=True)
    assert contents(tmp_path)["clients"] == unlimited["clients"]


def test_a_budget_needs_no_folder(unlimited):
    assert run(rounds=6, memory_budget=ONE).records[-1]["bytes_up"] == unlimited["records"][-1]["bytes_up"]


def saved(kept: ClientStore) -> dict[int, Entry]:
    """Save a store; return the files of all clients."""
    kept.save()
    return dict(kept.entries)


def states(count: int) -> list[dict[str, Any]]:
    return [{"state": {"p": {"w": torch.full((5, 5), float(i + 1))}}} for i in range(count)]


@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize("budget", [0, 99, 100, 250, 10**6])
def test_memory_holds_what_the_budget_allows_and_nothing_is_lost(budget, cores, tmp_path, monkeypatch):
    """Any order of putting, getting and saving: the bytes are those of the states held, and within the budget."""
    monkeypatch.setattr(tree_files, "cores", lambda: cores)
    kept, chance, newest = ClientStore(tmp_path, budget=budget), random.Random(0), {}
    for version in range(1, 200):
        client = chance.randrange(8)
        state = {"state": {"w": torch.full((chance.choice([5, 25]),), float(version))}}
        kept.put(client, state, version)
        newest[client] = state
        kept.prefetch(chance.sample(range(8), 3))
        asked = chance.randrange(8)
        found = kept.get(asked)
        assert (found is None) == (asked not in newest)
        assert found is None or torch.equal(found["state"]["w"], newest[asked]["state"]["w"])
        for tier in kept._tiers:
            assert tier.bytes == sum(map(client_store.size, tier.states.values())) <= budget
        if version % 20 == 0:
            entries = saved(kept)
            kept.collect(set())
            assert {p.name for p in tmp_path.iterdir()} == {e.file for e in entries.values()}
            assert set(entries) == set(newest)


def test_the_states_put_last_stay_in_memory(tmp_path):
    kept = ClientStore(tmp_path, budget=250)
    for client, state in enumerate(states(4)):
        kept.put(client, state, 1)
    kept.flush()
    assert list(kept._tiers[0].states) == [2, 3]
    assert sorted(p.name[:13] for p in tmp_path.iterdir()) == ["client-000000", "client-000001"]


def test_what_leaves_the_first_memory_goes_to_the_next_and_then_to_disk(tmp_path):
    """As on a GPU: its memory, the host's, files."""
    kept = ClientStore(tmp_path)
    kept._tiers = [client_store.Tier(100, dict), client_store.Tier(200, dict)]
    for client, state in enumerate(states(5)):
        kept.put(client, state, 1)
    kept.flush()
    assert [list(t.states) for t in kept._tiers] == [[4], [2, 3]]
    assert set(kept.entries) == {0, 1}
    for client, state in enumerate(states(5)):
        assert torch.equal(kept.get(client)["state"]["p"]["w"], state["state"]["p"]["w"])


def test_prefetched_states_are_those_of_the_files(tmp_path, monkeypatch):
    kept = ClientStore(tmp_path, budget=0)
    for client, state in enumerate(states(3)):
        kept.put(client, state, 1)
    kept.save()
    kept.prefetch([0, 1, 7])
    kept.put(1, states(9)[8], 2)
    kept.flush()
    assert float(kept.get(1)["state"]["p"]["w"][0, 0]) == 9
    for job in kept._reading.values():
        job.result()
    with monkeypatch.context() as patch:
        patch.setattr(tree_files, "read_tree", None)
        assert float(kept.get(0)["state"]["p"]["w"][0, 0]) == 1
    assert kept.get(7) is None


def test_a_failed_read_ahead_is_the_error_of_a_read(tmp_path):
    kept = ClientStore(tmp_path, budget=0)
    kept.put(0, states(1)[0], 1)
    (path,) = [tmp_path / e.file for e in saved(kept).values()]
    path.write_bytes(b"damaged")
    kept.prefetch([0])
    with pytest.raises(fedslr.CheckpointError, match="SHA-256 does not match"):
        kept.get(0)
    with pytest.raises(fedslr.CheckpointError, match="SHA-256 does not match"):
        kept.get(0)


def test_a_failed_write_surfaces_and_loses_nothing(tmp_path, monkeypatch):
    kept = ClientStore(tmp_path, budget=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        # It may be noticed as soon as that.
        with contextlib.suppress(fedslr.CheckpointError):
            kept.put(0, states(1)[0], 1)
        with pytest.raises(fedslr.CheckpointError, match=r"cannot write .*full; make room"):
            kept.save()
    assert float(kept.get(0)["state"]["p"]["w"][0, 0]) == 1
    assert set(saved(kept)) == {0}
    kept.close()
    assert float(kept.get(0)["state"]["p"]["w"][0, 0]) == 1


def test_the_training_waits_when_the_disk_is_far_behind(tmp_path):
    kept = ClientStore(tmp_path, budget=0)
    for client, state in enumerate(states(3 * client_store.MAX_PENDING_WRITES)):
        kept.put(client, state, 1)
        assert len(kept._being_written) <= client_store.MAX_PENDING_WRITES
    kept.close()
    assert all(kept.get(c) is not None for c in range(3 * client_store.MAX_PENDING_WRITES))


# --- several threads ------------------------------------------------------------------------------------------------

WAIT = 30
"""Seconds after which a thread that nobody comes to meet has failed."""


def number_of(path: Path) -> tuple[int, int]:
    """The client and the version that a file is of."""
    _, client, version = path.stem.split("-")
    return int(client), int(version)


def on_write(monkeypatch: pytest.MonkeyPatch, before: Callable[[int, int], None]) -> None:
    """Let something happen before a state is written, given its client and version."""
    real = client_store.write_whole

    def write(path: Path, *pieces: Any) -> None:
        before(*number_of(path))
        real(path, *pieces)

    monkeypatch.setattr(client_store, "write_whole", write)


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (5, 5), (8, 8), (64, 8)])
def test_there_are_as_many_threads_as_cores_up_to_eight(cores, expected, monkeypatch):
    monkeypatch.setattr(tree_files, "cores", lambda: cores)
    assert tree_files.threads() == expected


@pytest.mark.parametrize("budget", [None, 0])
def test_states_are_written_and_read_at_the_same_time(budget, tmp_path, monkeypatch):
    """Four threads meet in the middle of a write, and again in a read: fewer of them would wait in vain."""
    monkeypatch.setattr(tree_files, "cores", lambda: 4)
    meeting = threading.Barrier(4, timeout=WAIT)
    on_write(monkeypatch, lambda client, version: meeting.wait() and None)
    kept = ClientStore(tmp_path, budget=budget)
    for client, state in enumerate(states(8)):
        kept.put(client, state, 1)
    entries = saved(kept)
    assert len(entries) == 8
    real = tree_files.read_verified
    monkeypatch.setattr(tree_files, "read_verified", lambda *args: (meeting.wait(), real(*args))[1])
    tree_files.verify(tmp_path, entries.values())
    again = ClientStore(tmp_path)
    again.load(entries, set())
    again.prefetch(range(8))
    for client, state in enumerate(states(8)):
        assert torch.equal(again.get(client)["state"]["p"]["w"], state["state"]["p"]["w"])


def test_the_newer_of_two_versions_counts_even_if_it_is_written_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tree_files, "cores", lambda: 2)
    newer = threading.Event()
    on_write(monkeypatch, lambda client, version: newer.set() if version == 2 else newer.wait(WAIT) and None)
    kept = ClientStore(tmp_path, budget=0)
    for version, state in enumerate(states(2), start=1):
        kept.put(0, state, version)
    entry = saved(kept)[0]
    assert number_of(Path(entry.file)) == (0, 2)
    assert [p.name for p in tmp_path.iterdir()] == [entry.file]
    assert float(tree_files.read_tree(tmp_path, entry)["state"]["p"]["w"][0, 0]) == 2


@pytest.mark.parametrize("failing", [0, 3, 7])
def test_one_failed_write_of_many_is_that_of_the_save(failing, tmp_path, monkeypatch):
    """The next save makes up for it."""
    monkeypatch.setattr(tree_files, "cores", lambda: 4)
    kept = ClientStore(tmp_path)
    for client, state in enumerate(states(8)):
        kept.put(client, state, 1)

    def fail(client: int, version: int) -> None:
        if client == failing:
            raise fedslr.CheckpointError("cannot write")

    with monkeypatch.context() as patch:
        on_write(patch, fail)
        with pytest.raises(fedslr.CheckpointError, match="cannot write"):
            kept.save()
    entries = saved(kept)
    tree_files.verify(tmp_path, entries.values())
    assert {p.name for p in tmp_path.iterdir()} == {e.file for e in entries.values()}
    assert set(entries) == set(range(8))


def test_nothing_is_written_once_a_store_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(tree_files, "cores", lambda: 2)
    begun, go = threading.Barrier(3, timeout=WAIT), threading.Event()
    started: list[int] = []

    def hold(client: int, version: int) -> None:
        started.append(client)
        begun.wait()
        go.wait(WAIT)

    on_write(monkeypatch, hold)
    kept = ClientStore(tmp_path, budget=0)
    for client, state in enumerate(states(10)):
        kept.put(client, state, 1)
    begun.wait()
    real = ThreadPoolExecutor.shutdown

    def shutdown(pool: ThreadPoolExecutor, **options: Any) -> None:
        real(pool, **{**options, "wait": False})
        go.set()
        real(pool, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    kept.close()
    assert sorted(started) == [0, 1]
    assert {number_of(p)[0] for p in tmp_path.iterdir()} == {0, 1}
    assert all(kept.get(c) is not None for c in range(10))


@pytest.mark.parametrize("damaged", range(0, 9, 2))
def test_a_damaged_file_among_many_is_found(damaged, tmp_path, monkeypatch):
    monkeypatch.setattr(tree_files, "cores", lambda: 4)
    kept = ClientStore(tmp_path)
    for client, state in enumerate(states(9)):
        kept.put(client, state, 1)
    entries = saved(kept)
    tree_files.verify(tmp_path, entries.values())
    (tmp_path / entries[damaged].file).write_bytes(b"damaged")
    with pytest.raises(fedslr.CheckpointError, match=f"client-00000{damaged}.* SHA-256 does not match"):
        tree_files.verify(tmp_path, entries.values())


@pytest.mark.gpu
def test_states_on_a_gpu_are_saved_as_they_are(tmp_path):
    kept = ClientStore(tmp_path, device="cuda")
    for client, state in enumerate(states(40)):
        kept.put(client, state, 1)
    entries = saved(kept)
    for client, state in enumerate(states(40)):
        assert torch.equal(tree_files.read_tree(tmp_path, entries[client])["state"]["p"]["w"], state["state"]["p"]["w"])


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, 0])
def test_factors_on_a_gpu_are_multiplied_there(budget, tmp_path):
    """A product of the host differs by rounding, and a resumed run would go on from it."""
    torch.manual_seed(0)
    full = LowRank(torch.randn(60, 50, device="cuda"), torch.randn(50, 50, device="cuda"), (60, 50))
    kept = ClientStore(tmp_path, "cuda", budget)
    kept.put(0, {"state": {"p": {"w": full}}}, 1)
    found = tree_files.read_tree(tmp_path, saved(kept)[0])["state"]["p"]["w"]
    assert torch.equal(found, full.dense().cpu())


# --- many clients ---------------------------------------------------------------------------------------------------


@STORES
def test_manifests_of_many_clients_name_only_what_changed(kind, tmp_path, monkeypatch):
    """With an index as without one: the same run, nothing left over, resumed as if never stopped."""

    def all_clients(folder: Path) -> dict[int, str]:
        kept = checkpoint.Checkpoints(folder / "checkpoint")
        return {c: e.sha256 for c, e in kept._read(kept.rounds()[0]).clients.items()}

    run(tmp_path / "plain", rounds=9, store=kind)
    monkeypatch.setattr(checkpoint, "MAX_CLIENTS_IN_MANIFEST", 2)
    run(tmp_path / "indexed", rounds=9, store=kind)
    run(tmp_path / "stopped", rounds=6, store=kind)
    run(tmp_path / "stopped", rounds=9, store=kind, resume=True)
    expected = all_clients(tmp_path / "plain")
    for name in ("indexed", "stopped"):
        folder = tmp_path / name / "checkpoint"
        manifests = [json.loads(p.read_text()) for p in folder.glob("manifest-*.json")]
        assert all(len(m["clients"]) <= 2 for m in manifests)
        assert {p.name for p in folder.glob("index-*")} == {m["index"][0] for m in manifests}
        assert all_clients(tmp_path / name) == expected
        assert contents(tmp_path / name)["server"] == contents(tmp_path / "plain")["server"]


def test_a_damaged_index_gives_way_to_the_generation_before(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_CLIENTS_IN_MANIFEST", 1)
    run(tmp_path / "whole", rounds=7)
    run(tmp_path / "run", rounds=5)
    (tmp_path / "run" / "checkpoint" / "index-000005.json").write_text("{}")
    told: list[str] = []
    run(tmp_path / "run", rounds=7, resume=True, warn=told.append)
    assert "the checkpoint of round 5 is damaged" in told[0]
    assert contents(tmp_path / "run")["server"] == contents(tmp_path / "whole")["server"]


@pytest.mark.parametrize("number", range(1, 60, 4))
def test_killed_while_an_index_is_made(number, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_CLIENTS_IN_MANIFEST", 1)
    run(tmp_path / "whole", rounds=4, memory_budget=ONE)
    with monkeypatch.context() as patch:
        die_at(patch, number)
        with pytest.raises(Killed):
            run(tmp_path / "run", rounds=4, memory_budget=ONE)
    run(tmp_path / "run", rounds=4, memory_budget=ONE, resume=True, warn=lambda text: None)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    found = [{p.name for p in (tmp_path / name / "checkpoint").rglob("*")} for name in ("run", "whole")]
    assert found[0] == found[1]


class Lazy(Sequence[ClientData]):
    """Clients that are made when they are asked for."""

    def __init__(self, clients: Sequence[ClientData]) -> None:
        self.clients, self.made = clients, 0

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, client: Any) -> Any:
        self.made += 1
        return self.clients[client]


def test_clients_data_may_be_made_when_they_are_used():
    """A round asks for its cohort's data and no others'; the run is that of a list."""
    federation = make_federation([5] * 50)
    lazy = Lazy(federation.clients)
    options = {"rounds": 4, "clients_per_round": 2, "batch_size": 4, "evaluate_every": 9, "evaluate_clients": 3}
    made: list[int] = []
    method = fedslr.FedSLR(eta_g=2, rank_penalty=0.01)
    found = fedslr.run(
        method, replace(federation, clients=lazy), mlp(), on_round=lambda record: made.append(lazy.made), **options
    )
    expected = fedslr.run(method, federation, mlp(), **options)
    assert all(torch.equal(x, found.global_params[k]) for k, x in expected.global_params.items())
    assert made[2] - made[1] == made[1] - made[0] <= 2 * 4


def test_some_clients_can_be_evaluated_for_all(tmp_path):
    everyone = run(evaluate_every=1)
    few = run(tmp_path, evaluate_every=1, evaluate_clients=2)
    for all_of_them, some in zip(everyone.records, few.records, strict=True):
        assert some["evaluated"] == few.records[0]["evaluated"]
        each = all_of_them["accuracy_personal_per_client"]
        assert some["accuracy_personal_per_client"] == [each[c] for c in some["evaluated"]]
    assert all_of_them["evaluated"] is None
    sampled = [r for r in few.records if set(r["clients"]) & set(r["evaluated"])]
    assert (few.summary["accuracy_sampled"]["personal"] is None) == (not sampled)
    assert "evaluated" in json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
