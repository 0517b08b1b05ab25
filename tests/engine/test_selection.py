"""The clients of a round: a function of the seed and the round, checked whatever selects them."""

from __future__ import annotations

import pytest

import fedslr
import own_methods
from fedslr.engine import selection

EXAMPLES = [5, 11, 3, 8, 7]


@pytest.mark.parametrize("name", selection.SELECTIONS)
def test_a_cohort_is_a_function_of_the_seed_and_the_round(name):
    select = selection.find(name)
    cohorts = [selection.draw(select, 2, EXAMPLES, 3, t) for t in range(20)]
    assert cohorts == [selection.draw(select, 2, EXAMPLES, 3, t) for t in range(20)]
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    for cohort in cohorts:
        assert cohort == sorted(set(cohort))
        assert set(cohort) <= set(range(len(EXAMPLES)))


@pytest.mark.parametrize("name", ["uniform", "by-size"])
def test_a_cohort_has_the_size_that_was_asked_for(name):
    assert {len(selection.draw(selection.find(name), 3, EXAMPLES, 0, t)) for t in range(20)} == {3}


@pytest.mark.parametrize("name", ["first", "tensors", "floats"])
def test_numbers_of_clients_may_be_of_many_kinds(name):
    assert selection.draw(selection.find(f"own_methods:{name}"), 3, EXAMPLES, 0, 0) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("twice", r"selection: round 5 got \[1, 1\], expected some of the clients 0 to 4, none twice"),
        ("nobody", r"selection: round 5 got \[\], expected some of the clients"),
        ("broken", r"selection: expected a function \(rng, size, examples\) that returns clients; IndexError"),
        ("halves", "that returns clients; TypeError"),
        ("flags", "that returns clients; TypeError: true and false are no numbers of clients"),
        ("sorting", "that returns clients; TypeError"),
        ("rows", "that returns clients; TypeError"),
    ],
)
def test_a_wrong_selection_is_one_line(name, says):
    examples = list(EXAMPLES)
    with pytest.raises(fedslr.FedslrError, match=says):
        selection.draw(getattr(own_methods, name), 2, examples, 0, 4)
    assert examples == EXAMPLES


def test_the_same_clients_are_evaluated_every_time():
    assert selection.evaluated(None, 5, 0) == range(5)
    assert selection.evaluated(9, 5, 0) == range(5)
    some = selection.evaluated(3, 100, 0)
    assert len(set(some)) == 3
    assert some == selection.evaluated(3, 100, 0) != selection.evaluated(3, 100, 1)
