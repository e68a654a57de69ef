/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into QEMU, so that a clone gives back memory that its guest has freed, and so that no two give their guests the same random
 * numbers.
 *
 * Random numbers: QEMU has them of GnuTLS, whose generator is seeded once. Processes that go on from one that was captured (native/restore.c)
 * would all draw the same: the guest's RDRAND and virtio-rng, in all siblings. So each comes from the kernel.
 *
 * Memory:
 * A clone's memory is private pages on a file that many use. QEMU gives pages back in two steps: it punches a hole into the file, which must
 * never happen here, and drops its private pages, which is what is wanted. For a file opened for reading only it does neither. So QEMU is told to
 * open the file for writing; where the kernel refuses that, which it does for every clone, it is opened for reading; and to punch a hole into a
 * file that is open for reading, which the kernel refuses as well, is said to have worked. Nothing rests on this library: without it, or
 * around it, the kernel still refuses both. What the guest finds in a page it has given back is what the template had there, and no zeros; that
 * is what free-page reporting allows.
 */

#define EBADF 9
#define O_ACCMODE 3
#define O_RDWR 2
#define AT_FDCWD (-100)
#define FALLOC_FL_PUNCH_HOLE 2

#if defined(__x86_64__)
enum { SYS_openat = 257, SYS_fallocate = 285, SYS_getrandom = 318 };
#elif defined(__aarch64__)
enum { SYS_openat = 56, SYS_fallocate = 47, SYS_getrandom = 278 };
#endif

#define EXPORTED __attribute__((visibility("default")))

extern int *__errno_location(void);

static long call(long number, long a, long b, long c, long d)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
#else
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c, x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
#endif
}

static int answer(long result)
{
    if (result >= 0)
        return (int)result;
    *__errno_location() = (int)-result;
    return -1;
}

static int is_ram(const char *path) { return path[0] == '/' && path[1] == 'r' && path[2] == 'a' && path[3] == 'm' && !path[4]; }

static int ram = -1; /* the descriptor of the memory, if it is open for reading only */

/* The mode is the third argument, there or not: what is not there is not looked at without O_CREAT. */
EXPORTED int open(const char *path, int flags, unsigned mode)
{
    long result = call(SYS_openat, AT_FDCWD, (long)path, flags, mode);

    if (result < 0 && (flags & O_ACCMODE) == O_RDWR && is_ram(path)) {
        result = call(SYS_openat, AT_FDCWD, (long)path, flags & ~O_ACCMODE, mode);
        ram = (int)result;
    }
    return answer(result);
}

EXPORTED int open64(const char *path, int flags, unsigned mode) { return open(path, flags, mode); }

EXPORTED int __open64_2(const char *path, int flags) { return open(path, flags, 0); }

EXPORTED int fallocate(int fd, int mode, long offset, long length)
{
    long result = call(SYS_fallocate, fd, mode, offset, length);

    return result == -EBADF && fd == ram && (mode & FALLOC_FL_PUNCH_HOLE) ? 0 : answer(result);
}

EXPORTED int fallocate64(int fd, int mode, long offset, long length) { return fallocate(fd, mode, offset, length); }

enum { EINTR = 4, GNUTLS_E_RANDOM_FAILED = -206 };

EXPORTED int gnutls_rnd(int level, void *data, unsigned long size)
{
    (void)level;
    for (char *at = data; size;) {
        long got = call(SYS_getrandom, (long)at, (long)size, 0, 0);

        if (got > 0) {
            at += got;
            size -= (unsigned long)got;
        } else if (got != -EINTR) {
            return GNUTLS_E_RANDOM_FAILED;
        }
    }
    return 0;
}
