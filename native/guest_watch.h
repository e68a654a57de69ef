/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: changes of directories, by inotify.
 */
#ifndef GUEST_WATCH_H
#define GUEST_WATCH_H

#include <sys/inotify.h>

#include "guest_files.h"

struct watch {
	struct object object; /* first: cast */
	struct source source;
	struct watch *next;
};

static struct watch *watches;
static u32 n_watches;

static const struct {
	u32 mask, kind;
} watched_kinds[] = {
	{ IN_CREATE, WATCH_CREATED },
	{ IN_MODIFY | IN_CLOSE_WRITE, WATCH_MODIFIED },
	{ IN_DELETE, WATCH_DELETED },
	{ IN_MOVED_FROM, WATCH_MOVED_FROM },
	{ IN_MOVED_TO, WATCH_MOVED_TO },
	{ IN_ATTRIB, WATCH_ATTRIBUTES },
	{ IN_Q_OVERFLOW, WATCH_OVERFLOW },
	{ IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT | IN_IGNORED, WATCH_GONE },
};
enum {
	WATCHED = IN_CREATE | IN_MODIFY | IN_CLOSE_WRITE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
};

static void end_watch(struct watch *w)
{
	for (struct watch **at = &watches; *at; at = &(*at)->next)
		if (*at == w) {
			*at = w->next;
			break;
		}
	n_watches--;
	remove_object(&w->object);
	close_source(&w->source);
	free(w);
}

static void watch_ready(struct source *source, u32 events)
{
	struct watch *w = (struct watch *)((char *)source - offsetof(struct watch, source));
	char buffer[8192] __attribute__((aligned(8)));
	ssize_t got = read(source->fd, buffer, sizeof(buffer));
	u32 count = 0, last_kind = 0, gone = 0;
	const char *last_name = "";
	(void)events;
	if (got <= 0)
		return;
	begin(TYPE_WATCHED, 0, w->object.id);
	put_u32(0);
	for (char *at = buffer; at < buffer + got && !gone;) {
		struct inotify_event *event = (struct inotify_event *)at;
		const char *name = event->len ? event->name : "";
		at += sizeof(*event) + event->len;
		for (size_t i = 0; i < sizeof(watched_kinds) / sizeof(*watched_kinds); i++) {
			u32 kind = watched_kinds[i].kind;
			if (!(event->mask & watched_kinds[i].mask) || (kind == last_kind && !strcmp(name, last_name)))
				continue;
			put_u32(kind);
			put_text(kind >= WATCH_OVERFLOW ? "" : name);
			count++;
			last_kind = kind;
			last_name = name;
			gone |= kind == WATCH_GONE;
		}
	}
	memcpy(tx + frame_at + HEADER_BYTES, &count, sizeof(count));
	if (count)
		end();
	else
		tx_to = frame_at;
	if (gone)
		arm(source, 0);
}

static void on_watch(u64 id, struct in *in)
{
	const char *path = take_str(in);
	char link[40];
	if (!take_end(in) || bad_path(path)) {
		malformed(id);
		return;
	}
	int fd = open_directory(path), error = fd < 0 ? -fd : 0;
	struct watch *w = error || n_watches >= MAX_WATCHES ? NULL : calloc(1, sizeof(*w));
	int notify = w ? inotify_init1(IN_CLOEXEC | IN_NONBLOCK) : -1;
	if (!error && notify < 0)
		error = w ? errno : EAGAIN;
	if (!error) {
		/* By the descriptor: inotify takes paths alone. It is the thread's working directory for a moment. */
		snprintf(link, sizeof(link), "self/fd/%d", fd);
		if (fchdir(guest.proc) < 0 || inotify_add_watch(notify, link, WATCHED) < 0)
			error = errno;
		if (fchdir(guest.root) < 0 && !error)
			error = errno;
	}
	close_fd(&fd);
	if (error) {
		close_fd(&notify);
		free(w);
		answer_error(id, error, "%s", error == ENOSPC || error == EAGAIN ? "no further directory can be watched" : strerror(error));
		return;
	}
	w->source = (struct source){ .fd = notify, .ready = watch_ready };
	w->next = watches;
	watches = w;
	n_watches++;
	add_object(&w->object, id, A_WATCH);
	answer_empty(TYPE_WATCH, id);
	arm(&w->source, EPOLLIN);
}

static void on_unwatch(u64 id, struct in *in)
{
	struct watch *w = find(take_u64(in), A_WATCH);
	if (!take_end(in) || !w) {
		answer_error(id, w ? EINVAL : ESRCH, "no such watch");
		return;
	}
	end_watch(w);
	answer_empty(TYPE_UNWATCH, id);
}

#endif
