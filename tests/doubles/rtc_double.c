/* A double of NVRTC, and with -DHIP of hipRTC: it compiles kernels as host code, by the system's C++
 * compiler, into a shared object; that is the "machine code" which the driver's double loads.
 *
 * VERSION_MINOR follows from this file and the compiler, so that kept code of another one is not used.
 * double_rtc_set: error: every compilation gives this code. double_rtc_get: compilations: how many.
 */
#define _GNU_SOURCE
#include "double.h"

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OK = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

extern char **environ;

struct content {
    char *data;
    size_t size;
};

struct program {
    char *source;
    struct content code, log;
};

static int error_code, compilations;

DOUBLE_API int double_rtc_set(const char *key, long value)
{
    if (strcmp(key, "error"))
        return -1;
    error_code = (int)value;
    return 0;
}

DOUBLE_API long double_rtc_get(const char *key) { return strcmp(key, "compilations") ? -1 : compilations; }

static struct content read_file(const char *path)
{
    struct content found = {calloc(1, 1), 0};
    struct stat facts;
    FILE *file = fopen(path, "rb");
    if (file && !fstat(fileno(file), &facts)) {
        found.data = realloc(found.data, (size_t)facts.st_size + 1);
        found.size = fread(found.data, 1, (size_t)facts.st_size, file);
        found.data[found.size] = 0;
    }
    if (file)
        fclose(file);
    return found;
}

static int run_compiler(const char *folder)
{
    char command[8192];
    snprintf(command, sizeof command,
             "'%s' -std=c++17 -O1 -ffp-contract=off -fPIC -shared -fvisibility=hidden -DGPUCOLL_HOST"
             " -x c++ '%s/source' -o '%s/code' 2> '%s/log'",
             CXX_COMPILER, folder, folder, folder);
    char *arguments[] = {"sh", "-c", command, NULL};
    pid_t pid;
    int status;
    if (posix_spawn(&pid, "/bin/sh", NULL, NULL, arguments, environ))
        return -1;
    while (waitpid(pid, &status, 0) < 0)
        ;
    return status;
}

static int compile(struct program *p)
{
    char folder[] = "/tmp/gpucoll-rtc-XXXXXX", path[64];
    const char *names[] = {"source", "code", "log"};
    if (!mkdtemp(folder))
        return COMPILATION;
    snprintf(path, sizeof path, "%s/source", folder);
    FILE *file = fopen(path, "w");
    fputs(p->source, file);
    fclose(file);
    int status = run_compiler(folder);
    snprintf(path, sizeof path, "%s/code", folder);
    p->code = read_file(path);
    snprintf(path, sizeof path, "%s/log", folder);
    p->log = read_file(path);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
    return status ? COMPILATION : OK;
}

#ifdef HIP
#define NAME(nvrtc, hiprtc) hiprtc
#else
#define NAME(nvrtc, hiprtc) nvrtc
#endif
#define EXPORT(nvrtc, hiprtc) DOUBLE_API int NAME(nvrtc, hiprtc)

EXPORT(nvrtcVersion, hiprtcVersion)(int *major, int *minor)
{
    *major = NAME(12, 6);
    *minor = VERSION_MINOR;
    return OK;
}

DOUBLE_API const char *NAME(nvrtcGetErrorString, hiprtcGetErrorString)(int code)
{
    switch (code) {
    case OK: return "NVRTC_SUCCESS";
    case 1: return "NVRTC_ERROR_OUT_OF_MEMORY";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    default: return "NVRTC_ERROR_INTERNAL_ERROR";
    }
}

EXPORT(nvrtcCreateProgram, hiprtcCreateProgram)(
    void **out, const char *source, const char *name, int count, const char *const *headers,
    const char *const *names)
{
    if (!source || !name || count || headers || names)
        return INVALID_INPUT;
    struct program *p = calloc(1, sizeof *p);
    p->source = strdup(source);
    p->log.data = calloc(1, 1);
    *out = p;
    return OK;
}

EXPORT(nvrtcDestroyProgram, hiprtcDestroyProgram)(void **program)
{
    struct program *p = *program;
    if (!p)
        return INVALID_PROGRAM;
    free(p->source);
    free(p->code.data);
    free(p->log.data);
    free(p);
    *program = NULL;
    return OK;
}

/* Kernels need an architecture, C++17, and that nothing is contracted. */
EXPORT(nvrtcCompileProgram, hiprtcCompileProgram)(void *program, int count, const char *const *options)
{
    int found = 0;
    for (int i = 0; i < count; i++) {
        if (!strcmp(options[i], "-std=c++17"))
            found |= 1;
        else if (!strcmp(options[i], NAME("--fmad=false", "-ffp-contract=off")))
            found |= 2;
        else if (!strncmp(options[i], NAME("--gpu-architecture=sm_", "--offload-arch=gfx"), NAME(22, 18)))
            found |= 4;
        else
            return INVALID_OPTION;
    }
    if (found != 7)
        return INVALID_OPTION;
    __atomic_fetch_add(&compilations, 1, __ATOMIC_RELAXED);
    return error_code ? error_code : compile(program);
}

static int size_of(const struct content *c, size_t extra, size_t *size)
{
    *size = c->size + extra;
    return OK;
}

static int give(const struct content *c, size_t extra, char *to)
{
    memcpy(to, c->data, c->size + extra);
    return OK;
}

EXPORT(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize)(void *program, size_t *size)
{
    return size_of(&((struct program *)program)->log, 1, size);
}
EXPORT(nvrtcGetProgramLog, hiprtcGetProgramLog)(void *program, char *to)
{
    return give(&((struct program *)program)->log, 1, to);
}
EXPORT(nvrtcGetCUBINSize, hiprtcGetCodeSize)(void *program, size_t *size)
{
    return size_of(&((struct program *)program)->code, 0, size);
}
EXPORT(nvrtcGetCUBIN, hiprtcGetCode)(void *program, char *to)
{
    return give(&((struct program *)program)->code, 0, to);
}
