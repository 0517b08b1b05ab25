"""
Train on your own data with your own model
==========================================

Five hospitals measure the same twelve quantities, but their instruments differ. We train on their arrays and use a
PyTorch model of our own.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import fedslr

# %%
# One mapping of arrays per client
# --------------------------------
#
# A client needs ``x`` and ``y`` to train on, and ``x_test`` and ``y_test`` to be tested on. Clients may hold
# different numbers of samples. Replace ``measure`` with the code that reads your data.

rng = np.random.default_rng(0)
centres = np.eye(3, 12) * 3


def measure(hospital, samples):
    """Return inputs and labels of a hospital whose instruments swap some of the quantities."""
    y = rng.integers(0, 3, samples)
    x = rng.normal(size=(samples, 12)) + np.roll(centres[y], hospital, axis=1)
    return x, y


clients = []
for hospital, samples in enumerate((40, 25, 90, 60, 30)):
    x, y = measure(hospital, samples)
    x_test, y_test = measure(hospital, 100)
    clients.append({"x": x, "y": y, "x_test": x_test, "y_test": y_test})

names = ["north", "south", "east", "west", "centre"]
federation = fedslr.Federation.from_arrays(clients, client_names=names, class_names=["healthy", "mild", "severe"])
print(federation)

# %%
# Any module with one score per class
# -----------------------------------
#
# The weights of the module are the starting point of every method. Use GroupNorm or LayerNorm instead of BatchNorm.


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))


methods = {"fedavg": fedslr.FedAvg(), "fedslr": fedslr.FedSLR(eta_g=2, rank_penalty=1e-3, l1_penalty=1e-3)}
results = {
    name: fedslr.run(method, federation, network(), rounds=40, clients_per_round=5) for name, method in methods.items()
}

# %%
# Who gains
# ---------

where = np.arange(len(names))
plt.figure(figsize=(6, 3.5))
for shift, (name, result) in zip((-0.2, 0.2), results.items(), strict=True):
    accuracy = result.records[-1]["accuracy_personal_per_client"]
    plt.bar(where + shift, [100 * a for a in accuracy], width=0.4, label=name)
plt.xticks(where, names)
plt.ylabel("accuracy (%)")
plt.legend(loc="lower right")

# %%
# Use a personal model
# --------------------
#
# ``personal_model`` returns a module like the one you gave, with the weights of one client.

model = results["fedslr"].personal_model(0)
with torch.no_grad():
    scores = model(torch.as_tensor(clients[0]["x_test"][:5], dtype=torch.float32))
print("predicted:", [federation.class_names[i] for i in scores.argmax(1)])
print("true:     ", [federation.class_names[i] for i in clients[0]["y_test"][:5]])
