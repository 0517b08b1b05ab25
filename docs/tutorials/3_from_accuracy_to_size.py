"""
Choose penalties and read compression
=====================================

FedSLR has two penalties. ``rank_penalty`` makes the global model low-rank, ``l1_penalty`` makes the personal parts
sparse. We sweep the first one and watch accuracy and size together.
"""

import matplotlib.pyplot as plt

import fedslr

federation = fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)

# %%
# Sweep one penalty
# -----------------
#
# The paper's penalties suit ResNet18. The small network here is 300 times smaller and needs larger ones. Try powers
# of ten first, then refine around the best value.

penalties = (0.0, 2e-3, 5e-3, 1e-2)
results = [
    fedslr.run(
        fedslr.FedSLR(eta_g=5, rank_penalty=penalty, l1_penalty=3e-3),
        federation,
        model="cnn",
        rounds=30,
        clients_per_round=5,
    )
    for penalty in penalties
]

# %%
# Read the sizes
# --------------
#
# ``summary["parameters"]`` counts numbers. A layer of rank r counts as factors where those are smaller than its
# matrix. A sparse part counts its non-zeros. A personal model holds the global model and its personal part, so it can
# be larger than the dense model if the penalties are too small.

print("penalty  global %  personal %  global size  personal size")
for penalty, result in zip(penalties, results, strict=True):
    accuracy, parameters = result.summary["accuracy"], result.summary["parameters"]
    print(
        f"{penalty:7g}  {100 * accuracy['global']:8.1f}  {100 * accuracy['personal']:10.1f}"
        f"  {parameters['global'] / parameters['dense']:11.0%}  {parameters['personal'] / parameters['dense']:13.0%}"
    )

# %%
# Accuracy against size
# ---------------------
#
# Choose the largest penalty whose accuracy you can accept. Use validation data or other seeds for the choice, and
# report the final figure on data that did not take part in it.

plt.figure(figsize=(6, 4))
sizes = [100 * r.summary["parameters"]["personal"] / r.summary["parameters"]["dense"] for r in results]
accuracies = [100 * r.summary["accuracy"]["personal"] for r in results]
plt.plot(sizes, accuracies, marker="o")
for size, accuracy, penalty in zip(sizes, accuracies, penalties, strict=True):
    plt.annotate(f"λ = {penalty:g}", (size, accuracy), textcoords="offset points", xytext=(6, 6))
plt.xlabel("size of a personal model (% of the dense model)")
plt.ylabel("personal accuracy (%)")
plt.grid(alpha=0.3)
plt.margins(0.15)

# %%
# Bytes follow ranks
# ------------------
#
# The server sends factors, so a low-rank global model also saves communication. Uploads stay dense.

plt.figure(figsize=(6, 3))
for penalty, result in zip(penalties, results, strict=True):
    plt.plot([record["bytes_down"] / 1e3 for record in result.records], label=f"λ = {penalty:g}")
plt.xlabel("communication round")
plt.ylabel("sent to the cohort (kB)")
plt.legend()
