"""A node: one client with its own data and its own disk. Orders come in, reports go out. Nothing here knows Flower.

An order first settles the upload that the node keeps. If the server counted it, the node books it, once, in the step
that removes it. If the server did not count it, the whole training never happened: the client is as it was before.
Only then does the node work. It writes an upload to its disk before anybody sees it, and makes an upload that is asked
for twice only once. The personal part is trained after the report has left, by `finish`. If the node is killed before
or meanwhile, the next order does it first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedslr.channel.model_size import parameters
from fedslr.core.errors import CheckpointError, FedslrError, StorageError, WireError
from fedslr.deploy.messages import (
    DONE,
    ENROL,
    LOST,
    MAX_TEXT_LENGTH,
    NOT_MEASURED,
    REFUSED,
    TRAIN,
    Order,
    Report,
    decode_parts,
    digest,
    encode,
    next_head,
)
from fedslr.deploy.node_enrolment import enrol, require_own_run
from fedslr.deploy.node_store import Evaluated, NodeStore, Page, Pending
from fedslr.deploy.node_work import Data, Work, kind_of_inputs
from fedslr.storage.locks import lock


class _Lost(Exception):
    """Node and server do not agree on which uploads were counted."""


class Node:
    """A client of a federation that lives in a folder."""

    def __init__(self, folder: Path, client: int, data: Data, say: Callable[[str], None] = lambda text: None) -> None:
        self.client, self.data, self.say = client, data, say
        self.store = NodeStore(folder)

    def handle(self, order: Order) -> Report:
        """Do what an order asks; report whatever goes wrong."""
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

        An error is only reported here: the next order tries again, and sends it to the server.
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
            examples, inputs, address = enrol(self.store, self.client, self.data, order, self.say)
            return self._report(order, examples=examples, inputs=inputs, address=encode(address).data)
        page = self._page(order)
        if order.client != self.client:
            raise FedslrError(f"this node is client {self.client}; the order is for client {order.client}")
        work = self._work(page)
        page = self._settle(work, page, order)
        return (self._train if order.kind == TRAIN else self._evaluate)(work, page, order)

    def _page(self, order: Order) -> Page:
        """Return the node's page, if the server knows of it."""
        page = self.store.read()
        if page is None:
            raise _Lost(f"there is nothing in {self.store.folder} yet")
        require_own_run(self.store, page, order)
        if (order.round, order.attempt) < page.seen:
            raise _Lost(f"the order is of round {order.round + 1}, attempt {order.attempt}, older than the last one")
        return page

    def _work(self, page: Page) -> Work:
        return Work(self.client, page.recipe, self.store.tree(page.start), self.data)

    # --- the upload that waits ----------------------------------------------------------------------------------------

    def _settle(self, work: Work, page: Page, order: Order) -> Page:
        """Book the waiting upload if it was counted; forget it if not, unless this order asks for it again."""
        waiting, page = page.pending, replace(page, seen=(order.round, order.attempt))
        if order.head == page.head:
            if waiting is None or _asks_again(order, waiting):
                return page
            return self.store.turn(replace(page, pending=None))
        if waiting is None or order.head != _head_after(page, waiting, order.scale):
            raise _Lost("the server counted an upload that this node does not have")
        return self._book(work, page, waiting, order)

    def _book(self, work: Work, page: Page, waiting: Pending, order: Order) -> Page:
        """Make the state after the waiting upload count."""
        if waiting.broadcast is not None:
            page, waiting = self._personalize(work, page, waiting)
        ledger, round = self.store.tree(page.state)["ledger"], work.settings.round(waiting.round)
        booked = work.book(ledger, self.store.bytes(waiting.upload), order.scale, round)
        state = {"client": self.store.tree(waiting.trained), "ledger": booked}
        return self.store.turn(
            replace(page, head=order.head, state=self.store.write(page, "state", state), pending=None)
        )

    def _personalize(self, work: Work, page: Page, waiting: Pending) -> tuple[Page, Pending]:
        """Train the personal part after the waiting upload; if it diverges, it stays as it was."""
        trained, payload = self.store.tree(waiting.trained), self.store.bytes(waiting.broadcast)
        round = work.settings.round(waiting.round)
        try:
            trained = work.personalize(trained, payload, round)
        except WireError as error:
            self.say(
                f"round {round.number + 1}, client {self.client}: training of the personal part diverged, it stays as "
                f"it was: {error}; a lower lr helps (now {round.lr:g})"
            )
        done = replace(waiting, trained=self.store.write(page, "trained", trained), broadcast=None)
        return self.store.turn(replace(page, pending=done)), done

    # --- work ---------------------------------------------------------------------------------------------------------

    def _train(self, work: Work, page: Page, order: Order) -> Report:
        if page.pending is None:
            waiting = self._make_upload(work, page, order)
        else:
            waiting = replace(page.pending, attempt=order.attempt)
        self.store.turn(replace(page, pending=waiting))
        payload, address = self.store.bytes(waiting.upload), self.store.bytes(waiting.address)
        return self._report(order, payload=payload, digest=waiting.digest, address=address)

    def _make_upload(self, work: Work, page: Page, order: Order) -> Pending:
        """Train, and write the upload and the client's new state to the disk. The ledger stays as it was."""
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

    def _evaluate(self, work: Work, page: Page, order: Order) -> Report:
        """Test the personal and the global model on this node's test data; keep the personal model."""
        member, payload = work.member(self.store.tree(page.state)), work.payload(order.payload)
        personal = work.engine.personal_model(self.client, member, payload)
        parts = work.algorithm.deployed(member.client, decode_parts(order.payload))
        accuracy = work.accuracy(personal)
        shared = NOT_MEASURED
        if work.algorithm.has_global_model:
            model = work.payload(order.shared) if order.shared else work.algorithm.shared(payload)
            shared = work.accuracy(model)
        evaluated = Evaluated(
            personal=self.store.write(page, "personal", personal),
            parts=self.store.write_bytes(page, "parts", encode(parts).data),
            rounds=order.round,
            accuracy=accuracy,
            tested=len(work.data.y_test),
            inputs=kind_of_inputs(work.federation),
        )
        self.store.turn(replace(page, evaluated=evaluated))
        return self._report(order, accuracy_personal=accuracy, accuracy_global=shared, parameters=parameters(parts))

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report(self, order: Order, status: str = DONE, **fields: Any) -> Report:
        return Report(order.kind, status, order.run, self.client, order.round, order.attempt, **fields)

    def _failure(self, order: Order, status: str, text: str, error: Exception) -> Report:
        self.say(text)
        return self._report(order, status, reason=str(error)[:MAX_TEXT_LENGTH])


def _asks_again(order: Order, waiting: Pending) -> bool:
    """Return whether an order asks for the upload that waits."""
    return order.kind == TRAIN and order.round == waiting.round and digest(order.payload) == waiting.base


def _head_after(page: Page, waiting: Pending, scale: float) -> str:
    """Return the head of the chain after the waiting upload was counted."""
    return next_head(page.head, waiting.round, waiting.attempt, waiting.digest, scale)
