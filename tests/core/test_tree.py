from __future__ import annotations

import pytest
import torch

from fedslr.core import tree


def test_weighted_mean_of_nested_trees():
    a = {"w": torch.tensor([1.0, 2.0]), "c": {"x": torch.tensor(4.0)}}
    b = {"w": torch.tensor([4.0, 8.0]), "c": {"x": torch.tensor(1.0)}}
    mean = tree.Mean()
    mean.add(a, 1.0)
    mean.add(b, 3.0)
    assert mean.value()["w"].tolist() == [3.25, 6.5]
    assert mean.value()["c"]["x"] == 1.75
    assert tree.mean([a, b])["c"]["x"] == 2.5
    assert float(tree.norm(a)) == pytest.approx(21**0.5)
    with pytest.raises(ValueError, match="nothing"):
        tree.Mean().value()
