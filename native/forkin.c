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
#include "source.h"

enum { JOINED = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS, BUFFER = 128 << 10 };

/* All of one size, so that the interpreter can read it as an array. */
struct forkin_call {
	u8 *buffer;	     /* given: BUFFER bytes */
	const char *workdir; /* given */
	long body_len;	     /* what is in the buffer behind the head */
	long body_fd;	     /* or -1 */
	u8 *value;
	u64 value_len;
	long elsewhere; /* the working directory cannot be entered */
	const struct python *python; /* given: with what to run plain calls here, or 0 */
};

static int fds[MAX_PASSED];
/* Shared with the child that shares our memory: nothing on the stack may be relied on after it ran. */
static volatile long forked;
static struct dispatch head;
static long filled; /* of the buffer, by the last call */

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
	limit_cpu(head.cpu_us);
	if ((result = drop_capabilities()) < 0)
		return result;
	SYS5(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0); /* as any process that was executed */
	call->elsewhere = SYS1(chdir, call->workdir);
	return 0;
}

/* The child that shares our memory. */
static __attribute__((noinline)) int in_between(int (*libc_fork)(void), struct forkin_call *call)
{
	long result;
	/* Here, since the call's own /proc is read-only; it is inherited. The entries in /proc of a process that cannot be dumped are nobody's. */
	SYS5(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
	result = be_first_victim();
	SYS5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	if (result >= 0)
		result = SYS4(setns, fds[0], JOINED, head.key[0], head.key[1]);
	/* No call sees the key. */
	memset(head.key, 0, sizeof(head.key));
	memset(call->buffer, 0, sizeof(head));
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

/* --- memory that is cheap to fork ------------------------------------------------------------------------------------ */

enum { PAGE = 4096, HUGE = 2 << 20, COLLAPSE = 25, MOVE = 3 /* MREMAP_MAYMOVE | MREMAP_FIXED */, PROT_RX = 5 };
enum { SMALL = 16 * PAGE, MOST = 256 << 20 };

static u64 take_hex(const char **at)
{
	u64 value = 0;
	for (;; (*at)++) {
		char c = **at;
		if (c >= '0' && c <= '9')
			value = value << 4 | (u64)(c - '0');
		else if (c >= 'a' && c <= 'f')
			value = value << 4 | (u64)(c - 'a' + 10);
		else
			return value;
	}
}

/* One huge page of our own, or 0. */
static u64 new_huge(void)
{
	long room = SYS6(mmap, 0, 2 * HUGE, PROT_RW, MAP_PRIVATE_ | MAP_ANONYMOUS_, -1, 0);
	if (room < 0 && room > -4096)
		return 0;
	u64 page = ((u64)room + HUGE - 1) & ~(u64)(HUGE - 1);
	SYS2(munmap, page + HUGE, (u64)room + HUGE - page);
	if (page > (u64)room)
		SYS2(munmap, room, page - (u64)room);
	*(volatile u8 *)page = 0;
	if (!SYS3(madvise, page, HUGE, COLLAPSE))
		return page;
	SYS2(munmap, page, HUGE);
	return 0;
}

static u64 stocked; /* bytes of huge pages made */

/* Have the same bytes at the same place, but in one huge page. */
static int make_huge(u64 start, int protection)
{
	u64 copy = stocked < MOST ? new_huge() : 0;
	if (!copy)
		return 0;
	memcpy((u8 *)copy, (const u8 *)start, HUGE);
	if ((protection != PROT_RW && SYS3(mprotect, copy, HUGE, protection)) || SYS5(mremap, copy, HUGE, HUGE, MOVE, start) < 0) {
		SYS2(munmap, copy, HUGE);
		return 0;
	}
	stocked += HUGE;
	return 1;
}

static u64 stock, stock_left; /* what is left of the last one */

/* The same in parts of huge pages, for what is no whole one. */
static void pack(u64 start, u64 len, int protection)
{
	while (len) {
		if (!stock_left) {
			if (stocked >= MOST || !(stock = new_huge()))
				return;
			stocked += stock_left = HUGE;
		}
		u64 part = len < stock_left ? len : stock_left;
		memcpy((u8 *)stock, (const u8 *)start, part);
		if ((protection != PROT_RW && SYS3(mprotect, stock, part, protection)) || SYS5(mremap, stock, part, part, MOVE, start) < 0)
			return;
		stock += part;
		stock_left -= part;
		start += part;
		len -= part;
	}
}

/* What is all there of a mapping: to touch the rest would be to make it. And of what is not written to, only what was once. */
static void pack_mapping(int pagemap, u64 start, u64 end, int writes)
{
	u64 present[HUGE / PAGE];
	int protection = writes ? PROT_RW : 1 /* PROT_READ */;
	for (u64 at = start, next; at < end; at = next) {
		next = (at & ~(u64)(HUGE - 1)) + HUGE;
		if (next > end)
			next = end;
		u64 len = next - at, n = 0;
		if (SYS4(pread64, pagemap, present, len / PAGE * 8, at / PAGE * 8) != (long)(len / PAGE * 8))
			return;
		for (u64 i = 0; i < len / PAGE; i++)
			n += present[i] >> 63 && (writes || !(present[i] >> 61 & 1) /* of a file */);
		if (n >= len / PAGE * 3 / 4 && !(len == HUGE && make_huge(at, protection)))
			pack(at, len, protection);
	}
}

/* What a fork does for each page, and its end again, the kernel does by the batch for pages that lie in one block of memory. And a fork
 * shares file mappings without copying their page tables: it faults each part in anew. So, before the first fork: the text around `inside`
 * is put into huge pages, as far as whole ones go, which are one entry each; and what was written so far into huge pages or parts of
 * them, at the addresses where it is, unless there are threads that could write to it meanwhile. */
__attribute__((visibility("default"))) void forkin_pack(u64 inside)
{
	static char text[65536];
	u64 run_start = 0, run_end = 0, inode_seen = 0;
	int has_text = 0;
	size_t have = 0;
	long got;
	struct stat tasks;
	int fd = (int)SYS4(openat, AT_CWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC, 0);
	int pagemap = (int)SYS4(openat, AT_CWD, "/proc/self/pagemap", O_RDONLY | O_CLOEXEC, 0);
	int alone = !SYS4(newfstatat, AT_CWD, "/proc/self/task", &tasks, 0) && tasks.st_nlink == 3;
	while (fd >= 0 && have < sizeof(text) - 1 && (got = SYS3(read, fd, text + have, sizeof(text) - 1 - have)) > 0)
		have += (size_t)got;
	SYS1(close, fd);
	text[have] = 0;
	for (const char *at = text; *at;) {
		u64 start = take_hex(&at);
		at++;
		u64 end = take_hex(&at), inode = 0;
		int reads = at[1] == 'r', writes = at[2] == 'w', runs = at[3] == 'x', private = at[4] == 'p', column = 0, special = 0;
		for (; *at && *at != '\n'; at++) {
			if (*at == ' ' && ++column == 4)
				while (at[1] >= '0' && at[1] <= '9')
					inode = inode * 10 + (u64)(*++at - '0');
			special |= *at == '[' && !same(at, "[heap]", 6); /* the stack, what is the kernel's */
		}
		at += *at == '\n';
		int fits = reads && !writes && inode;
		if (!fits || start != run_end || inode != inode_seen) {
			if (has_text && run_start <= inside && inside < run_end)
				for (u64 page = (run_start + HUGE - 1) & ~(u64)(HUGE - 1); page + HUGE <= run_end; page += HUGE)
					make_huge(page, PROT_RX);
			run_start = start;
			has_text = 0;
		}
		run_end = fits ? end : 0;
		inode_seen = inode;
		has_text |= fits && runs;
		/* What is read may as well be run (nothing more can be written by that): a library is two mappings so, and not five. A fork
		 * copies each, and its end takes each apart, which is 0.6 us. */
		if (has_text && private)
			SYS3(mprotect, run_start, end - run_start, PROT_RX);
		if (alone && pagemap >= 0 && reads && !runs && private && !special && end - start >= SMALL)
			pack_mapping(pagemap, start, end, writes);
	}
	if (pagemap >= 0)
		SYS1(close, pagemap);
	if (stock_left)
		SYS2(munmap, stock, stock_left);
}

/* In a fork: what is left to do of the call, and `call` is filled. In the interpreter itself: only when the supervisor is gone or talks
 * nonsense, a negative errno. */
__attribute__((visibility("default"))) long forkin_serve(int sock, int (*libc_fork)(void), void (*after_fork)(void), struct forkin_call *call)
{
	SYS5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	for (;;) {
		int count;
		long got = receive(sock, call->buffer, BUFFER, fds, &count, 0);
		if (got == -EINTR)
			continue;
		if (got < (long)sizeof(head))
			return got < 0 ? got : -EPIPE;
		if (got < filled)
			memset(call->buffer + got, 0, (size_t)(filled - got)); /* no call sees the one before */
		filled = got;
		memcpy(&head, call->buffer, sizeof(head));
		if (head.len != (u64)got - sizeof(head) || count < 4 + !!(head.flags & HAS_VALUE) + !!(head.flags & HAS_BODY))
			return -EPROTO;
		forked = 0;
		long child = SYS5(clone, CLONE_VM | CLONE_VFORK, 0, 0, 0, 0);
		if (child == 0) {
			in_between(libc_fork, call);
			if (settle(call) < 0)
				quit(125); /* nothing may run here half confined */
			call->body_len = head.len;
			after_fork();
			if (!call->python || call->body_fd >= 0 || call->elsewhere)
				return BY_PYTHON;
			return run_source(call->python, call->buffer + sizeof(head), call->body_len);
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
