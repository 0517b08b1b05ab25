"""Loops over a client's batches: local gradient steps, and the mean loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from fedslr.core import tree
from fedslr.core.errors import FedslrError
from fedslr.core.optimizers import clip
from fedslr.core.problem import Problem
from fedslr.core.scan import scan
from fedslr.core.types import Batch, LocalData, Params, Round


def descend(
    problem: Problem,
    start: Params,
    batches: Iterable[Batch],
    round: Round,
    *,
    correct: Callable[..., Tensor] | None = None,
    given: Sequence[Params] = (),
    frozen: Params | None = None,
    offset: Params | None = None,
    after: Callable[[Tensor, float], Tensor] | None = None,
) -> Params:
    """Return v after the local steps v ← after(v − η·correct(g, v, *given), η) with g = ∇f(v + offset) + wd·v.

    This is plain SGD. If the run has another optimizer, it gets the corrected gradient; its state starts anew in every
    call. `correct` and `after` work on one tensor at a time, so that an engine can fuse a whole step into few kernels.

    Args:
        problem: The loss f, the weight decay wd and the optimizer.
        start: The first v.
        batches: The batches; every batch makes one step.
        round: The round, whose `lr` is the step size η.
        correct: A function that changes the gradient of one tensor, from g, v and the same tensor of every tree in
            `given`. By default the gradient stays as it is.
        given: Trees with the keys of `start` that `correct` reads.
        frozen: Parameters of the model that are not part of v and do not change.
        offset: A tree that is added to v before the gradient is computed.
        after: A function of a tensor and η that is applied after every step, such as a proximal operator. It needs
            plain SGD.

    Returns:
        The last v.

    Raises:
        FedslrError: `after` is given, and the run's steps are not plain SGD.

    Example:
        v = descend(problem, w, data.epochs(round.epochs), round)
        v = descend(problem, w, batches, round, correct=lambda g, v, w: g + mu * (v - w), given=(w,))
    """
    lr, (optimizer, bound) = round.lr, problem.steps
    decoupled = problem.weight_decay if optimizer.decouples_decay else 0.0
    weight_decay = problem.weight_decay - decoupled

    def gradient(v: Tensor, g: Tensor, *rest: Tensor) -> Tensor:
        g = g.add(v, alpha=weight_decay)
        return g if correct is None else correct(g, v, *rest)

    def move(v: Tensor, g: Tensor, *rest: Tensor) -> Tensor:
        v = v - lr * gradient(v, g, *rest)
        return v if after is None else after(v, lr)

    def loss_grad(v: Params, batch: Batch) -> Params:
        return problem.loss_grad(v if offset is None else tree.add(offset, v), batch, frozen)

    def plain_step(v: Params, batch: Batch) -> Params:
        return tree.map(move, v, loss_grad(v, batch), *given)

    def step(carry: tuple[Params, tree.Tree], batch: Batch) -> tuple[Params, tree.Tree]:
        v, state = carry
        g = tree.map(gradient, v, loss_grad(v, batch), *given)
        if decoupled:
            v = tree.map(lambda v: v - lr * decoupled * v, v)
        return optimizer.step(v, clip(g, bound) if bound else g, state, lr)

    if problem.steps.is_plain:
        return scan(plain_step, start, batches)
    if after is not None:
        raise FedslrError("optimizer: a proximal step needs plain sgd; set optimizer = 'sgd' and grad_clip = 0")
    return scan(step, (start, optimizer.init(start)), batches)[0]


def mean_loss(problem: Problem, params: Params, data: LocalData, phase: int = 0) -> Tensor:
    """Return the mean loss over all samples of a client, without weight decay."""
    zero = next(iter(params.values())).new_zeros(())
    total = scan(lambda sum, batch: sum + problem.loss_sum(params, batch), zero, data.epochs(1, phase))
    return total / data.num_examples
