"""Loops over a client's batches: local gradient steps, and the mean loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from fedslr.core import tree
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

    `correct` and `after` work on one tensor at a time, so that an engine can fuse a whole step into few kernels.

    Args:
        problem: The loss f and the weight decay wd.
        start: The first v.
        batches: The batches; every batch makes one step.
        round: The round, whose `lr` is the step size η.
        correct: A function that changes the gradient of one tensor, from g, v and the same tensor of every tree in
            `given`. By default the gradient stays as it is.
        given: Trees with the keys of `start` that `correct` reads.
        frozen: Parameters of the model that are not part of v and do not change.
        offset: A tree that is added to v before the gradient is computed.
        after: A function of a tensor and η that is applied after every step, such as a proximal operator.

    Returns:
        The last v.

    Example:
        v = descend(problem, w, data.epochs(round.epochs), round)
        v = descend(problem, w, batches, round, correct=lambda g, v, w: g + mu * (v - w), given=(w,))
    """
    lr, weight_decay = round.lr, problem.weight_decay

    def move(v: Tensor, g: Tensor, *rest: Tensor) -> Tensor:
        g = g.add(v, alpha=weight_decay)
        v = v - lr * (g if correct is None else correct(g, v, *rest))
        return v if after is None else after(v, lr)

    def step(v: Params, batch: Batch) -> Params:
        at = v if offset is None else tree.add(offset, v)
        return tree.map(move, v, problem.loss_grad(at, batch, frozen), *given)

    return scan(step, start, batches)


def mean_loss(problem: Problem, params: Params, data: LocalData, phase: int = 0) -> Tensor:
    """Return the mean loss over all samples of a client, without weight decay."""
    zero = next(iter(params.values())).new_zeros(())
    total = scan(lambda sum, batch: sum + problem.loss_sum(params, batch), zero, data.epochs(1, phase))
    return total / data.num_examples
