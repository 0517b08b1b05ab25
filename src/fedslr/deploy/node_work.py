"""The work of a node: training and evaluating one client with the engine of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from fedslr.core import factored
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, WireError
from fedslr.core.states import plain, restore
from fedslr.core.tree import Tree
from fedslr.core.types import Params, Payload, Round
from fedslr.data.client_data import ClientData
from fedslr.data.federation import Federation
from fedslr.deploy import options
from fedslr.deploy.messages import EIGHT_BIT, NUMBERS, decode
from fedslr.deploy.uploads import scaled
from fedslr.engine.aggregation import FULL_SHARE, book
from fedslr.engine.eager import Eager
from fedslr.engine.workload import Member, Workload
from fedslr.tasks.metrics import Metric
from fedslr.tasks.scoring import Scores

Data = Callable[[int, str], Federation]
"""A function of the number of classes and the task that returns this node's data as a federation of one client."""


def own_data(federation: Federation, asked: options.Deployment) -> ClientData:
    """Return this node's data; refuse data of another shape than the federation's."""
    if federation.input_shape != asked.options.shape:
        ours = "x".join(map(str, federation.input_shape))
        raise FedslrError(
            f"data: the inputs of this node have shape {ours}, those of the federation {asked.options.inputs}; give "
            "this node data of the federation's shape"
        )
    return federation.clients[0]


def kind_of_inputs(federation: Federation) -> str:
    """Return the kind of a node's inputs."""
    return NUMBERS if federation.normalization is None else EIGHT_BIT


class NodeWork:
    """A method, a problem and one client's data, made from the recipe that the node was enrolled with."""

    def __init__(self, client: int, recipe: str, start: Params, data: Data) -> None:
        self.client, self.asked, self._load = client, options.from_text(recipe), data
        self.algorithm: Algorithm[Any, Any, Any] = self.asked.recipe.algorithm
        self.settings = self.asked.recipe.settings
        self.device = self.settings.torch_device()
        self._fresh = self.algorithm.init_client(start), self.algorithm.init_ledger(start)

    @cached_property
    def federation(self) -> Federation:
        return self._load(self.asked.options.classes, self.asked.task)

    @cached_property
    def data(self) -> ClientData:
        return own_data(self.federation, self.asked)

    @cached_property
    def engine(self) -> Eager:
        # The engine only looks up clients by number, and a node has no other client.
        clients: Any = {self.client: self.data.to(self.device, self.settings.torch_dtype())}
        work = Workload(
            algorithm=self.algorithm,
            problem=self.asked.problem(),
            scorer=self.asked.scorer(),
            clients=clients,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            crop_padding=self.asked.options.crop_padding,
            normalization=self.federation.normalization,
        )
        return Eager(work)

    def member(self, state: Tree) -> Member:
        """Return the client with a stored state."""
        placed = factored.to_device(state, self.device)
        client, ledger = self._fresh
        return Member(restore(client, placed["client"]), restore(ledger, placed["ledger"]), {})

    def payload(self, data: bytes) -> Payload:
        """Return the decoded payload of a message on the node's device."""
        return factored.to_device(decode(data), self.device)

    def local_update(self, state: Tree, payload: bytes, round: Round) -> tuple[Tree, Payload, Payload]:
        """Return the client's new state as a tree, its upload and its address."""
        try:
            member, received = self.member(state), self.payload(payload)
            client, upload, address = self.engine.local_update(self.client, member, received, round)
            factored.require_finite({"state": plain(client), "upload": upload})
        except WireError as error:
            where = f"round {round.number + 1}, client {self.client}"
            raise FedslrError(f"{where}: training diverged: {error}; a lower lr helps (now {round.lr:g})") from error
        return plain(client), upload, address

    def personalize(self, trained: Tree, payload: bytes, round: Round) -> Tree:
        """Return the client's state after its personal phase as a tree; raise a WireError if it diverged."""
        client = restore(self._fresh[0], factored.to_device(trained, self.device))
        made = plain(self.engine.personalize(self.client, client, self.payload(payload), round))
        factored.require_finite({"state": made})
        return made

    def book(self, ledger: Tree, upload: bytes, scale: float, round: Round) -> Tree:
        """Return the client's ledger after an upload was counted, scaled by the norm bound."""
        counted = scaled(self.algorithm, decode(upload), scale)
        return plain(book(self.algorithm, restore(self._fresh[1], ledger), counted, FULL_SHARE, round))

    @property
    def metrics(self) -> Sequence[Metric]:
        """The metrics of an evaluation, the headline first."""
        return self.engine.work.scorer.metrics

    def scores(self, params: Params) -> Scores:
        """Return the scores of a model on this node's data."""
        return self.engine.scores(params, [self.client])[0]
