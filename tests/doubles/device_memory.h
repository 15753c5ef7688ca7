/* Memory of the double: host memory, unmapped when freed. It all lies in one file without a name, which
 * other processes can map. */
#ifndef GPUCOLL_DEVICE_MEMORY_H
#define GPUCOLL_DEVICE_MEMORY_H

#include "device_streams.h"

#include <fcntl.h>

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

static long makes_managed, makes_private; /* what is allocated from now on */
static int memory_file = -1, memory_file_owner;
static size_t memory_file_used;

/* Map new memory at the end of the file, which only grows: freed pages are given back. */
static char *map_new(size_t mapped, size_t *offset)
{
    if (memory_file < 0 || memory_file_owner != (int)getpid()) { /* a forked child gets its own */
        memory_file_used = 0;
        memory_file_owner = (int)getpid();
        memory_file = memfd_create("device double", MFD_CLOEXEC);
    }
    *offset = memory_file_used;
    if (memory_file < 0 || ftruncate(memory_file, (off_t)(memory_file_used + mapped)))
        return MAP_FAILED;
    memory_file_used += mapped;
    return mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file, (off_t)*offset);
}

/* Other processes may still have it mapped: who uses it there finds this. */
static void unmap_freed(struct block *b)
{
    if (b->is_exported)
        memset(b->address, 0xDD, b->mapped);
    else if (memory_file_owner == (int)getpid())
        fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)b->offset,
                  (off_t)b->mapped);
    munmap(b->address, b->mapped);
}

DOUBLE_API int double_allocate(void **out, size_t size)
{
    size_t page = 4096, mapped = (size + page - 1) / page * page;
    int code = OK;
    pthread_mutex_lock(&lock);
    if (disturbs_capture(__func__))
        code = CAPTURE_UNSUPPORTED;
    else if (!size)
        code = INVALID_VALUE;
    else if (used_bytes + (long)size > limit_bytes)
        code = OUT_OF_MEMORY;
    size_t offset = 0;
    char *address = code ? MAP_FAILED : map_new(mapped, &offset);
    if (address == MAP_FAILED) {
        pthread_mutex_unlock(&lock);
        return code ? code : OUT_OF_MEMORY;
    }
    memset(address, 0xA5, mapped);
    struct block *b = calloc(1, sizeof *b);
    *b = (struct block){
        .next = blocks,
        .address = address,
        .size = size,
        .mapped = mapped,
        .device = current() < 0 ? 0 : current(),
        .is_managed = makes_managed != 0,
        .is_private = makes_private || makes_managed,
        .offset = offset,
    };
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
    int code = disturbs_any_capture(__func__) ? CAPTURE_UNSUPPORTED : wait_for_device(current());
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
    int code = !b ? INVALID_VALUE : disturbs_capture(__func__) ? CAPTURE_UNSUPPORTED : OK;
    if (!code)
        code = wait_for_device(b->device);
    if (!code) {
        for (at = &blocks; *at != b; at = &(*at)->next)
            ;
        *at = b->next;
        used_bytes -= (long)b->size;
        unmap_freed(b);
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

static const struct double_kind MOVE = {run_move, copy_move, free, NULL};

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
