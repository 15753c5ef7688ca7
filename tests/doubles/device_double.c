/* A double of a GPU's driver over host memory: streams are threads, events order them.
 *
 * Compiled twice: as libcuda.so.1, and with -DHIP as libamdhip64.so.6. Only the functions that gpucoll
 * binds are there, with the codes that the real ones give for misuse (no current context, an event of
 * another device, a query while a graph is captured). "Device memory" is host memory that is unmapped
 * when freed. Control functions begin with double_.
 */
#define _GNU_SOURCE
#include "device_memory.h"
#include "device_modules.h"
#include "device_sharing.h"

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
    if (!is_initialised && getenv("DOUBLE_WORK_QUEUES"))
        n_work_queues = atoi(getenv("DOUBLE_WORK_QUEUES"));
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
    case INVALID_IMAGE: return "device kernel image is invalid";
    case INVALID_PTX: return "a PTX JIT compilation failed";
    case NOT_FOUND: return "named symbol not found";
    case 719: return "unspecified launch failure";
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
/* It is no architecture that there is, so that no real GPU is ever given code for it: sm_99, gfx9ff. */
EXPORT(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *out, int attribute, int device)
{
    *out = attribute == NAME(92, 10013) ? (int)waits : attribute == NAME(117, -1) ? (int)remote_flush : attribute == NAME(118, -1) ? (int)remote_ordering : attribute == NAME(16, 63) ? 132 : attribute == NAME(75, 23) || attribute == NAME(76, 61) ? 9 : 1;
    return is_device(device) && (attribute < 200 || attribute == NAME(200, 10013)) ? OK : INVALID_VALUE;
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
EXPORT(, hipGetDevicePropertiesR0600)(char *out, int device)
{
    memset(out, 0, 1472);
    snprintf(out, 256, "Double of a GPU");
    snprintf(out + 1160, 256, "gfx9ff:sramecc+:xnack-");
    return is_device(device) ? OK : INVALID_DEVICE;
}
DOUBLE_API const char *hipGetErrorString(int code) { return text_of(code); }
#else
/* A context is the address of the device's default stream. */
EXPORT(cuDevicePrimaryCtxRetain, )(void **out, int device)
{
    NOTE("cuDevicePrimaryCtxRetain", device);
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
#ifndef HIP
EXPORT(cuFlushGPUDirectRDMAWrites, )(int target, int scope)
{
    BEGIN
    if (target != 0 || scope != 100)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    flushes++;
    pthread_mutex_unlock(&lock);
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
    BEGIN return flags > 1 || priority > 0 ? INVALID_VALUE : stream_create(out, !flags);
}
EXPORT(cuStreamDestroy_v2, hipStreamDestroy)(void *stream) { BEGIN return stream_destroy(stream); }
EXPORT(cuStreamQuery, hipStreamQuery)(void *stream) { BEGIN return stream_state(stream, 0); }
EXPORT(cuStreamSynchronize, hipStreamSynchronize)(void *stream)
{
    BEGIN return stream_state(stream, 1);
}
EXPORT(cuStreamWaitEvent, hipStreamWaitEvent)(void *stream, void *event, unsigned flags)
{
    NOTE(NAME("cuStreamWaitEvent", "hipStreamWaitEvent"), stream, event, flags);
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
    NOTE(NAME("cuEventRecord", "hipEventRecord"), event, stream);
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
    struct mapping *opened = b ? NULL : find_mapping(address, OPENED);
    if (b || opened)
        *(int *)out = attribute == 8 ? b && b->is_managed : b ? b->device : opened->device;
    pthread_mutex_unlock(&lock);
    return (b || opened) && (attribute == 9 || attribute == 8) ? OK : INVALID_VALUE;
}
#ifdef HIP
EXPORT(, hipMemcpyAsync)(void *to, const void *from, size_t size, int kind, void *stream)
{
    NOTE("hipMemcpyAsync", to, from, size, kind, stream);
    BEGIN return kind == 4 ? move(to, from, size, stream) : INVALID_VALUE;
}
#else
EXPORT(cuMemcpyAsync, )(void *to, const void *from, size_t size, void *stream)
{
    NOTE("cuMemcpyAsync", to, from, size, stream);
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
EXPORT(cuModuleLoadData, hipModuleLoadData)(void **out, const void *image)
{
    BEGIN return module_load(out, image);
}
EXPORT(cuModuleUnload, hipModuleUnload)(void *module) { BEGIN return module_unload(module); }
EXPORT(cuModuleGetFunction, hipModuleGetFunction)(void **out, void *module, const char *name)
{
    BEGIN return module_function(out, module, name);
}
EXPORT(cuLaunchKernel, hipModuleLaunchKernel)(
    void *function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
    unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void *stream, void **arguments,
    void **extra)
{
    const unsigned grid[] = {blocks, blocks_y, blocks_z, threads, threads_y, threads_z};
    NOTE(NAME("cuLaunchKernel", "hipModuleLaunchKernel"), function, blocks, threads, stream);
    BEGIN return extra ? INVALID_VALUE : launch(function, grid, shared_bytes, stream, arguments);
}

/* --- what ranks of one host share ---------------------------------------------------------------- */

EXPORT(cuMemGetAddressRange_v2, hipMemGetAddressRange)(void **base, size_t *size, void *address)
{
    NOTE(NAME("cuMemGetAddressRange_v2", "hipMemGetAddressRange"), address);
    BEGIN return address_range(base, size, address);
}
EXPORT(cuIpcGetMemHandle, hipIpcGetMemHandle)(struct handle *out, void *address)
{
    NOTE(NAME("cuIpcGetMemHandle", "hipIpcGetMemHandle"), address);
    BEGIN return export_block(out, address);
}
EXPORT(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle)(void **out, struct handle given, unsigned flags)
{
    NOTE(NAME("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle"), flags);
    BEGIN return flags == 1 ? open_handle(out, &given) : INVALID_VALUE;
}
EXPORT(cuIpcCloseMemHandle, hipIpcCloseMemHandle)(void *base)
{
    NOTE(NAME("cuIpcCloseMemHandle", "hipIpcCloseMemHandle"), base);
    BEGIN return close_handle(base);
}
EXPORT(cuMemHostAlloc, hipHostMalloc)(void **out, size_t size, unsigned flags)
{
    NOTE(NAME("cuMemHostAlloc", "hipHostMalloc"), size, flags);
    BEGIN return flags == 3 ? allocate_host(out, size) : INVALID_VALUE;
}
EXPORT(cuMemFreeHost, hipHostFree)(void *address)
{
    NOTE(NAME("cuMemFreeHost", "hipHostFree"), address);
    BEGIN return free_host(address);
}
EXPORT(cuMemHostRegister_v2, hipHostRegister)(void *address, size_t size, unsigned flags)
{
    NOTE(NAME("cuMemHostRegister_v2", "hipHostRegister"), address, size, flags);
    BEGIN return flags == 3 ? register_host(address, size) : INVALID_VALUE;
}
EXPORT(cuMemHostUnregister, hipHostUnregister)(void *address)
{
    NOTE(NAME("cuMemHostUnregister", "hipHostUnregister"), address);
    BEGIN return unregister_host(address);
}
EXPORT(cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer)(void **out, void *address, unsigned flags)
{
    NOTE(NAME("cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer"), address, flags);
    BEGIN return flags ? INVALID_VALUE : device_address(out, address);
}
EXPORT(cuDeviceCanAccessPeer, hipDeviceCanAccessPeer)(int *out, int device, int peer)
{
    NOTE(NAME("cuDeviceCanAccessPeer", "hipDeviceCanAccessPeer"), device, peer);
    *out = device != peer && peers;
    return is_device(device) && is_device(peer) ? OK : INVALID_DEVICE;
}
#ifdef HIP
EXPORT(, hipStreamWaitValue32)(void *stream, void *address, unsigned value, unsigned flags, unsigned mask)
{
    NOTE("hipStreamWaitValue32", stream, address, value, flags, mask);
    BEGIN return flags || mask != 0xFFFFFFFF ? INVALID_VALUE : use_word(stream, address, value, 0);
}
#else
EXPORT(cuStreamWaitValue32_v2, )(void *stream, void *address, unsigned value, unsigned flags)
{
    NOTE("cuStreamWaitValue32_v2", stream, address, value, flags);
    BEGIN return flags ? INVALID_VALUE : use_word(stream, address, value, 0);
}
EXPORT(cuStreamWaitValue32, )(void *stream, void *address, unsigned value, unsigned flags)
{
    NOTE("cuStreamWaitValue32", stream, address, value, flags);
    BEGIN return flags ? INVALID_VALUE : use_word(stream, address, value, 0);
}
#endif
EXPORT(cuStreamWriteValue32_v2, hipStreamWriteValue32)(
    void *stream, void *address, unsigned value, unsigned flags)
{
    NOTE(NAME("cuStreamWriteValue32_v2", "hipStreamWriteValue32"), stream, address, value, flags);
    BEGIN return flags ? INVALID_VALUE : use_word(stream, address, value, 1);
}
