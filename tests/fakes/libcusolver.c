/* The fake cuSOLVER (libcusolver.so.12): sizes of workspaces are answered, factorisations succeed and compute nothing.
 *
 * It is here for torch.linalg.solve and its kin, which schedulers (UniPC) call on tiny matrices. `info` is device
 * memory that torch zeroes beforehand, so nothing is ever singular. A workspace is one matrix; cuSOLVER's own sizes
 * are unknown here. A bufferSize function that is missing below is generated and answers "not supported".
 */
#include <stdint.h>
#include <stdlib.h>

int cusolverDnCreate(void **handle) {
    *handle = calloc(1, 1);
    return *handle == NULL ? 2 : 0; /* CUSOLVER_STATUS_ALLOC_FAILED */
}

int cusolverDnDestroy(void *handle) {
    free(handle);
    return 0;
}

/* The four precisions have one signature each, up to the element type behind a pointer. */
#define FOR_EACH_PRECISION(DEFINE) DEFINE(S) DEFINE(D) DEFINE(C) DEFINE(Z)

#define LU(T)                                                                                                              \
    int cusolverDn##T##getrf_bufferSize(void *handle, int rows, int columns, void *matrix, int leading, int *elements) {   \
        *elements = rows * columns + 1;                                                                                    \
        return 0;                                                                                                          \
    }
FOR_EACH_PRECISION(LU)

#define QR(T)                                                                                                              \
    int cusolverDn##T##geqrf_bufferSize(void *handle, int rows, int columns, void *matrix, int leading, int *elements) {   \
        *elements = rows * columns + 1;                                                                                    \
        return 0;                                                                                                          \
    }
FOR_EACH_PRECISION(QR)

#define CHOLESKY(T)                                                                                                        \
    int cusolverDn##T##potrf_bufferSize(void *handle, int triangle, int rows, void *matrix, int leading, int *elements) {  \
        *elements = rows * rows + 1;                                                                                       \
        return 0;                                                                                                          \
    }
FOR_EACH_PRECISION(CHOLESKY)

#define Q_FROM_QR(NAME)                                                                                                    \
    int cusolverDn##NAME##_bufferSize(void *handle, int rows, int columns, int reflectors, const void *matrix,             \
                                      int leading, const void *tau, int *elements) {                                       \
        *elements = rows * columns + 1;                                                                                    \
        return 0;                                                                                                          \
    }
Q_FROM_QR(Sorgqr) Q_FROM_QR(Dorgqr) Q_FROM_QR(Cungqr) Q_FROM_QR(Zungqr)

/* The 64-bit interface states bytes, on the device and on the host. */
int cusolverDnXpotrf_bufferSize(void *handle, void *parameters, int triangle, int64_t rows, int type, const void *matrix,
                                int64_t leading, int compute, size_t *device_bytes, size_t *host_bytes) {
    *device_bytes = (size_t)(rows * rows) * 16 + 16;
    *host_bytes = 0;
    return 0;
}

int cusolverDnXgeqrf_bufferSize(void *handle, void *parameters, int64_t rows, int64_t columns, int type, const void *matrix,
                                int64_t leading, int tau_type, const void *tau, int compute, size_t *device_bytes,
                                size_t *host_bytes) {
    *device_bytes = (size_t)(rows * columns) * 16 + 16;
    *host_bytes = 0;
    return 0;
}
