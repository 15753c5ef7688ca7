/* What the double of NCCL knows of its ranks and of itself, and how it waits for others. */
#ifndef GPUCOLL_NCCL_RANKS_H
#define GPUCOLL_NCCL_RANKS_H

#include "double.h"

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
    char host[64];
    _Atomic uint64_t arrived[2]; /* at barriers of the streams, and of the host */
    _Atomic int connects[2];     /* for collectives, for messages: has come to be connected */
    struct call call;
    _Atomic uint64_t split_published, split_read;
    int color, key, child_fd, window_place;
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

struct deferred_window {
    void *address;
    size_t size;
    void **out;
    uint64_t number;
    int place;
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
    _Atomic int polls;
    int color, key;
    struct comm *parent, *child; /* who is split, and what comes of it */
    void **child_out;
    pthread_t job; /* puts a batch on its stream */
    int has_job;
    _Atomic int job_code;
    struct deferred_window deferred_window;
    int window_places[64]; /* which are taken; the next window gets the first free one */
    _Atomic long registrations;
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
    {"job_us", 0},              /* before a non-blocking communicator's work comes onto its stream */
    {"connects", 0},            /* 1: a rank's first call waits, on the host, for all others' first one */
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

static _Atomic long registrations;

/* How many buffers and windows are registered. What is left goes with its communicator. */
DOUBLE_API long ncclDoubleRegistrations(void) { return registrations; }

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
    double_use_device_function *use_device;
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
    device.use_device = dlsym(driver, "double_use_device");
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

#endif
