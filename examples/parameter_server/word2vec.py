"""word2vec (Mikolov et al. 2013): all ranks learn the same vectors of words, at the same time.

Skip-gram with negative sampling, on a corpus that comes with gensim: 500 stemmed articles of
Wikipedia. The vectors are two tables that the ranks of a host share, one of a word as a neighbour
and one of it as the word to guess. Each rank learns its share of the articles and waits for nobody,
as gensim's threads do. The words of a batch are learned together, and the neighbours of a word
share its negative samples, so that all is products of matrices (Ji et al. 2016).

    pip install gensim
    OMP_NUM_THREADS=1 gpucoll-run -n 2 examples/parameter_server/word2vec.py

Rank 0 then lets gensim learn the same with as many threads. The vectors of both must correlate
alike with what people say of pairs of words (WordSim-353).
"""

import time

import numpy as np

import gpucoll
from gpucoll.tables import Table

WIDTH, WINDOW, NEGATIVES, LEAST_COUNT = 100, 5, 5, 5
FIRST_RATE, LAST_RATE, SAMPLE, BATCH = 0.025, 0.0001, 1e-3, 128
OFFSETS = np.array([offset for offset in range(-WINDOW, WINDOW + 1) if offset])


def corpus():
    """Return gensim's articles as lists of words, and the words by frequency with their counts."""
    from gensim.test.utils import datapath

    with open(datapath("head500.noblanks.cor"), encoding="utf-8") as file:
        articles = [line.lower().split() for line in file]
    words, counts = np.unique(np.concatenate(articles), return_counts=True)
    order = np.argsort(-counts, kind="stable")[: (counts >= LEAST_COUNT).sum()]
    return articles, words[order].tolist(), counts[order]


def learn(near, far, tokens, article, centres, negatives, random, rate):
    """Learn to guess the words at the positions `centres` from their neighbours."""
    reach = random.integers(1, WINDOW, len(centres), endpoint=True)[:, None]
    positions = centres[:, None] + OFFSETS
    is_near = (np.abs(OFFSETS) <= reach) & (positions >= 0) & (positions < len(tokens))
    positions *= is_near
    is_near &= article[positions] == article[centres][:, None]
    context = tokens[positions[is_near]]
    guesses = np.hstack([tokens[centres][:, None], negatives])
    given = np.zeros((*is_near.shape, WIDTH), np.float32)
    given[is_near] = near.pull(context)
    guessed = far.pull(guesses)
    error = -0.5 - 0.5 * np.tanh(0.5 * (given @ guessed.transpose(0, 2, 1)))
    error[:, :, 0] += 1  # 1 for the word, 0 for the others, minus the logistic function
    error[:, :, 1:] *= (negatives != guesses[:, :1])[:, None]
    error *= np.float32(rate) * is_near[:, :, None]
    near.push(context, (error @ guessed)[is_near])
    far.push(guesses, error.transpose(0, 2, 1) @ given)


def train(comm, articles, words, counts, seed, epochs):
    """Return the vectors of all words."""
    random = np.random.default_rng([seed, comm.rank])
    start = np.random.default_rng(seed).random((len(words), WIDTH), np.float32) - np.float32(0.5)
    number = {word: place for place, word in enumerate(words)}
    own = [[number[word] for word in each if word in number] for each in articles]
    own = own[comm.rank :: comm.world_size]
    tokens, article = np.concatenate(own), np.repeat(np.arange(len(own)), [*map(len, own)])
    share = counts / counts.sum() / SAMPLE
    kept = (np.sqrt(share) + 1) / share  # frequent words are left out more often
    noise = np.cumsum(counts**0.75)
    with (
        Table(comm, len(words), WIDTH, init=start / WIDTH) as near,
        Table(comm, len(words), WIDTH) as far,
    ):
        for epoch in range(epochs):
            here = np.flatnonzero(random.random(len(tokens)) < kept[tokens])
            of_epoch, their_article = tokens[here], article[here]
            drawn = np.searchsorted(noise, noise[-1] * random.random((len(here), NEGATIVES)))
            for first in range(0, len(here), BATCH):
                done = (epoch + first / len(here)) / epochs
                rate = FIRST_RATE + (LAST_RATE - FIRST_RATE) * done
                centres = np.arange(first, min(first + BATCH, len(here)))
                negatives = drawn[first : first + BATCH]
                learn(near, far, of_epoch, their_article, centres, negatives, random, rate)
        comm.barrier()
        return near.snapshot()


def of_gensim(articles, workers, seed, epochs):
    """Return gensim's vectors of the same corpus and the time that it took, in seconds."""
    from gensim.models import Word2Vec

    model = Word2Vec(
        sg=1, vector_size=WIDTH, window=WINDOW, negative=NEGATIVES, min_count=LEAST_COUNT,
        sample=SAMPLE, workers=workers, seed=seed,
    )  # fmt: skip
    model.build_vocab(articles)
    start = time.perf_counter()
    model.train(articles, total_examples=len(articles), epochs=epochs)
    return model.wv, time.perf_counter() - start


def correlation(vectors):
    """Return Spearman's correlation of gensim's vectors with WordSim-353."""
    from gensim.test.utils import datapath

    return float(vectors.evaluate_word_pairs(datapath("wordsim353.tsv"))[1][0])


def main(comm, seeds=(1, 2, 3), epochs=5):
    """Train here and by gensim; return both correlations, of each seed, and words a second."""
    articles, words, counts = corpus()
    total = epochs * sum(map(len, articles))
    found, theirs, speeds = [], [], []
    for seed in seeds:
        comm.barrier()
        start = time.perf_counter()
        vectors = train(comm, articles, words, counts, seed, epochs)
        took_s = time.perf_counter() - start
        if comm.rank == 0:
            from gensim.models import KeyedVectors

            of_words = KeyedVectors(WIDTH)
            of_words.add_vectors(words, vectors)
            found.append(correlation(of_words))
            of_words, their_s = of_gensim(articles, comm.world_size, seed, epochs)
            theirs.append(correlation(of_words))
            speeds.append((total / took_s, total / their_s))
            own, others = speeds[-1]
            print(f"seed {seed}: correlation {found[-1]:.3f}, of gensim {theirs[-1]:.3f}")
            print(f"        words a second {own:,.0f}, of gensim {others:,.0f}")
    if comm.rank == 0:
        apart = abs(np.mean(found) - np.mean(theirs))
        print(f"the mean correlations are less than 0.05 apart: {apart < 0.05}")
    return found, theirs, speeds


if __name__ == "__main__":
    with gpucoll.init() as comm:
        main(comm)
