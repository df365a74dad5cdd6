/* Allocates 1 MiB on a device, prints the result code, and holds the memory until its input ends. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(unsigned long long *, size_t);
int main(int count, char **words) {
    void *context; unsigned long long pointer; char byte;
    int code = cuInit(0);
    if (!code) code = cuCtxCreate_v2(&context, 0, atoi(words[1]));
    if (!code) code = cuMemAlloc_v2(&pointer, 1 << 20);
    dprintf(1, "%d\n", code);
    while (read(0, &byte, 1) > 0) {}
    return 0;
}
