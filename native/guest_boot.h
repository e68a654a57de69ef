/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: how it starts. As process 1 of our initramfs it makes the sandbox's root of its disks; as a service it finds everything there.
 */
#ifndef GUEST_BOOT_H
#define GUEST_BOOT_H

#include "guest_group.h"

static __attribute__((noreturn)) void fail(const char *what, int error)
{
	say("guestd: %s: %s", what, strerror(error));
	exit(70);
}

static void boot(void) { fail("boot", ENOSYS); }

/* The cgroup that the kernel says we are in, beneath the mount of cgroup2. */
static int own_group(void)
{
	char text[4096], path[4200];
	if (read_text(guest.proc, "self/cgroup", text, sizeof(text)) <= 0)
		return -1;
	for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
		if (!strncmp(line, "0::", 3)) {
			snprintf(path, sizeof(path), "/sys/fs/cgroup%s", line + 3);
			return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		}
	return -1;
}

static void use_group(int group)
{
	struct statfs fs;
	if (group < 0 || fstatfs(group, &fs) < 0 || fs.f_type != CGROUP2_SUPER_MAGIC)
		return;
	guest.group = group;
	memory_events = openat(group, "memory.events", O_RDONLY | O_CLOEXEC);
	pids_events = openat(group, "pids.events", O_RDONLY | O_CLOEXEC);
}

static void start_service(int argc, char **argv)
{
	const char *root = "/", *group = NULL, *port = NULL;
	int fd = -1;
	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--root"))
			root = argv[i + 1];
		else if (!strcmp(argv[i], "--cgroup"))
			group = argv[i + 1];
		else if (!strcmp(argv[i], "--port"))
			port = argv[i + 1];
		else if (!strcmp(argv[i], "--fd"))
			fd = atoi(argv[i + 1]);
		else
			fail(argv[i], EINVAL);
	}
	if (argc % 2 == 0 || (fd < 0) == (port == NULL))
		fail("usage: dsec-guestd --port PATH | --fd N [--root DIR] [--cgroup DIR]", EINVAL);
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
	guest.chroots = strcmp(root, "/") != 0;
	use_group(group ? open(group, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : own_group());
	if (group && guest.group < 0)
		fail(group, errno ? errno : EINVAL);
}

#endif
