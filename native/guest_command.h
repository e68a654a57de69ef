/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: commands, from EXEC to RELEASE.
 */
#ifndef GUEST_COMMAND_H
#define GUEST_COMMAND_H

#include "guest_launch.h"
#include "guest_stream.h"

enum { MAX_ROUNDS = 20, MAX_MARKED = 4096 };

struct command {
	struct object object; /* first: cast. In the table until it is released */
	struct source events; /* of its cgroup, once only its children live */
	struct command *next;
	char name[MAX_NAME + 1];
	pid_t pid; /* 0 once it has ended */
	int released;
	struct group group;
	u32 orphans; /* how many had been buried when it began */
	int master; /* of its terminal */
	struct stream streams[MAX_STREAMS];
	int n_streams;
	pid_t *marked;
	u32 n_marked;
};

static struct command *commands;
static u32 n_commands, n_orphans;

static void flush(void);

static void close_streams(struct command *c)
{
	for (int i = 0; i < c->n_streams; i++)
		close_stream(&c->streams[i]);
	close_fd(&c->master);
}

static void command_gone(struct command *c)
{
	for (struct command **at = &commands; *at; at = &(*at)->next)
		if (*at == c) {
			*at = c->next;
			break;
		}
	n_commands--;
	free(c->marked);
	free(c);
}

/* Once its tree is empty nothing of it stays but its entry, until it is released. */
static void command_settle(struct command *c)
{
	if (c->pid)
		return;
	if (c->group.fd >= 0) {
		if (group_populated(&c->group)) {
			c->events.fd = c->group.events;
			arm(&c->events, EPOLLPRI);
			if (group_populated(&c->group)) /* again: it is watched from now on */
				return;
		}
		forget_source(&c->events);
		c->events.fd = -1;
		give_group(&c->group);
		if (!c->released) {
			begin(TYPE_TREE_EMPTY, 0, c->object.id);
			end();
		}
	}
	if (c->released)
		command_gone(c);
}

static void group_changed(struct source *source, u32 events)
{
	(void)events;
	command_settle((struct command *)((char *)source - offsetof(struct command, events)));
}

static void release_command(struct command *c)
{
	if (c->released)
		return;
	c->released = 1;
	close_streams(c);
	remove_object(&c->object);
	command_settle(c);
}

static void kill_command(struct command *c)
{
	if (c->group.fd >= 0)
		kill_group(&c->group);
	else if (c->pid)
		kill(-c->pid, SIGKILL);
	if (c->pid)
		kill(c->pid, SIGKILL); /* it may have been moved elsewhere */
}

/* --- how they end ---------------------------------------------------------------------------------------------------- */

static void command_exited(struct command *c, int status, const struct rusage *usage)
{
	c->pid = 0;
	if (!c->released) {
		u64 cpu_us = (u64)(usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) * 1000000 + (u64)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec);
		u64 tree_us = 0;
		int alive = c->group.fd >= 0 && group_populated(&c->group);
		if (c->group.fd >= 0 && (alive || n_orphans != c->orphans)) /* else all its children's time is in `usage` */
			tree_us = group_cpu_us(c->group.fd) - c->group.cpu_before_us;
		u64 sent = ~0ull;
		while (c->master >= 0 && c->streams[1].source.fd >= 0 && c->streams[1].credit && sent != c->streams[1].sent) {
			sent = c->streams[1].sent; /* a terminal tells what it holds only once it was read to its end */
			stream_readable(&c->streams[1].source, 0);
		}
		begin(TYPE_EXIT, 0, c->object.id);
		put_u32(WIFSIGNALED(status) ? EXIT_SIGNAL : EXIT_CODE);
		put_u32((u32)(WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status)));
		put_u64(tree_us > cpu_us ? tree_us : cpu_us);
		put_u64((u64)usage->ru_maxrss * 1024);
		put_u32((u32)alive);
		put_counters(read_counters(status != 0)); /* a full disk explains a failure */
		put_u32((u32)c->n_streams);
		for (int i = 0; i < c->n_streams; i++)
			put_u64(stream_end(&c->streams[i]));
		end();
		flush(); /* what follows takes longer */
		if (c->group.fd < 0) {
			begin(TYPE_TREE_EMPTY, 0, c->object.id);
			end();
		}
	}
	command_settle(c);
}

/* Everything that ended: commands, and whatever else process 1 has to bury. */
static void reap(void)
{
	struct rusage usage;
	int status;
	pid_t pid;
	while (!throttled() && (pid = wait4(-1, &status, WNOHANG, &usage)) > 0) {
		struct command *c = commands;
		while (c && c->pid != pid)
			c = c->next;
		if (c)
			command_exited(c, status, &usage);
		else
			n_orphans++;
	}
	if (throttled())
		unfinished = 1;
}

/* --- EXEC ------------------------------------------------------------------------------------------------------------ */

static int good_name(const char *name)
{
	size_t len = strlen(name);
	return len && len <= MAX_NAME && *name != '.' &&
	       strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == len;
}

/* The list's strings and room for `more`; NULL: malformed, or no memory. */
static char **take_list(struct in *in, u32 *count, u32 more)
{
	*count = take_count(in, 4);
	char **words = *count > MAX_WORDS ? NULL : malloc((*count + more) * sizeof(char *));
	for (u32 i = 0; words && i < *count; i++)
		words[i] = take_str(in);
	return words;
}

/* Pipes or a terminal: near ends into `c`, far ends into `launch`. A negative errno leaves closing to the caller. */
static int open_descriptors(struct command *c, const char *kinds, u32 n_kinds, u32 flags, u16 rows, u16 columns)
{
	u64 id = c->object.id;
	launch->terminal = -1;
	launch->n_fds = flags & EXEC_PTY ? 3 : (int)n_kinds;
	for (int i = 0; i < MAX_STREAMS; i++)
		launch->fds[i] = -1;
	if (flags & EXEC_PTY) {
		int slave = -1;
		if ((c->master = open_terminal(rows, columns, &slave)) < 0)
			return c->master;
		launch->terminal = launch->fds[0] = launch->fds[1] = launch->fds[2] = slave;
		if (launch->user.uid && fchown(slave, launch->user.uid, (gid_t)-1) < 0)
			return -errno;
		int typed = fcntl(c->master, F_DUPFD_CLOEXEC, RESERVED_FDS), shown = fcntl(c->master, F_DUPFD_CLOEXEC, RESERVED_FDS);
		open_stream(&c->streams[0], id, 0, KIND_IN, typed);
		open_stream(&c->streams[1], id, 1, KIND_OUT, shown);
		c->n_streams = 2;
		return typed < 0 || shown < 0 ? -EMFILE : 0;
	}
	for (u32 i = 0; i < n_kinds; i++) {
		int ends[2] = { -1, -1 };
		u8 kind = (u8)kinds[i];
		if (kind != KIND_NULL && (pipe2(ends, O_CLOEXEC) < 0 || (launch->user.uid && fchmod(ends[0], 0666) < 0))) /* it may open /dev/stdout */
			return -errno;
		launch->fds[i] = ends[kind == KIND_OUT];
		int near = ends[kind == KIND_IN];
		if (near >= 0)
			fcntl(near, F_SETFL, O_NONBLOCK);
		open_stream(&c->streams[i], id, (u8)i, kind, near);
		c->n_streams = (int)i + 1;
	}
	return 0;
}

static void close_far_ends(void)
{
	if (launch->terminal >= 0)
		close(launch->terminal);
	else
		for (int i = 0; i < launch->n_fds; i++)
			close_fd(&launch->fds[i]);
}

static void on_exec(u64 id, struct in *in)
{
	u32 flags = take_u32(in), n_kinds, n_argv = 0, n_env = 0;
	u16 rows = take_u16(in), columns = take_u16(in);
	launch->open_files = take_u32(in);
	const char *name = take_str(in), *kinds = take_bytes(in, &n_kinds, 1), *user = take_str(in), *problem = "";
	launch->cwd = take_str(in);
	char **argv = take_list(in, &n_argv, 1), **env = argv ? take_list(in, &n_env, 6) : NULL;
	struct command *c = NULL;
	int good = env && take_end(in) && n_argv && good_name(name) && !(flags & ~(u32)EXEC_PTY) &&
		   (flags & EXEC_PTY ? !n_kinds : n_kinds >= MIN_KINDS && n_kinds <= MAX_STREAMS);
	for (u32 i = 0; good && i < n_kinds; i++)
		good = (u8)kinds[i] <= KIND_OUT;
	if (!good) {
		answer_error(id, EINVAL, "malformed request");
		goto out;
	}
	for (c = commands; c; c = c->next)
		if (!strcmp(c->name, name)) {
			answer_error(id, EEXIST, "there is a command of this name");
			goto out;
		}
	if (n_commands >= MAX_COMMANDS || !(c = calloc(1, sizeof(*c)))) {
		answer_error(id, EAGAIN, "more than %d commands", MAX_COMMANDS);
		goto out;
	}
	c->group.fd = c->group.events = c->master = c->events.fd = -1;
	c->orphans = n_orphans;
	c->object.id = id;
	c->events.ready = group_changed;
	strcpy(c->name, name);
	argv[n_argv] = NULL;
	launch->argv = argv;
	int error = find_user(user, &launch->user, &problem);
	if (error < 0) {
		answer_error(id, error, "%s: '%.100s'", problem, user);
		goto failed;
	}
	complete_env(env, n_env, (flags & EXEC_PTY) != 0);
	if (guest.group >= 0 && (error = take_group(&c->group)) < 0) {
		answer_error(id, error, "cannot make its control group: %s", strerror(-error));
		goto failed;
	}
	if ((error = open_descriptors(c, kinds, n_kinds, flags, rows, columns)) < 0) {
		answer_error(id, error, "cannot open its descriptors: %s", strerror(-error));
		goto failed_with_group;
	}
	long pid = start_child(c->group.fd);
	if (pid < 0) {
		const char *subject = launch->subject, *quote = *subject ? "'" : "";
		answer_error(id, (int)pid, "%s %s%.200s%s: %s", launch->step, quote, subject, quote, strerror((int)-pid));
		goto failed_with_group;
	}
	close_far_ends();
	c->pid = (pid_t)pid;
	c->next = commands;
	commands = c;
	n_commands++;
	add_object(&c->object, id, A_COMMAND);
	begin(TYPE_EXEC | ANSWER, 0, id);
	put_u32((u32)pid);
	put_u32(0);
	end();
	goto out;

failed_with_group:
	close_far_ends();
	close_streams(c);
	if (c->group.fd >= 0)
		give_group(&c->group);
failed:
	free(c);
out:
	free(argv);
	free(env);
}

#endif
