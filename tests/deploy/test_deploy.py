"""The protocol of a deployment: whatever fails, every upload is counted once or not at all, on both sides."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedslr
from conftest import make_arrays, make_federation
from deployed import (
    FORK,
    NODE_STEPS,
    SERVER_STEPS,
    SIZES,
    Clock,
    Federation,
    Forked,
    Hurried,
    Local,
    data_of,
    kill_after_calls,
    mismatch,
    recipe,
)
from dying import die_at
from fedslr.channel import encoding, packing
from fedslr.core import factored, tree
from fedslr.core.errors import CheckpointError, FedslrError
from fedslr.core.states import plain
from fedslr.deploy import lifecycle, node_store
from fedslr.deploy.messages import DONE, EVALUATE, LOST, REFUSED, TRAIN, Order, digest
from fedslr.deploy.node import Node
from fedslr.deploy.node_work import NodeWork
from fedslr.deploy.predict import scores
from fedslr.deploy.uploads import scale_within, scaled
from fedslr.storage.record import read_records

METHODS = list(fedslr.ALGORITHMS)
EXACT, DOUBLE = 1e-6, 1e-12
"""How far sums of numbers in single and in double precision may be apart."""


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    left, right = (tree.leaves(factored.multiply_out(plain(x))) for x in (a, b))
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def same_members(a: Any, b: Any) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def assert_is_simulated(federation: Federation, server: Any) -> None:
    """Server and clients are where a simulation is whose cohorts were the clients that counted."""
    records = server.database.records()
    found = federation.simulated([r["clients"] for r in records])
    assert [r["round"] for r in records] == list(range(1, server.settings.rounds + 1))
    assert same_members(server.accounts.state, found.state.server_state)
    for client in server.accounts.members:
        assert same_members(federation.member(client), found.state.roster.member(client)), client
        ours, theirs = server.accounts.account(client), found.state.roster.member(client)
        assert same_members(ours, (theirs.ledger, theirs.address)), client
    counted = [(client, round) for client, round, *_ in server.database.counted()]
    assert sorted(counted) == sorted((c, r["round"] - 1) for r in records for c in r["clients"])


# --- a deployment is its simulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("post", [Local, Hurried])
@pytest.mark.parametrize("name", METHODS)
def test_a_deployment_is_its_simulation_bit_for_bit(name, post, tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(name), post)
    server = federation.run()
    assert_is_simulated(federation, server)
    simulation = federation.simulated()
    for ours, theirs in zip(read_records(tmp_path / "run"), federation.records, strict=True):
        given = {k: v for k, v in theirs.flat().items() if not k.startswith("seconds")}
        assert {k: v for k, v in ours.items() if not k.startswith("seconds")} == given
    assert server.sizes() == simulation.sizes()


OPTIMIZERS = [
    *("optimizer=adam", "grad_clip=1", "schedule=cosine", "local_steps=3", "server_optimizer=yogi"),
    *("personal.optimizer=sgd", "personal.lr=0.02"),
]


def test_optimizers_of_clients_and_server_are_those_of_the_simulation(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe("ditto", changes=OPTIMIZERS))
    server = federation.server(federation.asked)
    next(server.rounds())
    server.folder.close()
    resumed = federation.run()
    assert resumed.accounts.state.moments.keys() == {"m", "v"}
    assert_is_simulated(federation, resumed)


def test_an_optimizer_that_the_method_cannot_use_is_refused():
    with pytest.raises(fedslr.FedslrError, match="fedslr's personal phase needs sgd"):
        recipe("fedslr", changes=["optimizer=adam"]).require_sound()


def test_a_method_and_a_selection_of_ones_own(tmp_path):
    asked = recipe("deployed_methods:Half", changes=["selection=own_methods:first", "loss=own_methods:doubled"])
    federation = Federation(tmp_path, make_federation(SIZES), asked)
    server = federation.run()
    assert_is_simulated(federation, server)
    assert [r["clients"] for r in server.database.records()] == [[0, 1, 2]] * 5
    federation.simulated()
    assert [r.clients for r in federation.records] == [[0, 1, 2]] * 5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Forgetful", "init_client: got dict, expected a NamedTuple"),
        ("Negative", "weight: got -1.0 for .* examples, expected a number from 0"),
        ("Diverging", "the global model diverged: .*; lower lr or the method's step sizes, or set norm_bound"),
        ("Singular", "the global model diverged: it does not converge; lower lr or .*, or set norm_bound"),
    ],
)
def test_a_mistake_in_ones_own_is_a_line(name, says, tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(f"deployed_methods:{name}"))
    with pytest.raises(fedslr.FedslrError, match=says):
        federation.run()


def test_an_addressed_method_of_ones_own(tmp_path):
    """Node, server and simulation agree on the form of an upload: that of the client's payload."""
    federation = Federation(tmp_path, make_federation(SIZES), recipe("deployed_methods:Addressing"))
    assert_is_simulated(federation, federation.run())


def test_a_method_whose_server_sees_each_upload_and_addresses_each_client(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe("deployed_methods:Attentive"))
    server = federation.run()
    assert_is_simulated(federation, server)
    start, own = server.accounts.start, server.accounts.state.server.own
    assert set(own) == {str(client) for client, *_ in server.database.counted()}
    assert len({float(tree.norm(model)) for model in own.values()}) == len(own)
    # Nobody is sent another client's model, and no message is larger than one model.
    sent = [order for _, order in federation.post.sent if order.kind != "enrol"]
    assert all(encoding.decode(order.payload).keys() == start.keys() for order in sent)
    assert not any(order.shared for order in sent)
    last = {order.client: order for order in sent}
    assert all(same(encoding.decode(last[int(n)].payload), model) for n, model in own.items())


def test_limits_are_those_of_the_addressed_payload(tmp_path):
    """An upload of the form of the whole broadcast, with a model for every client, is refused."""
    federation = Federation(
        tmp_path, make_federation(SIZES), recipe("deployed_methods:Attentive", changes=["rounds=2"])
    )
    server = federation.server(federation.asked)

    def swell(identity: str, order: Order, fields: Any) -> Any:
        if order.kind != TRAIN or identity != "key-2":
            return [(identity, fields)]
        upload = encoding.decode(fields["payload"])
        data = encoding.encode({"w": upload, "own": {"2": upload}}).data
        return [(identity, {**fields, "payload": data, "digest": digest(data)})]

    federation.post.fate = swell
    assert all(2 not in record.clients for record in server.rounds())
    server.folder.close()
    assert all("is missing" in why or "is unexpected" in why for why in federation.refused)
    assert_is_simulated(federation, server)


def test_a_method_that_masks_is_sent_its_own_weights_only(tmp_path):
    """FedSpa: a client is sent its masked weights, in training and evaluation, and the global model to evaluate it."""
    federation = Federation(tmp_path, make_federation(SIZES), recipe("fedspa", changes=["clients_per_round=5"]))
    server = federation.run()
    asked = {(o.client, o.kind, o.round): o for _, o in federation.post.sent if o.kind == EVALUATE}
    for client in server.accounts.members:
        order = asked[client, EVALUATE, 5]
        mask = federation.member(client).client.mask
        received = factored.multiply_out(encoding.decode(order.payload))
        assert all(bool((received[k][~mask[k]] == 0).all()) for k in mask)
        assert same(encoding.decode(order.shared), server.accounts.state.server.w)


def test_noise_of_a_deployed_server_is_nobody_elses(tmp_path):
    """Every node knows the seed: noise that followed from it would hide nothing."""
    found = []
    for home in ("a", "b"):
        asked = recipe("deployed_methods:Noisy", changes=["rounds=1"])
        server = Federation(tmp_path / home, make_federation(SIZES), asked).run()
        found.append(torch.cat([x.flatten() for x in server.accounts.state.server.w.values()]))
    assert not torch.equal(*found)


def test_a_selection_that_is_not_there_leaves_no_federation_behind(tmp_path):
    wrong = recipe(changes=["selection=own_methods:nowhere"])
    federation = Federation(tmp_path, make_federation(SIZES), wrong)
    with pytest.raises(fedslr.FedslrError, match="has no 'nowhere'"):
        federation.run()
    federation.asked = recipe(changes=["selection=own_methods:first"])
    assert federation.run().done == 5


@pytest.mark.parametrize("name", ["fedslr", "scaffold", "fedspa"])
def test_bytes_are_those_of_the_payloads(name, tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(name))
    up: list[int] = []

    def weigh(identity: str, order: Order, fields: Any) -> Any:
        if order.kind == TRAIN:
            up.append(len(fields["payload"]))
        return [(identity, fields)]

    federation.post.fate = weigh
    records = federation.run().database.records()
    down = [len(order.payload) for _, order in federation.post.sent if order.kind == TRAIN]
    assert (sum(down), sum(up)) == tuple(sum(r[k] for r in records) for k in ("bytes_down", "bytes_up"))


def test_the_run_folder_is_that_of_a_run(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe())
    summary = lifecycle.finish(federation.run())
    reference = fedslr.run(fedslr.FedSLR(), make_federation(SIZES), "mlp", rounds=1).summary
    assert summary.keys() == reference.keys()
    assert (summary["clients"], summary["rounds"], summary["algorithm"]) == (5, 5, "fedslr")
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000


# --- nodes that are killed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"),
    [*(("fedslr", step) for step in NODE_STEPS), ("scaffold", "booking"), ("feddyn", "pending"), ("ditto", "answered")],
)
def test_a_node_killed_at_any_step_goes_on(name, step, tmp_path):
    """Every node is killed at this step of every order it gets, once, and started again."""
    federation = Federation(tmp_path, make_federation(SIZES), recipe(name), Forked)
    seen: set[tuple[int, str, int]] = set()

    def once(node: Any, order: Order) -> str | None:
        key = (node.client, order.kind, order.round)
        return None if key in seen else (seen.add(key), step)[1]

    federation.post.kill = once
    server = federation.run(clock=Clock(0.01))
    assert federation.post.deaths >= (4 if step in ("booking", "booked") else 15)
    if name != "ditto":
        assert mismatch(federation, server) <= EXACT
    assert_is_simulated(federation, server)


def test_an_upload_is_made_once_however_often_it_is_asked_for(tmp_path, monkeypatch):
    trainings: list[int] = []
    train = NodeWork.local_update
    monkeypatch.setattr(
        NodeWork, "local_update", lambda work, *args: (trainings.append(work.client), train(work, *args))[1]
    )
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=1"]))
    answers: dict[str, set[str]] = {}

    def lose(identity: str, order: Order, fields: Any) -> Any:
        answers.setdefault(identity, set()).add(fields["digest"])
        return [] if order.kind == TRAIN and order.attempt < 3 else [(identity, fields)]

    federation.post.fate = lose
    server = federation.run()
    assert [attempt for _, _, attempt, *_ in server.database.counted()] == [3] * 5
    # Others were asked beside those who did not answer.
    assert len(trainings) == len(set(trainings)) == 5
    assert_is_simulated(federation, server)


# --- the personal part, which is trained after the reply ------------------------------------------------------------


def spied(monkeypatch: pytest.MonkeyPatch, federation: Federation) -> list[tuple[str, str, int]]:
    """What happens, to which client, in which round: "trained", "answered", "personalized"."""
    events: list[tuple[str, str, int]] = []

    def spying(name: str, word: str) -> Any:
        real = getattr(NodeWork, name)

        def spy(work: NodeWork, *args: Any) -> Any:
            events.append((word, f"key-{work.client}", args[-1].number))
            return real(work, *args)

        return spy

    for name, word in (("local_update", "trained"), ("personalize", "personalized")):
        monkeypatch.setattr(NodeWork, name, spying(name, word))
    fate = federation.post.fate

    def answer(identity: str, order: Order, fields: Any) -> Any:
        if order.kind == TRAIN:
            events.append(("answered", identity, order.round))
        return fate(identity, order, fields)

    federation.post.fate = answer
    return events


def test_the_reply_precedes_the_personal_part(tmp_path, monkeypatch):
    federation = Federation(tmp_path, make_federation(SIZES), recipe())
    events = spied(monkeypatch, federation)
    server = federation.run()
    assert len(events) == 3 * 5 * 3
    for client, round, *_ in server.database.counted():
        mine = [word for word, identity, number in events if (identity, number) == (f"key-{client}", round)]
        assert mine == ["trained", "answered", "personalized"]


def test_a_method_without_a_personal_part_has_nothing_to_finish(tmp_path, monkeypatch):
    federation = Federation(tmp_path, make_federation(SIZES), recipe("feddyn"))
    events = spied(monkeypatch, federation)
    federation.post.fate = lambda identity, order, fields: [(identity, fields)]
    federation.run()
    assert {word for word, *_ in events} == {"trained"}


def test_an_upload_that_is_asked_for_again_does_not_wait_for_the_personal_part(tmp_path, monkeypatch):
    """The first answer is lost, and the node was killed before its personal part: the second answer comes at once."""
    asked = recipe(clients=1, changes=["rounds=1", "clients_per_round=1"])
    federation = Federation(tmp_path, make_federation(SIZES[:1]), asked, Hurried)
    federation.post.fate = lambda identity, order, fields: (
        [] if order.kind == TRAIN and order.attempt < 2 else [(identity, fields)]
    )
    events = spied(monkeypatch, federation)
    assert_is_simulated(federation, federation.run())
    assert [word for word, *_ in events[:4]] == ["trained", "answered", "answered", "personalized"]


@pytest.mark.parametrize("name", ["fedslr", "ditto"])
@pytest.mark.parametrize("step", ["answered", "personalized", "writing", "turning"])
def test_a_node_killed_before_or_in_its_personal_part_ends_where_one_does_that_was_not(name, step, tmp_path):
    asked = recipe(name, changes=["clients_per_round=5", "rounds=2"])
    federation = Federation(tmp_path, make_federation(SIZES), asked, Hurried)
    server = federation.server(asked)
    rounds = server.rounds()
    next(rounds)
    node = federation.post.nodes_by_identity["key-2"]
    shutil.copytree(node.store.folder, tmp_path / "undisturbed")
    undisturbed = federation.node(2)
    undisturbed.store.folder = tmp_path / "undisturbed"
    undisturbed.finish()
    assert undisturbed.store.read().pending.broadcast is None

    process = FORK.Process(target=lambda: (die_at(*NODE_STEPS[step]), node.finish()))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert node.store.read().pending.broadcast is not None

    sent = len(federation.post.sent)
    next(rounds)
    server.folder.close()
    for identity, order in federation.post.sent[sent:]:
        if identity == "key-2":
            assert undisturbed.handle(order).status == DONE
    assert same_members(federation.member(2), federation.member_of(undisturbed))
    assert not same(federation.member(2).client, asked.recipe.algorithm.init_client(server.accounts.start))
    assert_is_simulated(federation, server)


def test_a_personal_part_that_diverges_stays_as_it_was(tmp_path):
    asked = recipe("deployed_methods:Exploding", changes=["clients_per_round=5", "rounds=2"])
    federation = Federation(tmp_path, make_federation(SIZES), asked)
    said: list[str] = []
    federation.post.nodes_by_identity["key-2"].say = said.append
    server = federation.server(asked)
    rounds = server.rounds()
    next(rounds)
    assert [line.partition(":")[0] for line in said] == ["round 1, client 2"]
    assert "training of the personal part diverged, it stays as it was" in said[0]
    next(rounds)
    server.folder.close()
    assert all(r["clients"] == [0, 1, 2, 3, 4] for r in server.database.records())
    assert mismatch(federation, server) <= EXACT
    assert tree.norm(federation.member(2).client.p) > 0


# --- a server that is killed ----------------------------------------------------------------------------------------


def serve(federation: Federation, step: str | None = None, count: int = 0) -> None:
    """In a process of its own: go on with the run, and die at a step of it."""
    if step is not None:
        die_at(*SERVER_STEPS[step], count)
    federation.run(clock=time.monotonic)


@pytest.mark.parametrize("step", SERVER_STEPS)
def test_a_server_killed_at_any_step_goes_on(step, tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe())
    deaths = 0
    for count in range(3):
        process = FORK.Process(target=serve, args=(federation, step, count))
        process.start()
        process.join()
        deaths += process.exitcode == -signal.SIGKILL
    assert deaths >= 2
    server = federation.run()
    assert mismatch(federation, server) <= EXACT
    assert_is_simulated(federation, server)
    assert len(read_records(tmp_path / "run")) == 5


def test_a_server_killed_at_random_moments_goes_on(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=40", "evaluate.every=10"]))
    rng = random.Random(0)
    for _ in range(20):
        kill_after_calls(rng.randrange(1_000, 40_000), lambda: serve(federation))
    server = federation.run()
    assert mismatch(federation, server) <= EXACT
    assert_is_simulated(federation, server)


def test_nothing_is_resumed_where_nothing_is(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe())
    with pytest.raises(FedslrError, match="holds no federation to resume"):
        federation.server(None)
    federation.run()
    with pytest.raises(FedslrError, match=r"this is not the run in .*: lr was 0\.05, now 0\.1"):
        federation.server(recipe(changes=["lr=0.1"]))


def test_a_finished_run_can_be_made_longer(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2"]))
    federation.run()
    federation.asked = recipe(changes=["rounds=4"])
    assert_is_simulated(federation, federation.run())


# --- messages that come late, twice, never --------------------------------------------------------------------------

FATES = ("arrives", "is lost", "comes twice", "comes a round late")


@given(fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=40), method=st.sampled_from(["fedslr", "scaffold"]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_to_messages_the_books_agree(fates, method, tmp_path_factory):
    asked = recipe(method, changes=["federation.minimum=1", "federation.attempts=100", "rounds=4"])
    federation = Federation(tmp_path_factory.mktemp("federation"), make_federation(SIZES), asked)
    plan, late = iter(fates), []

    def happen(identity: str, order: Order, fields: Any) -> Any:
        now, late[:] = list(late), []
        fate = next(plan, "arrives") if order.kind == TRAIN else "arrives"
        if fate == "comes a round late":
            late.append((identity, fields))
        return now + [(identity, fields)] * {"arrives": 1, "comes twice": 2}.get(fate, 0)

    federation.post.fate = happen
    server = federation.run()
    assert mismatch(federation, server) <= EXACT
    assert_is_simulated(federation, server)


EVENTS = ("nothing", "a client joins", "a client leaves", "a client gets a new key", "a client gets more data")


@given(
    fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=40),
    events=st.lists(st.sampled_from(EVENTS), min_size=4, max_size=6),
    method=st.sampled_from(["fedslr", "feddyn", "scaffold", "deployed_methods:Weighted"]),
)
@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_mean_ledger_is_the_mean_of_the_ledgers(fates, events, method, tmp_path_factory):
    """After lost, late, repeated and scaled uploads, and with clients that come and go."""
    changes = ["federation.minimum=1", "federation.attempts=100", "federation.norm_bound=0.2", "dtype=float64"]
    asked = recipe(method, clients=4, changes=[*changes, f"rounds={len(events) + 1}"])
    federation = Federation(tmp_path_factory.mktemp("federation"), make_federation(SIZES), asked)
    plan, late, nodes = iter(fates), [], federation.post.nodes_by_identity
    newcomers = [("key-4", nodes.pop("key-4"))]

    def happen(identity: str, order: Order, fields: Any) -> Any:
        now, late[:] = list(late), []
        fate = next(plan, "arrives") if order.kind == TRAIN else "arrives"
        if fate == "comes a round late":
            late.append((identity, fields))
        return now + [(identity, fields)] * {"arrives": 1, "comes twice": 2}.get(fate, 0)

    federation.post.fate = happen
    server = federation.server(asked)
    for number, _ in enumerate(server.rounds()):
        event = events[number] if number < len(events) else "nothing"
        member = next(m for m in server.database.members().values() if not m.leaving)
        if event == "a client joins" and newcomers:
            nodes.update([newcomers.pop()])
        elif event == "a client leaves" and sum(not m.leaving for m in server.database.members().values()) > 1:
            server.database.set_leaving(member.number, True)
        elif event.startswith("a client gets") and member.identity is not None:
            server.database.release(member.number)
            node = nodes[f"{member.identity}+"] = nodes.pop(member.identity)
            if event == "a client gets more data":
                node.data = data_of(make_federation([n + 4 for n in SIZES]), member.number)
    server.folder.close()
    assert mismatch(federation, server) <= DOUBLE


def test_a_client_with_more_data_than_before_moves_the_mean_ledger(tmp_path):
    federation = Federation(
        tmp_path, make_federation(SIZES), recipe("deployed_methods:Weighted", changes=["dtype=float64", "rounds=4"])
    )
    server = federation.server(federation.asked)
    nodes = federation.post.nodes_by_identity
    for number, _ in enumerate(server.rounds()):
        if number == 1:
            server.database.release(2)
            nodes["new key"] = nodes.pop("key-2")
            nodes["new key"].data = data_of(make_federation([n + 30 for n in SIZES]), 2)
    server.folder.close()
    assert server.accounts.members[2].examples == SIZES[2] + 30
    assert mismatch(federation, server) <= DOUBLE


def test_stragglers_are_left_out(tmp_path):
    """Three of ten answers are too late; rounds go on with the others."""
    asked = recipe(clients=10, changes=["rounds=6", "clients_per_round=10", "federation.minimum=5"])
    federation = Federation(tmp_path, make_federation([4] * 10), asked)
    rng = random.Random(0)

    def dawdle(identity: str, order: Order, fields: Any) -> Any:
        return [] if order.kind == TRAIN and rng.random() < 0.3 else [(identity, fields)]

    federation.post.fate = dawdle
    server = federation.run()
    missing = sum(len(r.get("missing", [])) for r in server.database.records())
    assert 8 <= missing <= 30
    assert mismatch(federation, server) <= EXACT
    assert_is_simulated(federation, server)


def test_others_are_asked_where_clients_never_answer(tmp_path):
    """Two of five are out of order for good, and no round stops for them, though both are drawn at a time."""
    asked = recipe(changes=["rounds=8", "clients_per_round=2", "federation.minimum=2", "federation.attempts=3"])
    federation = Federation(tmp_path, make_federation(SIZES), asked)
    federation.post.fate = lambda identity, order, fields: (
        [] if order.kind == TRAIN and identity in ("key-0", "key-1") else [(identity, fields)]
    )
    server = federation.run()
    records = server.database.records()
    assert len(records) == 8
    assert all(len(r["clients"]) >= 2 and not {0, 1} & set(r["clients"]) for r in records)
    assert [0, 1] in [r.get("missing") for r in records]
    assert all(set(r.get("missing", [])) <= {0, 1} for r in records)
    assert mismatch(federation, server) <= EXACT
    assert_is_simulated(federation, server)


def test_who_is_late_is_asked_again(tmp_path):
    """Training takes longer than the deadline: every first answer is lost, but the uploads are made."""
    asked = recipe(clients=12, changes=["rounds=3", "clients_per_round=4"])
    federation = Federation(tmp_path, make_federation([4] * 12), asked)
    seen: set[Any] = set()

    def first_is_late(identity: str, order: Order, fields: Any) -> Any:
        late = (identity, order.kind, order.round) not in seen
        seen.add((identity, order.kind, order.round))
        return [] if late and order.kind == TRAIN else [(identity, fields)]

    federation.post.fate = first_is_late
    server = federation.run()
    assert all(len(r["clients"]) == 4 and len(r["missing"]) == 4 for r in server.database.records())
    assert {attempt for _, _, attempt, *_ in server.database.counted()} == {2}
    assert_is_simulated(federation, server)


@pytest.mark.parametrize("dead", [0, 1, 2, 3])
def test_no_round_stops_while_enough_are_well(dead, tmp_path):
    asked = recipe("fedavg", clients=6, changes=["rounds=4", "evaluate.every=9", "federation.minimum=3"])
    rng = random.Random(dead)
    federation = Federation(tmp_path, make_federation([4] * 6), asked)
    gone = {f"key-{c}" for c in rng.sample(range(6), dead)}
    federation.post.fate = lambda identity, order, fields: (
        [] if order.kind == TRAIN and (identity in gone or rng.random() < 0.2) else [(identity, fields)]
    )
    assert len(federation.run().database.records()) == 4


def test_fewer_rounds_than_are_done_are_refused(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=3"]))
    federation.run()
    federation.asked = recipe(changes=["rounds=2"])
    with pytest.raises(FedslrError, match="rounds: got 2, but 3 are done in"):
        federation.run()


def test_who_was_asked_to_leave_is_not_asked_again_in_the_round(tmp_path):
    asked = recipe(clients=3, changes=["rounds=2", "clients_per_round=3", "federation.minimum=3"])
    federation = Federation(tmp_path, make_federation(SIZES[:3]), asked)
    server = federation.server(asked)

    def fall_ill(identity: str, order: Order, fields: Any) -> Any:
        if order.kind != TRAIN or identity != "key-1":
            return [(identity, fields)]
        server.database.set_leaving(1, True)
        return []

    federation.post.fate = fall_ill
    assert [r.clients for r in server.rounds()] == [[0, 2], [0, 2]]
    server.folder.close()
    assert list(server.accounts.members) == [0, 2]
    assert mismatch(federation, server) <= EXACT


def test_a_round_that_too_few_answer_stops_the_run_and_can_be_resumed(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["federation.attempts=2"]))
    federation.post.fate = lambda identity, order, fields: (
        [] if order.kind == TRAIN and order.round == 1 else [(identity, fields)]
    )
    with pytest.raises(FedslrError, match="round 2: fewer than 2 uploads arrived in 2 attempts from clients"):
        federation.run()
    federation.post.fate = lambda identity, order, fields: [(identity, fields)]
    assert_is_simulated(federation, federation.run())


# --- what nobody should send ----------------------------------------------------------------------------------------


def reencode(fields: Any, change: Any) -> Any:
    """An upload that was changed by its sender, with the right digest."""
    upload = encoding.decode(fields["payload"])
    change(upload)
    data = unchecked(upload)
    return {**fields, "payload": data, "digest": digest(data)}


def unchecked(upload: Any) -> bytes:
    """`wire.encode` for those who do not look whether numbers are finite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "require_finite_tensor", lambda x, path: None)
        return encoding.encode(upload).data


def put(value: float) -> Any:
    def change(upload: Any) -> None:
        next(iter(upload.values())).view(-1)[0] = value

    return change


def reshape(upload: Any) -> None:
    name = next(iter(upload))
    upload[name] = upload[name].reshape(-1)


def retype(upload: Any) -> None:
    name = next(iter(upload))
    upload[name] = upload[name].double()


HOSTILE: dict[str, tuple[Any, str]] = {
    "NaN": (lambda f: reencode(f, put(float("nan"))), "not finite"),
    "infinity": (lambda f: reencode(f, put(float("inf"))), "not finite"),
    "wrong shape": (lambda f: reencode(f, reshape), "expected .* of float32"),
    "wrong type": (lambda f: reencode(f, retype), "of float64, expected"),
    "missing tensor": (lambda f: reencode(f, lambda u: u.pop(next(iter(u)))), "is missing"),
    "extra tensor": (lambda f: reencode(f, lambda u: u.update(more=torch.zeros(2))), "is unexpected"),
    "truncated": (lambda f: {**f, "payload": f["payload"][:-7], "digest": digest(f["payload"][:-7])}, "truncated"),
    "oversized": (lambda f: {**f, "payload": bytes(10**6), "digest": digest(bytes(10**6))}, "more than the"),
    "nothing": (lambda f: {**f, "payload": b"", "digest": digest(b"")}, "is missing"),
    "wrong digest": (lambda f: {**f, "digest": "0" * 64}, "digest does not match"),
    "no fields": (lambda f: {}, "lacks 'kind'"),
    "a field too many": (lambda f: {**f, "more": 1}, "an unknown field"),
    "a field of another type": (lambda f: {**f, "round": "1"}, "a str as 'round', expected a whole number"),
    "another's number": (lambda f: {**f, "client": 0 if f["client"] else 1}, "but says it is client"),
    "an older round": (lambda f: {**f, "round": f["round"] - 1}, "which is not open"),
    "another attempt": (lambda f: {**f, "attempt": f["attempt"] + 1}, "which is not open"),
    "another run": (lambda f: {**f, "run": "0" * 16}, "to another run"),
    "an address nobody asked for": (
        lambda f: {**f, "address": encoding.encode({"m": torch.ones(2)}).data},
        "0 numbers",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_uploads_are_refused_and_the_run_completes(kind, tmp_path):
    """Client 2 sends this in every round it is sampled in; the others make the run."""
    spoil, reason = HOSTILE[kind]
    asked = recipe(changes=["clients_per_round=5", "rounds=3", "evaluate.every=9"])
    federation = Federation(tmp_path, make_federation(SIZES), asked)
    federation.post.fate = lambda identity, order, fields: [
        (identity, spoil(fields) if identity == "key-2" and order.kind == TRAIN else fields)
    ]
    server = federation.run()
    assert all(r["clients"] == [0, 1, 3, 4] and r["missing"] == [2] for r in server.database.records())
    assert len(federation.refused) == 3
    assert re.search(reason, federation.refused[0]), federation.refused
    assert_is_simulated(federation, server)
    kept = server.database.refused()
    if kind == "another run" or "which is not open" in reason:
        assert not kept  # nothing but a message that is late
    else:
        number, why = kept["client 2 (key-2)"]
        assert number == 3
        assert re.search(reason, why)


def test_the_last_refusal_of_a_few_nodes_is_kept(tmp_path):
    server = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=1"])).run()
    database = server.database
    for number in range(30):
        database.note_refusal(f"node {number}", 1, "x" * 1000)
        database.note_refusal("node 0", number, "\x1b[31mred")
    kept = database.refused()
    assert list(kept) == [f"node {number}" for number in range(11, 30)] + ["node 0"]
    assert kept["node 0"] == (29, "?[31mred")
    assert kept["node 29"] == (1, "x" * 300)


def test_a_refused_node_is_told_why(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["clients_per_round=5"]))
    heard: list[str] = []
    federation.post.nodes_by_identity["key-2"].say = heard.append
    spoil = HOSTILE["NaN"][0]
    federation.post.fate = lambda identity, order, fields: [
        (identity, spoil(fields) if identity == "key-2" and order.kind == TRAIN else fields)
    ]
    federation.run()
    assert any("the server refused the last message" in text and "not finite" in text for text in heard)


def test_replayed_reports_do_not_count_twice(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe())
    history: list[Any] = []

    def replay(identity: str, order: Order, fields: Any) -> Any:
        history.append((identity, fields))
        return [(identity, fields), *history]

    federation.post.fate = replay
    server = federation.run()
    assert mismatch(federation, server) <= EXACT
    assert_is_simulated(federation, server)


def test_an_unknown_node_cannot_upload(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe())
    federation.post.fate = lambda identity, order, fields: [
        *([("key-x", fields)] if order.kind == TRAIN else []),
        (identity, fields),
    ]
    server = federation.run()
    assert any("key-x" in text and "which is not open to it" in text for text in federation.refused)
    assert_is_simulated(federation, server)


def with_impostor(home: Path) -> tuple[Federation, Node]:
    """A federation, and a node with a store of its own that says it is client 1."""
    federation = Federation(home, make_federation(SIZES), recipe())
    impostor = federation.node(1)
    impostor.store.folder = home / "impostor"
    return federation, impostor


def test_a_node_that_claims_anothers_number_is_refused(tmp_path):
    federation, impostor = with_impostor(tmp_path)
    federation.post.nodes_by_identity["key-x"] = impostor
    server = federation.run()
    assert server.accounts.members[1].identity == "key-1"
    assert any("says it is client 1, which is another node" in text for text in federation.refused)
    assert_is_simulated(federation, server)


def test_a_node_that_was_taken_in_is_not_reported_any_more(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=1"]))
    server = federation.server(federation.asked)
    for node in ("key-0", "key-x"):
        server.database.note_refusal(f"an unknown node ({node})", 1, "it cannot take part: its store is another's")
    assert len(list(server.rounds())) == 1
    server.folder.close()
    assert list(server.database.refused()) == ["an unknown node (key-x)"]


def test_a_client_that_counts_again_is_not_reported_any_more(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2"]))
    server = federation.server(federation.asked)
    rounds = server.rounds()
    next(rounds)
    for client in range(len(SIZES)):
        server.database.note_refusal(f"client {client} (key-{client})", 1, "it was late")
    counted = next(rounds).clients
    server.folder.close()
    assert 0 < len(counted) < len(SIZES)
    assert set(server.database.refused()) == {f"client {c} (key-{c})" for c in range(len(SIZES)) if c not in counted}


def test_a_store_that_cannot_be_is_told_to_the_server(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2", "clients_per_round=5"]))
    server = federation.server(federation.asked)
    rounds = server.rounds()
    next(rounds)
    (tmp_path / "afile").touch()
    node, said = federation.post.nodes_by_identity["key-2"], []
    node.store.folder, node.say = tmp_path / "afile" / "store", said.append
    next(rounds)
    server.folder.close()
    assert said[0].startswith(f"store: cannot write to {tmp_path / 'afile' / 'store'}: ")
    assert any(said[0] in why for _, why in server.database.refused().values())


def test_numbers_can_be_registered_beforehand(tmp_path, monkeypatch):
    """An impostor that comes first gets nothing where numbers have keys."""
    federation, impostor = with_impostor(tmp_path)
    nodes = federation.post.nodes_by_identity
    pytest.importorskip("cryptography")
    monkeypatch.setattr("fedslr.deploy.keys.registered_key", lambda folder, number: f"public {number}".encode())
    names = {"key-x": "key-x"} | {f"key-{number}": digest(f"public {number}".encode()) for number in range(len(SIZES))}
    federation.post.nodes_by_identity = {names[key]: node for key, node in {"key-x": impostor, **nodes}.items()}
    federation.asked = recipe(changes=["federation.keys=/keys"])
    server = federation.run()
    assert server.accounts.members[1].identity == names["key-1"]
    assert any("says it is client 1, which has another key" in text for text in federation.refused)
    assert_is_simulated(federation, server)


@pytest.mark.parametrize("name", ["fedslr", "feddyn", "scaffold"])
def test_long_uploads_are_scaled_and_both_sides_book_the_scaled_upload(name, tmp_path):
    bound = 0.05
    asked = recipe(name, changes=[f"federation.norm_bound={bound}", "dtype=float64"])
    federation = Federation(tmp_path, make_federation(SIZES), asked)
    norms: list[float] = []

    def measure(identity: str, order: Order, fields: Any) -> Any:
        if order.kind == TRAIN:
            part = asked.recipe.algorithm.clipped(factored.multiply_out(encoding.decode(fields["payload"])))
            norms.append(float(tree.norm(part)))
        return [(identity, fields)]

    federation.post.fate = measure
    server = federation.run()
    scales = [scale for *_, scale in server.database.counted()]
    assert min(scales) < 1
    assert sorted(scales) == pytest.approx(sorted(min(1.0, bound / norm) for norm in norms))
    assert mismatch(federation, server) <= DOUBLE
    for client in server.accounts.members:
        assert same(server.accounts.account(client).ledger, federation.member(client).ledger)


def test_a_bound_scales_only_what_the_method_says():
    upload = {"w": {"a": torch.full((4,), 3.0), "b": torch.zeros(2)}, "c": {"a": torch.full((4,), 100.0)}}
    method = fedslr.ALGORITHMS["scaffold"]()
    scale = scale_within(method, upload, 2.0)
    assert scale == pytest.approx(1 / 3)
    found = scaled(method, upload, scale)
    assert float(tree.norm(found["w"])) == pytest.approx(2.0)
    assert torch.equal(found["c"]["a"], upload["c"]["a"])
    assert scale_within(method, upload, 6.01) == scale_within(method, upload, None) == 1.0
    assert scale_within(fedslr.ALGORITHMS["fedavg"](), upload, 2.0) == pytest.approx(2 / 40036**0.5)


# --- state that is lost, clients that come and go -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedslr", "feddyn", "scaffold", "fedspa"])
@pytest.mark.parametrize("damage", ["store gone", "page damaged", "state damaged", "an old copy put back"])
def test_a_node_that_lost_its_state_is_brought_back(name, damage, tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(name, changes=["clients_per_round=5"]))
    store = tmp_path / "node-2"
    server = federation.server(federation.asked)
    for number, _ in enumerate(server.rounds()):
        if number == 0:
            shutil.copytree(store, tmp_path / "copy")
        if number == 1:
            if damage == "page damaged":
                (store / "page.json").write_text('{"format": 1}')
            elif damage == "state damaged":
                next(store.glob("state-*")).write_bytes(b"nonsense")
            else:
                shutil.rmtree(store)
            if damage == "an old copy put back":
                shutil.copytree(tmp_path / "copy", store)
    server.folder.close()
    assert any(o.kind == "enrol" and o.client == 2 for _, o in federation.post.sent)
    assert not federation.refused
    assert all(r["clients"] == [0, 1, 2, 3, 4] for r in server.database.records())
    kept = server.database.account(server.accounts.members[2])
    assert kept
    account, member = server.accounts.account(2), federation.member(2)
    assert same_members(account, (member.ledger, member.address))
    if plain(account.ledger):
        assert mismatch(federation, server) <= EXACT


def test_a_server_put_back_from_a_backup_brings_its_nodes_back(tmp_path):
    """Nodes have booked rounds that the server knows nothing of any more."""
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=6"]))
    server = federation.server(federation.asked)
    for number, _ in enumerate(server.rounds()):
        if number == 2:
            shutil.copytree(tmp_path / "run", tmp_path / "backup")
    server.folder.close()
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "backup", tmp_path / "run")
    server = federation.run()
    assert server.done == 6
    assert mismatch(federation, server) <= EXACT


def test_a_client_joins_and_another_leaves(tmp_path):
    asked = recipe(clients=4, changes=["clients_per_round=4", "rounds=6"])
    federation = Federation(tmp_path, make_federation(SIZES), asked)
    newcomer = federation.post.nodes_by_identity.pop("key-4")
    server = federation.server(asked)
    off = []
    for number, _ in enumerate(server.rounds()):
        if number == 1:
            federation.post.nodes_by_identity["key-4"] = newcomer
        if number == 3:
            server.database.set_leaving(1, True)
            # However long its node stays, it is not asked again.
            server.exchange.enrolment._greeted.clear()
        if server.settings.is_evaluated(server.done):
            off.append(mismatch(federation, server))
    server.folder.close()
    cohorts = [r["clients"] for r in server.database.records()]
    assert cohorts[0] == [0, 1, 2, 3]
    assert any(4 in clients for clients in cohorts[2:])
    assert all(1 not in clients for clients in cohorts[4:])
    assert list(server.accounts.members) == [0, 2, 3, 4]
    assert len(off) == 3
    assert max(off) <= EXACT


def test_somebody_stays(tmp_path):
    asked = recipe(clients=2, changes=["clients_per_round=2", "rounds=5"])
    federation = Federation(tmp_path, make_federation(SIZES[:3]), asked)
    newcomer = federation.post.nodes_by_identity.pop("key-2")
    server = federation.server(asked)
    for number, _ in enumerate(server.rounds()):
        if number == 0:
            server.database.set_leaving(0, True)
            with pytest.raises(FedslrError, match="client: client 1 is the last one that stays"):
                server.database.set_leaving(1, True)
            server.database.set_leaving(0, False)
            server.database.set_leaving(0, True)
        if number == 1:
            assert list(server.accounts.members) == [1]
            with pytest.raises(FedslrError, match="client: client 1 is the last one that stays"):
                server.database.set_leaving(1, True)
            federation.post.nodes_by_identity["key-2"] = newcomer
        if number == 3:
            server.database.set_leaving(1, True)
    server.folder.close()
    assert list(server.accounts.members) == [2]
    assert mismatch(federation, server) <= EXACT


def test_what_others_may_not_read_is_written_so(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=1"]))
    federation.run()
    for folder in (tmp_path / "run" / "ledger", tmp_path / "node-0"):
        assert folder.stat().st_mode & 0o077 == 0


def test_a_full_disk_is_named(tmp_path):
    server = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=1"])).run()
    db = server.database._db
    db.execute(f"PRAGMA max_page_count={db.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(CheckpointError, match=r"ledger.sqlite: database or disk is full; make room"):
        server.database.note("recipe", "x" * 10**6)
    server.database.set_leaving(1, True)


def test_a_client_may_get_a_new_key(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=4"]))
    server = federation.server(federation.asked)
    for number, _ in enumerate(server.rounds()):
        if number == 1:
            server.database.release(2)
            nodes = federation.post.nodes_by_identity
            nodes["new key"] = nodes.pop("key-2")
    server.folder.close()
    federation.post.nodes_by_identity["key-2"] = federation.post.nodes_by_identity["new key"]
    assert server.accounts.members[2].identity == "new key"
    assert mismatch(federation, server) <= EXACT


def test_a_store_belongs_to_one_run(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=1"]))
    federation.run()
    other = Federation(
        tmp_path / "other", make_federation(SIZES), recipe(changes=["rounds=1", "federation.attempts=2"])
    )
    other.post.nodes_by_identity = federation.post.nodes_by_identity
    with pytest.raises(FedslrError, match="0 of 5 clients enrolled"):
        other.run()
    assert federation.member(0)


def eight_bit() -> fedslr.Federation:
    arrays = make_arrays(SIZES, (6,))
    for client in arrays:
        for name in ("x", "x_test"):
            client[name] = (128 + 20 * client[name]).clip(0, 255).astype(np.uint8)
    return fedslr.Federation.from_arrays(arrays, num_classes=3)


def test_inputs_of_another_scale_are_refused_by_the_server(tmp_path):
    federation = Federation(tmp_path, eight_bit(), recipe(changes=["rounds=1"]))
    other = Federation(tmp_path, make_federation(SIZES), recipe())
    federation.post.nodes_by_identity["key-2"] = other.node(2)
    said: list[str] = []
    with pytest.raises(FedslrError, match="4 of 5 clients enrolled"):
        federation.run(say=said.append)
    says = "its inputs are not 8-bit, but those of the first node are 8-bit; give all nodes inputs of one kind"
    assert any(says in text for text in said)
    # With the right data it is welcome.
    federation.post.nodes_by_identity["key-2"] = federation.node(2)
    assert federation.run().done == 1
    assert torch.equal(
        scores(tmp_path / "node-2", federation.federation.clients[2].x),
        scores(tmp_path / "node-2", federation.federation.clients[2].x.float() / 255),
    )


def test_models_of_8_bit_inputs_are_given_such(tmp_path, command):
    federation = Federation(tmp_path, eight_bit(), recipe(changes=["rounds=1"]))
    federation.run()
    pixels = federation.federation.clients[1].x_test
    store = tmp_path / "node-1"
    assert torch.equal(scores(store, pixels), scores(store, pixels.float() / 255))
    with pytest.raises(FedslrError, match="the model was trained on 8-bit inputs; give 8-bit inputs"):
        scores(store, pixels.float())
    assert command("export", store, "--out", tmp_path / "model.safetensors")[0] == 0
    assert "(p/255 − mean)/deviation, with mean 0 and deviation 1" in (tmp_path / "model.safetensors.md").read_text(
        "utf-8"
    )


def test_data_of_another_kind_are_refused_by_the_node(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES, shape=(7,)), recipe())
    said: list[str] = []
    with pytest.raises(FedslrError, match="0 of 5 clients enrolled"):
        federation.run(say=said.append)
    assert any("the inputs of this node have shape 7, those of the federation 6" in text for text in said)


def bad_model(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(*shape, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, classes))


def test_a_model_that_cannot_be_shared_is_refused_by_the_nodes(tmp_path):
    changes = ["model.name=test_deploy:bad_model", "federation.attempts=2"]
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=changes))
    said: list[str] = []
    with pytest.raises(FedslrError, match="0 of 5 clients enrolled"):
        federation.run(say=said.append)
    assert any("use GroupNorm" in text for text in said)


def test_an_order_of_an_older_round_is_not_worked_on(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["clients_per_round=5", "rounds=3"]))
    federation.run()
    identity, old = next((identity, order) for identity, order in federation.post.sent if order.kind == TRAIN)
    node = federation.post.nodes_by_identity[identity]
    before = node.store.read()
    assert node.handle(old).status == LOST
    assert node.store.read() == before


def everything_in(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        ("no permission", "enrol"),
        ("no permission", TRAIN),
        ("another version", "enrol"),
        ("another version", TRAIN),
        ("a full disk", "enrol"),
    ],
)
def test_a_store_that_only_cannot_be_had_is_left_as_it_is(trouble, kind, tmp_path, monkeypatch):
    """What a node has learned for itself is nowhere else."""
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["clients_per_round=5", "rounds=2"]))
    federation.run()
    identity, order = [(who, order) for who, order in federation.post.sent if order.kind == kind][-1]
    node = federation.post.nodes_by_identity[identity]
    if trouble == "another version":
        page = {**json.loads((node.store.folder / "page.json").read_text()), "format": 2}
        del page["digest"]
        (node.store.folder / "page.json").write_text(json.dumps({**page, "digest": node_store._digest(page)}))
    before = everything_in(node.store.folder)

    def refuse(number: int) -> Any:
        def call(path: Path, *args: Any, **options: Any) -> Any:
            raise OSError(number, os.strerror(number), str(path))

        return call

    with monkeypatch.context() as patch:
        if trouble == "no permission":
            read = Path.read_bytes
            wrong = refuse(errno.EACCES)
            patch.setattr(Path, "read_bytes", lambda p: wrong(p) if p.parent == node.store.folder else read(p))
        if trouble == "a full disk":
            order = replace(order, client=node.client)
            patch.setattr(os, "fsync", lambda number: refuse(errno.ENOSPC)(node.store.folder))
        report = node.handle(order)
    assert report.status == REFUSED
    left = everything_in(node.store.folder)
    assert {name: left.get(name) for name in before} == before


def test_a_damaged_page_is_kept(tmp_path):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["clients_per_round=5", "rounds=2"]))
    federation.run()
    identity, order = next((who, order) for who, order in federation.post.sent if order.kind == "enrol")
    node = federation.post.nodes_by_identity[identity]
    (node.store.folder / "page.json").write_text("{")
    before = everything_in(node.store.folder)
    assert node.handle(order).status == DONE
    kept = everything_in(node.store.folder / "damaged-1")
    assert kept == {name: data for name, data in before.items() if name in kept}
    assert any(name.startswith("state-") for name in kept)


def test_a_round_needs_half_its_cohort_unless_told_otherwise():
    assert [recipe().options.needed(n) for n in (1, 2, 5)] == [1, 1, 3]
    assert recipe(changes=["federation.minimum=4"]).options.needed(5) == 4
    assert recipe(changes=["federation.minimum=4"]).options.needed(2) == 2


# --- models that ship -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["fedslr", "fedavg", "ditto", "fedrep", "apfl", "fedspa", "pfedme", "fedamp", "ifca", "local"]
)
def test_what_was_deployed_ships(method, tmp_path, command):
    """From a node its personal model, from the server the global one: those of the simulation."""
    federation = Federation(tmp_path, make_federation(SIZES), recipe(method, changes=["rounds=2", "evaluate.every=2"]))
    federation.run()
    simulation, x = federation.simulated(), federation.federation.clients[1].x_test.float()
    code, out, _ = command("export", tmp_path / "node-1", "--out", tmp_path / "mine.safetensors")
    assert code == 0, out
    assert "the personal model of client 1" in out
    assert "of the dense model's size" in out
    mine = fedslr.load_exported(tmp_path / "mine.safetensors")
    wanted = simulation.problem.outputs(simulation.personal_params(1), x)
    torch.testing.assert_close(mine(x), wanted, rtol=1e-4, atol=1e-4)
    page = (tmp_path / "mine.safetensors.md").read_text()
    right = 100 * float((wanted.argmax(1) == federation.federation.clients[1].y_test).double().mean())
    assert rf"{right:.1f} % \(its 7 test samples\)" in page
    assert "trained with" in page
    assert "own data" in page

    code, out, err = command("export", tmp_path / "run", "--global")
    shared = simulation.state.global_model()
    if shared is None:
        assert (code, "has no global model; export a personal model on the client's node" in err) == (2, True)
        return
    assert code == 0, err
    ours = fedslr.load_exported(tmp_path / "run" / "export" / "global.safetensors")
    torch.testing.assert_close(ours(x), simulation.problem.outputs(shared, x), rtol=1e-4, atol=1e-4)


def test_what_cannot_ship_says_where_it_is(tmp_path, command):
    federation = Federation(tmp_path, make_federation(SIZES), recipe(changes=["rounds=2", "evaluate.every=2"]))
    server = federation.server(federation.asked)
    next(server.rounds())
    assert command("export", tmp_path / "node-1")[2] == (
        f"error: {tmp_path / 'node-1'}: has no personal model yet; wait for the first evaluation\n"
    )
    server.folder.close()
    coordinator = federation.run()
    lifecycle.finish(coordinator)
    for call, says in (
        (("export", "run", "--client", 1), "the model of client 1 is on its node; fedslr export STORE there"),
        (("export", "node-1", "--global"), "a node's store has its personal model only"),
        (("export", "node-1", "--client", 2), "--client: got 2, but"),
        (("export", "run"), "expected either --client or --global"),
        (("latency", "run"), "this is a deployed federation; get its models with fedslr export RUN --global"),
    ):
        code, _, err = command(call[0], tmp_path / call[1], *call[2:])
        assert (code, len(err.splitlines()), says in err) == (2, 1, True), err
