"""Local steps of a whole cohort, compiled: for long runs on a CPU.

One step of a method is traced under `torch.vmap` and handed to `torch.compile`; the loop over steps stays in Python, so
that compiling takes as long for one epoch as for a hundred. Steps are compiled for every shape of a batch they meet.
What was compiled is kept on disk by PyTorch, in `TORCHINDUCTOR_CACHE_DIR` or else a folder of the user's in the
system's temporary one, and found there by the next run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedslr.core.errors import FedslrError
from fedslr.core.types import Payload, Round
from fedslr.engine.batched import Batched, Together, changing
from fedslr.engine.cohort_batches import CohortBatches, Shape

Step = Callable[[Any, Any], Any]
MOST = 16
"""Times that the code of one step is compiled: for every shape of a batch, and for other things it carries."""


class _Made(NamedTuple):
    """A step that was compiled, and the tree its results belong in."""

    run: Callable[[list[Tensor]], list[Tensor]]
    shape: Any
    kept: tuple[Any, ...]
    """What it was compiled with, which is known by its identity: nothing else may come to have that."""


class _Asked(NamedTuple):
    """A step together with everything it reads: what is a tensor, and what is not."""

    code: Any
    shape: Any
    fixed: tuple[Any, ...]
    """By position: everything but tensors, which is compiled in; None where a tensor is."""


class Steps:
    """The compiled steps of a run."""

    def __init__(self) -> None:
        self._made: dict[Any, _Made] = {}
        self._shape: Any = None
        self._met: Counter[Any] = Counter()
        """How often a step's code was compiled."""

    def __call__(self, step: Step, carry: Any, item: Any) -> Any:
        """Run a step inside `torch.vmap`; what it closes over is read anew every time.

        A step that is no plain function, or that is another one again and again, is run as it is.
        """
        if not isinstance(step, FunctionType) or self._met[step.__code__] >= MOST:
            return step(carry, item)
        captured = _captured(step)
        leaves, shape = pytree.tree_flatten((carry, item, captured))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        fixed = tuple(None if isinstance(x, Tensor) else x for x in leaves)
        flat = self._together(step, _Asked(step.__code__, shape, fixed), tensors)
        return pytree.tree_unflatten(flat, self._shape)

    def _together(self, step: FunctionType, asked: _Asked, tensors: list[Tensor]) -> list[Tensor]:
        """A step inside `torch.vmap`, as one step of all clients outside of it.

        This is what the vmap rule of an `autograd.Function` is for, at a fraction of its overhead.
        """
        vmap = retrieve_current_functorch_interpreter()
        found = [functorch._unwrap_batched(x, vmap.level()) for x in tensors]
        at = tuple(None if dim is None else 0 for _, dim in found)
        with vmap.lower():
            made = self.run(step, asked, at, [(x if d is None else x.movedim(d, 0)).contiguous() for x, d in found])
        return [functorch._add_batch_dim(x, 0, vmap.level()) for x in made]

    def run(self, step: FunctionType, asked: _Asked, at: tuple[int | None, ...], tensors: list[Tensor]) -> list[Tensor]:
        """A step of all clients; compiled when it is first met."""
        key = (asked.code, str(asked.shape), _values(asked.fixed), at, *((x.shape, x.dtype) for x in tensors))
        if key not in self._made:
            self._met[asked.code] += 1
            self._made[key] = _compile(step, asked, at, tensors)
        made = self._made[key]
        self._shape = made.shape
        return made.run(tensors)


def _values(fixed: Sequence[Any]) -> tuple[Any, ...]:
    """What tells things apart that are compiled in: a number's value, another object's identity."""
    return tuple(x if x is None or isinstance(x, bool | int | float | str) else id(x) for x in fixed)


def _compile(step: FunctionType, asked: _Asked, at: tuple[int | None, ...], tensors: list[Tensor]) -> _Made:
    """A step of all clients as compiled code; as it is, where it reads tensors that cannot be given to it."""
    shapes: list[Any] = []

    def one(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, _Hole) else x for x in _holes(asked)]
        carry, item, captured = pytree.tree_unflatten(leaves, asked.shape)
        flat, shape = pytree.tree_flatten(_with(step, captured)(carry, item))
        shapes.append(shape)
        return tuple(flat)

    def everyone(tensors: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(torch.vmap(one, in_dims=at)(*tensors))

    traced = make_fx(everyone)(tensors)
    if any(node.op == "get_attr" for node in traced.graph.nodes):
        return _Made(everyone, shapes[0], asked.fixed)
    return _Made(torch.compile(traced, dynamic=False), shapes[0], asked.fixed)


class _Hole:
    """Where a tensor goes."""


def _holes(asked: _Asked) -> list[Any]:
    """The fixed parts, with holes for the tensors; a None of the step's own is no leaf of a tree."""
    return [_Hole() if x is None else x for x in asked.fixed]


def _captured(step: FunctionType) -> list[Any]:
    """What a function carries with it: what it closes over, and its defaults."""
    cells = [cell.cell_contents for cell in step.__closure__ or ()]
    return [cells, list(step.__defaults__ or ()), dict(step.__kwdefaults__ or {})]


def _with(step: FunctionType, captured: list[Any]) -> Step:
    """The same function, carrying other things."""
    cells, defaults, named = captured
    closed = tuple(CellType(value) for value in cells)
    made = FunctionType(step.__code__, step.__globals__, step.__name__, tuple(defaults) or None, closed or None)
    made.__kwdefaults__ = named or None
    return made


def require_compiler() -> None:
    """One plain line where there is nothing to compile with."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise FedslrError(
            "compile: got true, but there is no C++ compiler; install g++ or clang++, or expected false"
        ) from None


class Compiled(Batched):
    """The batched engine with compiled steps."""

    fills = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_compiler()
        self.steps: defaultdict[Shape, Steps] = defaultdict(Steps)

    def _run(self, batches: CohortBatches, states: Any, payload: Payload, shared: bool, round: Round) -> Together:
        batches.run_step = self.steps[batches.shape]
        return super()._run(batches, states, payload, shared, round._replace(**changing(round, self.device)))
