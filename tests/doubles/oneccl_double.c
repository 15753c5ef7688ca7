/* A double of oneCCL's C interface for one rank over host memory, which does what ONECCL_DOUBLE says:

     hang=onecclAllReduce      this function never returns
     fail=onecclAllReduce      this function returns 11, and onecclGetLastError a text

   and reports the version ONECCL_DOUBLE_VERSION (20220200). -DWITHOUT_SEND leaves onecclSend out. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-parameter"

#define API __attribute__((visibility("default")))
#define ID_BYTES 4096

typedef struct {
    char data[ID_BYTES];
} Id;

static const size_t item_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static const char *last_error = "";
static int communicator;

static int enter(const char *name)
{
    const char *says = getenv("ONECCL_DOUBLE");
    if (says == NULL || strlen(says) < 6 || strcmp(says + 5, name))
        return 0;
    while (!strncmp(says, "hang=", 5))
        pause();
    last_error = "as a test wants it";
    return 11;
}

static int copied(const char *name, const void *from, void *to, size_t count, int type)
{
    int code = enter(name);
    if (code == 0 && to != NULL && from != to)
        memcpy(to, from, count * item_bytes[type]);
    return code;
}

API int onecclGetVersion(int *version)
{
    const char *says = getenv("ONECCL_DOUBLE_VERSION");
    *version = says == NULL ? 20220200 : atoi(says);
    return 0;
}

API const char *onecclGetErrorString(int code) { return code == 11 ? "Unknown error code" : "?"; }
API const char *onecclGetLastError(void *comm) { return last_error; }
API int onecclGetUniqueId(Id *id) { memset(id, 7, sizeof *id); return enter("onecclGetUniqueId"); }
API int onecclSetDevice(unsigned index) { return 12; }

API int onecclCommInitRank(void **comm, size_t size, Id id, int rank)
{
    int code = enter("onecclCommInitRank");
    if (size != 1 || rank != 0 || id.data[0] != 7 || id.data[ID_BYTES - 1] != 7)
        return 4;
    *comm = &communicator;
    return code;
}

API int onecclCommFinalize(void *comm) { return enter("onecclCommFinalize"); }
API int onecclCommDestroy(void *comm) { return enter("onecclCommDestroy"); }
API int onecclRedOpDestroy(int op, void *comm) { return 12; }
API int onecclGroupStart(void) { return enter("onecclGroupStart"); }
API int onecclGroupEnd(void) { return enter("onecclGroupEnd"); }

API int onecclRedOpCreatePreMulSum(int *op, void *factor, int type, int where, void *comm)
{
    return 12;
}

#define COPIES(name, ...)                                                           \
    API int name(const void *in, void *out, size_t n, int type, __VA_ARGS__)         \
    {                                                                                \
        return copied(#name, in, out, n, type);                                      \
    }

COPIES(onecclAllReduce, int op, void *comm, void *stream)
COPIES(onecclReduceScatter, int op, void *comm, void *stream)
COPIES(onecclReduce, int op, int root, void *comm, void *stream)
COPIES(onecclBroadcast, int root, void *comm, void *stream)
COPIES(onecclScatter, int root, void *comm, void *stream)
COPIES(onecclAllGather, void *comm, void *stream)
COPIES(onecclAllToAll, void *comm, void *stream)

API int onecclRecv(void *out, size_t n, int type, int peer, void *comm, void *stream)
{
    return enter("onecclRecv");
}
#ifndef WITHOUT_SEND
API int onecclSend(const void *in, size_t n, int type, int peer, void *comm, void *stream)
{
    return enter("onecclSend");
}
#endif
