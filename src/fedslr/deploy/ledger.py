"""What the server keeps on its disk: one SQLite file, and tensors in files that its transactions name.

    RUN/
      ledger.sqlite                      the run, its clients, every upload that was counted, every finished round
      ledger/server-000012.safetensors   the server's state after round 12
      ledger/account-000003-000012.…     what client 3 must have in its books, as of the last time it was counted
      ledger/start-000000.…              the initial model

A round is one transaction: the server's state, every upload that was counted with its share, the heads of the chains
and the record. Files are written and flushed before it, and files that nothing names are removed after it, so whatever
moment the server is killed in, the last transaction stands.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedslr.core.durable import MAKE_ROOM, disk_errors, sync_folder, write_whole
from fedslr.core.errors import CheckpointError, FedslrError
from fedslr.core.tree import Tree
from fedslr.storage.run_folder import LEDGER
from fedslr.storage.tree_files import Entry, read_tree, write_tree

FORMAT = 1
KEPT = 20
"""Nodes of which it is remembered why a message of theirs did not count."""
LONGEST = 300
"""Letters of such a reason."""
FILE, FOLDER = LEDGER, "ledger"

TABLES = """
CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE client (
    number INTEGER PRIMARY KEY,
    identity TEXT UNIQUE,
    examples INTEGER NOT NULL,
    head TEXT NOT NULL,
    share REAL NOT NULL DEFAULT 0,
    account TEXT,
    leaving INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE counted (
    client INTEGER NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    digest TEXT NOT NULL,
    share REAL NOT NULL,
    PRIMARY KEY (client, round)
);
CREATE TABLE round (number INTEGER PRIMARY KEY, record TEXT NOT NULL, evaluated INTEGER NOT NULL DEFAULT 0);
"""


class Member(NamedTuple):
    """A client as the server knows it."""

    number: int
    identity: str | None
    """Which node it is: its key. None: the next node that claims the number."""
    examples: int
    head: str
    share: float
    """Of its last upload that was counted."""
    account: Entry | None
    """The fields of its state that the server mirrors; None: as they began."""
    leaving: bool


class Counted(NamedTuple):
    """An upload that was counted, and what follows from it."""

    client: int
    round: int
    attempt: int
    digest: str
    share: float
    head: str
    account: Tree


class Ledger:
    """The books of a federation."""

    def __init__(self, run: Path) -> None:
        self.path, self.folder = run / FILE, run / FOLDER
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            if not self.path.exists():
                self.path.touch(0o600)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=60)
            self._db.execute("PRAGMA synchronous=EXTRA")
            self._db.execute("PRAGMA foreign_keys=ON")
            # A file that is there but empty is what a server leaves that was killed before its first transaction.
            self.exists = bool(self._db.execute("SELECT 1 FROM sqlite_master WHERE name='fact'").fetchone())
        except (OSError, sqlite3.Error) as error:
            raise CheckpointError(f"{self.path} cannot be used: {error}") from error
        if self.exists and self.fact("format") != FORMAT:
            raise CheckpointError(f"{self.path} has format {self.fact('format')}; this program reads {FORMAT}")

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or none of it, and on the disk when it is done."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                # Where the disk is full, the library has done that already.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.IntegrityError as error:
            raise FedslrError(f"{self.path}: refused: {error}") from error
        except sqlite3.Error as error:
            # Only what the library itself refuses has a code.
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            room = f"; {MAKE_ROOM}" if full else ""
            raise CheckpointError(f"{self.path}: {error}{room}") from error

    # --- facts -------------------------------------------------------------------------------------------------------

    def create(self, run: str, text: str, start: Tree, server: Tree, num_clients: int) -> None:
        """Begin a run of which nothing was counted yet."""
        facts = {"start": self._write("start", 0, start), "server": self._write("server", 0, server)}
        sync_folder(self.folder)
        with self.transaction():
            for statement in TABLES.split(";"):
                self._db.execute(statement)
            for name, value in {"run": run, "recipe": text, "done": 0, "attempt": 0, **facts}.items():
                self._set(name, value)
            self._set("num_clients", num_clients)
            self._set("format", FORMAT)
        self.exists = True

    def fact(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _set(self, name: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, json.dumps(value)))

    def change_recipe(self, text: str) -> None:
        with self.transaction():
            self._set("recipe", text)

    def note_inputs(self, kind: str) -> None:
        """Of what kind the inputs of all nodes are: that of the first one."""
        with self.transaction():
            self._set("inputs", kind)

    def next_attempt(self) -> int:
        """A round is tried once more."""
        with self.transaction():
            attempt = int(self.fact("attempt")) + 1
            self._set("attempt", attempt)
        return attempt

    def tree(self, name: str) -> Tree:
        """The server's state, or the initial model."""
        return read_tree(self.folder, Entry(*self.fact(name)))

    # --- clients -----------------------------------------------------------------------------------------------------

    def members(self) -> dict[int, Member]:
        """Every client, by its number, in order."""
        rows = self._db.execute("SELECT * FROM client ORDER BY number").fetchall()
        return {row[0]: _member(*row) for row in rows}

    def account(self, member: Member) -> Tree:
        """What the server mirrors of a client; nothing if that is as it began."""
        return {} if member.account is None else read_tree(self.folder, member.account)

    def bind(self, number: int, identity: str, examples: int) -> None:
        """A known client's node said who it is."""
        with self.transaction():
            self._db.execute(
                "UPDATE client SET identity = ?, examples = ? WHERE number = ?", (identity, examples, number)
            )

    def add(self, member: Member, server: Tree | None = None, num_clients: int = 0) -> None:
        """A client joins; once the run has begun, the server's state changes with it."""
        with self._with_server(server, num_clients, f"joined-{member.number:06d}"):
            self._db.execute(
                "INSERT INTO client (number, identity, examples, head) VALUES (?, ?, ?, ?)",
                (member.number, member.identity, member.examples, member.head),
            )

    def remove(self, number: int, server: Tree, num_clients: int) -> None:
        """A client leaves, and its books with it; its node does not come back by itself."""
        node = self.members()[number].identity
        with self._with_server(server, num_clients, f"left-{number:06d}"):
            self._db.execute("DELETE FROM client WHERE number = ?", (number,))
            self._set("removed", [*self.removed(), *([] if node is None else [node])])

    def removed(self) -> list[str]:
        """Nodes of clients that left."""
        return list(self.fact("removed") or [])

    def refused(self) -> dict[str, tuple[int, str]]:
        """By who sent it: the round and the reason of the last message that did not count, the newest last."""
        return {who: (number, why) for who, (number, why) in (self.fact("refused") or {}).items()}

    def note_refusal(self, who: str, number: int, why: str) -> None:
        """Remember why a message did not count, for people who look into it; some of the words may be the sender's."""
        why = "".join(c if c.isprintable() else "?" for c in why[:LONGEST])
        found = self.refused()
        if found.pop(who, None) != (number, why):
            with self.transaction():
                self._set("refused", dict([*found.items(), (who, (number, why))][-KEPT:]))

    def forget_refusals(self, *senders: str) -> None:
        """They were taken in, or counted, since."""
        found = self.refused()
        left = {who: why for who, why in found.items() if who not in senders}
        if left != found:
            with self.transaction():
                self._set("refused", left)

    @contextlib.contextmanager
    def _with_server(self, server: Tree | None, num_clients: int, why: str) -> Iterator[None]:
        entry = None if server is None else self._write(f"server-{why}", int(self.fact("done")), server)
        sync_folder(self.folder)
        with self.transaction():
            yield
            if entry is not None:
                self._set("server", entry)
                self._set("num_clients", num_clients)
        self._tidy()

    def ask_to_leave(self, number: int) -> None:
        """Have a client leave before the next round."""
        self._require(number)
        if all(m.leaving for m in self.members().values() if m.number != number):
            raise FedslrError(f"client: got {number}, which is the last one that stays; a federation needs one")
        self._set_leaving(number, True)

    def ask_to_stay(self, number: int) -> None:
        """Take that back."""
        self._require(number)
        self._set_leaving(number, False)

    def _set_leaving(self, number: int, leaving: bool) -> None:
        with self.transaction():
            self._db.execute("UPDATE client SET leaving = ? WHERE number = ?", (leaving, number))

    def release(self, number: int) -> None:
        """Let the next node that claims this number have it: its key was lost or changed."""
        self._require(number)
        with self.transaction():
            self._db.execute("UPDATE client SET identity = NULL WHERE number = ?", (number,))

    def _require(self, number: int) -> None:
        known = self.members()
        if number not in known:
            raise FedslrError(f"client: got {number}, expected one of {', '.join(map(str, known)) or 'none yet'}")

    # --- rounds ------------------------------------------------------------------------------------------------------

    def commit(
        self, done: int, server: Tree, counted: list[Counted], record: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> None:
        """A round is over: `done` rounds are behind us."""
        entry = self._write("server", done, server)
        accounts = [self._write(f"account-{c.client:06d}", done, c.account) if c.account else None for c in counted]
        sync_folder(self.folder)
        with self.transaction():
            self._set("done", done)
            self._set("attempt", 0)
            self._set("server", entry)
            self._set("seconds", seconds)
            self._db.execute("INSERT INTO round (number, record) VALUES (?, ?)", (done, json.dumps(record)))
            for c, account in zip(counted, accounts, strict=True):
                self._db.execute(
                    "INSERT INTO counted VALUES (?, ?, ?, ?, ?)", (c.client, c.round, c.attempt, c.digest, c.share)
                )
                self._db.execute(
                    "UPDATE client SET head = ?, share = ?, account = ? WHERE number = ?",
                    (c.head, c.share, account and json.dumps(account), c.client),
                )
        self._tidy()

    def evaluated(self, done: int, record: Mapping[str, Any], parameters: list[int]) -> None:
        """What the evaluation after a round found, and what it says of the models' sizes."""
        with self.transaction():
            self._set("parameters", parameters)
            self._db.execute("UPDATE round SET record = ?, evaluated = 1 WHERE number = ?", (json.dumps(record), done))

    def is_evaluated(self, done: int) -> bool:
        row = self._db.execute("SELECT evaluated FROM round WHERE number = ?", (done,)).fetchone()
        return row is None or bool(row[0])

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(row[0]) for row in self._db.execute("SELECT record FROM round ORDER BY number")]

    def counted(self) -> list[tuple[int, int, int, str, float]]:
        """Client, round, attempt, digest and share of every upload that was counted, in order."""
        return self._db.execute("SELECT * FROM counted ORDER BY round, client").fetchall()

    # --- files -------------------------------------------------------------------------------------------------------

    def _write(self, kind: str, version: int, tree: Tree) -> Entry:
        return write_tree(self.folder / f"{kind}-{version:06d}.safetensors", tree, write_whole)

    def _tidy(self) -> None:
        """Remove files that nothing names any more."""
        named = {self.fact("start")[0], self.fact("server")[0]}
        named |= {m.account.file for m in self.members().values() if m.account is not None}
        with disk_errors(self.folder):
            for path in self.folder.iterdir():
                if path.name not in named:
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def books(run: Path) -> Iterator[Ledger | None]:
    """The ledger of a run folder, to be looked into; None if no federation was begun there."""
    if not (run / FILE).exists():
        yield None
        return
    with contextlib.closing(Ledger(run)) as ledger:
        yield ledger if ledger.exists else None


def _member(
    number: int, identity: str | None, examples: int, head: str, share: float, account: str | None, leaving: int
) -> Member:
    entry = None if account is None else Entry(*json.loads(account))
    return Member(number, identity, examples, head, share, entry, bool(leaving))
