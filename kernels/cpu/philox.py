"""Random bits from counters, as LLVM IR: Philox4x32-10 (Salmon et al., SC 2011), vector by vector.

A block of 256 elements uses 32 counters of four words. Element e of its block gets the lower half
(e < 128) or the upper half of word ``e % 4`` of counter ``(e % 128) // 4``. So the bits depend only
on seed, sequence and place, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from gpucoll.kernels.cpu.codegen import I32, I64, constant, vector
from gpucoll.kernels.cpu.reduce import splat

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
COUNTERS = 32
"""Number of counters per block."""


@dataclass(frozen=True)
class Generator:
    """The values that the bits of all blocks share, as vectors of `lanes` counters.

    Made from a table in memory: seed, sequence and the number of the first block, 64 bits each.
    """

    keys: list[tuple[ir.Value, ir.Value]]
    sequence: tuple[ir.Value, ir.Value]
    first_block: ir.Value
    lanes: int

    @staticmethod
    def of(b: ir.IRBuilder, table: ir.Value, lanes: int) -> Generator:
        """Load the table at an address."""
        base = b.inttoptr(table, I64.as_pointer())
        seed, sequence, first_block = (
            b.load(b.gep(base, [I64(place)], source_etype=I64), align=8, typ=I64)
            for place in range(3)
        )
        keys, (low, high) = [], _halves(b, seed)
        for _ in range(_ROUNDS):
            keys.append((splat(b, low, lanes), splat(b, high, lanes)))
            low, high = b.add(low, I32(_WEYL[0])), b.add(high, I32(_WEYL[1]))
        low, high = (splat(b, half, lanes) for half in _halves(b, sequence))
        return Generator(keys, (low, high), first_block, lanes)

    def draw(self, b: ir.IRBuilder, block: ir.Value, first: ir.Value) -> list[ir.Value]:
        """Return the words of the block's counters from `first` on, as four vectors of elements."""
        base = b.mul(b.add(self.first_block, block), I64(COUNTERS))
        low, high = _halves(b, base)
        ints = vector(I32, self.lanes)
        steps = ir.Constant(ints, list(range(self.lanes)))
        counters = b.add(splat(b, b.add(low, b.trunc(first, I32)), self.lanes), steps)
        words = [counters, splat(b, high, self.lanes), *self.sequence]
        for key in self.keys:
            words = _round(b, words, key)
        return _interleave(b, words)


def _halves(b: ir.IRBuilder, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    return b.trunc(value, I32), b.trunc(b.lshr(value, I64(32)), I32)


def _multiply(b: ir.IRBuilder, x: ir.Value, factor: int) -> tuple[ir.Value, ir.Value]:
    """Return the upper and the lower halves of 64-bit products.

    Even and odd lanes are multiplied separately, as x86 does, so that no lane has to move far.
    """
    lanes = x.type.count
    wide = vector(I64, lanes // 2)

    def products(lanes_to_use: ir.Value) -> ir.Value:
        pairs = b.and_(b.bitcast(lanes_to_use, wide), constant(wide, 0xFFFFFFFF))
        return b.bitcast(b.mul(pairs, constant(wide, factor)), x.type)

    odd_lanes = _shuffle(b, x, x, [lane | 1 for lane in range(lanes)])
    even, odd = products(x), products(odd_lanes)
    lower = [(lane & ~1) + lanes * (lane & 1) for lane in range(lanes)]
    return _shuffle(b, even, odd, [place + 1 for place in lower]), _shuffle(b, even, odd, lower)


def _round(
    b: ir.IRBuilder, words: list[ir.Value], key: tuple[ir.Value, ir.Value]
) -> list[ir.Value]:
    high0, low0 = _multiply(b, words[0], _MULTIPLIERS[0])
    high1, low1 = _multiply(b, words[2], _MULTIPLIERS[1])
    first, third = b.xor(b.xor(high1, words[1]), key[0]), b.xor(b.xor(high0, words[3]), key[1])
    return [first, low1, third, low0]


def _interleave(b: ir.IRBuilder, words: list[ir.Value]) -> list[ir.Value]:
    """Turn the word vectors of counters into the words of each counter, one after another."""
    even = _zip(b, words[0], words[2])
    odd = _zip(b, words[1], words[3])
    return [mixed for pair in zip(even, odd, strict=True) for mixed in _zip(b, *pair)]


def _zip(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    lanes = x.type.count
    places = [place for lane in range(lanes) for place in (lane, lanes + lane)]
    return _shuffle(b, x, y, places[:lanes]), _shuffle(b, x, y, places[lanes:])


def _shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, places: list[int]) -> ir.Value:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(places)), places))
