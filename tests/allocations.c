/* Counts what a process asks the system for: preloaded, it sees every call of the C library's
 * allocators and of mmap that goes through the dynamic linker. Between `start` and `stop`, those of
 * `least` bytes and more are counted, and the first of them kept with the way that led there. */
#define _GNU_SOURCE
#include <errno.h>
#include <execinfo.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { KEPT = 256, DEPTH = 16 };

struct allocation {
    const char *call;
    size_t size;
    int n_frames;
    void *frames[DEPTH]; /* note, the allocator, its caller, ... */
};

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

static struct allocation kept[KEPT];
static atomic_long n_seen;
static atomic_size_t threshold; /* 0: not counting */
static _Thread_local int is_inside;

static void note(const char *call, size_t size) {
    size_t least = atomic_load_explicit(&threshold, memory_order_relaxed);
    if (!least || size < least || is_inside)
        return;
    is_inside = 1; /* backtrace may allocate */
    long n = atomic_fetch_add(&n_seen, 1);
    if (n < KEPT) {
        kept[n].call = call;
        kept[n].size = size;
        kept[n].n_frames = backtrace(kept[n].frames, DEPTH);
    }
    is_inside = 0;
}

void allocations_start(size_t least) {
    void *frames[DEPTH];
    backtrace(frames, DEPTH); /* its first call loads a library */
    atomic_store(&n_seen, 0);
    atomic_store(&threshold, least);
}

void allocations_stop(void) { atomic_store(&threshold, 0); }

long allocations_count(void) { return atomic_load(&n_seen); }

/* NULL if so many were not kept. */
const struct allocation *allocations_get(long n) {
    return n < KEPT && n < atomic_load(&n_seen) ? &kept[n] : NULL;
}

void *malloc(size_t size) {
    note("malloc", size);
    return __libc_malloc(size);
}

void *calloc(size_t n, size_t size) {
    note("calloc", n * size);
    return __libc_calloc(n, size);
}

void *realloc(void *old, size_t size) {
    if (!old || malloc_usable_size(old) < size)
        note("realloc", size);
    return __libc_realloc(old, size);
}

void *memalign(size_t alignment, size_t size) {
    note("memalign", size);
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) {
    note("aligned_alloc", size);
    return __libc_memalign(alignment, size);
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    note("posix_memalign", size);
    void *found = __libc_memalign(alignment, size);
    if (!found)
        return ENOMEM;
    *out = found;
    return 0;
}

void *mmap(void *at, size_t size, int prot, int flags, int fd, off_t offset) {
    note("mmap", size);
    return (void *)syscall(SYS_mmap, at, size, prot, flags, fd, offset);
}

void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));
