"""Datasets are decoded once; a cache that is not what it was is never used."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress

import fedslr
from fedslr.cli import display
from fedslr.data import DataOptions, cache, images, own, prepare
from fedslr.data.images import cifar10, read_images, tinyimagenet
from test_images import write_cifar10, write_tiny
from test_own_data import write_cifar10_pickles, write_images, write_leaf


@pytest.fixture
def decoded(monkeypatch):
    """How often something had to be decoded."""
    counts: list[Path] = []
    for module, name in ((images, "read_cifar"), (images, "read_cifar_pickle"), (images, "read_images")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real: counts.append(args[0]) or real(*args))
    monkeypatch.setattr(own, "read_images", images.read_images)
    real_leaf = own._leaf
    monkeypatch.setattr(own, "_leaf", lambda folder: counts.append(folder) or real_leaf(folder))
    return counts


def image_folder(root: Path) -> fedslr.Federation:
    return fedslr.load(f"imagefolder:{root / 'animals'}", clients=2, split="iid", test_samples=3)


def by_name(name: str):
    return lambda root: fedslr.load(name, root=str(root), clients=2, split="iid", test_samples=20)


SOURCES = {
    "cifar10": (write_cifar10, by_name("cifar10")),
    "cifar10-python": (write_cifar10_pickles, by_name("cifar10")),
    "tinyimagenet": (write_tiny, by_name("tinyimagenet")),
    "imagefolder": (lambda root: write_images(root / "animals"), image_folder),
    "femnist": (write_leaf, lambda root: fedslr.load("femnist", root=str(root), clients=2)),
}


def same(a: fedslr.Federation, b: fedslr.Federation) -> bool:
    parts = [
        (getattr(left, part), getattr(right, part))
        for left, right in zip(a.clients, b.clients, strict=True)
        for part in ("x", "y", "x_test", "y_test")
    ]
    return a.normalization == b.normalization and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in parts)


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_kept_is_what_was_decoded(source, tmp_path, decoded):
    write, load = SOURCES[source]
    (root := tmp_path / "here").mkdir()
    write(root)
    with cache.ignored():
        plain = load(root)
    assert not list(tmp_path.rglob(cache.FOLDER))
    assert same(load(root), plain)
    decoded.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of memory that must not be written to
        assert same(load(root), plain)
    assert decoded == []
    assert same(load(root.rename(tmp_path / "there")), plain)
    assert decoded == []


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_changed_is_decoded_again(source, tmp_path, decoded):
    write, load = SOURCES[source]
    write(tmp_path)
    load(tmp_path)
    decoded.clear()
    file = max(p for p in tmp_path.rglob("*") if p.is_file() and cache.FOLDER not in p.parts and p.suffix != ".txt")
    os.utime(file, ns=(1, 1))
    load(tmp_path)
    assert decoded
    decoded.clear()
    load(tmp_path)
    assert decoded == []


def test_new_pixels_replace_the_old(tmp_path):
    write_cifar10(tmp_path)
    before = cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    data = bytearray(path.read_bytes())
    data[1] ^= 255
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    after = cifar10(tmp_path)
    assert int((before.x != after.x).sum()) == 1
    kept = [p.name for p in (tmp_path / cache.FOLDER / "cifar10").glob("*.npy")]
    assert len(kept) == 4


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def header(text: bytes):
    """An array file that says something else about itself, with a manifest that agrees with it."""

    def change(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:10] + text.ljust(len(data[10:128]), b" ") + data[128:])
        rename(path)

    return change


def rename(path: Path) -> None:
    """Make the manifest believe what is in the file."""
    manifest = path.with_name(cache.MANIFEST)
    fields = json.loads(manifest.read_text())
    for entry in fields["arrays"].values():
        if entry["file"] == path.name:
            entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            entry["size"] = path.stat().st_size
    manifest.write_text(json.dumps(fields))


def manifest(change):
    def damage(path: Path) -> None:
        file = path.with_name(cache.MANIFEST)
        fields = json.loads(file.read_text())
        change(fields)
        file.write_text(json.dumps(fields))

    return damage


def pickled(path: Path) -> None:
    np.save(path, np.array([Path("x")], object), allow_pickle=True)
    rename(path)


DAMAGES = {
    "a flipped bit": flip,
    "cut off": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "empty": lambda p: p.write_bytes(b""),
    "gone": lambda p: p.unlink(),
    "a pickle": pickled,
    "a huge shape": header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 3, 32, 32), }"),
    "a negative shape": header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 3, 32, 32), }"),
    "objects": header(b"{'descr': '|O', 'fortran_order': False, 'shape': (200,), }"),
    "fewer samples": header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (199, 3, 32, 32), }"),
    "no header": header(b"__import__('os').abort()"),
    "not JSON": lambda p: p.with_name(cache.MANIFEST).write_text("[" * 100_000),
    "no manifest": lambda p: p.with_name(cache.MANIFEST).unlink(),
    "a list": lambda p: p.with_name(cache.MANIFEST).write_text("[]"),
    "another format": manifest(lambda f: f.update(format=1)),
    "a file elsewhere": manifest(lambda f: f["arrays"]["x"].update(file="../../secret.npy")),
    "no labels": manifest(lambda f: f["arrays"].pop("y")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(damage, tmp_path, decoded):
    write_cifar10(tmp_path)
    whole = cifar10(tmp_path).x.clone()
    (path,) = (tmp_path / cache.FOLDER / "cifar10").glob("x-*.npy")
    decoded.clear()
    DAMAGES[damage](path)
    assert torch.equal(cifar10(tmp_path).x, whole)
    assert decoded
    decoded.clear()
    assert torch.equal(cifar10(tmp_path).x, whole)
    assert decoded == []


@pytest.mark.parametrize("block", ["", "cifar10", f"cifar10/{cache.MANIFEST}"])
def test_without_room_for_a_cache_everything_works(block, tmp_path, decoded):
    write_cifar10(tmp_path)
    place = tmp_path / cache.FOLDER / block
    if block.endswith(".json"):
        place.mkdir(parents=True)
    else:
        place.parent.mkdir(exist_ok=True)
        place.write_text("a file where a folder should be")
    for _ in range(2):
        decoded.clear()
        assert len(cifar10(tmp_path).x) == 200
        assert decoded


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    write_cifar10(tmp_path)
    monkeypatch.setattr(np, "save", full)
    assert len(cifar10(tmp_path).x) == 200
    assert list((tmp_path / cache.FOLDER / "cifar10").iterdir()) == []


def test_two_processes_at_once(tmp_path, decoded):
    write_cifar10(tmp_path)
    code = "import sys, pathlib, fedslr.data.images as i; print(i.cifar10(pathlib.Path(sys.argv[1])).x.sum())"
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert said[0] == said[1]
    assert said[0][1] == ""
    assert str(cifar10(tmp_path).x.sum()) == said[0][0].strip()
    assert decoded == []
    assert len(list((tmp_path / cache.FOLDER / "cifar10").iterdir())) == 5


def test_what_is_written_to_the_tensors_stays_out_of_the_cache(tmp_path):
    write_cifar10(tmp_path)
    cifar10(tmp_path)
    data = cifar10(tmp_path)
    whole = data.x.clone()
    data.x.zero_()
    assert torch.equal(cifar10(tmp_path).x, whole)


def test_only_old_leftovers_are_removed(tmp_path):
    write_cifar10(tmp_path)
    home = tmp_path / cache.FOLDER / "cifar10"
    home.mkdir(parents=True)
    for name in (".x.1.tmp", ".x.2.tmp", "mine.txt"):
        (home / name).touch()
    os.utime(home / ".x.1.tmp", (1, 1))
    cifar10(tmp_path)
    assert {p.name for p in home.iterdir() if not p.name.endswith((".npy", ".json"))} == {".x.2.tmp", "mine.txt"}


def test_a_cache_is_no_class_of_images(tmp_path):
    write_images(tmp_path / "animals")
    image_folder(tmp_path)
    assert (tmp_path / cache.FOLDER).is_dir()
    with pytest.raises(fedslr.FedslrError, match="has 1 class folders"):
        own.image_folder(tmp_path)


def test_verify_reads_the_source_itself(tmp_path, command, monkeypatch):
    """Bits that rot leave a file's size and time as they were."""
    write_cifar10(tmp_path)
    monkeypatch.setattr(fedslr.data.published, "verify", lambda name, root: [])
    assert command("data", "verify", "cifar10", "--root", tmp_path)[0] == 0
    cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin"
    times = path.stat()
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(cifar10(tmp_path).x) == 200
    code, _, err = command("data", "verify", "cifar10", "--root", tmp_path)
    assert (code, "has label 255" in err) == (2, True)
    options = ("--root", tmp_path, "--clients", 2, "--plot", tmp_path / "split.png")
    assert command("data", "show", "cifar10", *options)[0] == 0


# --- decoding -------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path, monkeypatch):
    """Image files that are decoded as many are: by processes."""
    monkeypatch.setattr(images, "FEW", 1)
    write_images(tmp_path, count=30)
    return sorted(tmp_path.rglob("*.png"))


def test_processes_decode_the_same(many):
    told: list[tuple[int, int]] = []
    with images.reporting(lambda done, total: told.append((done, total))):
        found = read_images(many)
    assert np.array_equal(found, np.stack([images.decode.read_image(path) for path in many]))
    assert told[-1] == (90, 90)
    assert told == sorted(told)


def test_an_image_that_a_process_cannot_read_is_named(many):
    many[70].write_bytes(b"nothing")
    with pytest.raises(fedslr.FedslrError, match=rf"{many[70].name}: is no readable image \(of no known format\)"):
        read_images(many)
    Image.new("RGB", (5, 6)).save(many[0])
    many[70].unlink()
    with pytest.raises(fedslr.FedslrError, match=rf"{many[70].name}: is no readable image \(No such file"):
        read_images(many)
    with pytest.raises(fedslr.FedslrError, match=rf"{many[0].name}: is 5×6, expected 12×10"):
        read_images(many[:60])
    with pytest.raises(fedslr.FedslrError, match=rf"{many[0].name}: is 5×6, expected 12×10"):
        read_images(many[:60], (10, 12))


@pytest.mark.parametrize("program", ["/no/such/python", sys.executable])
def test_where_no_process_can_be_started_threads_decode(program, many, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise ImportError('no PIL here')\n")
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr(images.decode, "__file__", str(tmp_path / "broken.py"))
    assert read_images(many).shape == (90, 3, 10, 12)


def test_tinyimagenet_by_processes(tmp_path, monkeypatch):
    write_tiny(tmp_path)
    with cache.ignored():
        few = tinyimagenet(tmp_path)
        monkeypatch.setattr(images, "FEW", 1)
        assert torch.equal(tinyimagenet(tmp_path).x, few.x)


def test_the_decoding_of_many_images_is_shown_and_goes_away():
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=100)
    with Progress("{task.description} {task.completed}/{task.total}", console=console) as progress:
        show = display.Decoding(progress)
        show(3, display.MANY - 1)
        assert progress.tasks == []
        for done in (0, 700, display.MANY):
            show(done, display.MANY)
            progress.refresh()
        assert progress.tasks == []
    assert "decoding images 700/2000" in said.getvalue()


def test_what_several_processes_need_is_decoded_before(tmp_path, decoded):
    for source, name in (
        ("cifar10", "cifar10"),
        ("imagefolder", f"imagefolder:{tmp_path / 'animals'}"),
        ("femnist",) * 2,
    ):
        write, load = SOURCES[source]
        write(tmp_path)
        prepare(DataOptions(name, root=str(tmp_path)))
        assert decoded
        decoded.clear()
        load(tmp_path)
        assert decoded == []
