/* A double of NCCL over host memory, across processes: its ABI, and its manners.
 *
 * Compiled as libnccl.so.2, and with -DRCCL as librccl.so.1; -DWITHOUT_ncclX leaves a function out.
 * It stands on the device double (the current device, streams, memory), which it finds in the process
 * as the real library finds the driver. Ranks meet in anonymous shared memory whose descriptor rank
 * 0's process holds; its place is what the unique id says, so nothing has a name to be left behind.
 * That is so for ranks on several hosts, too, which are played on one machine: they still share memory
 * and processes, so nothing of what the real library does between hosts is doubled (its sockets, NICs,
 * rings over the network). Which host a rank is on only NCCL_HOSTID says: GPUs of different ones differ.
 *
 * Manners that it keeps, since programs depend on them: a call only enqueues; nothing in a group
 * happens before the outermost ncclGroupEnd; calls that differ between ranks, and peers that died,
 * hang until ncclCommAbort (or until DOUBLE_LIMIT_S, with a line on standard error). A communicator
 * made non-blocking puts its work on streams in a thread of the library's own, later than its call
 * returns; it is in progress until that is done and it has been polled often enough, and refuses other
 * calls before; and ncclCommSplit and ncclCommWindowRegister return 0 while they are in progress, with
 * nothing in their out-parameters. One rank alone does its collectives at once, inside groups too.
 * The output is poisoned when the work begins on its stream, and the input is read as late as can be.
 *
 * ncclDoubleSet(key, value) and the environment (NCCL_DOUBLE_KEY) make it misbehave: `settings`.
 */
#define _GNU_SOURCE
#include "nccl_joining.h"

/* --- the interface: about the library -------------------------------------------------------------- */

DOUBLE_API int ncclGetVersion(int *out)
{
    if (!out)
        return fail(InvalidArgument, "GetVersion : version argument is NULL");
    *out = (int)get("version");
    return Success;
}

DOUBLE_API const char *ncclGetErrorString(int code)
{
    static const char *texts[] = {
        "no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error - please report this issue to the NCCL developers",
        "invalid argument (run with NCCL_DEBUG=WARN for details)",
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "remote process exited or there was a network error", "NCCL operation in progress",
        "operation timed out"};
    return code >= 0 && code < 9 ? texts[code] : "unknown result code";
}

#ifndef WITHOUT_ncclGetLastError
DOUBLE_API const char *ncclGetLastError(void *comm)
{
    (void)comm;
    return last_error;
}
#endif

/* --- communicators ------------------------------------------------------------------------------------ */

DOUBLE_API int ncclGetUniqueId(ncclUniqueId *out)
{
    BEGIN(ncclGetUniqueId)
    struct place place = {MAGIC, getpid(), memfd_create("nccl-double", MFD_CLOEXEC), 0};
    memset(out, 0, sizeof *out);
    memcpy(out->internal, &place, sizeof place);
    return Success;
}

DOUBLE_API int ncclCommInitRankConfig(void **out, int n, ncclUniqueId id, int rank, const struct config *config)
{
    BEGIN(ncclCommInitRankConfig)
    return make(out, n, id, rank, config);
}

DOUBLE_API int ncclCommInitRank(void **out, int n, ncclUniqueId id, int rank)
{
    BEGIN(ncclCommInitRank)
    return make(out, n, id, rank, NULL);
}

/* CuPy's module is linked to it. */
DOUBLE_API int ncclCommInitAll(void **out, int count, const int *numbers)
{
    (void)out, (void)count, (void)numbers;
    return fail(InvalidUsage, "the double has one rank in a process");
}

/* The communicator behind a handle, ready for use; NULL with the error made. */
static struct comm *ready(void *handle, const char *function, int *code)
{
    struct comm *c = find_comm(handle);
    *code = InvalidArgument;
    if (!handle)
        fail(InvalidArgument, "%s : comm argument is NULL", function);
    else if (!c)
        fail(InvalidArgument, "%s : comm argument is no communicator any more", function);
    else if (c->state != READY || c->has_job || c->child || c->deferred_window.out)
        fail(InvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
    else if (c->async_error)
        *code = fail(c->async_error, "%s : the communicator has failed", function);
    else
        return c;
    return NULL;
}

#define READY_COMM(name)                                \
    BEGIN(name)                                         \
    int code = Success;                                 \
    struct comm *c = ready(comm, #name + 4, &code);     \
    if (!c)                                             \
        return code;

#ifndef WITHOUT_ncclCommSplit
DOUBLE_API int ncclCommSplit(void *comm, int color, int key, void **out, const struct config *config)
{
    READY_COMM(ncclCommSplit)
    *out = NULL;
    if (color < -1 || (code = check_config(config)))
        return code ? code : fail(InvalidArgument, "CommSplit : color must be positive or NCCL_SPLIT_NOCOLOR");
    struct comm *child = new_comm(0, 0, blocking_of(config, c->is_blocking));
    child->device = c->device;
    child->parent = c;
    child->color = color;
    child->key = key;
    child->fd = memfd_create("nccl-double", MFD_CLOEXEC);
    child->state = PUBLISHING;
    c->splits++;
    if (!c->is_blocking) {
        c->child = child;
        c->child_out = out;
        c->polls = (int)get("polls");
        return Success; /* as NCCL does, though all is still to be done */
    }
    code = progress_until_ready(child);
    if (code || color < 0) /* without a color it says so to the others, and gets nothing */
        child->is_alive = 0;
    else
        *out = child;
    return code;
}
#endif

/* A step of a split; its outcome is there when the parent is ready again. */
static int finish_child(struct comm *c)
{
    struct comm *child = c->child;
    int code = progress(child);
    if (code == InProgress)
        return code;
    c->child = NULL;
    if (code || child->color < 0)
        child->is_alive = 0;
    else
        *c->child_out = child;
    return code;
}

static int finish_window(struct comm *c);

DOUBLE_API int ncclCommGetAsyncError(void *comm, int *out)
{
    BEGIN(ncclCommGetAsyncError)
    struct comm *c = find_comm(comm);
    if (!c || !out)
        return fail(InvalidArgument, "GetAsyncError : comm argument is NULL");
    *out = c->async_error;
    if (*out)
        return Success;
    if (c->polls > 0) {
        c->polls--;
        *out = InProgress;
        return Success;
    }
    if (c->state != READY)
        *out = progress(c);
    else if (c->child)
        *out = finish_child(c);
    else if (c->deferred_window.out)
        *out = finish_window(c);
    else if (c->has_job)
        *out = finish_job(c);
    if (*out != InProgress && *out != Success) /* a stream may have set one meanwhile */
        c->async_error = *out;
    return Success;
}

DOUBLE_API int ncclCommFinalize(void *comm)
{
    READY_COMM(ncclCommFinalize)
    if (c->is_blocking)
        return wait_for_batches(c);
    c->polls = (int)get("polls");
    return InProgress;
}

DOUBLE_API int ncclCommDestroy(void *comm)
{
    int injected = begin("ncclCommDestroy"); /* the communicator is gone all the same */
    struct comm *c = find_comm(comm);
    if (!comm)
        return injected;
    if (!c)
        return fail(InvalidArgument, "CommDestroy : comm argument is no communicator any more");
    int code = end(c);
    return code ? code : injected;
}

DOUBLE_API int ncclCommAbort(void *comm)
{
    int injected = begin("ncclCommAbort"); /* the communicator is gone all the same */
    struct comm *c = find_comm(comm);
    if (!comm)
        return injected;
    if (!c)
        return fail(InvalidArgument, "CommAbort : comm argument is no communicator any more");
    atomic_store(&c->aborted, 1);
    int code = end(c);
    return code ? code : injected;
}

static int tell(void *comm, int *out, int what)
{
    struct comm *c = find_comm(comm);
    if (!c || !out)
        return fail(InvalidArgument, "comm argument is NULL");
    *out = what == 0 ? c->n : what == 1 ? c->device : c->rank;
    return Success;
}

DOUBLE_API int ncclCommCount(void *comm, int *out) { return tell(comm, out, 0); }
DOUBLE_API int ncclCommCuDevice(void *comm, int *out) { return tell(comm, out, 1); }
DOUBLE_API int ncclCommUserRank(void *comm, int *out) { return tell(comm, out, 2); }

/* --- memory -------------------------------------------------------------------------------------------- */

#ifndef WITHOUT_ncclMemAlloc
DOUBLE_API int ncclMemAlloc(void **out, size_t size)
{
    BEGIN(ncclMemAlloc)
    int code = find_device();
    if (code)
        return code;
    code = device.allocate(out, size);
    return code ? fail(CudaError, "Cuda failure %d", code) : Success;
}
#endif

#ifndef WITHOUT_ncclMemFree
DOUBLE_API int ncclMemFree(void *address)
{
    BEGIN(ncclMemFree)
    int code = device.free(address);
    return code ? fail(CudaError, "Cuda failure %d", code) : Success;
}
#endif

struct registration {
    struct comm *comm;
    void *address;
    int is_window, place;
};

static int register_memory(struct comm *c, void *address, size_t size, void **out, int is_window, int place)
{
    if (!device.owns(address, size))
        return fail(InvalidArgument, "%p is not memory of the device", address);
    struct registration *r = malloc(sizeof *r);
    *r = (struct registration){c, address, is_window, place};
    registrations++;
    c->registrations++;
    *out = r;
    return Success;
}

static int deregister(struct comm *c, void *handle, int is_window)
{
    struct registration *r = handle;
    if (!r || r->comm != c || r->is_window != is_window)
        return fail(InvalidArgument, "this is no registration of the communicator");
    registrations--;
    c->registrations--;
    if (is_window)
        c->window_places[r->place] = 0;
    free(r);
    return Success;
}

#ifndef WITHOUT_ncclCommRegister
DOUBLE_API int ncclCommRegister(void *comm, void *address, size_t size, void **out)
{
    READY_COMM(ncclCommRegister)
    return register_memory(c, address, size, out, 0, 0);
}
DOUBLE_API int ncclCommDeregister(void *comm, void *handle)
{
    BEGIN(ncclCommDeregister)
    return deregister(find_comm(comm), handle, 0);
}
#endif

/* A window is there when every rank has brought its part. */
static int finish_window(struct comm *c)
{
    struct deferred_window w = c->deferred_window;
    for (int r = 0; r < c->n; r++)
        if (atomic_load(&c->shared->members[r].arrived[1]) < w.number)
            return InProgress;
    c->deferred_window.out = NULL;
    for (int r = 0; r < c->n; r++)
        if (c->shared->members[r].window_place != w.place)
            return fail(InvalidArgument, "WindowRegister : another place on rank %d: multicast would miss it", r);
    return register_memory(c, w.address, w.size, w.out, 1, w.place);
}

#ifndef WITHOUT_ncclCommWindowRegister
/* Collective: every rank brings its part. */
DOUBLE_API int ncclCommWindowRegister(void *comm, void *address, size_t size, void **out, int flags)
{
    READY_COMM(ncclCommWindowRegister)
    if (flags & ~3 || (uintptr_t)address % 4096)
        return fail(InvalidArgument, "WindowRegister : unknown flags, or not aligned to 4096 bytes");
    *out = NULL;
    int place = 0;
    while (place < 63 && c->window_places[place])
        place++;
    c->window_places[place] = 1;
    c->shared->members[c->rank].window_place = place;
    c->deferred_window = (struct deferred_window){address, size, out, ++c->arrivals[1], place};
    atomic_store(&c->shared->members[c->rank].arrived[1], c->arrivals[1]);
    if (!c->is_blocking) {
        c->polls = (int)get("polls");
        return get("version") < 22800 ? InProgress : Success; /* though it is still to be done */
    }
    double since = now_s();
    for (unsigned turn = 0; (code = finish_window(c)) == InProgress; turn++)
        if (pause_once(c, since, turn))
            return fail(SystemError, "the other ranks did not come to register their windows");
    return code;
}
DOUBLE_API int ncclCommWindowDeregister(void *comm, void *window)
{
    BEGIN(ncclCommWindowDeregister)
    return deregister(find_comm(comm), window, 1);
}
#endif

/* --- reduce operations ------------------------------------------------------------------------------------ */

DOUBLE_API int ncclRedOpCreatePreMulSum(int *out, void *factor, int type, int residence, void *comm)
{
    READY_COMM(ncclRedOpCreatePreMulSum)
    if (type < 0 || type >= TYPES || (unsigned)residence > 1)
        return fail(InvalidArgument, "RedOpCreatePreMulSum : invalid type or residence");
    int i = 0;
    while (i < OPERATORS && c->operators[i].is_used)
        i++;
    if (i == OPERATORS)
        return fail(InternalError, "too many operators");
    c->operators[i].is_used = 1;
    c->operators[i].type = type;
    memcpy(c->operators[i].factor, factor, SIZES[type]);
    *out = OPS + i;
    return Success;
}

DOUBLE_API int ncclRedOpDestroy(int op, void *comm)
{
    BEGIN(ncclRedOpDestroy)
    struct comm *c = find_comm(comm);
    if (!c || op < OPS || op >= OPS + OPERATORS || !c->operators[op - OPS].is_used)
        return fail(InvalidArgument, "RedOpDestroy : operator unknown to this comm");
    c->operators[op - OPS].is_used = 0;
    return Success;
}

/* --- collectives, messages, groups -------------------------------------------------------------------------- */

static int check_operation(struct comm *c, struct operation *o, const char *name)
{
    if (o->type < 0 || o->type >= TYPES)
        return fail(InvalidArgument, "%s : invalid type %d", name, o->type);
    if (o->op >= OPS && o->op < OPS + OPERATORS && c->operators[o->op - OPS].is_used) {
        if (c->operators[o->op - OPS].type != o->type)
            return fail(InvalidArgument, "%s : the operator is of another type", name);
        o->has_factor = 1;
        memcpy(o->factor, c->operators[o->op - OPS].factor, 8);
        o->op = SUM;
    }
    if (o->op < 0 || o->op >= OPS)
        return fail(InvalidArgument, "%s : invalid reduction operation %d", name, o->op);
    if (o->peer < 0 || o->peer >= c->n)
        return fail(InvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)", name, o->peer, c->n);
    size_t sent = send_size(c, o), received = recv_size(c, o);
    if (get("check_pointers") && ((sent && !device.owns(o->send, sent)) || (received && !device.owns(o->recv, received))))
        return fail(InvalidArgument, "%s : a buffer is not a valid pointer, or is too short", name);
    if (get("check_pointers") && (o->kind == GATHER || o->kind == SCATTER) && (!o->send || !o->recv))
        return fail(InvalidArgument, "%s : a buffer is NULL, on whichever rank", name); /* NCCL_CHECK_POINTERS=1 */
    if (device.stream_device(o->stream) != c->device)
        return fail(InvalidArgument, "%s : the stream is not of the communicator's device", name);
    return Success;
}

static int issue(struct comm *c, struct operation o, const char *name)
{
    int code = check_operation(c, &o, name);
    if (code)
        return code;
    if (!o.count && o.kind < SEND)
        return Success; /* empty collectives are no call at all */
    if (c->n == 1 && o.kind < SEND)
        return issue_alone(c, &o);
    if (group_count == group_capacity) {
        group_capacity = group_capacity ? 2 * group_capacity : 64;
        group = realloc(group, (size_t)group_capacity * sizeof *group);
    }
    group[group_count].comm = c;
    group[group_count++].operation = o;
    return group_depth ? Success : end_group();
}

#define COLLECTIVE(name, kind, op_, root_, ...)                                                       \
    DOUBLE_API int name(const void *send, void *recv, size_t count, int type, __VA_ARGS__, void *stream) \
    {                                                                                                 \
        READY_COMM(name)                                                                              \
        return issue(c, (struct operation){kind, type, op_, root_, 0, "", send, recv, count, stream}, #name + 4); \
    }

COLLECTIVE(ncclAllReduce, ALL_REDUCE, op, 0, int op, void *comm)
COLLECTIVE(ncclReduce, REDUCE, op, root, int op, int root, void *comm)
COLLECTIVE(ncclBroadcast, BROADCAST, 0, root, int root, void *comm)
COLLECTIVE(ncclReduceScatter, REDUCE_SCATTER, op, 0, int op, void *comm)
COLLECTIVE(ncclAllGather, ALL_GATHER, 0, 0, void *comm)
#ifndef WITHOUT_ncclAlltoAll
COLLECTIVE(ncclAlltoAll, ALL_TO_ALL, 0, 0, void *comm)
#endif
#ifndef WITHOUT_ncclGather
COLLECTIVE(ncclGather, GATHER, 0, root, int root, void *comm)
#endif
#ifndef WITHOUT_ncclScatter
COLLECTIVE(ncclScatter, SCATTER, 0, root, int root, void *comm)
#endif
DOUBLE_API int ncclBcast(void *buffer, size_t count, int type, int root, void *comm, void *stream)
{
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

DOUBLE_API int ncclSend(const void *send, size_t count, int type, int peer, void *comm, void *stream)
{
    READY_COMM(ncclSend)
    return issue(c, (struct operation){SEND, type, 0, peer, 0, "", send, NULL, count, stream}, "Send");
}

DOUBLE_API int ncclRecv(void *recv, size_t count, int type, int peer, void *comm, void *stream)
{
    READY_COMM(ncclRecv)
    return issue(c, (struct operation){RECV, type, 0, peer, 0, "", NULL, recv, count, stream}, "Recv");
}

DOUBLE_API int ncclGroupStart(void)
{
    BEGIN(ncclGroupStart)
    group_depth++;
    return Success;
}

DOUBLE_API int ncclGroupEnd(void)
{
    if (group_depth <= 0)
        return fail(InvalidUsage, "ncclGroupEnd: not in a group call.");
    int code = begin("ncclGroupEnd");
    if (--group_depth)
        return code;
    if (code)
        group_error = code;
    return end_group();
}

#ifdef RCCL
#ifndef WITHOUT_ncclAllToAll
COLLECTIVE(ncclAllToAll, ALL_TO_ALL, 0, 0, void *comm)
#endif
#endif
