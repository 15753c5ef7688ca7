// How two accumulators are combined into one: `gpucoll.kernels.cpu.operations` in C++.
//
// An operation has three steps: `prepare` (once per source, after loading), `combine` (left to right)
// and `finish` (once, before storing). The parameter is a factor or a divisor.
#ifndef GPUCOLL_OPERATIONS_H
#define GPUCOLL_OPERATIONS_H

#include "elements.h"

namespace gpucoll {

// Integers wrap: they are added and multiplied as unsigned ones of at least 32 bits.
template <class T>
struct Wide {
    using Type = uint32;
};
template <>
struct Wide<int64> {
    using Type = uint64;
};
template <>
struct Wide<uint64> {
    using Type = uint64;
};

template <class T>
DEVICE T add(T x, T y) {
    using Unsigned = typename Wide<T>::Type;
    return (T)((Unsigned)x + (Unsigned)y);
}
template <class T>
DEVICE T multiply(T x, T y) {
    using Unsigned = typename Wide<T>::Type;
    return (T)((Unsigned)x * (Unsigned)y);
}
template <class T>
DEVICE T divide(T x, T y) {
    return (T)(x / y);
}
template <class Part>
DEVICE ComplexNumber<Part> multiply(ComplexNumber<Part> x, ComplexNumber<Part> y) {
    return {subtract(multiply(x.real, y.real), multiply(x.imaginary, y.imaginary)),
            add(multiply(x.real, y.imaginary), multiply(x.imaginary, y.real))};
}

/* The steps of most operations before and after combining: nothing. */
struct Unchanged {
    template <class T>
    DEVICE T prepare(T x, T) {
        return x;
    }
    template <class T>
    DEVICE T finish(T x, T) {
        return x;
    }
};

struct Sum : Unchanged {
    template <class T>
    DEVICE T combine(T x, T y) {
        return add(x, y);
    }
};

struct Average : Sum {
    template <class T>
    DEVICE T finish(T x, T count) {
        return divide(x, count);
    }
};

struct ScaledSum : Sum {
    template <class T>
    DEVICE T prepare(T x, T factor) {
        return multiply(x, factor);
    }
};

struct Product : Unchanged {
    template <class T>
    DEVICE T combine(T x, T y) {
        return multiply(x, y);
    }
};

// A NaN on either side wins; of two equal values, the left one wins.
struct Least : Unchanged {
    template <class T>
    DEVICE T combine(T x, T y) {
        return x <= y || x != x ? x : y;
    }
};

struct Greatest : Unchanged {
    template <class T>
    DEVICE T combine(T x, T y) {
        return x >= y || x != x ? x : y;
    }
};

template <uint32 BYTES>
struct Unsigned;
template <>
struct Unsigned<1> {
    using Type = uint8;
};
template <>
struct Unsigned<2> {
    using Type = uint16;
};
template <>
struct Unsigned<4> {
    using Type = uint32;
};
template <>
struct Unsigned<8> {
    using Type = uint64;
};

/* Truth values are 0 and 1, so bit operations on them are correct, also for floats. */
struct Truth : Unchanged {
    template <class T>
    DEVICE T prepare(T x, T) {
        return x != (T)0 ? (T)1 : (T)0;
    }
};

#define BITWISE(name, base, operator_)                                                        \
    struct name : base {                                                                      \
        template <class T>                                                                    \
        DEVICE T combine(T x, T y) {                                                          \
            using Bits = typename Unsigned<sizeof(T)>::Type;                                  \
            return bits_as<T>((Bits)(bits_as<Bits>(x) operator_ bits_as<Bits>(y)));           \
        }                                                                                     \
    };
BITWISE(BitwiseAnd, Unchanged, &)
BITWISE(BitwiseOr, Unchanged, |)
BITWISE(BitwiseXor, Unchanged, ^)
BITWISE(LogicalAnd, Truth, &)
BITWISE(LogicalOr, Truth, |)
BITWISE(LogicalXor, Truth, ^)
#undef BITWISE

}  // namespace gpucoll

#endif
