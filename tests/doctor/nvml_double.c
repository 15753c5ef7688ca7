/* A double of NVML: GPUs of which each has links to a switch, or two GPUs linked to each other. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

static unsigned setting(const char *name) {
    const char *text = getenv(name);
    return text ? (unsigned)atoi(text) : 0;
}

static int fill(PciInfo *info, unsigned bus) {
    memset(info, 0, sizeof *info);
    info->bus = bus;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", bus);
    return 0;
}

static unsigned number_of(void *device) { return (unsigned)(size_t)device - 1; }

int nvmlInit_v2(void) { return setting("NVML_DOUBLE_ERROR"); }

int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 2, 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) {
    if (number >= 2) return 2;
    *device = (void *)(size_t)(number + 1);
    return 0;
}

int nvmlDeviceGetPciInfo_v3(void *device, PciInfo *info) { return fill(info, 0x1b + number_of(device)); }

/* The last link is down. */
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *is_active) {
    (void)device;
    if (link >= setting("NVML_DOUBLE_LINKS")) return 2;
    *is_active = link + 1 < setting("NVML_DOUBLE_LINKS");
    return 0;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *kind) {
    (void)device, (void)link;
    *kind = setting("NVML_DOUBLE_SWITCH") ? 2 : 0;
    return 0;
}

#ifndef WITHOUT_REMOTE
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, PciInfo *info) {
    (void)link;
    return fill(info, 0x1b + 1 - number_of(device));
}
#endif
