/* Modules of kernels: shared objects of host code, loaded from their bytes; a launch is a call on the
 * stream's thread.
 *
 * A kernel NAME is a function void NAME(const void *arguments, unsigned blocks), with the sizes of its
 * arguments beside it: const unsigned NAME_sizes[] = {how many, bytes of the first, ...}. What the
 * function gets are the arguments, one after another, each at a multiple of 8 bytes.
 */
#ifndef GPUCOLL_DEVICE_MODULES_H
#define GPUCOLL_DEVICE_MODULES_H

#include "device_streams.h"

#include <dlfcn.h>
#include <elf.h>
#include <limits.h>

#define MOST_THREADS 1024
#ifdef HIP
#define MODULES_OF "hip"
#else
#define MODULES_OF "cuda"
#endif

typedef void kernel_entry(const void *arguments, unsigned blocks);

struct function {
    struct function *next;
    kernel_entry *entry;
    const unsigned *sizes;
    size_t packed_bytes;
};

struct module {
    struct module *next;
    void *library;
    int device;
    struct function *functions;
};

static struct module *modules;

/* How many bytes an image has: its section headers, or segments, are its end. */
static size_t image_bytes(const void *image)
{
    const Elf64_Ehdr *header = image;
    const Elf64_Phdr *segments = (const Elf64_Phdr *)((const char *)image + header->e_phoff);
    size_t size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    for (int i = 0; i < header->e_phnum; i++)
        if (segments[i].p_offset + segments[i].p_filesz > size)
            size = segments[i].p_offset + segments[i].p_filesz;
    return size;
}

/* The loader knows libraries by their names, and by their files: each gets both of its own. */
static void *load_library(const void *image)
{
    static unsigned number;
    const char *folder = getenv("TMPDIR");
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/gpucoll-" MODULES_OF "-module-%ld-%u.so", folder ? folder : "/tmp", (long)getpid(),
             __atomic_fetch_add(&number, 1, __ATOMIC_RELAXED));
    FILE *file = fopen(path, "wx");
    if (!file)
        return NULL;
    size_t size = image_bytes(image), written = fwrite(image, 1, size, file);
    int failed = fclose(file) || written != size;
    void *library = failed ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fprintf(stderr, "device double: a module does not load: %s\n", failed ? path : dlerror());
    unlink(path);
    return library;
}

static int module_load(void **out, const void *image)
{
    if (memcmp(image, ELFMAG, SELFMAG))
        return strstr(image, ".version") ? INVALID_PTX : INVALID_IMAGE;
    pthread_mutex_lock(&lock);
    int code = module_error, is_disturbing = disturbs_capture(__func__);
    pthread_mutex_unlock(&lock);
    if (code || is_disturbing)
        return code ? code : CAPTURE_UNSUPPORTED;
    void *library = load_library(image);
    if (!library)
        return INVALID_IMAGE;
    struct module *m = calloc(1, sizeof *m);
    m->library = library;
    m->device = current();
    pthread_mutex_lock(&lock);
    m->next = modules;
    modules = m;
    module_count++;
    pthread_mutex_unlock(&lock);
    *out = m;
    return OK;
}

/* Its code stays: a launch that was not waited for would be an error of another kind than the real one's. */
static int module_unload(void *handle)
{
    pthread_mutex_lock(&lock);
    struct module **at = &modules;
    while (*at && *at != handle)
        at = &(*at)->next;
    struct module *m = *at;
    if (m) {
        *at = m->next;
        module_count--;
    }
    pthread_mutex_unlock(&lock);
    return m ? OK : INVALID_HANDLE;
}

static struct module *find_module(const void *handle)
{
    for (struct module *m = modules; m; m = m->next)
        if (m == handle)
            return m;
    return NULL;
}

static int module_function(void **out, void *handle, const char *name)
{
    char sizes_name[512];
    snprintf(sizes_name, sizeof sizes_name, "%s_sizes", name);
    pthread_mutex_lock(&lock);
    struct module *m = find_module(handle);
    void *entry = m ? dlsym(m->library, name) : NULL, *sizes = m ? dlsym(m->library, sizes_name) : NULL;
    if (entry && sizes) {
        struct function *f = calloc(1, sizeof *f);
        memcpy(&f->entry, &entry, sizeof entry);
        f->sizes = sizes;
        for (unsigned i = 1; i <= f->sizes[0]; i++)
            f->packed_bytes += (f->sizes[i] + 7) / 8 * 8;
        f->next = m->functions;
        m->functions = f;
        *out = f;
    }
    pthread_mutex_unlock(&lock);
    return !m ? INVALID_HANDLE : entry && sizes ? OK : NOT_FOUND;
}

static struct function *find_function(const void *handle, int *device)
{
    for (struct module *m = modules; m; m = m->next)
        for (struct function *f = m->functions; f; f = f->next)
            if (f == handle) {
                *device = m->device;
                return f;
            }
    return NULL;
}

struct launch {
    struct function *function;
    unsigned blocks;
    char arguments[];
};

static size_t launch_bytes(const struct function *f) { return sizeof(struct launch) + f->packed_bytes; }

static void run_launch(void *work)
{
    struct launch *l = work;
    l->function->entry(l->arguments, l->blocks);
}

static void *copy_launch(const void *work)
{
    size_t size = launch_bytes(((const struct launch *)work)->function);
    return memcpy(malloc(size), work, size);
}

static const struct double_kind LAUNCH = {run_launch, copy_launch, free, NULL};

static int launch(void *handle, const unsigned *grid, unsigned shared_bytes, void *stream, void **given)
{
    int device = -1, code = OK;
    pthread_mutex_lock(&lock);
    struct function *f = find_function(handle, &device);
    struct stream *s = find_stream(stream);
    if (!f || !s || s->device != device)
        code = INVALID_HANDLE;
    else if (fail_launch_in && !--fail_launch_in)
        code = launch_error;
    launch_count += !code;
    pthread_mutex_unlock(&lock);
    if (code)
        return code;
    if (!grid[0] || grid[1] != 1 || grid[2] != 1 || !grid[3] || grid[3] > MOST_THREADS || grid[4] != 1 ||
        grid[5] != 1 || shared_bytes || (f->sizes[0] && !given))
        return INVALID_VALUE;
    struct launch *l = calloc(1, launch_bytes(f));
    l->function = f;
    l->blocks = grid[0];
    char *to = l->arguments;
    for (unsigned i = 0; i < f->sizes[0]; i++) {
        memcpy(to, given[i], f->sizes[i + 1]);
        to += (f->sizes[i + 1] + 7) / 8 * 8;
    }
    return double_enqueue(stream, &LAUNCH, l);
}

#endif
