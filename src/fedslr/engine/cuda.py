"""The fast engine: a cohort's whole local training as CUDA graphs, captured once and replayed every round.

The method's `local_update` runs under `torch.vmap`, as in the batched engine, but

- gradients of all clients come from one network whose layers work on the whole cohort (`stacked`);
- what `tree.map` does to a model's tensors is compiled to one kernel per tensor;
- everything is recorded in graphs, whose inputs (states, broadcast, batches, step size) stay at one place in memory,
  so that a round is some copies and some launches;
- what the server makes of the uploads, it makes while the clients go on to learn for themselves.

Methods that read numbers back to choose a shape or a branch cannot be recorded; they run as the batched or, if that
cannot be either, as the eager engine runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.core import tree
from fedslr.core.algorithm import Phased
from fedslr.core.generators import leave_capture
from fedslr.core.problem import gradients
from fedslr.core.types import Params, Payload, Round
from fedslr.data.normalization import inputs
from fedslr.engine import contract
from fedslr.engine.batched import Batched, CohortTask, T, Together, changing, may_be_vmaps, require_alike
from fedslr.engine.cohort_batches import Filled
from fedslr.engine.stacked import Network, aside, has_triton, is_same, stack

# --- gradients of a cohort --------------------------------------------------------------------------------------------


class _CohortGrad(torch.autograd.Function):
    """∇f of one client; under `torch.vmap`, of all of them in one go."""

    @staticmethod
    def forward(task: Any, names: Any, free: int, filled: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _CohortGrad._stacked(task, names, free, filled, [x[None] for x in tensors], one=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, task: Any, names: Any, free: int, filled: bool, *tensors: Tensor) -> Any:
        at = dims[4:]
        whole = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, at, strict=True)
        ]
        made = _CohortGrad._stacked(task, names, free, filled, whole)
        return made, (0,) * len(made)

    @staticmethod
    def _stacked(
        task: StackedTask, names: Any, free: int, filled: bool, tensors: Sequence[Tensor], one: bool = False
    ) -> tuple[Tensor, ...]:
        x, y, weight, *params = tensors
        grads = task.cohort_grads(dict(zip(names, params, strict=True)), free, x, y, weight if filled else None)
        return tuple(g[0] for g in grads) if one else tuple(grads)


class StackedTask(CohortTask):
    """The learning problem of a client whose gradients are computed together with those of its cohort."""

    network: Network | None = None

    def loss_grad(self, params: Params, batch: Any, frozen: Params | None = None) -> Params:
        if self.network is None:
            return super().loss_grad(params, batch, frozen)
        whole = {**params, **(frozen or {})}
        names = tuple(whole)
        filled = isinstance(batch, Filled)
        # Where nothing fills a batch its samples have no weights, and something must stand in their place.
        x, y, weight = (batch.inputs, batch.labels, batch.weight) if filled else (batch.x, batch.y, batch.y)
        made = _CohortGrad.apply(self, names, len(params), filled, x, y, weight, *(whole[k] for k in names))
        return dict(zip(params, made, strict=True))

    def grad(self, params: Params, batch: Any, frozen: Params | None = None) -> Params:
        wd = self.weight_decay
        return tree.later(lambda g, v: g + wd * v, self.loss_grad(params, batch, frozen), params)

    def cohort_outputs(self, params: Params, x: Tensor) -> Tensor:
        return super().cohort_outputs(params, x) if self.network is None else self.network(params, x)

    def cohort_grads(self, params: Params, free: int, x: Tensor, y: Tensor, weight: Tensor | None) -> list[Tensor]:
        """∇f of the first `free` parameters, every tensor with a leading axis of clients."""
        if self.network is None:
            raise TypeError("the model could not be stacked")
        inputs = {k: v.detach().requires_grad_() if i < free else v for i, (k, v) in enumerate(params.items())}
        with self.products(), torch.enable_grad():
            outputs = self.network(inputs, x).to(next(iter(params.values())).dtype)
            if weight is None:
                loss = torch.vmap(self.loss_function)(outputs, y).sum()
            else:
                each = torch.vmap(self.loss_function)(outputs.flatten(0, 1)[:, None], y.flatten()[:, None])
                loss = (each * weight.flatten()).sum()
            grads = gradients(loss, list(inputs.values())[:free])
            aside.join()
            return list(grads)


# --- element-wise work ------------------------------------------------------------------------------------------------


def _each(fn: Callable[..., Any], trees: list[list[Tensor]]) -> list[Tensor]:
    return [fn(*leaves) for leaves in zip(*trees, strict=True)]


class _Map(torch.autograd.Function):
    """`fn` on the leaves of some trees; under `torch.vmap`, on those of all clients, compiled."""

    @staticmethod
    def forward(fn: Any, trees: int, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(_each(fn, _divide(leaves, trees)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, fn: Any, trees: int, *leaves: Tensor) -> Any:
        at = dims[2:]
        whole = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(leaves, at, strict=True)]
        made = _compiled()(fn, _divide(whole, trees))
        batched = [any(d is not None for d in of_leaf) for of_leaf in zip(*_divide(at, trees), strict=True)]
        return tuple(made), tuple(0 if b else None for b in batched)


def _divide(flat: Sequence[Any], parts: int) -> list[list[Any]]:
    size = len(flat) // parts
    return [list(flat[i * size : (i + 1) * size]) for i in range(parts)]


_cache: list[Any] = []


def _compiled() -> Any:
    """`_each`, compiled for every function and every set of shapes it meets, where there is a compiler."""
    if not has_triton():
        return _each
    if not _cache:
        limits: Any = torch._dynamo.config
        name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"  # before 2.7
        setattr(limits, name, max(getattr(limits, name), 256))
        _cache.append(torch.compile(_each, dynamic=False, options={"combo_kernels": True}))
    return _cache[0]


def _closed_over(fn: Any) -> Iterator[Tensor]:
    """The tensors that a function, and the functions it is made of, refer to."""
    left, seen = [fn], set()
    while left:
        this = left.pop()
        if id(this) in seen:
            continue
        seen.add(id(this))
        for held in _held_by(this):
            for found in pytree.tree_leaves(held):
                if isinstance(found, Tensor):
                    yield found
                else:
                    left.append(found)


def _held_by(fn: Any) -> list[Any]:
    """What a function carries with it: what it closes over, its defaults, what is bound to it already."""
    if isinstance(fn, functools.partial):
        return [fn.func, fn.args, fn.keywords]
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    return [*cells, getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None)]


def _fuse(fn: Callable[..., Any], trees: list[list[Any]]) -> list[Any]:
    """`tree.map` for cohorts on a GPU."""
    flat = [leaf for leaves in trees for leaf in leaves]
    # Inside _Map a client's own numbers are out of reach, except as leaves.
    own = any(torch._C._functorch.is_batchedtensor(x) for x in _closed_over(fn))
    if own or not flat or not all(isinstance(x, Tensor) for x in flat):
        return _each(fn, trees)
    made: tuple[Tensor, ...] = _Map.apply(fn, len(trees), *flat)
    return list(made)


# --- the engine -------------------------------------------------------------------------------------------------------


def _like(x: Tensor, clients: int | None) -> Tensor:
    """Room for a tensor, or for one of every client; a convolution's weights with their channels together."""
    shape = x.shape if clients is None else (clients, *x.shape)
    if x.ndim == 4:
        *lead, o, i, h, w = shape
        return x.new_empty(*lead, o, h, w, i).movedim(-1, -3)
    return x.new_empty(shape)


def _copy(places: Sequence[Sequence[Tensor]], trees: Sequence[Any]) -> None:
    """The tensors of some trees to where they belong, in few launches."""
    to: list[Tensor] = []
    source: list[Tensor] = []
    for place, one in zip(places, trees, strict=False):
        to.extend(place)
        source.extend(pytree.tree_leaves(one))
    alike = [a.stride() == b.stride() for a, b in zip(to, source, strict=True)]
    for kind in (True, False):
        pairs = [(a, b) for a, b, same in zip(to, source, alike, strict=True) if same is kind]
        if pairs:
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def _apart(uploads: Payload, states: Any) -> Payload:
    """Uploads that lie elsewhere than the states clients began with, whose place the next cohort's take early."""
    taken = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(states)}
    made: Payload = pytree.tree_map(lambda x: x.clone() if x.untyped_storage().data_ptr() in taken else x, uploads)
    return made


class _Memory(NamedTuple):
    """Where graphs put what they make: one place for all recordings of a run, which never replay at once.

    Memory that one recording needs no more is another's only where both were captured from the same stream.
    """

    pool: Any
    stream: torch.cuda.Stream

    @classmethod
    def on(cls, device: torch.device) -> _Memory:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


class _Recording:
    """A captured round, as graphs to be launched one after another, and where its inputs and outputs lie.

    It is cut into several graphs so that the processor launches the next while the GPU works on one.
    """

    STEPS = 5
    """Local steps per graph."""

    def __init__(
        self, states: Any, payload: Any, numbers: dict[str, Any], shared: bool, memory: _Memory | None = None
    ) -> None:
        self.states, self.payload, self.numbers = states, payload, numbers
        self.memory = memory
        self.made = Together((), {}, 0)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._steps = 0
        self._uploaded = 0
        """Graphs after which the uploads are made; 0 if they are made last."""
        places = pytree.tree_leaves(states)
        self._slots = list(zip(*(x.unbind(0) for x in places), strict=True))
        sent = pytree.tree_leaves(payload)
        self._payloads = [tuple(sent)] if shared else list(zip(*(x.unbind(0) for x in sent), strict=True))

    def load_states(self, states: Sequence[Any]) -> None:
        """Put the states where the graphs read them, once the graphs that were launched have done so."""
        _copy(self._slots, states)

    def load(self, payloads: Sequence[Payload], round: Round) -> None:
        """Put everything else there."""
        _copy(self._payloads, payloads)
        for name, number in self.numbers.items():
            number.fill_(getattr(round, name))

    def capture(self, work: Callable[[], Together], batches: Any) -> None:
        """Record the work; `batches` say when a step begins."""
        assert self.memory is not None
        stream = self.memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        batches.between_steps = self._cut
        try:
            with torch.cuda.stream(stream):
                self._begin()
                try:
                    self.made = work()
                finally:
                    self._graphs[-1].capture_end()
        finally:
            batches.between_steps = lambda: None
            torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> torch.cuda.Event | None:
        """Launch everything; tells when the uploads are made, if anything comes after them."""
        uploaded = None
        for number, graph in enumerate(self._graphs):
            if number and number == self._uploaded:
                uploaded = torch.cuda.current_stream().record_event()
            graph.replay()
        return uploaded

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        assert self.memory is not None
        graph.capture_begin(pool=self.memory.pool)
        self._graphs.append(graph)

    def _cut(self) -> None:
        self._steps += 1
        if self._steps % self.STEPS == 0:
            self._next()

    def _next(self) -> None:
        self._graphs[-1].capture_end()
        self._begin()

    def note_uploads(self) -> None:
        """The uploads have been made: what follows is another graph."""
        self._next()
        self._uploaded = len(self._graphs) - 1


@functools.cache
def _first_stream(device: torch.device) -> torch.cuda.Stream:
    """Work that goes before that of other streams: little of it, for which others would wait."""
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "fedslr-server")


class Cuda(Batched):
    """Trains a cohort on a GPU by replaying one graph."""

    task_kind = StackedTask
    looks_ahead = True
    fills = True

    def __init__(self, *args: Any, precision: str = "float32", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision = precision
        self.together.network = self._network()  # type: ignore[attr-defined]
        self._recordings: dict[Any, _Recording] = {}
        self._memory = _Memory.on(self.device) if self.device.type == "cuda" else None
        self._plain = False
        self._between_phases: Callable[[], None] = lambda: None
        self._uploaded: torch.cuda.Event | None = None
        self._shared = True
        """Whether all clients of the last round were sent the same."""
        self._ready: tuple[Any, Sequence[Any]] | None = None
        """What a recording is known by whose batches are in place already, and the states that are too."""

    def _network(self) -> Network | None:
        """The model of a cohort, if it can be written and says what the model says."""
        product = "tf32x3" if self.precision == "float32" else "tf32"
        exact = stack(self.task.model, False, product)
        shown = inputs(self.clients[0].x[:2], self.normalization, self.dtype)
        if exact is None or not is_same(exact, self.task.model, shown):
            return None
        rounded = self.precision == "bf16" and self.dtype == torch.float32
        return stack(self.task.model, True, product) if rounded else exact

    def train(
        self, cohort: Sequence[int], states: Sequence[Any], payloads: Sequence[Payload], round: Round
    ) -> Together:
        self._uploaded = None
        if self._plain:
            with tree.mapped_by(_fuse):
                return super().train(cohort, states, payloads, round)
        shared = all(payload is payloads[0] for payload in payloads)
        everyone, sent = self._filled(cohort), self._filled(payloads)
        key = self._key(everyone, shared, round)
        recording, ready = self._recordings.get(key), self._ready
        self._shared, self._ready = shared, None
        if recording is None:
            batches = self._turn_to(everyone, round.number)
            recording = self._record(batches, self._filled(states), sent, shared, round)
            if recording is None:
                self._plain = True
                return self.train(cohort, states, payloads, round)
            self._recordings[key] = recording
        elif ready is None or ready[0] != key or ready[1] is not states:
            self._turn_to(everyone, round.number)
            recording.load_states(self._filled(states))
        recording.load(sent, round)
        self._uploaded = recording.replay()
        return recording.made.first(len(cohort))

    def _key(self, cohort: Sequence[int], shared: bool, round: Round) -> Any:
        """What a recording is known by."""
        return (len(cohort), self.shapes.of(cohort), shared, round.epochs, round.personal_epochs)

    def expect(self, cohort: Sequence[int], states: Sequence[Any], round: Round) -> None:
        """Batches and states are put where the graphs read them as soon as those that run now have done so."""
        if self._plain:
            return
        everyone = self._filled(cohort)
        key = self._key(everyone, self._shared, round)
        recording = self._recordings.get(key)
        if recording is not None:
            self._turn_to(everyone, round.number)
            recording.load_states(self._filled(states))
            self._ready = (key, states)

    def _run(self, batches: Any, states: Any, payload: Payload, shared: bool, round: Round) -> Together:
        method = self.algorithm
        if not isinstance(method, Phased):
            made = super()._run(batches, states, payload, shared, round)
            return made._replace(uploads=_apart(made.uploads, states))
        between, uploads = self._each(contract.checked_update(method.fit), batches, states, payload, shared, round)
        uploads = _apart(uploads, states)
        self._between_phases()
        learn = contract.checked_state(method.personalize, type(states))
        states = self._each(learn, batches, between, payload, shared, round)
        return Together(states, uploads, len(batches.cohort))

    def meanwhile(self, work: Callable[[], T]) -> Future[T] | None:
        uploaded = self._uploaded
        if uploaded is None:
            return None

        def beside() -> T:
            stream = _first_stream(self.device)
            with torch.cuda.stream(stream):
                stream.wait_event(uploaded)
                made = work()
                stream.synchronize()
            return made

        return _pool().submit(beside)

    def _record(
        self, batches: Any, states: Sequence[Any], payloads: Sequence[Payload], shared: bool, round: Round
    ) -> _Recording | None:
        """Capture a cohort's round; None for a method whose work depends on numbers it reads back."""
        require_alike(states)
        require_alike(payloads)
        clients = len(states)
        room = pytree.tree_map(lambda x: _like(x, clients), states[0])
        sent = pytree.tree_map(lambda x: _like(x, None if shared else clients), payloads[0])
        numbers = changing(round, self.device)
        recording = _Recording(room, sent, numbers, shared, self._memory)
        recording.load_states(states)
        recording.load(payloads, round)
        asked = round._replace(**numbers)
        with tree.mapped_by(_fuse):
            beside = torch.cuda.Stream(self.device)
            beside.wait_stream(torch.cuda.current_stream(self.device))
            try:
                with torch.cuda.stream(beside):
                    # Once for compiling, and to see which batches the method asks for.
                    self._run(batches, room, sent, shared, asked)
                torch.cuda.synchronize(self.device)
                self._between_phases = recording.note_uploads
                recording.capture(lambda: self._run(batches, room, sent, shared, asked), batches)
            except (RuntimeError, TypeError, ValueError) as error:
                if "illegal" in str(error) or "out of memory" in str(error) or not may_be_vmaps(error):
                    raise
                leave_capture(self.device)
                return None
            finally:
                self._between_phases = lambda: None
        return recording
