"""Distributed k-means: find the eight colours that best represent the pixels of a picture.

Rank 0 has the picture and scatters its pixels as evenly as possible. In every round each rank
assigns its own pixels to the nearest centre. The sums and sizes of the clusters are added over all
ranks, so that every rank computes the same new centres. At the end the labels are gathered. Alone
or on four ranks:

    python examples/kmeans.py
    gpucoll-run -n 4 examples/kmeans.py

Colours are whole numbers, which float64 adds without rounding. So the clusters are the same on any
number of ranks; rank 0 checks this by clustering all pixels alone.
"""

import numpy as np

import gpucoll


def picture(height=151, width=110, seed=7):
    """Return the pixels of a picture of sky, sun and sea: shape (height * width, 3), 0 to 255."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / height
    sky = np.stack([90 + 120 * y, 150 + 60 * y, 230 - 40 * y], axis=-1)
    sea = np.stack([20 + 40 * x, 60 + 60 * x, 110 + 30 * y], axis=-1)
    colors = np.where(y[..., None] < 0.6, sky, sea)
    colors[(y - 0.4) ** 2 + (x - 0.3) ** 2 < 0.02] = 250, 200, 80
    noisy = colors + random.normal(scale=6, size=colors.shape)
    return noisy.round().clip(0, 255).reshape(-1, 3)


def kmeans(comm, points, centers, max_rounds=200):
    """Return the cluster of each point of this rank, and the centres of all clusters.

    `points`, shape (n, d), are this rank's points; `centers`, shape (k, d), are the same on every
    rank.
    """
    for _ in range(max_rounds):
        distances = ((points[:, None, :] - centers) ** 2).sum(axis=2)
        labels = distances.argmin(axis=1)

        sums = np.zeros_like(centers)
        np.add.at(sums, labels, points)
        sizes = np.bincount(labels, minlength=len(centers)).astype(float)
        sums, sizes = comm.all_reduce([sums, sizes])

        filled = sizes > 0  # a centre without points stays where it is
        before, centers = centers, centers.copy()
        centers[filled] = sums[filled] / sizes[filled, None]
        if (centers == before).all():  # true on all ranks or on none, since they have the same bits
            break
    return labels, centers


def main(comm, k=8, seed=3):
    """Cluster the picture on all ranks, then on rank 0 alone; return both results on rank 0."""
    pixels = picture() if comm.rank == 0 else None
    n = comm.broadcast_object(len(pixels) if comm.rank == 0 else None)
    counts = [len(part) for part in np.array_split(np.arange(n), comm.world_size)]
    mine = comm.scatter(pixels, counts=counts, out=np.empty((counts[comm.rank], 3)))

    start = np.empty((k, 3))
    if comm.rank == 0:
        start[:] = np.random.default_rng(seed).choice(pixels, k, replace=False)
    comm.broadcast(start, out=start)

    labels, centers = kmeans(comm, mine, start)
    labels = comm.gather(labels, counts=counts)

    with comm.split(color=comm.rank) as alone:  # each rank gets a communicator of its own
        if comm.rank > 0:
            return None
        labels_alone, centers_alone = kmeans(alone, pixels, start)
    sizes = np.bincount(labels, minlength=k)
    for color, size in zip(centers.round(1), sizes, strict=True):
        print(f"{size:6} pixels near {color}")
    same = (labels == labels_alone).all() and (centers == centers_alone).all()
    print(f"the same clusters as one process alone: {same}")
    return labels, centers, labels_alone, centers_alone


if __name__ == "__main__":
    with gpucoll.init() as comm:
        main(comm)
