/* A library for LD_PRELOAD that lets the calls of the core fail: see faults.rs.
 *
 * It stands between a worker and the C library, and does nothing but in a thread that has armed it. A rule names a
 * call (with the flag or command that tells its uses apart), which one of them fails, and with which errno. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <unistd.h>

enum { RULES = 4, CALLS = 64, NAME = 32 };

static __thread struct {
    char call[NAME];
    int nth, is_for_ever, error;
} rules[RULES];
static __thread struct {
    const char *call;
    int times;
} calls[CALLS];
static __thread int rules_used, calls_used, is_armed;

void faults_reset(void) { is_armed = rules_used = calls_used = 0; }

/* `error` 0 is no failure but a SIGKILL. */
void faults_add(const char *call, int nth, int is_for_ever, int error) {
    if (rules_used == RULES)
        return;
    snprintf(rules[rules_used].call, NAME, "%s", call);
    rules[rules_used].nth = nth;
    rules[rules_used].is_for_ever = is_for_ever;
    rules[rules_used++].error = error;
}

void faults_arm(int armed) { is_armed = armed; }

/* What was called since the reset, in words: `call:times`. */
void faults_calls(char *text, size_t room) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < calls_used && used < room; i++)
        used += snprintf(text + used, room - used, "%s:%d ", calls[i].call, calls[i].times);
}

/* Counts the call; the errno with which it fails, or 0. */
static int fault(const char *call) {
    int i;
    if (!is_armed)
        return 0;
    for (i = 0; i < calls_used && strcmp(calls[i].call, call) != 0; i++)
        ;
    if (i == CALLS)
        return 0;
    if (i == calls_used)
        calls[calls_used++] = (typeof(calls[0])){call, 0};
    int time = ++calls[i].times;
    for (i = 0; i < rules_used; i++) {
        if (strcmp(rules[i].call, call) != 0)
            continue;
        if (time == rules[i].nth || (rules[i].is_for_ever && time > rules[i].nth)) {
            if (rules[i].error == 0)
                raise(SIGKILL);
            return rules[i].error;
        }
    }
    return 0;
}

#define FAIL_AS(call, result)      \
    do {                           \
        int error_ = fault(call);  \
        if (error_ != 0) {         \
            errno = error_;        \
            return result;         \
        }                          \
    } while (0)

/* The C library's own. */
#define REAL(name)                                      \
    static __typeof__(name) *real;                      \
    if (real == NULL)                                   \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* A function of fixed arguments that answers -1 and errno. */
#define WRAP(name, parameters, arguments)   \
    int name parameters {                   \
        REAL(name);                         \
        FAIL_AS(#name, -1);                 \
        return real arguments;              \
    }

WRAP(linkat, (int from, const char *old, int to, const char *new, int flags), (from, old, to, new, flags))
WRAP(unlinkat, (int dir, const char *name, int flags), (dir, name, flags))
WRAP(renameat2, (int from, const char *old, int to, const char *new, unsigned flags), (from, old, to, new, flags))
WRAP(fallocate, (int fd, int mode, off_t offset, off_t len), (fd, mode, offset, len))
WRAP(fstat, (int fd, struct stat *stat), (fd, stat))
WRAP(fstatat, (int dir, const char *name, struct stat *stat, int flags), (dir, name, stat, flags))
WRAP(fchmod, (int fd, mode_t mode), (fd, mode))
WRAP(ftruncate, (int fd, off_t len), (fd, len))
WRAP(madvise, (void *start, size_t len, int advice), (start, len, advice))
WRAP(munmap, (void *start, size_t len), (start, len))
WRAP(fstatvfs, (int fd, struct statvfs *stat), (fd, stat))
WRAP(sysinfo, (struct sysinfo *info), (info))
WRAP(statx, (int dir, const char *name, int flags, unsigned mask, struct statx *stat), (dir, name, flags, mask, stat))

/* A GNU system declares the resource as an enumeration. */
int getrlimit(__rlimit_resource_t resource, struct rlimit *limit) {
    REAL(getrlimit);
    FAIL_AS("getrlimit", -1);
    return real(resource, limit);
}

/* Answers the error itself. */
int posix_fallocate(int fd, off_t offset, off_t len) {
    REAL(posix_fallocate);
    int error = fault("posix_fallocate");
    return error != 0 ? error : real(fd, offset, len);
}

DIR *opendir(const char *name) {
    REAL(opendir);
    FAIL_AS("opendir", NULL);
    return real(name);
}

/* Only of files: memory for the heap is nobody's guarantee. */
void *mmap64(void *start, size_t len, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    if (fd >= 0)
        FAIL_AS("mmap", MAP_FAILED);
    return real(start, len, protection, flags, fd, offset);
}

int flock(int fd, int operation) {
    REAL(flock);
    int kind = operation & ~LOCK_NB;
    FAIL_AS(kind == LOCK_SH ? "flock(LOCK_SH)" : kind == LOCK_EX ? "flock(LOCK_EX)" : "flock(LOCK_UN)", -1);
    return real(fd, operation);
}

int fcntl(int fd, int command, ...) {
    REAL(fcntl);
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    switch (command) {
    case F_OFD_SETLK:
        FAIL_AS("fcntl(F_OFD_SETLK)", -1);
        break;
    case F_OFD_GETLK:
        FAIL_AS("fcntl(F_OFD_GETLK)", -1);
        break;
    case F_SETSIG:
        FAIL_AS("fcntl(F_SETSIG)", -1);
        break;
    case F_SETLEASE:
        FAIL_AS("fcntl(F_SETLEASE)", -1);
        break;
    default: /* the standard library asks whether a descriptor that it closes is one */
        break;
    }
    return real(fd, command, argument);
}

static mode_t mode_of(int flags, va_list arguments) {
    return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

int open(const char *name, int flags, ...) {
    REAL(open);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    FAIL_AS("open", -1);
    return real(name, flags, mode);
}

int openat(int dir, const char *name, int flags, ...) {
    REAL(openat);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    FAIL_AS((flags & O_TMPFILE) == O_TMPFILE ? "openat(O_TMPFILE)"
            : (flags & O_DIRECTORY) != 0     ? "openat(O_DIRECTORY)"
            : (flags & O_CREAT) != 0         ? "openat(O_CREAT)"
            : (flags & O_ACCMODE) == O_RDWR  ? "openat(O_RDWR)"
                                             : "openat(O_RDONLY)",
            -1);
    return real(dir, name, flags, mode);
}
