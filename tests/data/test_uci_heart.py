"""The built-in tables of four hospitals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedslr
from fedslr.data import uci_heart


def load(**options: object) -> fedslr.Federation:
    return fedslr.load("heart", warn=lambda text: None, **options)


def test_the_hospitals_are_the_clients():
    federation = load(test=0)
    assert federation.client_names == ["Cleveland", "Hungary", "Switzerland", "Long Beach"]
    # The published counts of patients with disease.
    counts = [(len(c.y), int(c.y.sum())) for c in federation.clients]
    assert counts == [(303, 139), (294, 106), (123, 115), (200, 149)]
    assert federation.feature_names is not None
    assert len(federation.feature_names) == federation.input_shape[0] == 22


def test_missing_values_are_told_and_gone():
    told: list[str] = []
    fedslr.load("heart", warn=told.append)
    assert len(told) == 1
    assert told[0].startswith("some of 920 samples have missing values (blood pressure 60, cholesterol 202, ")
    columns = uci_heart.read_columns()
    assert np.isnan(columns["cholesterol"][303 + 294 :][:123]).all()
    assert np.nanmin(columns["cholesterol"]) > 50
    assert all(bool(torch.isfinite(t).all()) for c in load().clients for t in (c.x, c.x_test))


def test_training_samples_are_standardised():
    federation = load()
    x = torch.cat([c.x for c in federation.clients])[:, :9]
    assert torch.allclose(x.mean(0), torch.zeros(9, dtype=x.dtype), atol=1e-12)
    assert torch.allclose(x.std(0, correction=0), torch.ones(9, dtype=x.dtype), atol=1e-12)


def test_every_hospital_is_tested_with_its_ratio_of_labels():
    for whole, divided in zip(load(test=0).clients, load(seed=3).clients, strict=True):
        assert len(divided.y) + len(divided.y_test) == len(whole.y)
        expected = float(whole.y.double().mean()) * len(divided.y_test)
        assert abs(int(divided.y_test.sum()) - expected) < 1
    assert not torch.equal(load(seed=3).clients[0].x, load(seed=4).clients[0].x)


def test_options_of_partitions_do_nothing(command):
    told: list[str] = []
    fedslr.load("heart", split="iid", clients=5, target="y", warn=told.append)
    assert told[1:] == [
        "data.clients: got 5, but 'heart' has only 4",
        "data: 'heart' is already partitioned by client and ignores split, target",
    ]
    assert "heart" in command("data", "list")[1]


@pytest.mark.parametrize("method", ["fedslr", "fedavg"])
def test_a_recipe_trains_on_the_hospitals(method, command, tmp_path):
    changes = ("algorithm.name=" + method, "data.name=heart", "data.clients=4", "model.name=mlp", "rounds=1",
               "clients_per_round=4", "data.validation=0.2")  # fmt: skip
    given = [word for change in changes for word in ("--set", change)]
    assert command("run", "demo", *given, "--out", tmp_path / "run")[0] == 0
