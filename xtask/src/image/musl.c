/* A program for musl without start files: musl's loader has initialized the library before it calls _start. */
#include <stddef.h>

int printf(const char *, ...);
int fflush(void *);
void *dlopen(const char *, int);
char *dlerror(void);
_Noreturn void _exit(int);

#ifdef __x86_64__
__attribute__((force_align_arg_pointer))
#endif
_Noreturn void _start(void) {
    /* dlopen refuses libraries for glibc with an error, and the program continues. */
    void *driver = dlopen("libcuda.so.1", 2);

    printf("musl works, libcuda.so.1 %s\n", driver ? "is loaded" : dlerror());
    fflush(NULL);
    _exit(0);
}
