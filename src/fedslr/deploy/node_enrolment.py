"""How a node becomes a client of a run, or comes back to it with the ledger that the server has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import CheckpointError, FedslrError, StorageError
from fedslr.core.states import plain, restore
from fedslr.core.tree import Tree
from fedslr.core.types import Params, Payload
from fedslr.deploy import options
from fedslr.deploy.messages import Order, decode, first_head
from fedslr.deploy.node_store import NodeStore, Page
from fedslr.deploy.node_work import Data, kind_of_inputs, own_data
from fedslr.engine import preflight

Say = Callable[[str], None]


def enrol(store: NodeStore, client: int, data: Data, order: Order, say: Say) -> tuple[int, str, Payload]:
    """Begin or mend a node's store; return its number of examples, the kind of its inputs and its address."""
    asked, start = options.from_text(order.recipe), decode(order.start)
    examples, inputs = _check(asked, start, data, say)
    page = None
    try:
        page = store.read()
    except StorageError:
        raise
    except CheckpointError as error:
        say(f"{error}; what is there is kept in {store.set_aside()}")
    if page is not None:
        require_own_run(store, page, order)
    algorithm: Algorithm[Any, Any, Any] = asked.recipe.algorithm
    state = _kept_client(store, page, algorithm.init_client(start), say)
    if page is None or order.client == client:
        _begin(store, page, order, client, start, {"client": plain(state), "ledger": decode(order.ledger)})
    return examples, inputs, algorithm.address(state)


def require_own_run(store: NodeStore, page: Page, order: Order) -> None:
    """Refuse an order of another run than the store's."""
    if page.run != order.run:
        raise FedslrError(f"{store.folder} belongs to another run ({page.run}); give this one its own folder")


def _check(asked: options.Deployment, start: Params, data: Data, say: Say) -> tuple[int, str]:
    """Return the node's number of examples and the kind of its inputs; refuse data or a model of another kind."""
    federation, problem = data(asked.options.classes), asked.problem()
    held = own_data(federation, asked)
    for warning in preflight.check(problem.model, federation, problem.loss_function):
        say(warning)
    mine, theirs = ({k: (x.shape, x.dtype) for k, x in w.items()} for w in (problem.params(), start))
    if mine != theirs:
        name = asked.recipe.model.name
        raise FedslrError(f"model.name: '{name}' is another model here than at the server; install the same version")
    return len(held.y), kind_of_inputs(federation)


def _begin(store: NodeStore, page: Page | None, order: Order, client: int, start: Params, state: Tree) -> None:
    """Write the first page of a client, or the page of a client that comes back."""
    new = Page(
        run=order.run,
        client=client,
        recipe=order.recipe,
        head=order.head if order.client == client else first_head(order.run, client),
        start=store.write(page, "start", start),
        state=store.write(page, "state", state),
        evaluated=page.evaluated if page else None,
        serial=page.serial if page else 0,
    )
    store.turn(new)


def _kept_client(store: NodeStore, page: Page | None, fresh: Any, say: Say) -> Any:
    """Return the client's state on the disk; if it is damaged, put it aside and return a fresh one."""
    if page is None:
        return fresh
    try:
        return restore(fresh, store.tree(page.state)["client"])
    except StorageError:
        raise
    except CheckpointError as error:
        if (store.folder / page.state.file).exists():
            say(f"{error}; it is kept in {store.set_aside([page.state.file])}")
        return fresh
