/* Declarations shared by the files of the fake CUDA runtime. See libcudart.c. */
#ifndef FAKE_CUDART_H
#define FAKE_CUDART_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>

/* Visible only inside this library. */
#define INTERNAL __attribute__((visibility("hidden")))

/* Store an error for cudaGetLastError, per thread like the real runtime, and return it. */
INTERNAL cudaError_t note(cudaError_t error);

/* Driver and runtime have used the same error codes since CUDA 10.1. */
static inline cudaError_t from_driver(CUresult result) { return note((cudaError_t)result); }

/* Make the thread's device the driver's current one, as a call that needs a context does. */
INTERNAL cudaError_t use_device(void);

/* Write a line to the log of the fake driver (FAKECUDA_LOG). */
void fakecuda_said(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
