/* Makes chosen calls into the C library fail, for files below one directory. Loaded with LD_PRELOAD.

   `fault_arm` begins to count the calls that name a path below the directory, or use a descriptor that was opened
   there; the call with the number `at` (and, if `always`, each later one) fails with an errno in place of being
   made. With a pattern, it is the number among the calls that match it as `name path`. A close that fails has
   closed, as in Linux. `fault_calls` and `fault_name` say what was called.

   Python, the Rust of safetensors and tokenizers, and torch all come through these symbols. What cannot be seen:
   calls that the C library makes from inside itself (fread behind a fopen), and reads through a mapping. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_CALLS = 16384, MOST_FILES = 4096, NAME_BYTES = 200 };

static char root[PATH_MAX];
static size_t root_length;
static atomic_int is_armed;
static atomic_long num_calls, num_matching;
static char pattern[NAME_BYTES]; /* empty: every call counts */
static long fail_at = -1;
static int fail_errno, fails_always;
static char names[MOST_CALLS][NAME_BYTES];
static char opened[MOST_FILES][NAME_BYTES]; /* path below the root; empty: not ours */

void fault_arm(const char *directory, long at, int number, int always, const char *only) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    snprintf(pattern, sizeof pattern, "%s", only);
    fail_at = at, fail_errno = number, fails_always = always;
    atomic_store(&num_calls, 0);
    atomic_store(&num_matching, 0);
    atomic_store(&is_armed, 1);
}

long fault_disarm(void) {
    atomic_store(&is_armed, 0);
    return atomic_load(&num_calls);
}

const char *fault_name(long number) { return number < MOST_CALLS ? names[number] : ""; }

static int fails(const char *call, const char *where) {
    long number = atomic_fetch_add(&num_calls, 1);
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "%s %s", call, where);
    if (number < MOST_CALLS) strcpy(names[number], name);
    if (pattern[0]) {
        if (fnmatch(pattern, name, 0)) return 0;
        number = atomic_fetch_add(&num_matching, 1);
    }
    if (fail_at < 0 || number < fail_at || (number > fail_at && !fails_always)) return 0;
    errno = fail_errno;
    return 1;
}

static int is_ours(int descriptor) {
    return atomic_load(&is_armed) && descriptor >= 0 && descriptor < MOST_FILES && opened[descriptor][0];
}

/* Return the path below the root, or NULL if it is elsewhere; `room` holds one that is put together. */
static const char *below(int directory, const char *path, char *room) {
    if (!atomic_load(&is_armed) || path == NULL) return NULL;
    if (path[0] != '/') {
        if (directory != AT_FDCWD) {
            if (!is_ours(directory)) return NULL;
            if (!path[0]) return opened[directory]; /* AT_EMPTY_PATH */
            snprintf(room, PATH_MAX, "%s/%s", opened[directory], path);
            return room;
        }
        if (getcwd(room, PATH_MAX) == NULL) return NULL;
        size_t length = strlen(room);
        snprintf(room + length, PATH_MAX - length, "/%s", path);
        path = room;
    }
    if (strncmp(path, root, root_length) || (path[root_length] != '/' && path[root_length])) return NULL;
    return path[root_length] ? path + root_length + 1 : ".";
}

static int keep(int descriptor, const char *where) {
    if (descriptor >= 0 && descriptor < MOST_FILES)
        snprintf(opened[descriptor], NAME_BYTES, "%s", where ? where : "");
    return descriptor;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = dlsym(RTLD_NEXT, #name)

#define OPEN(name, directory_parameter, directory, call) \
    int name(directory_parameter const char *path, int flags, ...) { \
        REAL(name); \
        char room[PATH_MAX]; \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        const char *where = below(directory, path, room); \
        if (where && fails(flags & O_CREAT ? "create" : "open", where)) return -1; \
        return keep(real call, where); \
    }
#define COMMA ,
OPEN(open, , AT_FDCWD, (path, flags, mode))
OPEN(open64, , AT_FDCWD, (path, flags, mode))
OPEN(openat, int directory COMMA, directory, (directory, path, flags, mode))
OPEN(openat64, int directory COMMA, directory, (directory, path, flags, mode))

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        char room[PATH_MAX]; \
        const char *where = below(AT_FDCWD, path, room); \
        return where && fails("fopen", where) ? NULL : real(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)

int close(int descriptor) {
    REAL(close);
    int ours = is_ours(descriptor), failed = ours && fails("close", opened[descriptor]), number = errno;
    if (descriptor >= 0 && descriptor < MOST_FILES) opened[descriptor][0] = 0;
    int result = real(descriptor);
    if (!failed) return result;
    errno = number;
    return -1;
}

DIR *opendir(const char *path) {
    REAL(opendir);
    char room[PATH_MAX];
    const char *where = below(AT_FDCWD, path, room);
    if (where && fails("opendir", where)) return NULL;
    DIR *result = real(path);
    if (result && where) keep(dirfd(result), where);
    return result;
}

int closedir(DIR *directory) {
    REAL(closedir);
    keep(dirfd(directory), NULL);
    return real(directory);
}

/* Calls on a descriptor: result type, name, parameters, arguments, the descriptor, what a failure returns. */
#define ON_FILE(type, name, parameters, arguments, descriptor, failure) \
    type name parameters { \
        REAL(name); \
        if (is_ours(descriptor) && fails(#name, opened[descriptor])) return failure; \
        return real arguments; \
    }
ON_FILE(ssize_t, read, (int f, void *b, size_t n), (f, b, n), f, -1)
ON_FILE(ssize_t, pread, (int f, void *b, size_t n, off_t o), (f, b, n, o), f, -1)
ON_FILE(ssize_t, pread64, (int f, void *b, size_t n, off64_t o), (f, b, n, o), f, -1)
ON_FILE(ssize_t, readv, (int f, const struct iovec *v, int n), (f, v, n), f, -1)
ON_FILE(ssize_t, preadv, (int f, const struct iovec *v, int n, off_t o), (f, v, n, o), f, -1)
ON_FILE(ssize_t, preadv64v2, (int f, const struct iovec *v, int n, off64_t o, int g), (f, v, n, o, g), f, -1)
ON_FILE(ssize_t, write, (int f, const void *b, size_t n), (f, b, n), f, -1)
ON_FILE(ssize_t, pwrite, (int f, const void *b, size_t n, off_t o), (f, b, n, o), f, -1)
ON_FILE(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), (f, b, n, o), f, -1)
ON_FILE(ssize_t, writev, (int f, const struct iovec *v, int n), (f, v, n), f, -1)
ON_FILE(ssize_t, pwritev, (int f, const struct iovec *v, int n, off_t o), (f, v, n, o), f, -1)
ON_FILE(ssize_t, pwritev64v2, (int f, const struct iovec *v, int n, off64_t o, int g), (f, v, n, o, g), f, -1)
ON_FILE(int, fsync, (int f), (f), f, -1)
ON_FILE(int, fdatasync, (int f), (f), f, -1)
ON_FILE(int, ftruncate, (int f, off_t n), (f, n), f, -1)
ON_FILE(int, ftruncate64, (int f, off64_t n), (f, n), f, -1)
ON_FILE(int, posix_fallocate, (int f, off_t o, off_t n), (f, o, n), f, fail_errno)
ON_FILE(int, posix_fallocate64, (int f, off64_t o, off64_t n), (f, o, n), f, fail_errno)
ON_FILE(int, flock, (int f, int o), (f, o), f, -1)
ON_FILE(int, fchmod, (int f, mode_t m), (f, m), f, -1)
ON_FILE(int, fstatvfs64, (int f, struct statvfs64 *s), (f, s), f, -1)
ON_FILE(int, fstat, (int f, struct stat *s), (f, s), f, -1)
ON_FILE(int, fstat64, (int f, struct stat64 *s), (f, s), f, -1)
ON_FILE(ssize_t, sendfile64, (int out, int in, off64_t *o, size_t n), (out, in, o, n), is_ours(out) ? out : in, -1)
ON_FILE(ssize_t, copy_file_range, (int in, off64_t *i, int out, off64_t *o, size_t n, unsigned g),
        (in, i, out, o, n, g), is_ours(out) ? out : in, -1)
ON_FILE(void *, mmap, (void *a, size_t n, int p, int g, int f, off_t o), (a, n, p, g, f, o), f, MAP_FAILED)
ON_FILE(void *, mmap64, (void *a, size_t n, int p, int g, int f, off64_t o), (a, n, p, g, f, o), f, MAP_FAILED)
extern int __fxstat64(int, int, struct stat64 *);
ON_FILE(int, __fxstat64, (int v, int f, struct stat64 *s), (v, f, s), f, -1)

/* Calls on a path: name, parameters, arguments, the directory that it is relative to, the path. */
#define ON_PATH(name, parameters, arguments, directory, path) \
    int name parameters { \
        REAL(name); \
        char room[PATH_MAX]; \
        const char *where = below(directory, path, room); \
        if (where && fails(#name, where)) return -1; \
        return real arguments; \
    }
ON_PATH(rename, (const char *p, const char *q), (p, q), AT_FDCWD, p)
ON_PATH(renameat, (int d, const char *p, int e, const char *q), (d, p, e, q), d, p)
ON_PATH(link, (const char *p, const char *q), (p, q), AT_FDCWD, q)
ON_PATH(linkat, (int d, const char *p, int e, const char *q, int g), (d, p, e, q, g), e, q)
ON_PATH(symlink, (const char *p, const char *q), (p, q), AT_FDCWD, q)
ON_PATH(mkdir, (const char *p, mode_t m), (p, m), AT_FDCWD, p)
ON_PATH(mkdirat, (int d, const char *p, mode_t m), (d, p, m), d, p)
ON_PATH(unlink, (const char *p), (p), AT_FDCWD, p)
ON_PATH(unlinkat, (int d, const char *p, int g), (d, p, g), d, p)
ON_PATH(rmdir, (const char *p), (p), AT_FDCWD, p)
ON_PATH(chmod, (const char *p, mode_t m), (p, m), AT_FDCWD, p)
ON_PATH(fchmodat, (int d, const char *p, mode_t m, int g), (d, p, m, g), d, p)
ON_PATH(truncate64, (const char *p, off64_t n), (p, n), AT_FDCWD, p)
ON_PATH(utimensat, (int d, const char *p, const struct timespec t[2], int g), (d, p, t, g), d, p)
ON_PATH(access, (const char *p, int m), (p, m), AT_FDCWD, p)
ON_PATH(faccessat, (int d, const char *p, int m, int g), (d, p, m, g), d, p)
ON_PATH(statvfs64, (const char *p, struct statvfs64 *s), (p, s), AT_FDCWD, p)
ON_PATH(stat, (const char *p, struct stat *s), (p, s), AT_FDCWD, p)
ON_PATH(stat64, (const char *p, struct stat64 *s), (p, s), AT_FDCWD, p)
ON_PATH(lstat, (const char *p, struct stat *s), (p, s), AT_FDCWD, p)
ON_PATH(lstat64, (const char *p, struct stat64 *s), (p, s), AT_FDCWD, p)
ON_PATH(fstatat64, (int d, const char *p, struct stat64 *s, int g), (d, p, s, g), d, p)
extern int __xstat64(int, const char *, struct stat64 *);
ON_PATH(__xstat64, (int v, const char *p, struct stat64 *s), (v, p, s), AT_FDCWD, p)
extern int __lxstat64(int, const char *, struct stat64 *);
ON_PATH(__lxstat64, (int v, const char *p, struct stat64 *s), (v, p, s), AT_FDCWD, p)

int statx(int d, const char *restrict p, int g, unsigned m, struct statx *restrict s) {
    REAL(statx);
    char room[PATH_MAX];
    const char *where = below(d, p, room);
    return where && fails("statx", where) ? -1 : real(d, p, g, m, s);
}

ssize_t readlink(const char *restrict p, char *restrict b, size_t n) {
    REAL(readlink);
    char room[PATH_MAX];
    const char *where = below(AT_FDCWD, p, room);
    return where && fails("readlink", where) ? -1 : real(p, b, n);
}

#define FCNTL(name) \
    int name(int descriptor, int command, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, command); \
        void *argument = va_arg(more, void *); \
        va_end(more); \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK; \
        if (locks && is_ours(descriptor) && fails("fcntl", opened[descriptor])) return -1; \
        int result = real(descriptor, command, argument); \
        if ((command == F_DUPFD || command == F_DUPFD_CLOEXEC) && is_ours(descriptor)) \
            keep(result, opened[descriptor]); \
        return result; \
    }
FCNTL(fcntl)
FCNTL(fcntl64)
