/* SPDX-License-Identifier: Apache-2.0
 *
 * One call, from its job to what the edge is told of its end. Part of calld.c.
 */
#ifndef CALL_H
#define CALL_H

/* What the call reads: a pipe that holds it all, or a file. */
static int make_stdin(const u8 *data, u64 len)
{
	int ends[2];
	if (!len) /* opened for this call alone: locks, flags and owners belong to what was opened, and would stay */
		return (int)SYS4(openat, AT_CWD, "/dev/null", O_RDWR | O_CLOEXEC, 0);
	if (len <= 65536) {
		if (SYS2(pipe2, ends, O_CLOEXEC) < 0)
			return -1;
		if (write_all(ends[1], data, len)) {
			SYS1(close, ends[0]);
			ends[0] = -1;
		}
		SYS1(close, ends[1]);
		return ends[0];
	}
	int fd = (int)SYS2(memfd_create, "stdin", MFD_CLOSE_ON_EXEC);
	if (fd >= 0 && (write_all(fd, data, len) || SYS3(lseek, fd, 0, 0))) {
		SYS1(close, fd);
		return -1;
	}
	return fd;
}

/* Have the interpreter fork into the envelope. */
static void dispatch(int *stdio, int value_fd, const u8 *payload, u32 len)
{
	struct dispatch head = { value_fd >= 0 ? HAS_VALUE : 0, len, call.job.cpu_us, call.job.value_bytes, { key[0], key[1] } };
	struct iov iov[2] = { { &head, sizeof(head) }, { payload, len } };
	int fds[MAX_PASSED], n = 4, body = -1;
	fds[0] = env.pidfd;
	for (int i = 0; i < 3; i++)
		fds[1 + i] = stdio[i];
	if (value_fd >= 0)
		fds[n++] = value_fd;
	if (len > INLINE_BYTES) {
		body = (int)SYS2(memfd_create, "call", MFD_CLOSE_ON_EXEC);
		if (body < 0 || write_all(body, payload, len) || SYS3(lseek, body, 0, 0))
			call.reason = "no memory for the call's text";
		fds[n++] = body;
		head.flags |= HAS_BODY;
		head.len = 0;
	}
	call.started_us = now_us();
	call.cpu_start_us = cpu_us();
	if (!call.reason && (env.pidfd < 0 || send_parts(interpreter, iov, body < 0 ? 2 : 1, fds, n, 0) < 0)) {
		call.reason = "the interpreter cannot be reached";
		call.spoiled = call.reason;
	}
	if (body >= 0)
		SYS1(close, body);
	call.dispatched = !call.reason;
}

static void watch(void)
{
	u64 next_look = call.started_us + call.job.cpu_us / member.cores; /* before that it cannot have used so much */
	while (!call.over && !call.killed && !call.reason) {
		u64 now = now_us(), wall = now - call.started_us, end = call.started_us + call.job.wall_us;
		if (call.dispatched && !call.answered && (wall >= call.job.wall_us || now >= next_look))
			hear_interpreter();
		if (call.dispatched && !call.answered) { /* there is nothing yet that could be ended */
			end = call.started_us + STEP_US;
			if (call.spoiled || now >= end)
				call.reason = call.spoiled = call.spoiled ? call.spoiled : "its interpreter does not answer";
			else
				turn(end);
			continue;
		}
		if (wall >= call.job.wall_us) {
			call.ended.flags |= WALL;
			finish();
			return;
		}
		if (now >= next_look) {
			u64 used = cpu_us() - call.cpu_start_us;
			if (used >= call.job.cpu_us) {
				call.ended.flags |= CPU;
				finish();
				return;
			}
			u64 pause = (call.job.cpu_us - used) / member.cores;
			next_look = now + (pause < 1000 ? 1000 : pause);
		}
		turn(next_look < end ? next_look : end);
	}
}

/* Until the kernel has taken back most of what the call had, for at most so long. */
static void await_memory(u64 ms)
{
	struct __kernel_timespec step = { .tv_nsec = 1000000 };
	u64 most = memory_before + call.job.memory_bytes / 2 + call.out[0].len + call.out[1].len + call.ended.files_len;
	while (ms-- && reading(MEMORY, "") > most)
		SYS2(nanosleep, &step, 0);
}

/* Unix sockets live in the member's network namespace, which its calls share. One that is under way to itself (SCM_RIGHTS) outlives its
 * processes, with its name and with whatever else is under way there, until the kernel collects garbage: when a unix socket is closed. */
static void collect_sockets(void)
{
	struct __kernel_timespec step = { .tv_nsec = 1000000 };
	u64 deadline = 0, count;
	int ends[2];
	while ((count = count_sockets()) > sockets_at_rest) {
		if (!deadline)
			deadline = now_us() + DEATH_US;
		if (now_us() > deadline) {
			call.spoiled = "its sockets do not end";
			return;
		}
		if (!SYS4(socketpair, 1, 5 /* SOCK_SEQPACKET */ | O_CLOEXEC, 0, ends)) {
			SYS1(close, ends[0]);
			SYS1(close, ends[1]);
		}
		SYS2(nanosleep, &step, 0);
	}
	sockets_at_rest = count; /* the warm-up may have left garbage, too */
}

static void run(const u8 *body, u32 len, int body_fd)
{
	struct cursor c = { body, body + len, 0 };
	int stdio[3] = { -1, -1, -1 }, far[2][2] = { { -1, -1 }, { -1, -1 } }, value_fd = -1, files_fd = -1;
	const u8 *payload;
	struct go go = { 0, 0, len, 0 };
	static struct report last;

	memset(&call, 0, sizeof(call));
	call.out[0].fd = call.out[1].fd = -1;
	memcpy(&call.job, take(&c, sizeof(call.job)), sizeof(call.job));
	struct job *job = &call.job;
	for (u32 i = 0; i < job->n_outputs; i++)
		take_text(&c);
	if (job->n_argv > MAX_WORDS || job->n_env > MAX_WORDS)
		c.bad = 1;
	for (u64 i = 0; i < (u64)job->n_argv + job->n_env && !c.bad; i++)
		take_text(&c);
	for (u32 i = 0; i < job->n_files && !c.bad; i++) {
		take_u32(&c);
		u64 size = take_u64(&c);
		take_text(&c);
		take(&c, size);
	}
	const u8 *input = take(&c, job->stdin_len);
	payload = take(&c, job->payload_len);
	if (c.bad || (job->kind != KIND_PYTHON && job->kind != KIND_EXEC) || (job->kind == KIND_EXEC && !job->n_argv) ||
	    (job->kind == KIND_PYTHON && interpreter < 0) || job->output_bytes > (1ULL << 32))
		quit(75); /* the edge is at odds with itself */

	call.busy = 1;
	if (buffers_size < 2 * job->output_bytes) {
		if (buffers_size)
			SYS2(munmap, buffers, buffers_size);
		buffers_size = 2 * job->output_bytes;
		buffers = map(buffers_size, MAP_PRIVATE_ | MAP_NORESERVE_);
	}
	if (!have_envelope(job->disk_bytes))
		goto done;
	SYS3(write, MEMORY_PEAK, "0", 1);
	memory_before = reading(MEMORY, "");
	stdio[0] = make_stdin(input, job->stdin_len);
	for (int i = 0; i < 2; i++) {
		SYS2(pipe2, far[i], O_CLOEXEC);
		if (far[i][0] >= 0)
			SYS3(fcntl, far[i][0], 4 /* F_SETFL */, O_NONBLOCK);
		stdio[1 + i] = far[i][1];
		call.out[i] = (struct stream){ far[i][0], buffers + (u64)i * job->output_bytes, 0, 0 };
	}
	if (job->n_outputs)
		files_fd = (int)SYS2(memfd_create, "files", MFD_CLOSE_ON_EXEC);
	if (job->value_bytes) {
		value_fd = (int)SYS2(memfd_create, "value", MFD_CLOSE_ON_EXEC | 2 /* MFD_ALLOW_SEALING */);
		/* It must be there in full when we look at it, or we would die of that. */
		if (value_fd < 0 || SYS2(ftruncate, value_fd, job->value_bytes) < 0 || SYS3(fcntl, value_fd, 1033 /* F_ADD_SEALS */, 7) < 0)
			call.reason = "no memory for the call's value";
	}
	if (stdio[0] < 0 || stdio[1] < 0 || stdio[2] < 0 || (job->n_outputs && files_fd < 0))
		call.reason = "no memory or descriptors for the call's pipes";
	if (!call.reason && (job->kind == KIND_EXEC || job->n_files || job->n_outputs)) {
		int fds[MAX_PASSED], n = 0;
		struct iov iov = { &go, sizeof(go) };
		go.kind = job->kind;
		if (job->kind == KIND_EXEC)
			for (; n < 3; n++)
				fds[n] = stdio[n];
		if (body_fd >= 0) {
			go.flags |= GO_BODY;
			fds[n++] = body_fd;
		}
		if (files_fd >= 0) {
			go.flags |= GO_FILES;
			fds[n++] = files_fd;
		}
		if (job->kind == KIND_EXEC) {
			call.started_us = now_us();
			call.cpu_start_us = cpu_us();
			call.pid = -2;
		}
		if (send_parts(env.sock, &iov, 1, fds, n, 0) < 0 || !await_report(now_us() + STEP_US)) {
			call.reason = "the call's first process ended before it could start";
		} else if (env.report.error) {
			struct report *r = &env.report;
			i32 error = r->error;
			if (r->what == 'X' && error < 10000) {
				r->problem_len = 0;
				call.ended.flags |= CALLERS_FAULT;
				call.reason = explain("cannot execute the program", error);
			} else if (r->what == 'X') {
				r->problem_len = 0;
				call.reason = explain("cannot confine the program", error - 10000);
			} else {
				call.ended.flags |= CALLERS_FAULT;
				call.reason = explain("cannot write the call's files", error);
			}
		} else if (job->kind == KIND_EXEC) {
			call.pid = env.report.pid;
			call.ended.flags |= STARTED;
		}
	}
	if (!call.reason && !call.killed && job->kind == KIND_PYTHON)
		dispatch(stdio, value_fd, payload, job->payload_len);
	for (int i = 0; i < 3; i++)
		if (stdio[i] >= 0)
			SYS1(close, stdio[i]);
	if (call.dispatched || call.ended.flags & STARTED)
		watch();
	finish();
	/* The envelope says what it brought back, and ends; or it says that nothing is left. Only then is the call over. */
	last = (struct report){ 0 };
	int told = call.again && await_report(now_us() + DEATH_US);
	if (told && env.report.again)
		env.rooted = 0; /* it says so again */
	else {
		if (!bury_envelope())
			call.spoiled = "its processes do not end";
		for (told |= env.told; !told && hear_envelope();)
			told = env.told;
		env.told = 0;
	}
	if (told)
		last = env.report;
	u64 deadline = now_us() + DEATH_US;
	while (call.dispatched && !call.answered && !call.spoiled && now_us() < deadline)
		turn(deadline); /* killed before we knew it */
	while ((call.ended.flags & STARTED) && !call.over && now_us() < deadline) {
		reap();
		if (!call.over)
			hear_envelope();
		if (!call.over && job->kind == KIND_EXEC) {
			main_ended(SIGKILL); /* its envelope was killed before it could tell */
			break;
		}
		if (!call.over)
			turn(deadline);
	}
	collect_sockets();
	for (int i = 0; i < 2; i++)
		drain(i);
	if (last.what == 'D') {
		if (last.disk_full)
			call.ended.flags |= DISK;
		call.ended.n_files = last.n_files;
		call.ended.files_len = last.files_len;
		call.ended.problem_len = last.problem_len;
	} else if (job->n_outputs && call.ended.flags & STARTED)
		call.ended.problem_len = (u32)(put(last.problem, "what should have fetched them was ended") - last.problem);
	/* Less than before: files that were at hand have given way, or what an earlier call had was still on its way back. The call had that. */
	u64 peak = reading(MEMORY_PEAK, ""), memory_after = reading(MEMORY, "");
	if (memory_after < memory_before)
		memory_before = memory_after;
	call.ended.peak = peak > memory_before ? peak - memory_before : 0;
	u64 oom_kills = reading(OOM_KILLS, "oom_kill"), pids_denied = reading(PIDS_DENIED, "max");
	if (oom_kills > oom_kills_before)
		call.ended.flags |= OOM;
	if (pids_denied > pids_denied_before)
		call.ended.flags |= PIDS;
	oom_kills_before = oom_kills; /* between calls nothing runs that could add to them */
	pids_denied_before = pids_denied;
done:;
	u8 *files = 0, *value = 0;
	u64 value_len = 0; /* as mapped */
	if (call.ended.files_len) {
		files = (u8 *)SYS6(mmap, 0, call.ended.files_len, 1, MAP_SHARED_, files_fd, 0);
		if ((long)files < 0 && (long)files > -4096)
			quit(72);
	}
	if (value_fd >= 0) {
		/* Written by the call: a kind, a length, the bytes. All of it is its own business, but the length must be in bounds. */
		u32 kind_len[2] = { 0, 0 };
		SYS4(pread64, value_fd, kind_len, 8, 0);
		if (kind_len[0] && kind_len[1] <= job->value_bytes - 8) {
			value_len = 8 + (u64)kind_len[1];
			value = (u8 *)SYS6(mmap, 0, value_len, 1, MAP_SHARED_, value_fd, 0);
			if ((long)value < 0 && (long)value > -4096)
				quit(72);
			if (kind_len[0] == 1) {
				call.ended.flags |= HAS_VALUE_;
				call.ended.value_len = kind_len[1];
			} else if (!call.reason) {
				call.ended.flags |= CALLERS_FAULT;
				call.ended.flags &= ~(u32)STARTED;
				call.ended.reason_len = kind_len[1];
			}
		}
	}
	const u8 *reason = call.reason ? (const u8 *)call.reason : call.ended.reason_len ? value + 8 : (const u8 *)"";
	if (call.reason)
		call.ended.reason_len = length(call.reason);
	call.ended.stdout_len = call.out[0].len;
	call.ended.stderr_len = call.out[1].len;
	call.ended.stdout_total = call.out[0].total;
	call.ended.stderr_total = call.out[1].total;
	if (call.spoiled)
		call.ended.spoiled_len = length(call.spoiled);
	struct iov parts[] = {
		{ &call.ended, sizeof(call.ended) },
		{ call.out[0].data, call.out[0].len },
		{ call.out[1].data, call.out[1].len },
		{ value ? value + 8 : value, call.ended.value_len },
		{ files, call.ended.files_len },
		{ last.problem, call.ended.problem_len },
		{ reason, call.ended.reason_len },
		{ call.spoiled, call.ended.spoiled_len },
	};
	/* What its files and children had is on its way back, and until then it is the call that has all the memory. */
	if (call.out[0].len + call.out[1].len + call.ended.files_len + call.ended.value_len > INLINE_BYTES)
		await_memory(call.ended.flags & OOM ? 2000 : 30);
	if (call.starved || tell_edge(ENDED, parts, 8)) {
		const char *why = "it left no memory to bring back its output";
		struct ended bare = call.ended;
		bare.flags = (bare.flags & ~(u32)(STARTED | HAS_VALUE_)) | CALLERS_FAULT | OOM;
		bare.stdout_len = bare.stderr_len = bare.value_len = bare.files_len = bare.problem_len = bare.n_files = 0;
		bare.reason_len = length(why);
		struct iov rest[] = { { &bare, sizeof(bare) }, { why, bare.reason_len }, { call.spoiled, bare.spoiled_len } };
		tell_edge(ENDED, rest, 3);
	}
	u64 used = call.out[0].len + call.out[1].len;
	if (used > 256 << 10)
		SYS3(madvise, buffers, buffers_size, 4 /* MADV_DONTNEED */);
	if (files)
		SYS2(munmap, files, call.ended.files_len);
	if (value)
		SYS2(munmap, value, value_len);
	for (int i = 0; i < 2; i++)
		if (call.out[i].fd >= 0)
			SYS1(close, call.out[i].fd);
	if (value_fd >= 0)
		SYS1(close, value_fd);
	if (files_fd >= 0)
		SYS1(close, files_fd);
	call.busy = 0;
	if (!call.spoiled && env.pid <= 0)
		make_envelope(job->disk_bytes); /* for the next one, while the edge looks at this */
}

#endif
