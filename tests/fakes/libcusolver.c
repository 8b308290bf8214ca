/* The fake cuSOLVER (libcusolver.so.12): workspace sizes are returned, factorisations succeed and compute nothing.
 *
 * It exists for torch.linalg.solve and related functions, which schedulers (UniPC) call on tiny matrices. Every
 * factorisation reports success in the caller's `info`, which is device memory and therefore accessible: nothing is
 * ever singular. A workspace is one matrix; cuSOLVER's own sizes are unknown here. A bufferSize function that is
 * missing below is generated and returns "not supported". */
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

/* No row exchanges: pivots count from 1, as in LAPACK. */
#define FACTORISE_LU(T)                                                                                                    \
    int cusolverDn##T##getrf(void *handle, int rows, int columns, void *matrix, int leading, void *workspace, int *pivots, \
                             int *info) {                                                                                  \
        for (int i = 0; pivots != NULL && i < (rows < columns ? rows : columns); i++) pivots[i] = i + 1;                   \
        *info = 0;                                                                                                         \
        return 0;                                                                                                          \
    }                                                                                                                      \
    int cusolverDn##T##getrs(void *handle, int transposed, int rows, int columns, const void *matrix, int leading,         \
                             const int *pivots, void *right, int leading_right, int *info) {                               \
        *info = 0;                                                                                                         \
        return 0;                                                                                                          \
    }
FOR_EACH_PRECISION(FACTORISE_LU)

#define QR(T)                                                                                                              \
    int cusolverDn##T##geqrf_bufferSize(void *handle, int rows, int columns, void *matrix, int leading, int *elements) {   \
        *elements = rows * columns + 1;                                                                                    \
        return 0;                                                                                                          \
    }
FOR_EACH_PRECISION(QR)

#define FACTORISE_QR(T)                                                                                                    \
    int cusolverDn##T##geqrf(void *handle, int rows, int columns, void *matrix, int leading, void *tau, void *workspace,   \
                             int elements, int *info) {                                                                    \
        *info = 0;                                                                                                         \
        return 0;                                                                                                          \
    }
FOR_EACH_PRECISION(FACTORISE_QR)

#define CHOLESKY(T)                                                                                                        \
    int cusolverDn##T##potrf_bufferSize(void *handle, int triangle, int rows, void *matrix, int leading, int *elements) {  \
        *elements = rows * rows + 1;                                                                                       \
        return 0;                                                                                                          \
    }
FOR_EACH_PRECISION(CHOLESKY)

#define FACTORISE_CHOLESKY(T)                                                                                              \
    int cusolverDn##T##potrf(void *handle, int triangle, int rows, void *matrix, int leading, void *workspace,             \
                             int elements, int *info) {                                                                    \
        *info = 0;                                                                                                         \
        return 0;                                                                                                          \
    }                                                                                                                      \
    int cusolverDn##T##potrfBatched(void *handle, int triangle, int rows, void **matrices, int leading, int *info,         \
                                    int batch) {                                                                           \
        for (int i = 0; i < batch; i++) info[i] = 0;                                                                       \
        return 0;                                                                                                          \
    }
FOR_EACH_PRECISION(FACTORISE_CHOLESKY)

#define Q_FROM_QR(NAME)                                                                                                    \
    int cusolverDn##NAME##_bufferSize(void *handle, int rows, int columns, int reflectors, const void *matrix,             \
                                      int leading, const void *tau, int *elements) {                                       \
        *elements = rows * columns + 1;                                                                                    \
        return 0;                                                                                                          \
    }                                                                                                                      \
    int cusolverDn##NAME(void *handle, int rows, int columns, int reflectors, void *matrix, int leading, const void *tau,  \
                         void *workspace, int elements, int *info) {                                                       \
        *info = 0;                                                                                                         \
        return 0;                                                                                                          \
    }
#define FOR_EACH_Q(DEFINE) DEFINE(Sorgqr) DEFINE(Dorgqr) DEFINE(Cungqr) DEFINE(Zungqr)
FOR_EACH_Q(Q_FROM_QR)

/* The 64-bit interface returns bytes, on the device and on the host. */
int cusolverDnXpotrf_bufferSize(void *handle, void *parameters, int triangle, int64_t rows, int type, const void *matrix,
                                int64_t leading, int compute, size_t *device_bytes, size_t *host_bytes) {
    *device_bytes = (size_t)(rows * rows) * 16 + 16;
    *host_bytes = 0;
    return 0;
}

int cusolverDnXpotrf(void *handle, void *parameters, int triangle, int64_t rows, int type, void *matrix, int64_t leading,
                     int compute, void *device_workspace, size_t device_bytes, void *host_workspace, size_t host_bytes,
                     int *info) {
    *info = 0;
    return 0;
}

int cusolverDnXgeqrf_bufferSize(void *handle, void *parameters, int64_t rows, int64_t columns, int type, const void *matrix,
                                int64_t leading, int tau_type, const void *tau, int compute, size_t *device_bytes,
                                size_t *host_bytes) {
    *device_bytes = (size_t)(rows * columns) * 16 + 16;
    *host_bytes = 0;
    return 0;
}

int cusolverDnXgeqrf(void *handle, void *parameters, int64_t rows, int64_t columns, int type, void *matrix, int64_t leading,
                     int tau_type, void *tau, int compute, void *device_workspace, size_t device_bytes,
                     void *host_workspace, size_t host_bytes, int *info) {
    *info = 0;
    return 0;
}
