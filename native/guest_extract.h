/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: EXTRACT, a stream of records into a tree. The rules are those of archives in containers (runtime/files/extract.py): names lead
 * nowhere but beneath the start, what has an entry's name is replaced and never written through, directories that exist are kept.
 */
#ifndef GUEST_EXTRACT_H
#define GUEST_EXTRACT_H

#include "guest_transfer.h"

enum { FIXED_BYTES = 4 + 48, HEAD_BYTES = FIXED_BYTES + 8 + 2 * PATH_MAX };

struct extraction {
	struct transfer t;
	int target;
	u64 resolve;
	int given; /* all is `owner`'s */
	struct owner owner;
	int parent; /* directory of the last entry, `parent_path` */
	char parent_path[PATH_MAX];
	u8 head[HEAD_BYTES + 1]; /* a record's beginning; a spare byte, since strings are ended in place */
	u32 head_len;
	int file; /* being written; t.fd is not used */
	char file_name[NAME_MAX + 1]; /* in `parent` */
	u32 file_mode;
	struct owner file_owner;
	u64 file_time, left, total;
};

struct record {
	u32 kind, mode;
	struct owner owner;
	u64 size, time;
	char *name;
	const char *target;
};

static u32 number_at(const u8 *at)
{
	u32 value;
	memcpy(&value, at, sizeof(value));
	return value;
}

/* How long the record's beginning is: 0 if more is needed to know, or a negative errno. */
static long head_length(const u8 *head, u32 len)
{
	if (len < FIXED_BYTES + 4)
		return 0;
	u32 kind = number_at(head), name = number_at(head + FIXED_BYTES);
	if ((kind != RECORD_ENTRY && kind != RECORD_LINK) || name >= PATH_MAX)
		return -EINVAL;
	if (len < FIXED_BYTES + 4 + name + 4)
		return 0;
	u32 target = number_at(head + FIXED_BYTES + 4 + name);
	return target >= PATH_MAX ? -EINVAL : (long)(FIXED_BYTES + 4 + name + 4 + target);
}

static struct record take_record(struct in *in)
{
	struct record r;
	r.kind = take_u32(in);
	r.mode = take_u32(in);
	r.owner.uid = take_u32(in);
	r.owner.gid = take_u32(in);
	take_u32(in);
	r.size = take_u64(in);
	r.time = take_u64(in);
	take_u64(in);
	take_u64(in);
	r.name = take_str(in);
	r.target = take_str(in);
	return r;
}

/* --- names ----------------------------------------------------------------------------------------------------------- */

/* Only names between slashes, none of them ".." */
static int clean(char *name)
{
	char *to = name, *saved = NULL;
	if (*name == '/')
		return -EINVAL;
	for (char *part = strtok_r(name, "/", &saved); part; part = strtok_r(NULL, "/", &saved)) {
		size_t len = strlen(part);
		if (!strcmp(part, "."))
			continue;
		if (!strcmp(part, ".."))
			return -EINVAL;
		if (len > NAME_MAX)
			return -ENAMETOOLONG;
		if (to != name)
			*to++ = '/';
		memmove(to, part, len);
		to += len;
	}
	*to = 0;
	return 0;
}

static int open_beneath(struct extraction *x, const char *path)
{
	return open_how(x->target, *path ? path : ".", O_PATH | O_DIRECTORY, 0, x->resolve);
}

/* The directory `path`, held until another is asked for; what is missing of it is made. */
static int enter_parent(struct extraction *x, const char *path, struct owner owner)
{
	int made;
	if (x->parent >= 0 && !strcmp(path, x->parent_path))
		return 0;
	close_fd(&x->parent);
	int fd = open_beneath(x, path);
	if (fd == -ENOENT) {
		char part[PATH_MAX];
		strcpy(part, path);
		char *slash = strrchr(part, '/');
		if (slash)
			*slash = 0;
		int error = enter_parent(x, slash ? part : "", owner);
		if (error < 0)
			return error;
		fd = make_directory(x->parent, slash ? slash + 1 : part, 0755, owner, &made);
		close_fd(&x->parent);
	}
	if (fd < 0)
		return fd;
	x->parent = fd;
	strcpy(x->parent_path, path);
	return 0;
}

/* Take what has the name away, unless it is a directory. */
static int make_way(int parent, const char *name)
{
	return unlinkat(parent, name, 0) < 0 && errno != ENOENT ? errno == EPERM ? -EISDIR : -errno : 0;
}

/* --- kinds ----------------------------------------------------------------------------------------------------------- */

static int extract_directory(struct extraction *x, const char *name, const char *path, u32 mode, struct owner owner)
{
	int made, fd = make_directory(x->parent, name, mode, owner, &made);
	if (fd == -EXDEV)
		return 0; /* a mount point is a directory that exists */
	if (fd == -ENOTDIR || fd == -ELOOP) {
		if ((fd = open_beneath(x, path)) >= 0) { /* a link to a directory beneath the target */
			close(fd);
			return 0;
		}
		int error = make_way(x->parent, name);
		fd = error ? error : make_directory(x->parent, name, mode, owner, &made);
	}
	if (fd >= 0)
		close(fd);
	return fd < 0 ? fd : 0;
}

static int extract_hard_link(struct extraction *x, const char *name, char *target)
{
	struct stat st, there;
	char *slash;
	int error = clean(target);
	if (error || !*target)
		return error ? error : -EINVAL;
	slash = strrchr(target, '/');
	if (slash)
		*slash = 0;
	const char *last = slash ? slash + 1 : target;
	int from = open_beneath(x, slash ? target : "");
	if (from < 0)
		return from;
	if (fstatat(from, last, &st, AT_SYMLINK_NOFOLLOW) < 0)
		error = -errno;
	else if (S_ISDIR(st.st_mode))
		error = -EISDIR;
	else if (fstatat(x->parent, name, &there, AT_SYMLINK_NOFOLLOW) < 0 || there.st_ino != st.st_ino || there.st_dev != st.st_dev) {
		error = make_way(x->parent, name);
		if (!error && linkat(from, last, x->parent, name, 0) < 0)
			error = -errno;
	}
	close(from);
	return error;
}

static int start_file(struct extraction *x, const char *name, const struct record *r, u32 mode)
{
	int error = make_way(x->parent, name);
	if (error)
		return error;
	x->file = openat(x->parent, name, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600);
	if (x->file < 0)
		return -errno;
	strcpy(x->file_name, name);
	x->file_mode = mode;
	x->file_owner = r->owner;
	x->file_time = r->time;
	x->left = r->size;
	return 0;
}

static int finish_file(struct extraction *x)
{
	struct timespec times[2];
	long long ns = (long long)x->file_time;
	times[0].tv_sec = ns / 1000000000 - (ns % 1000000000 < 0);
	times[0].tv_nsec = ns % 1000000000 + (ns % 1000000000 < 0 ? 1000000000 : 0);
	times[1] = times[0];
	int error = change_owner(x->file, x->file_owner);
	if (!error && (fchmod(x->file, x->file_mode) < 0 || futimens(x->file, times) < 0))
		error = -errno;
	close_fd(&x->file);
	return error;
}

/* A file that did not become whole goes, if the name is still its own. */
static void spoil_file(struct extraction *x)
{
	struct stat st, there;
	if (x->file >= 0 && !fstat(x->file, &st) && !fstatat(x->parent, x->file_name, &there, AT_SYMLINK_NOFOLLOW) &&
	    st.st_ino == there.st_ino && st.st_dev == there.st_dev)
		unlinkat(x->parent, x->file_name, 0);
	close_fd(&x->file);
}

static int extract_record(struct extraction *x, struct record *r)
{
	char path[PATH_MAX];
	int error = clean(r->name);
	if (error)
		return error;
	if (!*r->name)
		return S_ISDIR(r->mode) && r->kind == RECORD_ENTRY ? 0 : -EINVAL; /* the target itself keeps what it has */
	u32 mode = x->given ? r->mode & 01777 : r->mode & 07777;
	if (x->given)
		r->owner = x->owner;
	strcpy(path, r->name);
	char *slash = strrchr(r->name, '/');
	if (slash)
		*slash = 0;
	const char *name = slash ? slash + 1 : r->name;
	if ((error = enter_parent(x, slash ? r->name : "", r->owner)) < 0)
		return error;
	if (r->kind == RECORD_LINK)
		return extract_hard_link(x, name, (char *)r->target);
	switch (r->mode & S_IFMT) {
	case S_IFREG:
		return start_file(x, name, r, mode);
	case S_IFDIR:
		return extract_directory(x, name, path, mode, r->owner);
	case S_IFLNK:
		error = *r->target ? make_way(x->parent, name) : -EINVAL;
		if (!error && (symlinkat(r->target, x->parent, name) < 0 || fchownat(x->parent, name, r->owner.uid, r->owner.gid, AT_SYMLINK_NOFOLLOW) < 0))
			error = -errno;
		return error;
	case S_IFIFO: {
		error = make_way(x->parent, name);
		if (!error && mkfifoat(x->parent, name, 0600) < 0)
			error = -errno;
		int fd = error ? error : open_entry(x->parent, name);
		if (fd >= 0 && !(error = change_owner(fd, r->owner)))
			error = change_mode(fd, mode);
		close_fd(&fd);
		return error;
	}
	default:
		return -EINVAL;
	}
}

/* --- the stream ------------------------------------------------------------------------------------------------------ */

static int write_content(struct extraction *x, const u8 **data, u32 *len)
{
	while (*len && x->left) {
		ssize_t wrote = write(x->file, *data, *len < x->left ? *len : (size_t)x->left);
		if (wrote < 0 && errno == EINTR)
			continue;
		if (wrote <= 0)
			return wrote < 0 ? -errno : -EIO;
		*data += wrote;
		*len -= (u32)wrote;
		x->left -= (u64)wrote;
		x->total += (u64)wrote;
	}
	return x->left ? 0 : finish_file(x);
}

static int extract_feed(struct transfer *t, const u8 *data, u32 len)
{
	struct extraction *x = (struct extraction *)t;
	while (len || (x->file >= 0 && !x->left)) {
		if (x->file >= 0) {
			int error = write_content(x, &data, &len);
			if (error)
				return error;
			continue;
		}
		u32 part = HEAD_BYTES - x->head_len < len ? HEAD_BYTES - x->head_len : len;
		memcpy(x->head + x->head_len, data, part);
		long needed = head_length(x->head, x->head_len + part);
		if (needed < 0)
			return (int)needed;
		if (!needed || (u32)needed > x->head_len + part) {
			x->head_len += part;
			data += part;
			len -= part;
			continue;
		}
		u32 used = (u32)needed - x->head_len;
		data += used;
		len -= used;
		x->head_len = 0;
		struct in in = { x->head, x->head + needed, 0 };
		struct record r = take_record(&in);
		if (!take_end(&in))
			return -EINVAL;
		int error = extract_record(x, &r);
		if (error < 0)
			return error;
	}
	return 0;
}

static int commit_extraction(struct extraction *x, u64 *total)
{
	*total = x->total;
	return x->head_len || x->file >= 0 ? -EINVAL : 0; /* it ends in the middle of a record */
}

static void extract_drop(struct transfer *t)
{
	struct extraction *x = (struct extraction *)t;
	spoil_file(x);
	close_fd(&x->parent);
	close_fd(&x->target);
}

static void on_extract(u64 id, struct in *in)
{
	struct who who = take_who(in);
	const char *path = take_str(in);
	struct owner owner;
	struct stat st, root;
	if (!take_end(in) || bad_path(path)) {
		malformed(id);
		return;
	}
	int error = find_owner(who.flags & FILE_USER ? who.user : "", &owner);
	int target = error < 0 ? error : who.flags & FILE_PARENTS ? make_path(path, owner) : open_directory(path);
	if (target < 0 || fstat(target, &st) < 0 || fstat(guest.root, &root) < 0) {
		answer_error(id, target < 0 ? target : errno, "%s", strerror(target < 0 ? -target : errno));
		close_fd(&target);
		return;
	}
	struct extraction *x = new_transfer(sizeof(*x), id, TYPE_EXTRACT);
	if (!x) {
		close(target);
		return;
	}
	/* Beneath the sandbox's own root, absolute symlinks stay beneath the target as well. */
	int at_root = st.st_ino == root.st_ino && st.st_dev == root.st_dev;
	x->resolve = (at_root ? RESOLVE_IN_ROOT : RESOLVE_BENEATH) | RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS;
	x->target = target;
	x->parent = x->file = -1;
	x->given = (who.flags & FILE_USER) != 0;
	x->owner = owner;
	x->t.feed = extract_feed;
	x->t.drop = extract_drop;
	answer_empty(TYPE_EXTRACT, id);
}

#endif
