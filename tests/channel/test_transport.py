"""Messages inside a simulation: measured ones are told from encoded ones by nothing but their cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedslr
from conftest import make_federation
from fedslr.channel import encoding
from fedslr.channel.transport import Encoded, Measured, measure_uploads
from fedslr.core.errors import WireError
from fedslr.core.matrix import LowRank

FACTORS = LowRank(torch.randn(30, 2), torch.randn(20, 2), (30, 20))


@pytest.mark.parametrize(
    "payload",
    [{}, {"w": torch.randn(3, 4), "n": 7}, {"w": FACTORS}, {"w": {"a": torch.tensor(0.5)}, "e": {}}],
    ids=["nothing", "dense", "factors", "nested"],
)
def test_measured_messages_are_the_encoded_ones(payload: dict[str, Any]) -> None:
    (size, received), (wanted, decoded) = Measured().send(payload), Encoded().send(payload)
    assert size == wanted
    assert set(received) == set(decoded)


def test_what_is_not_finite_is_not_sent() -> None:
    with pytest.raises(WireError, match="'w' has numbers that are not finite"):
        Measured().send({"w": torch.tensor([1.0, float("nan")])})
    large = torch.full((4,), 3e38)
    assert Measured().send({"w": large})[1]["w"] is large


@pytest.mark.parametrize("uploads", [{}, {"w": {}}, {"w": torch.randn(3)}, {"w": torch.randn(3, 2, 2)}])
def test_every_upload_of_a_cohort_has_its_size(uploads: dict[str, Any]) -> None:
    sizes, broken = measure_uploads(uploads, {}, 3)()
    each = [{k: x[i] if isinstance(x, torch.Tensor) else x for k, x in uploads.items()} for i in range(3)]
    assert sizes == [Measured().send(upload)[0] for upload in each]
    assert not broken


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2, 5)])
def test_a_client_whose_numbers_are_no_numbers_is_told(shape: tuple[int, ...]) -> None:
    uploads = {"v": torch.zeros(3, 2, dtype=torch.float64), "w": torch.ones(shape), "x": torch.ones(3, 4)}
    uploads["w"][1] = float("inf")
    assert list(measure_uploads(uploads, {}, 3)()[1]) == [1]


@pytest.mark.parametrize("rank", [2, 15])
def test_factors_are_multiplied_once(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they travel as factors or not."""
    made = LowRank(torch.randn(30, rank), torch.randn(20, rank), (30, 20))
    wanted = encoding.encode({"w": made}).size
    multiplied, dense = [], LowRank.dense
    monkeypatch.setattr(LowRank, "dense", lambda low: multiplied.append(low) or dense(low))
    assert Measured().send({"w": made})[0] == wanted
    assert len(multiplied) == 1


class Scaled(nn.Module):
    """A model with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * self.linear(x)
        return out


def test_a_parameter_may_be_a_single_number() -> None:
    federation = make_federation([12] * 4, (6,))
    torch.manual_seed(0)
    model = Scaled()
    found = [
        fedslr.run(fedslr.FedSLR(), federation, model, rounds=2, engine=engine, dtype="float64", device="cpu")
        for engine in ("eager", "batched")
    ]
    for k, p in found[0].global_params.items():
        torch.testing.assert_close(found[1].global_params[k], p, rtol=1e-10, atol=1e-12)
