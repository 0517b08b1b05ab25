from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

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


def test_what_is_put_off_is_done_with_what_follows() -> None:
    calls = []

    def mapper(fn: Any, trees: list[list[Any]]) -> list[Any]:
        calls.append(len(trees))
        return [fn(*leaves) for leaves in zip(*trees, strict=True)]

    a, b, c = ({"x": torch.tensor(float(i)), "y": {"z": torch.tensor(10.0 * i)}} for i in (1, 2, 3))
    now = tree.map(lambda p, q: p - q, tree.later(lambda p, q: p * q, a, b), c)
    with tree.mapped_by(mapper):
        late = tree.later(lambda p, q: p * q, a, b)
        assert calls == []
        assert tree.map(lambda p, q: p - q, late, c) == now
        assert tree.map(lambda q, p: p - q, c, late) == now
        assert calls == [3, 3]
        assert late["x"] == 2
        assert late["y"] == {"z": 200.0}
        assert list(late) == ["x", "y"]
        assert calls == [3, 3, 2]
        assert tree.map(lambda p, q: p - q, late, c) == now
        assert calls == [3, 3, 2, 2]
        nested = tree.later(lambda p, q: p + q, tree.later(lambda p, q: p * q, a, b), c)
        assert tree.map(lambda p: -p, nested) == tree.map(lambda p, q, r: -(p * q + r), a, b, c)


@pytest.mark.parametrize(
    "look",
    [
        lambda t: dict(t), lambda t: {**t}, lambda t: dict(t.items()),
        lambda t: dict(zip(t.keys(), t.values(), strict=True)), lambda t: {k: t[k] for k in t},
        lambda t: {k: t.get(k) for k in ("x", "y") if k in t and len(t) == 2},
        lambda t: pytree.tree_map(lambda leaf: leaf, t),
    ],
)  # fmt: skip
def test_what_is_put_off_is_there_for_whoever_looks(look: Any) -> None:
    with tree.mapped_by(lambda fn, trees: [fn(*leaves) for leaves in zip(*trees, strict=True)]):
        late = tree.later(lambda p: 2 * p, {"x": torch.tensor(1.0), "y": torch.tensor(2.0)})
        assert look(late) == {"x": 2.0, "y": 4.0}


def test_all_that_a_dictionary_does_is_done_to_what_was_put_off() -> None:
    """Also what changes it."""
    made = {"x": 2.0, "y": 4.0}
    doings: list[Any] = [
        lambda t: t.__setitem__("x", 1.0), lambda t: t.__delitem__("x"), lambda t: t.pop("x"), lambda t: t.popitem(),
        lambda t: t.setdefault("x", 9.0), lambda t: t.update(x=3.0), lambda t: t.clear(), lambda t: t | {"z": 1.0},
        lambda t: {"z": 1.0} | t, lambda t: t.__ior__({"z": 1.0}), lambda t: t.copy(), lambda t: list(reversed(t)),
        repr, lambda t: t == made, lambda t: t != made, lambda t: t.get("x"), lambda t: "x" in t, len, list,
    ]  # fmt: skip
    untouched = {"__class_getitem__", "__new__", "__init__", "fromkeys", "__sizeof__", "__getattribute__"}
    assert set(vars(dict)) - set(tree.LOOKING) - untouched <= {
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__hash__",
        "__doc__",
    }
    for do in doings:
        with tree.mapped_by(lambda fn, trees: [fn(*leaves) for leaves in zip(*trees, strict=True)]):
            late, plain = tree.later(lambda p: 2 * p, {"x": 1.0, "y": 2.0}), dict(made)
            assert do(late) == do(plain)
            assert dict(late) == plain
