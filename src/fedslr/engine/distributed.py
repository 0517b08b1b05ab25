"""Several processes that simulate one federation together, started by `torchrun`. Only here torch.distributed is known.

Client c lives in process c mod size: it trains there, is evaluated there, and its state is kept there. Every process
draws the same cohorts and keeps the same server; what the others need of a round goes through one all-reduce.

A process that fails says why and leaves. The others find its connection closed when they next wait for it, and leave
too; the run folder is then that of a run that was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedslr.core import tree
from fedslr.core.errors import FedslrError
from fedslr.core.group import Group, T
from fedslr.core.tree import Tree

PATIENCE = timedelta(minutes=30)
"""How long a process waits for one that is silent but not gone: a round without clients of its own may be long."""


class Deserted(FedslrError):
    """Another process of the run is gone."""


class Several(Group):
    """One of several processes."""

    def __init__(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        super().__init__(should_stop)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._shape: Tree | None = None
        self._stop = False

    def mean(
        self, own: Tree | None, weight: float, counts: Sequence[int], device: torch.device
    ) -> tuple[Tree, list[int]]:
        shape = self._agree_on_shape(own)
        where = device if device.type == "cuda" and "nccl" in dist.get_backend_config() else torch.device("cpu")
        head = torch.tensor([weight, self._should_stop(), *counts], dtype=torch.float64, device=where)
        # Counts are exact in double precision, and a mean in single precision is the same however clients are dealt.
        total = torch.cat([head, _weighted(own, weight, shape, where)])
        with _others():
            dist.all_reduce(total)
        weight, asked, *added = total[: len(head)].tolist()
        self._stop = asked > 0
        return _restored(total[len(head) :] / weight, shape, device), [round(count) for count in added]

    def _agree_on_shape(self, own: Tree | None) -> Tree:
        """What an upload looks like; a process whose clients were not sampled in the first round has seen none."""
        if self._shape is None:
            known = self.gather(None if own is None else tree.map(lambda x: x.to("meta"), own))
            self._shape = next(shape for shape in known if shape is not None)
        return self._shape

    def stop(self) -> bool:
        return self._stop

    def gather(self, own: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with _others():
            dist.all_gather_object(found, own)
        return found


def _weighted(own: Tree | None, weight: float, shape: Tree, where: torch.device) -> Tensor:
    """An upload as one vector, times its weight; zeros for nobody's."""
    if own is None:
        return torch.zeros(sum(x.numel() for x in tree.leaves(shape)), dtype=torch.float64, device=where)
    ordered = tree.leaves(tree.map(lambda like, x: x, shape, own))
    flat = [x.detach().to(where).to(torch.float64).flatten() * weight for x in ordered]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64, device=where)


def _restored(vector: Tensor, shape: Tree, device: torch.device) -> Tree:
    parts = iter(torch.split(vector, [x.numel() for x in tree.leaves(shape)]))
    return tree.map(lambda like: next(parts).view(like.shape).to(like.dtype).to(device), shape)


@contextmanager
def _others() -> Iterator[None]:
    """Whatever goes wrong between processes, goes wrong because one is gone."""
    try:
        yield
    except RuntimeError as error:
        raise Deserted(
            "another process of this run is gone or silent; go on from the last checkpoint with --resume"
        ) from error


def several() -> bool:
    """Whether this process was started as one of several."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return {"RANK", "MASTER_ADDR"} <= os.environ.keys() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(should_stop: Callable[[], bool] = lambda: False) -> Group:
    """The processes of this run, as torchrun started them; this one alone where it did not."""
    if not several():
        return Group(should_stop)
    if not dist.is_initialized():
        _start()
    return Several(should_stop)


def _start() -> None:
    """Meet the others. Every process has a GPU of its own where there are enough, else they take turns on them."""
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])) % gpus)
    enough = gpus >= here and dist.is_nccl_available()
    with _others():
        dist.init_process_group("cpu:gloo,cuda:nccl" if enough else "gloo", timeout=PATIENCE)
    atexit.register(_leave)


def _leave() -> None:
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def speaks() -> bool:
    """Whether this process is the one to say why a run ends: the first that wants to."""
    if not several():
        return True
    if not dist.is_initialized():
        return os.environ["RANK"] == "0"
    try:
        return bool(dist.distributed_c10d._get_default_store().add("fedslr/told", 1) == 1)
    except RuntimeError:
        return True
