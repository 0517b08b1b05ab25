"""Run the job of cpu_round.py in Apple's pfl, a round per line of standard input. `cpu_round.py --pfl` starts it.

    python benchmarks/pfl_job.py FOLDER ROUNDS THREADS

FOLDER is the folder with pfl.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Turns:
    """A callback that reports the end of every round and waits for the next turn."""

    def __init__(self, base: type) -> None:
        def after(this: Any, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            from pfl.metrics import Metrics

            print("done", flush=True)
            return not sys.stdin.readline(), Metrics()

        self.callback = type("Turn", (base,), {"after_central_iteration": after})()


def with_loss(model: nn.Module) -> nn.Module:
    """A model with the interface that pfl expects."""

    def loss(x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        return cross_entropy(model(torch.as_tensor(x)), torch.as_tensor(y))

    model.loss, model.metrics = loss, lambda x, y, eval=True: {}  # type: ignore[assignment]
    return model


def main(folder: str, rounds: int, threads: int) -> None:
    sys.path.append(folder)
    torch.set_num_threads(threads)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    from cpu_round import DECAY, LR, load
    from fedslr import models

    federation = load()
    module = with_loss(models.build("cnn", federation.input_shape, federation.num_classes, 0))
    model = PyTorchModel(
        module,
        lambda params, lr: torch.optim.SGD(params, lr=lr, weight_decay=DECAY),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    users = {i: PyTorchTensorDataset((c.x, c.y), user_id=str(i)) for i, c in enumerate(federation.clients)}
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", list(users)))
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, 10**9, 10, None),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_batch_size=10, local_num_epochs=2, local_learning_rate=LR),
        callbacks=[Turns(TrainingProcessCallback).callback],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
