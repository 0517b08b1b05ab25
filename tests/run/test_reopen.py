"""Runs on one's own data, opened without the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedslr
from conftest import make_arrays, mlp
from fedslr.core import tree

NAMES = ["north", "south", "east"]
OPTIONS: dict[str, Any] = {"rounds": 3, "clients_per_round": 2, "lr": 0.05, "evaluate_every": 1, "engine": "eager"}
NEEDS_SAMPLES = {"perfedavg", "ifca"}


@pytest.fixture(scope="module")
def wards() -> fedslr.Federation:
    arrays = make_arrays([5, 11, 8], (1, 3, 2))
    for client in arrays:
        for part in ("x", "x_test"):
            client[part] = np.clip(40 * client[part] + 120, 0, 255).astype(np.uint8)
    return fedslr.Federation.from_arrays(arrays, client_names=NAMES, class_names=["a", "b", "c"], name="wards")


@pytest.mark.parametrize("name", fedslr.ALGORITHMS)
def test_models_and_records_need_no_data(name, wards, tmp_path):
    result = fedslr.run(fedslr.ALGORITHMS[name](), wards, "mlp", out=tmp_path / "run", **OPTIONS)
    opened = fedslr.open_run(tmp_path / "run", device="cpu")
    assert opened.summary == result.summary
    assert opened.clients_frame().equals(result.clients_frame())
    for x, again in zip(tree.leaves(result.global_params), tree.leaves(opened.global_params), strict=True):
        assert torch.equal(x, again)
    if name in NEEDS_SAMPLES:
        with pytest.raises(fedslr.FedslrError, match=r"^data: this needs .* fedslr\.open_run\(folder, federation\)$"):
            opened.personal_params("south")
        opened = fedslr.open_run(tmp_path / "run", wards, device="cpu")
    for key, x in result.personal_params(1).items():
        assert torch.equal(x, opened.personal_params("south")[key])


def test_a_description_is_all_that_a_model_needs(wards, tmp_path):
    fedslr.run(fedslr.FedAvg(), wards, "mlp", out=tmp_path, **OPTIONS)
    kept = fedslr.open_run(tmp_path).federation
    for field in ("name", "num_classes", "input_shape", "class_names", "client_names", "normalization", "sizes"):
        assert getattr(kept, field) == getattr(wards, field)
    with pytest.raises(fedslr.FedslrError, match="needs the clients' samples"):
        kept.clients[0]


def test_a_model_given_in_python_is_all_that_is_given_again(wards, tmp_path):
    model = torch.nn.Sequential(torch.nn.Flatten(), mlp())
    result = fedslr.run(fedslr.Ditto(), wards, model, out=tmp_path, **OPTIONS)
    opened = fedslr.open_run(str(tmp_path), model=model)
    assert all(torch.equal(x, opened.personal_params(2)[key]) for key, x in result.personal_params(2).items())
    with pytest.raises(fedslr.FedslrError, match=r"model\.name: got 'Sequential'.*give your own .*model"):
        fedslr.open_run(tmp_path)


def test_other_data_are_refused_as_before(wards, tmp_path):
    fedslr.run(fedslr.FedAvg(), wards, "mlp", out=tmp_path, **OPTIONS)
    other = fedslr.Federation.from_arrays(make_arrays([5, 11, 8], (1, 3, 2)))
    with pytest.raises(fedslr.CheckpointError, match="the data are not the ones"):
        fedslr.open_run(tmp_path, other)


def test_a_folder_of_an_earlier_version_asks_for_the_data(wards, tmp_path):
    fedslr.run(fedslr.FedAvg(), wards, "mlp", out=tmp_path, **OPTIONS)
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps({"counts": json.loads(labels.read_text())["counts"]}))
    with pytest.raises(fedslr.FedslrError, match=r"no such dataset.*give your own data.* to fedslr\.open_run"):
        fedslr.open_run(tmp_path)
    assert fedslr.open_run(tmp_path, wards).federation is wards


def test_commands_need_no_data(wards, tmp_path, command):
    home = tmp_path / "run"
    result = fedslr.run(fedslr.FedSLR(), wards, "mlp", out=home, **OPTIONS)
    for words in (("show", home), ("report", home), ("figures", home, "--out", tmp_path / "figures")):
        assert command(*words)[0] == 0
    code, printed, _ = command("export", home, "--client", "south")
    assert code == 0
    accuracy = result.records[-1]["accuracy_personal_per_client"][1]
    assert f"accuracy {100 * accuracy:.1f} %" in printed
    assert "its 7 test samples" in (home / "export" / "client-1.safetensors.md").read_text()
    exported = fedslr.load_exported(str(home / "export" / "client-1.safetensors"))
    x = wards.inputs(wards.clients[1].x_test)
    assert torch.allclose(exported(x), result.personal_model("south")(x), atol=1e-5)
    assert command("export", home, "--global", "--format", "torch")[0] == 0


def test_data_that_moved_away_are_warned_of(tmp_path):
    (tmp_path / "hospitals").mkdir()
    for name, arrays in zip(NAMES, make_arrays([5, 11, 8], (6,)), strict=True):
        np.savez(tmp_path / "hospitals" / f"{name}.npz", **arrays)
    federation = fedslr.load(f"npz:{tmp_path / 'hospitals'}", clients=3)
    result = fedslr.run(fedslr.FedRep(), federation, "mlp", out=tmp_path / "run", **OPTIONS)
    shutil.rmtree(tmp_path / "hospitals")
    warned: list[str] = []
    opened = fedslr.open_run(tmp_path / "run", warn=warned.append)
    assert len(warned) == 1
    assert "opened without its data" in warned[0]
    assert opened.federation.client_names == federation.client_names
    own = opened.personal_params("south")
    assert all(torch.equal(x, own[key]) for key, x in result.personal_params("south").items())


def test_paths_are_texts_or_paths(wards, tmp_path):
    for kind in (str, Path):
        home = tmp_path / kind.__name__
        result = fedslr.run(fedslr.FedAvg(), wards, "mlp", out=kind(home), **OPTIONS)
        fedslr.write_report([kind(home)], kind(home / "again.html"))
        fedslr.write_report(kind(home), kind(home / "one.html"))
        assert (home / "again.html").read_text() == (home / "one.html").read_text()
        made = fedslr.export(result, kind(home / "model.safetensors"), client="north")
        fedslr.load_exported(kind(made.path))
        assert fedslr.open_run(kind(home)).out == home
        assert len(fedslr.load("digits", root=kind(home), clients=2).clients) == 2
