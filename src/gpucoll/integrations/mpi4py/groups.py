"""Groups of processes: the members of a communicator, and set operations on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpucoll.integrations.mpi4py.constants import IDENT, PROC_NULL, SIMILAR, UNDEFINED, UNEQUAL
from gpucoll.integrations.mpi4py.errors import argument_error
from gpucoll.integrations.mpi4py.handles import Handle

if TYPE_CHECKING:
    from typing_extensions import Self


class Core:
    """The members' ranks in COMM_WORLD, in the group's order, and this process's."""

    def __init__(self, ranks: Sequence[int], mine: int) -> None:
        self.ranks, self.mine = tuple(ranks), mine


class Group(Handle):
    """An ordered set of processes."""

    @property
    def _ranks(self) -> tuple[int, ...]:
        ranks: tuple[int, ...] = self._live("ERR_GROUP").ranks
        return ranks

    def _made(self, ranks: Iterable[int]) -> Self:
        return type(self)._of(Core(tuple(ranks), self._core.mine))

    def Get_size(self) -> int:
        return len(self._ranks)

    def Get_rank(self) -> int:
        ranks = self._ranks
        return ranks.index(self._core.mine) if self._core.mine in ranks else UNDEFINED

    size = property(Get_size)
    rank = property(Get_rank)

    def Translate_ranks(
        self, ranks: Sequence[int] | None = None, group: Group | None = None
    ) -> list[int]:
        """Return the ranks in another group of ranks of this group; UNDEFINED for non-members."""
        mine = self._ranks
        other = mine if group is None else group._ranks
        places = {rank: place for place, rank in enumerate(other)}
        asked = range(len(mine)) if ranks is None else ranks
        for rank in asked:
            if rank != PROC_NULL:
                self._check(rank)
        return [
            PROC_NULL if rank == PROC_NULL else places.get(mine[rank], UNDEFINED) for rank in asked
        ]

    def Compare(self, group: Group) -> int:
        one, other = self._ranks, group._ranks
        if one == other:
            return IDENT
        return SIMILAR if sorted(one) == sorted(other) else UNEQUAL

    def Dup(self) -> Self:
        return self._made(self._ranks)

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Self:
        one = group1._ranks
        return cls._with(group1, group2, (*one, *(r for r in group2._ranks if r not in one)))

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Self:
        return cls._with(group1, group2, [r for r in group1._ranks if r in group2._ranks])

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Self:
        return cls._with(group1, group2, [r for r in group1._ranks if r not in group2._ranks])

    @classmethod
    def _with(cls, group1: Group, group2: Group, ranks: Iterable[int]) -> Self:
        # the empty group has no rank of this process
        mine = max(group1._core.mine, group2._core.mine)
        return cls._of(Core(tuple(ranks), mine))

    def Incl(self, ranks: Sequence[int]) -> Self:
        members = self._ranks
        if len(set(ranks)) != len(ranks):
            raise argument_error(f"{list(ranks)} contains a rank twice", "ERR_RANK")
        return self._made([members[self._check(rank)] for rank in ranks])

    def Excl(self, ranks: Sequence[int]) -> Self:
        without = {self._check(rank) for rank in ranks}
        return self._made(r for place, r in enumerate(self._ranks) if place not in without)

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        return self.Incl(_spread(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        return self.Excl(_spread(ranks))

    def Free(self) -> None:
        self._live("ERR_GROUP")
        self._core = None

    def free(self) -> None:
        """Free it unless it is null."""
        if self is not GROUP_EMPTY:
            self._core = None

    def _check(self, rank: int) -> int:
        if not 0 <= rank < len(self._ranks):
            raise argument_error(
                f"rank must be 0 to {len(self._ranks) - 1}; got {rank}", "ERR_RANK"
            )
        return rank

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None:
            return self._reduced("GROUP_NULL")
        if self._core is GROUP_EMPTY._core:
            return self._reduced("GROUP_EMPTY")
        raise ValueError("a group cannot be pickled")


def _spread(ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    ranks: list[int] = []
    for first, last, stride in ranges:
        if stride == 0:
            raise argument_error(f"stride 0 in {list(ranges)}")
        ranks.extend(range(first, last + (1 if stride > 0 else -1), stride))
    return ranks


GROUP_NULL = Group()
GROUP_EMPTY = Group._of(Core((), -1))
