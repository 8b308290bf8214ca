/* What the parts of the fake CUDA runtime share. See libcudart.c. */
#ifndef FAKE_CUDART_H
#define FAKE_CUDART_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>

/* For the parts of this library alone. */
#define INTERNAL __attribute__((visibility("hidden")))

/* Remember an error for cudaGetLastError, per thread as the real runtime does, and hand it on. */
INTERNAL cudaError_t note(cudaError_t error);

/* The driver's codes and the runtime's are the same numbers since CUDA 10.1. */
static inline cudaError_t from_driver(CUresult result) { return note((cudaError_t)result); }

/* Make the thread's device the driver's current one, as a call that needs a context does. */
INTERNAL cudaError_t use_device(void);

/* A line in the record that FAKECUDA_LOG asks for; of the fake driver. */
void fakecuda_said(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
