"""The wire loses nothing, takes the smallest encoding, and rejects everything else cleanly."""

from __future__ import annotations

import json
import random
import struct
from math import prod

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedslr.channel import encoding, layout, measuring, packing
from fedslr.core import factored
from fedslr.core.errors import WireError
from fedslr.core.matrix import LowRank, matrix_shape

ELEMENT_TYPES = list(layout.ELEMENT_TYPES.values())


@st.composite
def tensors(draw, clients=()):
    """Any shape, element type, density and order of axes in memory; zeros of either sign."""
    shape = (*clients, *draw(st.lists(st.integers(0, 12), max_size=4)))
    density = draw(st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]))
    zero = draw(st.sampled_from([0.0, -0.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = np.where(rng.random(shape) < density, rng.normal(size=shape) * 10, zero)
    x = torch.from_numpy(np.asarray(values)).to(draw(st.sampled_from(ELEMENT_TYPES)))
    axes = draw(st.permutations(range(x.ndim)))
    return x.permute(axes).contiguous().permute([axes.index(a) for a in range(x.ndim)])


@st.composite
def factors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)))
    m, n = matrix_shape(shape)
    rank = draw(st.integers(0, min(m, n)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return LowRank(
        torch.randn(m, rank, generator=generator, dtype=dtype),
        torch.randn(n, rank, generator=generator, dtype=dtype),
        shape,
    )


plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False)
)
leaves = tensors() | factors() | plain
branches = st.recursive(leaves, lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)
trees = st.dictionaries(st.text(max_size=8), branches, max_size=5)


def assert_same(a, b):
    assert type(a) is type(b) or {type(a), type(b)} == {torch.Tensor, LowRank}
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor | LowRank):
        a, b = (x.dense() if isinstance(x, LowRank) else x for x in (a, b))
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)
        assert torch.equal(torch.signbit(a.float()), torch.signbit(b.float()))
    else:
        assert a == b


@settings(max_examples=300, deadline=None)
@given(trees)
def test_decode_of_encode_is_the_tree(tree):
    assert_same(tree, encoding.decode(encoding.encode(tree).data))


@settings(max_examples=150, deadline=None)
@given(trees)
def test_a_body_is_what_safetensors_makes_of_its_arrays(tree):
    packed = packing.pack(tree)
    assert b"".join(packed.pieces()) == safetensors.numpy.save(packed.arrays)


def test_the_pieces_of_a_body_are_no_copies():
    x = torch.randn(50, 3)
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), x.numpy()) for piece in packing.pack({"x": x}).pieces())


@settings(max_examples=150, deadline=None)
@given(st.lists(tensors() | factors(), min_size=1, max_size=5))
def test_never_larger_than_dense(leaves):
    tree = {str(i): leaf for i, leaf in enumerate(leaves)}
    dense = {k: np.ascontiguousarray(packing.to_array(x)) for k, x in factored.multiply_out(tree).items()}
    dense["header"] = packing.pack(tree).arrays["header"]
    # The header's words for an encoding differ by a few letters; factors are two entries of the index.
    more = sum(8 + layout.MAX_INDEX_ENTRY * isinstance(leaf, LowRank) for leaf in leaves)
    assert len(encoding.encode(tree).data) <= len(encoding.seal(safetensors.numpy.save(dense))) + more


def body_of(tree):
    return encoding.load_arrays(encoding.encode(tree).data[layout.FRAME_HEADER.size :])


def kinds(tree):
    return [entry[1] for entry in json.loads(body_of(tree)["header"].tobytes())]


def test_the_smallest_encoding_is_chosen():
    sparse = torch.zeros(10_000)
    sparse[::1000] = 1.0
    half = torch.arange(10_000.0) * (torch.arange(10_000) % 2)
    low = LowRank(torch.randn(100, 3), torch.randn(100, 3), (100, 100))
    full = LowRank(torch.randn(100, 60), torch.randn(100, 60), (100, 100))
    assert kinds({"a": sparse, "b": half, "c": torch.randn(500), "d": low, "e": full}) == [
        "indices",
        "bitmap",
        "dense",
        "factors",
        "dense",
    ]
    assert encoding.encode({"d": low}).numbers == 600
    assert encoding.encode({"e": full}).numbers == 10_000
    assert encoding.encode({"a": sparse, "d": low, "e": full}).numbers == 10 + 600 + 10_000
    assert len(encoding.encode({"a": sparse}).data) < 400


def test_bytes_are_close_to_the_numbers():
    dense = encoding.encode({"w": torch.randn(1000, 100)})
    assert 0 < len(dense.data) - 400_000 < 300


def test_negative_zero_survives():
    x = torch.zeros(1000)
    x[3] = -0.0
    assert torch.signbit(encoding.decode(encoding.encode({"x": x}).data)["x"])[3]


def test_encoding_is_a_function_of_the_tree():
    tree = {"a": torch.randn(50, 20), "b": {"c": torch.zeros(900)}}
    assert encoding.encode(tree).data == encoding.encode(tree).data


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [3, 5000])
def test_what_is_not_finite_is_neither_sent_nor_accepted(bad, size):
    x = torch.zeros(size)
    x[1] = bad
    with pytest.raises(WireError, match="'a/b' has numbers that are not finite"):
        encoding.encode({"a": {"b": x}})
    arrays = body_of({"a": {"b": torch.ones(size)}})
    arrays["0"] = x.numpy()
    with pytest.raises(WireError, match="not finite"):
        encoding.decode(encoding.seal(safetensors.numpy.save(arrays)))


def test_large_finite_numbers_pass_although_their_sum_overflows():
    x = torch.full((1000,), 3e38)
    assert torch.equal(encoding.decode(encoding.encode({"x": x}).data)["x"], x)


UNSENDABLE = [
    (object(), "'x' is a object, which cannot be sent; expected real tensors"),
    (torch.zeros(2, dtype=torch.complex64), r"'x' is a tensor of torch\.complex64, which cannot be sent"),
    (float("nan"), "'x' is a float, which cannot be sent; .* finite numbers"),
]


@pytest.mark.parametrize(("leaf", "says"), UNSENDABLE)
def test_only_tensors_and_finite_values_are_sent(leaf, says):
    with pytest.raises(WireError, match=says):
        encoding.encode({"x": leaf})


def test_finite_factors_with_an_infinite_product_are_refused():
    huge = LowRank(torch.full((30, 1), 1e30), torch.full((20, 1), 1e30), (30, 20))
    with pytest.raises(WireError, match="not finite"):
        factored.multiply_out(encoding.decode(encoding.encode({"w": huge}).data))


def test_errors_are_one_line_whatever_the_names():
    nasty = "a\nb\ud800" + "x" * 500
    with pytest.raises(WireError) as refused:
        factored.require_finite({nasty: torch.tensor([float("nan")])})
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 200
    text.encode()


SAMPLE = {
    "dense": torch.randn(40, 3),
    "nested": {"sparse": torch.eye(40), "bits": torch.arange(64.0) * (torch.arange(64) % 2), "none": {}},
    "low": LowRank(torch.randn(30, 2), torch.randn(20, 2), (30, 20)),
    "n": 7,
}


@pytest.mark.parametrize(
    ("mutate", "says"),
    [
        (lambda d: b"", "this is no message of version"),
        (lambda d: d[:10], "truncated"),
        (lambda d: d[:-1], "truncated"),
        (lambda d: d + b"x", "truncated or damaged: its length"),
        (lambda d: b"PK" + d[2:], "this is no message of version"),
        (lambda d: d[:4] + struct.pack("<H", 9) + d[6:], "this is no message of version 1"),
        (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "checksum"),
        (lambda d: encoding.seal(b"not safetensors at all"), "malformed"),
        (lambda d: encoding.seal(b""), "malformed"),
    ],
)
def test_a_broken_frame_is_refused(mutate, says):
    with pytest.raises(WireError, match=says):
        encoding.decode(mutate(encoding.encode(SAMPLE).data))


def resealed(change):
    """The sample message with its arrays or header changed, and a correct checksum."""
    arrays = dict(body_of(SAMPLE))
    header = json.loads(arrays["header"].tobytes())
    change(arrays, header)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return encoding.seal(safetensors.numpy.save(arrays))


def set_header(line, place, value):
    def change(arrays, header):
        header[line][place] = value

    return change


def set_array(name, value):
    return lambda arrays, header: arrays.__setitem__(name, value)


def set_padding_bit(arrays, header):
    """A bitmap for 61 positions has three bits too many; one of them is set."""
    header[2][3] = [61]
    bits = np.unpackbits(arrays["2.bitmap"])
    bits[61:] = [0, 0, 1]
    arrays["2.bitmap"] = np.packbits(bits)
    arrays["2.values"] = arrays["2.values"][:30]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_header(0, 1, "zip"), "header is missing or malformed"),
        (set_header(0, 1, ["dense"]), "header is missing or malformed"),
        (set_header(0, 2, "object"), "header is missing or malformed"),
        (set_header(0, 2, {}), "header is missing or malformed"),
        (set_header(0, 2, "float64"), r"'dense' carries float32 \[40, 3\], expected float64 \[40, 3\]"),
        (set_header(0, 3, [40, 4]), r"carries float32 \[40, 3\], expected float32 \[40, 4\]"),
        (set_header(0, 3, [-1, 4]), "header is missing or malformed"),
        (set_header(0, 3, "big"), "header is missing or malformed"),
        (set_header(0, 3, [1] * 17), "header is missing or malformed"),
        (set_header(0, 3, [2**39, 2**39]), "larger than"),
        (set_header(0, 3, [0, 2**39, 2**39, 2**39]), "larger than"),
        (set_header(0, 0, ["x"] * 5000), "header is missing or malformed"),
        (set_header(5, 3, float("nan")), "header is missing or malformed"),
        (set_header(4, 2, "bool"), "header is missing or malformed"),
        (set_header(0, 0, []), "malformed"),
        (set_header(0, 0, ["nested"]), "lies inside|comes twice"),
        (set_header(0, 0, ["low"]), "comes twice"),
        (set_header(1, 3, [39, 40]), "outside its shape"),
        (set_header(2, 3, [63]), "'nested/bits' has positions"),
        (set_header(4, 3, [31, 20]), r"'low' carries float32 \[30, 2\], expected float32 \[31, 2\]"),
        (set_header(4, 3, [600]), "header is missing or malformed"),
        (set_header(5, 3, [1]), "header is missing or malformed"),
        (set_array("9", np.zeros(3)), r"arrays and its header do not match \(9\)"),
        (set_array("4.v", np.ones((20, 3), np.float32)), r"carries float32 \[20, 3\], expected float32 \[20, 2\]"),
        (set_array("4.u", np.ones((), np.float32)), "'low' carries"),
        (set_array("1.indices", np.arange(40, dtype=np.int32)[::-1].copy()), "out of order"),
        (set_array("1.indices", np.arange(40, dtype=np.int64)), r"carries int64 \[40\], expected int32"),
        (set_array("1.indices", np.arange(1561, 1601, dtype=np.int32)), "outside"),
        (set_array("1.indices", np.arange(-1, 39, dtype=np.int32)), "outside"),
        (set_array("1.indices", np.array([0, 0, *range(1, 39)], np.int32)), "out of order"),
        (set_array("1.values", np.ones(39, np.float32)), r"carries int32 \[40\], expected int32 \[39\]"),
        (set_array("2.bitmap", np.full(9, 255, np.uint8)), r"carries uint8 \[9\], expected uint8 \[8\]"),
        (set_array("2.bitmap", np.full(8, 255, np.uint8)), "without values"),
        (set_padding_bit, "outside its shape"),
        (lambda a, h: a.pop("0"), r"arrays and its header do not match \(0\)"),
        (lambda a, h: h.append(3), "malformed"),
    ],
)
def test_a_wrong_claim_is_refused(change, says):
    with pytest.raises(WireError, match=says):
        encoding.decode(resealed(change))


def test_limits_on_size():
    data = encoding.encode(SAMPLE).data
    with pytest.raises(WireError, match="more than the 100 allowed"):
        encoding.decode(data, max_bytes=100)
    # No tensor alone has more, all together have.
    total = sum(prod(x.shape) for _, x in factored.leaves_with_paths(SAMPLE) if isinstance(x, torch.Tensor | LowRank))
    with pytest.raises(WireError, match=f"larger than the {total - 1} numbers"):
        encoding.decode(data, max_numbers=total - 1)
    encoding.decode(data, max_numbers=total)


def test_a_tiny_message_cannot_unfold_to_a_huge_tensor():
    arrays = {"0.values": np.zeros(0, np.float32), "0.indices": np.zeros(0, np.int64)}
    header = [[["x"], "indices", "float32", [2**20, 2**20]]]
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with pytest.raises(WireError, match="larger than"):
        encoding.decode(encoding.seal(safetensors.numpy.save(arrays)))


def mutants(data: bytes, count: int, seed: int):
    """Random damage: flipped bits, changed, removed, repeated and inserted bytes."""
    rng = random.Random(seed)
    for _ in range(count):
        out = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(out)) if out else 0
            match rng.randrange(6):
                case 0 if out:
                    out[at] ^= 1 << rng.randrange(8)
                case 1 if out:
                    out[at] = rng.randrange(256)
                case 2:
                    del out[at : at + rng.randrange(1, 40)]
                case 3:
                    out[at:at] = rng.randbytes(rng.randrange(1, 20))
                case 4:
                    out[at:at] = out[: rng.randrange(1, 60)]
                case 5 if out:
                    # Digits in headers are what lengths, shapes and offsets are made of.
                    digits = [i for i, b in enumerate(out) if 48 <= b <= 57]
                    out[rng.choice(digits or [at])] = rng.choice(b"0123456789-e.")
        yield bytes(out)


def test_every_mutated_message_is_cleanly_rejected():
    """10,000 damaged messages: each one a WireError, nothing else, nothing accepted."""
    data = encoding.encode(SAMPLE).data
    tried = 0
    for mutant in mutants(data, 10_000, seed=1):
        if mutant != data:
            tried += 1
            with pytest.raises(WireError):
                encoding.decode(mutant)
    assert tried > 9_500


def test_mutants_with_a_valid_checksum_are_rejected_or_well_formed():
    """The checksum forged, the parser itself is tried: a WireError, or a finite tree within the limits."""
    body = encoding.encode(SAMPLE).data[layout.FRAME_HEADER.size :]
    rejected = 0
    for mutant in mutants(body, 10_000, seed=2):
        try:
            tree = factored.multiply_out(encoding.decode(encoding.seal(mutant), max_numbers=10_000))
        except WireError:
            rejected += 1
            continue
        total = 0
        for _, leaf in factored.leaves_with_paths(tree):
            if isinstance(leaf, torch.Tensor):
                total += leaf.numel()
                assert not leaf.is_floating_point() or torch.isfinite(leaf).all()
        assert total <= 10_000
    assert rejected > 1_000


# --- sizes of messages that are never made --------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(trees)
def test_a_message_has_the_size_that_was_measured(tree):
    assert measuring.measure(tree) == encoding.encode(tree).size


@st.composite
def cohorts(draw):
    """A stacked tree, and how many clients it holds."""
    clients = draw(st.integers(1, 4))
    leaves = tensors((clients,)) | plain
    branches = st.recursive(leaves, lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)
    tree = draw(st.dictionaries(st.text(min_size=1, max_size=8), branches, max_size=5))
    return tree | {"": draw(tensors((clients,)))}, clients


def part(tree, client):
    return {
        k: part(x, client) if isinstance(x, dict) else x[client] if isinstance(x, torch.Tensor) else x
        for k, x in tree.items()
    }


@settings(max_examples=200, deadline=None)
@given(cohorts())
def test_every_message_of_a_cohort_has_the_size_that_was_measured(cohort):
    tree, clients = cohort
    messages = [encoding.encode(part(tree, client)).size for client in range(clients)]
    counts = measuring.nonzeros(tree)
    assert counts.dtype == torch.int64
    assert measuring.sizes(tree, counts) == measuring.sizes(tree, counts.numpy()) == messages


def test_nothing_has_no_size():
    assert encoding.NOTHING.size == layout.Size(0, 0)
    assert measuring.measure({}) == encoding.encode({}).size


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
@pytest.mark.parametrize("size", [1, 5, 96, 97, 1000])
def test_sizes_are_exact_where_one_encoding_overtakes_another(dtype, size):
    for count in range(0, size + 1, max(1, size // 200)):
        x = torch.zeros(size, dtype=dtype)
        x[:count] = 1
        assert measuring.measure({"x": x}) == encoding.encode({"x": x}).size


@pytest.mark.parametrize("rank", [0, 1, 9, 10, 11, 20])
def test_factors_are_measured_as_they_travel(rank):
    """Also those that are multiplied out, whose product may be full of zeros."""
    u, v = torch.randn(rank, 30).T, torch.randn(rank, 20).T
    u = u * (torch.arange(30) % 3 == 0)[:, None]
    for shape in ((30, 20), (10, 5, 3, 4)):
        tree = {"w": LowRank(u.clone().requires_grad_(), v, shape)}
        assert measuring.measure(tree) == encoding.encode(tree).size


@pytest.mark.parametrize(
    "x",
    [
        torch.eye(30)[:, ::2],
        torch.eye(30).T[3:],
        torch.zeros(1).expand(500),
        -torch.zeros(40, 1).expand(40, 30),
        torch.eye(30).bfloat16()[::3].T,
        torch.eye(30, requires_grad=True),
        torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
    ],
)
def test_any_strides_are_measured(x):
    assert measuring.measure({"x": x}) == encoding.encode({"x": x}).size
    stacked = {"x": x, "y": torch.ones(len(x))}
    parts = [encoding.encode({"x": row, "y": torch.ones(())}).size for row in x]
    assert measuring.sizes(stacked, measuring.nonzeros(stacked)) == parts


@pytest.mark.parametrize(("leaf", "says"), UNSENDABLE)
def test_a_measured_tree_is_refused_as_an_encoded_one_is(leaf, says):
    for measured in (measuring.measure, measuring.nonzeros):
        with pytest.raises(WireError, match=says):
            measured({"x": leaf})


def test_a_cohort_of_nobody_sends_nothing():
    tree = {"x": torch.ones(0, 5)}
    assert measuring.sizes(tree, measuring.nonzeros(tree)) == []


STORED_SHAPES = st.lists(st.integers(0, 9) | st.sampled_from([10, 99, 100]), max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.from_regex(r"[0-9]{1,3}(\.[a-z]{1,7})?", fullmatch=True), STORED_SHAPES, max_size=40),
    st.randoms(use_true_random=False),
)
def test_the_length_of_a_body_is_known(shapes, rng):
    assert_length_is_known({name: layout.ArraySpec(rng.choice(ELEMENT_TYPES), shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("seed", range(5))
def test_the_length_of_a_body_of_hundreds_of_arrays_is_known(seed):
    rng = random.Random(seed)
    shapes = [(), (0,), (3,), (64,), (7, 0, 2), (1000,), (33, 5, 3)]
    assert_length_is_known(
        {str(i): layout.ArraySpec(rng.choice(ELEMENT_TYPES), rng.choice(shapes)) for i in range(700)}
    )


def assert_length_is_known(parts):
    arrays = {name: packing.to_array(torch.zeros(part.shape, dtype=part.element)) for name, part in parts.items()}
    body = safetensors.numpy.save(arrays)
    assert measuring._body_bytes(parts) == len(body)
    assert b"".join(packing.Packed(arrays, 0, parts).pieces()) == body


class Watch(TorchDispatchMode):
    """The names of all operations, of which some would wait for the device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_counting_a_cohort_waits_for_nothing():
    tree = {str(i): torch.randn(3, 20, 20).mT for i in range(5)}
    with Watch() as watch:
        measuring.nonzeros(tree)
    assert not {"_local_scalar_dense", "item", "_to_copy", "clone", "copy_", "nonzero"} & set(watch.seen)
    assert watch.seen.count("sum") == len(tree)


@pytest.mark.gpu
def test_only_counts_leave_the_gpu():
    tree = {
        "dense": torch.randn(3, 40, 30),
        "sparse": torch.eye(60).expand(3, 60, 60),
        "permuted": torch.eye(60).expand(3, 60, 60).permute(0, 2, 1),
        "bf16": -torch.zeros(3, 100, dtype=torch.bfloat16),
        "scalar": torch.ones(3),
    }
    there = factored.to_device(tree, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts = measuring.nonzeros(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts.device.type == "cuda"
    assert measuring.sizes(there, counts.cpu()) == [encoding.encode(part(tree, i)).size for i in range(3)]
    mixed = {"there": part(there, 0), "here": part(tree, 1), "w": LowRank(*torch.ones(2, 9, 9).cuda(), (9, 9))}
    assert measuring.measure(mixed) == encoding.encode(mixed).size
