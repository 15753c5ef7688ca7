"""Handwritten digits and a network for them, which several programs of this folder train.

The digits come with scikit-learn (`pip install scikit-learn`). Numbers are float64. So the losses
of several ranks differ from those of one process only in the last digits, and an error is visible.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

TRAINING_IMAGES = 1440
BATCHES = 12  # of 120 images each, which divide equally among 2, 3, 4, 5, 6 or 8 ranks
EPOCHS = 5


def load(dtype=torch.float64):
    """Return images, shape (n, 64), and labels, shape (n,), for the training and for the test."""
    data = load_digits()
    images, labels = torch.tensor(data.data / 16, dtype=dtype), torch.tensor(data.target)
    training, test = slice(TRAINING_IMAGES), slice(TRAINING_IMAGES, None)
    return (images[training], labels[training]), (images[test], labels[test])


def network(hidden=64, dtype=torch.float64):
    """Return a network with two hidden layers; the seed makes it the same on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(hidden, 10)).to(dtype)


def optimizer_of(model):
    """Return the optimizer with which the programs of this folder train the network."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parts(images, labels, rank=0, world_size=1):
    """Yield this rank's images and labels of each batch; by default all of them."""
    for batch in range(BATCHES):
        mine = slice(batch + BATCHES * rank, None, BATCHES * world_size)
        yield images[mine], labels[mine]


def batch_after_batch(images, labels):
    """Return the same images and labels in another order, one batch after the other."""
    batches = list(parts(images, labels))
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))


def mean_over_ranks(value):
    """Return the mean of the ranks' values."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


def train(model, images, labels, rank=0, world_size=1):
    """Train, and return the mean loss of each epoch, over all ranks."""
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(EPOCHS):
        total = torch.zeros((), dtype=images.dtype)
        for some_images, some_labels in parts(images, labels, rank, world_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(some_images), some_labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = total / BATCHES
        losses.append(float(mean if world_size == 1 else mean_over_ranks(mean)))
    return losses


def compare_with_one_process(losses, images, labels):
    """Print a loss curve, and whether one process that trains on whole batches has the same."""
    print(f"{dist.get_world_size()} ranks, backend {dist.get_backend()}")
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch}  loss {loss!r}")
    alone = train(network(), images.double(), labels)
    bound = rounding(alone, images, labels)
    same = all(abs(a - b) <= bound * b for a, b in zip(losses, alone, strict=True))
    print(f"the same losses as one process, up to rounding: {same}")


def rounding(losses, images, labels):
    """Return the relative difference between two loss curves that rounding alone can cause.

    In float64, a sum over the 120 images of a batch that is added up in another order is off by at
    most 120 u = 1.4e-14 of the sum of the magnitudes, which may be some hundred times the sum. The
    60 steps add that up: 1e-10. In float32 such a bound is of little use. There the result is ten
    times the difference between one process that computes in float32 and one in float64, whose
    curve is given. A wrong or missing gradient changes the losses by over 1e-2.
    """
    if images.dtype == torch.float64:
        return 1e-10
    in_float32 = train(network(dtype=torch.float32), images, labels)
    return 10 * max(abs(a - b) / b for a, b in zip(in_float32, losses, strict=True))
