"""Models as programs that run without their Python: torch.export's archives and ONNX files."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fedslr.core.errors import FedslrError
from fedslr.export.factored_layers import Recomposed, Thin, is_plain

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
EXAMPLE = 2
"""Samples in the batch that exporters follow a model with."""
MOST = 2**16
"""Samples in the largest batch that a torch program takes."""
FIXED = "it would take batches of one size only; expected --format safetensors, which takes any"
FIXED_TOO = "Constraints violated (batch)"
"""How torch.export says the same."""
DOUBLE = "; onnxruntime runs few kinds of layers in float64: expected a run with dtype = 'float32', or another format"
ORIGINS = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
"""What torch.export notes of the code that an operation comes from."""


def has_onnx() -> bool:
    return all(find_spec(name) for name in PACKAGES)


def require_onnx() -> None:
    missing = [name for name in PACKAGES if not find_spec(name)]
    if missing:
        raise FedslrError(f"format: onnx needs {', '.join(missing)}, not installed; pip install 'fedslr[export]'")


# --- writing --------------------------------------------------------------------------------------------------------


def _example(x: Tensor) -> tuple[tuple[Tensor], tuple[dict[int, Any]]]:
    """A batch to follow a model with, and what of its shape may change. Archives keep it, so it is nobody's data."""
    return (x.new_zeros(EXAMPLE, *x.shape[1:]),), ({0: torch.export.Dim("batch", min=1, max=MOST)},)


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Exporters say at length why they cannot."""
    try:
        yield
    except FedslrError:
        raise
    except Exception as error:
        why = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        said = FIXED if FIXED_TOO in why[0] else why[0] + (DOUBLE if "NOT_IMPLEMENTED" in why[0] else "")
        raise FedslrError(f"format: this model cannot be made {what}: {said}") from error


@contextmanager
def _exporting(what: str) -> Iterator[None]:
    """What exporters need: no gradients, and layers that are made of operations they know."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), _quiet(), in_one_line(what):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _require_any_batch(answers: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """A model can fix the size of the example as the only one, and its exporter keep that to itself."""
    batch = x[:1].repeat(EXAMPLE + 1, *(1 for _ in x.shape[1:]))
    answers(batch[:EXAMPLE])
    for size in (1, EXAMPLE + 1):
        try:
            answers(batch[:size])
        except Exception:
            raise ValueError(FIXED) from None


def torch_bytes(model: nn.Module, x: Tensor) -> bytes:
    """A model as the archive of torch.export: `torch.export.load(path).module()` runs it."""
    batch, shapes = _example(x)
    file = io.BytesIO()
    with _exporting("a torch program"):
        program = torch.export.export(model, batch, dynamic_shapes=shapes)
        for node in program.graph.nodes:
            for origin in ORIGINS:
                node.meta.pop(origin, None)
        torch.export.save(program, file)
        _require_any_batch(torch_answers(file.getvalue()), x)
    return file.getvalue()


def onnx_bytes(model: nn.Module, x: Tensor) -> bytes:
    """A model, or a layer of one, as an ONNX file."""
    if is_plain(model) or isinstance(model, Thin):
        return _layer_bytes(model)
    batch, shapes = _example(x)
    with _exporting("an ONNX file"):
        program = torch.onnx.export(
            model,
            batch,
            dynamo=True,
            # Optimizing would put the parts of weights together.
            optimize=not any(isinstance(layer, Recomposed) for layer in model.modules()),
            dynamic_shapes=shapes,
            input_names=["inputs"],
            output_names=["scores"],
            verbose=False,
        )
        assert program is not None
        made = program.model_proto
        _forget_origins(made)
        data: bytes = made.SerializeToString()
        _require_any_batch(onnx_answers(data), x)
    return data


def with_notes(data: bytes, notes: Mapping[str, Any]) -> bytes:
    """An ONNX file that also says what is known of its inputs and answers: JSON in its metadata, by name."""
    known = {name: note for name, note in notes.items() if note is not None}
    if not known:
        return data
    import onnx

    made = onnx.load_model_from_string(data)
    for name, note in known.items():
        made.metadata_props.add(key=name, value=json.dumps(note, ensure_ascii=False))
    noted: bytes = made.SerializeToString()
    return noted


def _forget_origins(part: Any) -> None:
    """Take out what an exporter notes of the code that a model was made by: lines of it, and where they lie."""
    for name in ("metadata_props", "doc_string"):
        if name in part.DESCRIPTOR.fields_by_name:
            part.ClearField(name)
    for field, value in part.ListFields():
        if field.message_type is not None:
            for inner in value if isinstance(value, Sequence) else [value]:
                _forget_origins(inner)


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters tell of every package they could use but do not find, and warn of their own use of torch."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _layer_bytes(layer: nn.Module) -> bytes:
    """One layer as an ONNX file, made at once: the exporter takes seconds, and choosing forms asks for many."""
    from onnx import TensorProto, helper, numpy_helper

    plains = [layer.first, layer.second] if isinstance(layer, Thin) else [layer]
    nodes, weights = [], []
    for i, plain in enumerate(plains):
        given = {f"{name}{i}": p.detach() for name, p in plain.named_parameters()}
        names = [f"x{i}", *given]
        if isinstance(plain, nn.Conv2d):
            nodes.append(helper.make_node("Conv", names, [f"x{i + 1}"], **_window(plain)))
        else:
            # A product of inputs of any number of axes, which takes no bias of its own.
            given[names[1]] = given[names[1]].mT.contiguous()
            outputs = [f"product{i}", f"x{i + 1}"] if len(names) == 3 else [f"x{i + 1}"]
            nodes.append(helper.make_node("MatMul", names[:2], outputs[:1]))
            nodes += [helper.make_node("Add", [outputs[0], names[2]], outputs[1:])] if len(names) == 3 else []
        weights += [numpy_helper.from_array(x.numpy(), name) for name, x in given.items()]
    kind = TensorProto.DOUBLE if plains[0].weight.dtype == torch.float64 else TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, kind, None) for name in ("x0", f"x{len(plains)}")]
    graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    data: bytes = made.SerializeToString()
    return data


def _window(plain: nn.Conv2d) -> dict[str, Any]:
    """How a convolution moves over its inputs."""
    same = {"auto_pad": "SAME_UPPER" if plain.padding == "same" else "VALID"}
    pads = same if isinstance(plain.padding, str) else {"pads": [*plain.padding, *plain.padding]}
    return {**pads, "strides": list(plain.stride), "dilations": list(plain.dilation)}


# --- running --------------------------------------------------------------------------------------------------------


def onnx_devices() -> list[str]:
    """The devices that onnxruntime really runs on here: it takes the CPU where a GPU was asked for in vain."""
    import onnxruntime

    built_for = onnxruntime.get_available_providers()
    on = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    wanted = [device for device in on if PROVIDERS[device] in built_for]
    tried = _layer_bytes(nn.Linear(1, 1))
    return [device for device in wanted if PROVIDERS[device] in session(tried, device).get_providers()]


def session(data: bytes, device: str = "cpu") -> Any:
    """An ONNX file ready to be run, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # What fails is raised, and said once.
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(data, options, providers=[PROVIDERS[device]])


def torch_answers(data: bytes) -> Callable[[Tensor], Tensor]:
    """What a torch program answers."""
    with _quiet():
        loaded = torch.export.load(io.BytesIO(data)).module()
    return lambda x: loaded(x)


def onnx_answers(data: bytes) -> Callable[[Tensor], Tensor]:
    """What onnxruntime answers with an ONNX file."""
    ready = session(data)
    name = ready.get_inputs()[0].name
    return lambda x: torch.from_numpy(ready.run(None, {name: x.numpy()})[0])
