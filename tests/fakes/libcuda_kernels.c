/* The phantom's addition to the fake driver: modules of compiled code that contain any function, and launches
 * without effect.
 *
 * torch uses these to load the code that it compiled at run time (see libnvrtc.c). */
#include <cuda.h>

#include <string.h>

static char module, function; /* only their addresses are used */

CUresult cuModuleLoad(CUmodule *out, const char *file) {
    *out = (CUmodule)&module;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image) { return cuModuleLoad(out, NULL); }

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoad(out, NULL);
}

CUresult cuModuleUnload(CUmodule unused) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *out, CUmodule from, const char *name) {
    *out = (CUfunction)&function;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared, CUstream stream, void **arguments, void **extra) {
    if (grid_x * grid_y * grid_z == 0 || block_x * block_y * block_z == 0) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments) {
    return cuLaunchKernel(f, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, arguments, NULL);
}

CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
             : attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION      ? 90
             : attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION         ? 90
                                                                  : 0;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int block_threads, size_t shared) {
    if (block_threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    *blocks = 1024 / block_threads > 0 ? 1024 / block_threads : 1; /* 64 registers per thread, 65,536 in total */
    return CUDA_SUCCESS;
}
