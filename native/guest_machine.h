/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: the machine as a whole: who it is, what time it is, what it uses, its disks, its end.
 */
#ifndef GUEST_MACHINE_H
#define GUEST_MACHINE_H

#include <linux/fs.h>
#include <linux/random.h>
#include <sys/random.h>

#include "guest_boot.h"
#include "guest_command.h"

enum { MACHINE_ID_CHARS = 32, BOOT_ID_CHARS = 36, GRACE_MS = 3000 };

static int frozen; /* the root's disk stands still: whoever writes to it waits, so we must not */

static void thaw(void)
{
	if (frozen && guest.disk >= 0)
		ioctl(guest.disk, FITHAW, 0);
	frozen = 0;
}

/* --- identity -------------------------------------------------------------------------------------------------------- */

/* The driver of the machine's generator has fetched some before anybody asked, and every clone has the same. */
static void forget_fetched(void)
{
	u8 fetched[64];
	int fd = open("/dev/hwrng", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return;
	(void)!read(fd, fetched, sizeof(fetched));
	close(fd);
}

/* Mix the seed in, and have every generator of the kernel start anew from it. */
static int reseed(const u8 *seed)
{
	struct {
		int bits, bytes;
		u8 data[SEED_BYTES];
	} pool = { SEED_BYTES * 8, SEED_BYTES, { 0 } };
	memcpy(pool.data, seed, SEED_BYTES);
	int good = !ioctl(guest.random, RNDADDENTROPY, &pool) && !ioctl(guest.random, RNDRESEEDCRNG, 0);
	explicit_bzero(&pool, sizeof(pool));
	forget_fetched();
	return good;
}

static int set_clock(u64 ns)
{
	struct timespec t = { .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };
	return !clock_settime(CLOCK_REALTIME, &t);
}

static int set_machine_id(const char *id)
{
	char line[MACHINE_ID_CHARS + 2];
	struct stat st;
	int fd = open_how(guest.root, "/etc/machine-id", O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY, 0444, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
	if (fd < 0)
		return 0;
	snprintf(line, sizeof(line), "%s\n", id);
	int good = !fstat(fd, &st) && S_ISREG(st.st_mode) && pwrite(fd, line, sizeof(line) - 1, 0) == sizeof(line) - 1 &&
		   (st.st_size <= (off_t)sizeof(line) - 1 || !ftruncate(fd, sizeof(line) - 1));
	close(fd);
	return good;
}

/* The kernel's own boot id cannot be changed. A file of ours is mounted over where it is read. */
static int boot_id_file = -1;

static void cover_boot_id(void)
{
	static const char place[] = "/run/.guestd"; /* for a moment: what is attached nowhere cannot be cloned from */
	char id[64];
	int at = openat(guest.root, "proc/sys/kernel/random/boot_id", O_PATH | O_CLOEXEC | O_NOFOLLOW), tree = -1, file = -1;
	ssize_t len = read_text(guest.proc, "sys/kernel/random/boot_id", id, sizeof(id));
	if (at < 0 || len <= 0 || guest.chroots || mkdir(place, 0700) < 0)
		goto out;
	if (!mount("guestd", place, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=64k,mode=0700")) {
		int from = open(place, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		file = openat(from, "boot_id", O_RDWR | O_CREAT | O_CLOEXEC, 0444);
		tree = (int)syscall(SYS_open_tree, from, "boot_id", 1 | O_CLOEXEC /* OPEN_TREE_CLONE */);
		close_fd(&from);
		umount2(place, MNT_DETACH);
	}
	rmdir(place);
	if (file >= 0 && tree >= 0 && write(file, id, (size_t)len) == len && !syscall(SYS_move_mount, tree, "", at, "", 0x44))
		boot_id_file = file;
	else
		close_fd(&file);
out:
	close_fd(&tree);
	close_fd(&at);
}

static int set_boot_id(const char *id)
{
	char line[BOOT_ID_CHARS + 2];
	if (boot_id_file < 0)
		cover_boot_id();
	snprintf(line, sizeof(line), "%s\n", id);
	return boot_id_file >= 0 && pwrite(boot_id_file, line, sizeof(line) - 1, 0) == sizeof(line) - 1;
}

static void on_identity(u64 id, struct in *in)
{
	u8 seed[SEED_BYTES], fresh[FRESH_BYTES];
	take(in, seed, sizeof(seed));
	u64 clock = take_u64(in);
	const char *hostname = take_str(in), *machine = take_str(in), *boot = take_str(in);
	size_t machine_len = strlen(machine), boot_len = strlen(boot);
	if (!take_end(in) || strlen(hostname) > 64 || (machine_len && machine_len != MACHINE_ID_CHARS) || (boot_len && boot_len != BOOT_ID_CHARS)) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	u32 done = reseed(seed) ? DONE_SEED : 0;
	explicit_bzero(seed, sizeof(seed));
	if (*hostname && !sethostname(hostname, strlen(hostname)))
		done |= DONE_HOSTNAME;
	if (machine_len && set_machine_id(machine))
		done |= DONE_MACHINE_ID;
	if (boot_len && set_boot_id(boot))
		done |= DONE_BOOT_ID;
	if (clock && set_clock(clock))
		done |= DONE_CLOCK;
	if (getrandom(fresh, sizeof(fresh), GRND_NONBLOCK) != sizeof(fresh)) {
		done &= ~(u32)DONE_SEED;
		memset(fresh, 0, sizeof(fresh));
	}
	begin(TYPE_IDENTITY | ANSWER, 0, id);
	put_u32(done);
	put_u32(0);
	put(fresh, sizeof(fresh));
	end();
}

static void on_clock(u64 id, struct in *in)
{
	u8 seed[SEED_BYTES];
	u64 clock = take_u64(in);
	take(in, seed, sizeof(seed));
	if (!take_end(in)) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	u32 done = reseed(seed) ? DONE_SEED : 0;
	if (clock && set_clock(clock))
		done |= DONE_CLOCK;
	answer_u32(TYPE_CLOCK, id, done);
}

/* --- usage and limits ------------------------------------------------------------------------------------------------ */

static u64 group_number(const char *file, const char *key)
{
	char text[1024];
	return guest.group >= 0 && read_text(guest.group, file, text, sizeof(text)) > 0 ? number_after(text, key) : 0;
}

static void on_usage(u64 id, struct in *in)
{
	char text[4096] = "";
	struct statfs fs = { 0 };
	if (!take_end(in)) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	read_text(guest.proc, "meminfo", text, sizeof(text));
	fstatfs(guest.root, &fs);
	u64 block = (u64)fs.f_bsize;
	begin(TYPE_USAGE | ANSWER, 0, id);
	put_u64((number_after(text, "MemTotal") - number_after(text, "MemAvailable")) * 1024);
	put_u64(group_number("memory.peak", ""));
	put_u64(number_after(text, "MemTotal") * 1024);
	put_u64(group_number("cpu.stat", "usage_usec"));
	put_u64(group_number("pids.current", ""));
	put_u64((fs.f_blocks - fs.f_bfree) * block);
	put_u64(fs.f_blocks * block);
	put_u64(fs.f_files - fs.f_ffree);
	put_counters(read_counters(1));
	end();
}

static void on_limits(u64 id, struct in *in)
{
	char text[32];
	u64 pids = take_u64(in);
	if (!take_end(in) || pids > 1u << 22) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	snprintf(text, sizeof(text), "%llu", (unsigned long long)pids);
	answer_result(TYPE_LIMITS, id, !pids ? 0 : guest.group < 0 ? -EOPNOTSUPP : write_text(guest.group, "pids.max", text));
}

/* --- disks ----------------------------------------------------------------------------------------------------------- */

static void on_sync(u64 id, struct in *in)
{
	if (!take_end(in))
		answer_error(id, EINVAL, "malformed request");
	else if (frozen)
		answer_empty(TYPE_SYNC, id);
	else if (guest.disk >= 0)
		answer_result(TYPE_SYNC, id, syncfs(guest.disk) < 0 ? -errno : 0);
	else {
		sync();
		answer_empty(TYPE_SYNC, id);
	}
}

static void on_freeze(u64 id, struct in *in)
{
	if (!take_end(in))
		answer_error(id, EINVAL, "malformed request");
	else if (guest.disk < 0)
		answer_error(id, EOPNOTSUPP, "the root is on no disk that can stand still");
	else if (!frozen && ioctl(guest.disk, FIFREEZE, 0) < 0 && errno != EBUSY)
		answer_error(id, errno, "%s", strerror(errno));
	else {
		frozen = 1;
		answer_empty(TYPE_FREEZE, id);
	}
}

static void on_thaw(u64 id, struct in *in)
{
	if (!take_end(in)) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	thaw();
	answer_empty(TYPE_THAW, id);
}

/* A directory beneath the root, made where it is missing; an O_PATH descriptor or a negative errno. */
static int make_directories(const char *path)
{
	char part[PATH_MAX];
	int fd = open_inside(path, O_PATH | O_DIRECTORY);
	if (fd != -ENOENT)
		return fd;
	const char *slash = strrchr(path, '/');
	if (!slash || (size_t)(slash - path) >= sizeof(part) || !slash[1])
		return -ENOENT;
	memcpy(part, path, (size_t)(slash - path));
	part[slash - path] = 0;
	int parent = make_directories(slash == path ? "/" : part);
	if (parent < 0)
		return parent;
	if (mkdirat(parent, slash + 1, 0755) < 0 && errno != EEXIST)
		fd = -errno;
	else
		fd = open_how(parent, slash + 1, O_PATH | O_DIRECTORY, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);
	close(parent);
	return fd;
}

static int set_options(int context, char *options)
{
	enum { SET_FLAG = 0, SET_STRING = 1 };
	char *saved = NULL;
	for (char *option = strtok_r(options, ",", &saved); option; option = strtok_r(NULL, ",", &saved)) {
		char *value = strchr(option, '=');
		if (value)
			*value++ = 0;
		if (syscall(SYS_fsconfig, context, value ? SET_STRING : SET_FLAG, option, value, 0) < 0)
			return -errno;
	}
	return 0;
}

static int mount_inside_root(const char *source, const char *target, const char *type, char *options, u32 flags)
{
	int at = make_directories(target), error = 0, made = -1;
	if (at < 0)
		return at;
	int context = (int)syscall(SYS_fsopen, type, 1);
	if (context < 0 || (*source && syscall(SYS_fsconfig, context, 1, "source", source, 0) < 0) ||
	    (flags & MOUNT_READ_ONLY && syscall(SYS_fsconfig, context, 0, "ro", NULL, 0) < 0))
		error = -errno;
	if (!error && !(error = set_options(context, options)) &&
	    (syscall(SYS_fsconfig, context, 6, NULL, NULL, 0) < 0 ||
	     (made = (int)syscall(SYS_fsmount, context, 1, flags & MOUNT_READ_ONLY ? 1 /* MOUNT_ATTR_RDONLY */ : 0)) < 0 ||
	     syscall(SYS_move_mount, made, "", at, "", 0x44) < 0))
		error = -errno;
	close_fd(&made);
	close_fd(&context);
	close(at);
	return error;
}

static void on_mount(u64 id, struct in *in)
{
	const char *source = take_str(in), *target = take_str(in), *type = take_str(in);
	char *options = take_str(in);
	u32 flags = take_u32(in);
	if (!take_end(in) || *target != '/' || strlen(target) >= PATH_MAX || flags & ~(u32)MOUNT_READ_ONLY)
		answer_error(id, EINVAL, "malformed request");
	else
		answer_result(TYPE_MOUNT, id, mount_inside_root(source, target, type, options, flags));
}

/* --- the end --------------------------------------------------------------------------------------------------------- */

static u32 shutting_down; /* 1 + how, once it is to happen */

static void on_shutdown(u64 id, struct in *in)
{
	u32 how = take_u32(in);
	if (!take_end(in) || how > SHUTDOWN_REBOOT) {
		answer_error(id, EINVAL, "malformed request");
		return;
	}
	answer_empty(TYPE_SHUTDOWN, id);
	shutting_down = 1 + how;
}

/* Everybody is asked to end, then made to. */
static void shut_down(void)
{
	u64 deadline = now_ns(CLOCK_MONOTONIC) + (u64)GRACE_MS * 1000000;
	struct pollfd child = { .fd = guest.signals, .events = POLLIN };
	struct signalfd_siginfo info;
	thaw();
	if (!guest.is_init) {
		char *argv[] = { (char *)(shutting_down == 1 ? "poweroff" : "reboot"), NULL }, *env[] = { NULL };
		launch->argv = argv;
		launch->env = env;
		launch->path = PATH_DEFAULT;
		launch->cwd = "/";
		launch->user.uid = launch->user.gid = launch->open_files = 0;
		launch->user.n_groups = launch->n_fds = 0;
		launch->terminal = -1;
		start_child(-1);
		return;
	}
	kill(-1, SIGTERM);
	kill(-1, SIGCONT);
	while (waitpid(-1, NULL, WNOHANG) >= 0) { /* until there is no child */
		u64 now = now_ns(CLOCK_MONOTONIC);
		if (now >= deadline)
			break;
		if (poll(&child, 1, (int)((deadline - now) / 1000000 + 1)) > 0 && read(guest.signals, &info, sizeof(info)) < 0)
			break;
	}
	kill(-1, SIGKILL);
	sync();
	if (guest.disk >= 0)
		syncfs(guest.disk);
	reboot(shutting_down == 1 ? RB_POWER_OFF : RB_AUTOBOOT);
	_exit(0); /* process 1's end is the machine's, too */
}

#endif
