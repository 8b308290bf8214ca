/* The emulated machine. FAKECUDA_PROFILE selects a row; FAKECUDA_HBM, _DEVICES, _DRIVER, _NAME, _PAGE (bytes of a
 * host page) and _ATTR ("89=0,131=2") change it.
 *
 * A zero where a real GPU has a number causes a division by zero elsewhere, so the attributes are those of a real
 * Hopper (sm_90) as far as they are published. Unlisted attributes are zero there as well, or unused here. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ATTRIBUTES = 192 };
enum { /* attributes that profiles change, with the names of CUdevice_attribute */
    CLOCK_RATE = 13,
    MULTIPROCESSOR_COUNT = 16,
    INTEGRATED = 18,
    GLOBAL_MEMORY_BUS_WIDTH = 37,
    L2_CACHE_SIZE = 38,
    MAX_THREADS_PER_MULTIPROCESSOR = 39,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    SHARED_PER_MULTIPROCESSOR = 81,
    MANAGED_MEMORY = 83,
    HOST_NATIVE_ATOMICS = 86,
    PAGEABLE_MEMORY_ACCESS = 88,
    CONCURRENT_MANAGED_ACCESS = 89,
    SHARED_PER_BLOCK_OPTIN = 97,
    USES_HOST_PAGE_TABLES = 100,
    DIRECT_MANAGED_ACCESS_FROM_HOST = 101,
    NUMA_CONFIG = 130,
    NUMA_ID = 131,
    HOST_NUMA_ID = 134,
};

static const int hopper[ATTRIBUTES] = {
    [1] = 1024, [2] = 1024, [3] = 1024, [4] = 64,           /* threads in a block, and its three dimensions */
    [5] = 2147483647, [6] = 65535, [7] = 65535,             /* blocks in a grid */
    [8] = 49152, [9] = 65536, [10] = 32, [11] = 2147483647, /* shared, constant memory; warp; pitch */
    [12] = 65536, [CLOCK_RATE] = 1980000, [14] = 512,       /* registers, kHz, texture alignment */
    [15] = 1, [MULTIPROCESSOR_COUNT] = 132, [19] = 1,       /* overlap; maps host memory */
    [21] = 131072, [22] = 131072, [23] = 65536, [24] = 16384, [25] = 16384, [26] = 16384, /* textures */
    [27] = 32768, [28] = 32768, [29] = 2048, [30] = 512,
    [31] = 1, [32] = 1, [33] = 1, [36] = 2619000,           /* concurrent kernels, ECC, PCI bus, memory clock */
    [GLOBAL_MEMORY_BUS_WIDTH] = 6144, [L2_CACHE_SIZE] = 62914560, [MAX_THREADS_PER_MULTIPROCESSOR] = 2048,
    [40] = 3, [41] = 1, [42] = 32768, [43] = 2048, [44] = 1, /* copy engines, unified addresses */
    [45] = 32768, [46] = 32768, [47] = 8192, [48] = 8192, [49] = 32768, [51] = 32,
    [52] = 32768, [53] = 32768, [54] = 2046, [55] = 32768, [56] = 131072, [57] = 65536, [58] = 16384, [59] = 16384,
    [60] = 16384, [61] = 32768, [62] = 2048, [63] = 32768, [64] = 32768, [65] = 2048, [66] = 32768, [67] = 32768,
    [68] = 2046, [69] = 268435456, [70] = 131072, [71] = 65000, [72] = 2097120, [73] = 32768, [74] = 32768,
    [CAPABILITY_MAJOR] = 9, [CAPABILITY_MINOR] = 0, [77] = 32768, [78] = 1, [79] = 1, [80] = 1, /* priorities, L1 */
    [SHARED_PER_MULTIPROCESSOR] = 233472, [82] = 65536, [MANAGED_MEMORY] = 1, [HOST_NATIVE_ATOMICS] = 1, [87] = 2,
    [PAGEABLE_MEMORY_ACCESS] = 1, [CONCURRENT_MANAGED_ACCESS] = 1, [90] = 1, [91] = 1, [92] = 1, [93] = 1, [94] = 1,
    [95] = 1, [96] = 1, [SHARED_PER_BLOCK_OPTIN] = 232448, [98] = 1, [99] = 1, /* cooperative launch, registration */
    [USES_HOST_PAGE_TABLES] = 1, [DIRECT_MANAGED_ACCESS_FROM_HOST] = 1,
    [102] = 1, [103] = 1, [106] = 32, [107] = 1, [108] = 39321600, [109] = 134213632, [110] = 1, [111] = 1024, [112] = 1,
    [113] = 1, [114] = 1, [115] = 1, [116] = 1, [117] = 1, [118] = 100, [119] = 9, [120] = 1, [121] = 1, [122] = 1,
    [123] = 1, [124] = 1, [125] = 1, [126] = 4, [127] = 1, [128] = 1, [129] = 1,
    [NUMA_CONFIG] = 1, [NUMA_ID] = 1, [132] = 1, [HOST_NUMA_ID] = 0,
};

struct change {
    int which, value;
};
static const struct profile {
    const char *profile, *name;
    bool one_pool;
    struct change changes[16]; /* differences from Hopper; terminated by 0 */
} profiles[] = {
    {"gh200", "NVIDIA GH200 480GB", false, {{0, 0}}},
    /* One pool: GPU memory is not a separate NUMA node, and there is no link. */
    {"gb10", "NVIDIA GB10", true,
     {{CAPABILITY_MAJOR, 12}, {CAPABILITY_MINOR, 1}, {INTEGRATED, 1}, {MULTIPROCESSOR_COUNT, 48}, {CLOCK_RATE, 2418000},
      {GLOBAL_MEMORY_BUS_WIDTH, 256}, {L2_CACHE_SIZE, 25165824}, {MAX_THREADS_PER_MULTIPROCESSOR, 1536},
      {SHARED_PER_MULTIPROCESSOR, 102400}, {SHARED_PER_BLOCK_OPTIN, 101376}, {NUMA_CONFIG, 0}, {NUMA_ID, -1}}},
    {"pcie", "NVIDIA H100 PCIe", false,
     {{MULTIPROCESSOR_COUNT, 114}, {CLOCK_RATE, 1755000}, {GLOBAL_MEMORY_BUS_WIDTH, 5120}, {L2_CACHE_SIZE, 52428800},
      {HOST_NATIVE_ATOMICS, 0}, {PAGEABLE_MEMORY_ACCESS, 0}, {USES_HOST_PAGE_TABLES, 0},
      {DIRECT_MANAGED_ACCESS_FROM_HOST, 0}, {NUMA_CONFIG, 0}, {NUMA_ID, -1}}},
    /* A virtual GPU without unified memory. */
    {"no_uvm", "NVIDIA H100 PCIe", false,
     {{MULTIPROCESSOR_COUNT, 114}, {CLOCK_RATE, 1755000}, {L2_CACHE_SIZE, 52428800}, {MANAGED_MEMORY, 0},
      {CONCURRENT_MANAGED_ACCESS, 0}, {HOST_NATIVE_ATOMICS, 0}, {PAGEABLE_MEMORY_ACCESS, 0},
      {USES_HOST_PAGE_TABLES, 0}, {DIRECT_MANAGED_ACCESS_FROM_HOST, 0}, {NUMA_CONFIG, 0}, {NUMA_ID, -1}}},
};

static struct machine pretended;
static int attributes[ATTRIBUTES];

static size_t number(const char *variable, size_t otherwise) {
    const char *text = getenv(variable);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static void read_attributes(const char *text) {
    char *copy = strdup(text), *rest = copy;
    for (char *item; (item = strsep(&rest, ","));) {
        int which, value;
        if (sscanf(item, "%d=%d", &which, &value) == 2 && which > 0 && which < ATTRIBUTES) attributes[which] = value;
    }
    free(copy);
}

__attribute__((constructor)) static void pretend(void) {
    const char *wanted = getenv("FAKECUDA_PROFILE"), *changed = getenv("FAKECUDA_ATTR"), *name = getenv("FAKECUDA_NAME");
    const struct profile *row = profiles;
    for (size_t i = 0; wanted && i < sizeof profiles / sizeof *profiles; i++)
        if (!strcmp(profiles[i].profile, wanted)) row = &profiles[i];
    if (wanted && *wanted && strcmp(row->profile, wanted)) {
        fprintf(stderr, "FAKECUDA_PROFILE=%s: no such profile; there are gh200, gb10, pcie, no_uvm\n", wanted);
        abort();
    }
    memcpy(attributes, hopper, sizeof attributes);
    for (const struct change *change = row->changes; change->which; change++) attributes[change->which] = change->value;
    if (changed) read_attributes(changed);
    pretended = (struct machine){
        .profile = row->profile,
        .name = name && *name ? name : row->name,
        .one_pool = row->one_pool,
        .devices = (int)number("FAKECUDA_DEVICES", 1),
        .driver_version = (int)number("FAKECUDA_DRIVER", 13000),
        .host_nodes = 1,
        .gpu_bytes = number("FAKECUDA_HBM", 64u << 20),
        .page_bytes = number("FAKECUDA_PAGE", (size_t)sysconf(_SC_PAGESIZE)),
    };
    if (pretended.devices > MAX_DEVICES) abort();
}

const struct machine *machine(void) { return &pretended; }
int attribute(int which) { return which > 0 && which < ATTRIBUTES ? attributes[which] : 0; }
bool device_exists(int device) { return device >= 0 && device < pretended.devices; }
bool concurrent_managed(void) { return attributes[CONCURRENT_MANAGED_ACCESS]; }
bool pageable(void) { return attributes[PAGEABLE_MEMORY_ACCESS]; }
