/* How communicators of the double are made, split and ended, step by step where nothing may block. */
#ifndef GPUCOLL_NCCL_JOINING_H
#define GPUCOLL_NCCL_JOINING_H

#include "nccl_work.h"

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
    const char *host = getenv("NCCL_HOSTID"); /* as the library has it: which host this is to be */
    snprintf(me->host, sizeof me->host, "%s", host ? host : "");
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
        int is_here = !strcmp(other->host, c->shared->members[c->rank].host);
        if (r != c->rank && is_here && other->device == c->device && !may_share_gpu())
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
    if (c->has_job)
        pthread_join(c->job, NULL);
    c->has_job = 0;
    if (wait_for_batches(c) && !c->aborted)
        return fail(SystemError, "work of the communicator did not end");
    for (int i = 0; c->aborted && c->pending && i < 1000; i++)
        usleep(1000); /* what waits for other ranks stops waiting */
    if (c->child)
        c->child->is_alive = 0;
    c->is_alive = 0;
    registrations -= c->registrations;
    for (int r = 0; r < c->n; r++)
        if (c->peers[r] > 0)
            close(c->peers[r]);
    if (c->shared && !c->pending) /* a stream that stands still may yet come to work of it */
        munmap(c->shared, shared_size(c->n));
    close_once(&c->fd);
    close_once(&c->id_fd);
    return Success;
}

#endif
