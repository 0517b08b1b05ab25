"""CUDA graphs of a round: captured once, replayed for every cohort that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.core.types import Payload, Round
from fedslr.engine.results import CohortResult


def room_for(x: Tensor, clients: int | None) -> Tensor:
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


def copy_aliased(uploads: Payload, states: Any) -> Payload:
    """Copy uploads that alias the client states: the next cohort overwrites those buffers before uploads are read."""
    taken = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(states)}
    made: Payload = pytree.tree_map(lambda x: x.clone() if x.untyped_storage().data_ptr() in taken else x, uploads)
    return made


class GraphMemory(NamedTuple):
    """The memory of all recordings of a run, which never replay at the same time.

    Recordings share memory only if they were captured from the same stream.
    """

    pool: Any
    stream: torch.cuda.Stream

    @classmethod
    def on(cls, device: torch.device) -> GraphMemory:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


class Recording:
    """A captured round: graphs to be launched one after another, and the tensors that they read and write.

    It is cut into several graphs so that the processor launches the next while the GPU works on one.
    """

    STEPS = 5
    """Local steps per graph."""

    def __init__(
        self, states: Any, payload: Any, numbers: dict[str, Any], shared: bool, memory: GraphMemory | None = None
    ) -> None:
        self.states, self.payload, self.numbers = states, payload, numbers
        self.memory = memory
        self.made = CohortResult((), (), (), {}, {})
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

    def capture(self, work: Callable[[], CohortResult], batches: Any) -> None:
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
        """Launch all graphs; return an event that marks that the uploads are made, None if nothing follows them."""
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
