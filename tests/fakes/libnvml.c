/* A fake NVIDIA management library, libnvidia-ml.so.1, with the functions that supertuner/memory/nvml.py calls.
 *
 * The real pynvml opens this file by name, so that its loading, argument passing and error handling are tested.
 * FAKENVML_PROFILE selects the machine that it describes:
 *
 *   gh200      one GH200 that reports everything (the default)
 *   gb10       one GB10, whose memory and power limit are "not supported", as on a DGX Spark
 *   two        two H100, in another order than in the fake libcuda
 *   lost       two H100, the first of which fell off the bus after it was opened
 *   no_driver  the library is installed and the kernel driver is not loaded
 *
 * The UUIDs are those of the fake libcuda (except GB10's, which is another machine's). fakenvml_calls(name) counts
 * the calls of one function. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Return;
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
};

typedef struct {
    const char *name;
    const char *uuid;
    unsigned long long total, free;
    unsigned power_limit_mw, power_mw;
    unsigned sm_clock_limit_mhz, sm_clock_mhz;
    int knows_memory, knows_limit, lost;
} Gpu;

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;

#define MIB (1ull << 20)

static Gpu gh200[] = {{"NVIDIA GH200 480GB", "GPU-fafafafa-fafa-fafa-fafa-fafafafafa00", 97871 * MIB, 60000 * MIB,
                       900000, 412500, 1980, 1905, 1, 1, 0}};
static Gpu gb10[] = {{"NVIDIA GB10", "GPU-22222222-2222-2222-2222-222222222222", 0, 0, 0, 38250, 3003, 2411, 0, 0, 0}};
static Gpu two[] = {
    {"NVIDIA H100 80GB HBM3", "GPU-fafafafa-fafa-fafa-fafa-fafafafafa01", 81559 * MIB, 81000 * MIB, 700000, 70125, 1980,
     345, 1, 1, 0},
    {"NVIDIA H100 80GB HBM3", "GPU-fafafafa-fafa-fafa-fafa-fafafafafa00", 81559 * MIB, 20000 * MIB, 700000, 650000,
     1980, 1755, 1, 1, 0},
};

static Gpu *gpus;
static unsigned gpu_count;
static int initialized;

/* --- Counting ---------------------------------------------------------------------------------------------------- */

static struct { const char *name; unsigned calls; } counted[32];

static void count(const char *name)
{
    for (size_t i = 0; i < sizeof counted / sizeof counted[0]; i++) {
        if (counted[i].name == NULL)
            counted[i].name = name;
        if (strcmp(counted[i].name, name) == 0) {
            counted[i].calls++;
            return;
        }
    }
}

unsigned fakenvml_calls(const char *name)
{
    for (size_t i = 0; i < sizeof counted / sizeof counted[0] && counted[i].name != NULL; i++)
        if (strcmp(counted[i].name, name) == 0)
            return counted[i].calls;
    return 0;
}

/* --- The library as a whole --------------------------------------------------------------------------------------- */

static void describe(Gpu *first, unsigned number)
{
    gpus = first;
    gpu_count = number;
    initialized = 1;
}

Return nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    const char *profile = getenv("FAKENVML_PROFILE");
    if (profile == NULL || strcmp(profile, "gh200") == 0) {
        describe(gh200, 1);
    } else if (strcmp(profile, "gb10") == 0) {
        describe(gb10, 1);
    } else if (strcmp(profile, "two") == 0 || strcmp(profile, "lost") == 0) {
        describe(two, 2);
        two[0].lost = strcmp(profile, "lost") == 0;
    } else if (strcmp(profile, "no_driver") == 0) {
        return DRIVER_NOT_LOADED;
    } else {
        fprintf(stderr, "FAKENVML_PROFILE is %s; there are gh200, gb10, two, lost, no_driver\n", profile);
        abort();
    }
    return SUCCESS;
}

Return nvmlShutdown(void)
{
    if (!initialized)
        return UNINITIALIZED;
    initialized = 0;
    return SUCCESS;
}

const char *nvmlErrorString(Return code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

static Return copy_text(const char *text, char *target, unsigned length)
{
    if (strlen(text) + 1 > length)
        return INSUFFICIENT_SIZE;
    strcpy(target, text);
    return SUCCESS;
}

Return nvmlSystemGetDriverVersion(char *target, unsigned length)
{
    return initialized ? copy_text("580.95.05", target, length) : UNINITIALIZED;
}

Return nvmlDeviceGetCount_v2(unsigned *number)
{
    if (!initialized)
        return UNINITIALIZED;
    *number = gpu_count;
    return SUCCESS;
}

Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **handle)
{
    if (!initialized)
        return UNINITIALIZED;
    if (index >= gpu_count)
        return INVALID_ARGUMENT;
    *handle = &gpus[index];
    return SUCCESS;
}

/* --- Queries of one GPU
 * -------------------------------------------------------------------------------------------- */

/* Precedes every query: counts the call, and fails for a lost GPU. */
#define ASKED(gpu)                        \
    do {                                  \
        count(__func__);                  \
        if (!initialized)                 \
            return UNINITIALIZED;         \
        if ((gpu)->lost)                  \
            return GPU_IS_LOST;           \
    } while (0)

Return nvmlDeviceGetName(Gpu *gpu, char *target, unsigned length)
{
    ASKED(gpu);
    return copy_text(gpu->name, target, length);
}

Return nvmlDeviceGetUUID(Gpu *gpu, char *target, unsigned length)
{
    ASKED(gpu);
    return copy_text(gpu->uuid, target, length);
}

Return nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory)
{
    ASKED(gpu);
    if (!gpu->knows_memory)
        return NOT_SUPPORTED;
    *memory = (Memory){gpu->total, gpu->free, gpu->total - gpu->free};
    return SUCCESS;
}

Return nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *utilization)
{
    ASKED(gpu);
    *utilization = (Utilization){97, 41};
    return SUCCESS;
}

Return nvmlDeviceGetEnforcedPowerLimit(Gpu *gpu, unsigned *milliwatts)
{
    ASKED(gpu);
    if (!gpu->knows_limit)
        return NOT_SUPPORTED;
    *milliwatts = gpu->power_limit_mw;
    return SUCCESS;
}

Return nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatts)
{
    ASKED(gpu);
    *milliwatts = gpu->power_mw;
    return SUCCESS;
}

Return nvmlDeviceGetMaxClockInfo(Gpu *gpu, unsigned clock, unsigned *mhz)
{
    ASKED(gpu);
    (void)clock;
    *mhz = gpu->sm_clock_limit_mhz;
    return SUCCESS;
}

Return nvmlDeviceGetClockInfo(Gpu *gpu, unsigned clock, unsigned *mhz)
{
    ASKED(gpu);
    (void)clock;
    *mhz = gpu->sm_clock_mhz;
    return SUCCESS;
}

Return nvmlDeviceGetTemperature(Gpu *gpu, unsigned sensor, unsigned *degrees)
{
    ASKED(gpu);
    (void)sensor;
    *degrees = 61;
    return SUCCESS;
}
