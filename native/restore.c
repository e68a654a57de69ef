/* SPDX-License-Identifier: Apache-2.0
 *
 * restore: becomes another process, as it once was: its memory, descriptors, signal handlers and threads (see runtime/vmm/checkpoint.py, which
 * writes the script that is followed here). It decides nothing: a script is a list of system calls with the results they must have, and
 * then of threads. It needs no right but those of the process it becomes, and keeps all that was taken from it before.
 *
 * Nothing of us may lie where something of the other process is to lie: we and the script are far below all that the kernel chooses itself.
 *
 * Exit status 71: the script is damaged, or the kernel refused a step; standard error says which.
 */
#include "raw.h"

#if !defined(__x86_64__)
#error "restore.c: registers and signal frames are those of x86-64"
#endif

#define SCRIPT 0x10000000UL
#define VDSO 0x0f000000UL /* kept here until it gets its place */
#define FLOOR 0x20000000UL /* above it all is given back */
#define CEILING 0x7ffffffff000UL
#define MAGIC 0x31524b5043455344UL /* "DSECPKR1" */

enum { EXACT, OK, DESCRIPTOR, FIRST_KEPT = 600, REFUSED = 71, MAX_PARTS = 4, STACK_WORDS = 512, MAX_THREADS = 64, VDSO_ADDRESS = 33, SET_FS = 0x1002 };
enum { THREAD_FLAGS = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID };

struct part {
	u64 offset, size; /* from the vDSO's beginning, modulo 2^64 */
};

struct header {
	u64 magic, sum; /* of all that follows */
	u64 size, calls, threads; /* offsets */
	u32 n_calls, n_threads, n_parts, reserved;
	struct part parts[MAX_PARTS];
};

struct step {
	u32 number, kind;
	u64 arguments[6];
	u64 expected;
};

struct thread {
	u64 frame, tls, tid, robust, robust_size, rseq, rseq_size, rseq_signature, number;
	char name[16];
};

static u64 stacks[MAX_THREADS][STACK_WORDS] __attribute__((aligned(16)));
static u64 own_stack[STACK_WORDS] __attribute__((aligned(16)));

static size_t put(char *text, size_t at, const char *more)
{
	while (*more)
		text[at++] = *more++;
	return at;
}

static size_t put_number(char *text, size_t at, u64 number)
{
	char digits[20];
	size_t n = 0;
	do
		digits[n++] = (char)('0' + number % 10);
	while (number /= 10);
	while (n)
		text[at++] = digits[--n];
	return at;
}

static __attribute__((noreturn)) void fail(const char *what, u64 number, long error)
{
	char text[128];
	size_t at = put_number(text, put(text, put(text, 0, "restore: "), what), number);
	if (error < 0)
		at = put_number(text, put(text, at, ": error "), (u64)-error);
	at = put(text, at, "\n");
	if (SYS3(write, 2, text, at) < 0)
		SYS3(write, FIRST_KEPT + 2, text, at); /* it is on its way */
	SYS1(exit_group, REFUSED);
	__builtin_unreachable();
}

/* The thread's own state, and on to where it was. */
static __attribute__((noreturn)) void go_on(const struct thread *t)
{
	long error = 0;
	if (t->robust)
		error = SYS2(set_robust_list, t->robust, t->robust_size);
	if (!error && t->rseq)
		error = SYS4(rseq, t->rseq, t->rseq_size, 0, t->rseq_signature);
	if (!error)
		error = SYS2(prctl, PR_SET_NAME, t->name);
	if (error)
		fail("thread ", t->number, error);
	__asm__ volatile("mov %0, %%rsp\n\tmov %1, %%eax\n\tsyscall" : : "r"(t->frame + 8), "i"(__NR_rt_sigreturn) : "memory");
	__builtin_unreachable();
}

/* A thread's number is the next one, and some have been used by threads that have ended. What has a number may be known by it (as the
 * owner of a mutex is), so all get theirs. One that uses up a number is waited for: many at once would be too many. */
static void use_number(void)
{
	long result;
	__asm__ volatile("syscall\n\ttest %%rax, %%rax\n\tjnz 1f\n\tmov %[exit], %%eax\n\txor %%edi, %%edi\n\tsyscall\n\t1:"
			 : "=a"(result)
			 : "a"(__NR_clone), "D"(CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_VFORK), "S"(0), [exit] "i"(__NR_exit)
			 : "rcx", "r11", "memory");
	if (result < 0)
		fail("number ", 0, result);
}

static void start(const struct thread *t, u64 *stack)
{
	long result;
	register long ctid __asm__("r10") = L(t->tid);
	register long tls __asm__("r8") = L(t->tls);
	register long entry __asm__("r12") = L(go_on);
	__asm__ volatile("syscall\n\ttest %%rax, %%rax\n\tjnz 1f\n\txor %%ebp, %%ebp\n\tmov %%rbx, %%rdi\n\tcall *%%r12\n\t1:"
			 : "=a"(result)
			 : "a"(__NR_clone), "D"(THREAD_FLAGS), "S"(stack + STACK_WORDS), "d"(t->tid), "r"(ctid), "r"(tls), "b"(t),
			   "r"(entry)
			 : "rcx", "r11", "memory");
	if (result != L(t->number))
		fail("thread ", t->number, result);
}

static u64 sum_of(const u64 *word, const u64 *end)
{
	u64 sum = 0xcbf29ce484222325;
	for (; word < end; word++)
		sum = (sum ^ *word) * 0x100000001b3;
	return sum;
}

static u64 number_in(const char *text)
{
	u64 value = 0;
	for (; *text >= '0' && *text <= '9'; text++)
		value = value * 10 + (u64)(*text - '0');
	return value;
}

static __attribute__((noreturn, used)) void follow(u64 vdso)
{
	const struct header *script = (const struct header *)SCRIPT;
	u64 to = VDSO;
	for (u32 i = 0; i < script->n_parts; i++) {
		const struct part *part = &script->parts[i];
		long moved = SYS5(mremap, vdso + part->offset, part->size, part->size, 3 /* move, to there */, to);
		if (moved != L(to))
			fail("part ", i, moved);
		to += part->size;
	}
	long error = SYS2(munmap, FLOOR, CEILING - FLOOR);
	if (error)
		fail("memory ", 0, error);
	const struct step *steps = (const struct step *)(SCRIPT + script->calls);
	for (u32 i = 0; i < script->n_calls; i++) {
		const struct step *s = &steps[i];
		const u64 *a = s->arguments;
		long result = sys6((long)s->number, L(a[0]), L(a[1]), L(a[2]), L(a[3]), L(a[4]), L(a[5]));
		if (s->kind == EXACT ? result != L(s->expected) : result < 0)
			fail("step ", i, result);
		if (s->kind == DESCRIPTOR && result != L(s->expected)) {
			long moved = SYS3(dup3, result, s->expected, 0);
			SYS1(close, result);
			if (moved < 0)
				fail("step ", i, moved);
		}
	}
	const struct thread *threads = (const struct thread *)(SCRIPT + script->threads);
	u64 number = (u64)SYS1(set_tid_address, threads[0].tid);
	if (number != threads[0].number)
		fail("thread ", threads[0].number, 0);
	for (u32 i = 1; i < script->n_threads; i++) {
		for (number++; number < threads[i].number; number++)
			use_number();
		start(&threads[i], stacks[i]);
	}
	error = SYS2(arch_prctl, SET_FS, threads[0].tls);
	if (error)
		fail("thread ", number, error);
	go_on(&threads[0]);
}

static __attribute__((noreturn, used)) void begin(u64 *stack)
{
	u64 argc = *stack++, vdso = 0, fd = 0;
	const char *const *env = (const char *const *)(stack + argc + 1);
	for (; *env; env++)
		if ((*env)[0] == 'S' && (*env)[1] == '=')
			fd = number_in(*env + 2);
	for (const u64 *auxiliary = (const u64 *)(env + 1); *auxiliary; auxiliary += 2)
		if (*auxiliary == VDSO_ADDRESS)
			vdso = auxiliary[1];
	struct header header = { .magic = 0 };
	long got = SYS4(pread64, fd, &header, sizeof(header), 0);
	if (got != (long)sizeof(header) || header.magic != MAGIC || header.n_parts > MAX_PARTS || !header.n_threads ||
	    header.n_threads > MAX_THREADS || SYS3(lseek, fd, 0, 2 /* its end */) != L(header.size))
		fail("no script, or not the whole: size ", header.size, got);
	long script = SYS6(mmap, SCRIPT, header.size, 1, MAP_PRIVATE_ | 0x100000 /* fixed, on nothing */, fd, 0);
	if (script != L(SCRIPT))
		fail("script ", 0, script);
	if (sum_of((const u64 *)SCRIPT + 2, (const u64 *)(SCRIPT + header.size)) != header.sum)
		fail("the script is damaged: sum ", header.sum, 0);
	SYS1(close, fd);
	/* The kernel's stack is given back. */
	__asm__ volatile("mov %0, %%rsp\n\tmov %1, %%rdi\n\txor %%ebp, %%ebp\n\tcall follow" : : "r"(own_stack + STACK_WORDS), "r"(vdso) : "memory");
	__builtin_unreachable();
}

__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall begin\n");
