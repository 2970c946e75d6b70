from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import gradbalance as gb
from gradbalance.testing import Case, ClaimError, check_balancer, finite_output, non_conflict, on, simplex
from gradbalance.testing.case import Factory


def fixed_answer(gram: Tensor) -> Tensor:
    return torch.tensor([1.0] + [0.0] * (len(gram) - 1))


def test_a_kept_claim_passes() -> None:
    check_balancer(gb.MGDA, claims=[simplex, non_conflict], max_examples=50)


def test_the_message_has_claim_and_smallest_input_in_words() -> None:
    with pytest.raises(ClaimError) as caught:
        check_balancer(lambda: fixed_answer, claims=[finite_output, non_conflict], kinds=["conflicting"])
    message = str(caught.value)
    assert "breaks 1 of its 2 claims" in message
    assert "non_conflict: No objective gets worse to first order" in message
    assert "smallest input (conflicting, K = 2)" in message
    # The smallest conflicting rows are (1, 1) and (1, -2), in either order.
    assert caught.value.failures[0].case.rows.tolist() in ([[1.0, 1.0], [1.0, -2.0]], [[1.0, -2.0], [1.0, 1.0]])
    assert "cosine -0.316 with objective 1" in message


def test_every_broken_claim_is_reported_once() -> None:
    def first_two(factory: Factory, case: Case) -> None:
        """The first two weights are equal."""
        weights = factory()(case.gram)
        assert weights[0] == weights[-1]

    with pytest.raises(ClaimError) as caught:
        check_balancer(lambda: fixed_answer, claims=[first_two, non_conflict, finite_output], max_examples=100)
    assert sorted(f.claim.name for f in caught.value.failures) == ["first_two", "non_conflict"]
    assert "first_two: The first two weights are equal." in str(caught.value)


def test_a_crash_of_the_balancer_is_a_finding() -> None:
    def crashes(gram: Tensor) -> Tensor:
        if len(gram) > 2:
            raise RuntimeError("matrix is not positive definite")
        return torch.ones(len(gram))

    with pytest.raises(ClaimError, match=r"K = 3.*\n.*RuntimeError: matrix is not positive definite"):
        check_balancer(lambda: crashes, claims=[finite_output], max_examples=100)


@pytest.mark.parametrize(
    "answer", [lambda g: g, lambda g: torch.ones(len(g) + 1), lambda g: [1.0] * len(g), lambda g: g[0] * torch.nan]
)
def test_wrong_forms_are_findings(answer: gb.Balancer) -> None:
    with pytest.raises(ClaimError, match="finite_output"):
        check_balancer(lambda: answer, claims=[finite_output], max_examples=20)


def test_a_random_balancer_is_said_to_be_random() -> None:
    state = {"calls": 0}

    def moody(gram: Tensor) -> Tensor:
        state["calls"] += 1
        return torch.full((len(gram),), torch.nan if state["calls"] == 7 else 1.0)

    with pytest.raises(ClaimError, match="not again with the same input"):
        check_balancer(lambda: moody, claims=[finite_output], max_examples=100)


def test_torch_randomness_is_reproducible_and_the_global_generator_untouched() -> None:
    def dice(gram: Tensor) -> Tensor:
        return torch.rand(len(gram)) - 0.5

    @on("non_stationary")
    def positive(factory: Factory, case: Case) -> None:
        """Weights are positive."""
        assert (factory()(case.gram) > 0).all(), "a weight is not positive"

    before = torch.random.get_rng_state()
    with pytest.raises(ClaimError, match="found: a weight is not positive"):
        check_balancer(lambda: dice, claims=[positive], max_examples=50)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_kind_is_tried() -> None:
    seen: set[str] = set()

    def look(factory: Factory, case: Case) -> None:
        seen.add(case.kind)

    check_balancer(gb.Mean, claims=[look], max_examples=len(gb.testing.KINDS))
    assert seen == set(gb.testing.KINDS)


def test_number_of_objectives_and_examples() -> None:
    counts: list[int] = []

    def look(factory: Factory, case: Case) -> None:
        counts.append(len(case.rows))
        assert all(len(earlier) == len(case.rows) == len(case.order) == len(case.scales) for earlier in case.earlier)

    check_balancer(gb.Mean, claims=[look], objectives=(2, 4), kinds=["singular"], max_examples=80)
    assert set(counts) == {2, 3, 4}
    assert 40 <= len(counts) <= 80


def test_bad_arguments_are_refused() -> None:
    for arguments, word in [
        ({"factory": gb.Mean(), "claims": [finite_output]}, "factory.*Pass the class"),
        ({"factory": lambda: torch.eye(2), "claims": [finite_output]}, "factory.*which made tensor"),
        ({"factory": "Mean", "claims": [finite_output]}, "factory"),
        ({"factory": gb.Mean, "claims": []}, "claims"),
        ({"factory": gb.Mean, "claims": ["simplex"]}, "claims"),
        ({"factory": gb.Mean, "claims": [finite_output], "tolerance": -1}, "tolerance"),
        ({"factory": gb.Mean, "claims": [finite_output], "max_examples": 0}, "max_examples"),
        ({"factory": gb.Mean, "claims": [finite_output], "kinds": ["odd"]}, "kinds"),
        ({"factory": gb.Mean, "claims": [finite_output], "objectives": 0}, "objectives"),
        ({"factory": gb.Mean, "claims": [gb.testing.equal_gain], "kinds": ["masked"]}, "equal_gain"),
    ]:
        factory = arguments.pop("factory")
        with pytest.raises(gb.InvalidArgumentError, match=word):
            check_balancer(factory, **arguments)
    with pytest.raises(gb.InvalidArgumentError, match="kinds"):
        on("odd")


def test_the_core_does_not_need_hypothesis_and_the_kit_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "import gradbalance\n"
        "assert 'hypothesis' not in sys.modules\n"
        "sys.modules['hypothesis'] = None\n"
        "try:\n    import gradbalance.testing\n"
        "except gradbalance.MissingDependencyError as error:\n    assert 'gradbalance[testing]' in str(error)\n"
        "else:\n    raise SystemExit('no error')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
