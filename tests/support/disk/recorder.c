/* A shim for LD_PRELOAD that records what a process does to the files of one folder, in order, and
 * makes chosen calls fail.
 *
 *   DISK_FOLDER   whose files count (an absolute path)
 *   DISK_LOG      where the records go; others append marks of their own
 *   DISK_FAIL_AT  the number of the first call (write, truncate or sync) to fail; 0 or none: none
 *   DISK_FAIL_FOR how many calls fail from there on
 *   DISK_FAIL     "full" (ENOSPC on writes), "sync" (EIO on syncs)
 *
 * A record is: kind (one byte), length of the name (u16), name, offset (u64), length (u64), data.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static long calls = 0;

static const char *relative(int fd, char *path, size_t size) {
  static const char *folder;
  char link[64];
  ssize_t length;
  if (!folder && !(folder = getenv("DISK_FOLDER"))) return NULL;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  length = readlink(link, path, size - 1);
  if (length <= 0) return NULL;
  path[length] = 0;
  size_t prefix = strlen(folder);
  if (strncmp(path, folder, prefix) || path[prefix] != '/') return NULL;
  return path + prefix + 1;
}

static void record(char kind, const char *name, uint64_t offset, uint64_t length, const void *data) {
  uint16_t size = (uint16_t)strlen(name);
  struct iovec parts[] = {{&kind, 1},   {&size, 2},   {(void *)name, size},
                          {&offset, 8}, {&length, 8}, {(void *)data, data ? length : 0}};
  if (log_fd < 0) {
    const char *path = getenv("DISK_LOG");
    if (!path) return;
    log_fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  }
  if (writev(log_fd, parts, 6) < 0) abort(); /* a test must not believe half a log */
}

/* Whether this call is one of those that fail. */
static int fails(int is_sync) {
  const char *at = getenv("DISK_FAIL_AT"), *how = getenv("DISK_FAIL"), *span = getenv("DISK_FAIL_FOR");
  long number = ++calls;
  if (!at || !how || !atol(at)) return 0;
  if (number < atol(at) || number >= atol(at) + (span ? atol(span) : 1)) return 0;
  if (!strcmp(how, "full") && !is_sync) { errno = ENOSPC; return 1; }
  if (!strcmp(how, "sync") && is_sync) { errno = EIO; return 1; }
  return 0;
}

/* Writes and syncs of files whose names begin with DISK_SLOW take some milliseconds longer. */
static void linger(const char *name) {
  const char *slow = getenv("DISK_SLOW");
  if (slow && !strncmp(name, slow, strlen(slow))) usleep(30000);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRITE(fd, call, offset, data) \
  char path[PATH_MAX]; \
  const char *name = relative(fd, path, sizeof path); \
  if (!name) return call; \
  linger(name); \
  pthread_mutex_lock(&lock); \
  ssize_t done = fails(0) ? -1 : call; \
  int error = errno; \
  if (done > 0) record('W', name, (uint64_t)(offset), (uint64_t)done, data); \
  pthread_mutex_unlock(&lock); \
  errno = error; \
  return done

#define OTHER(fd, call, kind, is_sync, offset) \
  char path[PATH_MAX]; \
  const char *name = relative(fd, path, sizeof path); \
  if (!name) return call; \
  linger(name); \
  pthread_mutex_lock(&lock); \
  int done = fails(is_sync) ? -1 : call; \
  int error = errno; \
  if (!done) record(kind, name, (uint64_t)(offset), 0, NULL); \
  pthread_mutex_unlock(&lock); \
  errno = error; \
  return done

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  REAL(pwrite); WRITE(fd, real(fd, data, size, offset), offset, data);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  REAL(pwrite64); WRITE(fd, real(fd, data, size, offset), offset, data);
}
ssize_t write(int fd, const void *data, size_t size) {
  REAL(write); WRITE(fd, real(fd, data, size), lseek64(fd, 0, SEEK_CUR) - done, data);
}
int ftruncate(int fd, off_t size) { REAL(ftruncate); OTHER(fd, real(fd, size), 'T', 0, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); OTHER(fd, real(fd, size), 'T', 0, size); }
int fsync(int fd) { REAL(fsync); OTHER(fd, real(fd), 'S', 1, 0); }
int fdatasync(int fd) { REAL(fdatasync); OTHER(fd, real(fd), 'S', 1, 0); }

static void removed(const char *path) {
  const char *folder = getenv("DISK_FOLDER");
  size_t prefix = folder ? strlen(folder) : 0;
  if (!folder || strncmp(path, folder, prefix) || path[prefix] != '/') return;
  pthread_mutex_lock(&lock);
  record('U', path + prefix + 1, 0, 0, NULL);
  pthread_mutex_unlock(&lock);
}
int unlink(const char *path) {
  REAL(unlink);
  int done = real(path), error = errno;
  if (!done) removed(path);
  errno = error;
  return done;
}
