/* What ranks of one host share: exported memory, pinned and registered host memory, words that streams
 * wait for. And the list of the calls, in order.
 *
 * A handle names the process, its file of device memory and the place in it: another process maps that
 * through /proc. Registered memory is seen at a second address where it is shared memory, so that who
 * takes one address for the other is found out. */
#ifndef GPUCOLL_DEVICE_SHARING_H
#define GPUCOLL_DEVICE_SHARING_H

#include "device_memory.h"

#include <stdarg.h>

/* --- settings ----------------------------------------------------------------------------------- */

static long export_error, open_error, pinned_error, register_error, wait_error, trace;
static long waits = 1, peers = 1, remote_ordering, remote_flush = 1, flushes;

/* managed, private: so is what is allocated from now on. *_error: the code that such calls give from
 * now on. wait_values: whether the attribute says that streams can wait. peers: whether devices reach
 * each other's memory; 2: the driver says so, and they read zeros, 3: and they read what was there when
 * the memory was opened. trace: 1 begins a new list of calls. */
static long *sharing_setting(const char *key)
{
    static const struct {
        const char *name;
        long *value;
    } settings[] = {
        {"managed", &makes_managed},       {"private", &makes_private},
        {"export_error", &export_error},   {"open_error", &open_error},
        {"pinned_error", &pinned_error},   {"register_error", &register_error},
        {"wait_error", &wait_error},       {"wait_values", &waits},
        {"remote_ordering", &remote_ordering}, {"remote_flush", &remote_flush}, {"flushes", &flushes},
        {"peers", &peers},                 {"trace", &trace},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (!strcmp(key, settings[i].name))
            return settings[i].value;
    return NULL;
}

/* --- list of calls ------------------------------------------------------------------------------- */

static char notes[1 << 16];
static size_t notes_used;

static void note(const char *name, int count, const uint64_t *values)
{
    pthread_mutex_lock(&lock);
    if (trace == 1) {
        notes_used = 0;
        notes[0] = 0;
        trace = 2;
    }
    size_t room = sizeof notes - notes_used;
    if (trace && room > 256) {
        notes_used += (size_t)snprintf(notes + notes_used, room, "%s", name);
        for (int i = 0; i < count; i++)
            notes_used += (size_t)snprintf(notes + notes_used, 32, " %llu", (unsigned long long)values[i]);
        notes_used += (size_t)snprintf(notes + notes_used, 2, "\n");
    }
    pthread_mutex_unlock(&lock);
}

#define NUMBER(x) ((uint64_t)(uintptr_t)(x))
#define NOTE_1(name, a) note(name, 1, (uint64_t[]){NUMBER(a)})
#define NOTE_2(name, a, b) note(name, 2, (uint64_t[]){NUMBER(a), NUMBER(b)})
#define NOTE_3(name, a, b, c) note(name, 3, (uint64_t[]){NUMBER(a), NUMBER(b), NUMBER(c)})
#define NOTE_4(name, a, b, c, d) note(name, 4, (uint64_t[]){NUMBER(a), NUMBER(b), NUMBER(c), NUMBER(d)})
#define NOTE_5(name, a, b, c, d, e) \
    note(name, 5, (uint64_t[]){NUMBER(a), NUMBER(b), NUMBER(c), NUMBER(d), NUMBER(e)})
#define NOTE_OF(name, a, b, c, d, e, chosen, ...) chosen
#define NOTE(name, ...) \
    NOTE_OF(name, __VA_ARGS__, NOTE_5, NOTE_4, NOTE_3, NOTE_2, NOTE_1, )(name, __VA_ARGS__)

/* One line for each call: its name and its numbers. */
DOUBLE_API const char *double_trace(void) { return notes; }

/* --- mappings beside device memory ---------------------------------------------------------------- */

enum mapping_kind { OPENED, PINNED, REGISTERED };

struct mapping {
    struct mapping *next;
    enum mapping_kind kind;
    char *address, *host; /* as the GPU sees it, and as the host does */
    size_t size;
    int device, users;
    char handle[64];
};

static struct mapping *mappings;

static struct mapping *find_mapping(const void *address, enum mapping_kind kind)
{
    const char *at = address;
    for (struct mapping *m = mappings; m; m = m->next)
        if (m->kind == kind && at >= m->address && at < m->address + m->size)
            return m;
    return NULL;
}

static struct mapping *find_registered(const void *host)
{
    const char *at = host;
    for (struct mapping *m = mappings; m; m = m->next)
        if (m->kind == REGISTERED && at >= m->host && at < m->host + m->size)
            return m;
    return NULL;
}

static struct mapping *add_mapping(enum mapping_kind kind, char *address, size_t size)
{
    struct mapping *m = calloc(1, sizeof *m);
    *m = (struct mapping){.next = mappings, .kind = kind, .address = address, .host = address,
                          .size = size, .device = current(), .users = 1};
    mappings = m;
    return m;
}

static void remove_mapping(struct mapping *m)
{
    struct mapping **at = &mappings;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    free(m);
}

/* --- memory of other processes -------------------------------------------------------------------- */

struct handle {
    union {
        char bytes[64];
        struct {
            uint64_t offset, mapped, serial;
            int pid, file, device;
        } of;
    };
};

static int address_range(void **base, size_t *size, void *address)
{
    pthread_mutex_lock(&lock);
    struct block *b = find_block(address);
    if (b) {
        *base = b->address;
        *size = b->size;
    }
    pthread_mutex_unlock(&lock);
    return b ? OK : INVALID_VALUE;
}

static int export_block(struct handle *out, void *address)
{
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    struct block *b = find_block(address);
    int code = !b || b->is_private ? INVALID_VALUE : (int)export_error;
    if (!code) {
        b->is_exported = 1;
        out->of.offset = b->offset;
        out->of.mapped = b->mapped;
        out->of.pid = (int)getpid();
        out->of.file = memory_file;
        out->of.device = b->device;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static char *over_a_broken_link(char *address, size_t size)
{
    if (peers < 2 || address == MAP_FAILED)
        return address;
    char *other = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (peers == 3 && other != MAP_FAILED)
        memcpy(other, address, size);
    munmap(address, size);
    return other;
}

static char *map_handle(const struct handle *given)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", given->of.pid, given->of.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return MAP_FAILED;
    char *address = mmap(NULL, given->of.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                         (off_t)given->of.offset);
    close(file);
    return given->of.device == current() ? address : over_a_broken_link(address, given->of.mapped);
}

static int open_handle(void **out, const struct handle *given)
{
    if (given->of.pid == (int)getpid())
        return INVALID_CONTEXT; /* a process cannot open what it has exported */
    pthread_mutex_lock(&lock);
    struct mapping *m = mappings;
    while (m && !(m->kind == OPENED && !memcmp(m->handle, given->bytes, 64)))
        m = m->next;
    int code = (int)open_error;
    if (!code && m) {
        m->users++;
    } else if (!code) {
        char *address = map_handle(given);
        code = address == MAP_FAILED ? 205 : OK;
        if (!code) {
            m = add_mapping(OPENED, address, given->of.mapped);
            m->device = given->of.device;
            memcpy(m->handle, given->bytes, 64);
        }
    }
    *out = code ? NULL : m->address;
    pthread_mutex_unlock(&lock);
    return code;
}

static int close_handle(void *base)
{
    pthread_mutex_lock(&lock);
    struct mapping *m = find_mapping(base, OPENED);
    int code = m && m->address == base ? OK : INVALID_VALUE;
    if (!code && !--m->users) {
        munmap(m->address, m->size);
        remove_mapping(m);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* --- host memory ---------------------------------------------------------------------------------- */

static int allocate_host(void **out, size_t size)
{
    pthread_mutex_lock(&lock);
    int code = size ? (int)pinned_error : INVALID_VALUE;
    char *address = MAP_FAILED;
    if (!code)
        address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!code && address == MAP_FAILED)
        code = OUT_OF_MEMORY;
    if (!code) {
        memset(address, 0xA5, size);
        add_mapping(PINNED, address, size);
        *out = address;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int free_host(void *address)
{
    pthread_mutex_lock(&lock);
    struct mapping *m = find_mapping(address, PINNED);
    int code = m && m->address == address ? OK : INVALID_VALUE;
    if (!code) {
        munmap(m->address, m->size);
        remove_mapping(m);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int register_host(void *address, size_t size)
{
    pthread_mutex_lock(&lock);
    int code = find_registered(address) ? 712 : size ? (int)register_error : INVALID_VALUE;
    if (!code) {
        int is_whole = !((uintptr_t)address % 4096);
        char *second = is_whole ? mremap(address, 0, size, MREMAP_MAYMOVE) : MAP_FAILED;
        struct mapping *m = add_mapping(REGISTERED, second == MAP_FAILED ? address : second, size);
        m->host = address;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int unregister_host(void *address)
{
    pthread_mutex_lock(&lock);
    struct mapping *m = find_registered(address);
    int code = m && m->host == address ? OK : 713;
    if (!code) {
        if (m->address != m->host)
            munmap(m->address, m->size);
        remove_mapping(m);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int device_address(void **out, void *address)
{
    pthread_mutex_lock(&lock);
    struct mapping *m = find_registered(address), *pinned = find_mapping(address, PINNED);
    if (m)
        *out = m->address + ((char *)address - m->host);
    else if (pinned)
        *out = address;
    pthread_mutex_unlock(&lock);
    return m || pinned ? OK : INVALID_VALUE;
}

/* --- words ---------------------------------------------------------------------------------------- */

struct word {
    unsigned *address, value;
    int is_written;
};

static int is_over; /* the process ends: nobody waits any more */

__attribute__((destructor)) static void end_waits(void)
{
    __atomic_store_n(&is_over, 1, __ATOMIC_RELEASE);
}

/* CUDA compares the signed difference, HIP says that it compares the numbers. */
static int is_reached(const struct word *w)
{
    unsigned found = __atomic_load_n(w->address, __ATOMIC_ACQUIRE);
#ifdef HIP
    return found >= w->value;
#else
    return (int)(found - w->value) >= 0;
#endif
}

static void run_word(void *work)
{
    const struct word *w = work;
    if (w->is_written) {
        __atomic_store_n(w->address, w->value, __ATOMIC_RELEASE);
        return;
    }
    struct timespec now, until = limit();
    while (!is_reached(w) && !__atomic_load_n(&is_over, __ATOMIC_ACQUIRE)) {
        usleep(50);
        clock_gettime(CLOCK_REALTIME, &now);
        if (now.tv_sec > until.tv_sec) {
            fprintf(stderr, "device double: waited %g s for a word to be %u\n", DOUBLE_LIMIT_S, w->value);
            return;
        }
    }
}

static void *copy_word(const void *work)
{
    return memcpy(malloc(sizeof(struct word)), work, sizeof(struct word));
}

static int word_waits(const void *work) { return !((const struct word *)work)->is_written; }

static const struct double_kind WORD = {run_word, copy_word, free, word_waits};

static int use_word(void *stream, void *address, unsigned value, int is_written)
{
    struct word w = {address, value, is_written};
    pthread_mutex_lock(&lock);
    struct block *b = find_block(address);
    int is_seen = (b && !b->is_managed) || find_mapping(address, OPENED) || find_mapping(address, PINNED) ||
                  find_mapping(address, REGISTERED);
    pthread_mutex_unlock(&lock);
    if (wait_error)
        return (int)wait_error;
    if (!is_seen || (uintptr_t)address % 4)
        return INVALID_VALUE;
    return double_enqueue(stream, &WORD, copy_word(&w));
}

#endif
