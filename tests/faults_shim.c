/* A library for LD_PRELOAD that lets the calls of the core fail: see faults.rs.
 *
 * It stands between a worker and the C library, and does nothing but in a thread that has armed it. A rule names a
 * call (with the flag or command that tells its uses apart), which one of them fails, and with which errno. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
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
WRAP(munmap, (void *start, size_t len), (start, len))
WRAP(fstatfs64, (int fd, struct statfs64 *stat), (fd, stat))
WRAP(fstatvfs, (int fd, struct statvfs *stat), (fd, stat))
WRAP(sysinfo, (struct sysinfo *info), (info))
WRAP(statx, (int dir, const char *name, int flags, unsigned mask, struct statx *stat), (dir, name, flags, mask, stat))

int madvise(void *start, size_t len, int advice) {
    REAL(madvise);
    /* linux/mman.h; older headers lack some of the names */
    FAIL_AS(advice == 14   ? "madvise(MADV_HUGEPAGE)"
            : advice == 16 ? "madvise(MADV_DONTDUMP)"
            : advice == 15 ? "madvise(MADV_NOHUGEPAGE)"
            : advice == 16 ? "madvise(MADV_DONTDUMP)"
            : advice == 22 ? "madvise(MADV_POPULATE_READ)"
            : advice == 23 ? "madvise(MADV_POPULATE_WRITE)"
            : advice == 25 ? "madvise(MADV_COLLAPSE)"
                           : "madvise",
            -1);
    return real(start, len, advice);
}

void *mremap(void *start, size_t len, size_t new_len, int flags, ...) {
    REAL(mremap);
    va_list arguments;
    va_start(arguments, flags);
    void *to = (flags & MREMAP_FIXED) != 0 ? va_arg(arguments, void *) : NULL;
    va_end(arguments);
    FAIL_AS("mremap", MAP_FAILED);
    return real(start, len, new_len, flags, to);
}

int ioctl(int fd, unsigned long request, ...) {
    REAL(ioctl);
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if ((request >> 8 & 0xff) == 'f' && (request & 0xff) == 16)
        FAIL_AS("ioctl(PAGEMAP_SCAN)", -1);
    return real(fd, request, argument);
}

/* What the C library has no name for. */
long syscall(long number, ...) {
    REAL(syscall);
    long words[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_mbind)
        FAIL_AS("mbind", -1);
    if (number == SYS_get_mempolicy)
        FAIL_AS("get_mempolicy", -1);
    return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

/* Answers the error itself. */
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*work)(void *), void *argument) {
    REAL(pthread_create);
    int error = fault("pthread_create");
    return error != 0 ? error : real(thread, how, work, argument);
}

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
    case F_GETLEASE:
        FAIL_AS("fcntl(F_GETLEASE)", -1);
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

/* The standard library's: files of the kernel, in which the core looks something up. A test can put its own mounts
 * in the place of the machine's. */
int open64(const char *name, int flags, ...) {
    static const char *const looked_up[][2] = {
        {"/proc/self/mountinfo", "open(mountinfo)"},
        {"/proc/self/pagemap", "open(pagemap)"},
        {"/proc/self/smaps", "open(smaps)"},
        {"/proc/self/cgroup", "open(cgroup)"},
    };
    REAL(open64);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    for (size_t i = 0; i < sizeof looked_up / sizeof *looked_up; i++)
        if (strcmp(name, looked_up[i][0]) == 0)
            FAIL_AS(looked_up[i][1], -1);
    const char *mounts = getenv("FAULTS_MOUNTINFO");
    if (mounts != NULL && strcmp(name, "/proc/self/mountinfo") == 0)
        name = mounts;
    return real(name, flags, mode);
}
