/* A double of a GPU's driver over host memory: streams are threads, events order them.
 *
 * Compiled twice: as libcuda.so.1, and with -DHIP as libamdhip64.so.6. Only the functions that gpucoll
 * binds are there, with the codes that the real ones give for misuse (no current context, an event of
 * another device, a query while a graph is captured). "Device memory" is host memory that is unmapped
 * when freed. Control functions begin with double_.
 */
#define _GNU_SOURCE
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
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
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
    struct task *next;
};

struct stream {
    struct stream *next_stream;
    int device, is_alive, has_thread, is_busy, error;
    struct task *first, **end;
    struct graph *capture;
    int is_joined; /* what was captured here has been waited for by the stream that began it */
};

struct event {
    struct event *next_event;
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

struct block {
    struct block *next;
    char *address;
    size_t size, mapped;
    int device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct stream *streams, default_streams[DEVICES];
static struct event *events;
static struct block *blocks;
static int is_initialised, is_held, captures, sticky_error, device_count_value = 8;
static long delay_us, limit_bytes = (long)MEMORY_BYTES, used_bytes;
static __thread int stack[64], depth, capture_mode;

/* --- control ----------------------------------------------------------------------------------- */

/* devices: how many GPUs; hold: 1 keeps every stream from going on; delay_us: before each piece of
 * work; error: every call gives this code from now on; memory: bytes of a device. */
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
    else if (!strcmp(key, "error"))
        sticky_error = (int)value;
    else if (!strcmp(key, "memory"))
        limit_bytes = value;
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
    if (!strcmp(key, "memory")) {
        count = used_bytes;
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

/* --- streams ------------------------------------------------------------------------------------ */

static struct stream *find_stream(void *handle)
{
    uintptr_t number = (uintptr_t)handle;
    if (number <= 2)
        return current() < 0 ? NULL : &default_streams[current()];
    for (struct stream *s = streams; s; s = s->next_stream)
        if (s == handle && s->is_alive)
            return s;
    return NULL;
}

static struct event *find_event(void *handle)
{
    for (struct event *e = events; e; e = e->next_event)
        if (e == handle && e->is_alive)
            return e;
    return NULL;
}

static void run_event(struct stream *s, struct task *t)
{
    struct timespec until = limit();
    if (t->is_record) {
        if (t->generation > t->event->completed)
            t->event->completed = t->generation;
    } else {
        while (t->event->completed < t->generation && !s->error)
            s->error = wait_changed(&until, "an event that another stream waits for");
    }
}

static void *work_off(void *argument)
{
    struct stream *s = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->first || is_held) {
            if (!s->first && !s->is_alive && s != &default_streams[s->device]) {
                pthread_mutex_unlock(&lock);
                return NULL; /* the structure stays: handles that were freed must be told */
            }
            pthread_cond_wait(&changed, &lock);
        }
        struct task *t = s->first;
        s->first = t->next;
        if (!s->first)
            s->end = &s->first;
        s->is_busy = 1;
        if (t->kind) {
            long pause_us = delay_us;
            pthread_mutex_unlock(&lock);
            if (pause_us)
                usleep((useconds_t)pause_us);
            t->kind->run(t->work);
            t->kind->drop(t->work);
            pthread_mutex_lock(&lock);
        } else {
            run_event(s, t);
        }
        free(t);
        s->is_busy = 0;
        pthread_cond_broadcast(&changed);
    }
}

static int start_thread(struct stream *s)
{
    pthread_t thread;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &detached, work_off, s);
    pthread_attr_destroy(&detached);
    return failed ? OUT_OF_MEMORY : OK;
}

/* Put a task on a stream. Takes it. */
static int push(struct stream *s, struct task *t)
{
    int code = s->has_thread ? OK : start_thread(s);
    if (code)
        return code;
    s->has_thread = 1;
    t->next = NULL;
    *s->end = t;
    s->end = &t->next;
    pthread_cond_broadcast(&changed);
    return OK;
}

/* Put a task on a stream, or into the graph that is captured from it. Takes it. */
static int append(struct stream *s, struct task *t)
{
    if (s->capture) {
        t->next = NULL;
        *s->capture->end = t;
        s->capture->end = &t->next;
        if (s != s->capture->origin)
            s->is_joined = 0;
        return OK;
    }
    if (t->kind) {
        void *copy = t->kind->copy(t->work);
        t->kind->drop(t->work);
        t->work = copy;
    }
    return push(s, t);
}

static struct task *new_task(const struct double_kind *kind, void *work)
{
    struct task *t = calloc(1, sizeof *t);
    t->kind = kind;
    t->work = work;
    return t;
}

static struct task *event_task(struct event *e, int is_record)
{
    struct task *t = new_task(NULL, NULL);
    t->event = e;
    t->is_record = is_record;
    t->generation = e->recorded;
    return t;
}

DOUBLE_API int double_enqueue(void *handle, const struct double_kind *kind, void *work)
{
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    int code = s ? append(s, new_task(kind, work)) : INVALID_HANDLE;
    pthread_mutex_unlock(&lock);
    return code;
}

DOUBLE_API int double_stream_device(void *handle)
{
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    pthread_mutex_unlock(&lock);
    return s ? s->device : -1;
}

static void invalidate_captures(void)
{
    for (struct stream *s = streams; s; s = s->next_stream)
        if (s->capture)
            s->capture->is_invalid = 1;
}

/* Whether a call that can wait is made while another thread's graph is captured. */
static int disturbs_capture(void)
{
    if (!captures || capture_mode == RELAXED)
        return 0;
    invalidate_captures();
    return 1;
}

static int stream_create(void **out)
{
    struct stream *s = calloc(1, sizeof *s);
    s->device = current();
    s->is_alive = 1;
    s->end = &s->first;
    pthread_mutex_lock(&lock);
    s->next_stream = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    *out = s;
    return OK;
}

static int stream_destroy(void *handle)
{
    pthread_mutex_lock(&lock);
    struct stream *s = (uintptr_t)handle <= 2 ? NULL : find_stream(handle);
    if (s) {
        s->is_alive = 0;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return s ? OK : INVALID_HANDLE;
}

/* Look at a stream, or wait for it. */
static int stream_state(void *handle, int is_waiting)
{
    struct timespec until = limit();
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    int code = OK;
    if (!s) {
        code = INVALID_HANDLE;
    } else if (s->capture) {
        s->capture->is_invalid = 1;
        code = CAPTURE_UNSUPPORTED;
    } else if (disturbs_capture()) {
        code = CAPTURE_IMPLICIT;
    } else {
        while (is_waiting && !code && !s->error && (s->first || s->is_busy))
            code = wait_changed(&until, "a stream");
        if (!code)
            code = s->error ? s->error : s->first || s->is_busy ? NOT_READY : OK;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* --- events ------------------------------------------------------------------------------------- */

static int event_create(void **out)
{
    struct event *e = calloc(1, sizeof *e);
    e->device = current();
    e->is_alive = 1;
    pthread_mutex_lock(&lock);
    e->next_event = events;
    events = e;
    pthread_mutex_unlock(&lock);
    *out = e;
    return OK;
}

static int event_destroy(void *handle)
{
    pthread_mutex_lock(&lock);
    struct event *e = find_event(handle);
    if (e)
        e->is_alive = 0; /* the structure stays: work on streams may still come to it */
    pthread_mutex_unlock(&lock);
    return e ? OK : INVALID_HANDLE;
}

static int event_record(void *event, void *stream)
{
    pthread_mutex_lock(&lock);
    struct event *e = find_event(event);
    struct stream *s = find_stream(stream);
    int code = INVALID_HANDLE;
    if (e && s && e->device == s->device) {
        e->capture = s->capture;
        e->captured_on = s->capture ? s : NULL;
        code = OK;
        if (!s->capture) { /* inside a capture the graph's order says it all */
            e->recorded++;
            code = append(s, event_task(e, 1));
        }
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int stream_wait_event(void *stream, void *event)
{
    pthread_mutex_lock(&lock);
    struct event *e = find_event(event);
    struct stream *s = find_stream(stream);
    int code = OK;
    if (!e || !s) {
        code = INVALID_HANDLE;
    } else if (e->capture) {
        if (!s->capture)
            s->capture = e->capture; /* the graph takes this stream in */
        if (s == s->capture->origin)
            e->captured_on->is_joined = 1;
    } else if (s->capture) {
        s->capture->is_invalid = 1; /* a graph cannot wait for what is not in it */
        code = 905;
    } else if (e->completed < e->recorded) {
        code = append(s, event_task(e, 0));
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int event_state(void *handle, int is_waiting)
{
    struct timespec until = limit();
    pthread_mutex_lock(&lock);
    struct event *e = find_event(handle);
    int code = OK;
    if (!e)
        code = INVALID_HANDLE;
    else if (e->capture)
        code = CAPTURED_EVENT;
    else if (disturbs_capture())
        code = CAPTURE_IMPLICIT;
    else
        while (is_waiting && !code && e->completed < e->recorded)
            code = wait_changed(&until, "an event");
    if (!code && e->completed < e->recorded)
        code = NOT_READY;
    pthread_mutex_unlock(&lock);
    return code;
}

/* What is on `to` from now on comes after what is on `from` now. */
DOUBLE_API int double_join(void *from, void *to)
{
    void *event;
    int code = event_create(&event);
    if (!code) {
        ((struct event *)event)->device = double_stream_device(from);
        code = event_record(event, from);
    }
    if (!code)
        code = stream_wait_event(to, event);
    event_destroy(event);
    return code;
}

/* --- graphs: a list in the order of issue, which holds every dependency -------------------------- */

DOUBLE_API int double_capture_begin(void *handle)
{
    pthread_mutex_lock(&lock);
    struct stream *s = (uintptr_t)handle <= 1 ? NULL : find_stream(handle);
    if (s && !s->capture) {
        s->capture = calloc(1, sizeof *s->capture);
        s->capture->end = &s->capture->first;
        s->capture->origin = s;
        captures++;
    } else {
        s = NULL;
    }
    pthread_mutex_unlock(&lock);
    return s ? OK : CAPTURE_UNSUPPORTED;
}

static void free_graph(struct graph *g)
{
    while (g->first) {
        struct task *t = g->first;
        g->first = t->next;
        t->kind->drop(t->work);
        free(t);
    }
    free(g);
}

DOUBLE_API int double_capture_end(void *handle, void **out)
{
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    struct graph *g = s ? s->capture : NULL;
    int code = g && g->origin == s ? OK : CAPTURE_UNMATCHED;
    if (!code) {
        for (struct stream *t = streams; t; t = t->next_stream) {
            if (t->capture != g)
                continue;
            if (t != s && !t->is_joined)
                code = CAPTURE_UNJOINED;
            t->capture = NULL;
            t->is_joined = 0;
        }
        for (struct event *e = events; e; e = e->next_event)
            if (e->capture == g)
                e->capture = NULL; /* as if never recorded */
        captures--;
        if (g->is_invalid)
            code = CAPTURE_INVALIDATED;
    }
    pthread_mutex_unlock(&lock);
    *out = code ? NULL : g;
    if (code && g)
        free_graph(g);
    return code;
}

DOUBLE_API int double_graph_launch(void *graph, void *handle)
{
    struct graph *g = graph;
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    int code = s ? OK : INVALID_HANDLE;
    for (struct task *t = g->first; t && !code; t = t->next)
        code = push(s, new_task(t->kind, t->kind->copy(t->work)));
    pthread_mutex_unlock(&lock);
    return code;
}

DOUBLE_API void double_graph_destroy(void *graph) { free_graph(graph); }

static int is_capturing(void *handle, int *out)
{
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    int code = s ? OK : INVALID_HANDLE;
    if (s && captures && (uintptr_t)handle <= 1) {
        invalidate_captures(); /* the default stream would wait for the captured ones */
        code = CAPTURE_IMPLICIT;
    }
    *out = s && s->capture ? 1 + s->capture->is_invalid : 0;
    pthread_mutex_unlock(&lock);
    return code;
}

/* --- memory ------------------------------------------------------------------------------------- */

static struct block *find_block(const void *address)
{
    for (struct block *b = blocks; b; b = b->next)
        if ((const char *)address >= b->address && (const char *)address < b->address + b->size)
            return b;
    return NULL;
}

DOUBLE_API int double_owns(const void *address, size_t size)
{
    pthread_mutex_lock(&lock);
    struct block *b = find_block(address);
    int is_inside = b && (const char *)address + size <= b->address + b->size;
    pthread_mutex_unlock(&lock);
    return is_inside;
}

DOUBLE_API int double_allocate(void **out, size_t size)
{
    size_t page = 4096, mapped = (size + page - 1) / page * page;
    int code = OK;
    pthread_mutex_lock(&lock);
    if (disturbs_capture())
        code = CAPTURE_UNSUPPORTED;
    else if (!size)
        code = INVALID_VALUE;
    else if (used_bytes + (long)size > limit_bytes)
        code = OUT_OF_MEMORY;
    char *address = code ? MAP_FAILED
                         : mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        pthread_mutex_unlock(&lock);
        return code ? code : OUT_OF_MEMORY;
    }
    memset(address, 0xA5, mapped);
    struct block *b = calloc(1, sizeof *b);
    *b = (struct block){blocks, address, size, mapped, current() < 0 ? 0 : current()};
    blocks = b;
    used_bytes += (long)size;
    pthread_mutex_unlock(&lock);
    *out = address;
    return OK;
}

static int wait_for_device(int number)
{
    struct timespec until = limit();
    int code = OK;
    for (struct stream *s = streams; s; s = s->next_stream)
        while (s->device == number && !code && !s->error && (s->first || s->is_busy))
            code = wait_changed(&until, "everything on a device");
    return code;
}

static int synchronize(void)
{
    pthread_mutex_lock(&lock);
    int code = disturbs_capture() ? CAPTURE_UNSUPPORTED : wait_for_device(current());
    pthread_mutex_unlock(&lock);
    return code;
}

/* Like the real one, it waits for everything on the device first. */
DOUBLE_API int double_free(void *address)
{
    pthread_mutex_lock(&lock);
    struct block **at = &blocks;
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    struct block *b = *at;
    int code = !b ? INVALID_VALUE : disturbs_capture() ? CAPTURE_UNSUPPORTED : OK;
    if (!code)
        code = wait_for_device(b->device);
    if (!code) {
        for (at = &blocks; *at != b; at = &(*at)->next)
            ;
        *at = b->next;
        used_bytes -= (long)b->size;
        munmap(b->address, b->mapped);
        free(b);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

struct move {
    char *to;
    const char *from; /* NULL: fill with `word` */
    size_t size;
    int word, word_size;
};

static void run_move(void *work)
{
    struct move *m = work;
    if (m->from)
        memmove(m->to, m->from, m->size);
    else
        for (size_t i = 0; i < m->size; i += (size_t)m->word_size)
            memcpy(m->to + i, &m->word, (size_t)m->word_size);
}

static void *copy_move(const void *work)
{
    return memcpy(malloc(sizeof(struct move)), work, sizeof(struct move));
}

static const struct double_kind MOVE = {run_move, copy_move, free};

static int move(void *to, const void *from, size_t size, void *stream)
{
    struct move m = {to, from, size, 0, 1};
    return size ? double_enqueue(stream, &MOVE, copy_move(&m)) : OK;
}

static int fill(void *to, int word, int word_size, size_t count, void *stream)
{
    struct move m = {to, NULL, count * (size_t)word_size, word, word_size};
    if ((uintptr_t)to % (unsigned)word_size)
        return INVALID_VALUE;
    return count ? double_enqueue(stream, &MOVE, copy_move(&m)) : OK;
}

/* --- facts -------------------------------------------------------------------------------------- */

static int fill_uuid(unsigned char *out, int device)
{
    memset(out, 0, 16);
    out[0] = 0xd0;
    out[15] = (unsigned char)device;
    return OK;
}

static int initialise(void)
{
    pthread_mutex_lock(&lock);
    const char *devices = getenv("DOUBLE_DEVICES");
    if (!is_initialised && devices)
        device_count_value = atoi(devices);
    for (int i = 0; i < DEVICES && !is_initialised; i++) {
        struct stream *s = &default_streams[i];
        s->device = i;
        s->is_alive = 1;
        s->end = &s->first;
        s->next_stream = streams;
        streams = s;
    }
    is_initialised = device_count_value > 0;
    pthread_mutex_unlock(&lock);
    return is_initialised ? OK : NO_DEVICE;
}

static const char *text_of(int code)
{
    switch (code) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case 3: return "initialization error";
    case NO_DEVICE: return "no GPU is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case INVALID_CONTEXT: return "invalid device context";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_READY: return "device not ready";
    case 700: return "an illegal memory access was encountered";
    case LAUNCH_TIMEOUT: return "the launch timed out and was terminated";
    case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    case CAPTURE_INVALIDATED: return "operation failed due to a previous error during capture";
    case CAPTURE_IMPLICIT: return "operation would make the legacy stream depend on a capturing one";
    case CAPTURED_EVENT: return "operation not permitted on an event last recorded in a capture";
    default: return "unknown error";
    }
}

static int is_device(int device) { return device >= 0 && device < device_count_value; }

/* --- the vendors' names -------------------------------------------------------------------------- */

#ifdef HIP
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif
#define EXPORT(cuda, hip) DOUBLE_API int NAME(cuda, hip)

EXPORT(cuInit, hipInit)(unsigned flags) { return flags ? INVALID_VALUE : initialise(); }
EXPORT(cuDriverGetVersion, hipDriverGetVersion)(int *out)
{
    *out = NAME(12080, 60443483);
    return OK;
}
EXPORT(cuDeviceGetCount, hipGetDeviceCount)(int *out)
{
    *out = device_count_value;
    return NAME(OK, device_count_value ? OK : NO_DEVICE);
}
EXPORT(cuDeviceGetName, hipDeviceGetName)(char *out, int size, int device)
{
    snprintf(out, (size_t)size, "Double of a GPU");
    return is_device(device) ? OK : INVALID_DEVICE;
}
EXPORT(cuDeviceGetUuid_v2, hipDeviceGetUuid)(unsigned char *out, int device)
{
    return is_device(device) ? fill_uuid(out, device) : INVALID_DEVICE;
}
EXPORT(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId)(char *out, int size, int device)
{
    snprintf(out, (size_t)size, "0000:%02X:00.0", 0x1b + device);
    return is_device(device) ? OK : INVALID_DEVICE;
}
EXPORT(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *out, int attribute, int device)
{
    *out = attribute == NAME(16, 63) ? 132 : attribute == NAME(75, 23) ? 9 : 1;
    return is_device(device) && attribute < 200 ? OK : INVALID_VALUE;
}
#ifdef HIP
EXPORT(, hipSetDevice)(int device)
{
    if (!is_device(device))
        return INVALID_DEVICE;
    depth = 1;
    stack[0] = device;
    return OK;
}
EXPORT(, hipGetDevice)(int *out)
{
    *out = current();
    return OK;
}
EXPORT(, hipStreamGetDevice)(void *stream, int *out)
{
    *out = double_stream_device(stream);
    return *out < 0 ? INVALID_HANDLE : OK;
}
DOUBLE_API const char *hipGetErrorString(int code) { return text_of(code); }
#else
/* A context is the address of the device's default stream. */
EXPORT(cuDevicePrimaryCtxRetain, )(void **out, int device)
{
    *out = is_device(device) ? &default_streams[device] : NULL;
    return *out ? OK : INVALID_DEVICE;
}
EXPORT(cuCtxPushCurrent_v2, )(void *context)
{
    if (!context || depth == 64)
        return INVALID_CONTEXT;
    stack[depth++] = ((struct stream *)context)->device;
    return OK;
}
EXPORT(cuCtxPopCurrent_v2, )(void **out)
{
    if (!depth)
        return INVALID_CONTEXT;
    *out = &default_streams[stack[--depth]];
    return OK;
}
EXPORT(cuCtxGetDevice, )(int *out)
{
    *out = current();
    return *out < 0 ? INVALID_CONTEXT : OK;
}
EXPORT(cuStreamGetCtx, )(void *stream, void **out)
{
    BEGIN int device = double_stream_device(stream);
    *out = device < 0 ? NULL : &default_streams[device];
    return *out ? OK : INVALID_HANDLE;
}
EXPORT(cuGetErrorString, )(int code, const char **out)
{
    *out = text_of(code);
    return OK;
}
#endif
EXPORT(cuCtxSynchronize, hipDeviceSynchronize)(void) { BEGIN return synchronize(); }
EXPORT(cuCtxGetStreamPriorityRange, hipDeviceGetStreamPriorityRange)(int *least, int *greatest)
{
    BEGIN *least = 0;
    *greatest = -5;
    return OK;
}
EXPORT(cuStreamCreateWithPriority, hipStreamCreateWithPriority)(void **out, unsigned flags, int priority)
{
    BEGIN return flags > 1 || priority > 0 ? INVALID_VALUE : stream_create(out);
}
EXPORT(cuStreamDestroy_v2, hipStreamDestroy)(void *stream) { BEGIN return stream_destroy(stream); }
EXPORT(cuStreamQuery, hipStreamQuery)(void *stream) { BEGIN return stream_state(stream, 0); }
EXPORT(cuStreamSynchronize, hipStreamSynchronize)(void *stream)
{
    BEGIN return stream_state(stream, 1);
}
EXPORT(cuStreamWaitEvent, hipStreamWaitEvent)(void *stream, void *event, unsigned flags)
{
    BEGIN return flags ? INVALID_VALUE : stream_wait_event(stream, event);
}
EXPORT(cuStreamIsCapturing, hipStreamIsCapturing)(void *stream, int *out)
{
    BEGIN return is_capturing(stream, out);
}
EXPORT(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)(int *mode)
{
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return OK;
}
EXPORT(cuEventCreate, hipEventCreateWithFlags)(void **out, unsigned flags)
{
    BEGIN return flags == 2 ? event_create(out) : INVALID_VALUE;
}
EXPORT(cuEventDestroy_v2, hipEventDestroy)(void *event) { BEGIN return event_destroy(event); }
EXPORT(cuEventRecord, hipEventRecord)(void *event, void *stream)
{
    BEGIN return event_record(event, stream);
}
EXPORT(cuEventQuery, hipEventQuery)(void *event) { BEGIN return event_state(event, 0); }
EXPORT(cuEventSynchronize, hipEventSynchronize)(void *event) { BEGIN return event_state(event, 1); }
EXPORT(cuMemAlloc_v2, hipMalloc)(void **out, size_t size) { BEGIN return double_allocate(out, size); }
EXPORT(cuMemFree_v2, hipFree)(void *address) { BEGIN return double_free(address); }
EXPORT(cuMemGetInfo_v2, hipMemGetInfo)(size_t *left, size_t *total)
{
    BEGIN *total = (size_t)limit_bytes;
    *left = (size_t)(limit_bytes - used_bytes);
    return OK;
}
EXPORT(cuPointerGetAttribute, hipPointerGetAttribute)(void *out, int attribute, void *address)
{
    BEGIN pthread_mutex_lock(&lock);
    struct block *b = find_block(address);
    if (b)
        *(int *)out = b->device;
    pthread_mutex_unlock(&lock);
    return b && attribute == 9 ? OK : INVALID_VALUE;
}
#ifdef HIP
EXPORT(, hipMemcpyAsync)(void *to, const void *from, size_t size, int kind, void *stream)
{
    BEGIN return kind == 4 ? move(to, from, size, stream) : INVALID_VALUE;
}
#else
EXPORT(cuMemcpyAsync, )(void *to, const void *from, size_t size, void *stream)
{
    BEGIN return move(to, from, size, stream);
}
#endif
EXPORT(cuMemsetD8Async, hipMemsetD8Async)(void *to, unsigned char word, size_t count, void *stream)
{
    BEGIN return fill(to, word, 1, count, stream);
}
EXPORT(cuMemsetD16Async, hipMemsetD16Async)(void *to, unsigned short word, size_t count, void *stream)
{
    BEGIN return fill(to, word, 2, count, stream);
}
EXPORT(cuMemsetD32Async, hipMemsetD32Async)(void *to, int word, size_t count, void *stream)
{
    BEGIN return fill(to, word, 4, count, stream);
}
