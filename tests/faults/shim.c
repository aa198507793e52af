/* Loaded before libc (LD_PRELOAD): counts the calls by which a process changes files, and strikes at the n-th of them.
 *
 * Whatever is on disk changes by these calls alone, so to end a process at each of them is to end it in every state
 * that its files go through. LMDB, Python and native libraries call them alike.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096

static long count, at;     /* calls so far, and the one to strike at; 0 for none */
static int error_code;     /* what that call and all later ones that need space fail with; 0: the process is killed */
static int is_torn;        /* whether a write that is struck is done in part */

/* What the tests call. */
void faults_arm(long n, int error, int torn) { count = 0, at = n, error_code = error, is_torn = torn; }
long faults_count(void) { return count; }

int faults_kill_after(double seconds) {
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    struct itimerspec when = {.it_value = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)}};
    timer_t timer;
    return timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &when, NULL);
}

static void die(void) { kill(getpid(), SIGKILL); }

/* Whether this call must fail for want of space. Does not return where the process is to end. */
static int strikes(int needs_space) {
    if (error_code && !needs_space) return 0;
    count++;
    if (!at || count < at) return 0;
    if (!error_code) { if (count == at) die(); return 0; }
    errno = error_code;
    return 1;
}

#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* A write that is struck may have reached the disk in part, page by page. */
#define WRITING(name, size, part, all) \
    NEXT(name); \
    if (fd > 2) { \
        if (is_torn && !error_code && at && count + 1 == at && (size) > PAGE) { (void)!next part; die(); } \
        if (strikes(1)) return -1; \
    } \
    return next all

#define HALF (size / 2 / PAGE * PAGE)
#define MANY (n > 1 ? 2 * PAGE : 0)

ssize_t write(int fd, const void *data, size_t size) { WRITING(write, size, (fd, data, HALF), (fd, data, size)); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at_byte) {
    WRITING(pwrite, size, (fd, data, HALF, at_byte), (fd, data, size, at_byte));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at_byte) {
    WRITING(pwrite64, size, (fd, data, HALF, at_byte), (fd, data, size, at_byte));
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    WRITING(writev, MANY, (fd, parts, n / 2), (fd, parts, n));
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at_byte) {
    WRITING(pwritev, MANY, (fd, parts, n / 2, at_byte), (fd, parts, n, at_byte));
}
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off64_t at_byte) {
    WRITING(pwritev64, MANY, (fd, parts, n / 2, at_byte), (fd, parts, n, at_byte));
}

#define CALL(needs_space, type, name, parameters, arguments, failed) \
    type name parameters { NEXT(name); if (strikes(needs_space)) return failed; return next arguments; }

/* What a process wrote outlives it, so that nothing need reach the disk for these tests: that takes most of their time. */
int fsync(int fd) { (void)fd; return -strikes(0); }
int fdatasync(int fd) { (void)fd; return -strikes(0); }
int msync(void *start, size_t size, int how) { (void)start, (void)size, (void)how; return -strikes(0); }

CALL(0, int, ftruncate, (int fd, off_t size), (fd, size), -1)
CALL(0, int, ftruncate64, (int fd, off64_t size), (fd, size), -1)
CALL(1, int, posix_fallocate, (int fd, off_t start, off_t size), (fd, start, size), error_code)
CALL(1, int, posix_fallocate64, (int fd, off64_t start, off64_t size), (fd, start, size), error_code)
CALL(1, int, mkdir, (const char *path, mode_t mode), (path, mode), -1)
CALL(0, int, rmdir, (const char *path), (path), -1)
CALL(0, int, unlink, (const char *path), (path), -1)
CALL(0, int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags), -1)
CALL(0, int, rename, (const char *from, const char *to), (from, to), -1)
CALL(0, int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), -1)
CALL(0, int, flock, (int fd, int how), (fd, how), -1)

/* One that opens what exists changes nothing. */
#define OPENING(name, folder, arguments) \
    NEXT(name); \
    va_list more; va_start(more, flags); mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; va_end(more); \
    if (flags & O_CREAT && faccessat(folder, path, F_OK, 0) && strikes(1)) return -1; \
    flags &= ~O_SYNC; \
    return next arguments

int open(const char *path, int flags, ...) { OPENING(open, AT_FDCWD, (path, flags, mode)); }
int open64(const char *path, int flags, ...) { OPENING(open64, AT_FDCWD, (path, flags, mode)); }
int openat(int folder, const char *path, int flags, ...) { OPENING(openat, folder, (folder, path, flags, mode)); }
int openat64(int folder, const char *path, int flags, ...) { OPENING(openat64, folder, (folder, path, flags, mode)); }
