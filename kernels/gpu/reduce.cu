// The reduce kernel: every destination = source 0 op source 1 op ..., in one pass, left to right.
//
// Accumulators stay in registers whatever the number of sources; half types are rounded once. One
// thread reads and writes an element, so a destination may be a source. With the next rank's slot
// among the destinations, this is the step of a ring.
#include "operations.h"

namespace gpucoll {

struct ReduceArguments {
    uint64 count;      // number of elements
    uint64 parameter;  // bits of an Accumulator: a factor or a divisor
    uint32 n_sources, n_destinations;
    uint64 sources[GPUCOLL_MAX_RANKS];
    uint64 destinations[GPUCOLL_MAX_RANKS];
};

/* Reduce `BATCH` pieces, a block's width apart; `first` is the number of the first one's element. */
template <class Element, class Operation, class Piece, uint32 BATCH>
DEVICE void reduce_pieces(
    ARGUMENTS(ReduceArguments) arguments, typename Element::Accumulator parameter, uint64 first) {
    using Accumulator = typename Element::Accumulator;
    constexpr uint64 STRIDE_BYTES = (uint64)THREADS * Piece::SIZE_BYTES;
    constexpr uint32 WIDTH = Piece::WIDTH;
    const uint32 n_sources = arguments->n_sources, n_destinations = arguments->n_destinations;
    const uint64 offset = first * sizeof(typename Element::Storage);

    Piece next[BATCH];
    Accumulator total[BATCH][WIDTH];
    uint64 address = arguments->sources[0] + offset;
    Piece loaded[BATCH];
    UNROLL_LOOP
    for (uint32 i = 0; i < BATCH; ++i) loaded[i] = Piece::load(address + i * STRIDE_BYTES);
    if (n_sources > 1) {
        address = arguments->sources[1] + offset;
        UNROLL_LOOP
        for (uint32 i = 0; i < BATCH; ++i) next[i] = Piece::load(address + i * STRIDE_BYTES);
    }
    UNROLL_LOOP
    for (uint32 i = 0; i < BATCH; ++i) {
        UNROLL_LOOP
        for (uint32 j = 0; j < WIDTH; ++j)
            total[i][j] = Operation::prepare(Element::load(loaded[i].elements[j]), parameter);
    }
    KEEP_LOOP
    for (uint32 source = 1; source < n_sources; ++source) {
        UNROLL_LOOP
        for (uint32 i = 0; i < BATCH; ++i) loaded[i] = next[i];
        if (source + 1 < n_sources) {  // loaded while this one is combined
            address = arguments->sources[source + 1] + offset;
            UNROLL_LOOP
            for (uint32 i = 0; i < BATCH; ++i) next[i] = Piece::load(address + i * STRIDE_BYTES);
        }
        UNROLL_LOOP
        for (uint32 i = 0; i < BATCH; ++i) {
            UNROLL_LOOP
            for (uint32 j = 0; j < WIDTH; ++j) {
                Accumulator value = Operation::prepare(Element::load(loaded[i].elements[j]), parameter);
                total[i][j] = Operation::combine(total[i][j], value);
            }
        }
    }
    UNROLL_LOOP
    for (uint32 i = 0; i < BATCH; ++i) {
        UNROLL_LOOP
        for (uint32 j = 0; j < WIDTH; ++j)
            loaded[i].elements[j] = Element::store(Operation::finish(total[i][j], parameter));
    }
    KEEP_LOOP
    for (uint32 destination = 0; destination < n_destinations; ++destination) {
        address = arguments->destinations[destination] + offset;
        UNROLL_LOOP
        for (uint32 i = 0; i < BATCH; ++i) Piece::store(address + i * STRIDE_BYTES, loaded[i]);
    }
}

/* Reduce the full tiles of `pieces` pieces from element `first` on, the whole grid together. */
template <class Element, class Operation, class Piece, uint32 BATCH>
DEVICE void reduce_tiles(
    ARGUMENTS(ReduceArguments) arguments,
    typename Element::Accumulator parameter,
    uint64 first,
    uint64 tiles) {
    constexpr uint64 TILE = THREADS * BATCH;  // of pieces
    KEEP_LOOP
    for (uint64 tile = block_index(); tile < tiles; tile += grid_blocks()) {
        const uint64 piece = tile * TILE + thread_index();
        reduce_pieces<Element, Operation, Piece, BATCH>(
            arguments, parameter, first + piece * Piece::WIDTH);
    }
}

/* The bits in which addresses differ from an element's multiples, and from the first address. */
template <uint32 SIZE_BYTES>
DEVICE uint64 differences(ARGUMENTS(ReduceArguments) arguments) {
    const uint64 address = arguments->destinations[0];
    uint64 differ = address % SIZE_BYTES;
    KEEP_LOOP
    for (uint32 i = 0; i < arguments->n_sources; ++i) differ |= address ^ arguments->sources[i];
    KEEP_LOOP
    for (uint32 i = 1; i < arguments->n_destinations; ++i)
        differ |= address ^ arguments->destinations[i];
    return differ % VECTOR_BYTES;
}

template <class Element, class Operation>
DEVICE void reduce(ARGUMENTS(ReduceArguments) arguments) {
    using Accumulator = typename Element::Accumulator;
    using One = Aligned<Element, 1>;
    using Vector = Aligned<Element, VECTOR_BYTES / One::SIZE_BYTES>;
    constexpr uint32 BATCH = One::SIZE_BYTES == 1 ? 2 : 4;  // keeps accumulators in registers
    const uint64 count = arguments->count, differ = differences<One::SIZE_BYTES>(arguments);
    Accumulator parameter{};
    if constexpr (sizeof(Accumulator) <= sizeof(uint64)) {
        const uint64 bits = arguments->parameter;
        COPY_BITS(&parameter, &bits, sizeof(Accumulator));
    }
    // If every array is at a 16-byte boundary from `head` on, full tiles from there are reduced by
    // 16-byte accesses. If alignments differ, full tiles are reduced by elements. So many elements
    // are then loaded at once that a multiprocessor has 16 KB of a source under way (8 for one-byte
    // dtypes), and twice that for two sources: by estimate it needs 18 KB to keep its share of the
    // memory busy (3.3 TB/s for 700 ns, divided by 132). The rest is reduced one by one, as is
    // everything if arrays are not even aligned to their elements.
    uint64 head = 0, middle = 0;
    if (differ == 0) {
        constexpr uint64 TILE = (uint64)THREADS * BATCH * Vector::WIDTH;
        head = (0 - arguments->destinations[0]) % VECTOR_BYTES / One::SIZE_BYTES;
        const uint64 tiles = head < count ? (count - head) / TILE : 0;
        middle = tiles * TILE;
        reduce_tiles<Element, Operation, Vector, BATCH>(arguments, parameter, head, tiles);
    } else if constexpr (One::SIZE_BYTES < VECTOR_BYTES) {
        if (differ % One::SIZE_BYTES == 0) {
            constexpr uint32 AT_ONCE = One::SIZE_BYTES < 4 ? 16 : 8;
            const uint64 tiles = count / (THREADS * AT_ONCE);
            middle = tiles * THREADS * AT_ONCE;
            reduce_tiles<Element, Operation, One, AT_ONCE>(arguments, parameter, 0, tiles);
        }
    }
    KEEP_LOOP
    for (uint64 i = block_index() * (uint64)THREADS + thread_index(); i < count - middle;
         i += grid_blocks() * (uint64)THREADS)
        reduce_pieces<Element, Operation, Anywhere<Element>, 1>(
            arguments, parameter, i < head ? i : i + middle);
}

}  // namespace gpucoll

#define REDUCE(name, Element, Operation) \
    KERNEL(name, 2, gpucoll::ReduceArguments, gpucoll::reduce<gpucoll::Element, gpucoll::Operation>)
