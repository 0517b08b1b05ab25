"""
Compare three methods on handwritten digits
===========================================

Twenty clients each hold few of the ten handwritten digits. We train three methods on the same clients and look at
which model serves them best.
"""

import matplotlib.pyplot as plt

import fedslr

# %%
# The data
# --------
#
# ``split="dirichlet"`` draws for every client how often it sees each digit. A smaller ``alpha`` makes clients differ
# more.

federation = fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)

counts = [client.y.bincount(minlength=10).tolist() for client in federation.clients]
plt.figure(figsize=(6, 4))
plt.imshow(counts, aspect="auto", cmap="Blues")
plt.xticks(range(10))
plt.yticks(range(0, 20, 5))
plt.xlabel("digit")
plt.ylabel("client")
plt.colorbar(label="training samples")
plt.title("Every client sees few of the digits")

# %%
# The methods
# -----------
#
# FedAvg trains one model for everybody. Local training gives every client a model of its own and shares nothing.
# FedSLR learns a low-rank global model together with a sparse personal part for every client.
#
# All three start from the same weights and train the same clients in every round, because the seed is the same.

methods = {
    "fedavg": fedslr.FedAvg(),
    "local": fedslr.Local(),
    "fedslr": fedslr.FedSLR(eta_g=5, rank_penalty=5e-3, l1_penalty=3e-3),
}
comparison = fedslr.compare(methods, federation, model="cnn", seeds=[0], rounds=30, clients_per_round=5)
print(comparison.table())

# %%
# Accuracy over rounds
# --------------------
#
# ``comparison.results`` has the results of every method, one per seed. ``result.records`` holds one entry per round.
# Without an evaluation its accuracy is ``None``. (``comparison.plot()`` draws such a figure, too.)

results = {name: found[0] for name, found in comparison.results.items()}

plt.figure(figsize=(6, 4))
for name, result in results.items():
    evaluated = [record for record in result.records if record["accuracy_personal"] is not None]
    plt.plot(
        [record["round"] for record in evaluated],
        [100 * record["accuracy_personal"] for record in evaluated],
        marker="o",
        label=name,
    )
plt.xlabel("communication round")
plt.ylabel("personal accuracy, mean over clients (%)")
plt.legend()
plt.grid(alpha=0.3)

# %%
# The clients that are served worst
# ---------------------------------
#
# A mean hides clients that a method leaves behind. The last evaluation also has the accuracy of every client.

plt.figure(figsize=(6, 3))
plt.boxplot(
    [[100 * a for a in result.records[-1]["accuracy_personal_per_client"]] for result in results.values()],
    orientation="horizontal",
    tick_labels=list(results),
)
plt.xlabel("personal accuracy of a client (%)")

# %%
# One seed is one draw. With ``seeds=[0, 1, 2]`` the table has means with standard deviations, and
# ``comparison.differences()`` tells which methods can be told apart.
