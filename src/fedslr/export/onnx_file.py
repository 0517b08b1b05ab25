"""Models as ONNX files, and running them with onnxruntime."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fedslr.core.errors import FedslrError
from fedslr.export.factored_layers import FactoredLayer, RecomposedLayer, is_plain
from fedslr.export.torch_program import Answers, example, exporting, require_any_batch

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def has_onnx() -> bool:
    return all(find_spec(name) for name in PACKAGES)


def require_onnx() -> None:
    missing = [name for name in PACKAGES if not find_spec(name)]
    if missing:
        raise FedslrError(f"format: onnx needs {', '.join(missing)}, not installed; pip install 'fedslr[export]'")


def onnx_bytes(model: nn.Module, x: Tensor) -> bytes:
    """Return a model, or one layer, as an ONNX file."""
    if is_plain(model) or isinstance(model, FactoredLayer):
        return _layer_bytes(model)
    batch, shapes = example(x)
    with exporting("an ONNX file"):
        program = torch.onnx.export(
            model,
            batch,
            dynamo=True,
            # The optimizer would put the parts of weights together.
            optimize=not any(isinstance(layer, RecomposedLayer) for layer in model.modules()),
            dynamic_shapes=shapes,
            input_names=["inputs"],
            output_names=["scores"],
            verbose=False,
        )
        assert program is not None
        made = program.model_proto
        _forget_origins(made)
        data: bytes = made.SerializeToString()
        require_any_batch(onnx_answers(data), x)
    return data


def with_notes(data: bytes, notes: Mapping[str, Any]) -> bytes:
    """Return an ONNX file with notes on its inputs and answers, as JSON in its metadata."""
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
    """Remove the lines and paths of source code that an exporter stores in a model."""
    for name in ("metadata_props", "doc_string"):
        if name in part.DESCRIPTOR.fields_by_name:
            part.ClearField(name)
    for field, value in part.ListFields():
        if field.message_type is not None:
            for inner in value if isinstance(value, Sequence) else [value]:
                _forget_origins(inner)


def _layer_bytes(layer: nn.Module) -> bytes:
    """Return one layer as an ONNX file without the exporter, which takes seconds for each of many layers."""
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
    """Return padding, strides and dilations of a convolution."""
    same = {"auto_pad": "SAME_UPPER" if plain.padding == "same" else "VALID"}
    pads = same if isinstance(plain.padding, str) else {"pads": [*plain.padding, *plain.padding]}
    return {**pads, "strides": list(plain.stride), "dilations": list(plain.dilation)}


def onnx_devices() -> list[str]:
    """Return the devices that onnxruntime can use; it silently falls back to the CPU if it cannot use a GPU."""
    import onnxruntime

    built_for = onnxruntime.get_available_providers()
    on = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    wanted = [device for device in on if PROVIDERS[device] in built_for]
    tried = _layer_bytes(nn.Linear(1, 1))
    return [device for device in wanted if PROVIDERS[device] in session(tried, device).get_providers()]


def session(data: bytes, device: str = "cpu") -> Any:
    """Return an ONNX file ready to run, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Failures are raised; they need not be logged too.
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(data, options, providers=[PROVIDERS[device]])


def onnx_answers(data: bytes) -> Answers:
    """Return the function that onnxruntime computes from an ONNX file."""
    ready = session(data)
    name = ready.get_inputs()[0].name
    return lambda x: torch.from_numpy(ready.run(None, {name: x.numpy()})[0])
