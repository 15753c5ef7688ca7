"""What each collective is: who gives, who gets, and how input and result relate.

The members of `Collective` are the one table of these facts. Code that depends on what a collective
is reads its attributes and does not compare its name.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final, NamedTuple

from gpucoll.codes import Codes

NO_ROOT: Final = -1
"""The root of a collective that has none."""


class Flow(Codes):
    """Between which ranks data goes."""

    ALL = 0
    FROM_ROOT = 1
    TO_ROOT = 2


class Operands(Codes):
    """The ranks whose inputs a reduction combines into a rank's result, in rank order."""

    ALL = 0
    UP_TO_OWN = 1
    BEFORE_OWN = 2


class Data(Codes):
    """What users pass to a call."""

    NOTHING = 0
    ARRAYS = 1
    OBJECTS = 2


class Pattern(NamedTuple):
    """What a collective is; `Collective` has these attributes, but `spelled` in place of `method`.

    Attributes
    ----------
    flow : Flow
        Which ranks have an input, and which a result.
    spreads : bool
        Whether an input consists of one block for each rank.
    gathers : bool
        Whether a result consists of one block from each rank.
    reduces : bool
        Whether an op combines the ranks' inputs.
    operands : Operands
        If it reduces: whose inputs.
    data : Data
        What users pass.
    is_list : bool
        Whether an input is a list of arrays, reduced as one.
    is_composed : bool
        Whether it is made of other collectives, under a signature of its own (`PartOf`).
    method : str
        The method of `Communicator`; empty if the method has the collective's name.
    """

    flow: Flow = Flow.ALL
    spreads: bool = False
    gathers: bool = False
    reduces: bool = False
    operands: Operands = Operands.ALL
    data: Data = Data.ARRAYS
    is_list: bool = False
    is_composed: bool = False
    method: str = ""


_REDUCTION = Pattern(reduces=True)
_OBJECTS = Pattern(data=Data.OBJECTS)
_NO_DATA = Pattern(data=Data.NOTHING)


class Collective(Codes):
    """The kind of a call, as its number in a signature; a `Pattern` says what it is."""

    BARRIER = 1, _NO_DATA
    ALL_REDUCE = 2, _REDUCTION
    BROADCAST = 3, Pattern(Flow.FROM_ROOT)
    BROADCAST_OBJECT = 4, Pattern(Flow.FROM_ROOT, data=Data.OBJECTS)
    ALL_GATHER_OBJECT = 5, _OBJECTS
    GATHER_OBJECT = 6, Pattern(Flow.TO_ROOT, data=Data.OBJECTS)
    SCATTER_OBJECT = 7, Pattern(Flow.FROM_ROOT, data=Data.OBJECTS)
    ALL_REDUCE_OBJECT = 8, _OBJECTS
    REDUCE = 11, Pattern(Flow.TO_ROOT, reduces=True)
    ALL_GATHER = 12, Pattern(gathers=True)
    GATHER = 13, Pattern(Flow.TO_ROOT, gathers=True)
    REDUCE_SCATTER = 14, Pattern(spreads=True, reduces=True)
    SCATTER = 15, Pattern(Flow.FROM_ROOT, spreads=True)
    ALL_TO_ALL = 16, Pattern(spreads=True, gathers=True)
    SCAN = 17, Pattern(reduces=True, operands=Operands.UP_TO_OWN)
    EXCLUSIVE_SCAN = 18, Pattern(reduces=True, operands=Operands.BEFORE_OWN)
    ALL_REDUCE_LIST = 22, Pattern(reduces=True, is_list=True, method="all_reduce")
    COMPRESSED_ALL_REDUCE = 23, Pattern(reduces=True, is_composed=True, method="all_reduce")
    # Messages.
    SEND = 20, _NO_DATA
    RECV = 21, _NO_DATA
    # Other calls that all ranks make, and parts of calls.
    SPLIT = 9, _NO_DATA
    DUPLICATE = 10, _NO_DATA
    GROW = 26, _NO_DATA
    COUNTS = 19, _NO_DATA
    CONNECT = 24, _NO_DATA
    UNFIT = 25, _NO_DATA

    __hash__ = int.__hash__  # an enumeration's own hash is that of the name, in Python code

    def __new__(cls, number: int, pattern: Pattern = _NO_DATA) -> Collective:
        """Make the member with this number."""
        made = int.__new__(cls, number)
        made._value_ = number
        return made

    def __init__(self, number: int, pattern: Pattern = _NO_DATA) -> None:
        self.flow, self.spreads, self.gathers = pattern.flow, pattern.spreads, pattern.gathers
        self.reduces, self.operands = pattern.reduces, pattern.operands
        self.data, self.is_list = pattern.data, pattern.is_list
        self.is_composed = pattern.is_composed
        self.spelled = pattern.method or self.name.lower()

    @cached_property
    def has_root(self) -> bool:
        """Whether one rank gives or gets all data."""
        return self.flow != Flow.ALL

    @cached_property
    def has_blocks(self) -> bool:
        """Whether there are blocks, one for each rank; their sizes may differ."""
        return self.spreads or self.gathers

    @cached_property
    def is_exchange(self) -> bool:
        """Whether each rank sends a block to each rank, so that ranks know only their own sizes."""
        return self.spreads and self.gathers

    @cached_property
    def is_scan(self) -> bool:
        """Whether each rank gets another result, of the ranks up to it or before it."""
        return self.operands != Operands.ALL

    @cached_property
    def excludes_own(self) -> bool:
        """Whether a scan leaves out a rank's own input."""
        return self.operands == Operands.BEFORE_OWN

    @cached_property
    def knows_one_block(self) -> bool:
        """Whether only the root knows the whole input: ranks compare the size of a block."""
        return self.spreads and self.flow == Flow.FROM_ROOT

    @cached_property
    def takes_lists(self) -> bool:
        """Whether x may be a list of arrays, which move together."""
        return self.data == Data.ARRAYS and not self.has_blocks and not self.is_scan

    @cached_property
    def of_one(self) -> Collective:
        """The collective that does with one array what this one does with a list."""
        return Collective.ALL_REDUCE if self.is_list else self

    @cached_property
    def of_list(self) -> Collective | None:
        """The collective that does in one call with a list what this one does with an array."""
        return Collective.ALL_REDUCE_LIST if self is Collective.ALL_REDUCE else None

    def bus_factor(self, world_size: int) -> float:
        """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it.

        The bus bandwidth is that of the busiest link, so that times can be compared with the
        hardware's limits. For a collective that nccl-tests lacks the factor is 1.
        """
        others = (world_size - 1) / world_size
        if self.has_blocks:
            return others
        is_all_reduce = self.reduces and not self.has_root and not self.is_scan
        return 2 * others if is_all_reduce else 1.0

    def rows_factor(self, world_size: int) -> tuple[int, int]:
        """Return factor and divisor from the rows of x to those of a result, without counts."""
        return world_size if self.gathers else 1, world_size if self.spreads else 1

    def gives(self, rank: int, root: int) -> bool:
        """Return whether a rank has an input."""
        return self.flow != Flow.FROM_ROOT or rank == root

    def gets(self, rank: int, root: int) -> bool:
        """Return whether a rank has a result."""
        return self.flow != Flow.TO_ROOT or rank == root

    def n_operands(self, rank: int, world_size: int) -> int:
        """Return how many ranks' inputs, from rank 0 on, a reduction combines for a rank."""
        if self.operands == Operands.ALL:
            return world_size
        return rank + 1 if self.operands == Operands.UP_TO_OWN else rank
