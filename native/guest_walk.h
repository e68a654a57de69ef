/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: WALK, a tree as a stream of records. A directory's entries are sorted, those that are directories after the rest, so that one tree
 * gives one stream. One descriptor is held for each level, and the names that are still to come.
 */
#ifndef GUEST_WALK_H
#define GUEST_WALK_H

#include "guest_transfer.h"

enum {
	WALK_DEPTH = 1024, MAX_NAMES = 200000, /* in one directory */
	OUT_BYTES = 80 << 10, OUT_ENOUGH = 48 << 10, CONTENT_STEP = 16 << 10,
	LINK_SLOTS = 8192, MAX_LINKED = LINK_SLOTS / 2, /* later hard links become files of their own */
};

struct level {
	int fd;
	char *names; /* each with its kind before it: 'd' or 'f' */
	char **sorted;
	u32 n, at;
	size_t prefix; /* how much of `path` leads here */
};

struct walk {
	struct transfer t;
	struct level *levels;
	int depth;
	char path[PATH_MAX + NAME_MAX + 2]; /* of the entry, relative to the start */
	int file; /* whose content is being sent */
	u64 left;
	u64 missing;
	struct {
		u64 device, inode;
		char *name;
	} *links;
	u32 n_links;
	u8 *out;
	size_t out_from, out_to;
};

static void out_bytes(struct walk *w, const void *data, size_t len)
{
	memcpy(w->out + w->out_to, data, len); /* there is room: less than OUT_ENOUGH was there before one record */
	w->out_to += len;
}

static void out_u32(struct walk *w, u32 value)
{
	out_bytes(w, &value, sizeof(value));
}

static void out_u64(struct walk *w, u64 value)
{
	out_bytes(w, &value, sizeof(value));
}

static void out_text(struct walk *w, const char *text)
{
	out_u32(w, (u32)strlen(text));
	out_bytes(w, text, strlen(text));
}

static void out_problem(struct walk *w, const char *name, const char *text)
{
	out_u32(w, RECORD_PROBLEM);
	out_text(w, name);
	out_text(w, text);
}

static void out_entry(struct walk *w, u32 kind, const char *name, const struct stat *st, const char *target)
{
	out_u32(w, kind);
	out_u32(w, st->st_mode);
	out_u32(w, st->st_uid);
	out_u32(w, st->st_gid);
	out_u32(w, (u32)st->st_nlink);
	out_u64(w, (u64)st->st_size);
	out_u64(w, time_ns(st->st_mtim));
	out_u64(w, (u64)st->st_dev);
	out_u64(w, (u64)st->st_ino);
	out_text(w, name);
	out_text(w, target);
}

/* The name under which this inode came before, or NULL; it is remembered as `name` then. */
static const char *seen_as(struct walk *w, const struct stat *st, const char *name)
{
	if (!w->links && !(w->links = calloc(LINK_SLOTS, sizeof(*w->links))))
		return NULL;
	u32 slot = (u32)((st->st_ino * 0x9E3779B97F4A7C15u) >> 40) % LINK_SLOTS;
	for (; w->links[slot].name; slot = (slot + 1) % LINK_SLOTS)
		if (w->links[slot].inode == (u64)st->st_ino && w->links[slot].device == (u64)st->st_dev)
			return w->links[slot].name;
	if (w->n_links < MAX_LINKED && (w->links[slot].name = strdup(name))) {
		w->links[slot].device = (u64)st->st_dev;
		w->links[slot].inode = (u64)st->st_ino;
		w->n_links++;
	}
	return NULL;
}

/* --- directories ----------------------------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
	const char *x = *(char *const *)a, *y = *(char *const *)b;
	if (*x != *y)
		return *x == 'd' ? 1 : -1;
	return strcmp(x + 1, y + 1);
}

static int is_directory(int parent, const struct dirent *entry)
{
	struct stat st;
	if (entry->d_type != DT_UNKNOWN)
		return entry->d_type == DT_DIR;
	return !fstatat(parent, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) && S_ISDIR(st.st_mode);
}

/* Read the names of the directory `level->fd`. */
static int read_names(struct level *level)
{
	int fd = openat(level->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	size_t len = 0, size = 0;
	int error = 0;
	if (!dir) {
		error = -errno;
		close_fd(&fd);
		return error;
	}
	for (struct dirent *entry; !error && (entry = readdir(dir));) {
		size_t n = strlen(entry->d_name);
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		if (len + n + 2 > size) {
			char *grown = realloc(level->names, size = size * 2 + 4096);
			if (!grown)
				error = -ENOMEM;
			else
				level->names = grown;
		}
		if (++level->n > MAX_NAMES)
			error = -EFBIG;
		if (error)
			break;
		level->names[len] = is_directory(fd, entry) ? 'd' : 'f';
		memcpy(level->names + len + 1, entry->d_name, n + 1);
		len += n + 2;
	}
	closedir(dir);
	if (!error && level->n && !(level->sorted = malloc(level->n * sizeof(char *))))
		error = -ENOMEM;
	if (error)
		return error;
	char *at = level->names;
	for (u32 i = 0; i < level->n; i++, at += strlen(at) + 1)
		level->sorted[i] = at;
	if (level->n)
		qsort(level->sorted, level->n, sizeof(char *), compare_names);
	return 0;
}

static void leave(struct walk *w)
{
	struct level *level = &w->levels[--w->depth];
	close_fd(&level->fd);
	free(level->names);
	free(level->sorted);
}

/* Go on in a directory, `fd`, which is ours from now on. */
static int enter(struct walk *w, int fd)
{
	struct level *level = &w->levels[w->depth];
	if (w->depth == WALK_DEPTH) {
		close(fd);
		return -ENAMETOOLONG;
	}
	memset(level, 0, sizeof(*level));
	level->fd = fd;
	level->prefix = strlen(w->path);
	if (level->prefix)
		w->path[level->prefix++] = '/';
	w->depth++;
	return read_names(level);
}

/* --- entries --------------------------------------------------------------------------------------------------------- */

static void walk_file(struct walk *w, int entry, const char *name)
{
	struct stat st;
	int fd = reopen_regular(entry, O_RDONLY);
	if (fd < 0 || fstat(fd, &st) < 0) {
		out_problem(w, name, strerror(fd < 0 ? -fd : errno));
		close_fd(&fd);
		return;
	}
	out_entry(w, RECORD_ENTRY, name, &st, "");
	w->file = fd;
	w->left = (u64)st.st_size;
	w->missing = 0;
}

static void walk_entry(struct walk *w, int parent, const char *name)
{
	char target[PATH_MAX] = "";
	struct stat st;
	int fd = open_entry(parent, name);
	if (fd == -EXDEV && !fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW) && S_ISDIR(st.st_mode)) {
		out_entry(w, RECORD_ENTRY, w->path, &st, ""); /* a mount point: there, and empty */
		return;
	}
	if (fd < 0 || fstat(fd, &st) < 0) {
		out_problem(w, w->path, fd == -EXDEV ? "something is mounted there" : fd == -ENOENT ? "disappeared" : strerror(fd < 0 ? -fd : errno));
		close_fd(&fd);
		return;
	}
	const char *earlier = st.st_nlink > 1 && !S_ISDIR(st.st_mode) ? seen_as(w, &st, w->path) : NULL;
	if (S_ISSOCK(st.st_mode) || S_ISCHR(st.st_mode) || S_ISBLK(st.st_mode))
		out_problem(w, w->path, "a socket or device is left out");
	else if (earlier)
		out_entry(w, RECORD_LINK, w->path, &st, earlier);
	else if (S_ISREG(st.st_mode))
		walk_file(w, fd, w->path);
	else if (S_ISDIR(st.st_mode)) {
		out_entry(w, RECORD_ENTRY, w->path, &st, "");
		int error = enter(w, fd);
		if (error < 0)
			out_problem(w, w->path, strerror(-error));
		return; /* enter() has the descriptor */
	} else {
		if (S_ISLNK(st.st_mode)) {
			ssize_t len = readlinkat(fd, "", target, sizeof(target) - 1);
			target[len > 0 ? len : 0] = 0;
		}
		out_entry(w, RECORD_ENTRY, w->path, &st, target);
	}
	close(fd);
}

static void walk_content(struct walk *w)
{
	size_t most = w->left < CONTENT_STEP ? (size_t)w->left : CONTENT_STEP;
	ssize_t got = most && !w->missing ? read(w->file, w->out + w->out_to, most) : 0;
	if (most && got <= 0) { /* it has become shorter */
		if (!w->missing)
			w->missing = w->left;
		memset(w->out + w->out_to, 0, most);
		got = (ssize_t)most;
	}
	w->out_to += (size_t)got;
	w->left -= (u64)got;
	if (w->left)
		return;
	close_fd(&w->file);
	if (w->missing) {
		char text[100];
		snprintf(text, sizeof(text), "became shorter while it was read: %llu bytes are zeros", (unsigned long long)w->missing);
		out_problem(w, w->path, text);
	}
}

/* Produce a bit. 0: there is nothing more. */
static int walk_on(struct walk *w)
{
	if (w->file >= 0) {
		walk_content(w);
		return 1;
	}
	while (w->depth) {
		struct level *level = &w->levels[w->depth - 1];
		if (level->at == level->n) {
			leave(w);
			continue;
		}
		const char *name = level->sorted[level->at++] + 1;
		if (level->prefix + strlen(name) >= PATH_MAX) {
			w->path[level->prefix] = 0;
			out_problem(w, w->path, "is deeper than a name can say");
			return 1;
		}
		strcpy(w->path + level->prefix, name);
		walk_entry(w, level->fd, name);
		return 1;
	}
	return 0;
}

static enum progress walk_step(struct transfer *t)
{
	struct walk *w = (struct walk *)t;
	int more = 1;
	while (w->out_to - w->out_from < OUT_ENOUGH && (more = walk_on(w)))
		;
	size_t len = w->out_to - w->out_from;
	if (!len) {
		send_eof(t);
		return DONE;
	}
	if (len > t->credit)
		len = t->credit;
	if (len > MAX_PAYLOAD)
		len = MAX_PAYLOAD;
	if (!len)
		return WAITS;
	begin(TYPE_DATA, 0, t->object.id);
	put(w->out + w->out_from, len);
	end();
	t->credit -= (u32)len;
	w->out_from += len;
	memmove(w->out, w->out + w->out_from, w->out_to - w->out_from);
	w->out_to -= w->out_from;
	w->out_from = 0;
	return GOES_ON;
}

static void walk_drop(struct transfer *t)
{
	struct walk *w = (struct walk *)t;
	while (w->depth)
		leave(w);
	close_fd(&w->file);
	for (u32 i = 0; w->links && i < LINK_SLOTS; i++)
		free(w->links[i].name);
	free(w->links);
	free(w->levels);
	free(w->out);
}

static void on_walk(u64 id, struct in *in)
{
	const char *path = take_str(in);
	struct stat st;
	if (!take_end(in) || bad_path(path)) {
		malformed(id);
		return;
	}
	int fd = open_inside(path, O_PATH), error = fd < 0 ? fd : fstat(fd, &st) < 0 ? -errno : 0;
	if (!error && !S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode))
		error = -ENXIO;
	if (error) {
		answer_error(id, error, "%s", strerror(-error));
		close_fd(&fd);
		return;
	}
	struct walk *w = new_transfer(sizeof(*w), id, TYPE_WALK);
	if (!w) {
		close(fd);
		return;
	}
	w->file = -1;
	w->t.drop = walk_drop;
	w->levels = malloc(WALK_DEPTH * sizeof(*w->levels));
	w->out = malloc(OUT_BYTES);
	if (!w->levels || !w->out)
		error = -ENOMEM;
	else if (S_ISDIR(st.st_mode)) {
		error = enter(w, fd);
		fd = -1;
		out_entry(w, RECORD_ENTRY, ".", &st, "");
	} else
		walk_file(w, fd, name_of(path));
	if (error) {
		answer_error(id, error, "%s", strerror(-error));
		end_transfer(&w->t);
	} else {
		begin(TYPE_WALK | ANSWER, 0, id);
		put_entry(name_of(path), &st, -1, "");
		end();
		w->t.step = walk_step;
		w->t.runs = 1;
	}
	close_fd(&fd);
}

#endif
