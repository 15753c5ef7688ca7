/* What calls of the double do when their stream comes to them. */
#ifndef GPUCOLL_NCCL_WORK_H
#define GPUCOLL_NCCL_WORK_H

#include "elements.h"
#include "nccl_ranks.h"

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

/* The only overlap of input and output that NCCL promises to bear. */
static int is_in_place(const struct comm *c, const struct operation *o)
{
    size_t mine = o->count * SIZES[o->type] * (size_t)c->rank;
    switch (o->kind) {
    case ALL_TO_ALL: return 0;
    case ALL_GATHER: case GATHER: return o->send == o->recv + mine;
    case REDUCE_SCATTER: case SCATTER: return o->recv == o->send + mine;
    default: return o->send == o->recv;
    }
}

/* Fill the output, but for the input where the call is in place. */
static void poison(const struct comm *c, const struct operation *o)
{
    size_t received = recv_size(c, o), sent = send_size(c, o);
    if (!received)
        return;
    if (!sent || !is_in_place(c, o)) {
        memset(o->recv, POISON, received);
    } else if (o->kind == ALL_GATHER || o->kind == GATHER) {
        size_t before = (size_t)(o->send - o->recv);
        memset(o->recv, POISON, before);
        memset(o->recv + before + sent, POISON, received - before - sent);
    } /* else the output lies within the input */
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

static const struct double_kind BATCH = {run_batch, put_on_stream, drop_batch, NULL};

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

/* Before its first collective, and its first message, a rank is connected to the others: they wait
 * for each other. Calls that NCCL makes of messages count as such. */
static int connect_ranks(struct comm *c, const struct operation *o)
{
    int kind = o->kind == SEND || o->kind == RECV || o->kind == ALL_TO_ALL || o->kind == GATHER || o->kind == SCATTER;
    if (!get("connects"))
        return Success;
    atomic_store(&c->shared->members[c->rank].connects[kind], 1);
    for (int r = 0; r < c->n; r++)
        WAIT_UNTIL(c, atomic_load(&c->shared->members[r].connects[kind]))
    return Success;
}

/* A thread of the library's own puts the work of a non-blocking communicator on its stream: no sooner
 * than the communicator has been polled often enough, and with the device current, as NCCL does. */
static void *run_job(void *work)
{
    struct batch *b = work;
    struct comm *c = b->comm;
    device.use_device(c->device);
    if (get("job_us"))
        usleep((useconds_t)get("job_us"));
    while (c->polls > 0 && !c->aborted)
        usleep(50);
    int code = connect_ranks(c, &b->operations[0]);
    atomic_store(&c->job_code, code || c->aborted ? InternalError : enqueue(b));
    return NULL;
}

static int submit(struct batch *b)
{
    struct comm *c = b->comm;
    if (c->is_blocking)
        return enqueue(b);
    c->polls = (int)get("polls");
    c->job_code = InProgress;
    if (pthread_create(&c->job, NULL, run_job, b))
        return fail(SystemError, "pthread_create failed");
    c->has_job = 1;
    return InProgress;
}

/* What has become of the job; the thread is joined once that is known. */
static int finish_job(struct comm *c)
{
    int code = atomic_load(&c->job_code);
    if (code == InProgress)
        return code;
    pthread_join(c->job, NULL);
    c->has_job = 0;
    return code;
}

/* One rank has nobody to wait for: its collectives go on their streams at once, even inside a group. */
static int issue_alone(struct comm *c, const struct operation *o)
{
#ifndef RCCL
    if ((o->has_factor || o->op == AVG) && (o->type == E4M3 || o->type == E5M2))
        return fail(InvalidArgument, "one rank's kernel knows no float8");
#endif
    struct batch *b = calloc(1, sizeof *b + sizeof b->operations[0]);
    *b = (struct batch){c, 0, 1};
    b->operations[0] = *o;
    return enqueue(b);
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

#endif
