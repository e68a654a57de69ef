/* SPDX-License-Identifier: Apache-2.0
 *
 * An envelope: the namespaces and the file system of one call, and their process 1. Part of calld.c, of which it is a fork.
 *
 * It is made before the call is known, waits for a `go`, and ends with a `finish`: then it kills whatever is in its pid namespace, brings
 * the output files back and exits, which is the end of the namespaces and of all that was in them. It is trusted until then: nothing in the
 * envelope may trace it (it has capabilities, they have none) or end it (it is process 1).
 *
 * After a call that ended by itself and left no process, the kernel says, only the namespaces that held what it could leave (files, IPC) are
 * replaced; the pid namespace, which is empty, and its /proc serve the next call, whose numbers begin anew. That is half as expensive.
 */
#ifndef ENVELOPE_H
#define ENVELOPE_H

#include "raw.h"

enum { MAX_WORDS = 4096, MAX_MASKED = 32, INBOX = 128 << 10, MAX_OUTPUT_FILES = 1024, MAX_SEEN = 1 << 16, PATH_BYTES = 4096, PROBLEM_BYTES = 256 };
enum { KIND_PYTHON = 1, KIND_EXEC = 2 };
enum { NOBODYS = 65533 };
enum { GO_BODY = 1, GO_FILES = 2, GO_AGAIN = 4 };

/* What the member is set up with; see `read_setup`. */
static struct {
	u32 uid, gid, n_groups, groups[64];
	const char *home, *login, *workdir;
	int layers;
	const char *env[MAX_WORDS];
	u32 n_env;
	const char *masked[MAX_MASKED], *read_only[MAX_MASKED];
	u32 n_masked, n_read_only;
	const u8 *call_filter, *warm_filter;
	u32 call_filter_len, warm_filter_len;
	u64 cores;
} member;

struct job {
	u32 kind, n_files, n_outputs, n_argv, n_env, payload_len;
	u64 stdin_len, wall_us, cpu_us, output_bytes, disk_bytes, outputs_bytes, value_bytes, memory_bytes;
};

struct go {
	u32 kind, flags, body_len, reserved;
};

struct report {
	u32 what;
	i32 error; /* of 'X' and 'E': errno */
	i32 pid;
	i32 status;
	u32 disk_full, n_files, problem_len, again;
	u64 files_len;
	char problem[PROBLEM_BYTES];
};

/* --- reading what the edge sends: trusted, but checked all the same ------------------------------------------------- */

struct cursor {
	const u8 *at, *end;
	int bad;
};

static const u8 *take(struct cursor *c, u64 len)
{
	if (c->bad || len > (u64)(c->end - c->at)) {
		c->bad = 1;
		return (const u8 *)"\0\0\0\0\0\0\0\0";
	}
	const u8 *at = c->at;
	c->at += len;
	return at;
}

static u32 take_u32(struct cursor *c)
{
	u32 value;
	memcpy(&value, take(c, 4), 4);
	return value;
}

static u64 take_u64(struct cursor *c)
{
	u64 value;
	memcpy(&value, take(c, 8), 8);
	return value;
}

/* A string: its length with the NUL, then the bytes. */
static const char *take_text(struct cursor *c)
{
	u32 len = take_u32(c);
	const u8 *at = take(c, len);
	if (c->bad || len == 0 || at[len - 1]) {
		c->bad = 1;
		return "";
	}
	return (const char *)at;
}

static char *put(char *to, const char *text)
{
	while (*text)
		*to++ = *text++;
	*to = 0;
	return to;
}

static char *put_number(char *to, u64 value)
{
	char digits[24];
	int n = 0;
	do
		digits[n++] = (char)('0' + value % 10);
	while (value /= 10);
	while (n)
		*to++ = digits[--n];
	*to = 0;
	return to;
}

/* --- the file system ------------------------------------------------------------------------------------------------- */

enum { MS_SAFE = MS_NOSUID | MS_NODEV };

static long move_to(const char *source, const char *target, int *is_there)
{
	struct stat found;
	/* An image that lacks the place gets one; one where it is a link is refused. */
	long error = *is_there ? 0 : SYS4(newfstatat, AT_CWD, target, &found, AT_NOFOLLOW);
	if (error == -ENOENT)
		error = SYS3(mkdirat, AT_CWD, target, 0755);
	else if (!error && !*is_there && (found.st_mode & KIND_MASK) == 0120000)
		error = -ELOOP;
	else
		*is_there = !error;
	return error ? error : SYS5(mount, source, target, 0, MS_MOVE, 0);
}

static int has_proc, has_dev, has_workdir; /* of the image, which is the same each time: to look again costs 5 us each */
static int disk = -1; /* the tmpfs below everything that is written */
static const char *setup_step = "";

/* Where we come from, see kernel/enter.py: layers at /l0, /l1, …, the device directory, a /proc. Here that /proc is covered by the one of our pid
 * namespace, and there is a device directory that may be moved. */
static long setup_places(int per_call)
{
	char name[64];
	long error;
	setup_step = "/proc";
	if ((error = SYS5(mount, "proc", "/proc", "proc", MS_SAFE | MS_NOEXEC | (per_call ? MS_RDONLY : 0), 0)))
		return error;
	setup_step = "what /proc must not show";
	for (u32 i = 0; i < member.n_masked; i++) {
		int is_dir = member.masked[i][0] == '/';
		put(put(name, "/proc/"), member.masked[i] + is_dir);
		if ((error = SYS5(mount, is_dir ? "/dev/shm" : "/dev/null", name, 0, MS_BIND, 0)))
			return error;
	}
	for (u32 i = 0; i < member.n_read_only && !per_call; i++) {
		put(put(name, "/proc/"), member.read_only[i]);
		if ((error = SYS5(mount, name, name, 0, MS_BIND, 0)) ||
		    (error = SYS5(mount, 0, name, 0, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_SAFE | MS_NOEXEC, 0)))
			return error;
	}
	setup_step = "/dev";
	return SYS5(mount, "/dev", "/dev", 0, MS_BIND | MS_REC, 0);
}

/* Become the root of a fresh overlay of the member's layers. In a mount namespace of our own, after `setup_places`. */
static long setup_root(u64 disk_bytes, int per_call)
{
	char text[64 + 16 * 512];
	char *at;
	long error;

	at = put_number(put(text, "mode=0700,size="), disk_bytes);
	put_number(put(at, ",nr_inodes="), disk_bytes / 4096 + 1024);
	setup_step = "a file system for what it writes";
	if ((error = SYS5(mount, "tmpfs", "/t", "tmpfs", MS_SAFE, text)))
		return error;
	if ((error = SYS3(mkdirat, AT_CWD, "/t/u", 0755)) || (error = SYS3(mkdirat, AT_CWD, "/t/w", 0755)) ||
	    (error = SYS3(mkdirat, AT_CWD, "/t/s", 01777)))
		return error;
	disk = (int)SYS4(openat, AT_CWD, "/t", O_PATH | O_CLOEXEC, 0);
	at = put(text, "userxattr,upperdir=/t/u,workdir=/t/w,lowerdir=");
	for (int i = member.layers - 1; i >= 0; i--) {
		at = put_number(put(at, "/l"), (u64)i);
		if (i)
			at = put(at, ":");
	}
	setup_step = "the overlay";
	if ((error = SYS5(mount, "overlay", "/r", "overlay", MS_SAFE, text)))
		return error;
	setup_step = "/proc";
	if ((error = move_to("/proc", "/r/proc", &has_proc)))
		return error;
	setup_step = "/dev";
	if ((error = move_to("/dev", "/r/dev", &has_dev)) || (error = SYS5(mount, "/t/s", "/r/dev/shm", 0, MS_BIND, 0)))
		return error;
	setup_step = "the root directory";
	if ((error = SYS1(chdir, "/r")))
		return error;
	if (per_call) {
		/* Over what was there, which is a third cheaper than to make it go: pivot_root looks at every thread of the machine, and an
		 * unmount waits for all processors. It stays out of reach: to unmount takes capabilities that no call has, and is locked for
		 * who makes a user namespace. It is no more than a call sees anyway, and the member's /proc. */
		if ((error = SYS5(mount, ".", "/", 0, MS_MOVE, 0)) || (error = SYS1(chroot, ".")))
			return error;
	} else if ((error = SYS2(pivot_root, ".", ".")) || (error = SYS2(umount2, ".", UNMOUNT_DETACH)))
		return error;
	setup_step = "the working directory";
	error = SYS1(chdir, member.workdir);
	int existed = !error;
	if (error == -ENOENT) {
		for (char *p = put(text, member.workdir) - (at = text) + text; at <= p; at++) {
			if (at == text || (*at && *at != '/'))
				continue;
			char kept = *at;
			*at = 0;
			SYS3(mkdirat, AT_CWD, text, 0755);
			*at = kept;
		}
		error = SYS1(chdir, member.workdir);
	}
	if (error)
		return error;
	struct stat here;
	if (has_workdir)
		return 0;
	if (!SYS4(newfstatat, AT_CWD, ".", &here, 0) && here.st_uid != member.uid && !(here.st_mode & 02) && member.workdir[1])
		SYS5(fchownat, AT_CWD, ".", member.uid, member.gid, 0);
	else
		has_workdir = existed;
	return 0;
}

/* `setup_root` of what /proc has: a directory is marked by a leading '/'. Only what is there can be covered. */
static void find_masked(void)
{
	static char names[MAX_MASKED][32];
	u32 found = 0;
	for (u32 i = 0; i < member.n_masked; i++) {
		char path[64];
		struct stat is;
		if (length(member.masked[i]) > 24)
			continue;
		put(put(path, "/proc/"), member.masked[i]);
		if (SYS4(newfstatat, AT_CWD, path, &is, AT_NOFOLLOW))
			continue;
		put(put(names[found], (is.st_mode & KIND_MASK) == DIRECTORY ? "/" : ""), member.masked[i]);
		member.masked[found] = names[found];
		found++;
	}
	member.n_masked = found;
}

/* The capabilities stay: drop_capabilities() comes next. */
static long become_user(void)
{
	long error;
	if ((error = SYS5(prctl, PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)) || (error = SYS2(setgroups, member.n_groups, member.groups)) || (error = SYS3(setresgid, member.gid, member.gid, member.gid)) ||
	    (error = SYS3(setresuid, member.uid, member.uid, member.uid)))
		return error;
	return 0;
}

/* --- files in -------------------------------------------------------------------------------------------------------- */

static long write_all(int fd, const u8 *data, u64 len)
{
	while (len) {
		long put_ = SYS3(write, fd, data, len);
		if (put_ < 0)
			return put_;
		data += put_;
		len -= (u64)put_;
	}
	return 0;
}

/* Before anything of the call runs, so nothing can change under us; and inside the call's own root, wherever links of the image lead. */
static long put_file(const char *path, const u8 *data, u64 len, int executable)
{
	char part[PATH_BYTES];
	if (length(path) >= sizeof(part) || !*path)
		return -ENAMETOOLONG;
	put(part, path);
	for (char *at = part + 1; *at; at++) {
		if (*at != '/')
			continue;
		*at = 0;
		if (!SYS3(mkdirat, AT_CWD, part, 0755))
			SYS5(fchownat, AT_CWD, part, member.uid, member.gid, AT_NOFOLLOW);
		*at = '/';
	}
	SYS3(unlinkat, AT_CWD, path, 0);
	int fd = (int)SYS4(openat, AT_CWD, path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		return fd;
	long error = write_all(fd, data, len);
	if (!error)
		error = SYS3(fchown, fd, member.uid, member.gid);
	if (!error)
		error = SYS2(fchmod, fd, executable ? 0755 : 0644);
	SYS1(close, fd);
	return error;
}

/* --- files out ------------------------------------------------------------------------------------------------------- */

static struct {
	int fd;
	u64 limit, data;
	u32 seen; /* names in directories */
	struct report *report;
} gathering;

static void complain(const char *path, const char *why)
{
	struct report *r = gathering.report;
	if (r->problem_len)
		return; /* the first one is told */
	size_t n = length(path);
	char *at = r->problem;
	if (n > PROBLEM_BYTES - 100)
		path += n - (PROBLEM_BYTES - 100);
	at = put(put(put(at, path), ": "), why);
	r->problem_len = (u32)(at - r->problem);
}

/* The rest of the pattern after what stands for this one character, or nothing. */
static const char *past(const char *pattern, char c)
{
	if (*pattern == '[') {
		const char *p = pattern + 1;
		int negated = *p == '!' || *p == '^', hit = 0, first = 1;
		p += negated;
		for (; *p && (first || *p != ']'); p++, first = 0) {
			u8 low = (u8)*p, high = low;
			if (p[1] == '-' && p[2] && p[2] != ']') {
				high = (u8)p[2];
				p += 2;
			}
			hit |= low <= (u8)c && (u8)c <= high;
		}
		if (*p == ']')
			return hit == negated ? 0 : p + 1;
	} /* one that is not closed stands for itself */
	return *pattern == '?' || *pattern == c ? pattern + 1 : 0;
}

/* No more work than the product of the lengths, whatever the call named its files: only the last star is ever taken back. */
static int matches(const char *pattern, const char *name)
{
	const char *star = 0, *from = 0, *next;
	for (;;) {
		while (*pattern == '*') {
			star = ++pattern;
			from = name;
		}
		if (!*name)
			return !*pattern || *pattern == '/';
		if (*pattern && *pattern != '/' && (next = past(pattern, *name))) {
			pattern = next;
			name++;
		} else if (star) {
			pattern = star;
			name = ++from;
		} else
			return 0;
	}
}

static void gather_file(const char *path)
{
	struct open_how how = { .flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV };
	struct report *r = gathering.report;
	struct stat is;
	u8 chunk[16384];
	long got;
	int fd = (int)SYS4(openat2, AT_CWD, path, &how, sizeof(how));
	if (fd == -ENOENT || fd == -ENOTDIR)
		return;
	if (fd < 0) {
		complain(path, "cannot be opened");
		return;
	}
	if (SYS2(fstat, fd, &is) || (is.st_mode & KIND_MASK) != REGULAR)
		complain(path, "is not a regular file");
	else if (r->n_files >= MAX_OUTPUT_FILES)
		complain(path, "one of too many output files");
	else if ((u64)is.st_size > gathering.limit - gathering.data)
		complain(path, "the output files are larger than allowed");
	else {
		struct {
			u32 path_len, reserved;
			u64 data_len;
		} entry = { (u32)length(path), 0, 0 };
		u64 start = r->files_len;
		SYS3(lseek, gathering.fd, start + sizeof(entry), 0);
		long error = write_all(gathering.fd, (const u8 *)path, entry.path_len);
		while (!error && (got = SYS3(read, fd, chunk, sizeof(chunk))) > 0) {
			if ((u64)got > gathering.limit - gathering.data - entry.data_len)
				got = (long)(gathering.limit - gathering.data - entry.data_len);
			error = got ? write_all(gathering.fd, chunk, (u64)got) : -EFBIG;
			entry.data_len += (u64)got;
		}
		SYS3(lseek, gathering.fd, start, 0);
		if (error || write_all(gathering.fd, (const u8 *)&entry, sizeof(entry)))
			complain(path, "cannot be read");
		else {
			r->files_len = start + sizeof(entry) + entry.path_len + entry.data_len;
			gathering.data += entry.data_len;
			r->n_files++;
		}
	}
	SYS1(close, fd);
}

struct entry {
	u64 inode;
	u64 next;
	unsigned short size;
	u8 type;
	char name[];
};

/* Everything that `pattern` names below the directory `path` (its first `len` bytes), which is where we are if it is empty. */
static void gather(char *path, size_t len, const char *pattern, int depth)
{
	size_t part = 0;
	int wild = 0;
	for (; pattern[part] && pattern[part] != '/'; part++)
		wild |= pattern[part] == '*' || pattern[part] == '?' || pattern[part] == '[';
	if (depth > 32 || len + part + 300 > PATH_BYTES)
		return;
	if (!wild) {
		for (size_t i = 0; i < part; i++)
			path[len + i] = pattern[i];
		len += part;
		path[len] = 0;
		if (!pattern[part]) {
			gather_file(path);
			return;
		}
		path[len++] = '/';
		gather(path, len, pattern + part + 1, depth + 1);
		return;
	}
	path[len] = 0;
	u8 buffer[8192] __attribute__((aligned(8)));
	struct open_how how = { .flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV };
	int fd = (int)SYS4(openat2, AT_CWD, len ? path : ".", &how, sizeof(how));
	long got;
	if (fd < 0)
		return;
	while ((got = SYS3(getdents64, fd, buffer, sizeof(buffer))) > 0)
		for (long at = 0; at < got;) {
			struct entry *e = (struct entry *)(buffer + at);
			at += e->size;
			/* Links to directories can make a few names endless. */
			if (gathering.seen++ >= MAX_SEEN)
				complain(pattern, "too many names to look through");
			if (gathering.seen > MAX_SEEN || (gathering.report->n_files >= MAX_OUTPUT_FILES && gathering.report->problem_len)) {
				SYS1(close, fd);
				return;
			}
			if (e->name[0] == '.' && pattern[0] != '.')
				continue;
			if (!matches(pattern, e->name))
				continue;
			size_t n = length(e->name);
			memcpy(path + len, e->name, n + 1);
			if (!pattern[part]) {
				if (e->type != 4 /* a directory */)
					gather_file(path);
			} else {
				path[len + n] = '/';
				gather(path, len + n + 1, pattern + part + 1, depth + 1);
			}
		}
	SYS1(close, fd);
}

/* --- a program ------------------------------------------------------------------------------------------------------- */

static const char *exec_argv[MAX_WORDS + 1], *exec_env[2 * MAX_WORDS + 8];
static int exec_fds[3];
static u64 exec_cpu_us;
static volatile i32 exec_error;

static int names_same(const char *a, const char *b)
{
	while (*a && *a == *b && *a != '=')
		a++, b++;
	return (*a == '=' || !*a) && (*b == '=' || !*b);
}

/* Later ones do not replace earlier ones of the same name. */
static u32 add_variable(u32 n, const char *variable)
{
	for (u32 i = 0; i < n; i++)
		if (names_same(exec_env[i], variable))
			return n;
	exec_env[n] = variable;
	return n + 1;
}

static u32 add_defaults(u32 n)
{
	static char home[512], user[300], login[300];
	if (length(member.home) < 500 && length(member.login) < 280) {
		put(put(home, "HOME="), member.home);
		put(put(user, "USER="), member.login);
		put(put(login, "LOGNAME="), member.login);
		n = add_variable(n, home);
		n = add_variable(n, user);
		n = add_variable(n, login);
	}
	n = add_variable(n, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
	exec_env[n] = 0;
	return n;
}

/* As execvp(3), with the program's own PATH. Returns only on failure. */
static i32 exec_program(void)
{
	const char *program = exec_argv[0], *path = "/bin";
	long error = -ENOENT, kept = 0;
	int slash = 0;
	for (const char *c = program; *c; c++)
		slash |= *c == '/';
	if (slash)
		return (i32)-SYS3(execve, program, exec_argv, exec_env);
	for (const char **e = exec_env; *e; e++)
		if (same(*e, "PATH=", 5))
			path = *e + 5;
	for (; *path; path += *path == ':') {
		char full[PATH_BYTES];
		size_t n = 0;
		while (*path && *path != ':' && n < sizeof(full) - 260)
			full[n++] = *path++;
		while (*path && *path != ':')
			path++;
		if (!n)
			full[n++] = '.';
		full[n++] = '/';
		if (length(program) > 255)
			return ENAMETOOLONG;
		put(full + n, program);
		error = SYS3(execve, full, exec_argv, exec_env);
		if (error != -ENOENT && error != -ENOTDIR && error != -EACCES)
			return (i32)-error;
		if (error == -EACCES)
			kept = error;
	}
	return (i32) - (kept ? kept : error);
}

static void default_signals(void)
{
	const u64 nothing = 0, action[4] = { 0 };
	for (int number = 1; number < 65; number++)
		SYS4(rt_sigaction, number, action, 0, 8);
	SYS4(rt_sigprocmask, SIG_SETMASK, &nothing, 0, 8);
}

/* In a child that shares our memory, until the program runs. */
static __attribute__((noinline, noreturn)) void run_program(void)
{
	long error = 0;
	SYS0(setsid);
	for (int i = 0; i < 3 && error >= 0; i++)
		error = SYS3(dup3, exec_fds[i], i, 0);
	if (error >= 0)
		error = SYS3(close_range, 3, ~0U, 0);
	limit_cpu(exec_cpu_us);
	SYS1(umask, 022);
	if (error >= 0 && (error = become_user()) >= 0 && (error = drop_capabilities()) >= 0 &&
	    (error = load_filter(member.call_filter, member.call_filter_len)) >= 0) {
		default_signals();
		exec_error = exec_program();
	} else
		exec_error = (i32)-error + 10000; /* ours */
	quit(127);
}

/* --- process 1 ------------------------------------------------------------------------------------------------------- */

static void say(int sock, struct report *report)
{
	struct iov iov = { report, sizeof(*report) - PROBLEM_BYTES + report->problem_len };
	if (send_parts(sock, &iov, 1, 0, 0, 0) < 0)
		quit(1);
}

static void reap_here(int sock, i32 program)
{
	i32 status;
	long pid;
	while ((pid = SYS4(wait4, -1, &status, WAIT_NOHANG | WAIT_ALL_KINDS, 0)) > 0)
		if (pid == program) {
			struct report report = { .what = 'E', .pid = program, .status = status };
			say(sock, &report);
		}
}

static u32 is_full(void)
{
	struct {
		long type, bsize;
		u64 blocks, bfree, bavail, files, ffree;
		long rest[8];
	} room = { 0 };
	return !SYS2(fstatfs, disk, &room) && (room.bavail == 0 || room.ffree == 0);
}

/* Where /proc begins to list processes: with us, process 1. Not our children alone are what has to be gone: with CLONE_PARENT a call makes
 * some of the supervisor. kill(-1) would say it, too, but looks at each process of the machine: 15 us where there are 350. */
static u64 find_processes(int proc)
{
	u8 buffer[1024] __attribute__((aligned(8)));
	u64 before = 0;
	long got;
	while ((got = SYS3(getdents64, proc, buffer, sizeof(buffer))) > 0)
		for (long at = 0; at < got; at += ((struct entry *)(buffer + at))->size) {
			struct entry *e = (struct entry *)(buffer + at);
			if (e->name[0] == '1' && !e->name[1])
				return before;
			before = e->next;
		}
	return 0;
}

static int is_alone(int proc, u64 processes)
{
	u8 buffer[256] __attribute__((aligned(8)));
	struct entry *e = (struct entry *)buffer;
	if (!processes || SYS3(lseek, proc, processes, 0) != (long)processes)
		return 0;
	long got = SYS3(getdents64, proc, buffer, sizeof(buffer));
	return got > 0 && got == e->size && e->name[0] == '1' && !e->name[1];
}

static __attribute__((noreturn)) void envelope(int sock, u64 disk_bytes, const u8 *inbox)
{
	static struct report report;
	static struct go go;
	struct job job = { 0 };
	struct cursor c = { 0 };
	int fds[MAX_PASSED], n_fds, next = 0, files = -1;
	i32 program = 0;
	const u64 chld = 1ULL << (SIGCHLD - 1), nothing = 0;
	const u64 ignore[4] = { (u64)SIG_IGN }, heed[4] = { 0 };
	long error;

	/* Hold nothing of the supervisor's. */
	SYS3(dup3, sock, 3, O_CLOEXEC);
	sock = 3;
	SYS3(close_range, 4, ~0U, 0);
	int places = (int)SYS4(openat, AT_CWD, "/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC, 0);
	int last_pid = (int)SYS4(openat, AT_CWD, "/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC, 0);
	SYS1(umask, 0);
	/* A user whom no call has: limits, priority and processors of one's own user's processes are for anybody to set, and the next call's
	 * program would inherit them. To files it stays root. */
	const u32 nobodys = member.uid == NOBODYS ? NOBODYS - 1 : NOBODYS;
	SYS5(prctl, PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0);
	if (SYS3(setresuid, nobodys, nobodys, nobodys) < 0)
		quit(1);
	SYS1(setfsuid, 0);
	/* The interpreter must be able to join our namespaces, which the kernel lets only those do who may look into us. */
	SYS5(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
	SYS5(prctl, PR_SET_NAME, "call", 0, 0, 0);
	/* The kernel releases orphans for us. No signal waits either: what a call sends us is not there for the next to see. */
	SYS4(rt_sigaction, SIGCHLD, ignore, 0, 8);
	SYS4(rt_sigprocmask, SIG_SETMASK, &nothing, 0, 8);
	error = setup_places(1);
	int proc = (int)SYS4(openat, AT_CWD, "/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
	u64 processes = find_processes(proc);
	for (;;) {
		if (!error && !(error = SYS1(unshare, CLONE_NEWNS | CLONE_NEWIPC)))
			error = setup_root(disk_bytes, 1);
		report = (struct report){ .what = 'R', .error = (i32)-error };
		if (error)
			report.problem_len = (u32)(put(report.problem, setup_step) - report.problem);
		say(sock, &report);
		if (receive(sock, &go, sizeof(go), fds, &n_fds, 0) != sizeof(go))
			quit(1);
		if (!(go.flags & GO_AGAIN) || last_pid < 0 || !is_alone(proc, processes))
			break;
		report = (struct report){ .what = 'D', .disk_full = is_full(), .again = 1 };
		SYS1(close, disk);
		/* The last that holds the call's mounts lets go of them. */
		if (SYS2(setns, places, CLONE_NEWNS) < 0 || SYS4(pwrite64, last_pid, "1", 1, 0) != 1)
			quit(1);
		say(sock, &report);
	}
	if (!go.kind)
		goto end; /* a call without files, or none at all */
	if (go.kind == KIND_EXEC)
		for (; next < 3; next++)
			exec_fds[next] = fds[next];
	if (go.flags & GO_BODY) {
		inbox = (const u8 *)SYS6(mmap, 0, go.body_len, 1, MAP_PRIVATE_, fds[next], 0);
		SYS1(close, fds[next++]);
		if ((long)inbox < 0 && (long)inbox > -4096)
			quit(1);
	}
	if (go.flags & GO_FILES)
		files = fds[next++];
	c.at = inbox;
	c.end = inbox + go.body_len;
	memcpy(&job, take(&c, sizeof(job)), sizeof(job));
	struct cursor outputs = c;
	for (u32 i = 0; i < job.n_outputs; i++)
		take_text(&c);
	u32 n = 0;
	for (u32 i = 0; i < job.n_argv && i < MAX_WORDS; i++)
		exec_argv[i] = take_text(&c);
	exec_argv[job.n_argv < MAX_WORDS ? job.n_argv : MAX_WORDS] = 0; /* there may be the interpreter's, from before */
	for (u32 i = 0; i < job.n_env && i < MAX_WORDS; i++)
		n = add_variable(n, take_text(&c));
	report = (struct report){ .what = 'G' };
	for (u32 i = 0; i < job.n_files && !report.error; i++) {
		u32 executable = take_u32(&c);
		u64 len = take_u64(&c);
		const char *path = take_text(&c);
		const u8 *data = take(&c, len);
		error = c.bad ? -EINVAL : put_file(path, data, len, (int)executable);
		if (error) {
			report.error = (i32)-error;
			gathering.report = &report;
			complain(path, error == -ENOSPC ? "no room on the disk" : "cannot be written");
		}
	}
	if (c.bad)
		report.error = EINVAL;
	if (go.kind == KIND_EXEC && !report.error) {
		for (u32 i = 0; i < member.n_env; i++)
			n = add_variable(n, member.env[i]);
		add_defaults(n);
		exec_cpu_us = job.cpu_us;
		SYS4(rt_sigprocmask, SIG_SETMASK, &chld, 0, 8);
		SYS4(rt_sigaction, SIGCHLD, heed, 0, 8);
		long pid = SYS5(clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, 0, 0, 0);
		if (pid == 0)
			run_program();
		SYS5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
		program = (i32)pid;
		report.error = exec_error;
		report.what = exec_error ? 'X' : 'G';
		report.pid = program;
		for (int i = 0; i < 3; i++)
			SYS1(close, exec_fds[i]);
	}
	int signals = (int)SYS4(signalfd4, -1, &chld, 8, O_CLOEXEC | O_NONBLOCK);
	say(sock, &report);

	for (;;) {
		struct pollfd polled[2] = { { .fd = sock, .events = POLLIN }, { .fd = signals, .events = POLLIN } };
		u8 scrap[128];
		reap_here(sock, program);
		if (SYS5(ppoll, polled, 2, 0, 0, 0) < 0)
			continue;
		if (polled[1].revents)
			SYS3(read, signals, scrap, sizeof(scrap));
		if (!polled[0].revents)
			continue;
		if (receive(sock, &go, sizeof(go), fds, &n_fds, 0) <= 0)
			quit(0);
		break;
	}
	/* A fork that races with this sees the signal pending and fails. */
	SYS2(kill, -1, SIGKILL);
	i32 status;
	while ((error = SYS4(wait4, -1, &status, WAIT_ALL_KINDS, 0)) > 0 || error == -EINTR)
		if (error == program && program) {
			struct report last = { .what = 'E', .pid = program, .status = status };
			say(sock, &last);
		}
end: /* what is left ends with us */;
	report = (struct report){ .what = 'D', .disk_full = is_full() };
	if (files >= 0 && !become_user() && !drop_capabilities()) {
		static char path[PATH_BYTES];
		gathering.fd = files;
		gathering.limit = job.outputs_bytes;
		gathering.report = &report;
		for (u32 i = 0; i < job.n_outputs; i++)
			gather(path, 0, take_text(&outputs), 0);
	}
	say(sock, &report);
	quit(0);
}

#endif
