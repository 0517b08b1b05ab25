"""The methods against independent transcriptions, and FedSLR against its oracles. All in float64, to 1e-10."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedslr
from conftest import make_federation, mlp, small_cnn
from fedslr import tree
from fedslr.config import Settings
from fedslr.engine import cohort
from fedslr.engine.rounds import Simulation
from fedslr.matrix import dense

SIZES = [5, 11, 3, 8, 7]
FULL_BATCH = 1000
COMMON = {"lr": 0.1, "lr_decay": 0.9, "weight_decay": 0.01, "epochs": 3, "personal_epochs": 2}


def cnn() -> nn.Module:
    model = small_cnn().double()
    model(torch.zeros(1, 2, 5, 4, dtype=torch.float64))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp().double(), (6,)),
    "cnn": (cnn, (2, 5, 4)),
}


def run(
    algorithm: Any, model: nn.Module, shape: tuple[int, ...], sampled: int, rounds: int = 5, **changes: Any
) -> Simulation:
    settings = Settings(
        **{
            **COMMON,
            "rounds": rounds,
            "clients_per_round": sampled,
            "batch_size": FULL_BATCH,
            "dtype": "float64",
            **changes,
        }
    )
    simulation = Simulation(algorithm, make_federation(SIZES, shape), model, settings)
    for _ in simulation.rounds():
        pass
    return simulation


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert (a[key] - b[key]).abs().max() <= tolerance, key


# --- FedSLR, transcribed with torch.optim and nothing of the package ------------------------------------------------


def transcribed_svt(weight: Tensor, threshold: float) -> Tensor:
    if weight.ndim == 1:
        return weight
    if weight.ndim == 4:
        o, i, d1, d2 = weight.shape
        matrix = weight.transpose(1, 2).reshape(o * d1, i * d2)
    else:
        matrix = weight
    u, s, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    matrix = torch.from_numpy(u @ np.diag(np.maximum(s - threshold, 0)) @ v)
    if weight.ndim == 4:
        return matrix.reshape(o, d1, i, d2).transpose(1, 2).contiguous()
    return matrix


def transcription(
    model: nn.Module, clients: list[Any], cohorts: list[list[int]], eta_g: float, lam: float, mu: float
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Algorithm 2 as ALGORITHMS.md states it: every dual stored, losses differentiated by autograd, steps by SGD."""
    names = [n for n, _ in model.named_parameters()]
    M = len(clients)
    w = [p.detach().clone() for p in model.parameters()]
    gamma = [[torch.zeros_like(p) for p in w] for _ in range(M)]
    personal = [[torch.zeros_like(p) for p in w] for _ in range(M)]
    for t, sampled in enumerate(cohorts):
        eta = COMMON["lr"] * COMMON["lr_decay"] ** t
        uploads = []
        for i in sampled:
            x, y = clients[i].x, clients[i].y
            # Phase I: SGD on f_i(v) + wd/2‖v‖² − ⟨γ_i, v⟩ + ‖v − w‖²/(2η_g).
            worker = copy.deepcopy(model)
            with torch.no_grad():
                for p, value in zip(worker.parameters(), w, strict=True):
                    p.copy_(value)
            optimizer = torch.optim.SGD(worker.parameters(), lr=eta, weight_decay=COMMON["weight_decay"])
            for _ in range(COMMON["epochs"]):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(worker(x), y)
                for p, value, dual in zip(worker.parameters(), w, gamma[i], strict=True):
                    loss = loss - (dual * p).sum() + (p - value).square().sum() / (2 * eta_g)
                loss.backward()
                optimizer.step()
            v = [p.detach().clone() for p in worker.parameters()]
            gamma[i] = [g + (a - b) / eta_g for g, a, b in zip(gamma[i], w, v, strict=True)]
            uploads.append(v)
            # Phase II: proximal SGD on f_i(w + p) + wd/2‖p‖² + μ‖p‖₁ with w fixed.
            free = [p.clone().requires_grad_() for p in personal[i]]
            optimizer = torch.optim.SGD(free, lr=eta, weight_decay=COMMON["weight_decay"])
            for _ in range(COMMON["personal_epochs"]):
                optimizer.zero_grad()
                mixed = {n: a + b for n, a, b in zip(names, w, free, strict=True)}
                nn.functional.cross_entropy(torch.func.functional_call(model, mixed, (x,)), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for p in free:
                        p.copy_(torch.sign(p) * torch.clamp(p.abs() - eta * mu, min=0))
            personal[i] = [p.detach() for p in free]
        new = []
        for k in range(len(w)):
            mean_model = sum(v[k] for v in uploads) / len(uploads)
            mean_dual = sum(g[k] for g in gamma) / M
            new.append(transcribed_svt(mean_model - eta_g * mean_dual, lam * eta_g))
        w = new
    return dict(zip(names, w, strict=True)), [{n: a + b for n, a, b in zip(names, w, p, strict=True)} for p in personal]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sampled", [2, 5])
def test_fedslr_is_its_transcription(kind, sampled):
    """Global and all personal parameters, partial and full participation, ragged clients, an MLP and a CNN."""
    build, shape = MODELS[kind]
    eta_g, lam, mu = 2.0, 0.05, 0.02
    ours = run(fedslr.FedSLR(eta_g=eta_g, rank_penalty=lam, l1_penalty=mu), build(), shape, sampled)
    cohorts = [cohort.uniform(len(SIZES), sampled, 0, t) for t in range(5)]
    shared, personal = transcription(build(), make_federation(SIZES, shape).clients, cohorts, eta_g, lam, mu)
    assert_close(ours.algorithm.global_model(ours.server), shared)
    for i, expected in enumerate(personal):
        assert_close(ours.personal_params(i), expected)
    # The penalties must bite, or this would say little.
    ranks = ours.algorithm.ranks(ours.server)
    assert any(rank < min(fedslr.matrix.matrix_shape(tuple(shared[k].shape))) for k, rank in ranks.items())
    sparse = [(tree_leaf == 0).float().mean() for tree_leaf in ours.state(cohorts[-1][0]).p.values()]
    assert 0 < float(torch.stack(sparse).mean()) < 1


# --- oracles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sampled", [1, 3, 5])
def test_without_rank_penalty_fedslr_is_feddyn(kind, sampled):
    """λ = 0: the global iterates of FedDyn with α = 1/η_g, with small batches and ragged clients."""
    build, shape = MODELS[kind]
    for rounds in (1, 2, 7):
        a = run(fedslr.FedSLR(eta_g=4.0, rank_penalty=0.0), build(), shape, sampled, rounds, batch_size=4)
        b = run(fedslr.FedDyn(alpha=0.25), build(), shape, sampled, rounds, batch_size=4)
        assert_close(a.algorithm.global_model(a.server), b.algorithm.global_model(b.server))
        for i in range(len(SIZES)):
            assert_close(a.state(i).gamma, b.state(i).gamma)


class AllDuals(fedslr.FedSLR):
    """Algorithm 1's server: it forms the mean of every client's dual anew instead of tracking it."""

    clients: Callable[[], list[dict[str, Tensor]]]

    def aggregate(self, server: Any, mean_upload: Any, cohort_size: int) -> Any:
        gamma = tree.mean(type(self).clients())
        z = tree.map(lambda w, d, c: w + d - self.eta_g * c, dense(server.w), mean_upload, gamma)
        return server._replace(w=fedslr.prox.low_rank(z, self.rank_penalty * self.eta_g), gamma=gamma)


@pytest.mark.parametrize("sampled", [2, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_the_mean_dual_server_is_the_all_duals_server(kind, sampled):
    build, shape = MODELS[kind]
    options = {"eta_g": 3.0, "rank_penalty": 0.02, "l1_penalty": 1e-3}
    ours = run(fedslr.FedSLR(**options), build(), shape, sampled, 6, batch_size=4)

    settings = Settings(**{**COMMON, "rounds": 6, "clients_per_round": sampled, "batch_size": 4, "dtype": "float64"})
    theirs = Simulation(AllDuals(**options), make_federation(SIZES, shape), build(), settings)
    AllDuals.clients = staticmethod(lambda: [theirs.state(i).gamma for i in range(len(SIZES))])
    for _ in theirs.rounds():
        pass
    assert_close(ours.algorithm.global_model(ours.server), theirs.algorithm.global_model(theirs.server))
    assert_close(ours.server.gamma, tree.mean([ours.state(i).gamma for i in range(len(SIZES))]))


def test_fedavg_is_its_transcription():
    model = mlp().double()
    clients = make_federation(SIZES).clients
    w = {k: p.detach().clone() for k, p in model.named_parameters()}
    for t in range(4):
        total = {k: torch.zeros_like(p) for k, p in w.items()}
        sampled = cohort.uniform(len(SIZES), 3, 0, t)
        for i in sampled:
            worker = copy.deepcopy(model)
            worker.load_state_dict(w)
            optimizer = torch.optim.SGD(worker.parameters(), lr=0.1 * 0.9**t, weight_decay=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(worker(clients[i].x), clients[i].y).backward()
                optimizer.step()
            for k, p in worker.named_parameters():
                total[k] += p.detach() * SIZES[i]
        w = {k: x / sum(SIZES[i] for i in sampled) for k, x in total.items()}
    ours = run(fedslr.FedAvg(), mlp().double(), (6,), 3, rounds=4)
    assert_close(ours.server.w, w)
    assert_close(ours.personal_params(0), w)


def test_feddyn_is_its_transcription():
    """The table's row, with h and every γ_i kept in plain lists."""
    model, alpha, M = mlp().double(), 0.5, len(SIZES)
    clients = make_federation(SIZES).clients
    w = {k: p.detach().clone() for k, p in model.named_parameters()}
    h = {k: torch.zeros_like(p) for k, p in w.items()}
    gamma = [{k: torch.zeros_like(p) for k, p in w.items()} for _ in clients]
    for t in range(4):
        sampled, eta, found = cohort.uniform(M, 2, 0, t), 0.1 * 0.9**t, []
        for i in sampled:
            v = {k: p.clone() for k, p in w.items()}
            for _ in range(3):
                free = {k: p.clone().requires_grad_() for k, p in v.items()}
                out = torch.func.functional_call(model, free, (clients[i].x,))
                grads = torch.autograd.grad(nn.functional.cross_entropy(out, clients[i].y), list(free.values()))
                for (k, p), g in zip(v.items(), grads, strict=True):
                    v[k] = p - eta * (g + 0.01 * p - gamma[i][k] + alpha * (p - w[k]))
            for k in w:
                gamma[i][k] = gamma[i][k] - alpha * (v[k] - w[k])
            found.append(v)
        for k in w:
            h[k] = h[k] - alpha / M * sum(v[k] - w[k] for v in found)
            w[k] = sum(v[k] for v in found) / len(found) - h[k] / alpha
    ours = run(fedslr.FedDyn(alpha=alpha), mlp().double(), (6,), 2, rounds=4)
    assert_close(ours.server.w, w)


def test_what_is_sent_has_the_rank_that_is_reported():
    ours = run(fedslr.FedSLR(eta_g=2.0, rank_penalty=0.1), cnn(), (2, 5, 4), 5)
    ranks = ours.algorithm.ranks(ours.server)
    assert ranks
    for name, rank in ranks.items():
        assert int(torch.linalg.matrix_rank(fedslr.matrix.to_matrix(ours.payload[name]), tol=1e-9)) == rank


def test_zero_personal_epochs_is_the_global_model():
    ours = run(fedslr.FedSLR(eta_g=2.0), mlp().double(), (6,), 5, personal_epochs=0)
    assert_close(ours.personal_params(1), ours.algorithm.global_model(ours.server))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fedslr.FedSLR(eta_g=0), "eta_g: got 0, expected a number above 0"),
        (lambda: fedslr.FedSLR(rank_penalty=-1e-4), "rank_penalty: got -0.0001, expected a number 0 or above"),
        (lambda: fedslr.FedSLR(l1_penalty="much"), 'l1_penalty: got "much", expected a number 0 or above'),
        (lambda: fedslr.FedSLR(eta_g=float("nan")), "eta_g: got NaN"),
        (lambda: fedslr.FedDyn(alpha=True), "alpha: got true"),
    ],
)
def test_wrong_hyperparameters_are_refused(make, says):
    with pytest.raises(fedslr.FedslrError) as refused:
        make()
    assert says in str(refused.value)
