"""Tables and arrays that processes share without calling together: a parameter server's parts.

>>> from gpucoll.tables import SGD, Published, Table
>>> table = Table(comm, rows=1_000_000, width=64, update=SGD(0.1))
>>> table.push(ids, gradients[ids])
>>> published = Published(comm, weights, source=0)
>>> version, weights = published.latest()

See `docs/tables.md`.
"""

from gpucoll.tables.published import Published
from gpucoll.tables.table import Staleness, Table
from gpucoll.tables.updates import SGD, Adagrad

__all__ = ["SGD", "Adagrad", "Published", "Staleness", "Table"]
