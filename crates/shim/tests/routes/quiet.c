/* Prints process state that a preloaded library could change, but not which files were loaded. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static int count(const char *folder) {
    DIR *open = opendir(folder); int found = 0;
    while (readdir(open)) found++;
    closedir(open);
    return found;
}
int main(void) {
    int at_start = errno;
    /* Looking up names does not use the driver, and must not change errno. */
    errno = 77;
    void *own = dlsym(RTLD_DEFAULT, "malloc"), *next = dlsym(RTLD_NEXT, "free"), *none = dlsym(RTLD_DEFAULT, "curl_easy_init");
    void *cudnn = dlsym(RTLD_DEFAULT, "cudnnCreate"), *version = dlvsym(RTLD_DEFAULT, "memcpy", "GLIBC_2.14");
    int error = errno; errno = 0;
    printf("errno %d %d found %d %d %d %d %d\n", at_start, error, !!own, !!next, !!none, !!cudnn, !!version);
    printf("tasks %d descriptors %d umask %o\n", count("/proc/self/task"), count("/proc/self/fd"), umask(0));
    for (int signal = 1; signal < 32; signal++) {
        struct sigaction set;
        sigaction(signal, NULL, &set);
        printf("%d", set.sa_handler != SIG_DFL);
    }
    char line[2000];
    FILE *file = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, file)) if (!strncmp(line, "Sig", 3) || !strncmp(line, "Shd", 3)) printf("\n%.60s", line);
    fclose(file);
    file = fopen("/proc/self/maps", "r");
    int drivers = 0, regions = 0;
    while (fgets(line, sizeof line, file)) {
        drivers += strstr(line, "libcuda") || strstr(line, "libnvidia");
        regions += strstr(line, "/region/") || strstr(line, "/limits") || strstr(line, "/usage");
    }
    printf("drivers %d regions %d\n", drivers, regions);
    fclose(file);
    return 42;
}
