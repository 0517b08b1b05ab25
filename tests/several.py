"""What each of two processes does for test_distributed.py: `torchrun several.py FOLDER`."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fedslr
from conftest import make_federation, mlp
from fedslr.engine import saving
from own_methods import Attentive, Clustered

SIZES = [5, 11, 3, 8, 7]
OPTIONS: dict[str, Any] = {
    "rounds": 3,
    "clients_per_round": 3,
    "batch_size": 4,
    "lr": 0.05,
    "evaluate_every": 1,
    "dtype": torch.float64,
    "device": "cpu",
}
METHODS = {name: (method, OPTIONS) for name, method in fedslr.ALGORITHMS.items() if method.server_sees == "mean"}
VARIANTS = {
    "one sampled": (fedslr.FedSLR, {**OPTIONS, "rounds": 6, "clients_per_round": 1}),
    "batched": (fedslr.FedSLR, {**OPTIONS, "engine": "batched"}),
    "by coins": (fedslr.FedAvg, {**OPTIONS, "selection": "bernoulli"}),
    "on disk": (fedslr.FedDyn, {**OPTIONS, "store": "disk"}),
    "several models": (Clustered, OPTIONS),
}
CASES = METHODS | VARIANTS
LONG = {**OPTIONS, "rounds": 8, "evaluate_every": 3}


def run(case: str, sizes: list[int] = SIZES, **changes: Any) -> fedslr.Result:
    method, options = CASES[case]
    return fedslr.run(method(), make_federation(sizes), mlp(), **{**options, **changes})


def long_run(out: Path, **changes: Any) -> fedslr.Result:
    return fedslr.run(fedslr.FedSLR(eta_g=2), make_federation(SIZES), mlp(), out=out, **{**LONG, **changes})


def kept(result: fedslr.Result, clients: Any) -> dict[str, Any]:
    state = result._simulation.state
    return {
        "global": result.global_params,
        "personal": {c: result.personal_params(c) for c in clients},
        "ledgers": {c: state.roster.member(c).ledger for c in clients},
        "mean ledger": state.server_state.mean_ledger,
        "records": [
            {k: v for k, v in r.items() if v is not None and not k.startswith("seconds")} for r in result.records
        ],
        "summary": {k: v for k, v in result.summary.items() if k != "seconds"},
    }


def refusal(case: str = "fedslr", **changes: Any) -> str:
    try:
        run(case, **changes)
    except fedslr.FedslrError as error:
        return str(error)
    return ""


def asked_once(number: int) -> Any:
    """Only the second process is asked to stop, after some rounds."""
    rounds = iter(range(number))
    return lambda: next(rounds, None) is None and dist.get_rank() == 1


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    reduced: list[int] = []
    real = dist.all_reduce
    dist.all_reduce = lambda x, *args, **kwargs: (reduced.append(x.numel()), real(x, *args, **kwargs))[1]
    found: dict[str, Any] = {}
    for case in CASES:
        result = run(case)
        mine = range(dist.get_rank(), len(SIZES), 2)
        found[case] = {**kept(result, mine), "reduced": len(reduced)}
        reduced.clear()
    found["elsewhere"] = ""
    try:
        result.personal_params(1 - dist.get_rank())
    except fedslr.FedslrError as error:
        found["elsewhere"] = str(error)
    found["diagnostics"] = refusal(diagnostics=True)
    found["one client"] = refusal(sizes=SIZES[:1], clients_per_round=1)
    CASES["each upload"] = (Attentive, OPTIONS)
    found["each upload"] = refusal("each upload")
    found["unequal"] = refusal(lr=0.1 + dist.get_rank())
    try:
        long_run(folder / "stopped", should_stop=asked_once(3))
    except fedslr.Interrupted as stop:
        found["interrupted"] = str(stop)
    # The first process's clock stands still; by the others' every round would be saved.
    saving.monotonic = functools.partial(next, itertools.count(0, 60 * dist.get_rank()))
    long_run(folder / "clocks", checkpoint_minutes=1)
    saving.monotonic = time.monotonic
    found["resumed"] = kept(long_run(folder / "begun", resume=True), mine)
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
