"""
Add a method in one file
========================

A method is a frozen dataclass with a few pure functions. We add fine-tuning to FedAvg: every client trains the global
model a little further on its own data and uses the result. This simple method is a strong baseline for
personalisation.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import matplotlib.pyplot as plt

import fedslr
from fedslr.core import tree
from fedslr.core.problem import Problem
from fedslr.core.scan import scan
from fedslr.core.schema import countable_from_zero, positive
from fedslr.core.types import Batch, LocalData, Params

# %%
# The method
# ----------
#
# Training stays FedAvg's, so we only write ``personal_model``. It gets the global model as ``payload`` and may train
# on the client's data. ``scan`` runs a step on every batch; engines use it to train many clients at once.
#
# Hyperparameters are fields. Their rule and their help text appear in errors, in ``fedslr algorithms`` and in
# recipes.


@dataclass(frozen=True)
class FineTunedFedAvg(fedslr.FedAvg):
    """FedAvg whose clients fine-tune the global model on their own data."""

    name: ClassVar[str] = "fedavg-ft"

    tune_epochs: Annotated[int, countable_from_zero, "passes over a client's data"] = 2
    tune_lr: Annotated[float, positive, "step size of the fine-tuning"] = 0.05

    def personal_model(self, problem: Problem, client: Any, payload: Params, data: LocalData) -> Params:
        def step(v: Params, batch: Batch) -> Params:
            return tree.map(lambda v, g: v - self.tune_lr * g, v, problem.grad(v, batch))

        return scan(step, payload, data.epochs(self.tune_epochs))


# %%
# Two laws
# --------
#
# Laws test a method better than examples. Without fine-tuning it must equal FedAvg, and all engines must agree.

federation = fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)
options = {"model": "cnn", "clients_per_round": 5, "dtype": "float64"}


def difference(one, other, client=3):
    """Return the largest difference between one client's personal models in two results."""
    a, b = one.personal_params(client), other.personal_params(client)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


fedavg = fedslr.run(fedslr.FedAvg(), federation, rounds=2, **options)
untuned = fedslr.run(FineTunedFedAvg(tune_epochs=0), federation, rounds=2, **options)
eager = fedslr.run(FineTunedFedAvg(), federation, rounds=2, engine="eager", **options)
batched = fedslr.run(FineTunedFedAvg(), federation, rounds=2, engine="batched", **options)

print(f"no fine-tuning against FedAvg: {difference(untuned, fedavg):.0e}")
print(f"eager against batched engine:  {difference(eager, batched):.0e}")
assert difference(untuned, fedavg) < 1e-12
assert difference(eager, batched) < 1e-10

# %%
# Compare it
# ----------

methods = {
    "fedavg": fedslr.FedAvg(),
    "fedavg-ft": FineTunedFedAvg(),
    "fedslr": fedslr.FedSLR(eta_g=5, rank_penalty=5e-3, l1_penalty=3e-3),
}
plt.figure(figsize=(6, 4))
for name, method in methods.items():
    result = fedslr.run(method, federation, rounds=30, model="cnn", clients_per_round=5)
    evaluated = [record for record in result.records if record["accuracy_personal"] is not None]
    plt.plot(
        [record["round"] for record in evaluated],
        [100 * record["accuracy_personal"] for record in evaluated],
        marker="o",
        label=name,
    )
    accuracy, parameters = result.summary["accuracy"]["personal"], result.summary["parameters"]
    size = parameters["personal"] / parameters["dense"]
    print(f"{name:10s} personal accuracy {100 * accuracy:.1f} %, size {size:.0%} of the dense model")
plt.xlabel("communication round")
plt.ylabel("personal accuracy, mean over clients (%)")
plt.legend()
plt.grid(alpha=0.3)

# %%
# Fine-tuning can be as accurate as FedSLR, but its personal models are dense. Compare both figures before you choose.
#
# Save the class as ``finetuned.py``, and recipes find it as ``algorithm = { name = "finetuned:FineTunedFedAvg" }``.
