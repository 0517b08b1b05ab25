"""A node: one client with its own data and its own disk. Orders come in, reports go out. Nothing here knows Flower.

An order first settles the upload that the node keeps. If the server counted the upload, the node books it, once, in the
step that removes it. If the server did not count it, the training never happened: the client is as it was before it.
Only then does the node work. It writes an upload to its disk before it sends the upload. If the server requests an
upload twice, the node trains only once. `finish` trains the personal part after the report was sent. If the node is
killed before that, the next order trains the personal part first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedslr.channel.model_size import parameters
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import CheckpointError, FedslrError, StorageError, WireError
from fedslr.core.states import plain, restore
from fedslr.core.types import Params
from fedslr.data.federation import Federation
from fedslr.deploy import options
from fedslr.deploy.messages import (
    DONE,
    ENROL,
    LOST,
    MAX_TEXT_LENGTH,
    REFUSED,
    TRAIN,
    Order,
    Report,
    decode,
    decode_parts,
    digest,
    encode,
    first_head,
    next_head,
)
from fedslr.deploy.node_store import Evaluated, NodeStore, Page, Pending
from fedslr.deploy.node_work import Data, NodeWork, kind_of_inputs, own_data
from fedslr.deploy.scores import pack
from fedslr.engine import preflight
from fedslr.storage.locks import lock


class _Lost(Exception):
    """Node and server do not agree on which uploads were counted."""


class Node:
    """A client of a federation, with its store in a folder."""

    def __init__(self, folder: Path, client: int, data: Data, say: Callable[[str], None] = lambda text: None) -> None:
        self.client, self.data, self.say = client, data, say
        self.store = NodeStore(folder)

    def handle(self, order: Order) -> Report:
        """Carry out an order; report every error to the server."""
        try:
            with lock(self.store.folder, wait=True, mode=0o700, called="store"):
                if order.note:
                    self.say(f"the server refused the last message: {order.note}")
                return self._do(order)
        except StorageError as error:
            return self._failure(order, REFUSED, f"round {order.round + 1}: {error}", error)
        except (_Lost, CheckpointError) as lost:
            text = f"round {order.round + 1}: {lost}; asking the server to enrol this node again"
            return self._failure(order, LOST, text, lost)
        except FedslrError as error:
            return self._failure(order, REFUSED, str(error), error)

    def finish(self) -> None:
        """Train the personal part that the last training left for later.

        An error is only printed here: the next order tries again and reports the error to the server.
        """
        try:
            with lock(self.store.folder, wait=True, mode=0o700, called="store"):
                page = self.store.read()
                if page is not None and page.pending is not None and page.pending.broadcast is not None:
                    self._personalize(self._work(page), page, page.pending)
        except Exception as error:
            self.say(f"the personal part waits for the next order: {error}")

    def _do(self, order: Order) -> Report:
        if order.kind == ENROL:
            return self._enrol(order)
        page = self.store.read()
        if page is None:
            raise _Lost(f"there is nothing in {self.store.folder} yet")
        self._require_own_run(page, order)
        if (order.round, order.attempt) < page.seen:
            raise _Lost(f"the order is of round {order.round + 1}, attempt {order.attempt}, older than the last one")
        if order.client != self.client:
            raise FedslrError(
                f"this node is client {self.client}, but the order is for client {order.client}; check --node-config"
            )
        work = self._work(page)
        page = self._settle(work, page, order)
        return (self._train if order.kind == TRAIN else self._evaluate)(work, page, order)

    def _require_own_run(self, page: Page, order: Order) -> None:
        if page.run != order.run:
            raise FedslrError(
                f"{self.store.folder} belongs to another run ({page.run}); give this run a store of its own"
            )

    def _work(self, page: Page) -> NodeWork:
        return NodeWork(self.client, page.recipe, self.store.tree(page.start), self.data)

    # --- enrolment ----------------------------------------------------------------------------------------------------

    def _enrol(self, order: Order) -> Report:
        """Begin or repair the store; report the number of examples, the kind of the inputs and the address."""
        asked, start = options.from_text(order.recipe), decode(order.start)
        federation = self._checked_data(asked, start)
        page = self._kept_page()
        if page is not None:
            self._require_own_run(page, order)
        algorithm: Algorithm[Any, Any, Any] = asked.recipe.algorithm
        client = self._kept_client(page, algorithm.init_client(start))
        if page is None or order.client == self.client:
            state = {"client": plain(client), "ledger": decode(order.ledger)}
            new = Page(
                run=order.run,
                client=self.client,
                recipe=order.recipe,
                head=order.head if order.client == self.client else first_head(order.run, self.client),
                start=self.store.write(page, "start", start),
                state=self.store.write(page, "state", state),
                evaluated=page.evaluated if page else None,
                serial=page.serial if page else 0,
            )
            self.store.turn(new)
        examples, address = len(federation.clients[0].y), encode(algorithm.address(client)).data
        return self._report(order, examples=examples, inputs=kind_of_inputs(federation), address=address)

    def _checked_data(self, asked: options.Deployment, start: Params) -> Federation:
        """Return this node's data; refuse data of another shape, and a model that differs from the server's."""
        federation, problem = self.data(asked.options.classes, asked.task), asked.problem()
        own_data(federation, asked)
        for warning in preflight.check(problem.model, federation, problem.loss_function).warnings:
            self.say(warning)
        mine, theirs = ({k: (x.shape, x.dtype) for k, x in w.items()} for w in (problem.params(), start))
        if mine != theirs:
            raise FedslrError(
                f"model.name: '{asked.recipe.model.name}' has other parameters here than on the server; install "
                "the same version on both"
            )
        return federation

    def _kept_page(self) -> Page | None:
        """Return the page on the disk; if it is damaged, move all files to a folder of their own."""
        try:
            return self.store.read()
        except StorageError:
            raise
        except CheckpointError as error:
            self.say(f"{error}; the damaged store is now in {self.store.set_aside()}")
            return None

    def _kept_client(self, page: Page | None, fresh: Any) -> Any:
        """Return the client's state on the disk; if there is none, or it is damaged, return a fresh one."""
        if page is None:
            return fresh
        try:
            return restore(fresh, self.store.tree(page.state)["client"])
        except StorageError:
            raise
        except CheckpointError as error:
            if (self.store.folder / page.state.file).exists():
                self.say(f"{error}; the damaged file is now in {self.store.set_aside([page.state.file])}")
            return fresh

    # --- the pending upload -------------------------------------------------------------------------------------------

    def _settle(self, work: NodeWork, page: Page, order: Order) -> Page:
        """Book the pending upload if the server counted it; else drop it, unless this order requests it again."""
        pending, page = page.pending, replace(page, seen=(order.round, order.attempt))
        if order.head == page.head:
            if pending is None or _requests_again(order, pending):
                return page
            return self.store.turn(replace(page, pending=None))
        if pending is None or order.head != _head_after(page, pending, order.scale):
            raise _Lost("the server counted an upload that this node does not have")
        return self._book(work, page, pending, order)

    def _book(self, work: NodeWork, page: Page, pending: Pending, order: Order) -> Page:
        """Make the state after the pending upload the state that counts."""
        if pending.broadcast is not None:
            page, pending = self._personalize(work, page, pending)
        ledger, round = self.store.tree(page.state)["ledger"], work.settings.round(pending.round)
        booked = work.book(ledger, self.store.bytes(pending.upload), order.scale, round)
        state = {"client": self.store.tree(pending.trained), "ledger": booked}
        return self.store.turn(
            replace(page, head=order.head, state=self.store.write(page, "state", state), pending=None)
        )

    def _personalize(self, work: NodeWork, page: Page, pending: Pending) -> tuple[Page, Pending]:
        """Train the personal part after the pending upload; if it diverges, keep the part as it was."""
        trained, payload = self.store.tree(pending.trained), self.store.bytes(pending.broadcast)
        round = work.settings.round(pending.round)
        try:
            trained = work.personalize(trained, payload, round)
        except WireError as error:
            self.say(
                f"round {round.number + 1}, client {self.client}: training of the personal part diverged, it stays as "
                f"it was: {error}; a lower lr helps (now {round.lr:g})"
            )
        done = replace(pending, trained=self.store.write(page, "trained", trained), broadcast=None)
        return self.store.turn(replace(page, pending=done)), done

    # --- work ---------------------------------------------------------------------------------------------------------

    def _train(self, work: NodeWork, page: Page, order: Order) -> Report:
        if page.pending is None:
            pending = self._make_upload(work, page, order)
        else:
            pending = replace(page.pending, attempt=order.attempt)
        self.store.turn(replace(page, pending=pending))
        payload, address = self.store.bytes(pending.upload), self.store.bytes(pending.address)
        return self._report(order, payload=payload, digest=pending.digest, address=address)

    def _make_upload(self, work: NodeWork, page: Page, order: Order) -> Pending:
        """Train; write the upload and the client's new state to the disk, but not its ledger."""
        round = work.settings.round(order.round)
        trained, upload, address = work.local_update(self.store.tree(page.state), order.payload, round)
        data = encode(upload).data
        later = order.payload if work.algorithm.personalizes() else b""
        return Pending(
            round=order.round,
            attempt=order.attempt,
            base=digest(order.payload),
            digest=digest(data),
            trained=self.store.write(page, "trained", trained),
            upload=self.store.write_bytes(page, "upload", data),
            address=self.store.write_bytes(page, "address", encode(address).data),
            broadcast=self.store.write_bytes(page, "broadcast", later),
        )

    def _evaluate(self, work: NodeWork, page: Page, order: Order) -> Report:
        """Test the personal and the global model on this node's test data; keep the personal model."""
        member, payload = work.member(self.store.tree(page.state)), work.payload(order.payload)
        personal = work.engine.personal_model(self.client, member, payload)
        parts = work.algorithm.deployed(member.client, decode_parts(order.payload))
        found, shared = work.scores(personal), None
        if work.algorithm.has_global_model:
            model = work.payload(order.shared) if order.shared else work.algorithm.shared(payload)
            shared = work.scores(model)
        evaluated = Evaluated(
            personal=self.store.write(page, "personal", personal),
            parts=self.store.write_bytes(page, "parts", encode(parts).data),
            rounds=order.round,
            score=found[work.metrics[0].name],
            tested=len(work.data.y_test),
            inputs=kind_of_inputs(work.federation),
        )
        self.store.turn(replace(page, evaluated=evaluated))
        return self._report(order, scores=pack(shared, found), parameters=parameters(parts))

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report(self, order: Order, status: str = DONE, **fields: Any) -> Report:
        return Report(order.kind, status, order.run, self.client, order.round, order.attempt, **fields)

    def _failure(self, order: Order, status: str, text: str, error: Exception) -> Report:
        self.say(text)
        return self._report(order, status, reason=str(error)[:MAX_TEXT_LENGTH])


def _requests_again(order: Order, pending: Pending) -> bool:
    """Return whether an order requests the pending upload again."""
    return order.kind == TRAIN and order.round == pending.round and digest(order.payload) == pending.base


def _head_after(page: Page, pending: Pending, scale: float) -> str:
    """Return the head of the chain after the pending upload was counted."""
    return next_head(page.head, pending.round, pending.attempt, pending.digest, scale)
