/* SPDX-License-Identifier: Apache-2.0
 *
 * init: process 1 of a container. It holds the pid namespace open, sees to it that no zombie stays, and does nothing else.
 *
 * Ten thousand of these run on one machine, so it is made to cost the host as little as a process can:
 *
 *   - Reaping is left to the kernel. With SIGCHLD set to SIG_IGN a child that ends is released at once, and so is an
 *     orphan that is handed to us, alive or dead. No wake-up, no loop; it works even while this process is frozen or stopped.
 *     (A wait4() loop does the same with a context switch for every orphan.)
 *   - It needs no libc, no data and, once set up, no stack: it gives all of its address space back but the one page of code.
 *     That page is shared by every container through the page cache. Saved: the stack and, mainly, its page tables.
 *
 * Signals are unblocked and left at their default: the kernel drops whatever is sent to a process 1 without a handler,
 * except SIGKILL and SIGSTOP from outside the namespace. Blocking them instead would let a sandbox fill our queue.
 *
 * Exit status: never, once it runs. 64: not process 1. 71: the kernel refused a step without which it must not run.
 */
#include <asm/signal.h>
#include <asm/unistd.h>
#include <linux/prctl.h>

enum { NOT_INIT = 64, REFUSED = 71 };

#if defined(__x86_64__)
#define TASK_SIZE 0x7ffffffff000UL
static inline long call(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
	return result;
}
#elif defined(__aarch64__)
#define TASK_SIZE 0x1000000000000UL
static inline long call(long number, long a, long b, long c, long d)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
	return x0;
}
#else
#error "init.c: write the system call for this architecture"
#endif

/* Give back everything above our code, then sleep for good. From the first instruction on there is no stack: hence one
 * piece of assembly. Where the kernel has sealed a mapping in that range, munmap() fails as a whole and we keep it all. */
static inline __attribute__((noreturn)) void drop_memory_and_sleep(unsigned long from)
{
#if defined(__x86_64__)
	__asm__ volatile(
		"syscall\n"
		"1: xorl %%edi, %%edi; xorl %%esi, %%esi; xorl %%edx, %%edx; xorl %%r10d, %%r10d\n"
		"movl %2, %%eax; syscall; jmp 1b"
		: : "a"(__NR_munmap), "D"(from), "i"(__NR_ppoll), "S"(TASK_SIZE - from) : "rcx", "rdx", "r10", "r11", "memory");
#else
	register long x8 __asm__("x8") = __NR_munmap;
	register long x0 __asm__("x0") = from;
	register long x1 __asm__("x1") = TASK_SIZE - from;
	__asm__ volatile(
		"svc #0\n"
		"1: mov x0, xzr; mov x1, xzr; mov x2, xzr; mov x3, xzr\n"
		"mov x8, %3; svc #0; b 1b"
		: "+r"(x8), "+r"(x0), "+r"(x1) : "i"(__NR_ppoll) : "x2", "x3", "memory");
#endif
	__builtin_unreachable();
}

static inline __attribute__((noreturn)) void quit(int status)
{
	for (;;)
		call(__NR_exit_group, status, 0, 0, 0);
}

extern const char _end[]; /* set by the linker: the end of what it placed */

__attribute__((noreturn)) void _start(void)
{
	/* The kernel's own struct: handler, flags, restorer, mask. */
	const unsigned long ignore[4] = { (unsigned long)SIG_IGN };
	const unsigned long nothing = 0;

	if (call(__NR_getpid, 0, 0, 0, 0) != 1)
		quit(NOT_INIT);
	if (call(__NR_rt_sigaction, SIGCHLD, (long)ignore, 0, sizeof(nothing)) < 0)
		quit(REFUSED);
	call(__NR_rt_sigprocmask, SIG_SETMASK, (long)&nothing, 0, sizeof(nothing));
	/* Not traceable from inside: ending process 1 ends the sandbox, and that must not be the sandbox's own choice. */
	if (call(__NR_prctl, PR_SET_DUMPABLE, 0, 0, 0) < 0)
		quit(REFUSED);
	call(__NR_prctl, PR_SET_NAME, (long)"init", 0, 0);
	/* Whatever the spawner left open must not be reachable through /proc/1/fd. One of them is the channel whose end tells the
	 * spawner that we are ready: so this comes after all that anybody could see of us. */
	if (call(__NR_close_range, 0, ~0U, 0, 0) < 0)
		quit(REFUSED);

	const unsigned long page = 0x10000; /* the largest page size of either architecture */
	drop_memory_and_sleep(((unsigned long)_end + page - 1) & ~(page - 1));
}
