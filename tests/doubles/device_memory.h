/* Memory of the double: host memory, unmapped when freed. */
#ifndef GPUCOLL_DEVICE_MEMORY_H
#define GPUCOLL_DEVICE_MEMORY_H

#include "device_streams.h"

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

#endif
