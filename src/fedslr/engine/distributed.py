"""Several processes, started by `torchrun`, that simulate one federation. Only this module uses torch.distributed.

Client c lives in process c mod size: it trains there, is evaluated there, and its state is kept there. Every process
draws the same cohorts and keeps the same server; what the others need of a round goes through one all-reduce.

A process that fails says why and leaves. The others find its connection closed when they next wait for it, and leave
too; the run folder is then that of a run that was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
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
"""The time that a process waits for a silent one. A round in which it has no clients may be long."""


class Deserted(FedslrError):
    """Another process of the run is gone."""


class Several(Group):
    """One of several processes. A round needs one all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._shape: Tree | None = None
        self._stop = False

    def sum(self, own: Tree | None, weight: float, device: torch.device) -> tuple[Tree | None, float]:
        """Return the sums over all processes; the same all-reduce tells all of them whether one was asked to stop."""
        shape = self._agree_on_shape(own)
        where = device if device.type == "cuda" and "nccl" in dist.get_backend_config() else torch.device("cpu")
        head = torch.tensor([weight, self.should_stop()], dtype=torch.float64, device=where)
        # A sum in double precision is the same in single precision, however clients are assigned to processes.
        total = torch.cat([head, _flat(own, shape, where)])
        with _others():
            dist.all_reduce(total)
        weight, asked = total[:2].tolist()
        self._stop = asked > 0
        return _restored(total[2:], shape, device), weight

    def _agree_on_shape(self, own: Tree | None) -> Tree:
        """Return the shapes of an upload. A process without clients in the first round learns them from the others."""
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


def _flat(own: Tree | None, shape: Tree, where: torch.device) -> Tensor:
    """Return a tree as one vector; zeros for a process whose clients were not sampled."""
    if own is None:
        return torch.zeros(sum(x.numel() for x in tree.leaves(shape)), dtype=torch.float64, device=where)
    ordered = tree.leaves(tree.map(lambda like, x: x, shape, own))
    flat = [x.detach().to(where).to(torch.float64).flatten() for x in ordered]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64, device=where)


def _restored(vector: Tensor, shape: Tree, device: torch.device) -> Tree:
    parts = iter(torch.split(vector, [x.numel() for x in tree.leaves(shape)]))
    return tree.map(lambda like: next(parts).view(like.shape).to(like.dtype).to(device), shape)


@contextmanager
def _others() -> Iterator[None]:
    """Report errors between processes: they mean that one of them is gone."""
    try:
        yield
    except RuntimeError as error:
        raise Deserted(
            "another process of this run is gone or silent; go on from the last checkpoint with --resume"
        ) from error


def several() -> bool:
    """Return whether this process was started as one of several."""
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return {"RANK", "MASTER_ADDR"} <= os.environ.keys() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join() -> Group:
    """Return the processes of this run, as torchrun started them; without torchrun, this process alone."""
    if not several():
        return Group()
    if not dist.is_initialized():
        _start()
    return Several()


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


def claim_last_word() -> bool:
    """Return whether this process reports why a run ends: the first that asks does."""
    if not several():
        return True
    if not dist.is_initialized():
        return os.environ["RANK"] == "0"
    try:
        return bool(dist.distributed_c10d._get_default_store().add("fedslr/told", 1) == 1)
    except RuntimeError:
        return True
