"""MPI's constants."""

from __future__ import annotations

ANY_SOURCE = -1
ANY_TAG = -1
PROC_NULL = -2
ROOT = -3
UNDEFINED = -32766
TAG_UPPER_BOUND = 2**31 - 1

IDENT, CONGRUENT, SIMILAR, UNEQUAL = range(4)
CART, GRAPH, DIST_GRAPH = 1, 2, 3
THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
COMM_TYPE_SHARED = 1
COMM_TYPE_HW_GUIDED, COMM_TYPE_HW_UNGUIDED, COMM_TYPE_RESOURCE_GUIDED = 2, 3, 4
BSEND_OVERHEAD = 64
KEYVAL_INVALID = -1
TAG_UB, HOST, IO, WTIME_IS_GLOBAL, UNIVERSE_SIZE, APPNUM, LASTUSEDCODE = range(1, 8)
WIN_BASE, WIN_SIZE, WIN_DISP_UNIT, WIN_CREATE_FLAVOR, WIN_MODEL = range(8, 13)
WIN_FLAVOR_CREATE, WIN_FLAVOR_ALLOCATE, WIN_FLAVOR_DYNAMIC, WIN_FLAVOR_SHARED = range(1, 5)
WIN_SEPARATE, WIN_UNIFIED = 1, 2
LOCK_EXCLUSIVE, LOCK_SHARED = 1, 2
MODE_NOCHECK, MODE_NOSTORE, MODE_NOPUT, MODE_NOPRECEDE, MODE_NOSUCCEED = 1, 2, 4, 8, 16
MODE_RDONLY, MODE_RDWR, MODE_WRONLY, MODE_CREATE, MODE_EXCL = 2, 8, 4, 1, 64
MODE_DELETE_ON_CLOSE, MODE_UNIQUE_OPEN, MODE_APPEND, MODE_SEQUENTIAL = 16, 32, 128, 256
SEEK_SET, SEEK_CUR, SEEK_END = 0, 1, 2
DISPLACEMENT_CURRENT = DISP_CUR = -54278278
ORDER_C, ORDER_FORTRAN = 0, 1
ORDER_F = ORDER_FORTRAN
UNWEIGHTED, WEIGHTS_EMPTY = -10, -11
TYPECLASS_REAL, TYPECLASS_INTEGER, TYPECLASS_COMPLEX, TYPECLASS_LOGICAL = 1, 2, 3, 4
DISTRIBUTE_BLOCK, DISTRIBUTE_CYCLIC, DISTRIBUTE_NONE, DISTRIBUTE_DFLT_DARG = 1, 2, 3, -1
F_SOURCE, F_TAG, F_ERROR, F_STATUS_SIZE = 0, 1, 2, 6
VERSION, SUBVERSION = 4, 1
MAX_PROCESSOR_NAME, MAX_ERROR_STRING, MAX_PORT_NAME = 256, 512, 1024
MAX_INFO_KEY, MAX_INFO_VAL, MAX_OBJECT_NAME = 255, 1024, 128
MAX_DATAREP_STRING, MAX_LIBRARY_VERSION_STRING = 128, 8192
MAX_PSET_NAME_LEN, MAX_STRINGTAG_LEN = 256, 256

_COMBINERS = (
    *("NAMED", "DUP", "CONTIGUOUS", "VECTOR", "HVECTOR", "INDEXED", "HINDEXED", "INDEXED_BLOCK"),
    *("HINDEXED_BLOCK", "STRUCT", "SUBARRAY", "DARRAY", "F90_REAL", "F90_COMPLEX", "F90_INTEGER"),
    *("RESIZED", "VALUE_INDEX"),
)
COMBINERS = {name: number for number, name in enumerate(_COMBINERS, 1)}
globals().update({f"COMBINER_{name}": number for name, number in COMBINERS.items()})

ERROR_TEXTS = {
    "SUCCESS": "no error",
    "ERR_BUFFER": "invalid buffer",
    "ERR_COUNT": "invalid count",
    "ERR_TYPE": "invalid datatype",
    "ERR_TAG": "invalid tag",
    "ERR_COMM": "invalid communicator",
    "ERR_RANK": "invalid rank",
    "ERR_ROOT": "invalid root",
    "ERR_GROUP": "invalid group",
    "ERR_OP": "invalid reduce operation",
    "ERR_TOPOLOGY": "invalid topology",
    "ERR_DIMS": "invalid dimensions",
    "ERR_ARG": "invalid argument",
    "ERR_UNKNOWN": "unknown error",
    "ERR_TRUNCATE": "message truncated on receive",
    "ERR_OTHER": "an error without a class of its own",
    "ERR_INTERN": "internal error",
    "ERR_IN_STATUS": "the error is in the status",
    "ERR_PENDING": "pending request",
    "ERR_REQUEST": "invalid request",
    **{f"ERR_{name}": f"{name.lower().replace('_', ' ')}: of files" for name in (
        *("ACCESS", "AMODE", "BAD_FILE", "CONVERSION", "DUP_DATAREP", "FILE_EXISTS"),
        *("FILE_IN_USE", "FILE", "IO", "NO_SPACE", "NO_SUCH_FILE", "QUOTA", "READ_ONLY"),
        *("UNSUPPORTED_DATAREP", "UNSUPPORTED_OPERATION"),
    )},
    "ERR_INFO": "invalid info",
    "ERR_INFO_KEY": "invalid key of an info",
    "ERR_INFO_VALUE": "invalid value of an info",
    "ERR_INFO_NOKEY": "no such key in an info",
    "ERR_NAME": "name not found",
    "ERR_NO_MEM": "no memory",
    "ERR_NOT_SAME": "the ranks did not make the same call",
    "ERR_PORT": "invalid port",
    "ERR_SERVICE": "invalid service",
    "ERR_SPAWN": "processes cannot be spawned",
    "ERR_KEYVAL": "invalid attribute key",
    "ERR_WIN": "invalid window",
    "ERR_BASE": "invalid base",
    "ERR_SIZE": "invalid size",
    "ERR_DISP": "invalid displacement",
    "ERR_ASSERT": "invalid assertion",
    "ERR_LOCKTYPE": "invalid lock type",
    **{f"ERR_RMA_{name}": f"{name.lower()}: of one-sided communication" for name in (
        "ATTACH", "CONFLICT", "FLAVOR", "RANGE", "SHARED", "SYNC",
    )},
    "ERR_ERRHANDLER": "invalid error handler",
    "ERR_SESSION": "invalid session",
    "ERR_PROC_ABORTED": "a process has aborted",
    "ERR_VALUE_TOO_LARGE": "value too large",
    "ERR_PROC_FAILED": "a process has failed",
    "ERR_PROC_FAILED_PENDING": "a process has failed while a request was pending",
    "ERR_REVOKED": "the communicator was revoked",
    "ERR_ABI": "another ABI",
}  # fmt: skip
ERROR_CLASSES = {name: number for number, name in enumerate(ERROR_TEXTS)}
ERR_LASTCODE = 0x3FFFFFFF
globals().update(ERROR_CLASSES)


class _Constant:
    """A value that is compared by identity."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        return self._number != 0

    def __int__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is int and other == self._number)

    def __hash__(self) -> int:
        return hash(self._number)


class BottomType(_Constant):
    """The type of BOTTOM, which every call refuses as memory."""

    def __new__(cls, *_: object) -> BottomType:
        return globals().get("BOTTOM") or super().__new__(cls)

    def __init__(self, *_: object) -> None:
        super().__init__("BOTTOM", 0)


class InPlaceType(_Constant):
    """The type of IN_PLACE."""

    def __new__(cls, *_: object) -> InPlaceType:
        return globals().get("IN_PLACE") or super().__new__(cls)

    def __init__(self, *_: object) -> None:
        super().__init__("IN_PLACE", -1)


class BufferAutomaticType(_Constant):
    """The type of BUFFER_AUTOMATIC."""

    def __new__(cls, *_: object) -> BufferAutomaticType:
        return globals().get("BUFFER_AUTOMATIC") or super().__new__(cls)

    def __init__(self, *_: object) -> None:
        super().__init__("BUFFER_AUTOMATIC", -2)


BOTTOM = BottomType()
IN_PLACE = InPlaceType()
BUFFER_AUTOMATIC = BufferAutomaticType()
