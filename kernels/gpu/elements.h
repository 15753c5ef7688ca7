// How each dtype is loaded, accumulated and stored: `gpucoll.kernels.cpu.elements` in C++.
#ifndef GPUCOLL_ELEMENTS_H
#define GPUCOLL_ELEMENTS_H

#include "portable.h"

namespace gpucoll {

DEVICE float power_of_two(int exponent) { return bits_as<float>((uint32)(127 + exponent) << 23); }

/* A binary float of less than 32 bits, converted by integer arithmetic, for any processor. */
template <uint32 EXPONENT_BITS, uint32 MANTISSA_BITS, bool HAS_INFINITY>
struct NarrowFloat {
    static constexpr uint32 WIDTH = 1 + EXPONENT_BITS + MANTISSA_BITS;
    static constexpr int BIAS = (1 << (EXPONENT_BITS - 1)) - 1;
    static constexpr uint32 SHIFT = 23 - MANTISSA_BITS;  // how far the mantissa lies below float32's
    static constexpr uint32 MAGNITUDE = (1u << (WIDTH - 1)) - 1;
    // The magnitude of infinity or, without infinities, of NaN.
    static constexpr uint32 OVERFLOW_CODE =
        HAS_INFINITY ? MAGNITUDE & ~((1u << MANTISSA_BITS) - 1) : MAGNITUDE;
    static constexpr uint32 NAN_CODE =
        OVERFLOW_CODE | (HAS_INFINITY ? 1u << (MANTISSA_BITS - 1) : 0);
    static constexpr uint32 LEAST_NORMAL = (uint32)(128 - BIAS) << 23;  // bits of a float32

    /* Widen, exactly: the bits in float32's place are the value times 2**(BIAS - 127). */
    DEVICE float decode(uint32 code) {
        uint32 magnitude = code & MAGNITUDE, sign = (code >> (WIDTH - 1)) << 31;
        uint32 shifted = magnitude << SHIFT;
        uint32 bits = bits_as<uint32>(multiply(bits_as<float>(shifted), power_of_two(127 - BIAS)));
        bits = magnitude >= OVERFLOW_CODE ? shifted | 0x7F800000u : bits;
        return bits_as<float>(bits | sign);
    }

    /* Round to nearest even; overflow becomes infinity or, without infinities, NaN.

       A normal result is rounded by integer operations on its bits. A subnormal one is rounded by
       adding a power of two, which leaves the multiple of the least subnormal at the bottom. */
    DEVICE uint32 encode(float value) {
        uint32 bits = bits_as<uint32>(value), magnitude = bits & 0x7FFFFFFFu;
        uint32 odd = (magnitude >> SHIFT) & 1;
        uint32 rounded = (magnitude + odd + (1u << (SHIFT - 1)) - 1) >> SHIFT;
        uint32 code = rounded - ((uint32)(127 - BIAS) << MANTISSA_BITS);
        if (magnitude < LEAST_NORMAL) {
            float power = power_of_two(1 - BIAS + (int)SHIFT);
            code = bits_as<uint32>(add(bits_as<float>(magnitude), power)) - bits_as<uint32>(power);
        } else if (code > OVERFLOW_CODE) {
            code = OVERFLOW_CODE;
        }
        code = magnitude > 0x7F800000u ? NAN_CODE : code;
        return code | ((bits >> 31) << (WIDTH - 1));
    }
};

using Half = NarrowFloat<5, 10, true>;
using Quarter4 = NarrowFloat<4, 3, false>;
using Quarter5 = NarrowFloat<5, 2, true>;

// NVIDIA's processors convert float8 from compute capability 8.9 on, and bfloat16 from 8.0 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define GPUCOLL_FLOAT8_INSTRUCTIONS
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define GPUCOLL_BFLOAT16_INSTRUCTIONS
#endif

/* An integer or a float that is accumulated as it is. */
template <class T>
struct Plain {
    using Storage = T;
    using Accumulator = T;
    DEVICE Accumulator load(Storage raw) { return raw; }
    DEVICE Storage store(Accumulator value) { return value; }
};

struct Float16 {
    using Storage = uint16;
    using Accumulator = float;
#if defined(__CUDA_ARCH__)
    DEVICE float load(uint16 raw) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(raw));
        return value;
    }
    DEVICE uint16 store(float value) {
        uint16 raw;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(raw) : "f"(value));
        return raw;
    }
#elif defined(GPUCOLL_AMD)
    DEVICE float load(uint16 raw) { return (float)bits_as<_Float16>(raw); }
    DEVICE uint16 store(float value) {
        asm("" : "+v"(value));  // else a product before it and the rounding are fused
        return bits_as<uint16>((_Float16)value);
    }
#else
    DEVICE float load(uint16 raw) { return Half::decode(raw); }
    DEVICE uint16 store(float value) { return (uint16)Half::encode(value); }
#endif
};

struct Bfloat16 {
    using Storage = uint16;
    using Accumulator = float;
    DEVICE float load(uint16 raw) { return bits_as<float>((uint32)raw << 16); }
    DEVICE uint16 store(float value) {
#if defined(GPUCOLL_BFLOAT16_INSTRUCTIONS)
        uint16 raw;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(raw) : "f"(value));
        return raw;
#else
        uint32 bits = bits_as<uint32>(value);
        // The carry of a full mantissa gives the next exponent, or infinity.
        uint32 code = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
        return (uint16)(value != value ? 0x7FC0u | ((bits >> 31) << 15) : code);
#endif
    }
};

struct Float8E4m3fn {
    using Storage = uint8;
    using Accumulator = float;
    using Form = Quarter4;
#if defined(GPUCOLL_FLOAT8_INSTRUCTIONS)
    DEVICE float load(uint8 raw) {
        uint32 pair;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((uint16)raw));
        return Float16::load((uint16)pair);
    }
    DEVICE uint8 store(float value) {
        uint16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
        uint32 bits = bits_as<uint32>(value);
        // The instruction saturates. 464 is a tie, and goes to 448; above it there is only NaN.
        bool is_too_large = (bits & 0x7FFFFFFFu) > 0x43E80000u;
        return (uint8)(is_too_large ? 0x7Fu | ((bits >> 31) << 7) : pair);
    }
#else
    DEVICE float load(uint8 raw) { return Form::decode(raw); }
    DEVICE uint8 store(float value) { return (uint8)Form::encode(value); }
#endif
};

struct Float8E5m2 {
    using Storage = uint8;
    using Accumulator = float;
    using Form = Quarter5;
    // It is float16's upper byte.
    DEVICE float load(uint8 raw) { return Float16::load((uint16)((uint32)raw << 8)); }
#if defined(GPUCOLL_FLOAT8_INSTRUCTIONS)
    DEVICE uint8 store(float value) {
        uint16 pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
        uint32 bits = bits_as<uint32>(value), magnitude = bits & 0x7FFFFFFFu;
        // The instruction saturates. 61440 is a tie, and goes to infinity; NaN stays NaN.
        bool is_too_large = magnitude >= 0x47700000u && magnitude <= 0x7F800000u;
        return (uint8)(is_too_large ? 0x7Cu | ((bits >> 31) << 7) : pair);
    }
#else
    DEVICE uint8 store(float value) { return (uint8)Form::encode(value); }
#endif
};

/* A complex number of two parts, used only for products; other operations work on its parts. */
template <class Part>
struct alignas(2 * sizeof(Part)) ComplexNumber {
    Part real, imaginary;
};

using Int8 = Plain<int8>;
using Int16 = Plain<int16>;
using Int32 = Plain<int32>;
using Int64 = Plain<int64>;
using Uint8 = Plain<uint8>;
using Uint16 = Plain<uint16>;
using Uint32 = Plain<uint32>;
using Uint64 = Plain<uint64>;
using Float32 = Plain<float>;
using Float64 = Plain<double>;
using Complex64 = Plain<ComplexNumber<float>>;
using Complex128 = Plain<ComplexNumber<double>>;

template <uint32 BYTES>
struct Halves {
    Bytes<BYTES> first, second;
};

/* Read or write at any address: by one instruction if it is aligned, else by halves. */
template <class T>
DEVICE T load_anywhere(uint64 address) {
    constexpr uint32 SIZE = sizeof(T);
    if constexpr (SIZE > 1) {
        if (address % SIZE != 0) {
            return bits_as<T>(Halves<SIZE / 2>{
                load_anywhere<Bytes<SIZE / 2>>(address),
                load_anywhere<Bytes<SIZE / 2>>(address + SIZE / 2)});
        }
    }
    return bits_as<T>(load_global<Bytes<SIZE>>(address));
}

template <class T>
DEVICE void store_anywhere(uint64 address, T value) {
    constexpr uint32 SIZE = sizeof(T);
    if constexpr (SIZE > 1) {
        if (address % SIZE != 0) {
            const Halves<SIZE / 2> halves = bits_as<Halves<SIZE / 2>>(value);
            store_anywhere(address, halves.first);
            store_anywhere(address + SIZE / 2, halves.second);
            return;
        }
    }
    store_global(address, bits_as<Bytes<SIZE>>(value));
}

/* `COUNT` adjacent elements, at a multiple of their size: one instruction. */
template <class Element, uint32 COUNT>
struct Aligned {
    static constexpr uint32 WIDTH = COUNT;
    static constexpr uint32 SIZE_BYTES = WIDTH * sizeof(typename Element::Storage);
    typename Element::Storage elements[WIDTH];

    DEVICE Aligned load(uint64 address) {
        return bits_as<Aligned>(load_global<Bytes<SIZE_BYTES>>(address));
    }
    DEVICE void store(uint64 address, const Aligned& piece) {
        store_global(address, bits_as<Bytes<SIZE_BYTES>>(piece));
    }
};

/* One element at any address. */
template <class Element>
struct Anywhere {
    static constexpr uint32 WIDTH = 1;
    static constexpr uint32 SIZE_BYTES = sizeof(typename Element::Storage);
    typename Element::Storage elements[1];

    DEVICE Anywhere load(uint64 address) { return load_anywhere<Anywhere>(address); }
    DEVICE void store(uint64 address, const Anywhere& piece) { store_anywhere(address, piece); }
};

}  // namespace gpucoll

#endif
