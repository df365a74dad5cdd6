/* A program for musl without start files: its loader has made the library ready before it comes here. */
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
    /* glibc's libraries are not for it: it is told so, and goes on. */
    void *driver = dlopen("libcuda.so.1", 2);

    printf("musl works, libcuda.so.1 %s\n", driver ? "is loaded" : dlerror());
    fflush(NULL);
    _exit(0);
}
