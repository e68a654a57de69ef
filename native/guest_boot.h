/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd as process 1 of our initramfs: from a kernel that has just started to the sandbox's root. docs/guest-protocol.md, "Starting".
 */
#ifndef GUEST_BOOT_H
#define GUEST_BOOT_H

#include <linux/module.h>
#include <net/if.h>
#include <sched.h>
#include <sys/reboot.h>

#include "guest_group.h"
#include "guest_user.h"

enum { MAX_LAYERS = 64, WAIT_MS = 10000, STEP_MS = 2 };
#define PORT_NAME "org.opendsec.guest.0"
#define GROUP_NAME "opendsec"

static char cmdline[4096];

static __attribute__((noreturn)) void fail(const char *what, int error)
{
	say("guestd: %s: %s", what, strerror(error < 0 ? -error : error));
	if (guest.is_init) {
		sync();
		reboot(RB_POWER_OFF);
	}
	exit(70);
}

/* The value of an argument of the kernel, or `otherwise`. Values are kept for good. */
static const char *argument(const char *name, const char *otherwise)
{
	size_t len = strlen(name);
	for (const char *at = cmdline; *at; at += strspn(at, " \n")) {
		size_t n = strcspn(at, " \n");
		if (n > len && !strncmp(at, name, len) && at[len] == '=') {
			char *value = strndup(at + len + 1, n - len - 1);
			return value ? value : otherwise;
		}
		at += n;
	}
	return otherwise;
}

static void must_mount(const char *source, const char *target, const char *type, unsigned long flags, const char *options)
{
	mkdir(target, 0755);
	if (mount(source, target, type, flags, options) < 0) {
		int error = errno;
		char what[256];
		snprintf(what, sizeof(what), "mounting %s (%s) at %s", source, type, target);
		fail(what, error);
	}
}

static void wait_a_little(void)
{
	struct timespec t = { .tv_nsec = STEP_MS * 1000000 };
	nanosleep(&t, NULL);
}

/* --- modules --------------------------------------------------------------------------------------------------------- */

static void load_module(const char *name)
{
	char path[300];
	snprintf(path, sizeof(path), "/modules/%s.ko", name);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST))
		say("guestd: module %s: %s", name, strerror(errno)); /* whatever needs it says so, too */
	close_fd(&fd);
	unlink(path); /* the initramfs is memory */
}

static void load_modules(void)
{
	static char order[65536];
	const char *given = argument("dsec.modules", NULL);
	char *saved = NULL;
	if (given)
		snprintf(order, sizeof(order), "%s", given);
	else if (read_text(AT_FDCWD, "/modules/order", order, sizeof(order)) < 0)
		return;
	for (char *name = strtok_r(order, ",\n", &saved); name; name = strtok_r(NULL, ",\n", &saved))
		load_module(name);
}

/* --- disks ----------------------------------------------------------------------------------------------------------- */

/* The serial number of a disk: as virtio has it, or the SCSI page that has it behind four bytes. */
static void serial_of(const char *disk, char *serial, size_t size)
{
	char path[300];
	snprintf(path, sizeof(path), "/sys/block/%s/serial", disk);
	ssize_t got = read_text(AT_FDCWD, path, serial, size);
	if (got < 0) {
		snprintf(path, sizeof(path), "/sys/block/%s/device/vpd_pg80", disk);
		got = read_text(AT_FDCWD, path, serial, size);
		if (got > 4)
			memmove(serial, serial + 4, (size_t)(got -= 4));
		else
			got = 0;
	}
	serial[got > 0 ? got : 0] = 0;
	serial[strcspn(serial, " \n")] = 0;
}

/* The device of the disk with this serial number, into `device`. */
static int disk_of(const char *wanted, char *device, size_t size)
{
	char serial[64];
	DIR *dir = opendir("/sys/block");
	int found = 0;
	for (struct dirent *entry; dir && !found && (entry = readdir(dir));) {
		if (entry->d_name[0] == '.')
			continue;
		serial_of(entry->d_name, serial, sizeof(serial));
		if ((found = !strcmp(serial, wanted)))
			snprintf(device, size, "/dev/%s", entry->d_name);
	}
	if (dir)
		closedir(dir);
	return found;
}

/* The device that is number `at` of `dsec.disks`, or that has this serial number; waits for it. */
static void find_disk(const char *listed, int at, const char *serial, char *device, size_t size)
{
	if (listed) {
		for (; at > 0 && listed; at--)
			listed = strchr(listed, ','), listed = listed ? listed + 1 : NULL;
		if (!listed || !*listed)
			fail("dsec.disks names too few", EINVAL);
		snprintf(device, size, "/dev/%.*s", (int)strcspn(listed, ","), listed);
	}
	for (int waited = 0; waited < WAIT_MS; waited += STEP_MS, wait_a_little())
		if (listed ? !access(device, F_OK) : disk_of(serial, device, size))
			return;
	fail(listed ? device : serial, ENODEV);
}

static int has_scratch(const char *listed, int layers)
{
	const char *given = argument("dsec.scratch", NULL);
	if (given)
		return strcmp(given, "none") != 0;
	for (int commas = 2 * layers; listed && commas > 0; commas--)
		listed = strchr(listed, ','), listed = listed ? listed + 1 : NULL;
	return listed ? *listed != 0 : argument("dsec.disks", NULL) == NULL;
}

/* The sandbox's root at /newroot. */
static void mount_root(void)
{
	char device[64], data[64], target[64], options[4096] = "lowerdir=", name[32];
	const char *listed = argument("dsec.disks", NULL);
	int layers = atoi(argument("dsec.layers", "0")), scratch = has_scratch(listed, layers);
	struct stat st = { .st_mode = 0755 };
	if (layers < 0 || layers > MAX_LAYERS)
		fail("dsec.layers", EINVAL);
	mkdir("/mnt", 0755);
	mkdir("/newroot", 0755);
	for (int i = 0; i < layers; i++) {
		snprintf(name, sizeof(name), "meta%d", i);
		find_disk(listed, 2 * i, name, device, sizeof(device));
		snprintf(name, sizeof(name), "data%d", i);
		find_disk(listed, 2 * i + 1, name, data, sizeof(data));
		snprintf(target, sizeof(target), "/mnt/l%d", i);
		char with[128];
		snprintf(with, sizeof(with), "device=%s", data);
		must_mount(device, target, "erofs", MS_RDONLY, with);
	}
	if (scratch) {
		find_disk(listed, 2 * layers, "scratch", device, sizeof(device));
		must_mount(device, layers ? "/mnt/scratch" : "/newroot", "ext4", MS_NOATIME, "");
	} else
		must_mount("scratch", layers ? "/mnt/scratch" : "/newroot", "tmpfs", 0, "mode=0755");
	guest.disk = scratch ? open(layers ? "/mnt/scratch" : "/newroot", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
	if (!layers)
		return;
	for (int i = layers - 1; i >= 0; i--) {
		size_t len = strlen(options);
		snprintf(options + len, sizeof(options) - len, "%s/mnt/l%d", i < layers - 1 ? ":" : "", i);
	}
	size_t len = strlen(options);
	snprintf(options + len, sizeof(options) - len, ",upperdir=/mnt/scratch/upper,workdir=/mnt/scratch/work");
	/* The root directory itself shows as the upper one: a new one is made to look like that of the highest layer. */
	if (stat(target, &st) < 0)
		fail(target, errno);
	if (!mkdir("/mnt/scratch/upper", 0755) && (chmod("/mnt/scratch/upper", st.st_mode & 07777) < 0 || chown("/mnt/scratch/upper", st.st_uid, st.st_gid) < 0))
		fail("/mnt/scratch/upper", errno);
	mkdir("/mnt/scratch/work", 0700);
	must_mount("overlay", "/newroot", "overlay", 0, options);
}

/* --- what is in it --------------------------------------------------------------------------------------------------- */

static void mount_inside(void)
{
	enum { QUIET = MS_NOSUID | MS_NODEV, QUIETER = QUIET | MS_NOEXEC };
	must_mount("proc", "/newroot/proc", "proc", QUIETER, "");
	must_mount("sysfs", "/newroot/sys", "sysfs", QUIETER, "");
	must_mount("devtmpfs", "/newroot/dev", "devtmpfs", MS_NOSUID, "mode=0755");
	must_mount("devpts", "/newroot/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5");
	must_mount("shm", "/newroot/dev/shm", "tmpfs", QUIET, "mode=1777");
	must_mount("mqueue", "/newroot/dev/mqueue", "mqueue", QUIETER, "");
	must_mount("run", "/newroot/run", "tmpfs", QUIET, "mode=0755");
	mkdir("/newroot/tmp", 01777);
	static const char *const links[][2] = { { "/proc/self/fd", "fd" }, { "fd/0", "stdin" }, { "fd/1", "stdout" }, { "fd/2", "stderr" } };
	for (size_t i = 0; i < sizeof(links) / sizeof(*links); i++) {
		char path[64];
		snprintf(path, sizeof(path), "/newroot/dev/%s", links[i][1]);
		if (symlink(links[i][0], path) < 0 && errno != EEXIST)
			fail(path, errno);
	}
}

/* A mount that is attached nowhere: nothing that happens in the sandbox's tree of mounts changes what we see. */
static int private_mount(const char *type)
{
	int context = (int)syscall(SYS_fsopen, type, 1 /* FSOPEN_CLOEXEC */);
	if (context < 0 || syscall(SYS_fsconfig, context, 6 /* FSCONFIG_CMD_CREATE */, NULL, NULL, 0) < 0)
		fail(type, errno);
	int fd = (int)syscall(SYS_fsmount, context, 1 /* FSMOUNT_CLOEXEC */, 0);
	if (fd < 0)
		fail(type, errno);
	close(context);
	return fd;
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

/* All commands' groups are below one. For them it is the root, and what they make (Docker does) is below a command's. */
static void make_groups(void)
{
	int top = private_mount("cgroup2");
	write_text(top, "cgroup.subtree_control", "+pids");
	write_text(top, "cgroup.subtree_control", "+memory");
	write_text(top, "cgroup.subtree_control", "+cpu");
	if (mkdirat(top, GROUP_NAME, 0755) < 0)
		fail("making the commands' group", errno);
	int group = openat(top, GROUP_NAME, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int back = openat(top, "cgroup.procs", O_WRONLY | O_CLOEXEC); /* opened now, it counts as seen from outside */
	if (group < 0 || back < 0 || write_text(group, "cgroup.procs", "1") < 0 || unshare(CLONE_NEWCGROUP) < 0 || write(back, "1", 1) < 0)
		fail("entering the commands' group", errno);
	close(back);
	close(top);
	use_group(group);
	const char *pids = argument("dsec.pids", NULL);
	if (pids && write_text(group, "pids.max", pids) < 0)
		fail("dsec.pids", EINVAL);
	must_mount("cgroup2", "/newroot/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, "");
}

static void loopback_up(void)
{
	struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (sock < 0 || ioctl(sock, SIOCSIFFLAGS, &request) < 0)
		say("guestd: loopback: %s", strerror(errno));
	close_fd(&sock);
}

/* --- the port -------------------------------------------------------------------------------------------------------- */

/* There is no udev to make /dev/virtio-ports. */
static int open_port(void)
{
	char path[300], name[64];
	DIR *dir = opendir("/sys/class/virtio-ports");
	int fd = -1;
	for (struct dirent *entry; dir && fd < 0 && (entry = readdir(dir));) {
		snprintf(path, sizeof(path), "/sys/class/virtio-ports/%s/name", entry->d_name);
		if (entry->d_name[0] == '.' || read_text(AT_FDCWD, path, name, sizeof(name)) <= 0 || strncmp(name, PORT_NAME "\n", sizeof(PORT_NAME)))
			continue;
		snprintf(path, sizeof(path), "/dev/%s", entry->d_name);
		fd = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY);
	}
	if (dir)
		closedir(dir);
	return fd;
}

/* --- all of it ------------------------------------------------------------------------------------------------------- */

/* What everything else needs: devices, /proc, /sys. */
static void boot_early(void)
{
	must_mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755");
	must_mount("proc", "/proc", "proc", 0, "");
	must_mount("sysfs", "/sys", "sysfs", 0, "");
	if (read_text(AT_FDCWD, "/proc/cmdline", cmdline, sizeof(cmdline)) < 0)
		fail("/proc/cmdline", errno);
	const char *files = argument("dsec.nofile", NULL);
	struct rlimit limit = { files ? strtoul(files, NULL, 10) : 1 << 20, files ? strtoul(files, NULL, 10) : 1 << 20 };
	if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
		fail("dsec.nofile", errno);
}

/* What the kernel does now and then for a machine's long-term health wakes a hundred idle guests on one host all the time. */
static void rest(void)
{
	write_text(guest.proc, "sys/vm/compaction_proactiveness", "0");
	write_text(guest.proc, "sys/vm/stat_interval", "60");
}

static void boot(void)
{
	load_modules();
	mount_root();
	mount_inside();
	guest.proc = private_mount("proc");
	rest();
	make_groups();
	loopback_up();
	const char *hostname = argument("dsec.hostname", "opendsec");
	if (sethostname(hostname, strlen(hostname)) < 0)
		fail("dsec.hostname", errno);
	for (int waited = 0; (guest.port = open_port()) < 0; waited += STEP_MS, wait_a_little())
		if (waited >= WAIT_MS)
			fail("the port " PORT_NAME, ENODEV);
	unlink("/init");
	umount2("/sys", MNT_DETACH);
	umount2("/proc", MNT_DETACH);
	umount2("/dev", MNT_DETACH);
	/* As every initramfs does: mounted over the root, so that user namespaces and pivot_root work in the sandbox. */
	if (chdir("/newroot") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
		fail("changing to the root", errno);
	guest.root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (guest.root < 0)
		fail("opening the root", errno);
}

#endif
