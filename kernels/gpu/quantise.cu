// Block quantisation: 256 float32 become 256 one-byte codes and one float32 scale. One warp
// does a block.
//
// Lane l holds elements 4 l .. 4 l + 3 and 128 + 4 l .. 128 + 4 l + 3: two 16-byte accesses of
// float32, two 4-byte accesses of codes. A message has its scales, zeros up to a multiple of 16
// bytes, its codes.
#include "elements.h"

namespace gpucoll {

constexpr uint32 BLOCK = 256, HALF_BLOCK = 128, LANE_ELEMENTS = 8;
constexpr uint32 WARPS = THREADS / WARP;

/* The elements of a block that one lane holds. */
struct LaneValues {
    float values[LANE_ELEMENTS];
};

// --- random bits ----------------------------------------------------------------------------------

struct Counter {
    uint32 words[4];
};

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011). */
DEVICE Counter philox(Counter counter, uint64 seed) {
    uint32 key0 = (uint32)seed, key1 = (uint32)(seed >> 32);
    uint32* c = counter.words;
    UNROLL_LOOP
    for (uint32 round = 0; round < 10; ++round) {
        const uint64 first = (uint64)0xD2511F53u * c[0], second = (uint64)0xCD9E8D57u * c[2];
        c[0] = (uint32)(second >> 32) ^ c[1] ^ key0;
        c[1] = (uint32)second;
        c[2] = (uint32)(first >> 32) ^ c[3] ^ key1;
        c[3] = (uint32)first;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// --- formats --------------------------------------------------------------------------------------

DEVICE float clamp(float value, float limit) {
    value = value > -limit ? value : -limit;
    return value < limit ? value : limit;
}

struct BlockInt8 {
    static constexpr float LIMIT = 127.0f;
    // If the scale were greater, 127 times it would be infinite.
    static constexpr uint32 GREATEST_SCALE = 0x7C010203u;

    DEVICE uint8 nearest(float value) { return (uint8)(int32)round_to_integer(value); }

    /* Round up with the probability of the fraction, by 16 random bits. */
    DEVICE uint8 stochastic(float value, uint32 random) {
        const int32 fixed = (int32)round_to_integer(multiply(value, 65536.0f));
        return (uint8)((fixed + (int32)random) >> 16);
    }

    DEVICE float value_of(uint8 code) { return (float)(int8)code; }
};

template <class Element, uint32 MANTISSA_BITS, int LIMIT_>
struct BlockFloat8 {
    using Form = typename Element::Form;
    static constexpr float LIMIT = (float)LIMIT_;
    static constexpr uint32 GREATEST_SCALE = 0x7F7FFFFFu;

    DEVICE uint8 nearest(float value) { return Element::store(value); }

    DEVICE uint8 stochastic(float value, uint32 random) {
        const uint32 bits = bits_as<uint32>(value), magnitude = bits & 0x7FFFFFFFu;
        uint32 code;
        if (magnitude < Form::LEAST_NORMAL) {
            const float power = power_of_two(Form::BIAS - 1 + (int)MANTISSA_BITS + 16);
            const float fixed = multiply(bits_as<float>(magnitude), power);
            code = ((uint32)round_to_integer(fixed) + random) >> 16;
        } else {
            const uint32 step = random << (Form::SHIFT - 16);
            const uint32 sum = magnitude + step + (1u << (Form::SHIFT - 17));
            code = (sum >> Form::SHIFT) - ((uint32)(127 - Form::BIAS) << MANTISSA_BITS);
        }
        return (uint8)(code | ((bits >> 31) << 7));
    }

    DEVICE float value_of(uint8 code) { return Element::load(code); }
};

using BlockFloat8E4m3fn = BlockFloat8<Float8E4m3fn, 3, 448>;
using BlockFloat8E5m2 = BlockFloat8<Float8E5m2, 2, 57344>;

// --- blocks ---------------------------------------------------------------------------------------

/* The offset of the codes in a message of `blocks` blocks. */
DEVICE uint64 codes_offset(uint64 blocks) { return (4 * blocks + 15) / 16 * 16; }

/* Read a lane's elements of a block of an array; elements from `count` on are zero. */
DEVICE LaneValues load_values(uint64 address, uint64 count, uint64 block) {
    LaneValues held;
    UNROLL_LOOP
    for (uint32 half = 0; half < 2; ++half) {
        const uint64 first = block * BLOCK + half * HALF_BLOCK + lane_index() * 4;
        const uint64 place = address + first * sizeof(float);
        float* values = held.values + half * 4;
        if (first + 4 <= count && place % VECTOR_BYTES == 0) {
            const auto vector = Aligned<Float32, 4>::load(place);
            UNROLL_LOOP
            for (uint32 i = 0; i < 4; ++i) values[i] = vector.elements[i];
        } else {
            UNROLL_LOOP
            for (uint32 i = 0; i < 4; ++i)
                values[i] = first + i < count ? load_anywhere<float>(place + i * 4) : 0.0f;
        }
    }
    return held;
}

/* Write a lane's elements of a block of an array, up to element `count`. */
DEVICE void store_values(uint64 address, uint64 count, uint64 block, const LaneValues& held) {
    UNROLL_LOOP
    for (uint32 half = 0; half < 2; ++half) {
        const uint64 first = block * BLOCK + half * HALF_BLOCK + lane_index() * 4;
        const uint64 place = address + first * sizeof(float);
        const float* values = held.values + half * 4;
        if (first + 4 <= count && place % VECTOR_BYTES == 0) {
            Aligned<Float32, 4>::store(place, {{values[0], values[1], values[2], values[3]}});
        } else {
            UNROLL_LOOP
            for (uint32 i = 0; i < 4; ++i)
                if (first + i < count) store_anywhere(place + i * 4, values[i]);
        }
    }
}

struct LaneCodes {
    uint8 codes[LANE_ELEMENTS];
};

struct QuantisedBlock {
    float scale;
    LaneCodes lane;
};

template <class Format>
DEVICE LaneValues dequantise(const QuantisedBlock& block) {
    LaneValues held;
    UNROLL_LOOP
    for (uint32 i = 0; i < LANE_ELEMENTS; ++i)
        held.values[i] = multiply(Format::value_of(block.lane.codes[i]), block.scale);
    return held;
}

/* Quantise a block; all 32 lanes take part. `counter` numbers the lane's random bits. */
template <class Format, bool IS_STOCHASTIC>
DEVICE QuantisedBlock quantise(const LaneValues& held, Counter counter, uint64 seed) {
    uint32 greatest = 0;
    UNROLL_LOOP
    for (uint32 i = 0; i < LANE_ELEMENTS; ++i) {
        const uint32 magnitude = bits_as<uint32>(held.values[i]) & 0x7FFFFFFFu;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    greatest = greatest_of_warp(greatest);
    QuantisedBlock made{bits_as<float>(0x7FC00000u), {}};
    if (greatest >= 0x7F800000u) return made;  // a NaN or an infinity: the block is NaN

    // So the scale is never subnormal and its inverse never infinite, also for zeros.
    const float least = multiply(Format::LIMIT, power_of_two(-126));
    const float value = bits_as<float>(greatest), extent = value > least ? value : least;
    const float scale = divide(extent, Format::LIMIT), inverse = divide(Format::LIMIT, extent);
    const float bound = bits_as<float>(Format::GREATEST_SCALE);
    made.scale = scale < bound ? scale : bound;
    if constexpr (IS_STOCHASTIC) counter = philox(counter, seed);
    UNROLL_LOOP
    for (uint32 i = 0; i < LANE_ELEMENTS; ++i) {
        const float scaled = clamp(multiply(held.values[i], inverse), Format::LIMIT);
        if constexpr (IS_STOCHASTIC) {
            const uint32 random = i < 4 ? counter.words[i] & 0xFFFFu : counter.words[i - 4] >> 16;
            made.lane.codes[i] = Format::stochastic(scaled, random);
        } else {
            made.lane.codes[i] = Format::nearest(scaled);
        }
    }
    return made;
}

DEVICE void store_block(uint64 message, uint64 blocks, uint64 block, const QuantisedBlock& made) {
    const uint64 codes = message + codes_offset(blocks) + block * BLOCK + lane_index() * 4;
    struct Parts {
        Bytes<4> parts[2];
    };
    const Parts written = bits_as<Parts>(made.lane);
    store_global(codes, written.parts[0]);
    store_global(codes + HALF_BLOCK, written.parts[1]);
    if (lane_index() == 0) store_global(message + block * 4, bits_as<Bytes<4>>(made.scale));
    // The last block's warp writes the zeros after the scales.
    const uint64 zero = 4 * blocks + lane_index() * 4;
    if (block + 1 == blocks && zero < codes_offset(blocks))
        store_global(message + zero, Bytes<4>{{0}});
}

DEVICE QuantisedBlock load_block(uint64 message, uint64 blocks, uint64 block) {
    const uint64 codes = message + codes_offset(blocks) + block * BLOCK + lane_index() * 4;
    struct Parts {
        Bytes<4> parts[2];
    };
    const Parts read{{load_global<Bytes<4>>(codes), load_global<Bytes<4>>(codes + HALF_BLOCK)}};
    return {bits_as<float>(load_global<Bytes<4>>(message + block * 4)), bits_as<LaneCodes>(read)};
}

/* Call ``body(block)`` for each of this warp's blocks. */
template <class Body>
DEVICE void for_each_block(uint64 blocks, Body body) {
    KEEP_LOOP
    for (uint64 block = block_index() * (uint64)WARPS + thread_index() / WARP; block < blocks;
         block += grid_blocks() * (uint64)WARPS)
        body(block);
}

// --- kernels --------------------------------------------------------------------------------------

struct QuantiseArguments {
    uint64 array;     // address of float32: read by quantise, written by dequantise
    uint64 message;   // address, a multiple of 16; of the first message if there are several
    uint64 count;     // number of elements of the array
    uint64 blocks;    // number of blocks of a message
    uint64 messages;  // number of messages that are reduced
    uint64 result;    // address of the message that is made from the reduced ones
    uint64 divisor;   // bits of a float; 0: no division
    uint64 residual;  // address of float32, read and written; 0: none
    uint64 seed, sequence, first_block;
};

DEVICE Counter counter_of(ARGUMENTS(QuantiseArguments) arguments, uint64 block) {
    const uint64 place = (arguments->first_block + block) * WARP + lane_index();
    const uint64 sequence = arguments->sequence;
    return {{(uint32)place, (uint32)(place >> 32), (uint32)sequence, (uint32)(sequence >> 32)}};
}

/* Values that would return in every following call are not kept: infinities and NaN become 0. */
DEVICE float finite(float value) {
    return (bits_as<uint32>(value) & 0x7FFFFFFFu) < 0x7F800000u ? value : 0.0f;
}

/* Store what quantisation has lost of the held values in the residual, for the next call. */
template <class Format>
DEVICE void keep_residual(
    ARGUMENTS(QuantiseArguments) arguments,
    uint64 block,
    const LaneValues& held,
    const QuantisedBlock& made) {
    LaneValues lost = dequantise<Format>(made);
    UNROLL_LOOP
    for (uint32 i = 0; i < LANE_ELEMENTS; ++i)
        lost.values[i] = finite(subtract(held.values[i], lost.values[i]));
    store_values(arguments->residual, arguments->count, block, lost);
}

/* Add what the result of a reduction has lost, of the undivided sum, to the residual. */
template <class Format>
DEVICE void add_to_residual(
    ARGUMENTS(QuantiseArguments) arguments,
    uint64 block,
    const LaneValues& total,
    const QuantisedBlock& made) {
    const LaneValues known = dequantise<Format>(made);
    LaneValues kept = load_values(arguments->residual, arguments->count, block);
    const float divisor = bits_as<float>((uint32)arguments->divisor);
    UNROLL_LOOP
    for (uint32 i = 0; i < LANE_ELEMENTS; ++i) {
        float lost = subtract(total.values[i], known.values[i]);
        if (arguments->divisor != 0) lost = multiply(lost, divisor);
        kept.values[i] = finite(add(kept.values[i], lost));
    }
    store_values(arguments->residual, arguments->count, block, kept);
}

template <class Format, bool IS_STOCHASTIC>
DEVICE void quantise_array(ARGUMENTS(QuantiseArguments) arguments) {
    for_each_block(arguments->blocks, [=](uint64 block) {
        LaneValues held = load_values(arguments->array, arguments->count, block);
        if (arguments->residual != 0) {
            const auto lost = load_values(arguments->residual, arguments->count, block);
            UNROLL_LOOP
            for (uint32 i = 0; i < LANE_ELEMENTS; ++i)
                held.values[i] = add(held.values[i], lost.values[i]);
        }
        const Counter counter = counter_of(arguments, block);
        const auto made = quantise<Format, IS_STOCHASTIC>(held, counter, arguments->seed);
        store_block(arguments->message, arguments->blocks, block, made);
        if (arguments->residual != 0) keep_residual<Format>(arguments, block, held, made);
    });
}

/* Dequantise a block of every message and add them, in order. */
template <class Format>
DEVICE LaneValues reduce_block(ARGUMENTS(QuantiseArguments) arguments, uint64 block) {
    const uint64 blocks = arguments->blocks, messages = arguments->messages;
    const uint64 size = codes_offset(blocks) + blocks * BLOCK;
    LaneValues total = dequantise<Format>(load_block(arguments->message, blocks, block));
    KEEP_LOOP
    for (uint64 i = 1; i < messages; ++i) {
        const auto read = load_block(arguments->message + i * size, blocks, block);
        const LaneValues next = dequantise<Format>(read);
        UNROLL_LOOP
        for (uint32 j = 0; j < LANE_ELEMENTS; ++j)
            total.values[j] = add(total.values[j], next.values[j]);
    }
    if (arguments->divisor != 0) {
        const float divisor = bits_as<float>((uint32)arguments->divisor);
        UNROLL_LOOP
        for (uint32 j = 0; j < LANE_ELEMENTS; ++j)
            total.values[j] = divide(total.values[j], divisor);
    }
    return total;
}

/* One message, or the sum of several. */
template <class Format>
DEVICE void dequantise_messages(ARGUMENTS(QuantiseArguments) arguments) {
    for_each_block(arguments->blocks, [=](uint64 block) {
        const LaneValues total = reduce_block<Format>(arguments, block);
        store_values(arguments->array, arguments->count, block, total);
    });
}

/* Reduce, and quantise the result: one pass between the two exchanges of an all_reduce. */
template <class Format, bool IS_STOCHASTIC>
DEVICE void requantise_messages(ARGUMENTS(QuantiseArguments) arguments) {
    for_each_block(arguments->blocks, [=](uint64 block) {
        const LaneValues total = reduce_block<Format>(arguments, block);
        const Counter counter = counter_of(arguments, block);
        const auto made = quantise<Format, IS_STOCHASTIC>(total, counter, arguments->seed);
        store_block(arguments->result, arguments->blocks, block, made);
        if (arguments->residual != 0) add_to_residual<Format>(arguments, block, total, made);
    });
}

}  // namespace gpucoll

#define QUANTISE(name, Format, is_stochastic)       \
    WARP_KERNEL(name, 4, gpucoll::QuantiseArguments,   \
                gpucoll::quantise_array<gpucoll::Format, is_stochastic>)
#define DEQUANTISE(name, Format) \
    KERNEL(name, 4, gpucoll::QuantiseArguments, gpucoll::dequantise_messages<gpucoll::Format>)
#define REQUANTISE(name, Format, is_stochastic)     \
    WARP_KERNEL(name, 4, gpucoll::QuantiseArguments,   \
                gpucoll::requantise_messages<gpucoll::Format, is_stochastic>)
