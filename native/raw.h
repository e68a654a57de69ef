/* SPDX-License-Identifier: Apache-2.0
 *
 * System calls and the few helpers that programs without a C library need. Failures are negative errno values, as the kernel gives them.
 */
#ifndef RAW_H
#define RAW_H

#include <asm/errno.h>
#include <asm/fcntl.h>
#include <asm/poll.h>
#include <asm/signal.h>
#include <asm/stat.h>
#include <asm/statfs.h>
#include <asm/unistd.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <linux/time_types.h>

typedef unsigned char u8;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef unsigned long size_t;

#if defined(__x86_64__)
static inline long sys6(long n, long a, long b, long c, long d, long e, long f)
{
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
}
#elif defined(__aarch64__)
static inline long sys6(long n, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = n;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;
	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
}
#else
#error "raw.h: write the system call for this architecture"
#endif

#define L(x) ((long)(x))
#define SYS0(n) sys6(__NR_##n, 0, 0, 0, 0, 0, 0)
#define SYS1(n, a) sys6(__NR_##n, L(a), 0, 0, 0, 0, 0)
#define SYS2(n, a, b) sys6(__NR_##n, L(a), L(b), 0, 0, 0, 0)
#define SYS3(n, a, b, c) sys6(__NR_##n, L(a), L(b), L(c), 0, 0, 0)
#define SYS4(n, a, b, c, d) sys6(__NR_##n, L(a), L(b), L(c), L(d), 0, 0)
#define SYS5(n, a, b, c, d, e) sys6(__NR_##n, L(a), L(b), L(c), L(d), L(e), 0)
#define SYS6(n, a, b, c, d, e, f) sys6(__NR_##n, L(a), L(b), L(c), L(d), L(e), L(f))

enum {
	AT_CWD = -100,
	AT_EMPTY = 0x1000,
	AT_NOFOLLOW = 0x100,
	MSG_NOSIG = 0x4000,
	MSG_DONTBLOCK = 0x40,
	MSG_CLOEXEC_FDS = 0x40000000,
	MSG_CTRUNCATED = 0x8,
	MSG_TRUNCATED = 0x20,
	SOCKET_LEVEL = 1,
	PASSED_FDS = 1,
	MAX_PASSED = 8,
	MFD_CLOSE_ON_EXEC = 1,
	WAIT_NOHANG = 1,
	WAIT_ALL_KINDS = 0x40000000,
	LIMIT_CPU = 0,
	PROT_RW = 3,
	MAP_SHARED_ = 1,
	MAP_PRIVATE_ = 2,
	MAP_ANONYMOUS_ = 0x20,
	MAP_NORESERVE_ = 0x4000,
	UNMOUNT_DETACH = 2,
	REGULAR = 0100000,
	DIRECTORY = 0040000,
	KIND_MASK = 0170000,
};

struct iov {
	const void *base;
	size_t len;
};

struct message_header {
	void *name;
	int name_len;
	struct iov *iov;
	size_t iov_len;
	void *control;
	size_t control_len;
	int flags;
};

struct passed {
	size_t len;
	int level, type;
	int fds[MAX_PASSED];
};

#ifdef __x86_64__
#define ARCH 0xC000003E
#else
#define ARCH 0xC00000B7
#endif

/* What a member's supervisor tells its interpreter of a call (`dispatch` of call.h, forkin.c); then the call's text, if it is short.
 * Descriptors: the envelope's process 1, three for input and output, the value's page, the text. */
enum { HAS_VALUE = 1, HAS_BODY = 2 };

struct dispatch {
	u32 flags, len;
	u64 cpu_us, value_bytes;
	u64 key[2]; /* see `lock_setns` of calld.c */
};

/* The compiler may call these by itself. */
void *memcpy(void *to, const void *from, size_t len)
{
#ifdef __x86_64__
	void *result = to;
	__asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(len) : : "memory");
	return result;
#else
	u8 *t = to;
	const u8 *f = from;
	while (len--)
		*t++ = *f++;
	return to;
#endif
}

void *memset(void *to, int byte, size_t len)
{
	u8 *t = to;
	while (len--)
		*t++ = (u8)byte;
	return to;
}

static inline size_t length(const char *text)
{
	size_t n = 0;
	while (text[n])
		n++;
	return n;
}

static inline int same(const void *a, const void *b, size_t len)
{
	const u8 *x = a, *y = b;
	for (size_t i = 0; i < len; i++)
		if (x[i] != y[i])
			return 0;
	return 1;
}

static inline u64 now_us(void)
{
	struct __kernel_timespec time;
	SYS2(clock_gettime, 1 /* CLOCK_MONOTONIC */, &time);
	return (u64)time.tv_sec * 1000000 + (u64)time.tv_nsec / 1000;
}

/* Send the parts as one datagram, with descriptors. */
static inline long send_parts(int sock, struct iov *iov, size_t count, const int *fds, int n_fds, int flags)
{
	struct passed passed = { .len = 16 + 4 * (size_t)n_fds, .level = SOCKET_LEVEL, .type = PASSED_FDS };
	struct message_header header = { .iov = iov, .iov_len = count };
	for (int i = 0; i < n_fds; i++)
		passed.fds[i] = fds[i];
	if (n_fds) {
		header.control = &passed;
		header.control_len = (passed.len + 7) & ~7UL;
	}
	return SYS3(sendmsg, sock, &header, MSG_NOSIG | flags);
}

/* Receive one datagram. `fds` gets at most MAX_PASSED descriptors, `n_fds` how many. What is too large is -EMSGSIZE. */
static inline long receive(int sock, void *data, size_t size, int *fds, int *n_fds, int flags)
{
	struct passed passed = { .len = 0 };
	struct iov iov = { data, size };
	struct message_header header = { .iov = &iov, .iov_len = 1, .control = &passed, .control_len = sizeof(passed) };
	long got = SYS3(recvmsg, sock, &header, MSG_CLOEXEC_FDS | flags);
	*n_fds = 0;
	if (got < 0)
		return got;
	if (header.control_len >= 16 && passed.level == SOCKET_LEVEL && passed.type == PASSED_FDS)
		*n_fds = (int)((passed.len - 16) / 4);
	for (int i = 0; i < *n_fds; i++)
		fds[i] = passed.fds[i];
	if (header.flags & (MSG_TRUNCATED | MSG_CTRUNCATED)) {
		for (int i = 0; i < *n_fds; i++)
			SYS1(close, fds[i]);
		*n_fds = 0;
		return -EMSGSIZE;
	}
	return got;
}

/* Give up every capability for good: also those that a later exec, by root or of a file with privileges, could bring. */
static inline long drop_capabilities(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct none[2] = { { 0, 0, 0 }, { 0, 0, 0 } };
	long error = SYS5(prctl, PR_SET_SECUREBITS, SECURE_ALL_BITS | SECURE_ALL_LOCKS, 0, 0, 0);
	if (error < 0)
		return error;
	for (int number = 0; number < 64; number++)
		if (SYS5(prctl, PR_CAPBSET_DROP, number, 0, 0, 0) < 0)
			break; /* past the kernel's last */
	error = SYS2(capset, &header, none);
	return error < 0 ? error : SYS5(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}

static inline long load_filter(const void *program, size_t bytes)
{
	struct sock_fprog filter = { .len = (unsigned short)(bytes / 8), .filter = (struct sock_filter *)program };
	return SYS3(seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
}

/* Of all in the member a call is what the kernel kills for want of memory. A process may always make itself more likely. */
static inline long be_first_victim(void)
{
	int fd = (int)SYS4(openat, AT_CWD, "/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC, 0);
	long result = fd < 0 ? fd : SYS3(write, fd, "1000", 4);
	if (fd >= 0)
		SYS1(close, fd);
	return result;
}

static inline void limit_cpu(u64 us)
{
	/* A backstop: the supervisor counts the whole tree, and finer. */
	u64 limit[2] = { us / 1000000 + 2, us / 1000000 + 2 };
	SYS4(prlimit64, 0, LIMIT_CPU, limit, 0);
}

static inline __attribute__((noreturn)) void quit(int status)
{
	for (;;)
		SYS1(exit_group, status);
}

#endif
