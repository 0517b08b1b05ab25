"""Sizes of models and the paper's gigabytes."""

from __future__ import annotations

import pytest
import torch

import fedslr
from conftest import make_federation, mlp
from fedslr.algorithms.layer_split import split_head
from fedslr.channel import encoding, model_size
from fedslr.core.matrix import LowRank
from fedslr.models.networks import ResNet18
from fedslr.report.run_facts import dense_bytes

MESSAGES = 2 * 10 * 1000
"""Down and up, ten clients, a thousand rounds."""


def resnet(classes: int) -> dict[str, torch.Tensor]:
    size = 64 if classes == 200 else 32
    return {k: p.detach() for k, p in ResNet18((3, size, size), classes).named_parameters()}


def numbers(method: fedslr.Algorithm, w: dict[str, torch.Tensor]) -> int:
    """What a client is sent, with every tensor dense: controls are not zero in a real run."""
    broadcast = method.broadcast(method.init_server(w), method.init_ledger(w))
    sent = method.addressed(broadcast, method.address(method.init_client(w)), 0)
    if method.name == "scaffold":
        sent = {"w": sent["w"], "c": {k: torch.ones_like(x) for k, x in w.items()}}
    return encoding.encode(sent).numbers


@pytest.mark.parametrize(("classes", "parameters"), [(10, 11_173_952), (100, 11_220_032), (200, 11_279_112)])
def test_resnet18_has_the_papers_size(classes, parameters):
    assert sum(x.numel() for x in resnet(classes).values()) == parameters


@pytest.mark.parametrize(
    ("method", "gigabytes"),
    [
        (fedslr.FedAvg(), [893.92] * 3),
        (fedslr.Ditto(), [893.92] * 3),
        (fedslr.Scaffold(), [1787.83] * 3),
        (fedslr.FedRep(), [893.51, 889.84, 885.78]),
        (fedslr.LGFedAvg(), [0.41, 4.08, 8.13]),
        (fedslr.FedSpa(density=0.5), [446.96] * 3),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_table_2_without_training(method, gigabytes):
    """The paper's communication figures for 10, 100 and 200 classes, from one encoded message each."""
    for classes, expected in zip((10, 100, 200), gigabytes, strict=True):
        w = {k: torch.where(x == 0, 0.5, x) for k, x in resnet(classes).items()}
        dense = sum(x.numel() for x in w.values())
        assert model_size.paper_gigabytes(MESSAGES * numbers(method, w), dense) == pytest.approx(expected, abs=0.0051)
        if classes == 10:
            assert model_size.gigabytes(MESSAGES * numbers(method, w)) == pytest.approx(expected, abs=0.0051)


def test_a_run_counts_the_papers_gigabytes():
    result = fedslr.run(fedslr.FedAvg(), make_federation([5, 6]), mlp(), rounds=3, clients_per_round=2)
    assert result.summary["paper_gb"] == pytest.approx(3 * 2 * 2 * 83 * 4 / 1e9)


def test_the_head_is_the_last_linear_layer():
    body, head = split_head(resnet(10))
    assert list(head) == ["head.weight"]
    assert sum(x.numel() for x in body.values()) == 11_173_952 - 5_120
    assert list(split_head({k: p.detach() for k, p in mlp().named_parameters()})[1]) == ["2.weight", "2.bias"]
    with pytest.raises(fedslr.FedslrError, match="no linear layer"):
        split_head({"a": torch.zeros(3)})
    with pytest.raises(fedslr.FedslrError, match="only one layer"):
        split_head({"a.weight": torch.zeros(3, 2), "a.bias": torch.zeros(3)})


def test_parameters_are_factors_where_smaller_and_non_zeros():
    small = LowRank(torch.ones(10, 2), torch.ones(8, 2), (10, 8))
    large = LowRank(torch.ones(10, 7), torch.ones(8, 7), (10, 8))
    assert model_size.parameters({"a": small, "b": large, "c": {"d": torch.tensor([0.0, 3.0, -0.0])}}) == 36 + 80 + 1


def test_sizes_of_a_run():
    """FedSLR: the global factors, plus each client's own non-zeros; mean and deviation over all clients."""
    result = fedslr.run(
        fedslr.FedSLR(eta_g=2, rank_penalty=0.1, l1_penalty=0.05), make_federation([5, 8, 6]), mlp(), rounds=6, lr=0.1,
        clients_per_round=2,
    )  # fmt: skip
    sizes, simulation = result.summary["parameters"], result._simulation
    each = [sum(int((x != 0).sum()) for x in simulation.state.roster.member(i).client.p.values()) for i in range(3)]
    shared = sum(
        min(r * (m + n), m * n) for r, (m, n) in zip(result.summary["rank"].values(), [(8, 6), (3, 8)], strict=True)
    )
    assert sizes["dense"] == 83
    assert sizes["global"] == shared + 11
    assert sizes["personal"] == pytest.approx(sizes["global"] + sum(each) / 3)
    mean = sum(each) / 3
    assert sizes["personal_std"] == pytest.approx((sum((e - mean) ** 2 for e in each) / 3) ** 0.5)
    assert sizes["personal_std"] > 0
    pure = fedslr.run(fedslr.FedSLR(), make_federation([5, 8]), mlp(), rounds=2, personal_epochs=0)
    assert pure.summary["parameters"]["personal"] == pure.summary["parameters"]["global"]


def test_no_model_ships_with_more_parameters_than_the_dense_one():
    """Clients that never trained have 83 parameters; the parts of the others add up to more and can be merged."""
    method, federation = fedslr.FedSLR(l1_penalty=0.0), make_federation([5, 8, 6])
    sizes = fedslr.run(method, federation, mlp(), rounds=1, clients_per_round=2, lr=0.1).summary["parameters"]
    assert (sizes["dense"], sizes["global"], sizes["shipped"]) == (83, 83, 83)
    assert sizes["personal"] > 83
    assert model_size.Sizes(100, 40, [60, 130, 90]).summary()["shipped"] == pytest.approx((60 + 100 + 90) / 3)


def test_models_counted_together_are_counted_as_alone():
    torch.manual_seed(0)
    shared, factors = torch.ones(4), LowRank(torch.randn(6, 1), torch.randn(5, 1), (6, 5))
    sparse = [torch.randn(3, 2).relu() for _ in range(3)]
    trees = [{"w": {"a": shared, "b": factors}, "p": {"a": x, "b": x.mT}} for x in sparse]
    trees[1]["p"]["b"] = factors
    assert model_size.parameters_of(trees) == [model_size.parameters(tree) for tree in trees]
    assert model_size.parameters_of([]) == []
    assert model_size.parameters_of([{}, {}]) == [0, 0]


def test_double_precision_is_twice_as_dense():
    records = [{"clients": [0, 1]}, {"clients": [2]}]
    assert dense_bytes(records, 10, 4) == 120
    assert dense_bytes(records, 10, 8) == 240
