"""Halo exchange: heat spreads over a torus whose rows are divided among the ranks.

A cell's next temperature depends on its four neighbours. So in addition to its own rows, each rank
keeps a copy of the nearest row of the rank above and of the rank below: the halo. Two calls of
send_recv fetch it before every step. Alone or on four ranks:

    python examples/halo_exchange.py
    gpucoll-run -n 4 examples/halo_exchange.py

Every cell is computed by the same operations wherever it is, so the result equals that of one
process bit for bit; rank 0 checks this.
"""

import numpy as np

import gpucoll

DIFFUSION = 0.2  # diffusivity * time step / cell width**2; stable up to 0.25


def initial_temperatures(height, width):
    """Return a cold torus with one hot square."""
    temperatures = np.zeros((height, width))
    temperatures[height // 4 : height // 2, width // 4 : width // 2] = 100
    return temperatures


def exchange_halos(comm, field):
    """Fill the first and the last row of `field` from the ranks above and below."""
    above = (comm.rank - 1) % comm.world_size
    below = (comm.rank + 1) % comm.world_size
    comm.send_recv(field[1], dest=above, source=below, out=field[-1])
    comm.send_recv(field[-2], dest=below, source=above, out=field[0])


def step(rows, above, below):
    """Return the rows one time step later; `above` and `below` are the adjacent rows."""
    left, right = np.roll(rows, 1, axis=1), np.roll(rows, -1, axis=1)
    return rows + DIFFUSION * (above + below + left + right - 4 * rows)


def main(comm, height=203, width=120, steps=400):
    """Spread the heat; return the temperatures on rank 0, and those that it computes alone."""
    start = initial_temperatures(height, width) if comm.rank == 0 else None
    counts = [len(part) for part in np.array_split(np.arange(height), comm.world_size)]
    field = np.empty((counts[comm.rank] + 2, width))  # with a halo of one row on either side
    comm.scatter(start, counts=counts, out=field[1:-1])

    for _ in range(steps):
        exchange_halos(comm, field)
        field[1:-1] = step(field[1:-1], field[:-2], field[2:])

    hottest = comm.all_reduce(field[1:-1].max(), "max")
    temperatures = comm.gather(field[1:-1], counts=counts)
    if comm.rank > 0:
        return None

    alone = start
    for _ in range(steps):
        alone = step(alone, np.roll(alone, 1, axis=0), np.roll(alone, -1, axis=0))
    print(f"rows of each rank: {counts}; hottest after {steps} steps: {hottest:.6f}")
    print(f"equal to one process alone, bit for bit: {(temperatures == alone).all()}")
    return temperatures, alone


if __name__ == "__main__":
    with gpucoll.init() as comm:
        main(comm)
