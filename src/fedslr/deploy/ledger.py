"""The server's files: one SQLite database, and tensors in files that its transactions name.

    RUN/
      ledger.sqlite                      the run, its clients, every counted upload, every finished round
      ledger/server-000012.safetensors   the server's state and the mean ledger
      ledger/account-000013.…            the server's copy of one client's ledger and address
      ledger/start-000001.…              the initial model

A round is one transaction: the server's state, the mean ledger, every counted upload with its scale, the accounts of
the clients, the heads of their chains and the record. Files are written and flushed before the transaction, under names
that no earlier one used. Files that nothing names are removed after it. Whenever the server is killed, the last
transaction stands.
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
FILE, FOLDER = LEDGER, "ledger"
MAX_REFUSED_SENDERS = 20
"""The database keeps the last refusals of so many senders."""
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
    """The node's key; None gives the number to the next node that claims it."""
    examples: int
    head: str
    scale: float = 1.0
    """The factor by which the norm bound multiplied the last counted upload."""
    account: Entry | None = None
    """The file with the server's copy of the client's ledger and address; None if they are as they began."""
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


class Ledger:
    """The database of a federation."""

    def __init__(self, run: Path) -> None:
        self.path, self.folder = run / FILE, run / FOLDER
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            if not self.path.exists():
                self.path.touch(0o600)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=60)
            self._db.execute("PRAGMA synchronous=EXTRA")
            self._db.execute("PRAGMA foreign_keys=ON")
            # A server that was killed before its first transaction leaves an empty file.
            self.exists = bool(self._db.execute("SELECT 1 FROM sqlite_master WHERE name='fact'").fetchone())
        except (OSError, sqlite3.Error) as error:
            raise CheckpointError(f"{self.path} cannot be used: {error}") from error
        if self.exists and self.fact("format") != FORMAT:
            raise CheckpointError(f"{self.path} has format {self.fact('format')}; this program reads {FORMAT}")
        self._files = max(
            (int(path.stem.rpartition("-")[2]) for path in self.folder.glob("*-*.safetensors")), default=0
        )

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all of a block, durably, or none of it."""
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
        """Begin a run before its first round."""
        files = {"start": self._write("start", start), "server": self._write("server", server)}
        sync_folder(self.folder)
        facts = {"format": FORMAT, "run": run, "recipe": recipe, "done": 0, "attempt": 0, **files}
        with self.transaction():
            for statement in TABLES.split(";"):
                self._db.execute(statement)
            for name, value in facts.items():
                self._set(name, value)
        self.exists = True

    def fact(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def note(self, name: str, value: Any) -> None:
        """Set one fact."""
        with self.transaction():
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
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
        """Return every client, in the order of the numbers."""
        rows = self._db.execute("SELECT * FROM client ORDER BY number").fetchall()
        return {row[0]: _enrolled(*row) for row in rows}

    def account(self, client: Enrolled) -> Tree | None:
        """Return the server's copy of a client's ledger and address; None if they are as they began."""
        return None if client.account is None else read_tree(self.folder, client.account)

    def set_account(self, number: int, account: Tree) -> None:
        """Replace the server's copy of a client's ledger and address."""
        entry = self._write("account", account)
        with self._changing(None):
            self._db.execute("UPDATE client SET account = ? WHERE number = ?", (json.dumps(entry), number))

    def bind(self, number: int, identity: str, examples: int, server: Tree | None = None) -> None:
        """Give the number of a known client to a node; the server's state changes if the client's weight does."""
        with self._changing(server):
            self._db.execute(
                "UPDATE client SET identity = ?, examples = ? WHERE number = ?", (identity, examples, number)
            )

    def add(self, client: Enrolled, server: Tree | None = None) -> None:
        """Let a client join; once the run has begun, the server's state changes with it."""
        with self._changing(server):
            self._db.execute(
                "INSERT INTO client (number, identity, examples, head) VALUES (?, ?, ?, ?)",
                (client.number, client.identity, client.examples, client.head),
            )

    def remove(self, number: int, server: Tree | None) -> None:
        """Let a client leave with its account; its node is not asked again."""
        node = self.members()[number].identity
        with self._changing(server):
            self._db.execute("DELETE FROM client WHERE number = ?", (number,))
            self._set("removed", [*self.removed(), *([] if node is None else [node])])

    @contextlib.contextmanager
    def _changing(self, server: Tree | None) -> Iterator[None]:
        """Change the table of clients and, unless it is None, the server's state in one transaction."""
        entry = None if server is None else self._write("server", server)
        sync_folder(self.folder)
        with self.transaction():
            yield
            if entry is not None:
                self._set("server", entry)
        self._tidy()

    def removed(self) -> list[str]:
        """Return the identities of the nodes of clients that left."""
        return list(self.fact("removed") or [])

    def ask_to_leave(self, number: int) -> None:
        """Have a client leave before the next round."""
        self._require(number)
        if all(c.leaving for c in self.members().values() if c.number != number):
            raise FedslrError(f"client: got {number}, which is the last one that stays; a federation needs one")
        self._set_leaving(number, True)

    def ask_to_stay(self, number: int) -> None:
        """Undo `ask_to_leave`."""
        self._require(number)
        self._set_leaving(number, False)

    def _set_leaving(self, number: int, leaving: bool) -> None:
        with self.transaction():
            self._db.execute("UPDATE client SET leaving = ? WHERE number = ?", (leaving, number))

    def release(self, number: int) -> None:
        """Give a client's number to the next node that claims it."""
        self._require(number)
        with self.transaction():
            self._db.execute("UPDATE client SET identity = NULL WHERE number = ?", (number,))

    def _require(self, number: int) -> None:
        known = self.members()
        if number not in known:
            raise FedslrError(f"client: got {number}, expected one of {', '.join(map(str, known)) or 'none yet'}")

    # --- refused messages --------------------------------------------------------------------------------------------

    def refused(self) -> dict[str, tuple[int, str]]:
        """Return by sender the round and the reason of its last refused message, the newest last."""
        return {who: (number, why) for who, (number, why) in (self.fact("refused") or {}).items()}

    def note_refusal(self, who: str, number: int, why: str) -> None:
        """Keep why a message was refused; the sender may have written some of the words."""
        why = "".join(c if c.isprintable() else "?" for c in why[:MAX_REASON_LENGTH])
        found = self.refused()
        if found.pop(who, None) != (number, why):
            self.note("refused", dict([*found.items(), (who, (number, why))][-MAX_REFUSED_SENDERS:]))

    def forget_refusals(self, *senders: str) -> None:
        """Forget the refusals of senders that the server has accepted since."""
        found = self.refused()
        left = {who: why for who, why in found.items() if who not in senders}
        if left != found:
            self.note("refused", left)

    # --- rounds ------------------------------------------------------------------------------------------------------

    def commit(
        self, done: int, server: Tree, counted: list[Counted], record: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> None:
        """End a round in one transaction; `done` rounds are finished then."""
        entry = self._write("server", server)
        accounts = [None if c.account is None else self._write("account", c.account) for c in counted]
        sync_folder(self.folder)
        with self.transaction():
            for name, value in {"done": done, "attempt": 0, "server": entry, "seconds": seconds}.items():
                self._set(name, value)
            self._db.execute("INSERT INTO round (number, record) VALUES (?, ?)", (done, json.dumps(record)))
            for c, account in zip(counted, accounts, strict=True):
                self._db.execute(
                    "INSERT INTO counted VALUES (?, ?, ?, ?, ?)", (c.client, c.round, c.attempt, c.digest, c.scale)
                )
                self._db.execute(
                    "UPDATE client SET head = ?, scale = ?, account = ? WHERE number = ?",
                    (c.head, c.scale, account and json.dumps(account), c.client),
                )
        self._tidy()

    def evaluated(self, done: int, record: Mapping[str, Any], parameters: list[int]) -> None:
        """Keep a round's record after its evaluation, and the parameters that the personal models need."""
        with self.transaction():
            self._set("parameters", parameters)
            self._db.execute("UPDATE round SET record = ?, evaluated = 1 WHERE number = ?", (json.dumps(record), done))

    def is_evaluated(self, done: int) -> bool:
        row = self._db.execute("SELECT evaluated FROM round WHERE number = ?", (done,)).fetchone()
        return row is None or bool(row[0])

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(row[0]) for row in self._db.execute("SELECT record FROM round ORDER BY number")]

    def counted(self) -> list[tuple[int, int, int, str, float]]:
        """Return client, round, attempt, digest and scale of every counted upload, in order."""
        return self._db.execute("SELECT * FROM counted ORDER BY round, client").fetchall()

    # --- files -------------------------------------------------------------------------------------------------------

    def _write(self, kind: str, tree: Tree) -> Entry:
        """Write a file under a new name; it counts once a transaction names it."""
        self._files += 1
        return write_tree(self.folder / f"{kind}-{self._files:06d}.safetensors", tree, write_whole)

    def _tidy(self) -> None:
        """Remove files that nothing names any more."""
        named = {self.fact("start")[0], self.fact("server")[0]}
        named |= {c.account.file for c in self.members().values() if c.account is not None}
        with disk_errors(self.folder):
            for path in self.folder.iterdir():
                if path.name not in named:
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def books(run: Path) -> Iterator[Ledger | None]:
    """Open the database of a run folder for reading; None if no federation was begun there."""
    if not (run / FILE).exists():
        yield None
        return
    with contextlib.closing(Ledger(run)) as ledger:
        yield ledger if ledger.exists else None


def _enrolled(
    number: int, identity: str | None, examples: int, head: str, scale: float, account: str | None, leaving: int
) -> Enrolled:
    entry = None if account is None else Entry(*json.loads(account))
    return Enrolled(number, identity, examples, head, scale, entry, bool(leaving))
