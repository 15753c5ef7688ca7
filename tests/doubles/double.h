/* What the double of a GPU driver offers to the double of a collectives library, and to tests. */
#ifndef GPUCOLL_DOUBLE_H
#define GPUCOLL_DOUBLE_H

#include <stddef.h>

#define DOUBLE_API __attribute__((visibility("default")))

/* Work on a stream. It owns `work`; a captured piece of work is copied for each replay. */
struct double_kind {
    void (*run)(void *work);
    void *(*copy)(const void *work); /* called when it is put on a stream, in that order */
    void (*drop)(void *work);
    int (*waits)(const void *work); /* whether a work queue of the GPU waits with it; NULL: never does */
};

/* Every wait inside the doubles ends after this long, and says so on standard error. */
#define DOUBLE_LIMIT_S 60.0

typedef int double_enqueue_function(void *stream, const struct double_kind *kind, void *work);
typedef int double_join_function(void *from, void *to);
typedef int double_current_device_function(void);
typedef void double_use_device_function(int device);
typedef int double_stream_device_function(void *stream);
typedef int double_allocate_function(void **address, size_t size);
typedef int double_free_function(void *address);
typedef int double_owns_function(const void *address, size_t size);

#endif
