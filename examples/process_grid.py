"""A two-dimensional grid of ranks: C = A B, with one block of each matrix per rank (SUMMA).

Six ranks make a grid of 2 x 3. Two calls of split give each rank a communicator for its row and one
for its column. Panel by panel, the blocks of A are broadcast along the rows and those of B along
the columns; each rank multiplies the panels that it receives and adds up the products. Alone or on
four ranks:

    python examples/process_grid.py
    gpucoll-run -n 4 examples/process_grid.py

The matrices contain small whole numbers, so NumPy's product of the whole matrices has the same
bits.

van de Geijn and Watts, SUMMA: Scalable Universal Matrix Multiplication Algorithm, 1997.
"""

import math

import numpy as np

import gpucoll


def grid_shape(world_size):
    """Return rows and columns of the grid: as square as the number of ranks allows."""
    rows = max(n for n in range(1, math.isqrt(world_size) + 1) if world_size % n == 0)
    return rows, world_size // rows


def to_blocks(matrix, rows, columns):
    """Return the blocks of a matrix, one below the other, in rank order."""
    height, width = matrix.shape[0] // rows, matrix.shape[1] // columns
    blocks = matrix.reshape(rows, height, columns, width).swapaxes(1, 2)
    return blocks.reshape(-1, width)


def from_blocks(blocks, rows, columns):
    """Return the matrix of these blocks; the inverse of `to_blocks`."""
    height, width = blocks.shape[0] // (rows * columns), blocks.shape[1]
    grid = blocks.reshape(rows, columns, height, width).swapaxes(1, 2)
    return grid.reshape(rows * height, columns * width)


def multiply(along_row, along_column, a, b):
    """Return this rank's block of A B; `a` and `b` are its blocks of A and B."""
    columns, rows = along_row.world_size, along_column.world_size
    panels = math.lcm(rows, columns)  # so that no panel crosses the border of a block
    width = a.shape[1] * columns // panels
    c = np.zeros((a.shape[0], b.shape[1]))
    for panel in range(panels):
        a_owner, a_place = divmod(panel, panels // columns)
        b_owner, b_place = divmod(panel, panels // rows)
        a_slice = slice(a_place * width, (a_place + 1) * width)
        b_slice = slice(b_place * width, (b_place + 1) * width)
        a_panel = along_row.broadcast(a[:, a_slice], root=a_owner)
        b_panel = along_column.broadcast(b[b_slice], root=b_owner)
        c += a_panel @ b_panel
    return c


def main(comm, size=240, seed=5):
    """Multiply on all ranks; return the product on rank 0, and NumPy's product."""
    rows, columns = grid_shape(comm.world_size)
    if size % math.lcm(rows, columns):
        raise ValueError(f"size must be a multiple of {math.lcm(rows, columns)}; got {size}")
    blocks = {"A": None, "B": None}
    if comm.rank == 0:
        random = np.random.default_rng(seed)
        matrices = {name: random.integers(-9, 10, (size, size)).astype(float) for name in blocks}
        blocks = {name: to_blocks(matrix, rows, columns) for name, matrix in matrices.items()}
    shape = size // rows, size // columns
    a = comm.scatter(blocks["A"], out=np.empty(shape))
    b = comm.scatter(blocks["B"], out=np.empty(shape))

    row, column = divmod(comm.rank, columns)
    with comm.split(color=row, key=column) as along_row, comm.split(column, row) as along_column:
        c = multiply(along_row, along_column, a, b)

    product = comm.gather(c)
    if comm.rank > 0:
        return None
    product = from_blocks(product, rows, columns)
    expected = matrices["A"] @ matrices["B"]
    print(f"{size} x {size} on a grid of {rows} x {columns} ranks")
    print(f"equal to NumPy's product: {(product == expected).all()}")
    return product, expected


if __name__ == "__main__":
    with gpucoll.init() as comm:
        main(comm)
