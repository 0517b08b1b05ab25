"""8-bit images are the same data in a quarter of the room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedslr
from conftest import make_arrays, small_cnn
from fedslr.data.federation import ClientData
from fedslr.data.normalization import UNIT, Normalization
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings

COLOURS = Normalization((0.4, 0.6), (0.2, 0.3))


def pixels(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


@settings(max_examples=30, deadline=None)
@given(
    mean=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    deviation=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    batch=st.lists(st.integers(0, 3), max_size=3),
)
def test_the_formula(mean, deviation, batch):
    x = pixels((*batch, 3, 4, 5))
    found = Normalization(tuple(mean), tuple(deviation))(x, torch.float32)
    shift, scale = (np.array(v, np.float32)[:, None, None] for v in (mean, deviation))
    assert found.dtype == torch.float32
    assert np.array_equal(found, (x.numpy().astype(np.float32) / np.float32(255) - shift) / scale)
    assert torch.equal(Normalization(tuple(mean), tuple(deviation))(x, torch.float64), found.double())


def test_one_value_stands_for_all_channels_and_any_shape():
    x = pixels((5, 3, 4, 4))
    assert torch.equal(
        Normalization((0.5,), (0.5,))(x, torch.float32), Normalization((0.5,) * 3, (0.5,) * 3)(x, torch.float32)
    )
    for shape in ((7, 12), (7, 5, 5), (7, 2, 5, 5)):
        x = pixels(shape)
        assert torch.equal(UNIT(x, torch.float32), x.float() / 255)


def test_pixels_are_left_as_they_were():
    x = pixels((5, 2, 4, 4))
    before = x.clone()
    COLOURS(x, torch.float32).zero_()
    assert torch.equal(x, before)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_numbers():
    x = torch.arange(256, dtype=torch.uint8).expand(4, 2, 1, 256)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(COLOURS(x.cuda(), dtype).cpu(), COLOURS(x, dtype))


def eight_bit(sizes: list[int], crop_padding: int = 2) -> fedslr.Federation:
    clients = []
    for arrays in make_arrays(sizes, (2, 5, 6)):
        images = {k: np.clip(40 * arrays[k] + 128, 0, 255).astype(np.uint8) for k in ("x", "x_test")}
        clients.append({**arrays, **images})
    made = fedslr.Federation.from_arrays(clients)
    assert made.normalization == UNIT
    return replace(made, normalization=COLOURS, crop_padding=crop_padding)


def as_floats(federation: fedslr.Federation) -> fedslr.Federation:
    def inputs(x: torch.Tensor) -> torch.Tensor:
        return federation.inputs(x)

    clients = [ClientData(inputs(c.x), c.y, inputs(c.x_test), c.y_test) for c in federation.clients]
    return replace(federation, clients=clients, normalization=None)


def model() -> torch.nn.Module:
    made = small_cnn()
    made(torch.zeros(1, 2, 5, 6))
    return made


@pytest.mark.parametrize("crop_padding", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", [fedslr.FedSLR(), fedslr.PerFedAvg()], ids=lambda m: m.name)
def test_a_run_on_8_bits_is_the_run_on_floats(method, dtype, crop_padding):
    """Bit for bit: models, accuracies, and the quantities of the theory."""
    small = eight_bit([5, 11, 3, 8], crop_padding)
    assert all(x.dtype == torch.uint8 for c in small.clients for x in (c.x, c.x_test))
    torch.manual_seed(0)
    start = model()
    left, right = (
        fedslr.run(
            method,
            federation,
            start,
            rounds=2,
            clients_per_round=3,
            batch_size=4,
            dtype=dtype,
            diagnostics=method.name == "fedslr",
            warn=lambda text: None,
        )
        for federation in (small, as_floats(small))
    )
    for a, b in zip(left.records, right.records, strict=True):
        for key in set(a) - {"seconds", "seconds_by"}:
            assert a[key] == b[key], key
    for client in range(4):
        a, b = left.personal_params(client), right.personal_params(client)
        assert all(torch.equal(a[k], b[k]) for k in b)


def test_pixels_stay_8_bit_on_the_device():
    simulation = Simulation(fedslr.FedAvg(), eight_bit([5, 6]), model(), Settings(rounds=1, dtype="float64"))
    assert all(x.dtype == torch.uint8 for c in simulation.engine.clients for x in (c.x, c.x_test))


def test_8_bits_beside_other_numbers_are_refused():
    """The same picture would be 255 times as bright for one client as for another."""
    clients = make_arrays([4, 5, 6], (3,))
    clients[1]["x"] = np.array([[0, 51, 255]] * 5)
    federation = fedslr.Federation.from_arrays(clients)
    assert federation.normalization is None
    assert federation.clients[1].x.tolist() == [[0, 51, 255]] * 5
    assert federation.inputs(federation.clients[2].x) is federation.clients[2].x
    clients[0]["x"] = np.array([[0, 51, 255]] * 4, np.uint8)
    with pytest.raises(fedslr.FedslrError, match=r"x: some arrays are 8-bit, .* and others are not"):
        fedslr.Federation.from_arrays(clients)


def test_8_bit_features_that_are_no_images():
    clients = [{"x": pixels((9, 6)), "y": [0, 1, 2] * 3, "x_test": pixels((3, 6)), "y_test": [0, 1, 2]}] * 2
    federation = fedslr.Federation.from_arrays(clients)
    assert federation.normalization == UNIT
    fedslr.run(fedslr.FedAvg(), federation, "mlp", rounds=1)


def test_npz_files_of_8_bits_stay_so(tmp_path):
    for i in range(2):
        x = pixels((6, 1, 4, 4)).numpy()
        np.savez(tmp_path / f"{i}.npz", x=x, y=np.arange(6) % 2, x_test=x[:2], y_test=[0, 1])
    federation = fedslr.load(f"npz:{tmp_path}")
    assert (federation.clients[0].x.dtype, federation.normalization, federation.name) == (
        torch.uint8,
        UNIT,
        tmp_path.name,
    )


def test_another_normalization_is_other_data(tmp_path):
    federation = eight_bit([5, 6])
    options = {"rounds": 1, "clients_per_round": 1, "out": tmp_path / "run"}
    start = model()
    fedslr.run(fedslr.FedAvg(), federation, start, **options)
    other = replace(federation, normalization=UNIT)
    with pytest.raises(fedslr.CheckpointError, match="the data are not the ones"):
        fedslr.run(fedslr.FedAvg(), other, start, resume=True, **{**options, "rounds": 2})
