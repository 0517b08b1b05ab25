"""CIFAR and TinyImageNet from files in their layouts, and the augmentation of batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedslr
from fedslr.data.augment import flip_and_crop
from fedslr.data.images import cifar10, cifar100, tinyimagenet

RNG = np.random.default_rng(0)


def write_cifar10(root: Path, each: int = 40) -> np.ndarray:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    records = RNG.integers(0, 256, (6, each, 3073), dtype=np.uint8)
    records[:, :, 0] = np.arange(each) % 10
    for name, part in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], records, strict=True):
        part.tofile(folder / f"{name}.bin")
    return records


def test_cifar10(tmp_path):
    records = write_cifar10(tmp_path)
    data = cifar10(tmp_path)
    assert tuple(data.x.shape) == (200, 3, 32, 32)
    assert data.y.tolist() == list(np.tile(np.arange(40) % 10, 5))
    red, green, blue = (records[0, 7, 1 + 1024 * c : 1 + 1024 * (c + 1)].reshape(32, 32) / 255 for c in range(3))
    assert data.x.dtype == data.x_test.dtype == torch.uint8
    x = data.normalization(data.x, torch.float32)
    assert np.allclose(x[7, 0], (red - 0.491) / 0.247, atol=1e-5)
    assert np.allclose(x[7, 1], (green - 0.482) / 0.243, atol=1e-5)
    assert np.allclose(x[7, 2], (blue - 0.447) / 0.262, atol=1e-5)
    federation = fedslr.load("cifar10", root=str(tmp_path), clients=4, seed=0)
    assert (federation.crop_padding, federation.num_classes) == (4, 10)
    assert fedslr.load("cifar10", root=str(tmp_path), clients=4, augment=False).crop_padding == 0


def test_cifar100_takes_the_fine_label(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    records = RNG.integers(0, 256, (50, 3074), dtype=np.uint8)
    records[:, 0], records[:, 1] = 3, np.arange(50) * 2
    records.tofile(folder / "train.bin")
    records.tofile(folder / "test.bin")
    assert cifar100(tmp_path).y.tolist() == list(range(0, 100, 2))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "data_batch_3.bin").write_bytes(b"x" * 3000), "has 3000 bytes, expected a multiple of 3073"),
        (lambda f: (f / "data_batch_3.bin").write_bytes(b""), "has 0 bytes"),
        (lambda f: (f / "test_batch.bin").write_bytes(b"\xff" * 3073), "has label 255, expected 0 to 9"),
        (lambda f: (f / "data_batch_1.bin").unlink(), "cannot read"),
    ],
)
def test_damaged_cifar_is_refused(damage, says, tmp_path):
    write_cifar10(tmp_path)
    damage(tmp_path / "cifar-10-batches-bin")
    with pytest.raises(fedslr.FedslrError, match=says):
        cifar10(tmp_path)
    with pytest.raises(fedslr.FedslrError, match=r"is there; get it with `fedslr data fetch cifar100`, or unpack"):
        cifar100(tmp_path)


def write_tiny(root: Path) -> Path:
    folder = root / "tiny-imagenet-200"
    lines = []
    for c, name in enumerate(("n01", "n02")):
        (folder / "train" / name / "images").mkdir(parents=True)
        for i in range(3):
            mode = "L" if i == 0 else "RGB"
            Image.new(mode, (64, 64), 100 * c if mode == "L" else (100 * c,) * 3).save(
                folder / "train" / name / "images" / f"{name}_{i}.JPEG"
            )
    (folder / "val" / "images").mkdir(parents=True)
    for i, name in enumerate(("n02", "n01", "n02")):
        Image.new("RGB", (64, 64)).save(folder / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{name}\t0\t0\t62\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_tinyimagenet_with_grey_images(tmp_path):
    write_tiny(tmp_path)
    data = tinyimagenet(tmp_path)
    assert tuple(data.x.shape) == (6, 3, 64, 64)
    assert (data.y.tolist(), data.y_test.tolist()) == ([0, 0, 0, 1, 1, 1], [1, 0, 1])
    x = data.normalization(data.x, torch.float32)
    assert torch.allclose(x[3], torch.full((3, 64, 64), (100 / 255 - 0.5) / 0.5), atol=0.02)
    assert data.crop_padding == 8


def test_a_corrupt_image_is_named(tmp_path):
    folder = write_tiny(tmp_path)
    broken = folder / "train" / "n01" / "images" / "n01_1.JPEG"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(fedslr.FedslrError, match=r"n01_1\.JPEG: is no readable image"):
        tinyimagenet(tmp_path)
    Image.new("RGB", (32, 64)).save(broken)
    with pytest.raises(fedslr.FedslrError, match=r"n01_1\.JPEG: is 32×64, expected 64×64"):
        tinyimagenet(tmp_path)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n")
    with pytest.raises(fedslr.FedslrError, match="names no class"):
        tinyimagenet(tmp_path)


def test_augmentation_is_a_flip_or_a_crop_or_neither():
    """Every augmented image is one of the crops of the padded image or of its mirror, at the expected rates."""
    x = torch.from_numpy(RNG.normal(size=(400, 2, 6, 6)))
    out = flip_and_crop(x, 2, np.random.default_rng(1))
    assert out.shape == x.shape
    flips = crops = 0
    for image, found in zip(x, out, strict=True):
        padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
        matches = [
            (flip, dy, dx)
            for dy in range(5)
            for dx in range(5)
            for flip, view in (
                (0, padded[:, dy : dy + 6, dx : dx + 6]),
                (1, padded[:, dy : dy + 6, dx : dx + 6].flip(2)),
            )
            if torch.equal(view, found)
        ]
        assert len(matches) == 1
        flips += matches[0][0]
        crops += matches[0][1:] != (2, 2)
    assert flips / 400 == pytest.approx(0.5, abs=0.08)
    assert crops / 400 == pytest.approx(0.5 * 24 / 25, abs=0.08)


def test_augmentation_repeats_by_seed():
    x = torch.randn(9, 3, 8, 8)
    first, again, other = (flip_and_crop(x, 4, np.random.default_rng(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_resnet_trains_on_augmented_images(tmp_path):
    write_cifar10(tmp_path, each=10)
    federation = fedslr.load("cifar10", root=str(tmp_path), clients=2, samples_per_client=4, seed=0)
    result = fedslr.run(fedslr.FedSLR(), federation, "resnet18", rounds=1, clients_per_round=1, epochs=1, batch_size=4)
    assert result.summary["parameters"]["dense"] == 11_173_952
    assert result.records[0]["numbers_up"] == 11_173_952
