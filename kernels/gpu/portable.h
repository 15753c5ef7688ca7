// One source for three compilers: NVRTC (CUDA), clang for AMD (hiprtc, or offline without HIP's
// headers), and a host compiler, which runs the grid as loops so that tests need no GPU.
//
// It includes no external header, so that NVRTC and hiprtc need no include path.
#ifndef GPUCOLL_PORTABLE_H
#define GPUCOLL_PORTABLE_H

#if !defined(GPUCOLL_HOST) && !defined(__CUDACC_RTC__) && !defined(__CUDACC__)
#define GPUCOLL_AMD
#endif

#if defined(__clang__)
#pragma clang fp contract(off)
#endif

#if defined(GPUCOLL_HOST)
#define DEVICE static inline
#define ARGUMENTS(Type) const Type*
#define UNROLL_LOOP
#define KEEP_LOOP
#elif defined(GPUCOLL_AMD)
#define DEVICE static __attribute__((device, always_inline)) inline
// The arguments' own memory: to index a struct passed by value, the compiler would copy it.
#define ARGUMENTS(Type) const __attribute__((address_space(4))) Type*
#define UNROLL_LOOP _Pragma("unroll")
#define KEEP_LOOP _Pragma("unroll 1")
#else
#define DEVICE static __device__ __forceinline__
#define ARGUMENTS(Type) const Type*
#define UNROLL_LOOP _Pragma("unroll")
#define KEEP_LOOP _Pragma("unroll 1")
#endif

#if defined(GPUCOLL_HOST) || defined(GPUCOLL_AMD)
#define COPY_BITS __builtin_memcpy
#else
#define COPY_BITS memcpy
#endif

namespace gpucoll {

using int8 = signed char;
using int16 = short;
using int32 = int;
using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr uint32 THREADS = GPUCOLL_THREADS;
constexpr uint32 VECTOR_BYTES = 16;
constexpr uint32 WARP = 32;  // an AMD wave of 64 holds two

/* `BYTES` bytes that are read or written by one instruction. */
template <uint32 BYTES>
struct Bytes;
template <>
struct alignas(16) Bytes<16> {
    uint32 words[4];
};
template <>
struct alignas(8) Bytes<8> {
    uint32 words[2];
};
template <>
struct alignas(4) Bytes<4> {
    uint32 words[1];
};
template <>
struct alignas(2) Bytes<2> {
    uint16 words[1];
};
template <>
struct alignas(1) Bytes<1> {
    uint8 words[1];
};

template <class, class>
struct IsSame {
    static constexpr bool VALUE = false;
};
template <class T>
struct IsSame<T, T> {
    static constexpr bool VALUE = true;
};

// --- this thread's indices -----------------------------------------------------------------------

#if defined(GPUCOLL_HOST)
struct Place {
    uint32 thread, block, blocks;
};
inline thread_local Place place;
DEVICE uint32 thread_index() { return place.thread; }
DEVICE uint32 block_index() { return place.block; }
DEVICE uint32 grid_blocks() { return place.blocks; }
#elif defined(GPUCOLL_AMD)
DEVICE uint32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE uint32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE uint32 grid_blocks() { return __builtin_amdgcn_grid_size_x() / THREADS; }
#else
DEVICE uint32 thread_index() { return threadIdx.x; }
DEVICE uint32 block_index() { return blockIdx.x; }
DEVICE uint32 grid_blocks() { return gridDim.x; }
#endif

/* The same bits as another type of this size. */
template <class To, class From>
DEVICE To bits_as(const From& value) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To result;
    COPY_BITS(&result, &value, sizeof(To));
    return result;
}

// --- memory ---------------------------------------------------------------------------------------

/* Read or write one T at an aligned address of global memory: of this GPU, of a peer, of the host. */
#if defined(GPUCOLL_HOST)
template <class T>
DEVICE T load_global(uint64 address) {
    T value;
    __builtin_memcpy(&value, __builtin_assume_aligned((const void*)address, alignof(T)), sizeof(T));
    return value;
}
template <class T>
DEVICE void store_global(uint64 address, T value) {
    __builtin_memcpy(__builtin_assume_aligned((void*)address, alignof(T)), &value, sizeof(T));
}
#elif defined(GPUCOLL_AMD)
template <uint32 BYTES>
struct Native;  // the type that is read by one instruction
template <>
struct Native<16> {
    typedef uint32 Type __attribute__((ext_vector_type(4)));
};
template <>
struct Native<8> {
    typedef uint32 Type __attribute__((ext_vector_type(2)));
};
template <>
struct Native<4> {
    using Type = uint32;
};
template <>
struct Native<2> {
    using Type = uint16;
};
template <>
struct Native<1> {
    using Type = uint8;
};
template <class T>
DEVICE T load_global(uint64 address) {
    using Raw = typename Native<sizeof(T)>::Type;
    return bits_as<T>(*(const __attribute__((address_space(1))) Raw*)address);
}
template <class T>
DEVICE void store_global(uint64 address, T value) {
    using Raw = typename Native<sizeof(T)>::Type;
    *(__attribute__((address_space(1))) Raw*)address = bits_as<Raw>(value);
}
#else
// These use the instructions themselves: the compiler does not know the space of an address that
// was an integer, not even if told by __isGlobal.
template <class T>
DEVICE T load_global(uint64 address) {
    Bytes<sizeof(T)> raw;
    if constexpr (sizeof(T) == 16) {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw.words[0]), "=r"(raw.words[1]), "=r"(raw.words[2]), "=r"(raw.words[3])
                     : "l"(address));
    } else if constexpr (sizeof(T) == 8) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(raw.words[0]), "=r"(raw.words[1])
                     : "l"(address));
    } else if constexpr (sizeof(T) == 4) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(raw.words[0]) : "l"(address));
    } else if constexpr (sizeof(T) == 2) {
        asm volatile("ld.global.u16 %0, [%1];" : "=h"(raw.words[0]) : "l"(address));
    } else {
        uint32 wide;
        asm volatile("ld.global.u8 %0, [%1];" : "=r"(wide) : "l"(address));
        raw.words[0] = (uint8)wide;
    }
    return bits_as<T>(raw);
}
template <class T>
DEVICE void store_global(uint64 address, T value) {
    const Bytes<sizeof(T)> raw = bits_as<Bytes<sizeof(T)>>(value);
    if constexpr (sizeof(T) == 16) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(address), "r"(raw.words[0]), "r"(raw.words[1]), "r"(raw.words[2]),
                       "r"(raw.words[3])
                     : "memory");
    } else if constexpr (sizeof(T) == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                     :
                     : "l"(address), "r"(raw.words[0]), "r"(raw.words[1])
                     : "memory");
    } else if constexpr (sizeof(T) == 4) {
        asm volatile("st.global.u32 [%0], %1;" : : "l"(address), "r"(raw.words[0]) : "memory");
    } else if constexpr (sizeof(T) == 2) {
        asm volatile("st.global.u16 [%0], %1;" : : "l"(address), "h"(raw.words[0]) : "memory");
    } else {
        asm volatile("st.global.u8 [%0], %1;" : : "l"(address), "r"((uint32)raw.words[0]) : "memory");
    }
}
#endif

// --- arithmetic, each operation rounded separately -----------------------------------------------

// On CUDA these are the functions that are never contracted, whatever the compiler's options;
// elsewhere the pragma above and -ffp-contract=off prevent contraction.
#if defined(GPUCOLL_HOST) || defined(GPUCOLL_AMD)
DEVICE float add(float x, float y) { return x + y; }
DEVICE double add(double x, double y) { return x + y; }
DEVICE float subtract(float x, float y) { return x - y; }
DEVICE double subtract(double x, double y) { return x - y; }
DEVICE float multiply(float x, float y) { return x * y; }
DEVICE double multiply(double x, double y) { return x * y; }
DEVICE float divide(float x, float y) { return x / y; }
DEVICE double divide(double x, double y) { return x / y; }
DEVICE float round_to_integer(float x) { return __builtin_rintf(x); }
#else
DEVICE float add(float x, float y) { return __fadd_rn(x, y); }
DEVICE double add(double x, double y) { return __dadd_rn(x, y); }
DEVICE float subtract(float x, float y) { return __fsub_rn(x, y); }
DEVICE double subtract(double x, double y) { return __dsub_rn(x, y); }
DEVICE float multiply(float x, float y) { return __fmul_rn(x, y); }
DEVICE double multiply(double x, double y) { return __dmul_rn(x, y); }
DEVICE float divide(float x, float y) { return __fdiv_rn(x, y); }
DEVICE double divide(double x, double y) { return __ddiv_rn(x, y); }
DEVICE float round_to_integer(float x) { return rintf(x); }
#endif

// --- lanes ----------------------------------------------------------------------------------------

DEVICE uint32 lane_index() { return thread_index() % WARP; }

/* The value of lane `lane ^ mask`; all 32 lanes take part. */
#if defined(GPUCOLL_HOST)
uint32 exchange_lanes(uint32 value, uint32 mask);
#elif defined(GPUCOLL_AMD)
DEVICE uint32 exchange_lanes(uint32 value, uint32 mask) {
    uint32 lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
    return (uint32)__builtin_amdgcn_ds_bpermute((int)((lane ^ mask) * 4), (int)value);
}
#else
DEVICE uint32 exchange_lanes(uint32 value, uint32 mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, (int)mask);
}
#endif

/* The greatest value of all 32 lanes, in each of them. */
DEVICE uint32 greatest_of_warp(uint32 value) {
    UNROLL_LOOP
    for (uint32 mask = WARP / 2; mask > 0; mask /= 2) {
        uint32 other = exchange_lanes(value, mask);
        value = other > value ? other : value;
    }
    return value;
}

}  // namespace gpucoll

// --- entries --------------------------------------------------------------------------------------

// KERNEL(name, resident, Type, body): an entry whose only argument is a struct by value; `body`
// gets its address. NVIDIA's compiler limits its registers so that `resident` blocks run side by
// side. WARP_KERNEL is the same, for a body whose lanes exchange values. On the host the sizes of
// an entry's arguments are next to it: their number, then each size.
#if defined(GPUCOLL_HOST)
#include "host_grid.h"
#define SIZES(name, Type)                                                                     \
    extern "C" {                                                                              \
    __attribute__((visibility("default"))) extern const unsigned name##_sizes[] = {           \
        1, sizeof(Type)};                                                                     \
    }
#define KERNEL(name, resident, Type, ...)                                                     \
    SIZES(name, Type)                                                                         \
    extern "C" __attribute__((visibility("default"))) void name(                              \
        const Type* arguments, unsigned blocks) {                                             \
        gpucoll::run_grid(blocks, [=] { __VA_ARGS__(arguments); });                           \
    }
#define WARP_KERNEL(name, resident, Type, ...)                                                \
    SIZES(name, Type)                                                                         \
    extern "C" __attribute__((visibility("default"))) void name(                              \
        const Type* arguments, unsigned blocks) {                                             \
        gpucoll::run_grid_of_warps(blocks, [=] { __VA_ARGS__(arguments); });                  \
    }
#elif defined(GPUCOLL_AMD)
#define KERNEL(name, resident, Type, ...)                                                     \
    extern "C" __attribute__((                                                                \
        global, amdgpu_flat_work_group_size(GPUCOLL_THREADS, GPUCOLL_THREADS))) void name(Type) { \
        __VA_ARGS__((ARGUMENTS(Type))__builtin_amdgcn_kernarg_segment_ptr());                 \
    }
#else
#define KERNEL(name, resident, Type, ...)                                                     \
    extern "C" __global__ void __launch_bounds__(GPUCOLL_THREADS, resident)                   \
        name(const __grid_constant__ Type arguments) {                                        \
        __VA_ARGS__(&arguments);                                                              \
    }
#endif
#if !defined(GPUCOLL_HOST)
#define WARP_KERNEL KERNEL
#endif

#endif
