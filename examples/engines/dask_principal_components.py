"""Principal components of a Dask array, with one all_reduce between the workers.

    python examples/engines/dask_principal_components.py     # a cluster of this machine alone

Dask makes the array's blocks and keeps them on the workers. A function runs on every worker and
computes the sums for the covariance from the worker's part of the blocks. After one all_reduce of
three arrays, all ranks have the components.
"""

import dask.array
import numpy as np
from distributed import Client, LocalCluster

from gpucoll.integrations.dask import run

ROWS, COLUMNS, CHUNK = 6000, 8, 1000


def components(comm, scheduler):
    """Return the covariance's eigenvalues, computed from this rank's part of the blocks."""
    with Client(scheduler, set_as_default=False) as client:
        mine = client.gather(client.get_dataset("blocks")[comm.rank :: comm.world_size])
    rows = np.concatenate(mine) if mine else np.empty((0, COLUMNS))
    count, sums, products = comm.all_reduce(
        [np.array(float(len(rows))), rows.sum(axis=0), rows.T @ rows]
    )
    mean = sums / count
    return np.linalg.eigvalsh(products / count - np.outer(mean, mean))


def main():
    """Make the blocks, run the function on every worker, and compare with one process."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        random = dask.array.random.default_rng(0)
        scales = np.arange(1.0, COLUMNS + 1)
        table = random.normal(size=(ROWS, COLUMNS), chunks=(CHUNK, COLUMNS)) * scales
        blocks = client.compute(list(table.to_delayed().ravel()))
        client.publish_dataset(blocks=blocks)
        found = run(components, (client.scheduler.address,), client=client)
        expected = np.linalg.eigvalsh(np.cov(np.concatenate(client.gather(blocks)).T, bias=True))
    print("eigenvalues:", np.round(found[0], 1))
    same = all((each == found[0]).all() for each in found)
    print("as NumPy's, and the same on every rank:", same and np.allclose(found[0], expected))


if __name__ == "__main__":
    main()
