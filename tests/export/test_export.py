"""Models that ship: a layer in any form is the layer, a file in any format answers as the dense model."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedslr
from conftest import make_federation, mlp, small_cnn
from fedslr.channel import measuring
from fedslr.core.matrix import LowRank, matrix_shape, to_matrix
from fedslr.data.digits import DIGITS_SCALING
from fedslr.data.normalization import Normalization
from fedslr.export import Exported, latency, layer_forms, programs, runtimes, safetensors_file
from fedslr.export.factored_layers import FactoredLayer, RecomposedLayer, SparseAddition
from fedslr.export.layered_model import Layer, composed, model_of_run, slender
from fedslr.export.model_card import escaped
from fedslr.export.model_export import MAX_DIFFERENCE, SUFFIXES
from fedslr.run import recipes
from fedslr.run.api import run_recipe

needs_onnx = pytest.mark.skipif(not programs.has_onnx(), reason="onnx is an optional extra")
FORMATS = ["safetensors", "torch", pytest.param("onnx", marks=needs_onnx)]
OPTIONS: dict[str, Any] = {"rounds": 3, "clients_per_round": 3, "lr": 0.05, "personal_epochs": 2}


def factors(shape: tuple[int, ...], rank: int, seed: int = 0) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = matrix_shape(shape)
    return LowRank(torch.randn(rows, rank, generator=generator), torch.randn(columns, rank, generator=generator), shape)


def sparse(shape: tuple[int, ...], density: float, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator) < density
    return torch.where(kept, torch.randn(shape, generator=generator), 0.0)


def close(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max()) <= 1e-5 * max(1.0, float(b.abs().max()))


# --- layers ---------------------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "3×3": {"kernel_size": 3, "padding": 1},
    "3×2, strides, padding and dilation of each axis": {
        "kernel_size": (3, 2),
        "stride": (2, 3),
        "padding": (2, 1),
        "dilation": (1, 2),
    },
    "1×1, stride 2, no bias": {"kernel_size": 1, "stride": 2, "bias": False},
    "same": {"kernel_size": (5, 3), "padding": "same"},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "reflected": {"kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect"},
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("rank", [0, 1, 4])
def test_two_thin_convolutions_are_the_convolution(case, rank):
    layer = nn.Conv2d(5, 6, **CONVOLUTIONS[case]).double()
    low = factors(tuple(layer.weight.shape), rank)
    low = LowRank(low.u.double(), low.v.double(), low.shape)
    layer.weight.data = low.dense()
    thin = FactoredLayer(layer, low)
    x = torch.randn(3, 5, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(thin(x), layer(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(thin.weight, layer.weight, rtol=1e-10, atol=1e-10)
    height, width = layer.kernel_size
    assert thin.first.weight.shape == (max(1, rank), 5, 1, width)
    assert thin.second.weight.shape == (6, max(1, rank), height, 1)


def test_two_thin_linear_layers_are_the_linear_layer():
    layer = nn.Linear(7, 5)
    low = factors((5, 7), 2)
    layer.weight.data = low.dense()
    x = torch.randn(4, 3, 7)
    torch.testing.assert_close(FactoredLayer(layer, low)(x), layer(x))
    assert sum(p.numel() for p in FactoredLayer(layer, low).parameters()) == 2 * (5 + 7) + 5


@pytest.mark.parametrize("case", [c for c in CONVOLUTIONS if c not in ("same", "valid", "circular", "reflected")])
def test_a_sparse_part_is_a_product_of_its_own(case):
    layer = nn.Conv2d(5, 6, **CONVOLUTIONS[case])
    shape = tuple(layer.weight.shape)
    low, rest = factors(shape, 2), sparse(shape, 0.1)
    layer.weight.data = low.dense() + rest
    x = torch.randn(3, 5, 9, 8)
    assert SparseAddition.takes(layer)
    assert close(SparseAddition(FactoredLayer(layer, low), layer, rest)(x), layer(x))
    assert close(RecomposedLayer(layer, low, rest)(x), layer(x))


def test_a_sparse_part_of_a_linear_layer():
    layer, low, rest = nn.Linear(7, 5), factors((5, 7), 1), sparse((5, 7), 0.2)
    layer.weight.data = low.dense() + rest
    for x in (torch.randn(4, 7), torch.randn(2, 4, 7)):
        assert close(SparseAddition(FactoredLayer(layer, low), layer, rest)(x), layer(x))
        assert close(RecomposedLayer(layer, low, rest)(x), layer(x))


def test_windows_that_are_padded_otherwise_are_not_cut():
    assert not SparseAddition.takes(nn.Conv2d(2, 2, 3, padding="same"))
    assert not SparseAddition.takes(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"))


# --- parts ----------------------------------------------------------------------------------------------------------


def test_few_rows_or_columns_are_exact_factors():
    x = torch.zeros(8, 4, 3, 3)
    x[2] = sparse((4, 3, 3), 0.5)
    assert torch.equal(slender(x).dense(), x)
    assert slender(x).rank == 3
    wide = torch.zeros(6, 20)
    wide[:, 3] = 1.5
    assert slender(wide).rank == 1
    assert torch.equal(slender(wide).dense(), wide)
    assert slender(torch.zeros(6, 20)).rank == 0


def test_parts_that_add_up_are_kept_and_others_are_not():
    low, rest = factors((20, 20), 2), sparse((20, 20), 0.05)
    whole = low.dense() + rest
    mixture = {"u": {"a": whole}, "w": {"a": low}}
    found = composed({"w": {"a": low}, "p": {"a": rest}}, {"a": whole})["a"]
    assert found.low is not None
    assert torch.equal(found.rest, rest)
    taken = composed(mixture, {"a": whole})["a"]
    assert taken.low is None
    assert torch.equal(taken.whole, whole)


def test_factors_count_only_where_they_are_smaller():
    low = factors((20, 20), 3)
    assert Layer(low.dense(), low).factors.rank == 3
    thin = torch.zeros(20, 20)
    thin[4] = 1
    assert Layer(low.dense() + thin, low, thin).factors.rank == 4
    everywhere = sparse((20, 20), 0.3)
    assert Layer(low.dense() + everywhere, low, everywhere).factors is None


def test_a_file_has_whatever_takes_fewest_bytes():
    low = factors((60, 60), 3)
    thinly, thickly = sparse((60, 60), 0.03), sparse((60, 60), 0.95)
    for rest, kept in ((thinly, {"", "added"}), (thickly, {""})):
        layer = Layer(low.dense() + rest, low, rest)
        assert set(layer.stored("dense")) == kept
        sizes = [measuring.measure(x).bytes for x in ({"": layer.whole}, {"": low, "added": rest})]
        assert measuring.measure(layer.stored("dense")).bytes == min(sizes)


# --- every method, every format -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images() -> fedslr.Federation:
    return make_federation([12, 9, 15, 8], (2, 6, 6))


@dataclass(frozen=True)
class Ranked(fedslr.FedSLR):
    """FedSLR that leaves rank 2, and of the personal part little enough for every form of a layer to be had."""

    name: ClassVar[str] = "ranked"

    def prox_global(self, z, last=None):
        return {k: truncated(x) if x.ndim > 1 else x for k, x in z.items()}

    def personalize(self, problem, client, payload, data, round):
        def kept(name: str, x: Tensor) -> Tensor:
            positions = torch.arange(x.numel()).reshape(x.shape)
            if name == "4.weight":
                return torch.where(positions < x[0].numel(), x, 0.0)
            return torch.zeros_like(x) if name == "8.weight" else torch.where(positions % 21 == 0, x, 0.0)

        trained = super().personalize(problem, client, payload, data, round)
        return trained._replace(p={name: kept(name, x) for name, x in trained.p.items()})


def truncated(x: Tensor) -> LowRank:
    u, s, vh = torch.linalg.svd(to_matrix(x), full_matrices=False)
    return LowRank((u[:, :2] * s[:2]).contiguous(), vh[:2].mT.contiguous(), tuple(x.shape))


@pytest.fixture(scope="module")
def trained(images) -> fedslr.Result:
    return fedslr.run(Ranked(eta_g=1, l1_penalty=0), images, model=wide_cnn(), **{**OPTIONS, "clients_per_round": 4})


def test_a_personal_layer_takes_every_form(trained):
    chosen = model_of_run(trained, 0)
    plains = layer_forms.convertible(chosen.model)
    found = {name: layer_forms.alternatives(plain, chosen.layers[name]) for name, plain in plains.items()}
    assert found == {
        "0.weight": ["factors", "sparse"],
        "4.weight": ["factors", "sparse"],
        "6.weight": ["sparse"],
        "8.weight": ["factors"],
    }
    assert layer_forms.smallest_program(chosen)["6.weight"] == "recomposed"


def wide_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1),
        nn.GroupNorm(2, 12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1, groups=2),
        nn.Conv2d(12, 16, 3, 2),
        nn.Flatten(),
        nn.Linear(64, 48),
        nn.ReLU(),
        nn.Linear(48, 3),
    )


def answers(made: Exported, model: nn.Module | None) -> Any:
    """What a file answers to somebody who has nothing but it."""
    if made.facts.format == "safetensors":
        return fedslr.load_exported(made.path, model)
    data = made.path.read_bytes()
    return programs.torch_answers(data) if made.facts.format == "torch" else programs.onnx_answers(data)


@pytest.mark.parametrize("method", fedslr.ALGORITHMS)
@pytest.mark.parametrize("client", [None, 2])
def test_every_method_ships(method, client, ragged, tmp_path):
    result = fedslr.run(fedslr.ALGORITHMS[method](), ragged, model=mlp(), **OPTIONS)
    out = tmp_path / "model.safetensors"
    if client is None and not result.has_global_model:
        with pytest.raises(fedslr.FedslrError, match=f"global: {method} has no global model; expected --client"):
            fedslr.export(result, out, client=client)
        assert not out.exists()
        return
    made = fedslr.export(result, out, client=client)
    dense = result.global_model() if client is None else result.personal_model(client)
    x = torch.randn(9, 6)
    assert close(fedslr.load_exported(out, mlp())(x), dense(x))
    assert made.facts.bytes == out.stat().st_size
    assert made.facts.difference <= MAX_DIFFERENCE


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("purpose", ["size", "speed"])
@pytest.mark.parametrize("client", [None, 0])
def test_every_format_answers_as_the_dense_model(format, purpose, client, trained, tmp_path):
    out = tmp_path / f"model{SUFFIXES[format]}"
    made = fedslr.export(trained, out, client=client, format=format, purpose=purpose)
    dense = trained.global_model() if client is None else trained.personal_model(client)
    for batch in (1, 5):
        x = torch.randn(batch, 2, 6, 6)
        assert close(answers(made, wide_cnn())(x), dense(x))
    if purpose == "size":
        assert made.facts.bytes < made.facts.dense_bytes or format != "safetensors"
    if client is not None:
        held = trained.federation.clients[client]
        right = (dense(held.x_test.float()).argmax(1) == held.y_test).float().mean()
        assert made.facts.score == pytest.approx(float(right))


@pytest.mark.parametrize("name", ["cnn", "mlp", "vit"])
def test_built_in_models_need_nothing_but_their_file(name, tmp_path):
    federation = make_federation([8, 8], (1, 8, 8))
    result = fedslr.run(Ranked(), federation, model=name, rounds=1, batch_size=8, epochs=1, personal_epochs=0)
    made = fedslr.export(result, tmp_path / "model", client=1)
    assert "factors" in made.facts.about["forms"].values()
    x = torch.randn(3, 1, 8, 8)
    assert close(fedslr.load_exported(made.path)(x), result.personal_model(1)(x))


@pytest.mark.parametrize("format", ["torch", pytest.param("onnx", marks=needs_onnx)])
def test_a_transformer_is_a_program_too(format, tmp_path):
    federation = make_federation([8, 8], (1, 8, 8))
    result = fedslr.run(Ranked(), federation, model="vit", rounds=1, batch_size=8, personal_epochs=0)
    made = fedslr.export(result, tmp_path / f"model{SUFFIXES[format]}", client=1, format=format)
    x = torch.randn(3, 1, 8, 8)
    assert close(answers(made, None)(x), result.personal_model(1)(x))


def test_double_precision_stays(images, tmp_path):
    result = fedslr.run(fedslr.FedSLR(), images, model=small_cnn_for(images), dtype=torch.float64, rounds=1)
    made = fedslr.export(result, tmp_path / "model", client=0)
    loaded = fedslr.load_exported(made.path, small_cnn_for(images))
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(loaded(x), result.personal_model(0)(x), rtol=1e-12, atol=1e-12)


def small_cnn_for(federation: fedslr.Federation) -> nn.Module:
    model = small_cnn()
    model(federation.clients[0].x[:1].float())
    return model


def test_frozen_parameters_and_buffers_ship_too(ragged, tmp_path):
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((6,), scale))
            self.fixed = nn.Parameter(torch.full((6,), scale), requires_grad=False)
            self.layers = mlp()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x * self.scale + self.fixed)
            return out

    result = fedslr.run(fedslr.FedSLR(), ragged, model=Scaled(0.5), **OPTIONS)
    made = fedslr.export(result, tmp_path / "model", client=0)
    x = torch.randn(4, 6)
    assert close(fedslr.load_exported(made.path, Scaled(2.0))(x), result.personal_model(0)(x))


class Tempered(nn.Module):
    """A model with a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) / self.temperature
        return out


@pytest.mark.parametrize("format", FORMATS)
def test_a_single_number_ships_too(format, ragged, tmp_path):
    result = fedslr.run(fedslr.FedSLR(), ragged, model=Tempered(), **OPTIONS)
    made = fedslr.export(result, tmp_path / f"model{SUFFIXES[format]}", client=0, format=format)
    x = torch.randn(4, 6)
    assert close(answers(made, Tempered())(x), result.personal_model(0)(x))


class Recurrent(nn.Module):
    """A model that gives its recurrent layer an initial state, which exporters make one of a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen, _ = self.recurrent(x.reshape(len(x), 2, 3), torch.zeros(1, len(x), 4))
        out: Tensor = self.head(seen[:, -1])
        return out


@pytest.mark.parametrize("format", ["torch", pytest.param("onnx", marks=needs_onnx)])
@pytest.mark.parametrize("batch", [1, 2, 20])
def test_a_program_that_takes_one_size_of_batch_is_refused(format, batch, ragged, tmp_path, capfd):
    result = fedslr.run(fedslr.FedAvg(), ragged, model=Recurrent(), engine="eager", rounds=1)
    with pytest.raises(
        fedslr.FedslrError, match="the program would take batches of one size only; use --format safe"
    ) as said:
        fedslr.export(result, tmp_path / f"model{SUFFIXES[format]}", client=0, format=format, batch=batch)
    assert "\n" not in str(said.value)
    assert capfd.readouterr().err == ""
    assert not list(tmp_path.iterdir())
    made = fedslr.export(result, tmp_path / "model.safetensors", client=0, batch=batch)
    x = torch.randn(5, 6)
    assert close(answers(made, Recurrent())(x), result.personal_model(0)(x))


@pytest.mark.parametrize("format", ["torch", pytest.param("onnx", marks=needs_onnx)])
def test_a_program_made_with_one_sample_takes_more(format, ragged, tmp_path):
    result = fedslr.run(fedslr.FedAvg(), ragged, model=mlp(), **OPTIONS)
    made = fedslr.export(result, tmp_path / f"model{SUFFIXES[format]}", format=format, batch=1)
    x = torch.randn(5, 6)
    assert close(answers(made, None)(x), result.global_model()(x))


def test_a_shared_weight_stays_dense(ragged):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.second(self.first(x).tanh()))
            return out

    assert set(layer_forms.convertible(Tied())) == {"head.weight"}
    result = fedslr.run(fedslr.FedSLR(eta_g=1, rank_penalty=0.5), ragged, model=Tied(), **OPTIONS)
    assert model_of_run(result, 0).layers.keys() <= dict(Tied().named_parameters()).keys()


def test_an_archive_has_nobodys_data(trained, tmp_path):
    """A batch is kept in a torch program for its shape; it must not be a client's."""
    made = fedslr.export(trained, tmp_path / "model.pt2", client=0, format="torch")
    (example,), _ = torch.export.load(made.path).example_inputs
    assert not example.any()


@pytest.mark.parametrize(("format", "suffix"), [("onnx", "onnx"), ("torch", "pt2")])
def test_a_program_says_nothing_of_the_code_it_was_made_by(format, suffix, trained, tmp_path):
    """Exporters note lines of people's code, and the folders it lies in."""
    made = fedslr.export(trained, tmp_path / f"model.{suffix}", client=0, format=format)
    parts = [made.path.read_bytes()]
    if format == "torch":
        with zipfile.ZipFile(made.path) as archive:
            parts = [archive.read(name) for name in archive.namelist()]
    for word in (b".py", b"site-packages", b"stack_trace", b"forward("):
        assert not any(word in part for part in parts), word


def test_an_onnx_file_for_size_is_the_smaller_one_and_loads_in_silence(trained, tmp_path, capfd):
    sizes = {}
    for purpose, plan in (("size", None), ("dense", {})):
        with pytest.MonkeyPatch.context() as patch:
            if plan is not None:
                patch.setattr(layer_forms, "smallest_program", lambda source: {})
            made = fedslr.export(trained, tmp_path / f"{purpose}.onnx", client=0, format="onnx")
        sizes[purpose] = made.facts.bytes
    assert made.facts.about["forms"] == {}
    assert sizes["size"] < sizes["dense"]
    capfd.readouterr()
    onnxruntime = pytest.importorskip("onnxruntime")
    onnxruntime.InferenceSession(tmp_path / "size.onnx")
    assert capfd.readouterr() == ("", "")


# --- forms by measured cost -----------------------------------------------------------------------------------------


class Priced:
    """A runtime in which every form of a layer has its price, so that what is chosen does not hang on a clock."""

    name, device, sparse = "priced", "cpu", True

    def __init__(self, monkeypatch: pytest.MonkeyPatch, price: Any) -> None:
        self.price = price
        monkeypatch.setattr(layer_forms, "milliseconds", lambda calls, repeat: {k: call() for k, call in calls.items()})

    def ready(self, model: nn.Module, x: Tensor) -> Any:
        return lambda: self.price(model)


def prices(thin: float) -> Any:
    def price(model: nn.Module) -> float:
        one = {FactoredLayer: thin, SparseAddition: 5.0}.get(type(model))
        if one is not None:
            return one
        layers = [m for m in model.modules() if isinstance(m, FactoredLayer)]
        return 10.0 + (thin - 1) * len(layers) if not isinstance(model, nn.Conv2d | nn.Linear) else 1.0

    return price


@pytest.mark.parametrize(("thin", "forms_chosen"), [(0.5, {"factors"}), (2.0, set()), (0.99, set())])
def test_a_form_is_chosen_by_what_it_costs(thin, forms_chosen, trained, monkeypatch):
    chosen = model_of_run(trained, None)
    plan = layer_forms.fastest(chosen, Priced(monkeypatch, prices(thin)))
    assert set(plan.values()) == forms_chosen
    assert plan in ({}, layer_forms.smallest(chosen))


def test_the_whole_is_measured_too(trained, monkeypatch):
    """Layers that are faster one by one are left if the model is not."""
    chosen = model_of_run(trained, None)

    def price(model: nn.Module) -> float:
        if isinstance(model, FactoredLayer | nn.Conv2d | nn.Linear):
            return 0.1 if isinstance(model, FactoredLayer) else 1.0
        return 9.0 if any(isinstance(m, FactoredLayer) for m in model.modules()) else 3.0

    assert layer_forms.fastest(chosen, Priced(monkeypatch, price)) == {}


def test_grouped_convolutions_stay_dense(trained):
    chosen = model_of_run(trained, None)
    assert set(layer_forms.convertible(chosen.model)) == {"0.weight", "4.weight", "6.weight", "8.weight"}


def test_calls_take_turns():
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    took = runtimes.milliseconds(calls, 4)
    assert order == ["a", "b"] * (4 + runtimes.WARM_UP_CALLS)
    assert set(took) == {"a", "b"}
    assert min(took.values()) >= 0


@needs_onnx
@pytest.mark.parametrize("case", [c for c in CONVOLUTIONS if c not in ("circular", "reflected")])
def test_a_layer_made_by_hand_is_the_layer_in_onnx(case):
    layer = nn.Conv2d(5, 6, **CONVOLUTIONS[case])
    low = factors(tuple(layer.weight.shape), 2)
    layer.weight.data = low.dense()
    x = torch.randn(3, 5, 9, 8)
    for made in (layer, FactoredLayer(layer, low)):
        assert close(programs.onnx_answers(programs.onnx_bytes(made, x))(x), layer(x))


@needs_onnx
def test_a_linear_layer_made_by_hand_is_the_layer_in_onnx():
    for layer in (nn.Linear(7, 5), nn.Linear(7, 5, bias=False)):
        for x in (torch.randn(3, 7), torch.randn(2, 3, 7)):
            assert close(programs.onnx_answers(programs.onnx_bytes(layer, x))(x), layer(x))


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_plain_safetensors_with_the_models_names(trained, tmp_path):
    made = fedslr.export(trained, tmp_path / "model.safetensors")
    arrays = safetensors.torch.load_file(made.path)
    low = model_of_run(trained, None).layers["6.weight"].low
    assert torch.equal(arrays["6.weight.u"], low.u)
    assert torch.equal(arrays["6.weight.v"], low.v)
    assert torch.equal(arrays["1.weight"], trained.global_params["1.weight"])
    assert sum(x.numel() for k, x in arrays.items() if "." in k) == made.facts.numbers


def forged(data: bytes, **changes: Any) -> bytes:
    """The file with another description, and the digest that belongs to it."""
    arrays = {name: x.numpy() for name, x in safetensors.torch.load(data).items()}
    length = int.from_bytes(data[:8], "little")
    text = json.dumps({**json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedslr"]), **changes})
    digest = safetensors_file._digest(text, safetensors.numpy.save(arrays))
    return safetensors.numpy.save(arrays, {"fedslr": text, "sha256": digest})


def flipped(data: bytes) -> bytes:
    """The file with one bit of its last number changed."""
    return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


MALFORMED = "Error while deserializing"
DAMAGES: dict[str, tuple[Any, str]] = {
    "a flipped bit": (flipped, "it is damaged: its SHA-256 does not match; export the model again"),
    "another description": (
        lambda data: data.replace(b"classes", b"klasses", 1),
        "it is damaged: its SHA-256 does not match",
    ),
    "cut off": (lambda data: data[:-50], MALFORMED),
    "empty": (lambda data: b"", MALFORMED),
    "something else": (lambda data: safetensors.torch.save({"a": torch.ones(2)}), "it has no '__metadata__'"),
    "of the future": (
        lambda data: forged(data, format=9),
        "it has format 9, but this version of fedslr reads format 1",
    ),
    "another architecture": (
        lambda data: forged(data, model={"name": "mlp", "input_shape": [1, 8, 8], "classes": 3}),
        r"Error\(s\) in loading state_dict for",
    ),
    "a huge architecture": (
        lambda data: forged(data, model={"name": "cnn", "input_shape": [1, 2**20, 2**20], "classes": 3}),
        r"Error\(s\) in loading state_dict for",
    ),
    "somebody's code": (lambda data: forged(data, model={"name": "os:system"}), "the weights of a model of your own"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    result = fedslr.run(fedslr.FedAvg(), make_federation([8, 8], (1, 8, 8)), model="cnn", rounds=1)
    return fedslr.export(result, tmp_path_factory.mktemp("files") / "model").path.read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(damage, whole, tmp_path):
    change, says = DAMAGES[damage]
    path = tmp_path / "model"
    path.write_bytes(whole)
    fedslr.load_exported(path)
    path.write_bytes(change(whole))
    with pytest.raises(fedslr.FedslrError, match=says) as raised:
        fedslr.load_exported(path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(path))


def test_a_model_of_ones_own_has_to_be_given(ragged, tmp_path):
    result = fedslr.run(fedslr.FedAvg(), ragged, model=mlp(), **OPTIONS)
    made = fedslr.export(result, tmp_path / "model")
    with pytest.raises(fedslr.FedslrError, match="for a model of your own, a module of its architecture"):
        fedslr.load_exported(made.path)
    with pytest.raises(fedslr.FedslrError, match=r"in loading state_dict for Sequential: size mismatch"):
        fedslr.load_exported(made.path, mlp(classes=4))
    with pytest.raises(fedslr.FedslrError, match=r"nowhere: cannot load this file: No such file"):
        fedslr.load_exported(tmp_path / "nowhere")


def test_an_answer_that_differs_is_not_written(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "built", lambda data, model: lambda x: torch.zeros(len(x), 3))
    with pytest.raises(
        fedslr.FedslrError,
        match=r"answers differ from the dense model's by .*, so it was not written; try another format",
    ):
        fedslr.export(trained, tmp_path / "model", client=0)
    assert not list(tmp_path.iterdir())


# --- the card -------------------------------------------------------------------------------------------------------


def test_hostile_names_are_words(tmp_path):
    hostile = "a|b\n# <script>alert(1)</script> [x](http://y) `z`"
    federation = fedslr.Federation(make_federation([8, 8]).clients, 3, name=hostile)
    result = fedslr.run(fedslr.FedSLR(), federation, model=mlp(), rounds=1)
    page = fedslr.export(result, tmp_path / "x`|y.safetensors", client=0).card.read_text()
    assert "<script>" not in page
    assert "[x](" not in page
    assert [line for line in page.splitlines() if line.startswith("# ")] == [r"# x\`\|y.safetensors"]
    assert all(row.count("|") - row.count(r"\|") == 3 for row in page.splitlines() if row.startswith("|"))


def test_escaped_text_is_one_line():
    assert escaped("a_b\n\\*c*") == r"a\_b \\\*c\*"


def test_the_card_says_what_the_model_is(trained, tmp_path):
    made = fedslr.export(trained, tmp_path / "client0.safetensors", client=0)
    page, facts = made.card.read_text(), made.facts
    for text in (
        "personal model of client 0",
        "rank\\_penalty = 0.0001",
        f"{facts.numbers:,}",
        f"{100 * facts.bytes / facts.dense_bytes:.0f} % of the dense model's",
        "its 7 test samples",
        'fedslr.load_exported("client0.safetensors", module_of_the_same_architecture)',
        "(batch, 2, 6, 6) of float32",
    ):
        assert text in page
    assert made.card.name == "client0.safetensors.md"


def test_the_card_says_how_pixels_are_given(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(0, 256, (8, 1, 4, 4), dtype=np.uint8), "y": np.arange(8) % 2}
    client = {**arrays, "x_test": arrays["x"], "y_test": arrays["y"]}
    result = fedslr.run(fedslr.FedAvg(), fedslr.Federation.from_arrays([client]), model="cnn", rounds=1)
    page = fedslr.export(result, tmp_path / "m", client=0).card.read_text()
    assert "(p/255 − mean)/deviation, with mean 0 and deviation 1" in page


def test_an_onnx_file_says_how_pixels_are_given_and_answers_so(tmp_path):
    """With nothing but the file, what the run says of a client's images."""
    onnxruntime = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(0, 256, (8, 3, 4, 4), dtype=np.uint8), "y": np.arange(8) % 2}
    client = {**arrays, "x_test": arrays["x"], "y_test": arrays["y"]}
    by = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    federation = replace(fedslr.Federation.from_arrays([client]), normalization=by)
    result = fedslr.run(fedslr.FedAvg(), federation, "cnn", rounds=1)
    session = onnxruntime.InferenceSession(fedslr.export(result, tmp_path / "m.onnx", format="onnx", client=0).path)
    notes = session.get_modelmeta().custom_metadata_map
    assert "classes" not in notes
    told = {k: np.array(v, np.float32)[:, None, None] for k, v in json.loads(notes["normalization"]).items()}
    (scores,) = session.run(None, {"inputs": (arrays["x"].astype(np.float32) / 255 - told["mean"]) / told["deviation"]})
    model = result.personal_model(0)
    expected = model(result.federation.inputs(torch.from_numpy(arrays["x"])))
    np.testing.assert_allclose(scores, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_model_of_an_older_checkpoint_says_so(tmp_path):
    """The newest cannot be read: what is exported, and all that is said of it, is of the round before."""
    federation, model = make_federation([12, 9]), mlp()
    settings = {"rounds": 3, "checkpoint_every": 1, "seed": 1}
    fedslr.run(fedslr.FedAvg(), federation, model, out=tmp_path / "run", **settings)
    newest = max((tmp_path / "run" / "checkpoint").glob("server-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:500])
    with pytest.warns(UserWarning, match="going on from round 2"):
        result = fedslr.open_run(tmp_path / "run", federation, model)
    assert (result.summary["rounds"], len(result.records), result.rounds_left) == (2, 2, 1)
    made = fedslr.export(result, tmp_path / "m", client=0)
    assert "| rounds | 2 of 3; the run was not finished |" in made.card.read_text()
    before = fedslr.run(fedslr.FedAvg(), federation, model, **{**settings, "rounds": 2})
    for name, x in before.personal_params(0).items():
        torch.testing.assert_close(result.personal_params(0)[name], x, rtol=1e-5, atol=1e-6)


def test_a_client_is_known_by_its_name(tmp_path, command):
    """Whoever ships a model to a hospital knows it by that, and not by the number that it has here."""
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for name in ("west_1", "east", "7", "1"):
        arrays = {"x": rng.normal(size=(9, 5)).astype(np.float32), "y": np.arange(9) % 3}
        np.savez(tmp_path / "data" / f"{name}.npz", **arrays, x_test=arrays["x"], y_test=arrays["y"])
    lines = ("rounds = 1", f'data = {{ name = "npz:{tmp_path / "data"}" }}', 'model = { name = "mlp" }')
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    run = tmp_path / "run"
    assert command("run", tmp_path / "recipe.toml", "--out", run)[0] == 0
    code, out, _ = command("export", run, "--client", "west_1")
    assert (code, out.startswith("the personal model of client 3 (west_1), safetensors")) == (0, True)
    card = (run / "export" / "client-3.safetensors.md").read_text()
    assert "The personal model of client 3 (west\\_1) of a federation" in card
    assert safetensors_file.decode((run / "export" / "client-3.safetensors").read_bytes())[0]["client_name"] == "west_1"
    code, out, _ = command("export", run, "--client", "7")  # there is no client of that number
    assert (code, out.startswith("the personal model of client 1 (7), safetensors")) == (0, True)
    code, out, err = command("export", run, "--client", "1", "--out", tmp_path / "1.safetensors")
    assert (code, out.startswith("the personal model of client 1 (7), safetensors")) == (0, True)
    assert "--client 1: taken as a number; the client of that name is client 0" in err
    code, _, err = command("export", run, "--client", "wets_1")
    says = "--client: got 'wets_1', expected a whole number from 0 to 3, or a client's name; did you mean 'west_1'?"
    assert (code, says in err) == (2, True)
    federation = fedslr.load(f"npz:{tmp_path / 'data'}", clients=2)
    assert list(federation.client_names) == ["1", "7"]
    expected = "client_names: got 2 names, 1 of them different; expected 2 different"
    with pytest.raises(fedslr.FedslrError, match=expected):
        replace(federation, client_names=["a", "a"])


def test_the_card_says_how_many_scores_there_are(tmp_path):
    result = fedslr.run(fedslr.FedAvg(), make_federation([12, 9]), mlp(classes=5), rounds=1, warn=lambda text: None)
    made = fedslr.export(result, tmp_path / "m", client=0)
    assert (
        "`scores` has 5 numbers, of which the first 3 are those of the 3 classes; the class with the largest"
        in made.card.read_text()
    )


@pytest.mark.parametrize("format", FORMATS)
def test_the_names_of_classes_go_with_a_model(tmp_path, format):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(8, 1, 4, 4)).astype(np.float32), "y": np.arange(8) % 3}
    client = {**arrays, "x_test": arrays["x"], "y_test": arrays["y"]}
    names = ["Katze", "a_dog", "鳥\udce9"]
    federation = fedslr.Federation.from_arrays([client], class_names=names)
    result = fedslr.run(fedslr.FedAvg(), federation, model="mlp", rounds=1)
    made = fedslr.export(result, tmp_path / f"m{SUFFIXES[format]}", format=format)
    assert "one score per class: 0 Katze, 1 a\\_dog, 2 鳥?; the class with the largest" in made.card.read_text("utf-8")
    if format == "safetensors":
        assert safetensors_file.decode(made.path.read_bytes())[0]["model"]["class_names"] == ["Katze", "a_dog", "鳥?"]
    if format == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(made.path)
        assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == ["Katze", "a_dog", "鳥?"]


def test_the_card_says_how_digits_are_scaled(tmp_path):
    raw = load_digits().images.astype(np.float32)
    mean, deviation = (float(number) for number in re.findall(r"\d\.\d{4}", DIGITS_SCALING))
    held = np.concatenate([c.x.numpy() for c in fedslr.load("digits", clients=4).clients])
    assert np.abs((raw.min() - mean) / deviation - held.min()) < 1e-4
    assert np.abs((raw.max() - mean) / deviation - held.max()) < 1e-4
    result = fedslr.run(fedslr.FedAvg(), fedslr.load("digits", clients=4), rounds=1)
    assert DIGITS_SCALING in fedslr.export(result, tmp_path / "m").card.read_text()


# --- the command line -----------------------------------------------------------------------------------------------

TINY = """
rounds = 2
clients_per_round = 2
algorithm = { name = "fedslr", eta_g = 5, rank_penalty = 2e-2, l1_penalty = 3e-3 }
data = { name = "digits", clients = 4, samples_per_client = 20 }
model = { name = "cnn" }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("runs") / "run"
    recipe = recipes.parse(tomllib.loads(TINY))
    run_recipe(recipe, home)
    return home


def test_export_writes_a_file_and_its_card(command, folder):
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    code, printed, err = command("export", folder, "--client", "3")
    assert (code, err) == (0, "")
    assert str(folder / "export" / "client-3.safetensors") in printed
    assert "% of the dense model's size" in printed
    assert "accuracy" in printed
    assert (folder / "export" / "client-3.safetensors.md").exists()
    x = torch.randn(5, 1, 8, 8)
    again = fedslr.open_run(folder, device="cpu")
    assert close(fedslr.load_exported(folder / "export" / "client-3.safetensors")(x), again.personal_model(3)(x))
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_export_of_the_global_model_for_speed(command, folder, tmp_path):
    out = tmp_path / "deep" / "model.pt2"
    code, printed, _ = command("export", folder, "--global", "--format", "torch", "--for", "speed", "--out", out)
    assert code == 0
    assert "the global model, torch, for speed" in printed
    assert torch.export.load(out).module()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_latency_prints_and_writes_a_table(command, folder, tmp_path):
    code, printed, _ = command("latency", folder, "--repeat", "2", "--out", tmp_path / "latency.json", "--batch", "3")
    assert code == 0
    assert "milliseconds per batch of 3, median of 2" in printed
    assert "torch cpu dense" in printed
    written = json.loads((tmp_path / "latency.json").read_text())
    (row,) = written["rows"]
    assert written["threads"] == torch.get_num_threads()
    assert row["ms"]["torch cpu"].keys() >= {"dense", "chosen"}
    assert row["bytes"] > 4 * 0.9 * row["parameters"]
    options = ("--client", "1", "--repeat", "1", "--device", "cpu", "--out", tmp_path / "b.json")
    assert command("latency", folder, *options)[0] == 0
    assert all(key.endswith(" cpu") for key in json.loads((tmp_path / "b.json").read_text())["rows"][0]["ms"])


def test_latency_leaves_out_what_has_no_global_model(command, folder, tmp_path):
    local = tmp_path / "local"
    recipe = recipes.parse({**tomllib.loads(TINY), "algorithm": {"name": "local"}})
    run_recipe(recipe, local)
    code, printed, err = command("latency", local, folder, "--repeat", "1", "--out", tmp_path / "both.json")
    assert code == 0
    assert f"left out: {local}: local has no global model" in " ".join(err.split())
    assert "fedslr" in printed
    assert len(json.loads((tmp_path / "both.json").read_text())["rows"]) == 1
    code, _, err = command("latency", local, "--repeat", "1")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: latency: no run here has a global model; expected --client NUMBER",
    )
    assert not (local / "latency.json").exists()


def test_what_onnxruntime_cannot_run_is_left_out(command, tmp_path):
    pytest.importorskip("onnxruntime")
    recipe = recipes.parse({**tomllib.loads(TINY), "dtype": "float64"})
    run_recipe(recipe, tmp_path / "double")
    code, printed, err = command("latency", tmp_path / "double", "--repeat", "1", "--device", "cpu")
    assert code == 0, err
    assert "left out: onnxruntime cpu" in err
    assert "torch cpu dense" in printed
    code, _, err = command("export", tmp_path / "double", "--global", "--format", "onnx")
    assert code == 2
    assert "onnxruntime runs few kinds of layers in float64: train with dtype = 'float32'" in err


def test_variants_of_a_personal_model(trained):
    chosen = model_of_run(trained, 0)
    plans = latency.variants(chosen, runtimes.Torch())
    assert set(plans) == {"dense", "factorised", "sparse"}
    for plan in plans.values():
        x = chosen.x
        assert close(layer_forms.in_forms(chosen.model, chosen.layers, plan)(x), chosen.model(x))


@pytest.mark.gpu
def test_a_recorded_model_answers_as_it_does_otherwise():
    x = torch.randn(5, 2, 6, 6)
    wanted = wide_cnn()(x)
    call = runtimes.RecordedTorch("cuda").ready(wide_cnn(), x)
    # Memory that the model no longer holds would now be others'.
    taken = [torch.full((2**k,), torch.nan, device="cuda") for k in range(20)]
    answers = call()[-1]
    torch.testing.assert_close(answers.cpu(), wanted.detach(), rtol=1e-2, atol=1e-2)
    assert len(taken) == 20


@pytest.mark.gpu
@pytest.mark.parametrize("client", [None, 1])
def test_a_run_on_a_gpu_is_exported_for_any_machine(images, tmp_path, client):
    result = fedslr.run(fedslr.FedSLR(eta_g=1), images, model=wide_cnn(), **{**OPTIONS, "device": "cuda"})
    made = fedslr.export(result, tmp_path / "a.safetensors", client=client)
    dense = (result.global_model() if client is None else result.personal_model(client)).cpu()
    x = torch.randn(5, 2, 6, 6)
    torch.testing.assert_close(fedslr.load_exported(made.path, wide_cnn())(x), dense(x), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_what_cannot_be_recorded_is_run_as_it_is():
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / float(x.sum())

    assert runtimes.RecordedTorch("cuda").ready(Reading(), torch.ones(3))() is None
    assert float(torch.rand(2, device="cuda").sum()) > 0


def no_checkpoint(folder: Path, home: Path) -> Path:
    (home / "bare").mkdir()
    (home / "bare" / "config.toml").write_text((folder / "config.toml").read_text())
    return home / "bare"


WRONG: dict[str, tuple[Any, str]] = {
    "unknown client": (
        lambda f, p: ["export", f, "--client", "7"],
        "client: got 7, expected a whole number from 0 to 3",
    ),
    "a name where clients have none": (
        lambda f, p: ["export", f, "--client", "nobody"],
        "--client: got 'nobody', expected a whole number from 0 to 3\n",
    ),
    "no client": (lambda f, p: ["export", f], "export: expected either --client or --global"),
    "both": (lambda f, p: ["export", f, "--client", "1", "--global"], "export: expected either --client or --global"),
    "unknown format": (
        lambda f, p: ["export", f, "--global", "--format", "tflite"],
        "format: got 'tflite', expected one of safetensors, torch, onnx",
    ),
    "unknown purpose": (
        lambda f, p: ["export", f, "--global", "--for", "fun"],
        "for: got 'fun', expected one of size, speed",
    ),
    "output exists": (
        lambda f, p: ["export", f, "--global", "--out", f / "config.toml"],
        "config.toml already exists; choose another --out",
    ),
    "unknown device": (
        lambda f, p: ["latency", f, "--device", "tpu"],
        "device: got 'tpu', expected cpu",
    ),
    "a torch program by another name": (
        lambda f, p: ["export", f, "--global", "--format", "torch", "--out", p / "x.pt"],
        "out: got 'x.pt' for format torch; expected a name that ends in .pt2",
    ),
    "a format by another's name": (
        lambda f, p: ["export", f, "--global", "--out", p / "x.onnx"],
        "out: got 'x.onnx' for format safetensors; expected a name that ends in .safetensors, or another format",
    ),
    "no folder": (lambda f, p: ["export", p / "none", "--global"], "none: no run in it"),
    "no run": (lambda f, p: ["export", p, "--global"], "no run in it (config.toml is missing)"),
    "no checkpoint": (lambda f, p: ["export", no_checkpoint(f, p), "--global"], "this folder has no checkpoint"),
    "a folder that cannot be": (
        lambda f, p: ["export", f, "--global", "--out", f / "config.toml" / "x.safetensors"],
        "config.toml/x.safetensors: File exists",
    ),
    "latency to nowhere": (
        lambda f, p: ["latency", f, "--out", p / "none" / "latency.json"],
        "expected a file in a folder that exists",
    ),
    "latency of nothing": (lambda f, p: ["latency", p / "none"], "none: no such folder"),
    "latency of an unknown client": (lambda f, p: ["latency", f, "--client", "9"], "client: got 9"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_line(case, command, folder, tmp_path):
    make, says = WRONG[case]
    code, _, err = command(*make(folder, tmp_path))
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    assert says in err
    assert "resume" not in err


def test_damaged_metrics_are_one_line(command, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    first, second = metrics.read_bytes().splitlines(keepends=True)
    for damage in (b"", first, b"\xff" + first + second, first + b'{"round": "x", "clients": 3}\n'):
        metrics.write_bytes(damage)
        code, _, err = command("export", tmp_path / "run", "--global")
        assert code == 2, err
        assert err.startswith(f"error: {metrics}: line ")
        assert len(err.splitlines()) == 1


def test_what_an_old_checkpoint_is_taken_for_is_a_plain_warning(command, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "manifest-000002.json").write_text("{}")
    for call in (["export", "--global"], ["latency", "--repeat", "1"]):
        code, _, err = command(call[0], tmp_path / "run", *call[1:])
        assert code == 0, err
        assert err.startswith("warning: the checkpoint of round 2 is damaged")
        assert "UserWarning" not in err


def test_a_folder_of_other_data_is_one_line(command, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    recipe = tmp_path / "run" / "config.toml"
    recipe.write_text(recipe.read_text().replace("samples_per_client = 20", "samples_per_client = 19"))
    code, _, err = command("export", tmp_path / "run", "--global")
    assert (code, err.startswith("error: the data are not the ones this run began with; restore them")) == (
        2,
        True,
    )


def test_a_damaged_clients_file_is_told_with_a_way_out(command, folder, tmp_path):
    """The server's file being damaged, an older checkpoint is taken; a client's is read too late for that."""
    shutil.copytree(folder, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoint" / "clients").iterdir(), key=lambda p: p.stem.split("-")[-1])
    newest.write_bytes(newest.read_bytes()[:-1])
    client = int(newest.stem.split("-")[1])
    code, _, err = command("export", tmp_path / "run", "--client", client)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"`fedslr run {tmp_path / 'run' / 'config.toml'} --out {tmp_path / 'run'} --resume` makes that round" in err
    assert command("run", tmp_path / "run" / "config.toml", "--out", tmp_path / "run", "--resume")[0] == 0
    assert command("export", tmp_path / "run", "--client", client)[0] == 0


def test_a_missing_package_is_named(command, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "find_spec", lambda name: None if name == "onnxruntime" else object())
    code, _, err = command("export", folder, "--global", "--format", "onnx", "--out", tmp_path / "m.onnx")
    assert code == 2
    assert err.strip().endswith("onnx needs the packages onnx, onnxscript, onnxruntime: pip install 'fedslr[export]'")


# --- opening a run again --------------------------------------------------------------------------------------------


def test_an_opened_run_is_the_run(ragged, tmp_path):
    for method in (fedslr.FedSLR(), fedslr.PerFedAvg(), fedslr.FedRep(), fedslr.FedSpa()):
        home = tmp_path / method.name
        result = fedslr.run(method, ragged, model=mlp(), out=home, **OPTIONS)
        before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
        again = fedslr.open_run(home, ragged, mlp(), device="cpu")
        assert again.summary == result.summary
        assert again.records[-1]["round"] == result.records[-1]["round"]
        assert again.out == home
        for client in range(5):
            for name, x in result.personal_params(client).items():
                assert torch.equal(x, again.personal_params(client)[name])
        for name, x in result.global_params.items():
            assert torch.equal(x, again.global_params[name])
        assert before == {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}


def test_an_unfinished_run_is_opened_as_far_as_it_got(ragged, tmp_path):
    stops = iter([False, True])
    with pytest.raises(fedslr.Interrupted):
        fedslr.run(fedslr.FedSLR(), ragged, model=mlp(), out=tmp_path, should_stop=lambda: next(stops), **OPTIONS)
    opened = fedslr.open_run(tmp_path, ragged, mlp(), device="cpu")
    assert opened.summary["rounds"] == 2
    assert len(opened.records) == 2
    assert opened.rounds_left == OPTIONS["rounds"] - 2
    made = fedslr.export(opened, tmp_path / "model.safetensors", client=0)
    assert f"| rounds | 2 of {OPTIONS['rounds']}; the run was not finished |" in made.card.read_text()


def test_other_data_or_another_model_are_refused(ragged, tmp_path):
    fedslr.run(fedslr.FedSLR(), ragged, model=mlp(), out=tmp_path, **OPTIONS)
    with pytest.raises(fedslr.CheckpointError, match="the data are not the ones"):
        fedslr.open_run(tmp_path, make_federation([5, 11, 3, 8, 6]), mlp(), device="cpu")
    with pytest.raises(fedslr.CheckpointError, match="the model is not the one"):
        fedslr.open_run(tmp_path, ragged, nn.Linear(6, 3), device="cpu")
    with pytest.raises(fedslr.FedslrError, match=r"give your own .* to fedslr\.open_run"):
        fedslr.open_run(tmp_path, device="cpu")


def test_a_method_that_no_recipe_can_name_is_given_again(ragged, tmp_path):
    @dataclass(frozen=True)
    class Hidden(fedslr.FedSLR):
        name: ClassVar[str] = "hidden"

    result = fedslr.run(Hidden(l1_penalty=0.01), ragged, model=mlp(), out=tmp_path, **OPTIONS)
    with pytest.raises(fedslr.FedslrError, match="no such method"):
        fedslr.open_run(tmp_path, ragged, mlp(), device="cpu")
    with pytest.raises(fedslr.FedslrError, match=r"algorithm: got .*, but the run's was .*; expected the same"):
        fedslr.open_run(tmp_path, ragged, mlp(), algorithm=Hidden(), device="cpu")
    opened = fedslr.open_run(tmp_path, ragged, mlp(), algorithm=Hidden(l1_penalty=0.01), device="cpu")
    assert torch.equal(opened.personal_params(1)["0.weight"], result.personal_params(1)["0.weight"])


def test_a_damaged_client_is_noticed_when_it_is_asked_for(ragged, tmp_path):
    result = fedslr.run(fedslr.FedSLR(), ragged, model=mlp(), out=tmp_path, **{**OPTIONS, "clients_per_round": 5})
    (path,) = (tmp_path / "checkpoint" / "clients").glob("client-000002-000003*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    opened = fedslr.open_run(tmp_path, ragged, mlp(), device="cpu")
    assert torch.equal(opened.personal_params(1)["0.weight"], result.personal_params(1)["0.weight"])
    with pytest.raises(fedslr.CheckpointError, match="SHA-256 does not match"):
        opened.personal_params(2)
