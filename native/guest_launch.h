/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: from a request to a running program.
 *
 * The child shares our memory until it executes (as vfork's does) and is born in its cgroup: no page is copied, which is what costs most
 * where pages are emulated. All that it needs is prepared before; what it has to say is in `launch`.
 */
#ifndef GUEST_LAUNCH_H
#define GUEST_LAUNCH_H

#include <linux/sched.h>

#include "guest_group.h"
#include "guest_user.h"

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif
#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

#define PATH_DEFAULT "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
enum { MAX_WORDS = 262144 };

struct launch {
	char **argv, **env;
	const char *path, *cwd;
	struct user user;
	u32 open_files;
	int terminal; /* the command's side, or -1 */
	int fds[MAX_STREAMS]; /* the command's ends; -1: /dev/null */
	int n_fds;
	char added[4][MAX_HOME + 16];
	char candidate[PATH_MAX + 256];
	/* said by the child */
	volatile int error;
	const char *volatile step, *volatile subject;
};

static struct launch *launch; /* in memory that is shared with a child in any case */

#if defined(__SANITIZE_ADDRESS__)
enum { SHARES_MEMORY = 0 }; /* the sanitizer's own state does not bear it */
#else
enum { SHARES_MEMORY = CLONE_VM };
#endif

/* No call returns between this and the child's exec: both use one stack. */
static inline __attribute__((always_inline)) long raw_clone3(struct clone_args *args)
{
#if defined(__x86_64__)
	long result;
	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_clone3), "D"(args), "S"(sizeof(*args)) : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = SYS_clone3;
	register long x0 __asm__("x0") = (long)args;
	register long x1 __asm__("x1") = sizeof(*args);
	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1) : "memory");
	return x0;
#else
#error "guest_launch.h: write the system call for this architecture"
#endif
}

static void child_failed(const char *step, const char *subject)
{
	launch->error = errno;
	launch->step = step;
	launch->subject = subject;
	_exit(127);
}

/* execvp(3) with the command's own PATH. */
static void child_execute(void)
{
	const char *program = launch->argv[0];
	int error = ENOENT;
	if (strchr(program, '/')) {
		execve(program, launch->argv, launch->env);
		child_failed("cannot execute", program);
	}
	for (const char *part = launch->path; part; part = strchr(part, ':'), part = part ? part + 1 : part) {
		int len = (int)strcspn(part, ":");
		if (snprintf(launch->candidate, sizeof(launch->candidate), "%.*s%s/%s", len, part, len ? "" : ".", program) >=
		    (int)sizeof(launch->candidate))
			continue;
		execve(launch->candidate, launch->argv, launch->env);
		if (errno == ENOENT || errno == ENOTDIR)
			continue;
		error = errno;
		if (errno != EACCES)
			break;
	}
	errno = error;
	child_failed("cannot execute", program);
}

static __attribute__((noinline)) void child(void)
{
	syscall(SYS_setsid);
	for (int i = 0; i < launch->n_fds; i++)
		if (syscall(SYS_dup3, launch->fds[i] >= 0 ? launch->fds[i] : guest.null, i, 0) < 0)
			child_failed("cannot pass a descriptor", "");
	if (launch->terminal >= 0 && ioctl(0, TIOCSCTTY, 0) < 0)
		child_failed("cannot take the terminal", "");
	if (guest.chroots && (fchdir(guest.root) < 0 || chroot(".") < 0))
		child_failed("cannot enter the root directory", "");
	if (launch->open_files) {
		struct rlimit limit = { launch->open_files, launch->open_files };
		if (syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, &limit, NULL) < 0)
			child_failed("cannot limit the open files", "");
	}
	/* The thread's own calls: the C library's would look for other threads. */
	const struct user *user = &launch->user;
	if (syscall(SYS_setgroups, user->n_groups, user->groups) < 0 || (user->gid && syscall(SYS_setresgid, user->gid, user->gid, user->gid) < 0) ||
	    (user->uid && syscall(SYS_setresuid, user->uid, user->uid, user->uid) < 0))
		child_failed("cannot become the user", "");
	if (chdir(launch->cwd) < 0)
		child_failed("cannot change to the working directory", launch->cwd);
	signal(SIGPIPE, SIG_DFL);
	sigprocmask(SIG_SETMASK, &guest.no_signals, NULL);
	child_execute();
}

/* The pid, or a negative errno with `launch->step` set. `group`: the cgroup it is born in, or -1. */
static __attribute__((noinline)) long start_child(int group)
{
	static struct clone_args args; /* not on the stack, which the child writes to */
	args = (struct clone_args){ .flags = CLONE_VFORK | SHARES_MEMORY, .exit_signal = SIGCHLD };
	if (group >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (u64)group;
	}
	launch->error = 0;
	launch->step = "the kernel refused a new process";
	launch->subject = "";
#ifdef GUEST_FUZZ
	return -ENOEXEC; /* a fuzzer's inputs start nothing */
#endif
	long pid = raw_clone3(&args);
	if (pid == 0)
		child();
	if (pid > 0 && launch->error) {
		while (waitpid((pid_t)pid, NULL, 0) < 0 && errno == EINTR)
			;
		return -launch->error;
	}
	return pid;
}

/* Environment: the request's, and what is missing in it. `env` has room for five more. */
static void complete_env(char **env, u32 count, int terminal)
{
	static const char *const names[] = { "HOME=", "USER=", "LOGNAME=", "PATH=", "TERM=" };
	const char *values[] = { launch->user.home, launch->user.name, launch->user.name, PATH_DEFAULT, "xterm-256color" };
	launch->path = PATH_DEFAULT;
	for (int i = 0; i < 4 + terminal; i++) {
		size_t len = strlen(names[i]);
		u32 at = 0;
		while (at < count && strncmp(env[at], names[i], len))
			at++;
		if (i == 3 && at < count)
			launch->path = env[at] + len;
		if (at < count)
			continue;
		if (i < 3) {
			snprintf(launch->added[i], sizeof(launch->added[i]), "%s%s", names[i], values[i]);
			env[count++] = launch->added[i];
		} else
			env[count++] = i == 3 ? (char *)"PATH=" PATH_DEFAULT : (char *)"TERM=xterm-256color";
	}
	env[count] = NULL;
	launch->env = env;
}

static int open_terminal(u16 rows, u16 columns, int *slave)
{
	int unlock = 0, master = open_inside("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK);
	struct winsize size = { .ws_row = rows, .ws_col = columns };
	if (master < 0)
		return master;
	if (ioctl(master, TIOCSPTLCK, &unlock) < 0 || ioctl(master, TIOCSWINSZ, &size) < 0 ||
	    (*slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0) {
		int error = errno;
		close(master);
		return -error;
	}
	return master;
}

#endif
