// Many arrays into one buffer, and back, in one launch: copied, or converted with an optional scale.
//
// The work is cut into tiles, which are numbered across all segments. A block takes consecutive
// tiles: it searches for its first segment once, and then goes on from there.
#include "elements.h"

namespace gpucoll {

struct Segment {
    uint64 array;       // address
    uint64 offset;      // in the buffer, in bytes
    uint64 count;       // of elements, or of bytes if they are copied
    uint64 first_tile;  // number of its first tile
    uint64 kind;        // a Kind: that of the array's elements; not used if bytes are copied
    uint64 padding;     // bytes after it in the buffer that become zero
};

enum Kind : uint64 { FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2 };

struct PackArguments {
    uint64 buffer;   // address, a multiple of 16
    uint64 table;    // address of the segments, a multiple of 16; 0: there is only `only`
    uint64 n_segments;
    uint64 tiles;    // number of tiles of all segments
    uint64 share;    // number of tiles per block
    uint64 options;  // bit 0: into the buffer; bit 1: there is a scale
    uint64 scale;    // bits of a float, or of a double for float64
    Segment only;
};

constexpr uint64 INTO_BUFFER = 1, HAS_SCALE = 2;
constexpr uint64 TILE_BYTES = GPUCOLL_TILE_BYTES, TILE_ELEMENTS = GPUCOLL_TILE_ELEMENTS;

DEVICE uint64 first_tile_of(uint64 table, uint64 index) {
    const uint64 address = table + index * sizeof(Segment) + 3 * sizeof(uint64);
    return bits_as<uint64>(load_global<Bytes<8>>(address));
}

DEVICE Segment segment_at(uint64 table, uint64 index) {
    struct Parts {
        Bytes<16> parts[3];
    } read;
    UNROLL_LOOP
    for (uint32 i = 0; i < 3; ++i)
        read.parts[i] = load_global<Bytes<16>>(table + index * sizeof(Segment) + i * 16);
    return bits_as<Segment>(read);
}

DEVICE Segment only_segment(ARGUMENTS(PackArguments) arguments) {
    return {arguments->only.array, arguments->only.offset, arguments->only.count,
            arguments->only.first_tile, arguments->only.kind, arguments->only.padding};
}

/* Call ``body(segment, tile of the segment)`` for each of this block's tiles. */
template <class Body>
DEVICE void for_each_tile(ARGUMENTS(PackArguments) arguments, Body body) {
    const uint64 table = arguments->table, n_segments = arguments->n_segments;
    const uint64 share = arguments->share, first = block_index() * share;
    const uint64 last = first + share < arguments->tiles ? first + share : arguments->tiles;
    if (first >= last) return;
    uint64 low = 0, high = n_segments;  // finds the last segment that begins by `first`
    while (high - low > 1) {
        const uint64 middle = (low + high) / 2;
        if (first_tile_of(table, middle) <= first) {
            low = middle;
        } else {
            high = middle;
        }
    }
    KEEP_LOOP
    for (uint64 tile = first; tile < last; ++low) {
        const uint64 next = low + 1 < n_segments ? first_tile_of(table, low + 1) : last;
        const uint64 end = next < last ? next : last;
        if (end <= tile) continue;  // an empty segment
        const Segment segment = table == 0 ? only_segment(arguments) : segment_at(table, low);
        KEEP_LOOP
        for (; tile < end; ++tile) body(segment, tile - segment.first_tile);
    }
}

/* Zero the bytes between a segment and the next one, with its last tile. */
DEVICE void clear_padding(uint64 end, uint64 padding) {
    KEEP_LOOP
    for (uint64 i = thread_index(); i < padding; i += THREADS) store_global(end + i, Bytes<1>{{0}});
}

// --- copy -----------------------------------------------------------------------------------------

/* Copy the part of `size` bytes that is a multiple of the unit; return its size. */
template <uint32 UNIT>
DEVICE uint64 copy_units(uint64 destination, uint64 source, uint64 size) {
    constexpr uint32 BATCH = UNIT == 16 ? 4 : UNIT == 4 ? 8 : 16;  // enough accesses at a time
    const uint64 units = size / UNIT;
    uint64 i = thread_index();
    KEEP_LOOP
    for (; i + (BATCH - 1) * THREADS < units; i += BATCH * THREADS) {
        Bytes<UNIT> held[BATCH];
        UNROLL_LOOP
        for (uint32 j = 0; j < BATCH; ++j)
            held[j] = load_global<Bytes<UNIT>>(source + (i + j * THREADS) * UNIT);
        UNROLL_LOOP
        for (uint32 j = 0; j < BATCH; ++j)
            store_global(destination + (i + j * THREADS) * UNIT, held[j]);
    }
    KEEP_LOOP
    for (; i < units; i += THREADS)
        store_global(destination + i * UNIT, load_global<Bytes<UNIT>>(source + i * UNIT));
    return units * UNIT;
}

DEVICE void copy_bytes(uint64 destination, uint64 source, uint64 size) {
    const uint64 address = destination | source;
    uint64 done = 0;
    if (address % 16 == 0) {
        done = copy_units<16>(destination, source, size);
    } else if (address % 4 == 0) {
        done = copy_units<4>(destination, source, size);
    } else if (address % 2 == 0) {
        done = copy_units<2>(destination, source, size);
    }
    copy_units<1>(destination + done, source + done, size - done);
}

DEVICE void copy_segments(ARGUMENTS(PackArguments) arguments) {
    const bool is_pack = arguments->options & INTO_BUFFER;
    for_each_tile(arguments, [=](const Segment& segment, uint64 tile) {
        const uint64 begin = tile * TILE_BYTES, rest = segment.count - begin;
        const uint64 place = arguments->buffer + segment.offset + begin;
        const uint64 array = segment.array + begin, size = rest < TILE_BYTES ? rest : TILE_BYTES;
        copy_bytes(is_pack ? place : array, is_pack ? array : place, size);
        if (is_pack && rest <= TILE_BYTES) clear_padding(place + rest, segment.padding);
    });
}

// --- convert --------------------------------------------------------------------------------------

template <class From, class To, class Scale>
DEVICE typename To::Storage convert(typename From::Storage raw, bool has_scale, Scale scale) {
    auto value = From::load(raw);
    if (has_scale) value = multiply(value, scale);
    return To::store(value);
}

template <class From, class To, class Scale>
DEVICE void convert_elements(
    uint64 destination, uint64 source, uint64 count, bool has_scale, Scale scale) {
    constexpr uint32 FROM_BYTES = sizeof(typename From::Storage);
    constexpr uint32 TO_BYTES = sizeof(typename To::Storage);
    constexpr uint32 WIDTH = VECTOR_BYTES / (FROM_BYTES > TO_BYTES ? FROM_BYTES : TO_BYTES);
    constexpr uint32 BATCH = TILE_ELEMENTS / THREADS / WIDTH < 4 ? TILE_ELEMENTS / THREADS / WIDTH : 4;
    constexpr uint64 BATCH_ELEMENTS = (uint64)THREADS * BATCH * WIDTH;
    using Read = Aligned<From, WIDTH>;
    using Written = Aligned<To, WIDTH>;
    uint64 done = 0;
    if (source % Read::SIZE_BYTES == 0 && destination % Written::SIZE_BYTES == 0) {
        KEEP_LOOP
        for (; done + BATCH_ELEMENTS <= count; done += BATCH_ELEMENTS) {
            const uint64 first = done / WIDTH + thread_index();
            Read read[BATCH];
            UNROLL_LOOP
            for (uint32 i = 0; i < BATCH; ++i)
                read[i] = Read::load(source + (first + i * THREADS) * Read::SIZE_BYTES);
            UNROLL_LOOP
            for (uint32 i = 0; i < BATCH; ++i) {
                Written written;
                UNROLL_LOOP
                for (uint32 j = 0; j < WIDTH; ++j)
                    written.elements[j] =
                        convert<From, To>(read[i].elements[j], has_scale, scale);
                Written::store(destination + (first + i * THREADS) * Written::SIZE_BYTES, written);
            }
        }
    }
    KEEP_LOOP
    for (uint64 i = done + thread_index(); i < count; i += THREADS) {
        const auto read = Anywhere<From>::load(source + i * FROM_BYTES);
        Anywhere<To>::store(
            destination + i * TO_BYTES, {{convert<From, To>(read.elements[0], has_scale, scale)}});
    }
}

/* Convert one tile between an array of `Array` and a buffer of `Buffer`. */
template <class Array, class Buffer, bool IS_PACK, class Scale>
DEVICE void convert_tile(
    ARGUMENTS(PackArguments) arguments, const Segment& segment, uint64 tile, Scale scale) {
    constexpr uint32 ARRAY_BYTES = sizeof(typename Array::Storage);
    constexpr uint32 BUFFER_BYTES = sizeof(typename Buffer::Storage);
    const bool has_scale = arguments->options & HAS_SCALE;
    const uint64 begin = tile * TILE_ELEMENTS, rest = segment.count - begin;
    const uint64 count = rest < TILE_ELEMENTS ? rest : TILE_ELEMENTS;
    const uint64 place = arguments->buffer + segment.offset + begin * BUFFER_BYTES;
    const uint64 array = segment.array + begin * ARRAY_BYTES;
    const uint64 source = IS_PACK ? array : place, destination = IS_PACK ? place : array;
    if (IsSame<Array, Buffer>::VALUE && !has_scale) {
        copy_bytes(destination, source, count * ARRAY_BYTES);  // also keeps the bits of a NaN
    } else if constexpr (IS_PACK) {
        convert_elements<Array, Buffer>(destination, source, count, has_scale, scale);
    } else {
        convert_elements<Buffer, Array>(destination, source, count, has_scale, scale);
    }
    if (IS_PACK && rest <= TILE_ELEMENTS)
        clear_padding(place + count * BUFFER_BYTES, segment.padding);
}

template <class Buffer, bool IS_PACK>
DEVICE void convert_segments(ARGUMENTS(PackArguments) arguments) {
    const float scale = bits_as<float>((uint32)arguments->scale);
    for_each_tile(arguments, [=](const Segment& segment, uint64 tile) {
        switch (segment.kind) {
            case FLOAT32:
                return convert_tile<Float32, Buffer, IS_PACK>(arguments, segment, tile, scale);
            case FLOAT16:
                return convert_tile<Float16, Buffer, IS_PACK>(arguments, segment, tile, scale);
            case BFLOAT16:
                return convert_tile<Bfloat16, Buffer, IS_PACK>(arguments, segment, tile, scale);
            case FLOAT8_E4M3FN:
                return convert_tile<Float8E4m3fn, Buffer, IS_PACK>(arguments, segment, tile, scale);
            case FLOAT8_E5M2:
                return convert_tile<Float8E5m2, Buffer, IS_PACK>(arguments, segment, tile, scale);
        }
    });
}

/* float64 with a scale: the only conversion of float64. */
template <bool IS_PACK>
DEVICE void scale_segments(ARGUMENTS(PackArguments) arguments) {
    const double scale = bits_as<double>((uint64)arguments->scale);
    for_each_tile(arguments, [=](const Segment& segment, uint64 tile) {
        convert_tile<Float64, Float64, IS_PACK>(arguments, segment, tile, scale);
    });
}

}  // namespace gpucoll

#define COPY(name) KERNEL(name, 3, gpucoll::PackArguments, gpucoll::copy_segments)
#define PACK(name, Element) \
    KERNEL(name, 3, gpucoll::PackArguments, gpucoll::convert_segments<gpucoll::Element, true>)
#define UNPACK(name, Element) \
    KERNEL(name, 3, gpucoll::PackArguments, gpucoll::convert_segments<gpucoll::Element, false>)
#define PACK_SCALED(name) KERNEL(name, 3, gpucoll::PackArguments, gpucoll::scale_segments<true>)
#define UNPACK_SCALED(name) KERNEL(name, 3, gpucoll::PackArguments, gpucoll::scale_segments<false>)
