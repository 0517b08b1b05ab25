"""What methods of one's own may ask of the engines, and what they must return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import fedslr
import own_methods
from conftest import cohort_of, make_federation, mlp
from fedslr.algorithms import naming
from fedslr.channel import encoding
from fedslr.core import tree
from fedslr.data.batches import EVALUATION_ROUND
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings
from own_methods import Attentive, Clustered

SIZES = [5, 11, 3, 8, 7]
engines = pytest.mark.parametrize("engine", ["eager", "batched"])


def simulate(method: Any, engine: str = "eager", rounds: int = 4, **changes: Any) -> Simulation:
    given = {"clients_per_round": 3, "batch_size": 4, "lr": 0.05, "dtype": "float64", "evaluate_every": 2, **changes}
    run = Simulation(
        method, make_federation(SIZES), mlp(), Settings(rounds=rounds, device="cpu", engine=engine, **given)
    )
    run.records = list(run.rounds())  # type: ignore[attr-defined]
    return run


def assert_agree(a: Simulation, b: Simulation) -> None:
    """Compare servers, clients and personal models of two runs, and what they counted."""
    pairs = [(tuple(a.state.server_state), tuple(b.state.server_state))]
    for number in range(len(SIZES)):
        pairs.append((a.personal_params(number), b.personal_params(number)))
        pairs.append((tuple(a.state.roster.member(number)), tuple(b.state.roster.member(number))))
    for left, right in pairs:
        for x, y in zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    for left, right in zip(a.records, b.records, strict=True):  # type: ignore[attr-defined]
        assert (left.clients, left.bytes_down, left.bytes_up) == (right.clients, right.bytes_down, right.bytes_up)
        assert (left.numbers_down, left.numbers_up) == (right.numbers_down, right.numbers_up)
        assert left.accuracy_personal_per_client == right.accuracy_personal_per_client


# --- data.client ------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Numbered(fedslr.FedAvg):
    """Clients keep their number, and shift their models by it."""

    name: ClassVar[str] = "numbered"

    def init_client(self, w):
        return Seen({"own": torch.full((), -1.0, dtype=torch.float64)})

    def local_update(self, problem, client, ledger, payload, data, round):
        _, upload = super().local_update(problem, client, ledger, payload, data, round)
        return Seen({"own": torch.zeros((), dtype=torch.float64) + data.client}), upload

    def personal_model(self, problem, client, payload, data):
        return {k: x + 100.0 * data.client for k, x in payload.items()}


@engines
def test_a_client_knows_its_number(engine):
    run = simulate(Numbered(), engine, clients_per_round=5)
    shared = run.state.global_model()
    for number in range(len(SIZES)):
        assert float(run.state.roster.member(number).client.numbers["own"]) == number
        for k, x in run.personal_params(number).items():
            torch.testing.assert_close(x, shared[k] + 100.0 * number)
    assert_agree(run, simulate(Numbered(), "eager", clients_per_round=5))


# --- a server that sees every upload ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"clients_per_round": 5}, {"selection": "bernoulli", "rounds": 6}])
def test_a_server_may_see_every_upload(options):
    a, b = (simulate(Attentive(), engine, **options) for engine in ("eager", "batched"))
    assert_agree(a, b)
    assert set(a.state.server_state.server.models) == {str(n) for record in a.records for n in record.clients}


def test_a_server_that_sees_every_upload_holds_the_clients_models():
    """Uploads are differences to what each client was sent, so the server can add them up again."""
    run = simulate(Attentive(), rounds=6)
    for number, model in run.state.server_state.server.models.items():
        for k, x in run.personal_params(int(number)).items():
            torch.testing.assert_close(model[k], x, rtol=1e-10, atol=1e-12)


def test_a_run_whose_server_sees_every_upload_resumes(tmp_path):
    def run(**changes: Any) -> fedslr.Result:
        given = {"rounds": 5, "clients_per_round": 2, "evaluate_every": 2, "dtype": "float64", **changes}
        return fedslr.run(Attentive(), make_federation(SIZES), mlp(), **given)

    stops = iter([False, True])
    with pytest.raises(fedslr.Interrupted):
        run(out=tmp_path / "run", should_stop=lambda: next(stops))
    resumed, whole = run(out=tmp_path / "run", resume=True), run()
    for number in range(len(SIZES)):
        for k, x in whole.personal_params(number).items():
            assert torch.equal(x, resumed.personal_params(number)[k])


# --- clients that are sent their part ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched(Attentive):
    """Notes what clients are given."""

    name: ClassVar[str] = "watched"
    given: ClassVar[list[tuple[int, int, Any]]] = []

    def local_update(self, problem, client, ledger, payload, data, round):
        self.given.append((round.number, data.client, payload))
        return super().local_update(problem, client, ledger, payload, data, round)

    def personal_model(self, problem, client, payload, data):
        self.given.append((EVALUATION_ROUND, data.client, payload))
        return super().personal_model(problem, client, payload, data)


def test_clients_are_sent_their_part_alone():
    """In training and in evaluation; the bytes are those of the parts."""
    given = Watched.given
    given.clear()
    settings = Settings(rounds=3, clients_per_round=3, dtype="float64", device="cpu", engine="eager", evaluate_every=1)
    run = Simulation(Watched(), make_federation(SIZES), mlp(), settings)
    rounds = run.rounds()
    for number in range(3):
        before = run.state.delivery.payload
        record = next(rounds)
        expected = [(number, c, before.get(str(c), before["start"])) for c in record.clients]
        after = run.state.delivery.payload
        assert after is not before
        expected += [(EVALUATION_ROUND, c, after.get(str(c), after["start"])) for c in range(len(SIZES))]
        assert [found[:2] for found in given] == [wanted[:2] for wanted in expected]
        for (*_, found), (*_, wanted) in zip(given, expected, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(x, wanted[k]) for k, x in found.items())
        assert record.bytes_down == sum(len(encoding.encode(part).data) for _, _, part in expected[:3])
        given.clear()


# --- several models ---------------------------------------------------------------------------------------------------


def test_a_method_may_send_several_models():
    """Four models are more numbers than the limit of a message of one model would let pass."""
    a, b = (simulate(Clustered(clusters=4), engine) for engine in ("eager", "batched"))
    assert_agree(a, b)
    one = sum(x.numel() for x in a.state.start.values())
    assert [r.numbers_down for r in a.records[1:]] == [3 * (4 * one + 4)] * 3
    assert {r.parameters_global for r in a.records if r.parameters_global} == {4 * one}


@engines
def test_the_mean_is_enough_for_several_models(engine):
    """A model moves if a client chose it. A single one moves to the plain mean, as SCAFFOLD's does in round 1."""
    run = simulate(Clustered(clusters=4), engine, rounds=1)
    start = run.algorithm.init_server(run.state.start).models
    found = run.state.server_state.server.models
    moved = [any(not torch.equal(x, start[j][k]) for k, x in w.items()) for j, w in found.items()]
    assert 0 < sum(moved) < 4
    one, wanted = (simulate(m, engine, rounds=1) for m in (Clustered(clusters=1), fedslr.Scaffold()))
    for k, x in wanted.state.server_state.server.w.items():
        torch.testing.assert_close(one.state.server_state.server.models["0"][k], x, rtol=1e-10, atol=1e-12)


# --- what engines refuse ----------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("DictState", "init_client: got dict, expected a NamedTuple of parameters, or () for nothing"),
        ("ListState", "local_update: got list, expected a NamedTuple of parameters, or () for nothing"),
        ("NoPair", "local_update: got dict, expected (the client's new state, its upload as a dictionary)"),
        ("FewKeys", "local_update: 'upload/0.weight' is missing; expected the keys and shapes of the broadcast"),
        ("OtherShapes", "local_update: 'upload/0.weight' is [6] of float64, expected [8, 6] of float64"),
        ("Silent", "broadcast: expected a dictionary of tensors"),
        ("Impersonal", "personal_model: '0.weight' is missing or has another shape, expected [8, 6]"),
    ],
)
def test_what_a_method_returns_is_checked(name, says, engine):
    with pytest.raises(fedslr.FedslrError) as error:
        simulate(getattr(own_methods, name)(), engine, rounds=1)
    assert str(error.value).startswith(says)


@pytest.mark.parametrize("function", ["init_server", "init_ledger"])
def test_a_state_that_a_checkpoint_would_lose_is_refused(function, monkeypatch):
    method = own_methods.Half()
    monkeypatch.setattr(type(method), function, lambda self, w: [w])
    with pytest.raises(fedslr.FedslrError, match=f"{function}: got list, which no checkpoint can hold; return a Named"):
        simulate(method, rounds=1)


@engines
def test_an_error_of_ones_own_passes_through(engine):
    """The eager engine notes where it was raised."""
    with pytest.raises(KeyError, match="conv9") as error:
        simulate(own_methods.Raising(), engine, rounds=1)
    if engine == "eager":
        assert error.value.__notes__ == [f"in round 1, client {cohort_of(len(SIZES), 3, 0)[0]} (raising)"]


def test_methods_may_change_what_they_are_given():
    """Payloads, states and ledgers are the method's own copies."""
    for method in (own_methods.InPlace(), own_methods.Momentum()):
        found, wanted = simulate(method), simulate(fedslr.FedAvg())
        assert tree.leaves(found.state.global_model())
        for k, x in wanted.state.global_model().items():
            torch.testing.assert_close(found.state.global_model()[k], x, rtol=1e-12, atol=1e-14)


@engines
@pytest.mark.parametrize("name", ["Diverging", "DivergingParts"])
def test_a_global_model_that_diverges_is_named(name, engine):
    with pytest.raises(fedslr.FedslrError, match=r"round 1: the global model diverged: .* not finite .*; lower lr"):
        simulate(getattr(own_methods, name)(), engine)


def test_a_decomposition_that_fails_is_a_global_model_that_diverged():
    with pytest.raises(fedslr.FedslrError, match="round 1: the global model diverged: it does not converge; lower lr"):
        simulate(own_methods.Singular())


def test_a_negative_weight_is_refused():
    with pytest.raises(fedslr.FedslrError, match=r"weight: got -1\.0 for 5 examples, expected a number from 0"):
        simulate(own_methods.Negative())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Half", None),
        ("Attentive", None),
        ("Unfinished", "algorithm: Unfinished lacks aggregate, broadcast, init_client"),
        ("Undecorated", "algorithm: Undecorated is not a dataclass; write @dataclass"),
        ("Nameless", "algorithm: Nameless has no valid name of its own"),
        ("Slash", "algorithm: Slash has no valid name of its own"),
        ("Taken", "algorithm: Taken has the name 'fedavg' of another method; choose another name"),
        ("doubled", "algorithm.name: got 'own_methods:doubled', expected a subclass of fedslr.Algorithm"),
    ],
)
def test_a_recipe_names_complete_methods_alone(name, says):
    if says is None:
        assert naming.find(f"own_methods:{name}") is getattr(own_methods, name)
        return
    with pytest.raises(fedslr.FedslrError) as error:
        naming.find(f"own_methods:{name}")
    assert str(error.value).startswith(says)
