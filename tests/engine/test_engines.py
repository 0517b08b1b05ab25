"""Engines agree: the same run, trained client by client and together."""

from __future__ import annotations

import dataclasses
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedslr
from conftest import assert_alike, make_federation, mlp, small_cnn
from fedslr.core.matrix import LowRank
from fedslr.core.problem import Problem
from fedslr.core.scan import scan
from fedslr.core.states import plain
from fedslr.core.types import Batch, Round
from fedslr.data.client_data import ClientData
from fedslr.engine.batched import Batched, CohortProblem
from fedslr.engine.delivery import Delivery
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings
from fedslr.engine.setup import batching_is_faster
from fedslr.engine.stacked import stack_model
from fedslr.engine.stacked_problem import StackedProblem
from fedslr.engine.workload import Workload
from fedslr.tasks.scoring import Scorer

APART = {"lpgd", "sparse-lowrank", "lowrank-lowrank"}
"""Methods whose clients look at their numbers: they cannot be trained together."""
every = pytest.mark.parametrize("name", list(fedslr.ALGORITHMS))
together = pytest.mark.parametrize("name", [n for n in fedslr.ALGORITHMS if n not in APART])
UNIFORM, RAGGED, USUAL = [7, 7, 7, 7, 7], [5, 11, 3, 8, 7], [*[7] * 9, 11]


def simulate(
    name: str,
    engine: str,
    sizes: list[int],
    model: Any = None,
    federation: Any = None,
    loss: Any = None,
    **changes: Any,
) -> tuple[Simulation, list[dict[str, Any]]]:
    options = {"rounds": 3, "clients_per_round": 4, "batch_size": 4, "lr": 0.05, "evaluate_every": 2, **changes}
    settings = Settings(engine=engine, dtype="float64", device="cpu", **options)
    simulation = Simulation(
        fedslr.ALGORITHMS[name](),
        federation or make_federation(sizes),
        model or mlp(),
        settings,
        loss=loss,
    )
    records = [r.flat() for r in simulation.rounds()]
    return simulation, [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in records]


def leaves(simulation: Simulation) -> list[Any]:
    clients = range(simulation.num_clients)
    members = [[plain(part) for part in simulation.state.roster.member(c)] for c in clients]
    return torch.utils._pytree.tree_leaves([[plain(part) for part in simulation.state.server_state], members])


def trains_together(simulation: Simulation) -> bool:
    """Return whether the engine was made to train clients together and has not given that up."""
    engine = simulation.engine
    return isinstance(engine, Batched) and "trained" not in engine.one_by_one


def assert_agree(a: tuple[Simulation, Any], b: tuple[Simulation, Any]) -> None:
    for left, right in zip(leaves(a[0]), leaves(b[0]), strict=True):
        if isinstance(left, torch.Tensor) and left.is_floating_point():
            torch.testing.assert_close(left, right, rtol=0, atol=1e-10)
        else:
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    assert_alike(a[1], b[1])


@together
@pytest.mark.parametrize("sizes", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_together_is_one_by_one(name, sizes):
    assert_agree(simulate(name, "eager", sizes), simulate(name, "batched", sizes))


@together
def test_a_cohort_of_usual_clients_needs_no_padding(name):
    """Most clients hold the same number of samples, one does not: some cohorts have it, others do not."""
    options = {"rounds": 5, "seed": 1}
    a, b = (simulate(name, engine, USUAL, **options) for engine in ("eager", "batched"))
    assert_agree(a, b)
    engine = b[0].engine
    assert isinstance(engine, Batched)
    assert {shape.ragged for _, shape, _ in engine._batches} == {True, False}


@together
def test_without_personal_epochs(name):
    options = {"personal_epochs": 0, "rounds": 2}
    assert_agree(simulate(name, "eager", RAGGED, **options), simulate(name, "batched", RAGGED, **options))


@pytest.mark.parametrize("name", ["fedslr", "fedavg"])
def test_cohorts_of_changing_size(name):
    options = {"selection": "bernoulli", "clients_per_round": 3, "rounds": 6}
    a, b = (simulate(name, engine, RAGGED, **options) for engine in ("eager", "batched"))
    assert len({len(r["clients"]) for r in a[1]}) > 1
    assert_agree(a, b)


@pytest.mark.parametrize("sizes", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_a_convolutional_model_with_augmentation(sizes):
    federation = dataclasses.replace(make_federation(sizes, shape=(2, 5, 4)), crop_padding=1)
    model = small_cnn()
    model(torch.zeros(1, 2, 5, 4))
    a, b = (simulate("fedslr", e, sizes, model=model, federation=federation) for e in ("eager", "batched"))
    assert_agree(a, b)


class Spare(nn.Module):
    """Its last layer, which FedRep takes for the head, is used by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = mlp(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


@pytest.mark.parametrize("name", ["fedrep", "lgfedavg", "fedslr"])
def test_a_last_layer_that_is_not_used(name):
    model = Spare()
    assert_agree(*(simulate(name, e, RAGGED, model=model) for e in ("eager", "batched")))


@every
def test_auto_runs_every_method(name):
    told: list[str] = []
    settings = Settings(rounds=2, clients_per_round=4, batch_size=4, device="cpu")
    simulation = Simulation(fedslr.ALGORITHMS[name](), make_federation(RAGGED), mlp(), settings, warn=told.append)
    assert trains_together(simulation)
    assert len(list(simulation.rounds())) == 2
    assert trains_together(simulation) is (name not in APART)
    assert told == []


@pytest.mark.parametrize("name", sorted(APART))
def test_what_cannot_be_trained_together_says_so(name):
    with pytest.raises(
        fedslr.FedslrError, match=r"engine: got 'batched', but the clients .* cannot be trained together"
    ):
        simulate(name, "batched", UNIFORM)


def test_auto_trains_models_that_draw_numbers_one_by_one():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    a, b = (simulate("fedavg", e, UNIFORM, model=model) for e in ("eager", "auto"))
    assert not trains_together(b[0])
    assert_agree(a, b)


class Recurrent(nn.Module):
    """A model that `torch.vmap` refuses in words of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(1, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(len(x), 4, dtype=x.dtype)
        for part in x.split(1, 1):
            state.copy_(self.cell(part, state.clone()))
        out: torch.Tensor = self.head(state)
        return out


def test_auto_trains_models_that_write_in_place_one_by_one():
    assert not trains_together(simulate("fedavg", "auto", UNIFORM, model=Recurrent())[0])


@pytest.mark.parametrize("name", ["fedavg", "fedslr", "local"])
def test_divergence_is_told_alike(name):
    said = []
    for engine in ("eager", "batched"):
        with pytest.raises(fedslr.FedslrError, match=r"round \d+, client \d+: training diverged") as error:
            simulate(name, engine, UNIFORM, lr=1e200, rounds=4)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("engine", ["eager", "batched"])
def test_divergence_is_that_of_the_client_it_is(engine, store, tmp_path):
    """Also where the disk refuses its state, as late as with that of a client behind it."""
    federation = make_federation([8] * 24)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    federation.clients[3] = dataclasses.replace(federation.clients[3], x=federation.clients[3].x * 1e30)
    with pytest.raises(fedslr.FedslrError, match="round 1, client 3: training diverged"):
        fedslr.run(
            fedslr.FedSLR(), federation, model, rounds=2, clients_per_round=24,
            engine=engine, device="cpu", store=store, out=tmp_path / "out",
        )  # fmt: skip


@pytest.mark.parametrize("name", ["fedslr", "fedavg"])
def test_the_server_may_work_while_clients_still_train(name, monkeypatch):
    """An engine that has the uploads early has the next server made beside the training: the same server."""
    usual = simulate(name, "batched", RAGGED)
    asked = []

    def start_server_work(engine: Batched, work: Any) -> Any:
        asked.append(work)
        return ThreadPoolExecutor(1).submit(work).result

    monkeypatch.setattr(Batched, "start_server_work", start_server_work)
    assert_agree(usual, simulate(name, "batched", RAGGED))
    assert len(asked) == 3
    with pytest.raises(fedslr.FedslrError, match=r"round \d+, client \d+: training diverged"):
        simulate(name, "batched", UNIFORM, lr=1e200, rounds=4)


@pytest.mark.parametrize("engine", ["eager", "batched"])
def test_a_client_is_sent_its_part_once(engine, monkeypatch):
    sent, send = [], Delivery.send

    def spy(delivery: Delivery, number: int, member: Any) -> Any:
        sent.append(number)
        return send(delivery, number, member)

    monkeypatch.setattr(Delivery, "send", spy)
    _, records = simulate("fedspa", engine, RAGGED)
    assert sent == [c for record in records for c in record["clients"]]


@pytest.mark.parametrize("name", ["fedslr", "fedavg", "local"])
def test_an_engine_that_looks_ahead_is_told_who_trains_next(name, monkeypatch):
    """With the very states that the next round will have, those of clients who have just trained among them."""
    usual = simulate(name, "batched", RAGGED)
    told, trained, train = [], [], Batched.train

    def prepare_next(engine: Batched, numbers: Any, member_of: Any, round: Round) -> Any:
        told.append((numbers, [member_of(n) for n in numbers], round))
        return dict(zip(numbers, told[-1][1], strict=True))

    def spy(engine: Batched, cohort: Any, round: Round) -> Any:
        participants = list(cohort)
        trained.append(([one.number for one in participants], [one.member for one in participants], round))
        return train(engine, participants, round)

    monkeypatch.setattr(Batched, "prepare_next", prepare_next)
    monkeypatch.setattr(Batched, "train", spy)
    assert_agree(usual, simulate(name, "batched", RAGGED))
    assert len(told) == len(trained) - 1 == 2
    for expected, came in zip(told, trained[1:], strict=True):
        assert expected[0] == came[0]
        assert all(a is b for a, b in zip(expected[1], came[1], strict=True))
        assert expected[2] == came[2]
    assert {c for cohort, *_ in trained[:1] for c in cohort} & set(trained[1][0])


def batch_of_four() -> Batch:
    return Batch(torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("kind", [Problem, CohortProblem, StackedProblem])
def test_what_nothing_uses_has_gradients_of_zero(kind):
    model = Spare()
    problem = kind(model, cross_entropy, 0.0)
    if kind is StackedProblem:
        problem.network = stack_model(model, False)
        assert problem.network is not None
    params = problem.params()
    head = {k: x for k, x in params.items() if k.startswith("spare")}
    body = {k: x for k, x in params.items() if k not in head}
    found = problem.loss_grad(head, batch_of_four(), frozen=body)
    assert found.keys() == head.keys()
    assert not any(bool(g.any()) for g in found.values())


@pytest.mark.parametrize("kind", [Problem, CohortProblem, StackedProblem])
def test_only_gradients_may_be_rounded(kind):
    """TF32 is for the model's products: a method multiplies its factors in full."""
    seen = []

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return cross_entropy(outputs, y)

    usual = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    model = mlp()
    problem = kind(model, loss, 0.0)
    if kind is StackedProblem:
        problem.network = stack_model(model, False)
        assert problem.network is not None
    data = batch_of_four()
    for problem.tf32 in (True, False):
        problem.loss_grad(problem.params(), data)
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == usual
    assert seen == [(True, True), usual]


def smoothed(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scores, y, label_smoothing=0.1)


def centred(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scores - scores.mean(0), y)


def balanced(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every label of the batch counts alike."""
    same = (y[:, None] == torch.arange(scores.shape[1])).to(scores.dtype)
    weight = 1 / (same @ same.sum(0))
    return (cross_entropy(scores, y, reduction="none") * weight).sum() / weight.sum()


def flooded(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (cross_entropy(scores, y) - 0.1).abs() + 0.1


@pytest.mark.parametrize(
    "loss",
    [
        smoothed,
        balanced,
        flooded,
        nn.CrossEntropyLoss(weight=torch.tensor([10.0, 1.0, 0.1], dtype=torch.float64)),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
        centred,
    ],
)
def test_a_loss_of_ones_own(loss):
    """It may be no mean over samples, so its batches are not filled up; clients of one size train together."""
    options = {"loss": loss, "rounds": 2, "lr": 0.01}
    assert_agree(*(simulate("fedslr", e, RAGGED, **options) for e in ("eager", "auto")))
    with pytest.raises(fedslr.FedslrError, match="the loss does not return one value per sample"):
        simulate("fedslr", "batched", RAGGED, **options)
    assert_agree(*(simulate("fedslr", e, UNIFORM, **options) for e in ("eager", "batched")))


@dataclass(frozen=True)
class Looking(fedslr.FedAvg):
    """Looks into its batches."""

    name: ClassVar[str] = "looking"

    def local_update(self, problem, client, ledger, payload, data, round):
        def step(v, batch):
            grads = torch.func.grad(lambda v: cross_entropy(problem.outputs(v, batch.x, train=True), batch.y))(v)
            return {k: x - round.lr * grads[k] for k, x in v.items()}

        v = scan(step, payload, data.epochs(round.epochs))
        return (), {k: x - payload[k] for k, x in v.items()}


@dataclass(frozen=True)
class Walking(fedslr.FedAvg):
    """Goes through its batches without scan, and works in place on what it is given to answer with."""

    name: ClassVar[str] = "walking"

    def local_update(self, problem, client, ledger, payload, data, round):
        v = payload
        for batch in data.epochs(round.epochs):
            grads = problem.grad(v, batch)
            v = {k: x - round.lr * grads[k] for k, x in v.items()}
        return (), {k: x - payload[k] for k, x in v.items()}

    def personal_model(self, problem, client, payload, data):
        for x in payload.values():
            x.mul_(0.9)
        return payload


@dataclass(frozen=True)
class Unpacking(fedslr.FedAvg):
    """Takes a batch for the tuple it is."""

    name: ClassVar[str] = "unpacking"

    def given(self, batch):
        x, y = batch
        return Batch(x, y), 1.0

    def local_update(self, problem, client, ledger, payload, data, round):
        def step(v, batch):
            shown, weight = self.given(batch)
            grads = problem.grad(v, shown)
            return {k: x - weight * round.lr * grads[k] for k, x in v.items()}

        v = scan(step, payload, data.epochs(round.epochs))
        return (), {k: x - payload[k] for k, x in v.items()}


@dataclass(frozen=True)
class Indexing(Unpacking):
    name: ClassVar[str] = "indexing"

    def given(self, batch):
        return Batch(batch[0], batch[1]), 1.0


@dataclass(frozen=True)
class Counting(Unpacking):
    name: ClassVar[str] = "counting"

    def given(self, batch):
        return batch, len(batch[-1]) / 4


@pytest.mark.parametrize("method", [Looking(), Walking(), Unpacking(), Indexing(), Counting()])
def test_methods_of_ones_own_never_see_what_fills_a_batch(method):
    def run(sizes: list[int], engine: str, **options: Any) -> fedslr.Result:
        options = {"rounds": 3, "batch_size": 4, "dtype": "float64", "engine": engine, **options}
        return fedslr.run(method, make_federation(sizes), model=mlp(), clients_per_round=4, **options)

    for sizes in (RAGGED, UNIFORM):
        a, b, c = run(sizes, "eager"), run(sizes, "auto"), run(sizes, "eager", evaluate_every=3)
        d = run(sizes, "batched", evaluate_every=1) if sizes == UNIFORM else b
        for other in (b, c, d):
            assert all(torch.allclose(x, other.global_params[k], rtol=1e-10) for k, x in a.global_params.items())
            assert other.summary["accuracy"] == a.summary["accuracy"]
    with pytest.raises(fedslr.FedslrError, match="clients hold different numbers of"):
        run(RAGGED, "batched")


@dataclass(frozen=True)
class Factoring(fedslr.FedAvg):
    """Sends factors of what it learned."""

    name: ClassVar[str] = "factoring"

    def local_update(self, problem, client, ledger, payload, data, round):
        _, upload = super().local_update(problem, client, ledger, payload, data, round)
        return (), {
            k: LowRank(x, torch.eye(x.shape[1], dtype=x.dtype), x.shape) if x.ndim == 2 else x
            for k, x in upload.items()
        }


def test_factors_are_not_uploaded():
    with pytest.raises(fedslr.FedslrError, match="local_update: the upload has low-rank factors; multiply them out"):
        fedslr.run(Factoring(), make_federation(UNIFORM), model=mlp(), rounds=1, clients_per_round=4)


@pytest.mark.parametrize("name", ["local", "fedrep", "fedslr"])
def test_some_clients_are_evaluated_of_methods_without_a_global_model(name):
    federation = make_federation(RAGGED)
    result = fedslr.run(fedslr.ALGORITHMS[name](), federation, model=mlp(), rounds=1, evaluate_clients=2)
    assert result.summary["accuracy"]["personal"] is not None


@pytest.mark.parametrize("name", ["lowrank-lowrank", "sparse-lowrank"])
def test_states_that_hold_factors_go_on(name, tmp_path):
    method = fedslr.ALGORITHMS[name](eta_g=1, personal_penalty=100.0)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3))
    stops = iter([False, True])
    options = {"model": model, "rounds": 4, "out": tmp_path}
    with pytest.raises(fedslr.Interrupted):
        fedslr.run(method, make_federation([5] * 4), should_stop=lambda: next(stops), **options)
    assert fedslr.run(method, make_federation([5] * 4), resume=True, **options).summary["rounds"] == 4


def test_auto_goes_by_the_size_of_the_work():
    def chosen(sizes: list[int], model: nn.Module, sample: int = 6, **options: Any) -> bool:
        shown, labels = torch.zeros(1).expand(1, sample), torch.zeros(1, dtype=torch.int64)
        work = Workload(
            algorithm=fedslr.FedAvg(),
            problem=Problem(model, cross_entropy, 0.0),
            scorer=Scorer("classification", cross_entropy, ["accuracy"]),
            clients=[ClientData(shown, labels, shown, labels)],
            batch_size=4,
            seed=0,
            examples=sizes,
        )
        return batching_is_faster(Settings(batch_size=4, **options), work)

    assert chosen(RAGGED, mlp())
    assert not chosen(RAGGED, mlp(), clients_per_round=3)
    assert chosen([8] * 5, nn.Linear(2**10, 2**22 // 5 // 2**10 - 1))
    assert not chosen([8] * 5, nn.Linear(2**10, 2**22 // 5 // 2**10 + 1))
    assert not chosen([400, 3, 3, 3, 3], mlp())
    # All batches of a round are in memory at once: five clients, three passes over 8 samples.
    assert chosen([8] * 5, mlp(), sample=2**28 // 120, epochs=2, personal_epochs=1)
    assert not chosen([8] * 5, mlp(), sample=2**28 // 120 + 1, epochs=2, personal_epochs=1)
    assert not chosen([8] * 5, mlp(), epochs=10**7)


def test_what_vmap_does_slowly_is_not_told():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        federation = fedslr.load("digits", clients=4, samples_per_client=8)
        fedslr.run(fedslr.FedAvg(), federation, model="vit", rounds=1, engine="batched")
