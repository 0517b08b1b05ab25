"""The server's database: one SQLite file, and tensors in files that its transactions name.

    RUN/
      ledger.sqlite                      the run, its clients, all counted uploads and all finished rounds
      ledger/server-000012.safetensors   the server's state and the mean ledger
      ledger/account-000013.…            the server's copy of one client's ledger and address
      ledger/start-000001.…              the initial model

One transaction ends a round: it changes the server's state, the mean ledger, the counted uploads with their scales, the
accounts of the clients, the heads of their chains and the record. The server writes and flushes new files before the
transaction, under names that it has not used before. After the transaction it removes the files that the database no
longer names. If the server is killed, the result of the last transaction remains.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedslr.core.durable import disk_errors, sync_folder, write_whole
from fedslr.core.errors import MAKE_ROOM, CheckpointError, FedslrError
from fedslr.core.tree import Tree
from fedslr.storage.run_folder import FEDERATION_DATABASE
from fedslr.storage.tree_files import Entry, read_tree, write_tree

FORMAT = 1
ARRAYS_FOLDER = "ledger"
"""The folder of the arrays that the database names."""
MAX_REFUSED_SENDERS = 20
"""The database keeps the last refusal of each of this many senders."""
MAX_REASON_LENGTH = 300

TABLES = """
CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE client (
    number INTEGER PRIMARY KEY,
    identity TEXT UNIQUE,
    examples INTEGER NOT NULL,
    head TEXT NOT NULL,
    scale REAL NOT NULL DEFAULT 1,
    account TEXT,
    leaving INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE counted (
    client INTEGER NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    digest TEXT NOT NULL,
    scale REAL NOT NULL,
    PRIMARY KEY (client, round)
);
CREATE TABLE round (number INTEGER PRIMARY KEY, record TEXT NOT NULL, evaluated INTEGER NOT NULL DEFAULT 0);
"""


class Enrolled(NamedTuple):
    """A client of the federation, as the database has it."""

    number: int
    identity: str | None
    """The identity of the client's node; None if the next node that claims the number gets it."""
    examples: int
    head: str
    scale: float = 1.0
    """The factor by which the norm bound multiplied the last counted upload."""
    account: Entry | None = None
    """The file with the server's copy of the client's ledger and address; None if no upload was counted yet."""
    leaving: bool = False


class Counted(NamedTuple):
    """A counted upload, and the client's head and account after it."""

    client: int
    round: int
    attempt: int
    digest: str
    scale: float
    head: str
    account: Tree | None


class Database:
    """The database of a federation and the files that it names."""

    def __init__(self, run: Path) -> None:
        self.path, self.folder = run / FEDERATION_DATABASE, run / ARRAYS_FOLDER
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            self.path.touch(0o600)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=60)
            self._db.execute("PRAGMA synchronous=EXTRA")
            # A server that was killed before its first transaction leaves an empty file.
            self.exists = bool(self._db.execute("SELECT 1 FROM sqlite_master WHERE name='fact'").fetchone())
        except (OSError, sqlite3.Error) as error:
            raise CheckpointError(f"{self.path}: cannot open this database: {error}") from error
        if self.exists and self.fact("format") != FORMAT:
            raise CheckpointError(
                f"{self.path}: the database has format {self.fact('format')}, but this version of fedslr reads format "
                f"{FORMAT}; use the version that began the run"
            )
        numbers = (int(path.stem.rpartition("-")[2]) for path in self.folder.glob("*-*.safetensors"))
        self._files = max(numbers, default=0)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all changes of a block durably, or none of them."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                # SQLite itself rolls back when the disk is full.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            # Only errors that SQLite itself reports have a code.
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            room = f"; {MAKE_ROOM}" if full else ""
            raise CheckpointError(f"{self.path}: {error}{room}") from error

    # --- facts -------------------------------------------------------------------------------------------------------

    def create(self, run: str, recipe: str, start: Tree, server: Tree) -> None:
        """Write the state of a run before its first round."""
        files = {"start": self._write("start", start), "server": self._write("server", server)}
        sync_folder(self.folder)
        with self.transaction():
            for statement in TABLES.split(";"):
                self._db.execute(statement)
            self._set(format=FORMAT, run=run, recipe=recipe, done=0, attempt=0, **files)
        self.exists = True

    def fact(self, name: str) -> Any:
        """Return a named value; None if it was never set."""
        row = self._db.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def note(self, name: str, value: Any) -> None:
        """Set one named value in a transaction of its own."""
        with self.transaction():
            self._set(**{name: value})

    def _set(self, **facts: Any) -> None:
        for name, value in facts.items():
            self._db.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, json.dumps(value)))

    def next_attempt(self) -> int:
        """Return the number of a new attempt at the round."""
        attempt = int(self.fact("attempt")) + 1
        self.note("attempt", attempt)
        return attempt

    def tree(self, name: str) -> Tree:
        """Return the tree `server` or `start`."""
        return read_tree(self.folder, Entry(*self.fact(name)))

    # --- clients -----------------------------------------------------------------------------------------------------

    def members(self) -> dict[int, Enrolled]:
        """Return all clients in the order of their numbers."""
        rows = self._db.execute("SELECT * FROM client ORDER BY number").fetchall()
        entries = [None if row[5] is None else Entry(*json.loads(row[5])) for row in rows]
        return {
            row[0]: Enrolled._make((*row[:5], entry, bool(row[6]))) for row, entry in zip(rows, entries, strict=True)
        }

    def account(self, client: Enrolled) -> Tree | None:
        """Return the server's copy of a client's ledger and address; None if no upload was counted yet."""
        return None if client.account is None else read_tree(self.folder, client.account)

    def set_account(self, number: int, account: Tree) -> None:
        """Replace the server's copy of a client's ledger and address."""
        entry = self._write("account", account)
        with self._changing_server(None):
            self._update(number, account=json.dumps(entry))

    def bind(self, number: int, identity: str, examples: int, server: Tree | None = None) -> None:
        """Give the number of a known client to a node; the server's state changes if the client's weight does."""
        with self._changing_server(server):
            self._update(number, identity=identity, examples=examples)

    def add(self, client: Enrolled, server: Tree | None = None) -> None:
        """Let a client join; once the run has begun, the server's state changes too."""
        with self._changing_server(server):
            self._db.execute(
                "INSERT INTO client (number, identity, examples, head) VALUES (?, ?, ?, ?)",
                (client.number, client.identity, client.examples, client.head),
            )

    def remove(self, number: int, server: Tree | None) -> None:
        """Let a client leave with its account; the server does not ask its node again."""
        node = self.members()[number].identity
        with self._changing_server(server):
            self._db.execute("DELETE FROM client WHERE number = ?", (number,))
            self._set(removed=[*self.removed(), *([] if node is None else [node])])

    def _update(self, number: int, **columns: Any) -> None:
        for name, value in columns.items():
            self._db.execute(f"UPDATE client SET {name} = ? WHERE number = ?", (value, number))

    @contextlib.contextmanager
    def _changing_server(self, server: Tree | None) -> Iterator[None]:
        """Run a block in a transaction that also replaces the server's state, unless `server` is None."""
        entry = None if server is None else self._write("server", server)
        sync_folder(self.folder)
        with self.transaction():
            yield
            if entry is not None:
                self._set(server=entry)
        self._remove_unnamed_files()

    def removed(self) -> list[str]:
        """Return the identities of the nodes of clients that left."""
        return list(self.fact("removed") or [])

    def set_leaving(self, number: int, leaving: bool) -> None:
        """Have a client leave before the next round, or let it stay after all."""
        with self._choosing(number) as known:
            if leaving and all(c.leaving for c in known.values() if c.number != number):
                raise FedslrError(
                    f"client: client {number} is the last one that stays, and a federation needs one; let another "
                    "client join or stay first"
                )
            self._update(number, leaving=leaving)

    def release(self, number: int) -> None:
        """Give a client's number to the next node that claims it."""
        with self._choosing(number):
            self._update(number, identity=None)

    @contextlib.contextmanager
    def _choosing(self, number: int) -> Iterator[dict[int, Enrolled]]:
        """Run a block in a transaction on all clients; refuse the number of an unknown client."""
        with self.transaction():
            known = self.members()
            if number not in known:
                raise FedslrError(f"client: got {number}, expected one of {', '.join(map(str, known)) or 'none yet'}")
            yield known

    # --- refused messages --------------------------------------------------------------------------------------------

    def refused(self) -> dict[str, tuple[int, str]]:
        """Return by sender the round and the reason of its last refused message, the newest last."""
        return {sender: (number, why) for sender, (number, why) in (self.fact("refused") or {}).items()}

    def note_refusal(self, sender: str, number: int, why: str) -> None:
        """Keep the reason of a refusal; the sender may have written some of the words."""
        why = "".join(c if c.isprintable() else "?" for c in why[:MAX_REASON_LENGTH])
        found = self.refused()
        if found.pop(sender, None) != (number, why):
            self.note("refused", dict([*found.items(), (sender, (number, why))][-MAX_REFUSED_SENDERS:]))

    def forget_refusals(self, *senders: str) -> None:
        """Forget the refusals of senders whose later messages the server accepted."""
        found = self.refused()
        if not found.keys().isdisjoint(senders):
            self.note("refused", {sender: why for sender, why in found.items() if sender not in senders})

    # --- rounds ------------------------------------------------------------------------------------------------------

    def commit(
        self, done: int, server: Tree, counted: list[Counted], record: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> None:
        """End a round in one transaction; `done` rounds are finished afterwards."""
        entry = self._write("server", server)
        accounts = [None if c.account is None else json.dumps(self._write("account", c.account)) for c in counted]
        sync_folder(self.folder)
        with self.transaction():
            self._set(done=done, attempt=0, server=entry, seconds=seconds)
            self._db.execute("INSERT INTO round (number, record) VALUES (?, ?)", (done, json.dumps(record)))
            for c, account in zip(counted, accounts, strict=True):
                self._db.execute("INSERT INTO counted VALUES (?, ?, ?, ?, ?)", c[:5])
                self._update(c.client, head=c.head, scale=c.scale, account=account)
        self._remove_unnamed_files()

    def save_evaluation(self, done: int, record: Mapping[str, Any]) -> None:
        """Replace a round's record by the one that its evaluation completed."""
        with self.transaction():
            self._db.execute("UPDATE round SET record = ?, evaluated = 1 WHERE number = ?", (json.dumps(record), done))

    def is_evaluated(self, done: int) -> bool:
        """Return whether the last of so many rounds was evaluated; true before the first round."""
        row = self._db.execute("SELECT evaluated FROM round WHERE number = ?", (done,)).fetchone()
        return row is None or bool(row[0])

    def records(self) -> list[dict[str, Any]]:
        """Return the records of all finished rounds."""
        return [json.loads(row[0]) for row in self._db.execute("SELECT record FROM round ORDER BY number")]

    def counted(self) -> list[tuple[int, int, int, str, float]]:
        """Return client, round, attempt, digest and scale of every counted upload, in order."""
        return self._db.execute("SELECT * FROM counted ORDER BY round, client").fetchall()

    # --- files -------------------------------------------------------------------------------------------------------

    def _write(self, kind: str, tree: Tree) -> Entry:
        """Write a file under a new name; it counts once a transaction names it."""
        self._files += 1
        return write_tree(self.folder / f"{kind}-{self._files:06d}.safetensors", tree, write_whole)

    def _remove_unnamed_files(self) -> None:
        named = {self.fact("start")[0], self.fact("server")[0]}
        named |= {c.account.file for c in self.members().values() if c.account is not None}
        with disk_errors(self.folder):
            for path in self.folder.iterdir():
                if path.name not in named:
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def open_database(run: Path) -> Iterator[Database | None]:
    """Open the database of a run folder for a block; give None if no federation was begun there."""
    if not (run / FEDERATION_DATABASE).exists():
        yield None
        return
    with contextlib.closing(Database(run)) as database:
        yield database if database.exists else None
