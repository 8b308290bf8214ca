/* The fake NVRTC (libnvrtc.so.13): it "compiles" any source to a few bytes that are never executed.
 *
 * torch compiles some kernels at run time (torch.prod, special functions). Their launches do nothing, like all
 * others, so compiling only has to succeed and names have to be found again. See libcuda_kernels.c for the loading. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 1 };
static const char BINARY[] = "phantom";

typedef struct {
    char *name; /* the last name expression that was added: torch adds one per program */
} program;

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

const char *nvrtcGetErrorString(int result) { return result == SUCCESS ? "NVRTC_SUCCESS" : "an error of the phantom's NVRTC"; }

int nvrtcCreateProgram(program **out, const char *source, const char *name, int headers, const char **texts, const char **names) {
    *out = calloc(1, sizeof **out);
    return *out == NULL ? OUT_OF_MEMORY : SUCCESS;
}

int nvrtcDestroyProgram(program **p) {
    free((*p)->name);
    free(*p);
    *p = NULL;
    return SUCCESS;
}

int nvrtcCompileProgram(program *p, int count, const char **options) { return SUCCESS; }

int nvrtcAddNameExpression(program *p, const char *expression) {
    free(p->name);
    p->name = strdup(expression);
    return p->name == NULL ? OUT_OF_MEMORY : SUCCESS;
}

int nvrtcGetLoweredName(program *p, const char *expression, const char **lowered) {
    *lowered = p->name;
    return SUCCESS;
}

int nvrtcGetProgramLogSize(program *p, size_t *size) {
    *size = 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(program *p, char *log) {
    *log = '\0';
    return SUCCESS;
}

/* Used for both machine code and PTX. */
#define CODE(kind)                                           \
    int nvrtcGet##kind##Size(program *p, size_t *size) {     \
        *size = sizeof BINARY;                               \
        return SUCCESS;                                      \
    }                                                        \
    int nvrtcGet##kind(program *p, char *code) {             \
        memcpy(code, BINARY, sizeof BINARY);                 \
        return SUCCESS;                                      \
    }
CODE(CUBIN)
CODE(PTX)
