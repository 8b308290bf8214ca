/* The fake cuBLASLt (libcublasLt.so.13): one algorithm for every product, which needs no workspace and computes
 * nothing.
 *
 * torch requests an algorithm from the heuristic and raises without one, so one is returned. The rest is generated. */
#include <stddef.h>
#include <string.h>

/* cublasLtMatmulHeuristicResult_t */
typedef struct {
    unsigned long long algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
} result;

_Static_assert(sizeof(result) == 96, "the layout of cublasLtMatmulHeuristicResult_t");

size_t cublasLtGetVersion(void) { return 130000; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, result *results, int *given) {
    memset(results, 0, sizeof *results);
    results->waves = 1.0f;
    *given = 1;
    return 0;
}
