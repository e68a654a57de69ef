/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: requests about commands that run.
 */
#ifndef GUEST_CONTROL_H
#define GUEST_CONTROL_H

#include "guest_command.h"

static pid_t member_pids[MAX_MEMBERS];

static u32 members_of(struct command *c)
{
	if (c->group.fd >= 0)
		return group_members(c->group.fd, member_pids, MAX_MEMBERS, 0);
	member_pids[0] = c->pid;
	return c->pid != 0;
}

static int compare_pids(const void *a, const void *b)
{
	pid_t x = *(const pid_t *)a, y = *(const pid_t *)b;
	return x < y ? -1 : x > y;
}

static int has_pid(const pid_t *pids, u32 n, pid_t pid)
{
	return pids && bsearch(&pid, pids, n, sizeof(pid), compare_pids) != NULL;
}

/* Send a signal to all of the tree that are not spared, until there is nobody new. */
static u32 signal_members(struct command *c, int number, const pid_t *spared, u32 n_spared)
{
	pid_t *had = NULL;
	u32 n_had = 0, reached = 0, n;
	for (int round = 0; round < MAX_ROUNDS && (n = members_of(c)); round++) {
		u32 fresh = 0;
		for (u32 i = 0; i < n; i++) {
			pid_t pid = member_pids[i];
			if (has_pid(spared, n_spared, pid) || has_pid(had, n_had, pid))
				continue;
			fresh += !kill(pid, number);
		}
		reached += fresh;
		if (!fresh)
			break;
		qsort(member_pids, n, sizeof(*member_pids), compare_pids);
		pid_t *grown = realloc(had, n * sizeof(*had));
		if (!grown)
			break;
		had = grown;
		memcpy(had, member_pids, n * sizeof(*had));
		n_had = n;
	}
	free(had);
	return reached;
}

static u32 signal_command(struct command *c, int number, u32 flags)
{
	if (flags & SIGNAL_SINCE_MARK) {
		if (number == SIGKILL) /* else a parent sees its child die, and goes on until it dies itself */
			signal_members(c, SIGSTOP, c->marked, c->n_marked);
		return signal_members(c, number, c->marked, c->n_marked);
	}
	if (!(flags & SIGNAL_TREE))
		return c->pid && !kill(c->pid, number);
	if (number == SIGKILL) {
		u32 n = members_of(c);
		kill_command(c);
		return n;
	}
	return signal_members(c, number, NULL, 0);
}

static void on_signal(u64 id, struct in *in)
{
	struct command *c = find(take_u64(in), A_COMMAND);
	u32 number = take_u32(in), flags = take_u32(in);
	if (!take_end(in) || number >= 65 || flags & ~3u)
		answer_error(id, EINVAL, "malformed request");
	else if (!c)
		answer_error(id, ESRCH, "no such command");
	else
		answer_u32(TYPE_SIGNAL, id, signal_command(c, (int)number, flags));
}

static void on_mark(u64 id, struct in *in)
{
	struct command *c = find(take_u64(in), A_COMMAND);
	if (!take_end(in) || !c) {
		answer_error(id, c ? EINVAL : ESRCH, "no such command");
		return;
	}
	u32 n = members_of(c);
	free(c->marked);
	c->marked = malloc((n ? n : 1) * sizeof(*c->marked));
	c->n_marked = c->marked ? n : 0;
	if (!c->marked) {
		answer_error(id, ENOMEM, "no memory for the mark");
		return;
	}
	qsort(member_pids, n, sizeof(*member_pids), compare_pids);
	memcpy(c->marked, member_pids, n * sizeof(*c->marked));
	answer_u32(TYPE_MARK, id, n);
}

static void on_members(u64 id, struct in *in)
{
	struct command *c = find(take_u64(in), A_COMMAND);
	if (!take_end(in) || !c)
		answer_error(id, c ? EINVAL : ESRCH, "no such command");
	else
		answer_u32(TYPE_MEMBERS, id, members_of(c));
}

static void on_resize(u64 id, struct in *in)
{
	struct command *c = find(take_u64(in), A_COMMAND);
	struct winsize size = { .ws_row = take_u16(in), .ws_col = take_u16(in) };
	if (!take_end(in) || !c)
		answer_error(id, c ? EINVAL : ESRCH, "no such command");
	else if (c->master < 0)
		answer_error(id, ENOTTY, "it has no terminal");
	else
		answer_result(TYPE_RESIZE, id, ioctl(c->master, TIOCSWINSZ, &size) < 0 ? -errno : 0);
}

static void on_release(u64 id, struct in *in)
{
	struct command *c = find(take_u64(in), A_COMMAND);
	if (!take_end(in) || !c) {
		answer_error(id, c ? EINVAL : ESRCH, "no such command");
		return;
	}
	answer_empty(TYPE_RELEASE, id);
	release_command(c);
}

static void on_commands(u64 id, struct in *in)
{
	enum { IN_PART = 512 };
	if (!take_end(in)) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	u32 left = n_commands;
	struct command *c = commands;
	do {
		u32 part = left < IN_PART ? left : IN_PART;
		left -= part;
		begin(TYPE_COMMANDS | ANSWER, left ? FLAG_MORE : 0, id);
		put_u32(part);
		for (; part && c; part--, c = c->next) {
			put_text(c->name);
			put_u64(c->object.id);
			put_u32((c->pid ? COMMAND_RUNS : 0) | (c->pid || c->group.fd >= 0 ? COMMAND_TREE : 0) | (c->released ? COMMAND_RELEASED : 0));
		}
		end();
	} while (left);
}

static void on_cut(u64 id, struct in *in)
{
	u32 n, done = 0;
	char **names = take_list(in, &n, 1);
	if (!names || !take_end(in)) {
		free(names);
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	for (u32 i = 0; i < n; i++)
		for (struct command *c = commands; c; c = c->next)
			if (!strcmp(c->name, names[i])) {
				kill_command(c);
				release_command(c);
				done++;
				break;
			}
	free(names);
	answer_u32(TYPE_CUT, id, done);
}

#endif
