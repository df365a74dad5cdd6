/* Looks up the driver's functions by one route, and prints the limits that it finds: "total over fits nvml".
 *   route ROUTE [FILE]      FILE is a libcuda; the libnvidia-ml beside it has the same ending */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(u64 *, size_t);
int cuMemGetInfo_v2(size_t *, size_t *); int cuGetProcAddress_v2(const char *, void **, int, u64, int *);
int nvmlInit_v2(void); int nvmlDeviceGetHandleByIndex_v2(unsigned, void **);
int nvmlDeviceGetMemoryInfo(void *, u64 *);

static const char *route, *file = "libcuda.so.1";
static void *handles[2];

static void *open_library(int nvml) {
    if (handles[nvml]) return handles[nvml];
    char name[600];
    if (nvml) {
        const char *ending = strstr(file, "libcuda") + strlen("libcuda");
        snprintf(name, sizeof name, "%.*slibnvidia-ml%s", (int)(strstr(file, "libcuda") - file), file, ending);
    } else snprintf(name, sizeof name, "%s", file);
    void *handle;
    if (!strcmp(route, "dlmopen")) {
        /* Both libraries in one namespace, as in a real program. */
        static Lmid_t own = LM_ID_NEWLM;
        handle = dlmopen(own, name, RTLD_NOW);
        if (handle) dlinfo(handle, RTLD_DI_LMID, &own);
    } else {
        int flags = RTLD_NOW;
        if (!strcmp(route, "default")) flags |= RTLD_GLOBAL;
        if (!strcmp(route, "deepbind")) flags |= RTLD_DEEPBIND;
        handle = dlopen(name, flags);
    }
    if (!handle) { fprintf(stderr, "%s\n", dlerror()); exit(3); }
    return handles[nvml] = handle;
}

static void *find(const char *name) {
    int nvml = !strncmp(name, "nvml", 4);
#ifdef LINKED
    if (!strcmp(route, "linked")) {
#define ONE(f) if (!strcmp(name, #f)) return (void *)f;
        ONE(cuInit) ONE(cuCtxCreate_v2) ONE(cuMemAlloc_v2) ONE(cuMemGetInfo_v2) ONE(cuGetProcAddress_v2)
        ONE(nvmlInit_v2) ONE(nvmlDeviceGetHandleByIndex_v2) ONE(nvmlDeviceGetMemoryInfo)
        exit(4);
    }
    if (!strcmp(route, "default")) return dlsym(RTLD_DEFAULT, name);
    if (!strcmp(route, "self")) return dlsym(dlopen(NULL, RTLD_NOW), name);
#endif
    if (!strcmp(route, "next")) return dlsym(RTLD_NEXT, name);
    void *handle = open_library(nvml);
    if (!strcmp(route, "default")) return dlsym(RTLD_DEFAULT, name);
    if (!nvml && !strncmp(route, "proc", 4)) {
        char bare[64]; void *found = NULL; int status = 9;
        snprintf(bare, sizeof bare, "%s", name);
        char *ending = strstr(bare, "_v2");
        if (ending) *ending = 0;
        /* cuCtxCreate has another form from 11.4 on. */
        if (!strcmp(route, "proc")) {
            int (*ask)(const char *, void **, int, u64) = dlsym(handle, "cuGetProcAddress");
            if (ask(bare, &found, 11030, 0)) exit(5);
        } else {
            int (*ask)(const char *, void **, int, u64, int *) = dlsym(handle, "cuGetProcAddress_v2");
            if (ask(bare, &found, 11030, 0, &status) || status) exit(5);
        }
        return found;
    }
    return dlsym(handle, name);
}

static void *must(const char *name) {
    void *first = find(name);
    if (!first) { fprintf(stderr, "%s is not there\n", name); exit(6); }
    for (int again = 0; again < 300; again++)
        if (find(name) != first) { fprintf(stderr, "%s is another function the next time\n", name); exit(7); }
    return first;
}

int main(int count, char **words) {
    route = words[1];
    if (count > 2) file = words[2];
    int (*init)(unsigned) = must("cuInit");
    int (*create)(void **, unsigned, int) = must("cuCtxCreate_v2");
    int (*allocate)(u64 *, size_t) = must("cuMemAlloc_v2");
    int (*info)(size_t *, size_t *) = must("cuMemGetInfo_v2");
    int (*start)(void) = must("nvmlInit_v2");
    int (*device)(unsigned, void **) = must("nvmlDeviceGetHandleByIndex_v2");
    int (*memory)(void *, u64 *) = must("nvmlDeviceGetMemoryInfo");
    void *context, *card; u64 pointer, told[3] = {0}; size_t left = 0, total = 0;
    int code = init(0);
    if (!code) code = create(&context, 0, 0);
    if (!code) code = info(&left, &total);
    if (code) { fprintf(stderr, "code %d\n", code); return 8; }
    int over = allocate(&pointer, left + 1), fits = allocate(&pointer, left);
    if (start() || device(0, &card) || memory(card, told)) return 9;
    printf("%zu %d %d %llu\n", total, over, fits, told[0]);
    return 0;
}
