"""The law of the ledgers: the server's mean ledger is the weighted mean of the clients', whatever was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fedslr
from conftest import make_federation, mlp
from fedslr.core import tree
from fedslr.core.matrix import dense
from fedslr.core.types import Round
from fedslr.engine.aggregation import ServerState, close_round, with_member
from fedslr.engine.batched import Batched
from fedslr.engine.eager import Eager
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings
from fedslr.engine.workload import Member, Participant

SIZES = [5, 11, 3, 8, 7, 20]
NOW = Round(0, 10, 0.1, 1.0, 2, 1)


class ByExamples:
    """Clients weigh as many examples as they have."""

    def weight(self, num_examples: int) -> float:
        return float(num_examples)


class WeightedFedSLR(ByExamples, fedslr.FedSLR):
    pass


class WeightedFedDyn(ByExamples, fedslr.FedDyn):
    pass


class WeightedScaffold(ByExamples, fedslr.Scaffold):
    pass


PENALTIES = {"eta_g": 5.0, "rank_penalty": 2e-2, "l1_penalty": 1e-2}
METHODS = {
    "fedslr": fedslr.FedSLR(**PENALTIES),
    "feddyn": fedslr.FedDyn(alpha=0.2),
    "scaffold": fedslr.Scaffold(),
    "fedslr by examples": WeightedFedSLR(**PENALTIES),
    "feddyn by examples": WeightedFedDyn(alpha=0.2),
    "scaffold by examples": WeightedScaffold(),
}
with_ledger = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
engines = pytest.mark.parametrize("engine", ["eager", "batched"])
ENGINES: dict[str, type[Eager]] = {"eager": Eager, "batched": Batched}


def simulation(method: Any, engine: str, rounds: int = 8, **changes: Any) -> Simulation:
    given = {"clients_per_round": 4, "batch_size": 4, "lr": 0.1, "seed": 3, "dtype": "float64", **changes}
    settings = Settings(rounds=rounds, device="cpu", engine=engine, **given)
    return Simulation(method, make_federation(SIZES), mlp(), settings)


def weighted_mean(ledgers: Sequence[Any], weights: Sequence[float]) -> Any:
    terms = [pytree.tree_map(lambda x, w=w: w * x.double(), ledger) for w, ledger in zip(weights, ledgers, strict=True)]
    return pytree.tree_map(lambda *xs: torch.stack(xs).sum(0) / sum(weights), *terms)


def apart(a: Any, b: Any) -> float:
    """Return the largest difference of any number of two trees."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


class Members:
    """A federation whose clients join and leave, and whose server counts a share of every upload."""

    def __init__(self, method: Any, engine: str, numbers: Sequence[int]) -> None:
        run = simulation(method, engine)
        self.method, self.run, self.round = method, run, 0
        self.engine: Eager = ENGINES[engine](run.state.work)
        self.held: ServerState = run.state.server_state
        self.here: dict[int, Member] = dict.fromkeys(numbers, run.state.roster.new_member)

    @property
    def weights(self) -> list[float]:
        return [self.run.state.weights[n] for n in self.here]

    def train(self, shares: Mapping[int, float]) -> None:
        """Let some clients train and count a share of every upload."""
        now, cohort = self.run.settings.round(self.round), list(shares)
        delivery = self.run.state.deliver(self.held)
        participants = [Participant(n, self.here[n], delivery.decoded(n, self.here[n])) for n in cohort]
        uploads = tree.Mean()
        for result in self.engine.train(participants, now):
            numbers = result.numbers
            factors = [self.run.state.weights[n] * shares[n] for n in numbers]
            uploads.add_sum(result.weighted_sum(factors), sum(factors))
            booked = result.booked(self.method, [shares[n] for n in numbers], now)
            self.here |= dict(zip(numbers, booked, strict=True))
        self.held = close_round(self.method, self.held, uploads, sum(self.weights), now)
        self.round += 1

    def join(self, number: int) -> None:
        fresh, weight = self.run.state.roster.new_member, self.run.state.weights[number]
        mean = with_member(self.held.mean_ledger, sum(self.weights), fresh.ledger, weight)
        self.here[number] = fresh
        self.held = self.held._replace(mean_ledger=mean)

    def leave(self, number: int) -> None:
        ledger, weight = self.here[number].ledger, self.run.state.weights[number]
        mean = with_member(self.held.mean_ledger, sum(self.weights), ledger, -weight)
        del self.here[number]
        self.held = self.held._replace(mean_ledger=mean)

    def model(self) -> Any:
        return dense(self.held.server.w)

    def mismatch(self) -> float:
        return apart(self.held.mean_ledger, weighted_mean([m.ledger for m in self.here.values()], self.weights))


# --- the law ----------------------------------------------------------------------------------------------------------


@engines
@with_ledger
def test_the_mean_ledger_is_the_mean_of_the_ledgers(method, engine):
    """After every round of cohorts of changing size."""
    run = simulation(method, engine, selection="bernoulli")
    for _ in run.rounds():
        ledgers = [run.state.roster.member(n).ledger for n in range(len(SIZES))]
        assert apart(run.state.server_state.mean_ledger, weighted_mean(ledgers, run.state.weights)) < 1e-12
    assert float(tree.norm(run.state.server_state.mean_ledger)) > 1e-2


@engines
@with_ledger
def test_the_law_outlives_partly_counted_uploads_and_members_that_come_and_go(method, engine):
    members = Members(method, engine, range(5))
    steps = [
        lambda: members.train({0: 1.0, 2: 0.3, 4: 0.75}),
        lambda: members.train({1: 0.3}),
        lambda: members.join(5),
        lambda: members.train({5: 1.0, 0: 0.0, 3: 0.5}),
        lambda: members.leave(2),
        lambda: members.train({5: 0.9, 0: 1.0, 1: 1.0, 3: 1.0}),
        lambda: members.leave(5),
        lambda: members.join(2),
        lambda: members.train({2: 0.3, 4: 1.0}),
    ]
    for step in steps:
        step()
        assert members.mismatch() < 1e-12
    assert float(tree.norm(members.held.mean_ledger)) > 1e-2


@with_ledger
def test_booking_another_share_than_the_server_breaks_the_law(method):
    """So the tests above can fail."""
    members = Members(method, "eager", range(5))
    before = dict(members.here)
    members.train({0: 0.5, 1: 0.5})
    participant = Participant(0, before[0], members.run.state.delivery.decoded(0, before[0]))
    (result,) = members.engine.train([participant], NOW)
    members.here[0] = result.booked(method, [1.0], NOW)[0]
    assert members.mismatch() > 1e-4


@engines
@with_ledger
def test_engines_agree_on_partly_counted_uploads(method, engine):
    ours, wanted = Members(method, engine, range(6)), Members(method, "eager", range(6))
    for shares in ({0: 1.0, 1: 0.3, 2: 0.0, 3: 0.6}, {5: 0.3, 4: 1.0}, {1: 1.0}):
        ours.train(shares)
        wanted.train(shares)
    assert apart(ours.held.mean_ledger, wanted.held.mean_ledger) < 1e-12
    assert apart(ours.model(), wanted.model()) < 1e-12
    for number, member in wanted.here.items():
        assert apart(tuple(ours.here[number]), tuple(member)) < 1e-12


@engines
@pytest.mark.parametrize("by_examples", [False, True])
def test_without_rank_penalty_partly_counted_fedslr_is_feddyn(by_examples, engine):
    """Whatever was counted, joined or left."""
    slr, dyn = (WeightedFedSLR, WeightedFedDyn) if by_examples else (fedslr.FedSLR, fedslr.FedDyn)
    a = Members(slr(eta_g=4.0, rank_penalty=0.0), engine, range(5))
    b = Members(dyn(alpha=0.25), engine, range(5))
    for members in (a, b):
        members.train({0: 1.0, 1: 0.3, 4: 0.5})
        members.join(5)
        members.train({5: 0.7, 0: 1.0})
        members.leave(1)
        members.train({5: 1.0, 4: 1.0})
    assert apart(a.model(), b.model()) < 1e-10
    assert apart([m.ledger for m in a.here.values()], [m.ledger for m in b.here.values()]) < 1e-10


# --- nothing counted --------------------------------------------------------------------------------------------------


@engines
@with_ledger
def test_nothing_counted_changes_nothing(method, engine):
    members = Members(method, engine, range(5))
    members.train({0: 1.0, 3: 1.0})
    held, here = members.held, dict(members.here)
    members.train({0: 0.0, 1: 0.0})
    assert members.held is held
    for number, member in here.items():
        assert apart(member.ledger, members.here[number].ledger) == 0
    assert close_round(method, held, tree.Mean(), sum(members.weights), NOW) is held


# --- book -------------------------------------------------------------------------------------------------------------


def some_upload(method: Any, dtype: str = "float64") -> tuple[Any, Any]:
    """Return a client's ledger that is not zero, and an upload."""
    run = simulation(method, "eager", dtype=dtype)
    number = next(run.rounds()).clients[0]
    member = run.state.roster.member(number)
    participant = Participant(number, member, run.state.delivery.decoded(number, member))
    (result,) = run.engine.train([participant], NOW)
    return member.ledger, result.upload_of(0)


def every_method_with_a_ledger() -> list[Any]:
    made = [cls() for cls in fedslr.ALGORITHMS.values()]
    return [m for m in made if m.init_ledger({"w": torch.zeros(1)}) != ()]


@pytest.mark.parametrize("method", every_method_with_a_ledger(), ids=lambda m: m.name)
def test_booking_is_affine_in_the_share(method):
    ledger, upload = some_upload(method)
    none, whole = (method.book(ledger, upload, torch.tensor(s, dtype=torch.float64), NOW) for s in (0.0, 1.0))
    assert apart(none, ledger) == 0
    assert apart(whole, ledger) > 1e-4
    for share in (0.3, 0.5, 0.9):
        found = method.book(ledger, upload, torch.tensor(share, dtype=torch.float64), NOW)
        assert apart(found, tree.map(lambda a, b, s=share: (1 - s) * a + s * b, none, whole)) < 1e-14


@pytest.mark.parametrize("method", every_method_with_a_ledger(), ids=lambda m: m.name)
def test_booking_keeps_single_precision(method):
    """A share is a double-precision scalar, which does not promote the tensors of a ledger; nor under `torch.vmap`."""
    ledger, upload = some_upload(method, dtype="float32")
    shares = torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64)
    alone = [method.book(ledger, upload, share, NOW) for share in shares]
    repeated = [pytree.tree_map(lambda x: x.expand(3, *x.shape), one) for one in (ledger, upload)]
    together = torch.vmap(lambda c, u, s: method.book(c, u, s, NOW))(*repeated, shares)
    for slot, one in enumerate(alone):
        for a, b in zip(tree.leaves(one), tree.leaves(together), strict=True):
            assert a.dtype == b.dtype == torch.float32
            torch.testing.assert_close(a, b[slot])


@engines
@with_ledger
def test_a_run_in_single_precision_stays_so(method, engine):
    run = simulation(method, engine, rounds=3, dtype="float32")
    list(run.rounds())
    held = [*run.state.server_state, [tuple(run.state.roster.member(n)) for n in range(6)]]
    kinds = {x.dtype for x in pytree.tree_leaves(held) if isinstance(x, Tensor) and x.is_floating_point()}
    assert kinds == {torch.float32}
    ledgers = [run.state.roster.member(n).ledger for n in range(len(SIZES))]
    assert apart(run.state.server_state.mean_ledger, weighted_mean(ledgers, run.state.weights)) < 1e-6
