/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: control groups. Each command has one of its own below `guest.group`, so that its tree can be counted and killed whoever left
 * its session, forked twice or ignores signals.
 */
#ifndef GUEST_GROUP_H
#define GUEST_GROUP_H

#include "guest_wire.h"

enum { MAX_MEMBERS = 65536 };

struct counters {
	u64 oom_kills, pids_denied;
	u32 disk_full, inodes_full;
};

/* Groups of ended commands are used again: to make and remove one costs more than all else that we do for a command. */
enum { MAX_SPARES = 4 };

struct group {
	int fd, events; /* -1: none; `events` is its cgroup.events */
	u32 number; /* its name */
	u64 cpu_before_us; /* used by commands before this one */
	int killed; /* once is for ever: some kernels kill whoever is born in it later */
};

static struct group spares[MAX_SPARES];
static int n_spares;
static u32 n_groups;

static void name_group(const struct group *group, char *name, size_t size)
{
	snprintf(name, size, "c%u", group->number);
}

static int make_group(struct group *group)
{
	char name[32];
	*group = (struct group){ .fd = -1, .events = -1, .number = n_groups++ };
	name_group(group, name, sizeof(name));
	if (mkdirat(guest.group, name, 0755) < 0)
		return -errno;
	group->fd = openat(guest.group, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	group->events = group->fd < 0 ? -1 : openat(group->fd, "cgroup.events", O_RDONLY | O_CLOEXEC);
	if (group->events < 0) {
		int error = -errno;
		close_fd(&group->fd);
		unlinkat(guest.group, name, AT_REMOVEDIR);
		return error;
	}
	return 0;
}

static int take_group(struct group *group)
{
	if (!n_spares)
		return make_group(group);
	*group = spares[--n_spares];
	return 0;
}

/* Whether any process is in the group or below. */
static int group_populated(const struct group *group)
{
	char text[256];
	ssize_t got = pread(group->events, text, sizeof(text) - 1, 0);
	text[got > 0 ? got : 0] = 0;
	return number_after(text, "populated") != 0;
}

static void kill_group(struct group *group)
{
	group->killed = 1;
	write_text(group->fd, "cgroup.kill", "1");
}

/* Remove a group and what somebody made below it, which holds nothing any more. At most so deep. */
static void remove_group(int parent, const char *name, int depth)
{
	if (!unlinkat(parent, name, AT_REMOVEDIR) || errno == ENOENT || depth > 32)
		return;
	int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	if (!dir) {
		close_fd(&fd);
		return;
	}
	for (struct dirent *entry; (entry = readdir(dir));)
		if (entry->d_type == DT_DIR && entry->d_name[0] != '.')
			remove_group(fd, entry->d_name, depth + 1);
	closedir(dir);
	unlinkat(parent, name, AT_REMOVEDIR);
}

/* The processes of a group and of all below. `pids` has room for `most`; how many there are. */
static u32 group_members(int group, pid_t *pids, u32 most, int depth)
{
	u32 n = 0;
	int fd = openat(group, "cgroup.procs", O_RDONLY | O_CLOEXEC);
	FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
	char line[32];
	if (file) {
		while (n < most && fgets(line, sizeof(line), file)) {
			int pid = atoi(line);
			if (pid > 0)
				pids[n++] = pid;
		}
		fclose(file);
	} else
		close_fd(&fd);
	/* Below are only groups that processes of the sandbox made (Docker does): look if there are any. */
	struct stat st;
	if (depth > 32 || fstat(group, &st) < 0 || st.st_nlink <= 2)
		return n;
	fd = openat(group, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	if (!dir) {
		close_fd(&fd);
		return n;
	}
	for (struct dirent *entry; n < most && (entry = readdir(dir));) {
		if (entry->d_type != DT_DIR || entry->d_name[0] == '.')
			continue;
		int below = openat(dirfd(dir), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
		if (below >= 0)
			n += group_members(below, pids + n, most - n, depth + 1);
		close_fd(&below);
	}
	closedir(dir);
	return n;
}

static u64 group_cpu_us(int group)
{
	char text[1024];
	return read_text(group, "cpu.stat", text, sizeof(text)) > 0 ? number_after(text, "usage_usec") : 0;
}

/* A group that holds nobody. */
static void give_group(struct group *group)
{
	struct stat st;
	char name[32];
	if (n_spares < MAX_SPARES && !group->killed && !fstat(group->fd, &st) && st.st_nlink <= 2) {
		group->cpu_before_us = group_cpu_us(group->fd);
		spares[n_spares++] = *group;
	} else {
		name_group(group, name, sizeof(name));
		close(group->fd);
		close(group->events);
		remove_group(guest.group, name, 0);
	}
	group->fd = group->events = -1;
}

static int memory_events = -1, pids_events = -1; /* of guest.group */

static u64 reread(int fd, const char *key)
{
	char text[1024];
	ssize_t got = fd < 0 ? 0 : pread(fd, text, sizeof(text) - 1, 0);
	text[got > 0 ? got : 0] = 0;
	return number_after(text, key);
}

/* `disk`: also whether that is full. */
static struct counters read_counters(int disk)
{
	struct statfs fs;
	struct counters counters = { .oom_kills = reread(memory_events, "oom_kill"), .pids_denied = reread(pids_events, "max") };
	if (disk && guest.is_init && !fstatfs(guest.root, &fs) && fs.f_blocks) { /* else it is not the sandbox's alone */
		counters.disk_full = (u64)fs.f_bavail * (u64)fs.f_bsize < 65536;
		counters.inodes_full = fs.f_files && !fs.f_ffree;
	}
	return counters;
}

static void put_counters(struct counters counters)
{
	put_u64(counters.oom_kills);
	put_u64(counters.pids_denied);
	put_u32(counters.disk_full);
	put_u32(counters.inodes_full);
}

#endif
