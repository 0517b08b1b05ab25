"""Models as programs: archives of torch.export, and ONNX files, which onnxruntime runs."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fedslr.core.errors import FedslrError
from fedslr.export.factored_layers import FactoredLayer, RecomposedLayer, is_plain

EXAMPLE_BATCH = 2
"""Samples in the batch that exporters trace a model with."""
MAX_BATCH = 2**16
"""Samples in the largest batch that a torch program takes."""
FIXED_BATCH = "the program would take batches of one size only; use --format safetensors, which takes any size"
FIXED_BATCH_OF_TORCH = "Constraints violated (batch)"
"""The message of torch.export for such a model."""
NO_FLOAT64 = "; onnxruntime runs few kinds of layers in float64: train with dtype = 'float32', or use another format"
CODE_ORIGINS = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
"""The metadata in which torch.export stores the source code of an operation."""
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
Answers = Callable[[Tensor], Tensor]
"""The function from inputs to scores that an exported file computes."""


def example(x: Tensor) -> tuple[tuple[Tensor], tuple[dict[int, Any]]]:
    """Return a batch of zeros to trace a model with, because archives store it, and the axis that may change."""
    return (x.new_zeros(EXAMPLE_BATCH, *x.shape[1:]),), ({0: torch.export.Dim("batch", min=1, max=MAX_BATCH)},)


@contextmanager
def exporting(what: str) -> Iterator[None]:
    """Run an exporter without gradients and unknown fused operations; turn its exception into an error of one line."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), without_warnings():
            yield
    except Exception as error:
        why = str(error.__cause__ or error).strip().partition("\n")[0] or type(error).__name__
        why = FIXED_BATCH if FIXED_BATCH_OF_TORCH in why else why + (NO_FLOAT64 if "NOT_IMPLEMENTED" in why else "")
        raise FedslrError(f"format: this model cannot be written as {what}: {why}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def require_any_batch(answers: Answers, x: Tensor) -> None:
    """Refuse a program that takes batches of the example's size only; some exporters write such programs silently."""
    batch = x[:1].repeat(EXAMPLE_BATCH + 1, *(1 for _ in x.shape[1:]))
    answers(batch[:EXAMPLE_BATCH])
    try:
        answers(batch[:1])
        answers(batch)
    except Exception:
        raise ValueError(FIXED_BATCH) from None


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence exporters, which warn of missing optional packages and of their own use of torch."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def torch_bytes(model: nn.Module, x: Tensor) -> bytes:
    """Return a model as an archive of torch.export; `torch.export.load(path).module()` runs it."""
    batch, shapes = example(x)
    file = io.BytesIO()
    with exporting("a torch program"):
        program = torch.export.export(model, batch, dynamic_shapes=shapes)
        for node in program.graph.nodes:
            for origin in CODE_ORIGINS:
                node.meta.pop(origin, None)
        torch.export.save(program, file)
        require_any_batch(torch_answers(file.getvalue()), x)
    return file.getvalue()


def torch_answers(data: bytes) -> Answers:
    """Return the function that a torch program computes."""
    with without_warnings():
        return torch.export.load(io.BytesIO(data)).module()


def has_onnx() -> bool:
    """Return whether the packages of the extra `export` are installed."""
    return all(find_spec(name) for name in ONNX_PACKAGES)


def onnx_bytes(model: nn.Module, x: Tensor, **notes: Any) -> bytes:
    """Return a model, or one layer, as an ONNX file; its metadata holds the notes as JSON."""
    with exporting("an ONNX file"):
        alone = is_plain(model) or isinstance(model, FactoredLayer)
        made = _layer_file(model) if alone else _model_file(model, x)
        for name, note in notes.items():
            if note is not None:
                made.metadata_props.add(key=name, value=json.dumps(note, ensure_ascii=False))
        data: bytes = made.SerializeToString()
        require_any_batch(onnx_answers(data), x)
    return data


def _model_file(model: nn.Module, x: Tensor) -> Any:
    batch, shapes = example(x)
    program = torch.onnx.export(
        model,
        batch,
        dynamo=True,
        # The optimizer would multiply the parts of weights out.
        optimize=not any(isinstance(layer, RecomposedLayer) for layer in model.modules()),
        dynamic_shapes=shapes,
        input_names=["inputs"],
        output_names=["scores"],
        verbose=False,
    )
    assert program is not None
    made = program.model_proto
    _forget_origins(made)
    return made


def _forget_origins(part: Any) -> None:
    """Remove the lines and paths of source code that an exporter stores in a model."""
    for name in ("metadata_props", "doc_string"):
        if name in part.DESCRIPTOR.fields_by_name:
            part.ClearField(name)
    for field, value in part.ListFields():
        if field.message_type is not None:
            for inner in value if isinstance(value, Sequence) else [value]:
                _forget_origins(inner)


def _layer_file(layer: nn.Module) -> Any:
    """Return one layer as an ONNX file without the exporter, which takes seconds per layer."""
    from onnx import TensorProto, helper, numpy_helper

    plains = [layer.first, layer.second] if isinstance(layer, FactoredLayer) else [layer]
    nodes, weights = [], []
    for i, plain in enumerate(plains):
        given = {f"{name}{i}": p.detach() for name, p in plain.named_parameters()}
        names = [f"x{i}", *given]
        if isinstance(plain, nn.Conv2d):
            nodes.append(helper.make_node("Conv", names, [f"x{i + 1}"], **_window(plain)))
        else:
            # MatMul takes inputs of any number of axes, but no bias.
            given[names[1]] = given[names[1]].mT.contiguous()
            *product, out = [f"product{i}"] * (len(names) - 2) + [f"x{i + 1}"]
            nodes.append(helper.make_node("MatMul", names[:2], product or [out]))
            nodes += [helper.make_node("Add", [*product, names[2]], [out])] if product else []
        weights += [numpy_helper.from_array(x.numpy(), name) for name, x in given.items()]
    kind = TensorProto.DOUBLE if plains[0].weight.dtype == torch.float64 else TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, kind, None) for name in ("x0", f"x{len(plains)}")]
    graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def _window(plain: nn.Conv2d) -> dict[str, Any]:
    """Return padding, strides and dilations of a convolution."""
    same = {"auto_pad": "SAME_UPPER" if plain.padding == "same" else "VALID"}
    pads = same if isinstance(plain.padding, str) else {"pads": [*plain.padding, *plain.padding]}
    return {**pads, "strides": list(plain.stride), "dilations": list(plain.dilation)}


def onnx_devices() -> list[str]:
    """Return the devices that onnxruntime can use; it silently falls back to the CPU if it cannot use a GPU."""
    import onnxruntime

    built_for = onnxruntime.get_available_providers()
    wanted = ["cpu", "cuda"] if torch.cuda.is_available() and PROVIDERS["cuda"] in built_for else ["cpu"]
    tried = onnx_bytes(nn.Linear(1, 1), torch.zeros(1, 1))
    return [device for device in wanted if PROVIDERS[device] in session(tried, device).get_providers()]


def session(data: bytes, device: str = "cpu") -> Any:
    """Return an ONNX file ready to run, with the number of threads that torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # onnxruntime raises its failures; it need not log them too.
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(data, options, providers=[PROVIDERS[device]])


def onnx_answers(data: bytes) -> Answers:
    """Return the function that onnxruntime computes from an ONNX file."""
    ready = session(data)
    name = ready.get_inputs()[0].name
    return lambda x: torch.from_numpy(ready.run(None, {name: x.numpy()})[0])
