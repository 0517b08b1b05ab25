"""The CUDA engine: its kernels against PyTorch's layers, its rounds against the eager engine's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fedslr
from conftest import make_federation, small_cnn
from fedslr.algorithms import ALGORITHMS
from fedslr.algorithms.fedavg import FedAvg
from fedslr.core import prox, spectral, tree
from fedslr.core.group import Group
from fedslr.core.types import Params, Payload, Round
from fedslr.engine import fused_map, recording, stacked, stacked_layers
from fedslr.engine.batched import is_shared, padded_size, round_tensors, stack_trees
from fedslr.engine.cohort_batches import CohortBatches
from fedslr.engine.cuda import Cuda
from fedslr.engine.eager import Eager
from fedslr.engine.roster import Cohort
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings
from fedslr.engine.setup import require_possible
from fedslr.models.networks import Block
from own_methods import Attentive, Clustered

NOT_TOGETHER = ("lpgd", "sparse-lowrank", "lowrank-lowrank")
"""Methods that choose a rank inside a local step."""
RAGGED, USUAL = [23, 17, 40, 20, 9], [*[23] * 9, 40]


def small_net() -> nn.Module:
    model = small_cnn()
    model(torch.zeros(1, 2, 6, 6))
    return model


def simulation(method: str, sizes: list[int], device: str, **settings: Any) -> Simulation:
    federation = make_federation(sizes, (2, 6, 6))
    given = {"rounds": 3, "clients_per_round": 3, "batch_size": 8, "lr": 0.05, "dtype": "float64", **settings}
    return Simulation(METHODS[method](), federation, small_net(), Settings(device=device, **given))


def cuda_engine(run: Simulation) -> Cuda:
    """Return the CUDA engine of a run that did not fall back to another."""
    engine = run.engine
    assert type(engine) is Cuda
    assert not engine.one_by_one
    return engine


def assert_close(found: Any, wanted: Any) -> None:
    """Compare two trees of tensors up to rounding in double precision."""
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def assert_same_clients(ours: Simulation, wanted: Simulation) -> None:
    """Compare every client's model, state, ledger and address, and the server's state, of two runs."""
    for number in range(ours.num_clients):
        assert_close(ours.personal_params(number), wanted.personal_params(number))
        assert_close(tuple(ours.state.roster.member(number)), tuple(wanted.state.roster.member(number)))
    assert_close(ours.state.server_state.mean_ledger, wanted.state.server_state.mean_ledger)


# --- what needs no GPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[23] * 4, [23, 17, 40, 20]], ids=["alike", "ragged"])
@pytest.mark.parametrize("method", [m for m in ALGORITHMS if m not in NOT_TOGETHER])
def test_fused_and_stacked_work_is_the_eager_engines(
    method: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine does in a round, without recording it: step sizes are tensors, maps and gradients are fused."""
    monkeypatch.setattr(fused_map, "compiled", lambda: fused_map.apply_to_leaves)
    run = simulation(method, sizes, "cpu", engine="eager")
    eager = run.engine
    assert isinstance(eager, Eager)
    ours = Cuda(eager.work)
    assert ours.cohort_problem.network is not None  # type: ignore[attr-defined]
    cohort, shares = [0, 2, 3], [1.0, 0.3, 0.0]
    participants = list(Cohort(cohort, run.state.roster, payload_of=run.state.delivery.decoded))
    payloads = [one.payload for one in participants]
    now = Round(1, 3, 0.03, 0.6, 2, 1)
    with tree.mapped_by(fused_map.fuse):
        batches = ours._load_batches(cohort, now.number)
        shared = is_shared(payloads)
        sent = payloads[0] if shared else stack_trees(payloads)
        states = stack_trees([(one.member.client, one.member.ledger) for one in participants])
        made = ours._run(batches, states, sent, shared, now._replace(**round_tensors(now, ours.device)))
    booked = made.booked(run.algorithm, shares, now)
    for slot, wanted in enumerate(eager.train(participants, now)):
        assert_close(made.upload_of(slot), wanted.upload_of(0))
        assert_close(tuple(booked[slot]), tuple(wanted.booked(run.algorithm, [shares[slot]], now)[0]))


class Replayed(Cuda):
    """The engine and its recordings, but replayed as plain calls in the same memory: what needs no GPU of them."""

    def _record(
        self, batches: CohortBatches, states: Sequence[Any], payloads: Sequence[Payload], shared: bool, round: Round
    ) -> Any:
        clients = len(states)
        room = pytree.tree_map(lambda x: recording.room_for(x, clients), states[0])
        sent = pytree.tree_map(lambda x: recording.room_for(x, None if shared else clients), payloads[0])
        made = recording.Recording(room, sent, round_tensors(round, self.device), shared)
        made.load_states(states)

        def replay() -> None:
            made.made = self._run(batches, room, sent, shared, round._replace(**made.numbers))

        made.replay = replay  # type: ignore[method-assign]
        return made

    def start_server_work(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return ThreadPoolExecutor(1).submit(work).result if self.algorithm.personalizes() else work


def replay_in_place(run: Simulation, usual_cohort: int | None = None) -> Simulation:
    """Give a run the engine above."""
    work = run.engine.work  # type: ignore[attr-defined]
    run.engine = Replayed(work if usual_cohort is None else replace(work, usual_cohort=usual_cohort))
    return run


class Kept(NamedTuple):
    before: Params


@dataclass(frozen=True)
class Late(FedAvg):
    """Sends what was learned the time before: uploads are a part of the states that clients begin with."""

    name: ClassVar[str] = "late"

    def init_client(self, w: Params) -> Any:
        return Kept(tree.zeros(w))

    def local_update(self, problem: Any, client: Any, ledger: Any, payload: Params, data: Any, round: Round) -> Any:
        _, made = super().local_update(problem, client, ledger, payload, data, round)
        return Kept(made), client.before


METHODS: dict[str, Any] = {**ALGORITHMS, "late": Late, "attentive": Attentive, "clustered": Clustered}


@pytest.mark.parametrize(
    ("method", "selection", "sizes"),
    [
        ("fedslr", "bernoulli", RAGGED),
        ("fedslr", "uniform", USUAL),
        *((m, "uniform", RAGGED) for m in METHODS if m not in (*NOT_TOGETHER, "clustered")),
    ],
)
def test_rounds_in_the_same_memory_are_the_batched_engines(method: str, selection: str, sizes: list[int]) -> None:
    """The next cohort's states and batches are put in place while the server is still at work."""
    asked = {"rounds": 5, "selection": selection, "engine": "batched", "evaluate_every": 2}
    wanted, ours = (simulation(method, sizes, "cpu", **asked) for _ in range(2))
    for a, b in zip(replay_in_place(ours).rounds(), wanted.rounds(), strict=True):
        assert (a.bytes_up, a.bytes_down, a.accuracy_personal) == (b.bytes_up, b.bytes_down, b.accuracy_personal)
    assert_same_clients(ours, wanted)


def test_cohorts_are_filled_up_to_few_sizes() -> None:
    for usual in (0, 1, 3, 10, 17, 100):
        assert padded_size(usual, usual) == usual
        for clients in range(1, 130):
            assert 0 <= padded_size(clients, usual) - clients < max(1, 2 * usual**0.5 + 0.5)
            assert padded_size(padded_size(clients, usual), usual) == padded_size(clients, usual)
    assert sorted({padded_size(clients, 10) for clients in range(1, 23)}) == [4, 10, 16, 22]


def test_cohorts_of_many_sizes_need_few_recordings() -> None:
    asked = {"rounds": 12, "clients_per_round": 5, "selection": "bernoulli", "engine": "batched"}
    wanted, ours = (simulation("fedslr", [23] * 15, "cpu", **asked) for _ in range(2))
    trained = [record.clients for record in replay_in_place(ours, usual_cohort=5).rounds()]
    assert trained == [record.clients for record in wanted.rounds()]
    assert isinstance(ours.engine, Replayed)
    assert len(ours.engine._recordings) < len({len(cohort) for cohort in trained})
    assert_same_clients(ours, wanted)


def test_functions_within_functions_are_looked_into() -> None:
    """A tensor of a client's own must be found wherever it is used."""
    own = torch.ones(2)

    def inner(x: Tensor) -> Tensor:
        return x + own

    def outer(x: Tensor) -> Tensor:
        return inner(x) if len(x) else outer(x)

    parts = ((None, 1), (inner, 2))
    assert any(x is own for x in fused_map._closed_over(outer))
    assert any(x is own for x in fused_map._closed_over(lambda: parts))
    assert any(x is own for x in fused_map._closed_over(lambda x, by=own: x * by))
    assert any(x is own for x in fused_map._closed_over(lambda x, *, by=parts: x * by["own"]))
    assert any(x is own for x in fused_map._closed_over(functools.partial(torch.mul, own)))
    assert any(x is own for x in fused_map._closed_over(functools.partial(lambda x, by: x, by=[inner])))
    assert not list(fused_map._closed_over(functools.partial(torch.mul, 2)))


def test_a_layer_of_no_numbers_is_not_thresholded_away() -> None:
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(torch.linalg.LinAlgError):
            spectral.threshold_all({"w": torch.tensor([[1.0, wrong], [0.0, 1.0]])}, 0.1)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 3.0, 100.0])
def test_gram_matrices_give_the_singular_values(threshold: float) -> None:
    torch.manual_seed(0)
    layers = {"wide": torch.randn(4, 8, 3, 3), "tall": torch.randn(8, 4, 3, 3), "small": 0.1 * torch.randn(10, 6)}
    for name, found in spectral.threshold_all(layers, threshold).items():
        wanted = prox.singular_value_threshold(layers[name], threshold)
        assert found.rank == wanted.rank
        torch.testing.assert_close(found.dense(), wanted.dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "card", "products"),
    [
        ({}, True, "bf16"), ({}, False, "float32"), ({"engine": "cuda"}, True, "bf16"),
        ({"engine": "eager"}, True, "float32"), ({"precision": "float32"}, True, "float32"),
        ({"precision": "tf32", "engine": "eager"}, False, "tf32"), ({"dtype": "float64"}, True, "float32"),
    ],
)  # fmt: skip
def test_products_are_rounded_where_it_pays(
    asked: dict[str, Any], card: bool, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: card)
    monkeypatch.setattr(Settings, "torch_device", lambda self: torch.device("cuda"))
    assert Settings(**asked).with_resolved_precision().precision == products


def test_products_on_a_cpu_are_exact() -> None:
    assert Settings(device="cpu").with_resolved_precision() == Settings(device="cpu", precision="float32")


def test_the_engine_is_refused_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(fedslr.FedslrError, match="engine: got 'cuda'"):
        require_possible(Settings(device="cpu", engine="cuda"), FedAvg(), Group())
    with pytest.raises(fedslr.FedslrError, match="precision: got 'bf16', which only a GPU has"):
        require_possible(Settings(device="cpu", precision="bf16"), FedAvg(), Group())


@pytest.mark.gpu
def test_double_precision_is_not_rounded() -> None:
    with pytest.raises(fedslr.FedslrError, match="precision: got 'bf16', but dtype = 'float64' is multiplied exactly"):
        require_possible(Settings(device="cuda", precision="bf16", dtype="float64"), FedAvg(), Group())


# --- kernels ----------------------------------------------------------------------------------------------------------


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def of_spectrum(rows: int, columns: int, values: Tensor, seed: int) -> Tensor:
    """A matrix with these singular values."""
    torch.manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64))[0] for n in (rows, columns))
    return (u * values) @ v.mT


@pytest.mark.parametrize("shape", [(160, 160), (240, 160), (160, 240)])
@pytest.mark.parametrize("rest", [0.6, 0.99, 0.9999])
@pytest.mark.parametrize("drift", [1e-4, 1e-2, 0.5])
def test_what_is_followed_is_what_a_full_decomposition_finds(
    shape: tuple[int, int], rest: float, drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Singular values down to just above the threshold, the others up to just below; vectors that have turned since."""
    monkeypatch.setattr(spectral, "MIN_ITERATED_SIDE", 100)
    values = torch.cat([torch.logspace(1.0, -2.98, 12), torch.linspace(rest * 1e-3, 1e-5, 148)]).double()
    matrix = of_spectrum(*shape, values, 0)
    before = (matrix + drift * 1e-3 * torch.randn_like(matrix) / 160**0.5).float()
    layers, threshold = {"w": matrix.float()}, 1e-3
    last = spectral.threshold_all({"w": before}, threshold)
    full = spectral.threshold_all(layers, threshold)["w"]
    few = spectral.MIN_SIDE_PER_RANK * last["w"].rank <= 160
    tall = spectral._tall(matrix.float()).double()
    u, v, _ = spectral._threshold_by_gram(tall, threshold)
    if few:
        start = last["w"].v if shape[0] >= shape[1] else last["w"].u
        followed = spectral._iterate(tall, start.double(), threshold)
        assert followed is not None
        torch.testing.assert_close(followed[0] @ followed[1].mT, u @ v.mT, rtol=0, atol=1e-11)
        monkeypatch.delattr(spectral, "_threshold_by_gram")
    found = spectral.threshold_all(layers, threshold, last)["w"]
    assert found.rank == full.rank == 12
    torch.testing.assert_close(found.dense(), full.dense(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("hidden", [5.0, 1.005])
def test_a_singular_value_orthogonal_to_every_start_is_not_overlooked(hidden: float) -> None:
    """A direction that no step of the iteration can reach: what is found is no proof, and is given up."""
    torch.manual_seed(0)
    few, spare, threshold = 10, spectral._extra_directions(160, torch.device("cpu")), 1e-3
    drawn = torch.cat([torch.randn(160, few), spare, torch.randn(160, 160 - few - spectral.EXTRA_DIRECTIONS)], 1)
    vectors = torch.linalg.qr(drawn.double())[0]
    values = torch.full((160,), 1e-5, dtype=torch.float64)
    values[:few] = 2 * threshold
    assert spectral._iterate((vectors * values) @ vectors.mT, vectors[:, :few], threshold) is not None
    values[few + spectral.EXTRA_DIRECTIONS] = hidden * threshold
    assert spectral._iterate((vectors * values) @ vectors.mT, vectors[:, :few], threshold) is None


def test_following_is_given_up_where_nothing_can_be_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectral, "MIN_ITERATED_SIDE", 100)
    few = torch.cat([torch.full((10,), 2e-3), torch.full((150,), 5e-4)]).double()
    many = torch.cat([torch.full((60,), 2e-3), torch.full((100,), 5e-4)]).double()
    last = spectral.threshold_all({"w": of_spectrum(160, 160, few, 0).float()}, 1e-3)["w"]
    start = last.v.double()
    near = of_spectrum(160, 160, few, 0)
    assert spectral._iterate(near, start, 1e-3) is not None
    assert spectral._iterate(of_spectrum(160, 160, many, 1), start, 1e-3) is None
    assert spectral._iterate(near, torch.zeros_like(start), 1e-3) is None
    assert spectral._iterate(near, start, 0.0) is None
    nothing = spectral._iterate(torch.zeros(160, 160, dtype=torch.float64), start[:, :0], 1e-3)
    assert nothing is None or int(nothing[2]) == 0
    other = of_spectrum(160, 160, many, 1).float()
    found = spectral.threshold_all({"w": other}, 1e-3, {"w": last})["w"]
    assert found.rank == prox.singular_value_threshold(other, 1e-3).rank == 60
    for unlike in ({}, {"w": other}, {"w": spectral.threshold_all({"w": other}, 1e-3)["w"]}):
        torch.testing.assert_close(spectral.threshold_all({"w": other}, 1e-3, unlike)["w"].dense(), found.dense())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "product", "limit"), [("bfloat16", "tf32", 0.01), ("float32", "tf32x3", 1e-5)])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 8, 16, 7, 3, 1), (2, 3, 8, 16, 80, 3, 2), (3, 2, 9, 20, 8, 1, 2), (2, 2, 2, 16, 16, 3, 3),
        (2, 20, 8, 256, 256, 3, 1), (2, 4, 16, 64, 64, 3, 1), (2, 8, 16, 64, 128, 3, 2),
    ],
)  # fmt: skip
def test_convolutions_of_a_cohort(shape: tuple[int, ...], dtype: str, product: str, limit: float) -> None:
    from fedslr.engine import kernels

    clients, samples, size, inner, outer, kernel, stride = shape
    torch.manual_seed(0)
    kind, padding = getattr(torch, dtype), kernel // 2
    x = torch.randn(clients, samples, size, size, inner, device="cuda").to(kind)
    w = torch.randn(clients, outer, kernel, kernel, inner, device="cuda").to(kind)
    x64, w64 = (t.double().movedim(-1, 2).requires_grad_() for t in (x, w))
    wanted = torch.stack([F.conv2d(a, b, stride=stride, padding=padding) for a, b in zip(x64, w64, strict=True)])
    dy = torch.randn_like(wanted).to(kind)
    dx, dw = torch.autograd.grad(wanted, (x64, w64), dy.double())
    back = dy.movedim(2, -1).contiguous()
    assert relative(kernels.forward(x, w, stride, padding, product).movedim(-1, 2), wanted) < limit
    found = kernels.input_gradient(back, w, size, size, stride, padding, product)
    assert relative(found.movedim(-1, 2), dx) < limit
    found = kernels.weight_gradient(back, x, kernel, kernel, stride, padding, product)
    assert relative(found.movedim(-1, 2), dw) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 7, 5, 12), (1, 2, 40, 40, 64)], ids=["whole", "in parts"])
def test_norms_of_a_cohort(shape: tuple[int, ...], residual: bool, relu: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(shape[0], shape[-1], device="cuda", requires_grad=True) for _ in range(2))
    added = torch.randn_like(x, requires_grad=True) if residual else None
    leaves = [x, weight, bias, *([added] if added is not None else [])]
    fused = stacked_layers.normalize(x, weight, bias, added, 2, 1e-5, relu)
    plain = stacked_layers.normalize(
        *(t.double() if t is not None else None for t in (x, weight, bias, added)), 2, 1e-5, relu
    )
    assert relative(fused, plain) < 1e-5
    dy = torch.randn_like(fused)
    found, wanted = torch.autograd.grad(fused, leaves, dy), torch.autograd.grad(plain, leaves, dy.double())
    stacked_layers.side_stream.join()
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 1e-5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(torch.relu(self.norm(self.conv(x)))).mean((2, 3)))
        return out


@pytest.mark.gpu
@pytest.mark.parametrize(("rounded", "product", "limit"), [(True, "tf32", 0.05), (False, "tf32x3", 1e-4)])
def test_gradients_of_a_cohort(rounded: bool, product: str, limit: float) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    network = stacked.stack_model(model, rounded, product)
    assert network is not None
    params = {k: torch.stack([p.detach(), 0.9 * p.detach()]).requires_grad_() for k, p in model.named_parameters()}
    x, y = torch.randn(2, 16, 3, 16, 16, device="cuda"), torch.randint(0, 5, (2, 16), device="cuda")
    loss = F.cross_entropy(network(params, x).float().flatten(0, 1), y.flatten(), reduction="sum") / 16
    grads = torch.autograd.grad(loss, list(params.values()))
    stacked_layers.side_stream.join()
    exact = model.double()
    for client in range(2):
        mine = {k: p[client].detach().double().requires_grad_() for k, p in params.items()}
        alone = F.cross_entropy(torch.func.functional_call(exact, mine, (x[client].double(),)), y[client])
        own = torch.cat([g.flatten() for g in torch.autograd.grad(alone, list(mine.values()))])
        assert relative(torch.cat([g[client].flatten() for g in grads]), own) < limit


# --- rounds -----------------------------------------------------------------------------------------------------------


def finished(run: Simulation) -> Simulation:
    for _ in run.rounds():
        pass
    return run


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[23] * 5, RAGGED, USUAL], ids=["alike", "ragged", "usual"])
@pytest.mark.parametrize("method", METHODS)
def test_rounds_are_the_eager_engines(method: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if method != "fedslr":  # compiling for every method would take minutes and show the same
        monkeypatch.setattr(fused_map, "compiled", lambda: fused_map.apply_to_leaves)
    ours, wanted = (finished(simulation(method, sizes, "cuda", engine=e)) for e in ("auto", "eager"))
    engine: Any = ours.engine
    assert type(engine) is Cuda
    if method != "clustered":  # it asks for losses, which not every model gives from where a recording keeps weights
        assert bool(engine._recordings) == (method not in NOT_TOGETHER)
        assert ("trained" in engine.one_by_one) == (method in NOT_TOGETHER)
    assert_same_clients(ours, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedslr", "ditto"])
def test_recordings_of_several_sizes_share_their_memory(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_map, "compiled", lambda: fused_map.apply_to_leaves)
    asked = {"rounds": 12, "clients_per_round": 5, "selection": "bernoulli"}
    ours, wanted = (finished(simulation(method, [23] * 15, "cuda", engine=e, **asked)) for e in ("auto", "eager"))
    assert len({len(ours._cohort(t)) for t in range(12)}) > len(cuda_engine(ours)._recordings) > 1
    assert_same_clients(ours, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedslr", "ditto", "apfl"])
def test_the_server_works_while_clients_personalize(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that overrides `personalize` is recorded with a cut between its phases."""
    monkeypatch.setattr(fused_map, "compiled", lambda: fused_map.apply_to_leaves)
    run = finished(simulation(method, [23] * 5, "cuda"))
    engine = cuda_engine(run)
    assert run.algorithm.personalizes() == (method != "apfl")
    assert {bool(recording._uploaded) for recording in engine._recordings.values()} == {method != "apfl"}
    assert (engine._uploaded is not None) == (method != "apfl")


class Reading(FedAvg):
    """Reads a number back, which works until its launches are captured."""

    def local_update(self, problem: Any, client: Any, ledger: Any, payload: Any, data: Any, round: Any) -> Any:
        assert all(bool(p.isfinite().all()) for p in payload.values())
        return super().local_update(problem, client, ledger, payload, data, round)


@pytest.mark.gpu
def test_a_method_that_cannot_be_captured_runs_without() -> None:
    federation = make_federation([23] * 5, (2, 6, 6))
    shared = {"rounds": 2, "clients_per_round": 3, "lr": 0.05, "device": "cuda", "dtype": "float64"}
    found = finished(Simulation(Reading(), federation, small_net(), Settings(engine="cuda", **shared)))
    wanted = finished(Simulation(FedAvg(), federation, small_net(), Settings(engine="eager", **shared)))
    assert not cuda_engine(found)._recordings
    assert float(torch.rand(2, device="cuda").sum()) > 0
    assert_same_clients(found, wanted)


@pytest.mark.gpu
def test_bytes_are_those_of_real_messages() -> None:
    on_gpu = simulation("fedslr", [23] * 5, "cuda")
    on_cpu = simulation("fedslr", [23] * 5, "cpu")
    for a, b in zip(on_gpu.rounds(), on_cpu.rounds(), strict=True):
        assert (a.bytes_up, a.bytes_down, a.numbers_up, a.numbers_down) == (
            b.bytes_up, b.bytes_down, b.numbers_up, b.numbers_down,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_single_and_half_precision_follow_the_eager_engine(precision: str) -> None:
    rng = np.random.default_rng(0)
    federation = fedslr.Federation.from_arrays(
        [
            {"x": rng.normal(size=(40, 3, 16, 16)).astype(np.float32), "y": rng.integers(0, 5, 40),
             "x_test": rng.normal(size=(9, 3, 16, 16)).astype(np.float32), "y_test": rng.integers(0, 5, 9)}
            for _ in range(4)
        ],
        num_classes=5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Net()
    shared = {"rounds": 2, "clients_per_round": 3, "lr": 0.02, "device": "cuda"}
    found = finished(Simulation(fedslr.FedSLR(), federation, model, Settings(precision=precision, **shared)))
    wanted = finished(
        Simulation(fedslr.FedSLR(), federation, model, Settings(engine="eager", dtype="float64", **shared))
    )
    start = {k: p.double() for k, p in wanted.state.start.items()}

    def moved(run: Simulation) -> Tensor:
        params = run.state.global_model()
        assert params is not None
        return torch.cat([(p.double() - start[k]).flatten() for k, p in params.items()])

    assert relative(moved(found), moved(wanted)) < {"float32": 1e-3, "tf32": 0.02, "bf16": 0.2}[precision]


@pytest.mark.gpu
def test_a_resumed_run_repeats_itself(tmp_path: Any) -> None:
    federation = make_federation([23] * 5, (2, 6, 6))
    shared = {"clients_per_round": 3, "batch_size": 8, "lr": 0.05, "device": "cuda", "dtype": "float32"}
    whole = fedslr.run(fedslr.FedSLR(), federation, small_net(), rounds=6, **shared)
    fedslr.run(fedslr.FedSLR(), federation, small_net(), rounds=3, out=tmp_path / "run", **shared)
    resumed = fedslr.run(
        fedslr.FedSLR(), federation, small_net(), rounds=6, out=tmp_path / "run", resume=True, **shared
    )
    for k, p in whole.global_params.items():
        assert torch.equal(p, resumed.global_params[k])
