/* Streams, events and graphs of the double. */
#ifndef GPUCOLL_DEVICE_STREAMS_H
#define GPUCOLL_DEVICE_STREAMS_H

#include "device_state.h"

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

static struct event **event_bucket(void *handle)
{
    return &event_buckets[((uintptr_t)handle >> 5) % 1024];
}

static struct event *find_event(void *handle)
{
    for (struct event *e = *event_bucket(handle); e; e = e->next_in_bucket)
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

static void run_behind(struct stream *s, struct task *t)
{
    struct timespec until = limit();
    while (t->behind->done < t->behind_count && !s->error)
        s->error = wait_changed(&until, "the legacy stream, or one that is in order with it");
}

/* Whether those before it in its stream's work queue have begun. */
static int has_its_turn(const struct stream *s, const struct task *t)
{
    return !t->turn || work_queues[s->device][s->queue].begun == t->turn - 1;
}

/* Let the next one in the work queue begin. */
static void pass_turn(const struct stream *s, const struct task *t)
{
    if (t->turn)
        work_queues[s->device][s->queue].begun = t->turn;
    pthread_cond_broadcast(&changed);
}

static void *work_off(void *argument)
{
    struct stream *s = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->first || is_held || !has_its_turn(s, s->first)) {
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
            int waits = t->kind->waits && t->kind->waits(t->work);
            if (!waits)
                pass_turn(s, t);
            pthread_mutex_unlock(&lock);
            if (pause_us)
                usleep((useconds_t)pause_us);
            t->kind->run(t->work);
            t->kind->drop(t->work);
            pthread_mutex_lock(&lock);
            if (waits)
                pass_turn(s, t);
        } else {
            if (t->behind)
                run_behind(s, t);
            else
                run_event(s, t);
            pass_turn(s, t);
        }
        free(t);
        s->is_busy = 0;
        s->length--;
        s->done++;
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
    struct timespec until = limit();
    while (queue_length && s->length >= queue_length && !code)
        code = wait_changed(&until, "room on a stream");
    if (code)
        return code;
    s->length++;
    s->pushed++;
    if (s->queue)
        t->turn = ++work_queues[s->device][s->queue].given;
    t->next = NULL;
    *s->end = t;
    s->end = &t->next;
    pthread_cond_broadcast(&changed);
    return OK;
}

static struct task *new_task(const struct double_kind *kind, void *work)
{
    struct task *t = calloc(1, sizeof *t);
    t->kind = kind;
    t->work = work;
    return t;
}

static int push_behind(struct stream *s, struct stream *other)
{
    if (other == s || other->device != s->device || other->done == other->pushed)
        return OK;
    struct task *t = new_task(NULL, NULL);
    t->behind = other;
    t->behind_count = other->pushed;
    return push(s, t);
}

/* What comes on the legacy stream is behind all that is on blocking streams of the device, and the other
 * way round; streams that were made as non-blocking have no part in it. */
static int keep_legacy_order(struct stream *s)
{
    struct stream *legacy = &default_streams[s->device];
    int code = s->is_blocking ? push_behind(s, legacy) : OK;
    for (struct stream *other = streams; s == legacy && other && !code; other = other->next_stream)
        if (other->is_blocking)
            code = push_behind(s, other);
    return code;
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
    int code = keep_legacy_order(s);
    return code ? code : push(s, t);
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

static void invalidate(struct graph *g, const char *call)
{
    g->is_invalid = 1;
    int is_main = gettid() == getpid();
    snprintf(disturbance, sizeof disturbance, "%s%s", call, is_main ? "" : " in another thread");
}

/* What ended a capture last: that call's own answer may be looked at by nobody. */
DOUBLE_API const char *double_disturbance(void) { return disturbance; }

static void invalidate_captures(const char *call)
{
    for (struct stream *s = streams; s; s = s->next_stream)
        if (s->capture)
            invalidate(s->capture, call);
}

/* Whether a call that can wait is made while another thread's graph is captured. */
static int disturbs_capture(const char *call)
{
    if (!captures || capture_mode == RELAXED)
        return 0;
    invalidate_captures(call);
    return 1;
}

/* The same of a call that waits for a whole device, which no mode allows. */
static int disturbs_any_capture(const char *call)
{
    if (captures)
        invalidate_captures(call);
    return captures != 0;
}

static int stream_create(void **out, int is_blocking)
{
    struct stream *s = calloc(1, sizeof *s);
    s->is_blocking = is_blocking;
    s->device = current();
    s->is_alive = 1;
    s->end = &s->first;
    pthread_mutex_lock(&lock);
    if (n_work_queues)
        s->queue = 1 + stream_count[s->device]++ % n_work_queues;
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
        invalidate(s->capture, __func__);
        code = CAPTURE_UNSUPPORTED;
    } else if (disturbs_capture(__func__)) {
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
    struct event **bucket = event_bucket(e);
    e->next_event = events;
    events = e;
    e->next_in_bucket = *bucket;
    *bucket = e;
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
        invalidate(s->capture, __func__); /* a graph cannot wait for what is not in it */
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
    else if (disturbs_capture(__func__))
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
        invalidate_captures(__func__); /* the default stream would wait for the captured ones */
        code = CAPTURE_IMPLICIT;
    }
    *out = s && s->capture ? 1 + s->capture->is_invalid : 0;
    pthread_mutex_unlock(&lock);
    return code;
}

#endif
