"""Real deployments beside their simulations: TLS, keys, a SuperLink and three SuperNodes on this machine.

    python benchmarks/deployment.py --json results/benchmarks/deployment.json

Handwritten digits, the CNN, five rounds, single precision. `difference` is the largest one between any number of the
server's and the clients' states and the same number of the simulation; bytes are those of the payloads.
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
from fedslr.core.states import plain, restore
from fedslr.data import share_out
from fedslr.deploy import loopback, options
from fedslr.deploy.ledger import Ledger
from fedslr.deploy.node_store import NodeStore
from fedslr.engine.rounds import Simulation

METHODS = ("fedslr", "scaffold", "ditto")


def difference(a: tuple[Any, ...], b: tuple[Any, ...]) -> float:
    pairs = zip(*(tree.leaves(factored.unfold(plain(x))) for x in (a, b)), strict=True)
    return max((float((x - y).abs().max()) for x, y in pairs if isinstance(x, torch.Tensor)), default=0.0)


def deployed(method: str, rounds: int, home: Path) -> dict[str, Any]:
    changes = [f"rounds={rounds}", f"algorithm.name={method}", f"evaluate.every={rounds}", "engine=eager"]
    asked = options.demo(changes)
    federation = share_out(asked.recipe.data)
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
    found = [difference(restore(type(simulation.server), Ledger(home / "run").tree("server")), simulation.server)]
    for number in range(len(federation.clients)):
        store = NodeStore(home / f"node-{number}")
        page = store.read()
        assert page is not None
        found.append(difference(restore(simulation.client_kind, store.tree(page.state)), simulation.state(number)))
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
