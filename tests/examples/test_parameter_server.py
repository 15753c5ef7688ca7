"""The classic parameter servers do what plain stochastic gradient descent does."""

from __future__ import annotations

import numpy as np
import pytest
from tests.examples.test_examples import EXAMPLES, check_program
from tests.examples.test_examples import example as named

from gpucoll.tables import SGD, Adagrad, Staleness, Table


def example(name: str) -> dict:
    """Return the names that an example defines."""
    return named(f"parameter_server/{name}")


def with_constant(images, labels):
    return np.hstack([images, np.ones((len(images), 1))]).astype(np.float32), labels


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ways_learn_digits_and_the_synchronous_ones_as_one_process(ranks, digits, world_size):
    module = example("digits")
    replies = ranks.call(world_size, module["main"], *digits)
    found, expected = replies[0]
    names = [*found]
    assert len(names) == 4
    for of_rank, _ in replies:
        for name in names[:2]:
            assert of_rank[name].tobytes() == expected.tobytes(), name
    for name in names:
        assert module["accuracy"](found[name], with_constant(*digits)) > 0.85, name


def in_two_modes(comm, in_step, data):
    return [in_step(comm, data, 5, mode) for mode in ("sync", Staleness(0))]


def test_no_staleness_is_synchronous(ranks, digits):
    for one, other in ranks.call(
        2, in_two_modes, example("digits")["in_step"], with_constant(*digits)
    ):
        assert one.tobytes() == other.tobytes()


def plain(module, data, update):
    """Return the weights that one process alone comes to, by NumPy."""
    weights = np.zeros(module["SHAPE"], np.float32)
    sums = np.zeros_like(weights)
    for batch in module["batches"](data, 0):
        found = module["gradient"](weights, *batch)
        if isinstance(update, SGD):
            weights -= np.float32(update.lr) * found
        else:
            sums += found * found
            weights -= np.float32(update.lr) * found / (np.sqrt(sums) + np.float32(update.epsilon))
    return weights


@pytest.mark.parametrize("update", [SGD(1.0), Adagrad(0.1)], ids=str)
def test_downpour_with_one_worker_is_plain_descent(ranks, digits, update):
    module, data = example("digits"), with_constant(*digits)
    (found,) = ranks.call(1, module["downpour"], data, 1, 1, update)
    assert found.tobytes() == plain(module, data, update).tobytes()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 1), (10, 3), (4, 15)])
def test_downpour_learns(ranks, digits, n_fetch, n_push):
    module, data = example("digits"), with_constant(*digits)
    for weights in ranks.call(3, module["downpour"], data, n_fetch, n_push):
        assert module["accuracy"](weights, data) > 0.85


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_hogwild_makes_hardly_more_errors_than_one_process(ranks, world_size):
    weights, expected, errors = ranks.call(world_size, example("hogwild")["main"])[0]
    assert errors[0] < errors[1] + 0.02 < 0.25
    if world_size == 1:
        assert weights.tobytes() == expected.tobytes()


# --- word2vec -------------------------------------------------------------------------------------


def learned(comm, module, start, tokens, article, centres, negatives):
    width = module["WIDTH"]
    with Table(comm, 9, width, init=start[0]) as near, Table(comm, 9, width, init=start[1]) as far:
        random = np.random.default_rng(5)
        module["learn"](near, far, tokens, article, centres, negatives, random, 0.5)
        return near.snapshot(), far.snapshot()


def test_word2vec_learns_each_pair_as_the_formula_says(ranks):
    module = example("word2vec")
    width, window = module["WIDTH"], module["WINDOW"]
    draw = np.random.default_rng(0)
    start = draw.normal(size=(2, 9, width)).astype(np.float32) / 4
    tokens, article = draw.integers(0, 9, 30), np.repeat([0, 1, 2], [11, 4, 15])
    centres = np.array([0, 3, 10, 11, 14, 20, 29])
    negatives = draw.integers(0, 9, (len(centres), 5))
    near, far = start.astype(np.float64)
    reaches = np.random.default_rng(5).integers(1, window, len(centres), endpoint=True)
    for centre, reach, drawn in zip(centres, reaches, negatives, strict=True):
        for place in range(centre - reach, centre + reach + 1):
            if place in (centre, -1) or not 0 <= place < 30 or article[place] != article[centre]:
                continue
            context, word = tokens[place], tokens[centre]
            for other in [word, *drawn[drawn != word]]:
                is_word = other is word
                score = start[0][context].astype(float) @ start[1][other]
                step = 0.5 * (is_word - 1 / (1 + np.exp(-score)))
                near[context] += step * start[1][other]
                far[other] += step * start[0][context]
    found = ranks.call(1, learned, module, start, tokens, article, centres, negatives)[0]
    np.testing.assert_allclose(found[0], near, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found[1], far, rtol=0, atol=1e-4)


@pytest.mark.soak
def test_word2vec_finds_what_gensim_finds(ranks):
    pytest.importorskip("gensim", reason="needs gensim, which has the corpus")
    (found,), (theirs,), _ = ranks.call(2, example("word2vec")["main"], (1,), 4, limit_s=300)[0]
    # Seeds of either differ by up to 0.04. What has learned nothing is at 0.1.
    assert theirs > 0.2
    assert abs(found - theirs) < 0.08


@pytest.mark.soak
@pytest.mark.parametrize("name", ["digits", "hogwild"])
def test_example_is_a_program_for_gpucoll_run(name):
    if name == "digits":
        pytest.importorskip("sklearn", reason="needs scikit-learn's digits")
    program = EXAMPLES / "parameter_server" / f"{name}.py"
    check_program("-m", "gpucoll.launcher.cli", "-n", "2", str(program))
