/* A double of NCCL over host memory, across processes: its ABI, and its manners.
 *
 * Compiled as libnccl.so.2, and with -DRCCL as librccl.so.1; -DWITHOUT_ncclX leaves a function out.
 * It stands on the device double (the current device, streams, memory), which it finds in the process
 * as the real library finds the driver. Ranks meet in anonymous shared memory whose descriptor rank
 * 0's process holds; its place is what the unique id says, so nothing has a name to be left behind.
 *
 * Manners that it keeps, since programs depend on them: a call only enqueues; nothing in a group
 * happens before the outermost ncclGroupEnd; calls that differ between ranks, and peers that died,
 * hang until ncclCommAbort (or until DOUBLE_LIMIT_S, with a line on standard error); a communicator
 * made non-blocking is in progress until it has been polled often enough, and is refused before.
 * The output is poisoned when the work begins on its stream, and the input is read as late as can be.
 *
 * ncclDoubleSet(key, value) and the environment (NCCL_DOUBLE_KEY) make it misbehave: see `settings`.
 */
#define _GNU_SOURCE
#include "double.h"
#include "elements.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef RCCL
#define DRIVER "libamdhip64.so.6"
#define VERSION 22707
#else
#define DRIVER "libcuda.so.1"
#define VERSION 22907
#endif

enum { Success, CudaError, SystemError, InternalError, InvalidArgument, InvalidUsage, RemoteError, InProgress };
enum { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV };

#define RANKS 64
#define SLOT (256 << 10)
#define MAIL (64 << 10)
#define POISON 0xA5
#define MAGIC 0x6e63636c
#define OPERATORS 256

typedef struct { char internal[128]; } ncclUniqueId;

/* --- what all ranks share ------------------------------------------------------------------------ */

struct call {
    int kind, type, op, root;
    uint64_t count, number;
};

struct member {
    _Atomic int pid; /* set last: it has joined */
    int device;
    _Atomic uint64_t arrived[2]; /* at barriers of the streams, and of the host */
    struct call call;
    _Atomic uint64_t split_published, split_read;
    int color, key, child_fd;
};

struct mailbox {
    _Atomic uint64_t written, taken; /* pieces */
    uint64_t total, size;
    char data[MAIL];
};

struct shared {
    _Atomic int magic;
    int nranks;
    struct member members[RANKS];
    char payload[]; /* a slot per rank, then a mailbox per pair */
};

static size_t shared_size(int n)
{
    return sizeof(struct shared) + (size_t)n * SLOT + (size_t)n * n * sizeof(struct mailbox);
}

struct place { /* in a unique id */
    int magic, pid, fd;
    uint64_t nonce;
};

/* --- what a rank has ----------------------------------------------------------------------------- */

struct operation {
    int kind, type, op, peer;
    int has_factor;
    char factor[8];
    const char *send;
    char *recv;
    size_t count;
    void *stream;
};

struct comm {
    struct comm *next;
    int is_alive, rank, n, device, is_blocking, fd, id_fd;
    _Atomic int aborted, async_error;
    struct shared *shared;
    int peers[RANKS]; /* pidfds */
    uint64_t arrivals[2], splits, calls;
    /* In the order in which they were put on streams: one at a time, like the library's own stream. */
    uint64_t tickets, turn, executed;
    int pending; /* batches that are on streams */
    /* While in progress: */
    enum { READY, JOINING, PUBLISHING, COLLECTING } state;
    int polls, color, key;
    struct comm *parent;
    struct batch *deferred;
    struct { int is_used, type; char factor[8]; } operators[OPERATORS];
};

struct batch { /* what a group does on one communicator */
    struct comm *comm;
    uint64_t ticket;
    int count;
    struct operation operations[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct comm *comms;
static char last_error[512];

static __thread int group_depth, group_error, group_count, group_capacity;
static __thread struct { struct comm *comm; struct operation operation; } *group;

/* --- settings, counts ---------------------------------------------------------------------------- */

static struct setting {
    const char *key;
    long value;
} settings[] = {
    {"version", VERSION},       /* what ncclGetVersion says */
    {"error_code", 1},          /* of the injected error: */
    {"error_call", 0},          /* the how-manieth call from now on fails; 0: none */
    {"polls", 0},               /* a non-blocking communicator stays in progress for so many polls */
    {"delay_us", 0},            /* before each batch moves data, with its output poisoned */
    {"hang_at", 0},             /* the how-manieth batch of a communicator never ends by itself */
    {"async_error_at", 0},      /* the how-manieth batch hangs and makes the asynchronous error: */
    {"async_error", RemoteError},
    {"dead_peer_error", 0},     /* 1: a peer that died is an asynchronous error, not only a hang */
    {"check_pointers", 1},      /* buffers must lie within memory of the device double */
};
static char error_function[64]; /* only calls of this one count for error_call; empty: all */
static struct { const char *name; long count; } counts[64];

static struct setting *setting(const char *key)
{
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (!strcmp(settings[i].key, key))
            return &settings[i];
    return NULL;
}

static long get(const char *key) { return setting(key)->value; }

DOUBLE_API int ncclDoubleSet(const char *key, long value)
{
    struct setting *s = setting(key);
    if (s)
        s->value = value;
    return s ? 0 : -1;
}

DOUBLE_API long ncclDoubleGet(const char *key) { return get(key); }

DOUBLE_API void ncclDoubleFailAt(const char *function, long call, int code)
{
    snprintf(error_function, sizeof error_function, "%s", function);
    setting("error_code")->value = code;
    setting("error_call")->value = call;
}

/* How often a function was called in this process. */
DOUBLE_API long ncclDoubleCalls(const char *function)
{
    for (size_t i = 0; i < sizeof counts / sizeof *counts && counts[i].name; i++)
        if (!strcmp(counts[i].name, function))
            return counts[i].count;
    return 0;
}

/* How many communicators have been neither destroyed nor aborted. */
DOUBLE_API long ncclDoubleCommunicators(void)
{
    long count = 0;
    for (struct comm *c = comms; c; c = c->next)
        count += c->is_alive;
    return count;
}

static __attribute__((constructor)) void read_environment(void)
{
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        char name[64] = "NCCL_DOUBLE_";
        for (size_t j = 0; settings[i].key[j]; j++)
            name[12 + j] = settings[i].key[j] == '_' ? '_' : (char)(settings[i].key[j] - 'a' + 'A');
        if (getenv(name))
            settings[i].value = atol(getenv(name));
    }
    if (getenv("NCCL_DOUBLE_ERROR_FUNCTION"))
        snprintf(error_function, sizeof error_function, "%s", getenv("NCCL_DOUBLE_ERROR_FUNCTION"));
}

static int fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    if (group_depth && !group_error)
        group_error = code;
    return code;
}

/* Count a call, and say whether it is the one that must fail. */
static int begin(const char *function)
{
    pthread_mutex_lock(&lock);
    size_t i = 0;
    while (counts[i].name && strcmp(counts[i].name, function))
        i++;
    counts[i].name = function;
    counts[i].count++;
    struct setting *left = setting("error_call");
    int counted = left->value > 0 && (!*error_function || !strcmp(error_function, function));
    int must_fail = counted && --left->value == 0;
    pthread_mutex_unlock(&lock);
    return must_fail ? fail((int)get("error_code"), "%s: an error was injected", function) : Success;
}

#define BEGIN(name)                 \
    {                               \
        int code_ = begin(#name);   \
        if (code_)                  \
            return code_;           \
    }

/* --- the device double ---------------------------------------------------------------------------- */

static struct {
    double_enqueue_function *enqueue;
    double_join_function *join;
    double_current_device_function *current_device;
    double_stream_device_function *stream_device;
    double_allocate_function *allocate;
    double_free_function *free;
    double_owns_function *owns;
} device;

static int find_device(void)
{
    if (device.enqueue)
        return Success;
    void *driver = dlopen(DRIVER, RTLD_NOW);
    if (!driver)
        return fail(CudaError, "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'");
    device.join = dlsym(driver, "double_join");
    device.current_device = dlsym(driver, "double_current_device");
    device.stream_device = dlsym(driver, "double_stream_device");
    device.allocate = dlsym(driver, "double_allocate");
    device.free = dlsym(driver, "double_free");
    device.owns = dlsym(driver, "double_owns");
    device.enqueue = dlsym(driver, "double_enqueue");
    return device.enqueue ? Success : fail(CudaError, "%s is no double", DRIVER);
}

/* --- waiting for other ranks ---------------------------------------------------------------------- */

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void look_for_the_dead(struct comm *c)
{
    for (int r = 0; r < c->n; r++) {
        struct pollfd gone = {c->peers[r], POLLIN, 0};
        if (c->peers[r] > 0 && poll(&gone, 1, 0) > 0 && !c->async_error)
            c->async_error = RemoteError;
    }
}

/* One turn of a loop that waits; not 0 when it must be left: aborted, or too long. */
static int pause_once(struct comm *c, double since_s, unsigned turn)
{
    if (c->aborted)
        return -1;
    if (turn < 100) {
        sched_yield();
        return 0;
    }
    usleep(100);
    if (turn % 64 == 0 && get("dead_peer_error"))
        look_for_the_dead(c);
    if (now_s() - since_s < DOUBLE_LIMIT_S)
        return 0;
    fprintf(stderr, "NCCL double: rank %d of %d waited %g s for others\n", c->rank, c->n, DOUBLE_LIMIT_S);
    return -1;
}

#define WAIT_UNTIL(comm, condition)                                            \
    {                                                                          \
        double since_ = now_s();                                               \
        for (unsigned turn_ = 0; !(condition); turn_++)                        \
            if (pause_once(comm, since_, turn_))                               \
                return -1;                                                     \
    }

static int hang(struct comm *c) { WAIT_UNTIL(c, 0) return -1; }

static int barrier(struct comm *c, int which)
{
    uint64_t number = ++c->arrivals[which];
    atomic_store(&c->shared->members[c->rank].arrived[which], number);
    for (int r = 0; r < c->n; r++)
        WAIT_UNTIL(c, atomic_load(&c->shared->members[r].arrived[which]) >= number)
    return 0;
}

/* --- collectives ----------------------------------------------------------------------------------- */

static char *slot_of(struct comm *c, int rank) { return c->shared->payload + (size_t)rank * SLOT; }

static struct mailbox *mailbox_of(struct comm *c, int from, int to)
{
    char *boxes = c->shared->payload + (size_t)c->n * SLOT;
    return (struct mailbox *)boxes + (size_t)from * c->n + to;
}

/* Whether all ranks make the same call; where not, hang, as the real one does. */
static int agree(struct comm *c, const struct operation *o)
{
    struct call mine = {o->kind, o->type, o->op, o->peer, o->count, ++c->calls};
    memcpy(&c->shared->members[c->rank].call, &mine, sizeof mine);
    if (barrier(c, 0))
        return -1;
    int is_same = 1;
    for (int r = 0; r < c->n; r++)
        is_same &= !memcmp(&c->shared->members[r].call, &mine, sizeof mine);
    if (barrier(c, 0))
        return -1;
    return is_same ? 0 : hang(c);
}

static void reduce_piece(struct comm *c, const struct operation *o, char *out, size_t count)
{
    size_t size = SIZES[o->type];
    char factor[8], value[8];
    int scales = o->has_factor || (o->op == AVG && !is_integer(o->type));
    memcpy(factor, o->factor, 8);
    if (o->op == AVG && scales && !o->has_factor)
        reciprocal(o->type, c->n, factor);
    for (size_t i = 0; i < count; i++) {
        for (int r = 0; r < c->n; r++) {
            memcpy(value, slot_of(c, r) + i * size, size);
            if (scales)
                scale(o->type, value, factor);
            if (r)
                combine(o->type, o->op, out + i * size, value);
            else
                memcpy(out + i * size, value, size);
        }
        if (o->op == AVG && is_integer(o->type))
            divide(o->type, out + i * size, c->n);
    }
}

/* Everybody shows the piece of block `block` that begins at `first`; who needs it takes it. */
static int exchange_piece(struct comm *c, const struct operation *o, int block, size_t first, size_t count)
{
    size_t size = SIZES[o->type], length = count * size, at = first * size, whole = o->count * size;
    int kind = o->kind, is_root = c->rank == o->peer, is_mine = block == c->rank;
    int shows = kind == BROADCAST || kind == SCATTER ? is_root : 1;
    if (shows)
        memcpy(slot_of(c, c->rank), o->send + (size_t)block * whole + at, length);
    if (barrier(c, 0))
        return -1;
    if (kind == ALL_REDUCE || (kind == REDUCE && is_root) || (kind == REDUCE_SCATTER && is_mine))
        reduce_piece(c, o, o->recv + at, count);
    else if (kind == BROADCAST || (kind == SCATTER && is_mine))
        memcpy(o->recv + at, slot_of(c, o->peer), length);
    else if (kind == ALL_GATHER || (kind == GATHER && is_root) || (kind == ALL_TO_ALL && is_mine))
        for (int r = 0; r < c->n; r++)
            memcpy(o->recv + (size_t)r * whole + at, slot_of(c, r), length);
    return barrier(c, 0);
}

static size_t send_size(const struct comm *c, const struct operation *o)
{
    size_t whole = o->count * SIZES[o->type];
    switch (o->kind) {
    case RECV: return 0;
    case BROADCAST: return c->rank == o->peer ? whole : 0;
    case SCATTER: return c->rank == o->peer ? whole * (size_t)c->n : 0;
    case REDUCE_SCATTER: case ALL_TO_ALL: return whole * (size_t)c->n;
    default: return whole;
    }
}

static size_t recv_size(const struct comm *c, const struct operation *o)
{
    size_t whole = o->count * SIZES[o->type];
    switch (o->kind) {
    case SEND: return 0;
    case REDUCE: return c->rank == o->peer ? whole : 0;
    case GATHER: return c->rank == o->peer ? whole * (size_t)c->n : 0;
    case ALL_GATHER: case ALL_TO_ALL: return whole * (size_t)c->n;
    default: return whole;
    }
}

static int run_collective(struct comm *c, struct operation *o)
{
    int is_blockwise = o->kind == REDUCE_SCATTER || o->kind == ALL_TO_ALL || o->kind == SCATTER;
    size_t length = send_size(c, o), most = SLOT / SIZES[o->type];
    if (agree(c, o))
        return -1;
    char *copy = malloc(length + 1); /* the output may be the input, or a part of it */
    memcpy(copy, o->send, length);
    struct operation own = *o;
    own.send = copy;
    int status = 0;
    for (int block = 0; block < (is_blockwise ? c->n : 1) && !status; block++)
        for (size_t first = 0; first < o->count && !status; first += most)
            status = exchange_piece(c, &own, block, first, o->count - first < most ? o->count - first : most);
    free(copy);
    return status;
}

/* --- sends and receives: all of a batch make progress together ------------------------------------- */

struct transfer {
    struct operation *operation;
    struct mailbox *box;
    size_t done, total;
    int is_done, has_begun;
};

/* Whether it moved a piece; only the first of several transfers on a box that are not done may. */
static int advance(struct transfer *t)
{
    struct mailbox *box = t->box;
    uint64_t written = atomic_load(&box->written), taken = atomic_load(&box->taken);
    size_t left = t->total - t->done, piece = left < MAIL ? left : MAIL;
    if (t->operation->kind == SEND) {
        if (written != taken)
            return 0;
        memcpy(box->data, t->operation->send + t->done, piece);
        box->total = t->total;
        box->size = piece;
        atomic_store(&box->written, written + 1);
    } else {
        if (written == taken || box->total != t->total) /* another size: hang, as the real one */
            return 0;
        piece = box->size;
        memcpy(t->operation->recv + t->done, box->data, piece);
        atomic_store(&box->taken, taken + 1);
    }
    t->done += piece;
    t->is_done = t->done == t->total;
    return 1;
}

static int may_advance(struct transfer *all, int i)
{
    for (int j = 0; j < i; j++)
        if (!all[j].is_done && all[j].box == all[i].box && all[j].operation->kind == all[i].operation->kind)
            return 0;
    return !all[i].is_done;
}

static int advance_all(struct transfer *all, int count, int *left)
{
    int moved = 0;
    *left = 0;
    for (int i = 0; i < count; i++) {
        if (may_advance(all, i))
            moved |= advance(&all[i]);
        *left += !all[i].is_done;
    }
    return moved;
}

static int run_transfers(struct comm *c, struct batch *b)
{
    struct transfer *all = calloc((size_t)b->count + 1, sizeof *all);
    int count = 0, left = 1, status = 0;
    for (int i = 0; i < b->count; i++) {
        struct operation *o = &b->operations[i];
        if (o->kind != SEND && o->kind != RECV)
            continue;
        struct mailbox *box = o->kind == SEND ? mailbox_of(c, c->rank, o->peer) : mailbox_of(c, o->peer, c->rank);
        all[count++] = (struct transfer){o, box, 0, o->count * SIZES[o->type], 0, 0};
    }
    double since = now_s();
    for (unsigned turn = 0; count && left && !status; turn++) {
        if (advance_all(all, count, &left))
            turn = 0;
        else if (left)
            status = pause_once(c, since, turn);
    }
    free(all);
    return status;
}

/* --- a batch on its stream --------------------------------------------------------------------------- */

static void poison(const struct comm *c, const struct operation *o)
{
    const char *send = o->send, *send_end = send + send_size(c, o);
    char *recv = o->recv, *recv_end = recv + recv_size(c, o);
    if (recv == recv_end)
        return;
    if (send == send_end || send_end <= recv || recv_end <= send) {
        memset(recv, POISON, (size_t)(recv_end - recv));
        return;
    }
    if (recv < send) /* in place: what is not the input */
        memset(recv, POISON, (size_t)(send - recv));
    if (send_end < recv_end)
        memset((char *)send_end, POISON, (size_t)(recv_end - send_end));
}

static int misbehave(struct comm *c)
{
    uint64_t number = ++c->executed;
    if (get("delay_us"))
        usleep((useconds_t)get("delay_us"));
    if ((uint64_t)get("async_error_at") == number) {
        c->async_error = (int)get("async_error");
        return hang(c);
    }
    return (uint64_t)get("hang_at") == number ? hang(c) : 0;
}

static int wait_for_turn(struct batch *b)
{
    struct comm *c = b->comm;
    WAIT_UNTIL(c, atomic_load((_Atomic uint64_t *)&c->turn) == b->ticket)
    return 0;
}

static void run_batch(void *work)
{
    struct batch *b = work;
    struct comm *c = b->comm;
    int status = c->aborted ? -1 : wait_for_turn(b);
    for (int i = 0; i < b->count; i++)
        poison(c, &b->operations[i]);
    if (!status)
        status = misbehave(c);
    for (int i = 0; i < b->count && !status; i++)
        if (b->operations[i].kind < SEND)
            status = run_collective(c, &b->operations[i]);
    if (!status)
        run_transfers(c, b);
    atomic_fetch_add((_Atomic uint64_t *)&c->turn, 1);
}

static struct batch *duplicate(const struct batch *b)
{
    size_t size = sizeof *b + (size_t)b->count * sizeof b->operations[0];
    return memcpy(malloc(size), b, size);
}

static void *put_on_stream(const void *work)
{
    struct batch *b = duplicate(work);
    b->ticket = b->comm->tickets++; /* under the device double's lock */
    atomic_fetch_add((_Atomic int *)&b->comm->pending, 1);
    return b;
}

static void drop_batch(void *work)
{
    struct batch *b = work;
    if (b->ticket != UINT64_MAX)
        atomic_fetch_sub((_Atomic int *)&b->comm->pending, 1);
    free(b);
}

static const struct double_kind BATCH = {run_batch, put_on_stream, drop_batch};

/* Several streams in one group: it runs on the first after all, and all go on after it. */
static int enqueue(struct batch *b)
{
    void *first = b->operations[0].stream;
    int code = 0, count = b->count;
    void **others = calloc((size_t)count, sizeof *others);
    int other_count = 0;
    for (int i = 1; i < count; i++)
        if (b->operations[i].stream != first)
            others[other_count++] = b->operations[i].stream;
    for (int i = 0; i < other_count && !code; i++)
        code = device.join(others[i], first);
    b->ticket = UINT64_MAX;
    if (!code)
        code = device.enqueue(first, &BATCH, b);
    for (int i = 0; i < other_count && !code; i++)
        code = device.join(first, others[i]);
    free(others);
    return code ? fail(CudaError, "Cuda failure %d", code) : Success;
}

static int submit(struct batch *b)
{
    struct comm *c = b->comm;
    if (c->is_blocking || !get("polls"))
        return enqueue(b);
    c->deferred = b; /* comes onto its stream when it has been polled often enough */
    c->polls = (int)get("polls");
    return InProgress;
}

static int end_group(void)
{
    int code = group_error, count = group_count, in_progress = Success;
    for (int i = 0; i < count && !code; i++) {
        struct comm *c = group[i].comm;
        if (!c)
            continue; /* went with an earlier one */
        struct batch *b = calloc(1, sizeof *b + (size_t)count * sizeof b->operations[0]);
        b->comm = c;
        for (int j = i; j < count; j++) {
            if (group[j].comm != c)
                continue;
            b->operations[b->count++] = group[j].operation;
            group[j].comm = NULL;
        }
        code = submit(b);
        if (code == InProgress) {
            in_progress = code;
            code = Success; /* of this one; the others are issued too */
        }
    }
    group_count = group_error = 0;
    return code ? code : in_progress;
}

/* --- making and ending communicators ------------------------------------------------------------------ */

static struct comm *new_comm(int n, int rank, int is_blocking)
{
    struct comm *c = calloc(1, sizeof *c);
    c->n = n;
    c->rank = rank;
    c->is_blocking = is_blocking;
    c->is_alive = 1;
    c->fd = c->id_fd = -1;
    c->device = device.current_device();
    pthread_mutex_lock(&lock);
    c->next = comms; /* for ever: handles that were freed must be told */
    comms = c;
    pthread_mutex_unlock(&lock);
    return c;
}

static struct comm *find_comm(void *handle)
{
    for (struct comm *c = comms; c; c = c->next)
        if (c == handle && c->is_alive)
            return c;
    return NULL;
}

static void close_once(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static int map_shared(struct comm *c, int fd)
{
    size_t size = shared_size(c->n);
    if (fd < 0 || ftruncate(fd, (off_t)size))
        return fail(SystemError, "the rank that made the unique id is gone");
    c->shared = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    c->fd = fd;
    return c->shared == MAP_FAILED ? fail(SystemError, "mmap: %s", strerror(errno)) : Success;
}

static int join(struct comm *c)
{
    struct shared *s = c->shared;
    int none = 0;
    if (!atomic_compare_exchange_strong(&s->magic, &none, MAGIC) && s->nranks && s->nranks != c->n)
        return fail(InvalidArgument, "%d ranks here, %d there", c->n, s->nranks);
    s->nranks = c->n;
    struct member *me = &s->members[c->rank];
    if (atomic_load(&me->pid))
        return fail(InvalidUsage, "rank %d is there already", c->rank);
    me->device = c->device;
    atomic_store(&me->pid, getpid());
    c->state = JOINING;
    return Success;
}

static int may_share_gpu(void)
{
    const char *enabled = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return enabled && !strcmp(enabled, "1") && get("version") >= 23000;
}

/* Whether all are there; or an error. */
static int finish_joining(struct comm *c)
{
    for (int r = 0; r < c->n; r++)
        if (!atomic_load(&c->shared->members[r].pid))
            return InProgress;
    for (int r = 0; r < c->n; r++) {
        struct member *other = &c->shared->members[r];
        if (r != c->rank && other->device == c->device && !may_share_gpu())
            return fail(InvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000",
                        c->rank, r, 0x1b + c->device);
        if (r != c->rank)
            c->peers[r] = (int)syscall(SYS_pidfd_open, other->pid, 0);
    }
    close_once(&c->id_fd);
    c->state = READY;
    return Success;
}

static int open_fd_of(int pid, int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* The members of the child, in their order: its count, my rank, and whose memory it is. */
static int color_members(struct comm *child, int *rank)
{
    struct shared *s = child->parent->shared;
    int mine = child->parent->rank, leader = -1, count = 0;
    *rank = 0;
    for (int r = 0; r < child->parent->n; r++) {
        if (s->members[r].color != child->color)
            continue;
        count++;
        if (leader < 0 || s->members[r].key < s->members[leader].key)
            leader = r;
        *rank += s->members[r].key < child->key || (s->members[r].key == child->key && r < mine);
    }
    child->n = count;
    return leader;
}

static int publish_split(struct comm *child)
{
    struct comm *p = child->parent;
    struct member *me = &p->shared->members[p->rank];
    for (int r = 0; r < p->n; r++)
        if (atomic_load(&p->shared->members[r].split_read) < p->splits - 1)
            return InProgress; /* somebody still reads the one before */
    me->color = child->color;
    me->key = child->key;
    me->child_fd = child->fd;
    atomic_store(&me->split_published, p->splits);
    child->state = COLLECTING;
    return InProgress;
}

static int collect_split(struct comm *child)
{
    struct comm *p = child->parent;
    int rank, code = Success;
    for (int r = 0; r < p->n; r++)
        if (atomic_load(&p->shared->members[r].split_published) < p->splits)
            return InProgress;
    int leader = color_members(child, &rank);
    child->rank = rank;
    child->state = READY;
    if (leader != p->rank || child->color < 0)
        close_once(&child->fd);
    if (child->color >= 0) {
        struct member *from = &p->shared->members[leader];
        int fd = leader == p->rank ? child->fd : open_fd_of(from->pid, from->child_fd);
        code = map_shared(child, fd);
        if (!code)
            code = join(child);
    }
    atomic_store(&p->shared->members[p->rank].split_read, p->splits);
    return code ? code : child->color >= 0 ? InProgress : Success;
}

/* One step of what is in progress. */
static int progress(struct comm *c)
{
    switch (c->state) {
    case JOINING: return finish_joining(c);
    case PUBLISHING: return publish_split(c);
    case COLLECTING: return collect_split(c);
    default: return Success;
    }
}

static int progress_until_ready(struct comm *c)
{
    int code = InProgress;
    double since = now_s();
    for (unsigned turn = 0; code == InProgress; turn++) {
        code = progress(c);
        if (code == InProgress && pause_once(c, since, turn))
            return fail(SystemError, "the other ranks did not come");
    }
    return code;
}

static int start(struct comm *c)
{
    if (c->is_blocking)
        return progress_until_ready(c);
    c->polls = (int)get("polls");
    return InProgress;
}

struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

static int blocking_of(const struct config *config, int otherwise)
{
    if (!config || config->blocking == INT_MIN)
        return otherwise;
    return config->blocking != 0;
}

static int check_config(const struct config *config)
{
    if (config && (config->magic != 0xcafebeef || config->size < 24))
        return fail(InvalidArgument, "Invalid config: its magic or its size is wrong");
    return Success;
}

static int make(void **out, int n, ncclUniqueId id, int rank, const struct config *config)
{
    struct place place;
    memcpy(&place, id.internal, sizeof place);
    *out = NULL;
    int code = find_device();
    if (code || (code = check_config(config)))
        return code;
    if (n < 1 || n > RANKS || rank < 0 || rank >= n)
        return fail(InvalidArgument, "Invalid rank requested : %d/%d", rank, n);
    if (group_depth)
        return fail(InvalidUsage, "the double makes no communicators in groups");
    if (place.magic != MAGIC)
        return fail(InvalidArgument, "this is no unique id");
    if (device.current_device() < 0)
        return fail(CudaError, "Cuda failure 'invalid device context'");
    struct comm *c = new_comm(n, rank, blocking_of(config, 1));
    if (place.pid == getpid())
        c->id_fd = place.fd;
    code = map_shared(c, open_fd_of(place.pid, place.fd));
    if (!code)
        code = join(c);
    if (!code)
        code = start(c);
    if (code && code != InProgress)
        c->is_alive = 0;
    else
        *out = c;
    return code;
}

static int wait_for_batches(struct comm *c)
{
    WAIT_UNTIL(c, !atomic_load((_Atomic int *)&c->pending))
    return Success;
}

static int end(struct comm *c)
{
    if (wait_for_batches(c) && !c->aborted)
        return fail(SystemError, "work of the communicator did not end");
    for (int i = 0; c->aborted && c->pending && i < 1000; i++)
        usleep(1000); /* what waits for other ranks stops waiting */
    c->is_alive = 0;
    for (int r = 0; r < c->n; r++)
        if (c->peers[r] > 0)
            close(c->peers[r]);
    if (c->shared && !c->pending) /* a stream that stands still may yet come to work of it */
        munmap(c->shared, shared_size(c->n));
    close_once(&c->fd);
    close_once(&c->id_fd);
    return Success;
}

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
    else if (c->state != READY || c->deferred)
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
    if (color < 0) { /* says so to the others, and gets nothing */
        code = progress_until_ready(child);
        child->is_alive = 0;
        return code;
    }
    code = start(child);
    *out = code && code != InProgress ? NULL : child;
    return code;
}
#endif

DOUBLE_API int ncclCommGetAsyncError(void *comm, int *out)
{
    BEGIN(ncclCommGetAsyncError)
    struct comm *c = find_comm(comm);
    if (!c || !out)
        return fail(InvalidArgument, "GetAsyncError : comm argument is NULL");
    *out = c->async_error;
    if (*out)
        return Success;
    if (c->state != READY)
        *out = progress(c);
    if (*out == Success && (c->deferred || c->polls > 0) && c->polls-- > 0)
        *out = InProgress;
    if (*out == Success && c->deferred) {
        struct batch *b = c->deferred;
        c->deferred = NULL;
        *out = enqueue(b);
    }
    if (*out != InProgress)
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
    BEGIN(ncclCommDestroy)
    struct comm *c = find_comm(comm);
    if (!comm)
        return Success;
    return c ? end(c) : fail(InvalidArgument, "CommDestroy : comm argument is no communicator any more");
}

DOUBLE_API int ncclCommAbort(void *comm)
{
    BEGIN(ncclCommAbort)
    struct comm *c = find_comm(comm);
    if (!comm)
        return Success;
    if (!c)
        return fail(InvalidArgument, "CommAbort : comm argument is no communicator any more");
    atomic_store(&c->aborted, 1);
    return end(c);
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
    int is_window;
};

static _Atomic long registrations;

/* How many buffers and windows are registered. */
DOUBLE_API long ncclDoubleRegistrations(void) { return registrations; }

static int register_memory(struct comm *c, void *address, size_t size, void **out, int is_window)
{
    if (!device.owns(address, size))
        return fail(InvalidArgument, "%p is not memory of the device", address);
    struct registration *r = malloc(sizeof *r);
    *r = (struct registration){c, address, is_window};
    registrations++;
    *out = r;
    return Success;
}

static int deregister(struct comm *c, void *handle, int is_window)
{
    struct registration *r = handle;
    if (!r || r->comm != c || r->is_window != is_window)
        return fail(InvalidArgument, "this is no registration of the communicator");
    registrations--;
    free(r);
    return Success;
}

#ifndef WITHOUT_ncclCommRegister
DOUBLE_API int ncclCommRegister(void *comm, void *address, size_t size, void **out)
{
    READY_COMM(ncclCommRegister)
    return register_memory(c, address, size, out, 0);
}
DOUBLE_API int ncclCommDeregister(void *comm, void *handle)
{
    BEGIN(ncclCommDeregister)
    return deregister(find_comm(comm), handle, 0);
}
#endif

#ifndef WITHOUT_ncclCommWindowRegister
/* Collective: every rank brings its part. */
DOUBLE_API int ncclCommWindowRegister(void *comm, void *address, size_t size, void **out, int flags)
{
    READY_COMM(ncclCommWindowRegister)
    if (flags & ~3 || (uintptr_t)address % 4096)
        return fail(InvalidArgument, "WindowRegister : unknown flags, or not aligned to 4096 bytes");
    if (barrier(c, 1))
        return fail(SystemError, "the other ranks did not come to register their windows");
    return register_memory(c, address, size, out, 1);
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
#ifndef WITHOUT_ncclAllToAllv
DOUBLE_API int ncclAllToAllv(const void *send, const size_t *send_counts, const size_t *send_at, void *recv,
                             const size_t *recv_counts, const size_t *recv_at, int type, void *comm, void *stream)
{
    READY_COMM(ncclAllToAllv)
    if (type < 0 || type >= TYPES)
        return fail(InvalidArgument, "AllToAllv : invalid type %d", type);
    group_depth++;
    for (int r = 0; r < c->n; r++) {
        size_t size = SIZES[type];
        struct operation s = {SEND, type, 0, r, 0, "", (const char *)send + send_at[r] * size, NULL, send_counts[r], stream};
        struct operation t = {RECV, type, 0, r, 0, "", NULL, (char *)recv + recv_at[r] * size, recv_counts[r], stream};
        issue(c, s, "AllToAllv");
        issue(c, t, "AllToAllv");
    }
    return --group_depth ? group_error : end_group();
}
#endif
#endif
