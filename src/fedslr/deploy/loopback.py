"""A whole federation on one machine, with the processes and keys of a real one.

A SuperLink with TLS knows its nodes by their keys, every SuperNode has a folder of data, and everything is stopped at
the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError
from fedslr.data import build_federation
from fedslr.data.client_data import ARRAY_NAMES, ClientData
from fedslr.deploy import keys, options
from fedslr.deploy.database import open_database
from fedslr.deploy.lifecycle import FAILURE_FILE
from fedslr.deploy.submission import call, environment, program, submit
from fedslr.storage.locks import is_taken, lock
from fedslr.storage.record import Record, read_records

CONNECTION = "fedslr"
SUPERLINK = "superlink"
"""The SuperLink's name among the processes."""
STARTUP_SECONDS = 30
"""A SuperLink may take so long to come up."""
STOP_SECONDS = 5
"""A process may take so long to end by itself."""
SUCCESSOR_SECONDS = 10.0
"""A run whose server failed gets another server within this time, or none."""

END_WITH_PARENT = 'umask 077; (while kill -0 "$0"; do sleep 1; done; kill -- -$$) >/dev/null 2>&1 & '
"""Shell code that ends a process and its children when its parent is gone; only the owner can read their files."""
RUN_ONCE, RUN_UNTIL_SUCCESS = '"$@"', 'until "$@"; do sleep 8; done'
"""Shell code that runs a command as a supervisor does."""


def write_data(path: Path, data: ClientData) -> None:
    """Write a client's data to a file that a node can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{part: getattr(data, part).numpy() for part in ARRAY_NAMES})


def free_ports(count: int) -> list[int]:
    """Return ports that no process uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Loopback:
    """The processes of a federation on this machine. Leaving it stops all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.home, self.keys, self.logs = (self.folder / name for name in ("flower", "keys", "logs"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (self.port,) = free_ports(1)
        # Processes look for work every fifth of a second; with the usual interval a small round is mostly waiting.
        self.env = environment(self.home, FLWR_SUPEREXEC_TASK_POLL_INTERVAL="0.2", OMP_NUM_THREADS="1")

    def __enter__(self) -> Loopback:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.home.mkdir(exist_ok=True)
        if not (self.keys / "ca.crt").exists():
            keys.make_certificates(self.keys, ["127.0.0.1", "localhost"])
        return self

    def __exit__(self, *exc: object) -> None:
        # Nodes end first: the SuperLink believes that a node that did not sign off is alive, and refuses its successor.
        for name, process in self.processes.items():
            if name != SUPERLINK:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        for name in sorted(self.processes, key=lambda name: name == SUPERLINK):
            self.stop(name, signal.SIGTERM if name == SUPERLINK else None)

    def start_superlink(self) -> None:
        """Start the SuperLink, with TLS and node authentication; it keeps its nodes on the disk."""
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.keys / "ca.crt"}"\n',
            "utf-8",
        )
        command = [program("flower-superlink"), "--enable-supernode-auth", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--database", str(self.home / "superlink.sqlite")]
        for option, file in (("certfile", "server.crt"), ("keyfile", "server.key"), ("ca-certfile", "ca.crt")):
            command += [f"--ssl-{option}", str(self.keys / file)]
        self._start(SUPERLINK, command, RUN_ONCE)
        until = time.monotonic() + STARTUP_SECONDS
        while not _listens(self.port):
            if self.processes[SUPERLINK].poll() is not None or time.monotonic() > until:
                raise FedslrError(f"the SuperLink did not start; see {self.logs / 'superlink.log'}")
            time.sleep(0.1)

    def register(self, name: str) -> None:
        """Make a key for a node and register it with the SuperLink, as far as that was not done before."""
        public, registered = self.keys / f"{name}.pub", self.keys / f"{name}.registered"
        if registered.exists():
            return
        if not public.exists():
            (self.keys / name).unlink(missing_ok=True)
            keys.make_node_key(self.keys / name)
        try:
            call([program("flwr"), "supernode", "register", str(public), CONNECTION], self.env)
        except FedslrError as error:
            if "already in use" not in str(error):
                raise
        registered.touch()

    def start_node(self, name: str, client: int, data: Path, store: Path) -> None:
        """Start a SuperNode, again if it fails: Flower admits a node that was killed only a minute later."""
        (port,) = free_ports(1)
        settings = f'client={client} data="{data}" store="{store}"'
        command = [program("flower-supernode"), "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--root-certificates", str(self.keys / "ca.crt"), "--port", str(port)]
        command += ["--auth-supernode-private-key", str(self.keys / name), "--node-config", settings]
        self._start(name, command, RUN_UNTIL_SUCCESS)

    def submit(self, recipe: str, out: Path) -> str:
        return submit(self.folder, CONNECTION, recipe, out, self.env)

    def stop(self, name: str, how: signal.Signals | None = signal.SIGTERM) -> None:
        """End a process and its children; they may have received the signal already."""
        process = self.processes.pop(name)
        until = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(ProcessLookupError):
            if how is not None:
                os.killpg(process.pid, how)
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self, name: str, command: list[str], how: str) -> None:
        guarded = ["sh", "-c", END_WITH_PARENT + how, str(os.getpid()), *command]
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                guarded, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )


def _listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1", port)) == 0


def begun(run: Path) -> tuple[str, int] | None:
    """Return the recipe and the finished rounds of the federation in a folder; None if none was begun there."""
    with open_database(run) as database:
        return None if database is None else (database.fact("recipe"), int(database.fact("done")))


def demo(folder: Path, rounds: int | None, resume: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run three nodes on handwritten digits, from certificates to the end; return the records of the run."""
    changes = [] if rounds is None else [f"rounds={rounds}"]
    asked = options.demo(changes)
    run = folder / "run"
    found = begun(run)
    if found is not None and not resume:
        raise FedslrError(f"out: {folder} already holds a federation; resume it (--resume) or choose another folder")
    if resume and not run.exists():
        raise FedslrError(f"resume: {folder} holds no federation to resume; leave --resume out to begin one")
    if found is not None:
        text, done = found
        asked = options.from_text(text, changes)
        if asked.recipe.settings.rounds < done:
            raise FedslrError(f"rounds: got {rounds}, but {done} are done in {folder}")
        if asked.recipe.settings.rounds == done and (run / "summary.json").exists():
            say(f"all {done} rounds are done; --rounds asks for more")
            return read_records(run)
    clients = build_federation(asked.recipe.data).clients
    with lock(folder), Loopback(folder) as federation:
        say("starting a SuperLink with TLS and node authentication")
        federation.start_superlink()
        for number, data in enumerate(clients):
            home = federation.folder / f"node-{number}"
            write_data(home / "data" / "data.npz", data)
            federation.register(f"{number}")
            federation.start_node(f"{number}", number, home / "data", home / "store")
            say(f"node {number}: {len(data.y)} samples in {home / 'data'}, state in {home / 'store'}")
        (run / FAILURE_FILE).unlink(missing_ok=True)
        federation.submit(asked.to_toml(), run.resolve())
        return follow(run, asked.recipe.settings.rounds, say)


def follow(
    run: Path, rounds: int, say: Callable[[str], None], limit: float = 3600, handover: float = SUCCESSOR_SECONDS
) -> list[dict[str, Any]]:
    """Wait for a run on this machine to end, and say a line for every round; a failed server may have a successor."""
    told, until, failed = 0, time.monotonic() + limit, None
    while time.monotonic() < until:
        records = read_records(run) if (run / "metrics.jsonl").exists() else []
        for record in records[told:]:
            scores = Record.read(record).scores_text()
            shown = f"  {scores}" if scores else ""
            say(f"round {record['round']}/{rounds}  clients {record['clients']}  {record['seconds']:.1f} s{shown}")
        told = max(told, len(records))
        if (run / "summary.json").exists() and told >= rounds:
            return records
        if not (run / FAILURE_FILE).exists() or is_taken(run):
            failed = None
        elif failed is None:
            failed = time.monotonic()
        elif time.monotonic() > failed + handover:
            with contextlib.suppress(FileNotFoundError):  # a successor removes the file
                raise FedslrError((run / FAILURE_FILE).read_text("utf-8").strip())
        time.sleep(0.5)
    raise FedslrError(f"{run}: the run did not end in {limit:g} seconds")
