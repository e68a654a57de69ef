/* SPDX-License-Identifier: Apache-2.0
 *
 * calld: process 1 of a member, the sandbox that serves function calls. See docs/adr/0012-function-calls.md.
 *
 *     edge ──socket──▶ calld ──socket──▶ interpreter (warm, unprivileged), forks itself into envelopes by forkin.c
 *                        └─forks─▶ envelope (envelope.h): the namespaces of one call and their process 1
 *
 * One call at a time. For each there is an envelope, made ahead of demand. The call's first process is a fork of the interpreter, or a
 * program that the envelope executes. calld holds the far ends of its output, watches its limits, waits for it itself (the interpreter's
 * word counts for nothing but a process number, which must be a child of ours), and has the envelope end: then all is gone.
 *
 * It is started by kernel/enter.py as root of the member's user namespace, with descriptors 3 (to be closed when it is ready), 4 (the
 * edge), 5 (the calls' user namespace, below ours and owned by the calls' user), 6 to 10 (files of the member's control groups: CPU time,
 * memory in use, its peak, OOM kills, refused forks), and with the user as arguments. Its program cannot be read, so nothing in the
 * member can trace it. If the edge goes away, so does the member.
 *
 * Messages are a `head`, then a body, in one datagram or in a memfd beside it. Little-endian, see runtime/fncall/wire.py.
 */
#include "envelope.h"

enum { MAGIC = 0x31434644, SETUP = 1, JOB = 2, CANCEL = 3, READY = 16, FAILED = 17, ENDED = 18, IN_MEMFD = 1 };
enum { CHANNEL = 3, EDGE = 4, CALLS_NS = 5, CPU_TIME = 6, MEMORY = 7, MEMORY_PEAK = 8, OOM_KILLS = 9, PIDS_DENIED = 10 };
enum { ENVELOPE_FLAGS = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUTS }; /* it makes the one for IPC itself, for each call */
enum { INLINE_BYTES = 60 << 10, STEP_US = 30000000, DEATH_US = 20000000, QUIET_US = 4000, INTERPRETER_PID = 32000, CAPTURE = 8192 };
enum {
	STARTED = 1, WALL = 2, CPU = 4, OOM = 8, OUTPUT = 16, PIDS = 32, DISK = 64, CALLERS_FAULT = 128, CANCELLED = 256, HAS_VALUE_ = 512
};

struct head {
	u32 magic, type, flags, len;
};

struct ended {
	u32 flags;
	i32 status;
	u64 cpu_us, wall_us, peak, stdout_total, stderr_total;
	u64 stdout_len, stderr_len, value_len, files_len, problem_len, reason_len, spoiled_len;
	u32 n_files, reserved;
};

struct stream {
	int fd; /* -1 once at its end */
	u8 *data;
	u64 len, total;
};

static u8 *inbox; /* shared with envelopes */
static int interpreter = -1; /* its channel */
static i32 interpreter_pid = -1;
static int signals;
static int victim; /* its own oom_score_adj */
static char victim_before[16];
static u64 key[2];
static int sockets = -1; /* where it says how many there are in the member */
static u64 sockets_at_rest;

static struct {
	i32 pid;
	int pidfd;
	int sock;
	u64 disk_bytes;
	int rooted;
	int dead;
	struct report report;
	int told; /* a report has come that nobody has looked at */
	int awaited; /* somebody waits for a report */
} env;

static struct {
	int busy;
	struct ended ended;
	struct job job;
	struct stream out[2];
	i32 pid;
	int over; /* its first process was reaped */
	u64 started_us, cpu_start_us, limit_wall_us;
	int dispatched; /* the interpreter was told to fork */
	i32 answer;
	int answered;
	int killed;
	int cancelled;
	int again; /* the envelope may stay */
	int starved; /* of memory for what it said */
	const char *reason, *spoiled;
	char reason_text[512];
	i32 reaped[16], reaped_status[16];
	u32 n_reaped;
} call;

static u8 *buffers;
static u64 buffers_size;

static void *map(u64 len, int flags)
{
	long at = SYS6(mmap, 0, len, PROT_RW, flags | MAP_ANONYMOUS_, -1, 0);
	if (at < 0 && at > -4096)
		quit(72);
	return (void *)at;
}

/* --- readings -------------------------------------------------------------------------------------------------------- */

/* The number after `key` in a file of a control group, or its first number if `key` is empty. */
static u64 reading(int fd, const char *key)
{
	char text[1024];
	long got = SYS4(pread64, fd, text, sizeof(text) - 1, 0);
	u64 value = 0;
	size_t n = length(key);
	if (got <= 0)
		return 0;
	text[got] = 0;
	for (char *line = text; *line;) {
		if (!n || (same(line, key, n) && line[n] == ' ')) {
			for (char *c = line + n + (n > 0); *c >= '0' && *c <= '9'; c++)
				value = value * 10 + (u64)(*c - '0');
			return value;
		}
		while (*line && *line != '\n')
			line++;
		line += *line == '\n';
	}
	return 0;
}

static int cpu_is_v1;

static u64 cpu_us(void)
{
	return cpu_is_v1 ? reading(CPU_TIME, "") / 1000 : reading(CPU_TIME, "usage_usec");
}

static u64 count_sockets(void)
{
	return reading(sockets, "sockets: used");
}

static u64 oom_kills_before, pids_denied_before, memory_before;

/* --- to the edge ----------------------------------------------------------------------------------------------------- */

/* The parts make one message. Parts may be large, so more than fits in a datagram goes by memfd. -1: there is no memory for that. */
static int tell_edge(u32 type, struct iov *parts, size_t count)
{
	struct head head = { MAGIC, type, 0, 0 };
	struct iov iov[12] = { { &head, sizeof(head) } };
	u64 len = 0;
	int fd = -1;
	for (size_t i = 0; i < count; i++) {
		iov[1 + i] = parts[i];
		len += parts[i].len;
	}
	head.len = (u32)len;
	if (len > INLINE_BYTES) {
		head.flags = IN_MEMFD;
		fd = (int)SYS2(memfd_create, "answer", MFD_CLOSE_ON_EXEC);
		for (size_t i = 0; i < count; i++)
			if (fd < 0 || write_all(fd, parts[i].base, parts[i].len)) {
				if (fd >= 0)
					SYS1(close, fd);
				return -1;
			}
		count = 0;
	}
	if (send_parts(EDGE, iov, 1 + count, &fd, fd >= 0, 0) < 0)
		quit(74);
	if (fd >= 0)
		SYS1(close, fd);
	return 0;
}

/* --- what happens ---------------------------------------------------------------------------------------------------- */

static void kill_envelope(void)
{
	if (env.pid > 0 && !env.dead)
		SYS2(kill, env.pid, SIGKILL);
}

/* End the call's processes, whatever they are at. The envelope is left to bring back what it may. */
static void finish(void)
{
	struct go go = { 0, 0, 0, 0 };
	struct iov iov = { &go, sizeof(go) };
	if (call.killed)
		return;
	call.killed = 1;
	/* After a call of the plainest kind the envelope may stay, if nobody is in it. Its first process is gone: nothing more can enter. */
	if (call.over && call.ended.flags == STARTED && call.job.kind == KIND_PYTHON && !call.job.n_files && !call.job.n_outputs)
		go.flags = call.again = GO_AGAIN;
	if (env.dead || send_parts(env.sock, &iov, 1, 0, 0, MSG_DONTBLOCK) < 0)
		kill_envelope();
}

static void drain(int which)
{
	struct stream *s = &call.out[which];
	u8 scrap[65536];
	while (s->fd >= 0) {
		u64 room = call.job.output_bytes - s->len;
		long got = room ? SYS3(read, s->fd, s->data + s->len, room) : SYS3(read, s->fd, scrap, sizeof(scrap));
		if (got == -EAGAIN || got == -EINTR)
			return;
		if (got < 0) /* no memory to read it into */
			call.starved = 1;
		if (got <= 0) {
			SYS1(close, s->fd);
			s->fd = -1;
			return;
		}
		s->total += (u64)got;
		if (room)
			s->len += (u64)got;
		else {
			call.ended.flags |= OUTPUT;
			finish();
			if (s->total > call.job.output_bytes + (8 << 20))
				return; /* what a flood leaves in the pipe is nobody's */
		}
	}
}

static void main_ended(i32 status)
{
	if (call.over)
		return;
	call.over = 1;
	call.ended.status = status;
	call.ended.wall_us = now_us() - call.started_us;
	call.ended.cpu_us = cpu_us() - call.cpu_start_us;
	finish();
}

static const char *explain_error(const char *what, i32 error)
{
	put_number(put(put(call.reason_text, what), ": error "), (u64)(error < 0 ? -error : error));
	return call.reason_text;
}

/* What the interpreter says of a fork: a number, which counts only if it is that of a child of ours. */
static void hear_interpreter(void)
{
	int fds[MAX_PASSED], n_fds;
	long got = receive(interpreter, &call.answer, sizeof(call.answer), fds, &n_fds, MSG_DONTBLOCK);
	for (int i = 0; i < n_fds; i++)
		SYS1(close, fds[i]);
	if (got == -EAGAIN)
		return;
	call.answered = 1;
	if (got != sizeof(call.answer))
		call.spoiled = call.reason = got <= 0 ? "its interpreter ended" : "its interpreter broke the protocol";
	else if (call.answer <= 1 || call.answer == env.pid || call.answer == interpreter_pid)
		call.reason = explain_error("the interpreter cannot fork", call.answer);
	else {
		call.pid = call.answer;
		call.ended.flags |= STARTED;
		for (u32 i = 0; i < call.n_reaped; i++)
			if (call.reaped[i] == call.pid)
				main_ended(call.reaped_status[i]);
	}
}

static void reap(void)
{
	i32 status;
	long pid;
	while ((pid = SYS4(wait4, -1, &status, WAIT_NOHANG | WAIT_ALL_KINDS, 0)) > 0) {
		if (pid == env.pid)
			env.dead = 1;
		else if (pid == interpreter_pid) {
			interpreter_pid = -1;
			call.spoiled = "its interpreter ended";
		} else if (call.busy && pid == call.pid)
			main_ended(status);
		else if (call.dispatched && !call.pid && call.n_reaped < 16) {
			/* Perhaps the call: we have not heard its number from the interpreter yet. */
			call.reaped[call.n_reaped] = (i32)pid;
			call.reaped_status[call.n_reaped++] = status;
		}
	}
	if (call.n_reaped && !call.answered)
		hear_interpreter();
}

static int hear_envelope(void)
{
	int fds[MAX_PASSED], n_fds;
	struct report report = { 0 };
	long got = receive(env.sock, &report, sizeof(report), fds, &n_fds, MSG_DONTBLOCK);
	if (got < (long)(sizeof(report) - PROBLEM_BYTES))
		return 0;
	if (report.what == 'R') {
		env.rooted = 1;
	}
	for (int i = 0; i < n_fds; i++)
		SYS1(close, fds[i]);
	if (report.what == 'E') {
		if (call.busy && call.job.kind == KIND_EXEC && report.pid == call.pid)
			main_ended(report.status);
		return 1;
	}
	env.report = report;
	return env.told = 1;
}

/* Of the edge during a call only a cancellation can come, or its end. */
static void hear_edge(void)
{
	struct head head;
	int fds[MAX_PASSED], n_fds;
	long got = receive(EDGE, &head, sizeof(head), fds, &n_fds, MSG_DONTBLOCK);
	if (got == -EAGAIN)
		return;
	if (got != sizeof(head) || head.magic != MAGIC || head.type != CANCEL)
		quit(0);
	if (call.busy) {
		call.cancelled = 1;
		call.ended.flags |= CANCELLED;
		finish();
	}
}

/* Wait for something to happen, at most until `until_us`, and see to it.
 *
 * Each wake-up costs some 5 us, so a call that ends within its first QUIET_US has one, for its end: what it writes stays in the pipes, and
 * the interpreter's answer in its channel, until then. That is the case of most calls. */
static void turn(u64 until_us)
{
	struct pollfd polled[6];
	u64 now = now_us(), quiet_until = call.started_us + QUIET_US;
	int quiet = call.busy && !call.killed && call.job.kind == KIND_PYTHON && now < quiet_until;
	if (quiet && quiet_until < until_us)
		until_us = quiet_until;
	u64 wait = until_us > now ? until_us - now : 0;
	struct __kernel_timespec timeout;
	u8 scrap[128 * 8];
	int n = 2, out[2] = { -1, -1 }, at_env = -1, at_interpreter = -1;

	/* Between calls the next job stays where it is. */
	polled[0] = (struct pollfd){ .fd = EDGE, .events = call.busy ? POLLIN : 0 };
	polled[1] = (struct pollfd){ .fd = signals, .events = POLLIN };
	if (env.pid > 0 && !env.dead && (env.awaited || (call.busy && call.job.kind == KIND_EXEC))) {
		at_env = n;
		polled[n++] = (struct pollfd){ .fd = env.sock, .events = POLLIN };
	}
	if (call.dispatched && !call.answered && (!quiet || call.n_reaped)) {
		at_interpreter = n;
		polled[n++] = (struct pollfd){ .fd = interpreter, .events = POLLIN };
	}
	for (int i = 0; i < 2 && call.busy && !quiet && !call.killed; i++)
		if (call.out[i].fd >= 0) {
			out[i] = n;
			polled[n++] = (struct pollfd){ .fd = call.out[i].fd, .events = POLLIN };
		}
	timeout.tv_sec = (long long)(wait / 1000000);
	timeout.tv_nsec = (long long)(wait % 1000000 * 1000);
	if (SYS5(ppoll, polled, n, &timeout, 0, 0) <= 0)
		return;
	for (int i = 0; i < 2; i++)
		if (out[i] >= 0 && polled[out[i]].revents)
			drain(i);
	if (at_env >= 0 && polled[at_env].revents)
		hear_envelope();
	if (at_interpreter >= 0 && polled[at_interpreter].revents)
		hear_interpreter();
	if (polled[1].revents) {
		SYS3(read, signals, scrap, sizeof(scrap));
		reap();
	}
	if (polled[0].revents && (call.busy || polled[0].revents & (POLLHUP | POLLERR)))
		hear_edge();
}

/* --- envelopes ------------------------------------------------------------------------------------------------------- */

static int envelope_socks[2];

/* Begin to make one. It need not be ready when this returns. */
static void make_envelope(u64 disk_bytes)
{
	struct clone_args args = { .flags = ENVELOPE_FLAGS, .exit_signal = SIGCHLD };
	static struct report scrap;
	int fds[MAX_PASSED], n_fds;
	for (int end = 0; end < 2; end++)
		while (receive(envelope_socks[end], &scrap, sizeof(scrap), fds, &n_fds, MSG_DONTBLOCK) >= 0)
			for (int i = 0; i < n_fds; i++)
				SYS1(close, fds[i]);
	env.sock = envelope_socks[0];
	env.disk_bytes = disk_bytes;
	env.rooted = env.dead = env.told = 0;
	/* Where memory runs out something of the call is killed, whatever holds the memory: the largest of its processes, and when they all
	 * are small then the envelope, and its files go with it. Never the supervisor or its interpreter, so nothing in there may take that
	 * back: /proc is read-only. It inherits it from us, since to open the file in each costs 15 us. */
	SYS3(write, victim, "1000", 4);
	long pid = SYS2(clone3, &args, sizeof(args));
	if (pid)
		SYS3(write, victim, victim_before, length(victim_before));
	if (pid == 0)
		envelope(envelope_socks[1], disk_bytes, inbox + sizeof(struct head));
	env.pid = (i32)pid;
	if (pid < 0)
		env.dead = 1;
	else
		env.pidfd = (int)SYS2(pidfd_open, pid, 0);
}

/* Wait until the envelope has said `what`, or has died. */
static int await_report(u64 deadline)
{
	env.awaited = 1;
	while (!env.told && !env.dead && now_us() < deadline)
		turn(deadline);
	env.awaited = 0;
	if (!env.told && env.pid > 0)
		hear_envelope(); /* said, and died of it */
	int told = env.told;
	env.told = 0;
	return told;
}

static int bury_envelope(void)
{
	u64 deadline = now_us() + DEATH_US;
	while (env.pid > 0 && !env.dead && now_us() < deadline) {
		turn(deadline);
		reap();
	}
	if (env.pid > 0 && !env.dead) {
		kill_envelope();
		deadline += DEATH_US;
		while (!env.dead && now_us() < deadline)
			turn(deadline);
	}
	if (!env.dead)
		return 0;
	if (env.pid > 0 && env.pidfd >= 0)
		SYS1(close, env.pidfd);
	env.pid = 0;
	return 1;
}

static const char *explain(const char *what, i32 error)
{
	char *at = put(put(call.reason_text, what), ": ");
	size_t n = env.report.problem_len < PROBLEM_BYTES ? env.report.problem_len : PROBLEM_BYTES - 1;
	memcpy(at, env.report.problem, n);
	put_number(put(at + n, n ? ": error " : "error "), (u64)(error < 0 ? -error : error));
	return call.reason_text;
}

/* An envelope with this much disk, ready. */
static int have_envelope(u64 disk_bytes)
{
	if (env.pid > 0 && (env.disk_bytes != disk_bytes || env.dead)) {
		kill_envelope();
		if (!bury_envelope()) {
			call.spoiled = "an unused envelope does not end";
			return 0;
		}
	}
	if (env.pid <= 0)
		make_envelope(disk_bytes);
	if (env.pid <= 0) {
		env.report.problem_len = 0;
		call.reason = explain("cannot make the call's namespaces", env.pid);
		env.pid = 0;
		return 0;
	}
	if (!env.rooted)
		await_report(now_us() + STEP_US);
	env.told = 0;
	if (!env.rooted || env.report.error) {
		call.reason = explain("cannot make the call's file system", env.report.error);
		kill_envelope();
		bury_envelope();
		return 0;
	}
	return 1;
}

#include "call.h"

/* --- the start ------------------------------------------------------------------------------------------------------- */

static char *number_of(char *text, u32 *value)
{
	u32 n = 0;
	for (; *text >= '0' && *text <= '9'; text++)
		n = n * 10 + (u32)(*text - '0');
	*value = n;
	return text;
}

static void fail(const char *why, const u8 *text, size_t len)
{
	struct iov parts[2] = { { why, length(why) }, { text, len } };
	tell_edge(FAILED, parts, 2);
	quit(70);
}

/* The interpreter has to call setns(2), by forkin.c, and no call may. So it is allowed to whoever gives this key besides, as arguments that
 * the kernel passes over; the interpreter has it for a moment of each call. A filter that were loaded after that, in each call, costs 50 us
 * more. Everything else the other filter decides. A wrong key takes the same time however much of it is right, so none is found by parts. */
static long lock_setns(void)
{
	enum { LOAD = 0x20, XOR = 0xA4, OR = 0x4C, KEEP = 0x02, KEPT = 0x61, EQUAL = 0x15, RETURN = 0x06 };
	enum { ALLOW = 0x7FFF0000, REFUSE = 0x00050000 | EPERM, ARGS = 16 + 2 * 8 };
	const u32 words[4] = { (u32)key[0], (u32)(key[0] >> 32), (u32)key[1], (u32)(key[1] >> 32) };
	struct sock_filter program[25] = {
		{ LOAD, 0, 0, 4 }, /* the architecture */
		{ EQUAL, 0, 22, ARCH },
		{ LOAD, 0, 0, 0 }, /* the number */
		{ EQUAL, 0, 20, __NR_setns },
	};
	struct sock_filter *next = program + 4;
	for (u32 i = 0; i < 4; i++) {
		*next++ = (struct sock_filter){ LOAD, 0, 0, ARGS + 4 * i };
		*next++ = (struct sock_filter){ XOR, 0, 0, words[i] };
		if (i) {
			*next++ = (struct sock_filter){ KEPT, 0, 0, 0 };
			*next++ = (struct sock_filter){ OR, 0, 0, 0 };
		}
		*next++ = (struct sock_filter){ KEEP, 0, 0, 0 };
	}
	*next++ = (struct sock_filter){ EQUAL, 1, 0, 0 };
	*next++ = (struct sock_filter){ RETURN, 0, 0, REFUSE };
	*next++ = (struct sock_filter){ RETURN, 0, 0, ALLOW };
	return load_filter(program, (size_t)((u8 *)next - (u8 *)program));
}

/* In a process of its own namespaces for files and IPC, and of the member's for all else. */
static __attribute__((noreturn)) void become_interpreter(u64 disk_bytes, int channel, int out, int program, int library, int config)
{
	long error;
	int ends[2], given[4] = { channel, program, library, config };
	SYS1(umask, 0);
	SYS0(setsid);
	if ((error = setup_places(0)) || (error = setup_root(disk_bytes, 0)))
		quit(100);
	/* Its standard input is a pipe at its end, as a call's is, for what the interpreter learns of it once and for all. */
	SYS2(pipe2, ends, 0);
	SYS3(dup3, ends[0], 0, 0);
	SYS3(dup3, out, 1, 0);
	SYS3(dup3, out, 2, 0);
	for (int i = 0; i < 4; i++)
		given[i] = (int)SYS3(fcntl, given[i], 0 /* F_DUPFD */, 20);
	for (int i = 0; i < 4; i++)
		SYS3(dup3, given[i], 3 + i, 0);
	SYS3(close_range, 7, ~0U, 0);
	SYS1(umask, 022);
	SYS5(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0); /* else what follows in /proc is nobody's */
	int adjust = (int)SYS4(openat, AT_CWD, "/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC, 0);
	SYS3(write, adjust, "0", 1);
	if ((error = become_user()) || (error = drop_capabilities()) < 0)
		quit(101);
	if (load_filter(member.warm_filter, member.warm_filter_len) < 0 || lock_setns() < 0)
		quit(102);
	default_signals();
	quit(exec_program() & 0x3f);
}

static u8 captured[CAPTURE];
static size_t n_captured;

static void capture(int fd)
{
	u8 chunk[4096];
	long got;
	while ((got = SYS3(read, fd, chunk, sizeof(chunk))) > 0) {
		if (n_captured + (size_t)got > CAPTURE) { /* its end is what tells */
			size_t keep = CAPTURE - (size_t)got;
			memcpy(captured, captured + n_captured - keep, keep);
			n_captured = keep;
		}
		memcpy(captured + n_captured, chunk, (size_t)got);
		n_captured += (size_t)got;
	}
}

static void start_interpreter(struct cursor *c, u32 n_argv, u64 disk_bytes, u64 patience_us, int *fds)
{
	int socks[2], out[2];
	i32 numbers[1] = { INTERPRETER_PID };
	/* A call's processes have small numbers in a namespace of their own. The interpreter must never have had one of these: libraries
	 * (OpenSSL) tell by it that they were forked. */
	struct clone_args args = { .flags = CLONE_NEWNS | CLONE_NEWIPC, .exit_signal = SIGCHLD, .set_tid = (u64)numbers, .set_tid_size = 1 };

	for (u32 i = 0; i < n_argv; i++)
		exec_argv[i] = take_text(c);
	u32 n = 0;
	for (u32 i = 0; i < member.n_env; i++)
		n = add_variable(n, member.env[i]);
	/* Else functions are looked up at first use, which would be in each call. */
	add_defaults(add_variable(n, "LD_BIND_NOW=1"));
	if (SYS4(socketpair, 1, 5 /* SOCK_SEQPACKET */ | O_CLOEXEC, 0, socks) < 0 || SYS2(pipe2, out, O_CLOEXEC) < 0)
		quit(71);
	SYS3(fcntl, out[0], 4 /* F_SETFL */, O_NONBLOCK);
	long pid = SYS2(clone3, &args, sizeof(args));
	if (pid == 0)
		become_interpreter(disk_bytes, socks[1], out[1], fds[0], fds[1], fds[2]);
	if (pid < 0)
		fail("cannot fork for the interpreter", (const u8 *)"", 0);
	SYS1(close, socks[1]);
	SYS1(close, out[1]);
	interpreter = socks[0];
	interpreter_pid = (i32)pid;
	u64 deadline = now_us() + patience_us;
	for (;;) {
		struct pollfd polled[3] = { { .fd = out[0], .events = POLLIN }, { .fd = interpreter, .events = POLLIN }, { .fd = EDGE } };
		struct __kernel_timespec timeout = { .tv_sec = 1 };
		u8 word = 0;
		i32 status;
		SYS5(ppoll, polled, 3, &timeout, 0, 0);
		capture(out[0]);
		if (polled[2].revents)
			quit(0);
		if (polled[1].revents && SYS6(recvfrom, interpreter, &word, 1, MSG_DONTBLOCK, 0, 0) == 1 && word == 'R')
			break;
		if (SYS4(wait4, interpreter_pid, &status, WAIT_NOHANG, 0) == interpreter_pid) {
			capture(out[0]);
			u32 code = (u32)status >> 8 & 0xff;
			if (!(status & 0x7f) && code >= 100 && code <= 102 && !n_captured)
				fail("cannot prepare the interpreter", (const u8 *)"", 0);
			if (!(status & 0x7f) && !n_captured && code < 64)
				fail("cannot execute the interpreter", (const u8 *)"", 0);
			fail("", captured, n_captured);
		}
		if (now_us() > deadline)
			fail("the interpreter took too long to warm up\n", captured, n_captured);
	}
	SYS1(close, out[0]);
	for (int i = 0; i < 3; i++)
		SYS1(close, fds[i]);
}

static void read_setup(void)
{
	struct head head;
	int fds[MAX_PASSED], n_fds;
	if (receive(EDGE, &head, sizeof(head), fds, &n_fds, 0) != sizeof(head) || head.magic != MAGIC || head.type != SETUP || n_fds < 1)
		quit(0);
	const u8 *body = (const u8 *)SYS6(mmap, 0, head.len, 1, MAP_PRIVATE_, fds[0], 0);
	if ((long)body < 0 && (long)body > -4096)
		quit(72);
	SYS1(close, fds[0]);
	struct cursor c = { body, body + head.len, 0 };
	u32 n_argv = take_u32(&c), n_env = take_u32(&c), n_masked = take_u32(&c), n_read_only = take_u32(&c);
	member.call_filter_len = take_u32(&c);
	member.warm_filter_len = take_u32(&c);
	member.cores = take_u32(&c);
	cpu_is_v1 = (int)take_u32(&c);
	u64 disk_bytes = take_u64(&c), patience_us = take_u64(&c);
	if (n_argv > MAX_WORDS || n_env > MAX_WORDS || n_masked > MAX_MASKED || n_read_only > MAX_MASKED || !member.cores)
		quit(75);
	member.call_filter = take(&c, member.call_filter_len);
	member.warm_filter = take(&c, member.warm_filter_len);
	member.workdir = take_text(&c);
	member.env[0] = 0;
	for (member.n_env = 0; member.n_env < n_env; member.n_env++)
		member.env[member.n_env] = take_text(&c);
	for (; member.n_masked < n_masked; member.n_masked++)
		member.masked[member.n_masked] = take_text(&c);
	for (; member.n_read_only < n_read_only; member.n_read_only++)
		member.read_only[member.n_read_only] = take_text(&c);
	find_masked();
	SYS5(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0); /* else what follows in /proc is nobody's */
	victim = (int)SYS4(openat, AT_CWD, "/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC, 0);
	SYS5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	if (SYS3(read, victim, victim_before, sizeof(victim_before) - 1) <= 0)
		fail("cannot choose who goes when memory runs out", (const u8 *)"", 0);
	if (SYS3(getrandom, key, sizeof(key), 0) != sizeof(key))
		quit(71);
	/* Terminals can be had all the same. What a call could do to the directory would be there for the next. */
	long error = SYS5(mount, 0, "/dev/pts", 0, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, 0);
	if (error)
		fail("cannot make the directory of terminals read-only", (const u8 *)"", 0);
	sockets = (int)SYS4(openat, AT_CWD, "/proc/self/net/sockstat", O_RDONLY | O_CLOEXEC, 0);
	if (n_argv) {
		if (n_fds != 4)
			quit(75);
		start_interpreter(&c, n_argv, disk_bytes, patience_us, fds + 1);
	}
	if (c.bad)
		quit(75);
	/* From here on we are root of the calls' user namespace alone. */
	if (SYS2(setns, CALLS_NS, CLONE_NEWUSER) < 0)
		fail("cannot enter the calls' user namespace", (const u8 *)"", 0);
	SYS1(close, CALLS_NS);
	if (SYS3(setresgid, 0, 0, 0) < 0 || SYS3(setresuid, 0, 0, 0) < 0)
		fail("cannot become root of the calls' user namespace", (const u8 *)"", 0);
	SYS5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	make_envelope(disk_bytes);
	await_report(now_us() + STEP_US);
	if (!env.rooted || env.report.error) {
		const char *why = explain("cannot make a call's file system", env.report.error);
		fail(why, (const u8 *)"", 0);
	}
	env.told = 0;
	oom_kills_before = reading(OOM_KILLS, "oom_kill");
	pids_denied_before = reading(PIDS_DENIED, "max");
	if (!(sockets_at_rest = count_sockets())) /* we have some */
		fail("cannot count sockets", (const u8 *)"", 0);
	tell_edge(READY, 0, 0);
}

__attribute__((noreturn, used)) void begin(long *stack)
{
	long argc = stack[0];
	char **argv = (char **)(stack + 1);
	u64 chld = 1ULL << (SIGCHLD - 1);
	u32 layers;

	if (SYS0(getpid) != 1 || argc != 7)
		quit(64);
	SYS4(rt_sigprocmask, SIG_SETMASK, &chld, 0, 8);
	SYS5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	SYS5(prctl, PR_SET_NAME, "calld", 0, 0, 0);
	number_of(argv[1], &member.uid);
	number_of(argv[2], &member.gid);
	for (char *at = argv[3]; *at && member.n_groups < 64;) {
		at = number_of(at, &member.groups[member.n_groups++]);
		at += *at == ',';
	}
	member.home = argv[4];
	member.login = argv[5];
	number_of(argv[6], &layers);
	member.layers = (int)layers;
	signals = (int)SYS4(signalfd4, -1, &chld, 8, O_CLOEXEC | O_NONBLOCK);
	inbox = map(INBOX, MAP_SHARED_);
	if (signals < 0 || SYS4(socketpair, 1, 5 | O_CLOEXEC, 0, envelope_socks) < 0)
		quit(71);
	for (int fd = EDGE; fd <= PIDS_DENIED; fd++)
		SYS3(fcntl, fd, 2 /* F_SETFD */, 1);
	SYS1(close, CHANNEL); /* we are there */
	read_setup();
	for (;;) {
		struct head head;
		struct pollfd polled[2] = { { .fd = EDGE, .events = POLLIN }, { .fd = signals, .events = POLLIN } };
		int fds[MAX_PASSED], n_fds;
		u8 scrap[1024];
		if (interpreter >= 0 && interpreter_pid < 0)
			quit(76); /* the edge sees us gone, and makes another member */
		long got = receive(EDGE, inbox, INBOX, fds, &n_fds, MSG_DONTBLOCK);
		if (got == -EAGAIN) {
			SYS5(ppoll, polled, 2, 0, 0, 0);
			if (polled[1].revents) {
				SYS3(read, signals, scrap, sizeof(scrap));
				reap();
			}
			continue;
		}
		if (got < (long)sizeof(head))
			quit(0);
		memcpy(&head, inbox, sizeof(head));
		if (head.magic == MAGIC && head.type == CANCEL)
			continue; /* it came too late */
		if (head.magic != MAGIC || head.type != JOB)
			quit(75);
		if (head.flags & IN_MEMFD) {
			if (n_fds != 1)
				quit(75);
			const u8 *body = (const u8 *)SYS6(mmap, 0, head.len, 1, MAP_PRIVATE_, fds[0], 0);
			if ((long)body < 0 && (long)body > -4096)
				quit(72);
			run(body, head.len, fds[0]);
			SYS2(munmap, body, head.len);
			SYS1(close, fds[0]);
		} else {
			/* Envelopes read it too, from the place they know. */
			run(inbox + sizeof(head), head.len, -1);
		}
	}
}

#if defined(__x86_64__)
__asm__(".globl _start\n_start: xorl %ebp, %ebp\nmovq %rsp, %rdi\nandq $-16, %rsp\ncall begin\n");
#else
__asm__(".globl _start\n_start: mov x29, xzr\nmov x0, sp\nbl begin\n");
#endif
