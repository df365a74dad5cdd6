/* Keeps the namespaces of a pod open: reaps orphaned processes, and exits on SIGINT or SIGTERM. */
#include <signal.h>
#include <sys/wait.h>

int main(void) {
    sigset_t awaited;
    int signal;

    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGINT);
    sigaddset(&awaited, SIGTERM);
    /* The first process of a namespace gets only signals that it handles; blocked ones are kept for sigwait. */
    if (sigprocmask(SIG_BLOCK, &awaited, 0) != 0)
        return 1;
    while (sigwait(&awaited, &signal) == 0 && signal == SIGCHLD)
        while (waitpid(-1, 0, WNOHANG) > 0)
            ;
    return 0;
}
