/* Holds the namespaces of a pod open: takes in the dead that are left to it, and ends when told to. */
#include <signal.h>
#include <sys/wait.h>

int main(void) {
    sigset_t awaited;
    int signal;

    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGINT);
    sigaddset(&awaited, SIGTERM);
    /* Blocked signals wait for sigwait, even for the first process of a namespace, whom they would not reach else. */
    if (sigprocmask(SIG_BLOCK, &awaited, 0) != 0)
        return 1;
    while (sigwait(&awaited, &signal) == 0 && signal == SIGCHLD)
        while (waitpid(-1, 0, WNOHANG) > 0)
            ;
    return 0;
}
