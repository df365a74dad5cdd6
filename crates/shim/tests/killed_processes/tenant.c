/* Runs a scenario; may be killed at any instruction between two stops. */
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef unsigned long long u64;
typedef struct { size_t width, height; unsigned format, channels; } array_t;
typedef struct { int type, handles, location, id; void *meta; unsigned char flags[8]; } created_t;
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuCtxDestroy_v2(void *);
int cuDevicePrimaryCtxRetain(void **, int); int cuDevicePrimaryCtxRelease_v2(int);
int cuMemAlloc_v2(u64 *, size_t); int cuMemFree_v2(u64); int cuMemGetInfo_v2(size_t *, size_t *);
int cuMemAllocPitch_v2(u64 *, size_t *, size_t, size_t, unsigned); int cuMemAllocManaged(u64 *, size_t, unsigned);
int cuMemAllocAsync(u64 *, size_t, void *); int cuMemFreeAsync(u64, void *); int cuCtxSynchronize(void);
int cuDeviceGetDefaultMemPool(void **, int); int cuMemPoolTrimTo(void *, size_t);
int cuMemCreate(u64 *, size_t, const created_t *, u64); int cuMemRelease(u64);
int cuArrayCreate_v2(void **, const array_t *); int cuArrayDestroy(void *);
int cuModuleLoadData(void **, const void *); int cuModuleUnload(void *); int cuModuleGetFunction(void **, void *, const char *);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
#define OK(call) do { int code = call; if (code) { fprintf(stderr, "%s: %d\n", #call, code); _exit(1); } } while (0)
static void *context, *module, *kernel;

static void work(const char *scenario) {
#define IS(name) (!strcmp(scenario, name))
    void *other, *pool, *array;
    u64 one, two, three, four; size_t pitch, left, total;
    if (IS("attach")) OK(cuCtxCreate_v2(&context, 0, 0));
    if (IS("memory")) {
        OK(cuMemAlloc_v2(&one, 3 << 20));
        OK(cuMemAlloc_v2(&two, 1000));
        OK(cuMemAllocPitch_v2(&three, &pitch, 700, 5000, 4));
        OK(cuMemFree_v2(one));
        OK(cuMemGetInfo_v2(&left, &total));
        OK(cuMemAllocManaged(&four, 5 << 20, 1));
        OK(cuMemFree_v2(two));
        OK(cuMemFree_v2(four));
        OK(cuMemFree_v2(three));
    }
    if (IS("pools")) {
        OK(cuMemAllocAsync(&one, 9 << 20, NULL));
        OK(cuMemFreeAsync(one, NULL));
        OK(cuCtxSynchronize());
        OK(cuDeviceGetDefaultMemPool(&pool, 0));
        OK(cuMemPoolTrimTo(pool, 0));
        created_t wanted = { .type = 1, .location = 1 };
        OK(cuMemCreate(&two, 4 << 20, &wanted, 0));
        OK(cuMemRelease(two));
        array_t shape = { 1024, 1024, 0x20, 1 };
        OK(cuArrayCreate_v2(&array, &shape));
        OK(cuArrayDestroy(array));
    }
    if (IS("contexts")) {
        OK(cuCtxCreate_v2(&other, 0, 0));
        OK(cuMemAlloc_v2(&one, 3 << 20));
        OK(cuCtxDestroy_v2(other));
        OK(cuDevicePrimaryCtxRetain(&other, 0));
        OK(cuDevicePrimaryCtxRelease_v2(0));
        OK(cuModuleLoadData(&module, "any image"));
        OK(cuModuleUnload(module));
    }
    if (IS("launch"))
        for (int launch = 0; launch < 4; launch++)
            OK(cuLaunchKernel(kernel, launch % 2 + 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
}

int main(int count, char **words) {
    OK(cuInit(0));
    if (strcmp(words[1], "attach")) {
        OK(cuCtxCreate_v2(&context, 0, 0));
        OK(cuModuleLoadData(&module, "any image"));
        OK(cuModuleGetFunction(&kernel, module, "busy_20us"));
        /* The first run fills the caches of everything that is looked up only once. */
        work(words[1]);
    }
    raise(SIGSTOP);
    work(words[1]);
    raise(SIGSTOP);
    return 0;
}
