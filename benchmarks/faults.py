"""Measure how faults affect the ledger: the mismatch ‖γ̄ − mean γ_i‖ / ‖γ̄‖ after at least ten rounds of a deployment.

    python benchmarks/faults.py --json results/benchmarks/faults.json

Server and nodes are the real ones with their real files; messages are handed over within one process. Nodes and
servers that are killed by SIGKILL run in processes of their own. `simulated` is true if server and clients end bit
for bit like a simulation whose cohorts are the counted clients: no round was lost and no upload was counted twice.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import report

sys.path.extend(str(Path(__file__).parent.parent / folder) for folder in ("tests", "tests/deploy"))

from conftest import make_federation
from deployed import NODE_STEPS, Clock, Federation, Forked, Local, kill_after_calls, mismatch, recipe
from fedslr.deploy.messages import TRAIN, Order
from fedslr.deploy.server import Coordinator
from test_deploy import assert_is_simulated

METHODS = ("fedslr", "feddyn", "scaffold")
MOMENTS = {
    "received": "before training",
    "booking": "after the acknowledgement",
    "turning": "while it books or writes",
    "writing": "between two files",
    "booked": "after booking",
    "trained": "after training",
    "pending": "after its upload is on disk",
    "answered": "after its upload was sent",
    "personalized": "in its personal part",
    "finished": "after its personal part",
}
CLIENTS, ROUNDS, LONG, KILLS = 10, 10, 60, 20


class Outcome:
    """A federation after its faults, and their number."""

    def __init__(self, federation: Federation, server: Coordinator, faults: int) -> None:
        self.federation, self.server, self.faults = federation, server, faults


def made(home: Path, method: str, post: type[Local] = Local, rounds: int = ROUNDS) -> Federation:
    changes = [f"rounds={rounds}", "clients_per_round=5", "federation.minimum=2", "evaluate.every=5"]
    return Federation(home, make_federation([8] * CLIENTS), recipe(method, CLIENTS, changes), post)


def undisturbed(home: Path, method: str) -> Outcome:
    federation = made(home, method)
    return Outcome(federation, federation.run(), 0)


def node_killed(step: str) -> Callable[[Path, str], Outcome]:
    """Kill every node once at this step of every order."""

    def fault(home: Path, method: str) -> Outcome:
        federation = made(home, method, Forked)
        seen: set[tuple[int, str, int]] = set()

        def once(node: Any, order: Order) -> str | None:
            key = (node.client, order.kind, order.round)
            if key in seen:
                return None
            seen.add(key)
            return step

        federation.post.kill = once
        server = federation.run(clock=Clock(0.01))
        return Outcome(federation, server, federation.post.deaths)

    return fault


def server_killed(home: Path, method: str) -> Outcome:
    """Kill the server so often that no process of it reaches the last round."""
    federation = made(home, method, rounds=LONG)
    rng = random.Random(0)
    for _ in range(KILLS):
        kill_after_calls(rng.randrange(1_000, 60_000), lambda: federation.run(clock=time.monotonic))
    return Outcome(federation, federation.run(), KILLS)


def messages(fate: Callable[[list[Any], str, Any], list[Any]]) -> Callable[[Path, str], Outcome]:
    """Interfere with uploads and count the answers that differ from an undisturbed run."""

    def fault(home: Path, method: str) -> Outcome:
        federation = made(home, method)
        past, faults = list[Any](), [0]

        def happen(identity: str, order: Order, fields: Any) -> Any:
            if order.kind != TRAIN:
                return [(identity, fields)]
            answers = fate(past, identity, fields)
            past.append((identity, fields))
            faults[0] += answers != [(identity, fields)]
            return answers

        federation.post.fate = happen
        return Outcome(federation, federation.run(), faults[0])

    return fault


def store_lost(home: Path, method: str) -> Outcome:
    federation = made(home, method)
    server, faults = federation.server(federation.asked), 0
    for record in server.rounds():
        for client in record.clients[:1]:
            shutil.rmtree(home / f"node-{client}")
            faults += 1
    for client in server.accounts.members:
        if not (home / f"node-{client}" / "page.json").exists():
            order = server.exchange.enrolment.order(client)
            federation.post.nodes_by_identity[f"key-{client}"].handle(order)
    server.folder.close()
    return Outcome(federation, server, faults)


FAULTS: dict[str, Callable[[Path, str], Outcome]] = {
    "none": undisturbed,
    **{f"node killed {MOMENTS[step]}": node_killed(step) for step in NODE_STEPS},
    "server killed at random moments": server_killed,
    "every upload twice": messages(lambda past, who, fields: [(who, fields)] * 2),
    "uploads of older rounds again": messages(lambda past, who, fields: [*past[-8:], (who, fields)]),
    "30 % stragglers": messages(lambda past, who, fields: [] if len(past) % 10 in (1, 4, 8) else [(who, fields)]),
    "a node's store lost after every round": store_lost,
}


def is_simulated(outcome: Outcome) -> bool:
    try:
        assert_is_simulated(outcome.federation, outcome.server)
    except AssertionError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, fault in FAULTS.items():
        row: dict[str, Any] = {"fault": name, "faults": 0}
        simulated, rounds = [], []
        for method in METHODS:
            with tempfile.TemporaryDirectory(prefix="fedslr-faults-") as folder:
                outcome = fault(Path(folder), method)
                row["faults"] += outcome.faults
                row[method] = mismatch(outcome.federation, outcome.server)
                simulated.append(is_simulated(outcome))
                rounds.append(outcome.server.done)
        row["rounds"] = min(rounds)
        # A node that loses its store also loses its personal part; only the ledger can be restored.
        row["simulated"] = "yes" if all(simulated) else "books only" if fault is store_lost else "no"
        rows.append(row)
        report.show([row])
    report.finish("faults", rows, args.json)


if __name__ == "__main__":
    report.call(main)
