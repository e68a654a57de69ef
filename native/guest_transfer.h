/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: what takes longer than one answer. A transfer is known by its request's id. Those that produce do a bit at a time, when there is
 * room to send; those that take get the host's data as it comes. Here: READ, WRITE, LIST, REMOVE.
 */
#ifndef GUEST_TRANSFER_H
#define GUEST_TRANSFER_H

#include <sys/random.h>

#include "guest_files.h"
#include "guest_stream.h"

enum progress { GOES_ON, WAITS, DONE };

struct transfer {
	struct object object; /* first: cast */
	struct transfer *next;
	u16 type; /* of the request */
	u8 runs; /* `step` is to be called */
	u8 eof;
	u32 credit, owed; /* as of a stream */
	int error; /* it has failed, and COMMIT will say so */
	int fd;
	enum progress (*step)(struct transfer *);
	int (*feed)(struct transfer *, const u8 *data, u32 len); /* a negative errno: it has failed */
	void (*drop)(struct transfer *); /* free what is its own; not itself */
};

static struct transfer *transfers;
static u32 n_transfers;

/* A new one with `size` bytes, zeros; NULL: there are too many. */
static void *new_transfer(size_t size, u64 id, u16 type)
{
	struct transfer *t = n_transfers < MAX_TRANSFERS ? calloc(1, size) : NULL;
	if (!t) {
		answer_error(id, EAGAIN, "more than %d transfers", MAX_TRANSFERS);
		return NULL;
	}
	t->type = type;
	t->fd = -1;
	t->credit = INITIAL_CREDIT;
	t->next = transfers;
	transfers = t;
	n_transfers++;
	add_object(&t->object, id, A_TRANSFER);
	return t;
}

static void end_transfer(struct transfer *t)
{
	for (struct transfer **at = &transfers; *at; at = &(*at)->next)
		if (*at == t) {
			*at = t->next;
			break;
		}
	n_transfers--;
	remove_object(&t->object);
	if (t->drop)
		t->drop(t);
	close_fd(&t->fd);
	free(t);
}

static int work_waits(void)
{
	for (struct transfer *t = transfers; t; t = t->next)
		if (t->runs)
			return 1;
	return 0;
}

/* A step of each. */
static void work(void)
{
	for (struct transfer *t = transfers, *next; t && !throttled(); t = next) {
		next = t->next;
		if (!t->runs)
			continue;
		enum progress progress = t->step(t);
		t->runs = progress == GOES_ON;
		if (progress == DONE)
			end_transfer(t);
	}
}

/* A frame of a stream. -1: beyond what is allowed. */
static int transfer_stream(struct transfer *t, u16 type, u16 number, struct in *in)
{
	u32 len = (u32)(in->end - in->at), bytes;
	if (number)
		return 0;
	switch (type) {
	case TYPE_DATA:
		if (!t->feed || t->eof || t->error)
			return 0;
		if (len > t->credit)
			return -1;
		t->credit -= len;
		t->error = frozen ? -EBUSY : t->feed(t, in->at, len);
		if (t->error) {
			tell_close(t->object.id, 0, -t->error);
			return 0;
		}
		t->owed += len;
		if (t->owed >= CREDIT_STEP) {
			tell_credit(t->object.id, 0, t->owed);
			t->credit += t->owed;
			t->owed = 0;
		}
		return 0;
	case TYPE_CREDIT:
		bytes = take_u32(in);
		if (!take_end(in) || t->feed || bytes > INITIAL_CREDIT - t->credit)
			return take_end(in) && t->feed ? 0 : -1;
		t->credit += bytes;
		t->runs = t->step != NULL;
		return 0;
	case TYPE_EOF:
		t->eof = 1;
		return 0;
	default: /* CLOSE: the reader has enough */
		if (!t->feed)
			end_transfer(t);
		return 0;
	}
}

static void send_eof(struct transfer *t)
{
	begin(TYPE_EOF, 0, t->object.id);
	end();
}

/* --- READ ------------------------------------------------------------------------------------------------------------ */

struct reading {
	struct transfer t;
	u64 at, end;
};

static enum progress read_step(struct transfer *t)
{
	struct reading *r = (struct reading *)t;
	u64 left = r->end - r->at;
	size_t most = t->credit < MAX_PAYLOAD ? t->credit : MAX_PAYLOAD;
	if (most > left)
		most = (size_t)left;
	if (left && !t->credit)
		return WAITS;
	begin(TYPE_DATA, 0, t->object.id);
	ssize_t got = most ? pread(t->fd, tx + tx_to, most, (off_t)r->at) : 0;
	if (got <= 0) {
		int error = errno;
		tx_to = frame_at;
		if (got < 0)
			tell_close(t->object.id, 0, error);
		else
			send_eof(t);
		return DONE;
	}
	tx_to += (size_t)got;
	end();
	r->at += (u64)got;
	t->credit -= (u32)got;
	return GOES_ON;
}

static void on_read(u64 id, struct in *in)
{
	u64 offset = take_u64(in), length = take_u64(in);
	const char *path = take_str(in);
	struct stat st;
	if (!take_end(in) || bad_path(path) || offset > INT64_MAX) {
		malformed(id);
		return;
	}
	int entry = open_inside(path, O_PATH), fd = entry < 0 ? entry : reopen_regular(entry, O_RDONLY);
	close_fd(&entry);
	if (fd >= 0 && fstat(fd, &st) < 0) {
		entry = -errno;
		close(fd);
		fd = entry;
	}
	if (fd < 0) {
		answer_error(id, fd, "%s", strerror(-fd));
		return;
	}
	struct reading *r = new_transfer(sizeof(*r), id, TYPE_READ);
	if (!r) {
		close(fd);
		return;
	}
	u64 size = st.st_size ? (u64)st.st_size : MAX_PSEUDO_BYTES;
	r->t.fd = fd;
	r->t.step = read_step;
	r->t.runs = 1;
	r->at = offset < size ? offset : size;
	r->end = length < size - r->at ? r->at + length : size;
	begin(TYPE_READ | ANSWER, 0, id);
	put_entry(name_of(path), &st, fd, "");
	end();
}

/* --- WRITE ----------------------------------------------------------------------------------------------------------- */

struct writing {
	struct transfer t;
	int directory;
	int exists, appends, exclusive, given; /* `exclusive`: appended to what is not there yet; `given`: bits FILE_MODE and FILE_USER */
	u32 mode;
	struct owner owner;
	u64 written, start; /* `start`: the size before, of what is appended to in place */
	int committed;
	char name[NAME_MAX + 1];
};

static int write_feed(struct transfer *t, const u8 *data, u32 len)
{
	struct writing *w = (struct writing *)t;
	while (len) {
		ssize_t wrote = write(t->fd, data, len);
		if (wrote < 0 && errno == EINTR)
			continue;
		if (wrote <= 0)
			return wrote < 0 ? -errno : -EIO;
		data += wrote;
		len -= (u32)wrote;
		w->written += (u64)wrote;
	}
	return 0;
}

static void write_drop(struct transfer *t)
{
	struct writing *w = (struct writing *)t;
	struct stat st;
	/* What was appended is taken back, unless somebody else has changed the size since. */
	if (w->appends && !w->committed && w->written && t->fd >= 0 && !fstat(t->fd, &st) && (u64)st.st_size == w->start + w->written &&
	    ftruncate(t->fd, (off_t)w->start) < 0) {
		/* there is nothing better to do */
	}
	close_fd(&w->directory);
}

/* Where a shell's redirection to `path` would write: directory and name, and what is there. */
static int find_target(struct writing *w, const char *path, struct owner fresh, u32 flags, struct stat *st)
{
	char where[PATH_MAX * 2], link[PATH_MAX];
	const char *directory, *name;
	size_t len = strlen(path);
	if (path[len - 1] == '/' || (len > 1 && !strcmp(path + len - 2, "/.")) || (len > 2 && !strcmp(path + len - 3, "/..")))
		return -EISDIR;
	strcpy(where, path);
	for (int hop = 0; hop < MAX_LINKS; hop++) {
		int error = split_path(where, &directory, &name);
		if (error < 0)
			return error == -EINVAL ? -EISDIR : error;
		w->directory = flags & FILE_PARENTS && !hop ? make_path(directory, fresh) : open_directory(directory);
		if (w->directory < 0)
			return w->directory;
		int entry = open_entry(w->directory, name);
		if (entry == -ENOENT) {
			strcpy(w->name, name);
			return 0;
		}
		if (entry < 0)
			return entry;
		error = fstat(entry, st) < 0 ? -errno : 0;
		ssize_t got = !error && S_ISLNK(st->st_mode) ? readlinkat(entry, "", link, sizeof(link) - 1) : 0;
		close(entry);
		if (error)
			return error;
		if (S_ISREG(st->st_mode)) {
			strcpy(w->name, name);
			w->exists = 1;
			return 0;
		}
		if (!S_ISLNK(st->st_mode))
			return S_ISDIR(st->st_mode) ? -EISDIR : -ENXIO;
		close_fd(&w->directory);
		if (got <= 0)
			return -EIO;
		link[got] = 0;
		char next[PATH_MAX * 2];
		if (snprintf(next, sizeof(next), "%s/%s", *link == '/' ? "" : directory, link) >= (int)sizeof(next))
			return -ENAMETOOLONG;
		strcpy(where, next);
	}
	return -ELOOP;
}

static int open_target(struct writing *w)
{
	if (w->appends) {
		int entry = open_entry(w->directory, w->name), fd = entry < 0 ? entry : reopen_regular(entry, O_WRONLY | O_APPEND);
		close_fd(&entry);
		return fd;
	}
	int fd = openat(w->directory, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
	return fd < 0 ? -errno : fd;
}

static void on_write(u64 id, struct in *in)
{
	struct who who = take_who(in);
	const char *standard = take_str(in), *path = take_str(in);
	struct owner given, fresh;
	struct stat st = { 0 };
	if (!take_end(in) || bad_path(path)) {
		malformed(id);
		return;
	}
	int error = find_owner(who.flags & FILE_USER ? who.user : standard, &fresh);
	if (error < 0) {
		answer_error(id, error, "no such user");
		return;
	}
	given = fresh;
	struct writing *w = new_transfer(sizeof(*w), id, TYPE_WRITE);
	if (!w)
		return;
	w->directory = -1;
	w->t.feed = write_feed;
	w->t.drop = write_drop;
	w->given = (int)who.flags & (FILE_MODE | FILE_USER);
	if ((error = find_target(w, path, fresh, who.flags, &st)) == 0) {
		w->appends = who.flags & FILE_APPEND && w->exists;
		w->owner = w->exists && !(who.flags & FILE_USER) ? (struct owner){ st.st_uid, st.st_gid } : given;
		w->mode = who.flags & FILE_MODE ? who.mode : w->exists ? st.st_mode & 01777 : NEW_FILE_MODE;
		w->exclusive = who.flags & FILE_APPEND && !w->exists;
		error = w->t.fd = open_target(w);
		if (error >= 0 && w->appends && !fstat(w->t.fd, &st))
			w->start = (u64)st.st_size;
	}
	if (error < 0) {
		answer_error(id, error, "%s", strerror(-error));
		end_transfer(&w->t);
		return;
	}
	answer_u32(TYPE_WRITE, id, w->exists);
}

/* Give the nameless file its name, in the place of what has it. */
static int publish(struct writing *w)
{
	char temporary[40];
	u64 random[2];
	if (!w->exists && !linkat(w->t.fd, "", w->directory, w->name, AT_EMPTY_PATH))
		return 0;
	if (!w->exists && (errno != EEXIST || w->exclusive))
		return -errno;
	if (getrandom(random, sizeof(random), GRND_NONBLOCK) < 0)
		return -errno;
	snprintf(temporary, sizeof(temporary), ".%016llx%016llx", (unsigned long long)random[0], (unsigned long long)random[1]);
	if (linkat(w->t.fd, "", w->directory, temporary, AT_EMPTY_PATH) < 0)
		return -errno;
	if (!renameat(w->directory, temporary, w->directory, w->name))
		return 0;
	int error = -errno;
	unlinkat(w->directory, temporary, 0);
	return error;
}

/* The size on disk, or a negative errno. */
static int commit_writing(struct writing *w, u64 *size)
{
	struct stat st, there;
	int error = 0;
	if (!w->appends || w->given & FILE_USER)
		error = change_owner(w->t.fd, w->owner);
	if (!error && (!w->appends || w->given & FILE_MODE) && fchmod(w->t.fd, w->mode) < 0)
		error = -errno;
	if (!error && fstat(w->t.fd, &st) < 0)
		error = -errno;
	if (error)
		return error;
	*size = (u64)st.st_size;
	if (w->appends) {
		if (*size < w->start + w->written)
			return -EAGAIN; /* something else has cut it */
		w->committed = 1;
		return 0;
	}
	if (*size != w->written)
		return -EIO;
	if ((error = publish(w)) < 0)
		return error;
	if (fstatat(w->directory, w->name, &there, AT_SYMLINK_NOFOLLOW) < 0 || there.st_ino != st.st_ino || there.st_size != st.st_size)
		return -EAGAIN; /* something else has changed it */
	return 0;
}

/* --- LIST ------------------------------------------------------------------------------------------------------------ */

struct listing {
	struct transfer t;
	DIR *dir;
	u32 limit, count;
};

static enum progress list_step(struct transfer *t)
{
	enum { ENOUGH = MAX_PAYLOAD - 2 * PATH_MAX };
	struct listing *l = (struct listing *)t;
	struct dirent *entry = NULL;
	struct stat st;
	u32 in_part = 0;
	begin(TYPE_LIST | ANSWER, FLAG_MORE, t->object.id);
	put_u32(0);
	while (tx_to - frame_at < ENOUGH && (entry = readdir(l->dir))) {
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		if (l->count == l->limit) {
			tx_to = frame_at;
			answer_error(t->object.id, EFBIG, "more than %u entries", l->limit);
			return DONE;
		}
		if (fstatat(dirfd(l->dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
			continue; /* removed since it was listed */
		put_entry(entry->d_name, &st, dirfd(l->dir), entry->d_name);
		in_part++;
		l->count++;
	}
	memcpy(tx + frame_at + HEADER_BYTES, &in_part, sizeof(in_part));
	if (!entry)
		tx[frame_at + 10] = 0; /* no more */
	end();
	return entry ? GOES_ON : DONE;
}

static void list_drop(struct transfer *t)
{
	struct listing *l = (struct listing *)t;
	if (l->dir)
		closedir(l->dir);
}

static void on_list(u64 id, struct in *in)
{
	u32 limit = take_u32(in);
	const char *path = take_str(in);
	if (!take_end(in) || bad_path(path)) {
		malformed(id);
		return;
	}
	int fd = open_inside(path, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	if (!dir) {
		answer_error(id, fd < 0 ? fd : errno, "%s", strerror(fd < 0 ? -fd : errno));
		close_fd(&fd);
		return;
	}
	struct listing *l = new_transfer(sizeof(*l), id, TYPE_LIST);
	if (!l) {
		closedir(dir);
		return;
	}
	l->dir = dir;
	l->limit = limit;
	l->t.step = list_step;
	l->t.drop = list_drop;
	l->t.runs = 1;
}

/* --- REMOVE ---------------------------------------------------------------------------------------------------------- */

enum { MAX_DEPTH = 256, REMOVED_AT_ONCE = 64 };

struct removing {
	struct transfer t;
	int parent; /* of what is removed */
	char name[NAME_MAX + 1];
	struct {
		DIR *dir;
		char name[NAME_MAX + 1];
	} levels[MAX_DEPTH];
	int depth;
	int left_out; /* an errno: something stays, for this reason */
	u64 moved; /* to the top */
	int again; /* something was moved there since it was last read */
};

static int remove_enter(struct removing *r, int parent, const char *name)
{
	int fd = open_how(parent, name, O_RDONLY | O_DIRECTORY | O_NONBLOCK, 0, ENTRY_RESOLVE);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	if (!dir) {
		int error = fd < 0 ? fd : -errno;
		close_fd(&fd);
		return error;
	}
	strcpy(r->levels[r->depth].name, name);
	r->levels[r->depth++].dir = dir;
	return 0;
}

/* One entry of the directory that we are in. */
static int remove_entry(struct removing *r, DIR *dir, const char *name)
{
	char aside[40];
	if (!unlinkat(dirfd(dir), name, 0) || errno == ENOENT)
		return 0;
	if (errno != EISDIR && errno != EPERM)
		return -errno;
	if (!unlinkat(dirfd(dir), name, AT_REMOVEDIR))
		return 0;
	if (errno != ENOTEMPTY && errno != EEXIST)
		return -errno;
	if (r->depth < MAX_DEPTH)
		return remove_enter(r, dirfd(dir), name);
	/* Too deep to be held open: done from the top, later. */
	snprintf(aside, sizeof(aside), ".%016llx", (unsigned long long)(r->t.object.id + r->moved++));
	r->again = 1;
	return renameat(dirfd(dir), name, dirfd(r->levels[0].dir), aside) < 0 ? -errno : 0;
}

static enum progress remove_step(struct transfer *t)
{
	struct removing *r = (struct removing *)t;
	for (int i = 0; i < REMOVED_AT_ONCE; i++) {
		DIR *dir = r->levels[r->depth - 1].dir;
		struct dirent *entry = frozen ? NULL : readdir(dir);
		if (entry) {
			int error = strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") ? remove_entry(r, dir, entry->d_name) : 0;
			if (error && error != -ENOENT)
				r->left_out = -error;
			continue;
		}
		if (frozen)
			r->left_out = EBUSY;
		/* Its end. What was put here from below has to be found, too. */
		if (r->depth == 1 && r->again && !r->left_out) {
			r->again = 0;
			rewinddir(dir);
			continue;
		}
		closedir(dir);
		r->depth--;
		int parent = r->depth ? dirfd(r->levels[r->depth - 1].dir) : r->parent;
		int failed = unlinkat(parent, r->levels[r->depth].name, AT_REMOVEDIR) < 0 && errno != ENOENT;
		if (failed && !r->left_out)
			r->left_out = errno;
		if (r->depth)
			continue;
		answer_result(TYPE_REMOVE, t->object.id, failed ? -r->left_out : 0);
		return DONE;
	}
	return GOES_ON;
}

static void remove_drop(struct transfer *t)
{
	struct removing *r = (struct removing *)t;
	while (r->depth)
		closedir(r->levels[--r->depth].dir);
	close_fd(&r->parent);
}

static void on_remove(u64 id, struct in *in)
{
	u32 flags = take_u32(in);
	char *path = take_str(in);
	const char *directory, *name;
	struct stat st;
	if (!take_end(in)) {
		malformed(id);
		return;
	}
	int error = split_path(path, &directory, &name), parent = error ? error : open_directory(directory);
	int entry = parent < 0 ? parent : open_entry(parent, name);
	if (entry < 0 || fstat(entry, &st) < 0) {
		answer_error(id, entry < 0 ? entry : errno, "%s", strerror(entry < 0 ? -entry : errno));
		close_fd(&parent);
		close_fd(&entry);
		return;
	}
	close(entry);
	int failed = unlinkat(parent, name, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0) < 0 ? errno : 0;
	if (!S_ISDIR(st.st_mode) || !(flags & FILE_RECURSIVE) || (failed != ENOTEMPTY && failed != EEXIST)) {
		answer_result(TYPE_REMOVE, id, -failed);
		close(parent);
		return;
	}
	struct removing *r = new_transfer(sizeof(*r), id, TYPE_REMOVE);
	if (!r) {
		close(parent);
		return;
	}
	r->parent = parent;
	r->t.step = remove_step;
	r->t.drop = remove_drop;
	r->t.runs = 1;
	if ((error = remove_enter(r, parent, name)) < 0) {
		answer_result(TYPE_REMOVE, id, error);
		end_transfer(&r->t);
	}
}

#endif
