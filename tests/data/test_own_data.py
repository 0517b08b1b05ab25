"""Mistakes in users' own arrays and files: the message names the client, the array and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedslr
from conftest import make_arrays


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"y": ["a"] * 4},
            "client 'b': y holds texts, expected integer class labels; convert class names by numpy.search",
        ),
        ({"y": np.linspace(0, 2, 4)}, "client 'b': y holds floating-point numbers, expected integer class labels"),
        (
            {"y": [-1, 0, 1, 2]},
            "client 'b': y holds labels that range from -1 to 2; expected one integer label from 0 to 2 per sample",
        ),
        (
            {"y": [0, 1, 2]},
            "client 'b': y holds labels that have shape [3] for 4 samples; expected one integer label from 0 to 2",
        ),
        (
            {"x": [[1.0], [1.0, 2.0]]},
            "client 'b': x holds rows of different shapes, expected an array of numbers; all ",
        ),
        ({"x": [["a"] * 6] * 4}, "client 'b': x holds texts, expected an array of numbers"),
        ({"x": np.zeros((4, 5))}, "client 'b': x is a Tensor of shape [4, 5], expected a tensor of shape [samples, 6]"),
        ({"x": np.full((4, 6), np.nan)}, "client 'b': x has values that are not finite"),
    ],
)
def test_a_mistake_in_an_array_names_the_client_and_the_array(change: dict[str, Any], says: str):
    first, second = make_arrays([4, 4], (6,))
    with pytest.raises(fedslr.FedslrError) as error:
        fedslr.Federation.from_arrays([first, {**second, **change}], client_names=["a", "b"])
    assert str(error.value).startswith(says)


def test_what_is_no_mapping_of_arrays_is_refused():
    (arrays,) = make_arrays([4], (6,))
    for given, found in (
        (arrays, "a str"),
        ([{"x": arrays["x"], "y": arrays["y"], "x_test": arrays["x"]}], "a mapping with x, y, x_test"),
        ([{}], "a mapping with no keys"),
    ):
        with pytest.raises(fedslr.FedslrError) as error:
            fedslr.Federation.from_arrays(given)
        assert str(error.value) == (
            f"client 0: got {found}, expected a mapping with x and y for every client, and optionally x_test and "
            "y_test, or x_val and y_val; without test data, x_test and y_test are empty lists"
        )
    federation = fedslr.Federation.from_arrays([{**arrays, "x_test": [], "y_test": []}], num_classes=3)
    assert len(federation.clients[0].y_test) == 0


def test_a_damaged_file_is_named_with_its_damage(tmp_path):
    (arrays,) = make_arrays([4], (6,))
    path = tmp_path / "one.npz"
    np.savez(path, **arrays)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    wrong = f"{path}: fedslr cannot read this as an npz file with the arrays x, y, x_test, y_test: "
    with pytest.raises(fedslr.FedslrError) as error:
        fedslr.load(f"npz:{tmp_path}")
    assert str(error.value) == f"{wrong}it is damaged or only partly written; write it with numpy.savez"
    del arrays["y_test"]
    np.savez(path, **arrays)
    with pytest.raises(fedslr.FedslrError) as error:
        fedslr.load(f"npz:{tmp_path}")
    assert str(error.value) == f"{wrong}y_test is missing; write it with numpy.savez"
