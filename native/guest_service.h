/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd as a service of a Linux that was there already, or of a test.
 */
#ifndef GUEST_SERVICE_H
#define GUEST_SERVICE_H

#include "guest_boot.h"

/* Limits go down to groups below one that has no processes of its own: so we move into a leaf. */
static void share_out(int own)
{
	struct statfs fs;
	if (fstatfs(own, &fs) < 0 || fs.f_type != CGROUP2_SUPER_MAGIC)
		return;
	mkdirat(own, "agent", 0755);
	int leaf = openat(own, "agent", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (leaf >= 0 && write_text(leaf, "cgroup.procs", "0") >= 0) {
		write_text(own, "cgroup.subtree_control", "+pids");
		write_text(own, "cgroup.subtree_control", "+memory");
		write_text(own, "cgroup.subtree_control", "+cpu");
	}
	close_fd(&leaf);
}

/* A cgroup below the one that the kernel says we are in. The service must have it delegated (systemd: Delegate=yes). */
static int own_group(void)
{
	char text[4096], path[4200], *saved = NULL;
	if (read_text(guest.proc, "self/cgroup", text, sizeof(text)) <= 0)
		return -1;
	for (char *line = strtok_r(text, "\n", &saved); line; line = strtok_r(NULL, "\n", &saved))
		if (!strncmp(line, "0::", 3)) {
			snprintf(path, sizeof(path), "/sys/fs/cgroup%s", line + 3);
			int own = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), group;
			if (own < 0)
				return -1;
			share_out(own);
			mkdirat(own, GROUP_NAME, 0755);
			group = openat(own, GROUP_NAME, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
			close(own);
			return group;
		}
	return -1;
}

static void start_service(int argc, char **argv)
{
	const char *root = "/", *group = NULL, *port = NULL, *disk = NULL;
	int fd = -1;
	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--root"))
			root = argv[i + 1];
		else if (!strcmp(argv[i], "--cgroup"))
			group = argv[i + 1];
		else if (!strcmp(argv[i], "--port"))
			port = argv[i + 1];
		else if (!strcmp(argv[i], "--disk"))
			disk = argv[i + 1];
		else if (!strcmp(argv[i], "--fd"))
			fd = atoi(argv[i + 1]);
		else
			fail(argv[i], EINVAL);
	}
	if (argc % 2 == 0 || (fd < 0) == (port == NULL))
		fail("usage: dsec-guestd --port PATH | --fd N [--root DIR] [--cgroup DIR] [--disk DIR]", EINVAL);
	guest.port_is_socket = fd >= 0;
	guest.port = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, RESERVED_FDS) : open(port, O_RDWR | O_CLOEXEC | O_NOCTTY);
	if (guest.port < 0)
		fail("opening the port", errno);
	if (fd >= 0)
		close(fd);
	guest.root = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
	guest.proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (guest.root < 0 || guest.proc < 0)
		fail(root, errno);
	guest.disk = disk ? open(disk, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
	if (disk && guest.disk < 0)
		fail(disk, errno);
	guest.chroots = strcmp(root, "/") != 0;
	use_group(group ? open(group, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : own_group());
	if (group && guest.group < 0)
		fail(group, errno ? errno : EINVAL);
}

#endif
