"""People's own data in every form that is taken, and hostile files in every form."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedslr
from conftest import make_arrays
from fedslr.data import own
from fedslr.data.images import cifar10
from test_images import write_cifar10

RNG = np.random.default_rng(0)


def test_npz_with_a_file_per_client(tmp_path):
    for i, arrays in enumerate(make_arrays([4, 9, 6], (5,))):
        np.savez(tmp_path / f"hospital-{i}.npz", **arrays)
    federation = fedslr.load(f"npz:{tmp_path}")
    assert [len(c.y) for c in federation.clients] == [4, 9, 6]
    assert len(fedslr.load(f"npz:{tmp_path}", clients=2).clients) == 2
    result = fedslr.run(fedslr.FedSLR(), federation, "mlp", rounds=2)
    assert result.summary["clients"] == 3


def test_files_count_as_people_do_and_are_told_by_name(tmp_path):
    for i, arrays in enumerate(make_arrays(range(4, 16), (5,))):
        np.savez(tmp_path / f"ward{i}.npz", **arrays)
    assert [len(c.y) for c in fedslr.load(f"npz:{tmp_path}").clients] == list(range(4, 16))
    np.savez(tmp_path / "ward2.npz", **make_arrays([4], (7,))[0])
    with pytest.raises(fedslr.FedslrError, match=r"ward2.npz: x holds inputs of shape \[7\], ward0.npz of \[5\]"):
        fedslr.load(f"npz:{tmp_path}")
    with pytest.raises(fedslr.FedslrError, match=r"wards/one.npz: does not exist in .*, where this was started"):
        fedslr.load("npz:wards/one.npz")


def test_what_people_have_in_a_notebook_says_what_it_is():
    federation = fedslr.load("digits", clients=3, samples_per_client=20)
    assert repr(federation) == "<digits: 3 clients, 10 classes, inputs (1, 8, 8)>"
    assert repr(federation.clients[0]).startswith("<20 training and ")
    result = fedslr.run(fedslr.FedAvg(), federation, "mlp", rounds=1)
    assert re.fullmatch(r"<fedavg on digits, 1 rounds: personal models [\d.]+ %, global model [\d.]+ %>", repr(result))


@pytest.mark.parametrize("select", [lambda rng: [0], lambda rng, size, examples: None, lambda *given: [[0]]])
def test_a_selection_that_selects_nobody_is_told(select):
    with pytest.raises(fedslr.FedslrError, match="selection: "):
        fedslr.run(fedslr.FedAvg(), fedslr.load("digits", clients=3), "mlp", rounds=1, selection=select)


def test_what_does_nothing_to_data_that_come_by_client_is_told(tmp_path, command):
    for i, arrays in enumerate(make_arrays([4, 9, 6], (5,))):
        np.savez(tmp_path / f"{i}.npz", **arrays)
    name, told = f"npz:{tmp_path}", []
    assert len(fedslr.load(name, warn=told.append).clients) == 3
    assert len(fedslr.load(name, clients=2, split="dirichlet", alpha=0.1, warn=told.append).clients) == 2
    assert told == []
    aside = f"data: '{name}' comes by client and is taken as it is; split, alpha left aside"
    few = f"data.clients: got 50, but '{name}' has only 3"
    with pytest.warns(UserWarning, match="left aside|only 3") as caught:
        fedslr.load(name, split="iid", alpha=0.3, clients=50)
    assert [(str(w.message), w.filename) for w in caught] == [(aside, __file__), (few, __file__)]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'rounds = 1\nmodel.name = "mlp"\n[data]\nname = "{name}"\nsplit = "iid"\nalpha = 0.3\n')
    code, _, err = command("run", recipe, "--out", tmp_path / "out")
    assert (code, err.splitlines()[0]) == (0, f"warning: {aside}")
    code, _, err = command("data", "show", name, "--clients", "50", "--plot", tmp_path / "split.png")
    assert (code, err.splitlines()) == (0, [f"warning: {few}"])


def test_npz_with_a_client_column(tmp_path):
    parts = make_arrays([4, 9], (5,))
    path = tmp_path / "all.npz"
    joined = {p: np.concatenate([a[p] for a in parts]) for p in parts[0]}
    np.savez_compressed(path, **joined, client=np.repeat([7, 3], [4, 9]), client_test=np.repeat([7, 3], [7, 7]))
    federation = fedslr.load(f"npz:{path}")
    assert [len(c.y) for c in federation.clients] == [9, 4]
    assert np.allclose(federation.clients[1].x, parts[0]["x"])
    assert federation.name == "all"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x": np.zeros((5, 2))}, r"'client' has shape \[6\], 'x' \[5, 2\]; expected one entry for every sample"),
        ({"x_test": np.zeros((9, 2))}, r"'client_test' has shape \[4\], 'x_test' \[9, 2\]"),
        ({"y": np.zeros(7, int)}, r"'client' has shape \[6\], 'y' \[7\]"),
        ({"x": np.array(3.0)}, r"'x' \[\]"),
        ({"client": np.zeros((6, 1), int)}, r"'client' has shape \[6, 1\]"),
        ({"client_test": np.array([0, 1, 9, 9])}, "'client_test' has 9, who has no training data in 'client'"),
        ({"client_test": np.array(["0", "0", "1", "1"])}, "'client_test' has '0', who has no training data"),
    ],
)
def test_a_client_column_that_does_not_fit(changes, says, tmp_path):
    path = tmp_path / "all.npz"
    arrays = {"x": np.zeros((6, 2)), "y": np.arange(6) % 2, "x_test": np.zeros((4, 2)), "y_test": np.arange(4) % 2}
    who = {"client": np.array([0, 0, 0, 1, 1, 1]), "client_test": np.array([0, 0, 1, 1])}
    np.savez(path, **{**arrays, **who, **changes})
    with pytest.raises(fedslr.FedslrError, match=says):
        fedslr.load(f"npz:{path}")


def test_a_client_of_a_file_goes_by_its_own_name(tmp_path):
    x = np.zeros((4, 2))
    x[3, 1] = np.nan
    who = np.array(["north", "north", "south", "south"])
    np.savez(tmp_path / "all.npz", x=x, y=[0, 1, 0, 1], x_test=x[:2], y_test=[0, 1], client=who, client_test=who[1:3])
    with pytest.raises(fedslr.FedslrError, match=r"all\.npz: client 'south': x has numbers that are not finite"):
        fedslr.load(f"npz:{tmp_path / 'all.npz'}")


class Evil:
    """Would write a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def bomb(path: Path) -> None:
    """A zip that says it unpacks to eight gigabytes of zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\0" * 10_000_000)
    data = bytearray(path.read_bytes())
    size = (10_000_000).to_bytes(4, "little")
    for _ in range(2):
        at = data.rindex(size)
        data[at : at + 4] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.write_bytes(b"PK not really"), "cannot be read as npz"),
        (lambda p: p.write_bytes(b""), "cannot be read as npz"),
        (lambda p: np.savez(p, x=np.zeros((2, 3))), "lacks the array 'y'"),
        (lambda p: np.savez(p, x=np.array([Evil(p.parent / "pwned")], object)), "it holds Python objects"),
        (bomb, "refused as a bomb"),
    ],
)
def test_hostile_npz_files(make, says, tmp_path):
    path = tmp_path / "data.npz"
    make(path)
    with pytest.raises(fedslr.FedslrError, match=says) as refused:
        fedslr.load(f"npz:{path}")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "pwned").exists()


def write_images(root: Path, count: int = 5, size: tuple[int, int] = (12, 10)) -> None:
    for c, name in enumerate(("cat", "dog", "owl")):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = RNG.integers(0, 80, (size[1], size[0], 3)).astype(np.uint8) + 80 * c
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i}.png")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a", "b"], "got 2, but there are 3 classes"),
        ([], "got 0, but there are 3 classes"),
        ("abc", "expected a list of texts"),
        ([1, 2, 3], "expected a list"),
        (3, "expected a list"),
        ({"a", "b", "c"}, "expected a list"),
    ],
)
@pytest.mark.parametrize("classes", [3, None])
def test_names_of_classes_that_are_none(names, told, classes):
    client = {"x": np.zeros((3, 2)), "y": [0, 1, 2], "x_test": np.zeros((3, 2)), "y_test": [0, 1, 2]}
    with pytest.raises(fedslr.FedslrError, match=f"class_names: {told}"):
        fedslr.Federation.from_arrays([client], classes, class_names=names)


def test_names_of_classes_count_them():
    client = {"x": np.zeros((2, 2)), "y": [1, 2], "x_test": np.zeros((1, 2)), "y_test": [1]}
    federation = fedslr.Federation.from_arrays([client], class_names=["a", "b", "c", "d"])
    assert (federation.num_classes, federation.class_names[2]) == (4, "c")


def test_image_folders(tmp_path):
    write_images(tmp_path / "flat")
    federation = fedslr.load(f"imagefolder:{tmp_path / 'flat'}", clients=2, split="iid", test_samples=3)
    assert (federation.input_shape, federation.num_classes) == ((3, 10, 12), 3)
    assert list(federation.class_names) == sorted(p.name for p in (tmp_path / "flat").iterdir())
    assert sum(len(c.y) for c in federation.clients) == 12
    write_images(tmp_path / "two" / "train")
    write_images(tmp_path / "two" / "test", 2)
    divided = own.image_folder(tmp_path / "two")
    assert (len(divided.x), len(divided.x_test)) == (15, 6)


def test_what_tools_leave_among_images_is_no_class_and_no_image(tmp_path):
    write_images(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "cat-checkpoint.png").write_bytes((tmp_path / "cat" / "0.png").read_bytes())
    (tmp_path / "dog" / "._0.png").write_bytes(b"macOS")
    made = own.image_folder(tmp_path)
    assert (made.num_classes, len(made.x) + len(made.x_test)) == (3, 15)


def test_tiny_image_folders(tmp_path):
    """As few as two images of a class are enough: one to learn from, one to test on."""
    write_images(tmp_path / "two", 2)
    made = own.image_folder(tmp_path / "two")
    assert sorted(made.y.tolist()) == sorted(made.y_test.tolist()) == [0, 1, 2]
    write_images(tmp_path / "one", 1)
    with pytest.raises(fedslr.FedslrError, match="every class needs at least two images, one of them to test on"):
        own.image_folder(tmp_path / "one")
    for part in ("train", "test"):
        write_images(tmp_path / "divided" / part, 1)
    assert len(fedslr.load(f"imagefolder:{tmp_path / 'divided'}", clients=3).clients) == 3
    with pytest.raises(fedslr.FedslrError, match="there are only 3 training samples to share"):
        fedslr.load(f"imagefolder:{tmp_path / 'divided'}", clients=4)
    stray = tmp_path / "divided" / "test" / "zebra"
    stray.mkdir()
    assert len(fedslr.load(f"imagefolder:{tmp_path / 'divided'}", clients=3).clients) == 3
    Image.new("RGB", (4, 4)).save(stray / "a.png")
    with pytest.raises(fedslr.FedslrError, match=r"test/zebra: is a class that .*train has not"):
        fedslr.load(f"imagefolder:{tmp_path / 'divided'}", clients=3)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda r: (r / "cat" / "1.png").write_bytes(b"nothing"), r"cat/1\.png: is no readable image"),
        (lambda r: Image.new("RGB", (5, 5)).save(r / "dog" / "2.png"), r"dog/2\.png: is 5×5, expected 12×10"),
        (lambda r: [p.unlink() for p in (r / "owl").iterdir()], "owl: has no images"),
        (
            lambda r: Image.new("I;16", (12, 10)).save(r / "dog" / "2.png"),
            r"dog/2\.png: has more than 8 bits per pixel",
        ),
        (lambda r: Image.new("F", (12, 10)).save(r / "dog" / "2.tif"), r"dog/2\.tif: has more than 8 bits"),
    ],
)
def test_damaged_image_folders(damage, says, tmp_path):
    write_images(tmp_path)
    damage(tmp_path)
    with pytest.raises(fedslr.FedslrError, match=says):
        own.image_folder(tmp_path)
    with pytest.raises(fedslr.FedslrError, match="nowhere is no folder; expected one with a folder of images for"):
        own.image_folder(tmp_path / "nowhere")


def test_gaps_in_labels_are_told_by_file(tmp_path):
    for name, labels in (("north", [0, 1, 2, 0]), ("south", [0, 1, 2, 5])):
        x, y = RNG.random((4, 6), np.float32), np.array(labels)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, x_test=x, y_test=y)
    with pytest.warns(fedslr.core.errors.FedslrWarning) as told:
        own.npz(tmp_path)
    says = r".*: y: labels go up to 5 \(south\.npz\), .* 3, 4 of them never occur; give labels from 0 on without gaps"
    assert [bool(re.fullmatch(says, str(one.message))) for one in told] == [True]


def test_what_is_no_image_is_told(tmp_path):
    write_images(tmp_path)
    (tmp_path / "dog" / ".DS_Store").touch()
    own.image_folder(tmp_path)
    (tmp_path / "dog" / "scan.dcm").touch()
    with pytest.warns(fedslr.core.errors.FedslrWarning, match=r"dog/scan\.dcm is no image \(.*\) and left out$"):
        own.image_folder(tmp_path)
    (tmp_path / "cat" / "patient").mkdir()
    with pytest.warns(
        fedslr.core.errors.FedslrWarning, match=r"cat/patient and 1 other are no images \(.*\) and left out$"
    ):
        own.image_folder(tmp_path)


def write_leaf(root: Path, change=lambda users: None) -> None:
    for part, count in (("train", 6), ("test", 2)):
        folder = root / "femnist" / part
        folder.mkdir(parents=True)
        users = {
            name: {"x": RNG.random((count + i, 784)).tolist(), "y": RNG.integers(0, 62, count + i).tolist()}
            for i, name in enumerate(("anna", "ben", "cleo"))
        }
        change(users)
        text = {"users": list(users), "num_samples": [len(u.get("y", [])) for u in users.values()], "user_data": users}
        (folder / "all_data_0.json").write_text(json.dumps(text))


def test_femnist_is_split_by_writer(tmp_path):
    write_leaf(tmp_path)
    federation = fedslr.load("femnist", root=str(tmp_path))
    assert [len(c.y) for c in federation.clients] == [6, 7, 8]
    assert (federation.input_shape, federation.num_classes) == ((1, 28, 28), 62)


def test_femnist_of_pixels_stays_8_bit(tmp_path):
    """LEAF writes pixels as 255th parts."""

    def grey(users):
        for user in users.values():
            user["x"] = (np.rint(np.array(user["x"]) * 255) / 255).tolist()

    write_leaf(tmp_path, grey)
    told = json.loads((tmp_path / "femnist" / "train" / "all_data_0.json").read_text())["user_data"]["ben"]["x"]
    federation = fedslr.load("femnist", root=str(tmp_path))
    ben = federation.clients[1]
    assert str(ben.x.dtype) == "torch.uint8"
    assert np.array_equal(federation.inputs(ben.x).flatten(1), np.array(told, np.float32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda users: users["ben"].pop("y"), "is not LEAF's JSON: it lacks 'y'"),
        (lambda users: users["ben"].update(x=[[1, 2]]), "is not LEAF's JSON"),
        (lambda users: users["ben"].update(y=[1]), "images for 1 labels"),
        (lambda users: users["ben"].update(x="a"), "is not LEAF's JSON"),
        (lambda users: users["ben"].update(y=[99] * 7), "expected 0 to 61|images for"),
    ],
)
def test_damaged_leaf(change, says, tmp_path):
    write_leaf(tmp_path, change)
    with pytest.raises(fedslr.FedslrError, match=says):
        fedslr.load("femnist", root=str(tmp_path))


def test_leaf_that_is_not_json(tmp_path):
    write_leaf(tmp_path)
    for text in ("[1, 2", "[]", '{"user_data": 3}', "[" * 100_000):
        (tmp_path / "femnist" / "train" / "all_data_0.json").write_text(text)
        with pytest.raises(fedslr.FedslrError, match="is not LEAF's JSON"):
            fedslr.load("femnist", root=str(tmp_path))
    with pytest.raises(fedslr.FedslrError, match=r"has no \.json files"):
        fedslr.load("femnist", root=str(tmp_path / "nowhere"))


def write_cifar10_pickles(root: Path, each: int = 20) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {b"data": RNG.integers(0, 256, (each, 3072), dtype=np.uint8), b"labels": [i % 10 for i in range(each)]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def test_cifars_python_version(tmp_path):
    write_cifar10_pickles(tmp_path)
    data = cifar10(tmp_path)
    assert tuple(data.x.shape) == (100, 3, 32, 32)
    assert data.y.tolist() == [i % 10 for i in range(20)] * 5
    write_cifar10(tmp_path, each=30)
    assert len(cifar10(tmp_path).x) == 150


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (lambda p: Evil(p), r"wants to call pathlib\.?\w*\.Path\.touch|wants to call"),
        (lambda p: {b"data": np.array([Evil(p)], object)}, "wants to call"),
        (lambda p: {b"data": np.zeros((3, 3072), np.uint8), b"labels": [1]}, "do not have the published shapes"),
        (lambda p: {b"data": np.zeros((1, 3072), np.uint8), b"labels": [12]}, "has label 12, expected 0 to 9"),
        (lambda p: [1, 2], "is no batch of CIFAR"),
    ],
)
def test_hostile_pickles_call_nothing(batch, says, tmp_path):
    write_cifar10_pickles(tmp_path)
    mark = tmp_path / "pwned"
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps(batch(mark)))
    with pytest.raises(fedslr.FedslrError, match=says) as refused:
        cifar10(tmp_path)
    assert "data_batch_2" in str(refused.value)
    assert not mark.exists()


def test_ones_own_function(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(
        "import numpy as np\n"
        "def clients():\n"
        "    rng = np.random.default_rng(0)\n"
        "    part = lambda n: (rng.normal(size=(n, 4)), rng.integers(0, 2, n))\n"
        "    out = []\n"
        "    for n in (5, 9):\n"
        "        (x, y), (xt, yt) = part(n), part(6)\n"
        "        out.append({'x': x, 'y': y, 'x_test': xt, 'y_test': yt})\n"
        "    return out\n"
    )
    monkeypatch.chdir(tmp_path)
    federation = fedslr.load("my_data:clients")
    assert [len(c.y) for c in federation.clients] == [5, 9]
    with pytest.raises(fedslr.FedslrError, match="did you mean 'clients'"):
        fedslr.load("my_data:client")


def test_what_goes_wrong_in_ones_own_function_is_a_line_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "my_faults.py").write_text(
        "import json\n"
        "def clients():\n    return json.loads('two\\nlines')\n"
        "def asks(root):\n    return []\n"
        "def leaves():\n    raise SystemExit('no data')\n"
        "def later():\n    yield {}\n    raise OSError('gone')\n"
    )
    (tmp_path / "my_exit.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    for name, place, says in (
        ("my_faults:clients", "my_faults.py, line 3", "JSONDecodeError: Expecting value"),
        ("my_faults:asks", "my_faults.py, line 4", "TypeError: asks() missing 1 required positional argument"),
        ("my_faults:leaves", "my_faults.py, line 7", "SystemExit: no data"),
        ("my_faults:later", "my_faults.py, line 10", "OSError: gone"),
        ("my_exit:clients", "my_exit.py, line 2", "SystemExit: 3"),
    ):
        with pytest.raises(fedslr.FedslrError) as refused:
            fedslr.load(name)
        told = str(refused.value)
        assert told.startswith("data.name: ")
        assert f"'{name}'" in told
        assert f" in {tmp_path / place}: {says}" in told
        assert "\n" not in told


def test_labels_from_one_are_told(tmp_path, command):
    arrays = make_arrays([20] * 3, (6,))
    for i, client in enumerate(arrays):
        np.savez(tmp_path / f"{i}.npz", **{**client, "y": client["y"] + 1, "y_test": client["y_test"] + 1})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("rounds = 1\nclients_per_round = 2\nmodel = { name = 'mlp' }\n")
    code, _, err = command("run", recipe, "--set", f"data.name=npz:{tmp_path}", "--out", tmp_path / "out")
    assert code == 0
    told = [line for line in err.splitlines() if "warning" in line.lower()]
    says = f"warning: {tmp_path}: y: labels go from 1 to 3, so that there are 4 classes"
    assert [line.startswith(says) for line in told] == [True]
    with pytest.warns(fedslr.core.errors.FedslrWarning, match="0 is one that never occurs"):
        fedslr.load(f"npz:{tmp_path}")
