// How two accumulators become one: `gpucoll.kernels.cpu.operations` in C++.
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

/* What most operations do before and after: nothing. */
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

// A NaN on either side wins; of two equal values the left one does.
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

#define BITWISE(name, operator_)                                                              \
    struct name : Unchanged {                                                                 \
        template <class T>                                                                    \
        DEVICE T combine(T x, T y) {                                                          \
            return (T)(x operator_ y);                                                        \
        }                                                                                     \
    };
BITWISE(BitwiseAnd, &)
BITWISE(BitwiseOr, |)
BITWISE(BitwiseXor, ^)
#undef BITWISE

#define LOGICAL(name, operator_)                                                              \
    struct name : Unchanged {                                                                 \
        template <class T>                                                                    \
        DEVICE T prepare(T x, T) {                                                            \
            return (T)(x != (T)0);                                                            \
        }                                                                                     \
        template <class T>                                                                    \
        DEVICE T combine(T x, T y) {                                                          \
            return (T)((x != (T)0) operator_ (y != (T)0));                                    \
        }                                                                                     \
    };
LOGICAL(LogicalAnd, &&)
LOGICAL(LogicalOr, ||)
LOGICAL(LogicalXor, !=)
#undef LOGICAL

}  // namespace gpucoll

#endif
