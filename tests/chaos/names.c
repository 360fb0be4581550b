/* Names that take their time: getaddrinfo waits as many milliseconds as the file NAMES_FILE says.
   With NAMES_SUFFIX, only for names that end like that. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
    static int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    const char *path = getenv("NAMES_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    int milliseconds = 0;
    if (file) {
        if (fscanf(file, "%d", &milliseconds) != 1)
            milliseconds = 0;
        fclose(file);
    }
    const char *suffix = getenv("NAMES_SUFFIX");
    if (suffix) {
        size_t length = node ? strlen(node) : 0, end = strlen(suffix);
        if (length < end || strcmp(node + length - end, suffix) != 0)
            milliseconds = 0;
    }
    if (milliseconds > 0)
        usleep((useconds_t)milliseconds * 1000);
    if (!real)
        real = dlsym(RTLD_NEXT, "getaddrinfo");
    return real(node, service, hints, found);
}
