/* SPDX-License-Identifier: Apache-2.0
 *
 * forkin: loaded by a member's warm interpreter, to fork it into the namespaces of a call.
 *
 * forkin_serve() is the interpreter's last call. It waits for calls on the supervisor's channel and forks for each; only the forks return
 * to Python. Between calls the interpreter runs no bytecode, so its pages stay as they were and are shared with every call.
 *
 * A process cannot move into another pid namespace, only its children can, and a user namespace takes no process with threads. So a child
 * that shares our memory (as vfork's does: nothing is copied) joins the namespaces and makes the one copy of the address space there, by
 * the C library's own fork(): what that does for locks, thread ids and pthread_atfork() handlers is done as ever. Then it exits, and the
 * copy is an orphan that falls to process 1 of the member, the supervisor, which alone can wait for it.
 *
 * The interpreter has no capabilities. It is let into the call's user namespace because it has the uid that owns it; for as long as the
 * code below takes, the copy has all capabilities in there, and then none, for good.
 *
 * No C library is linked, so this works with any.
 */
#include "raw.h"

enum { JOINED = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS, BUFFER = 128 << 10 };

struct forkin_call {
	const u8 *body; /* in the buffer */
	u64 body_len;
	int body_fd; /* or -1 */
	u8 *value;
	u64 value_len;
	int problem;
};

static u8 buffer[BUFFER];
static int fds[MAX_PASSED];
/* Shared with the child that shares our memory: nothing on the stack may be relied on after it ran. */
static volatile long forked;
static struct dispatch head;

#ifdef __x86_64__
#define ARCH 0xC000003E
#else
#define ARCH 0xC00000B7
#endif

/* The interpreter's own filter lets setns(2) through, which calls have no use for. Everything else that filter has decided already. */
static const struct sock_filter no_setns[] = {
	{ 0x20, 0, 0, 4 },			/* load the architecture */
	{ 0x15, 0, 3, ARCH },
	{ 0x20, 0, 0, 0 },			/* load the number */
	{ 0x15, 0, 1, __NR_setns },
	{ 0x06, 0, 0, 0x00050000 | EPERM },
	{ 0x06, 0, 0, 0x7FFF0000 },		/* allow */
};

void *memcpy(void *to, const void *from, size_t len)
{
	u8 *t = to;
	const u8 *f = from;
	while (len--)
		*t++ = *f++;
	return to;
}

void *memset(void *to, int byte, size_t len)
{
	u8 *t = to;
	while (len--)
		*t++ = (u8)byte;
	return to;
}

/* In the copy: descriptors, limits, and the end of all privilege. */
static long settle(struct forkin_call *call)
{
	int has_value = (head.flags & HAS_VALUE) != 0, has_body = (head.flags & HAS_BODY) != 0;
	long result;

	SYS0(setsid);
	call->value = 0;
	call->value_len = 0;
	if (has_value) {
		result = SYS6(mmap, 0, head.value_bytes, PROT_RW, MAP_SHARED_, fds[4], 0);
		if (result < 0 && result > -4096)
			return result;
		call->value = (u8 *)result;
		call->value_len = head.value_bytes;
	}
	/* All that came are above 2: the supervisor's message arrived with 0 to 2 in use. */
	for (int i = 0; i < 3; i++)
		if ((result = SYS3(dup3, fds[1 + i], i, 0)) < 0)
			return result;
	call->body_fd = -1;
	if (has_body) {
		int from = fds[4 + has_value];
		call->body_fd = 3;
		if (from != 3 && (result = SYS3(dup3, from, 3, O_CLOEXEC)) < 0)
			return result;
	}
	if ((result = SYS3(close_range, 3 + has_body, ~0U, 0)) < 0)
		return result;
	/* The entries in /proc of a process that cannot be dumped are nobody's in here. */
	SYS5(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
	if ((result = be_first_victim()) < 0)
		return result;
	limit_cpu(head.cpu_us);
	if ((result = drop_capabilities()) < 0)
		return result;
	SYS5(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0); /* as any process that was executed */
	return load_filter(no_setns, sizeof(no_setns));
}

/* The child that shares our memory. */
static __attribute__((noinline)) int in_between(int (*libc_fork)(void))
{
	long result = SYS2(setns, fds[0], JOINED);
	if (result < 0) {
		forked = result;
		SYS1(exit, 0);
	}
	result = libc_fork();
	if (result == 0)
		return 0;
	forked = result < 0 ? -EAGAIN : result;
	for (;;)
		SYS1(exit, 0);
}

/* In a fork: 0, and `call` is filled. In the interpreter itself: only when the supervisor is gone or talks nonsense, a negative errno. */
__attribute__((visibility("default"))) long forkin_serve(int sock, int (*libc_fork)(void), void (*after_fork)(void), struct forkin_call *call)
{
	SYS5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	for (;;) {
		int count;
		long got = receive(sock, buffer, sizeof(buffer), fds, &count, 0);
		if (got == -EINTR)
			continue;
		if (got < (long)sizeof(head))
			return got < 0 ? got : -EPIPE;
		memcpy(&head, buffer, sizeof(head));
		if (head.len != (u64)got - sizeof(head) || count < 4 + !!(head.flags & HAS_VALUE) + !!(head.flags & HAS_BODY))
			return -EPROTO;
		forked = 0;
		long child = SYS5(clone, CLONE_VM | CLONE_VFORK, 0, 0, 0, 0);
		if (child == 0) {
			in_between(libc_fork);
			call->problem = (int)settle(call);
			if (call->problem < 0)
				quit(125); /* nothing may run here half confined */
			call->body = buffer + sizeof(head);
			call->body_len = head.len;
			after_fork();
			return 0;
		}
		if (child > 0)
			SYS4(wait4, child, 0, WAIT_ALL_KINDS, 0);
		else
			forked = child;
		SYS5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0); /* joining a user namespace may have reset it, in the memory shared */
		for (int i = 0; i < count; i++)
			SYS1(close, fds[i]);
		i32 answer = (i32)forked;
		struct iov iov = { &answer, sizeof(answer) };
		if (send_parts(sock, &iov, 1, 0, 0, 0) < 0)
			return -EPIPE;
	}
}
