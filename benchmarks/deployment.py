"""Compare real deployments with their simulations: TLS, keys, a SuperLink and three SuperNodes on this machine.

    python benchmarks/deployment.py --json results/benchmarks/deployment.json

The job: digits, the CNN, five rounds in float32. `difference` is the largest difference between a number in the states
of the deployment's server and clients and the same number in the simulation. Bytes are those of the payloads.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import report
from fedslr.core import factored, tree
from fedslr.core.states import plain
from fedslr.data import build_federation
from fedslr.deploy import loopback, options
from fedslr.deploy.accounts import Accounts
from fedslr.deploy.database import Database
from fedslr.deploy.node_store import NodeStore
from fedslr.engine.rounds import Simulation

METHODS = ("fedslr", "scaffold", "ditto")


def difference(a: Any, b: Any) -> float:
    pairs = zip(*(tree.leaves(factored.multiply_out(plain(x))) for x in (a, b)), strict=True)
    return max((float((x - y).abs().max()) for x, y in pairs if isinstance(x, torch.Tensor)), default=0.0)


def deployed(method: str, rounds: int, home: Path) -> dict[str, Any]:
    changes = [f"rounds={rounds}", f"algorithm.name={method}", f"evaluate.every={rounds}", "engine=eager"]
    asked = options.demo(changes)
    federation = build_federation(asked.recipe.data)
    begun = time.perf_counter()
    with loopback.Loopback(home) as link:
        link.start_superlink()
        for number, data in enumerate(federation.clients):
            loopback.write_data(home / f"data-{number}" / "data.npz", data)
            link.register(f"{number}")
            link.start_node(f"{number}", number, home / f"data-{number}", home / f"node-{number}")
        link.submit(asked.to_toml(), home / "run")
        records = loopback.follow(home / "run", rounds, print)
    seconds = time.perf_counter() - begun

    settings = dataclasses.replace(asked.recipe.settings, store="disk")
    simulation = Simulation(asked.recipe.algorithm, federation, asked.recipe.model.name, settings)
    expected = list(simulation.rounds())
    accounts = Accounts(Database(home / "run"), asked.recipe.algorithm)
    found = [difference(*pair) for pair in zip(accounts.state, simulation.state.server_state, strict=True)]
    for number in accounts.members:
        store, member = NodeStore(home / f"node-{number}"), simulation.state.roster.member(number)
        page = store.read()
        assert page is not None
        kept = store.tree(page.state)
        found += [difference(kept[name], getattr(member, name)) for name in ("client", "ledger")]
    return {
        "method": method,
        "rounds": len(records),
        "difference": max(found),
        "bytes down": sum(r["bytes_down"] for r in records),
        "simulated": sum(r.bytes_down for r in expected),
        "bytes up": sum(r["bytes_up"] for r in records),
        "simulated up": sum(r.bytes_up for r in expected),
        "accuracy": records[-1]["accuracy_personal"],
        "simulated accuracy": expected[-1].accuracy_personal,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for method in args.methods:
        with tempfile.TemporaryDirectory(prefix="fedslr-deployment-") as folder:
            rows.append(deployed(method, args.rounds, Path(folder).resolve()))
        report.show(rows[-1:])
    report.finish("deployment", rows, args.json)


if __name__ == "__main__":
    report.call(main)
