/* What the double of a driver has: devices, streams, events, memory, and who is current. */
#ifndef GPUCOLL_DEVICE_STATE_H
#define GPUCOLL_DEVICE_STATE_H

#include "double.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_TIMEOUT = 702,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
};

#define DEVICES 16
#define MEMORY_BYTES (1ULL << 32)
#define RELAXED 2

struct event;

struct task {
    const struct double_kind *kind; /* NULL: of an event */
    void *work;
    struct event *event;
    uint64_t generation;
    int is_record;
    long turn; /* in the work queue of its stream; 0: in none */
    struct stream *behind; /* waits for so many pieces of work of this one */
    long behind_count;
    struct task *next;
};

struct stream {
    struct stream *next_stream;
    int device, is_alive, has_thread, is_busy, error;
    int is_blocking; /* in order with the device's legacy stream */
    long length, queue, pushed, done;
    struct task *first, **end;
    struct graph *capture;
    int is_joined; /* what was captured here has been waited for by the stream that began it */
};

struct event {
    struct event *next_event;
    struct event *next_in_bucket;
    int device, is_alive;
    uint64_t recorded, completed;
    struct graph *capture;
    struct stream *captured_on;
};

struct graph {
    struct task *first, **end;
    struct stream *origin;
    int is_invalid;
};

struct block { /* of device memory */
    struct block *next;
    char *address;
    size_t size, mapped;
    int device;
    int is_managed, is_private, is_exported; /* private: no handle can name it */
    size_t offset;                           /* in this process's file of device memory */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct stream *streams, default_streams[DEVICES];
static struct event *events;
static struct event *event_buckets[1024]; /* so that having many costs a call nothing */
static struct block *blocks;
static char disturbance[64];
static int is_initialised, is_held, captures, sticky_error, device_count_value = 8;
static int module_error, launch_error = 719;
static long fail_launch_in, launch_count, module_count;
/* What a GPU takes from the host in one order, whatever stream it is for: a stream that waits in one holds
 * up all others that share it. */
static struct {
    long given, begun;
} work_queues[DEVICES][64];
static long stream_count[DEVICES], n_work_queues;
static long queue_length, delay_us, limit_bytes = (long)MEMORY_BYTES, used_bytes;
static __thread int stack[64], depth, capture_mode;

/* --- control ----------------------------------------------------------------------------------- */

/* devices: how many GPUs; hold: 1 keeps every stream from going on; delay_us: before each piece of
 * work; error: every call gives this code from now on; memory: bytes of a device; queue: how much a
 * stream takes before it keeps who brings more waiting (0: no limit); work_queues: how many a device's
 * streams share, from those on that are made now (0: each has its own); module_error: modules do not load,
 * with this code; fail_launch: the how-manieth launch from now on fails (0: none), with launch_error. */
static long *sharing_setting(const char *key); /* device_sharing.h */

DOUBLE_API int double_set(const char *key, long value)
{
    pthread_mutex_lock(&lock);
    int known = 1;
    if (!strcmp(key, "devices"))
        device_count_value = (int)value;
    else if (!strcmp(key, "hold"))
        is_held = (int)value;
    else if (!strcmp(key, "delay_us"))
        delay_us = value;
    else if (!strcmp(key, "queue"))
        queue_length = value;
    else if (!strcmp(key, "work_queues"))
        n_work_queues = value;
    else if (!strcmp(key, "error"))
        sticky_error = (int)value;
    else if (!strcmp(key, "memory"))
        limit_bytes = value;
    else if (!strcmp(key, "module_error"))
        module_error = (int)value;
    else if (!strcmp(key, "launch_error"))
        launch_error = (int)value;
    else if (!strcmp(key, "fail_launch"))
        fail_launch_in = value;
    else if (sharing_setting(key))
        *sharing_setting(key) = value;
    else
        known = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return known ? 0 : -1;
}

DOUBLE_API long double_get(const char *key)
{
    long count = -1;
    pthread_mutex_lock(&lock);
    if (sharing_setting(key)) {
        count = *sharing_setting(key);
    } else if (!strcmp(key, "memory")) {
        count = used_bytes;
    } else if (!strcmp(key, "modules")) {
        count = module_count;
    } else if (!strcmp(key, "launches")) {
        count = launch_count;
    } else if (!strcmp(key, "streams")) {
        count = 0;
        for (struct stream *s = streams; s; s = s->next_stream)
            count += s->is_alive;
    } else if (!strcmp(key, "events")) {
        count = 0;
        for (struct event *e = events; e; e = e->next_event)
            count += e->is_alive;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

/* --- current device ---------------------------------------------------------------------------- */

static int current(void)
{
#ifdef HIP
    return depth ? stack[depth - 1] : 0; /* HIP always has one */
#else
    return depth ? stack[depth - 1] : -1;
#endif
}

DOUBLE_API int double_current_device(void) { return current(); }

/* What cudaSetDevice does for a thread of the library's own. */
DOUBLE_API void double_use_device(int device)
{
    depth = 1;
    stack[0] = device;
}

/* What every call looks at first. */
static int begin(void)
{
    if (!is_initialised)
        return 3;
    if (sticky_error)
        return sticky_error;
    return current() < 0 ? INVALID_CONTEXT : OK;
}

#define BEGIN                    \
    {                            \
        int code_ = begin();     \
        if (code_)               \
            return code_;        \
    }

/* --- waiting, under the lock -------------------------------------------------------------------- */

static struct timespec limit(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += (time_t)DOUBLE_LIMIT_S;
    return t;
}

static int wait_changed(struct timespec *until, const char *what)
{
    if (pthread_cond_timedwait(&changed, &lock, until) != ETIMEDOUT)
        return OK;
    fprintf(stderr, "device double: waited %g s for %s\n", DOUBLE_LIMIT_S, what);
    return LAUNCH_TIMEOUT;
}

#endif
