/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: what all parts share. Sources of events, things known by an id, and a few helpers.
 */
#ifndef GUEST_BASE_H
#define GUEST_BASE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest_protocol.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

enum {
	RESERVED_FDS = 20, /* 0 to 19 are /dev/null from the start, so that a command's descriptors never lie on ours */
	BATCH = 16, /* events looked at in one turn */
	MAX_COMMANDS = 1024,
	MAX_TRANSFERS = 64,
	MAX_WATCHES = 64,
};

static struct {
	int root; /* O_PATH, the sandbox's root directory */
	int proc; /* a /proc of our own */
	int group; /* the cgroup of all commands, or -1 */
	int null, random;
	int is_init;
	int chroots; /* commands are put into `root`: we are elsewhere */
	int disk; /* the writable disk of the root, where there is one that can stand still; or -1 */
	int port;
	int port_is_socket;
	int signals;
	sigset_t no_signals;
} guest = { .root = -1, .proc = -1, .group = -1, .null = -1, .random = -1, .disk = -1, .port = -1, .signals = -1 };

/* To the console, or wherever our errors go. */
static void say(const char *format, ...)
{
	char text[512];
	va_list args;
	va_start(args, format);
	int len = vsnprintf(text, sizeof(text) - 1, format, args);
	va_end(args);
	if (len < 0)
		return;
	if ((size_t)len > sizeof(text) - 2)
		len = sizeof(text) - 2;
	text[len] = '\n';
	if (write(guest.is_init ? STDOUT_FILENO : STDERR_FILENO, text, (size_t)len + 1) < 0)
		return; /* nobody listens */
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static u64 now_ns(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return (u64)t.tv_sec * 1000000000u + (u64)t.tv_nsec;
}

/* --- what may become ready ------------------------------------------------------------------------------------------- */

struct source {
	int fd;
	u32 armed; /* what epoll has been told */
	void (*ready)(struct source *, u32 events);
};

static int poller = -1;
static struct epoll_event batch[BATCH];
static int batch_len, batch_at;
static int unfinished; /* something stopped since much is to be sent, and no event will tell to go on with it */

/* Have `ready` called while `events` hold; 0: never. */
static int arm(struct source *source, u32 events)
{
	struct epoll_event event = { .events = events, .data.ptr = source };
	if (source->armed == events || source->fd < 0)
		return 0;
	int op = !events ? EPOLL_CTL_DEL : source->armed ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
	if (epoll_ctl(poller, op, source->fd, &event) < 0)
		return -errno;
	source->armed = events;
	return 0;
}

/* Events of it that are waiting in this turn's batch are forgotten: it may be freed. */
static void forget_source(struct source *source)
{
	arm(source, 0);
	for (int i = batch_at; i < batch_len; i++)
		if (batch[i].data.ptr == source)
			batch[i].data.ptr = NULL;
}

static void close_source(struct source *source)
{
	forget_source(source);
	close_fd(&source->fd);
}

/* --- what is known by an id ------------------------------------------------------------------------------------------ */

enum kind { A_COMMAND, A_TRANSFER, A_WATCH };

struct object {
	struct object *next; /* in its bucket */
	u64 id;
	enum kind kind;
};

enum { BUCKETS = 256 };
static struct object *objects[BUCKETS];

static struct object **bucket(u64 id)
{
	return &objects[(id ^ id >> 32 ^ id >> 8) % BUCKETS];
}

static void *find(u64 id, enum kind kind)
{
	for (struct object *o = *bucket(id); o; o = o->next)
		if (o->id == id)
			return o->kind == kind ? o : NULL;
	return NULL;
}

static int known(u64 id)
{
	for (struct object *o = *bucket(id); o; o = o->next)
		if (o->id == id)
			return 1;
	return 0;
}

static void add_object(struct object *object, u64 id, enum kind kind)
{
	object->id = id;
	object->kind = kind;
	object->next = *bucket(id);
	*bucket(id) = object;
}

static void remove_object(struct object *object)
{
	for (struct object **at = bucket(object->id); *at; at = &(*at)->next)
		if (*at == object) {
			*at = object->next;
			return;
		}
}

/* --- small files of the kernel --------------------------------------------------------------------------------------- */

/* The text of a small file, ended by a zero byte; its length or a negative errno. */
static ssize_t read_text(int dir, const char *path, char *text, size_t size)
{
	int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
	size_t len = 0;
	ssize_t got = 0;
	if (fd < 0)
		return -errno;
	while (len < size - 1 && (got = read(fd, text + len, size - 1 - len)) > 0)
		len += (size_t)got;
	int error = errno;
	close(fd);
	text[len] = 0;
	return got < 0 ? -error : (ssize_t)len;
}

static int write_text(int dir, const char *path, const char *text)
{
	int fd = openat(dir, path, O_WRONLY | O_CLOEXEC | O_NOCTTY);
	if (fd < 0)
		return -errno;
	ssize_t wrote = write(fd, text, strlen(text));
	int error = errno;
	close(fd);
	return wrote < 0 ? -error : 0;
}

/* The number after `key` at the beginning of a line, or the first number if `key` is empty. */
static u64 number_after(const char *text, const char *key)
{
	size_t n = strlen(key);
	for (const char *line = text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : line)
		if (!n || (!strncmp(line, key, n) && strchr(" \t:", line[n])))
			return strtoull(line + n + strspn(line + n, " \t:"), NULL, 10);
	return 0;
}

#endif
