"""Tables and arrays that processes share without calling together: a parameter server's parts.

>>> from gpucoll.tables import Table
>>> table = Table(comm, 100_000, 64, update="adagrad")
>>> table.push(ids, gradient(table.pull(ids)))

See `docs/tables.md`.
"""

from gpucoll.tables.setup import Staleness
from gpucoll.tables.several_hosts import RowsLostError
from gpucoll.tables.table import Table
from gpucoll.tables.updates import SGD, Adagrad

__all__ = ["SGD", "Adagrad", "RowsLostError", "Staleness", "Table"]
