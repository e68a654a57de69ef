/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: files, one request each. A path is resolved beneath the root; its last name is then worked on relative to the held descriptor of
 * its directory, never through a symlink. An inode is opened for data only after an O_PATH descriptor has shown a regular file.
 */
#ifndef GUEST_FILES_H
#define GUEST_FILES_H

#include "guest_machine.h"

enum { MAX_LINKS = 40, NEW_FILE_MODE = 0644 };
enum { ENTRY_RESOLVE = RESOLVE_BENEATH | RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS };

struct owner {
	u32 uid, gid;
};

/* What requests say of owner and mode. */
struct who {
	u32 flags, mode;
	const char *user;
};

static struct who take_who(struct in *in)
{
	struct who who;
	who.flags = take_u32(in);
	who.mode = take_u32(in) & 07777;
	who.user = take_str(in);
	return who;
}

static int find_owner(const char *user, struct owner *owner)
{
	static struct user found;
	const char *problem;
	int error = find_user(user, &found, &problem);
	*owner = (struct owner){ found.uid, found.gid };
	return error < 0 ? -EINVAL : 0; /* as another bad argument: ENOENT would be the path's */
}

/* --- names ----------------------------------------------------------------------------------------------------------- */

static const char *name_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash && slash[1] ? slash + 1 : "/";
}

/* Cut a path in place into its directory and the last name. -EINVAL: it names no entry that could be changed. */
static int split_path(char *path, const char **directory, const char **name)
{
	size_t len = strlen(path);
	if (*path != '/' || len >= PATH_MAX)
		return len >= PATH_MAX ? -ENAMETOOLONG : -EINVAL;
	while (len && (path[len - 1] == '/' || (path[len - 1] == '.' && len > 1 && path[len - 2] == '/')))
		path[--len] = 0;
	if (!len)
		return -EINVAL;
	char *slash = strrchr(path, '/');
	*name = slash + 1;
	*slash = 0;
	*directory = slash == path ? "/" : path;
	return !strcmp(*name, "..") ? -EINVAL : strlen(*name) > NAME_MAX ? -ENAMETOOLONG : 0;
}

static int open_entry(int directory, const char *name)
{
	return open_how(directory, name, O_PATH | O_NOFOLLOW, 0, ENTRY_RESOLVE);
}

static int open_directory(const char *path)
{
	return open_inside(path, O_PATH | O_DIRECTORY);
}

/* Open what an O_PATH descriptor names. */
static int reopen(int fd, int flags)
{
	char path[40];
	snprintf(path, sizeof(path), "self/fd/%d", fd);
	int opened = openat(guest.proc, path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	return opened < 0 ? -errno : opened;
}

static int reopen_regular(int fd, int flags)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode))
		return S_ISDIR(st.st_mode) ? -EISDIR : -ENXIO;
	return reopen(fd, flags);
}

static int change_owner(int fd, struct owner owner)
{
	struct stat st;
	if (!fstat(fd, &st) && st.st_uid == owner.uid && st.st_gid == owner.gid)
		return 0;
	return fchownat(fd, "", owner.uid, owner.gid, AT_EMPTY_PATH) < 0 ? -errno : 0;
}

static int change_mode(int fd, u32 mode)
{
	char path[40];
	snprintf(path, sizeof(path), "self/fd/%d", fd); /* fchmod() refuses O_PATH */
	return fchmodat(guest.proc, path, mode, 0) < 0 ? -errno : 0;
}

/* A new directory, or the one that is there: an O_PATH descriptor. */
static int make_directory(int parent, const char *name, u32 mode, struct owner owner, int *made)
{
	*made = !mkdirat(parent, name, 0700);
	if (!*made && errno != EEXIST)
		return -errno;
	int fd = open_how(parent, name, O_PATH | O_DIRECTORY, 0, ENTRY_RESOLVE);
	if (*made && fd >= 0) {
		change_owner(fd, owner);
		change_mode(fd, mode);
	}
	return fd;
}

/* A directory; what is missing of it is made, 0755, `owner`'s. An O_PATH descriptor. */
static int make_path(const char *path, struct owner owner)
{
	char part[PATH_MAX];
	const char *directory, *name;
	int made, fd = open_directory(path);
	if (fd != -ENOENT || strlen(path) >= sizeof(part))
		return fd;
	strcpy(part, path);
	int error = split_path(part, &directory, &name);
	if (error < 0)
		return error;
	int parent = make_path(directory, owner);
	if (parent < 0)
		return parent;
	fd = make_directory(parent, name, 0755, owner, &made);
	close(parent);
	return fd;
}

/* --- answers --------------------------------------------------------------------------------------------------------- */

static u64 time_ns(struct timespec t)
{
	return (u64)((long long)t.tv_sec * 1000000000 + t.tv_nsec);
}

/* `fd`: of the entry, or of its directory with `entry` its name in there. */
static void put_entry(const char *name, const struct stat *st, int fd, const char *entry)
{
	char target[PATH_MAX];
	ssize_t len = S_ISLNK(st->st_mode) ? readlinkat(fd, entry, target, sizeof(target)) : 0;
	put_u32(st->st_mode);
	put_u32(st->st_uid);
	put_u32(st->st_gid);
	put_u32((u32)st->st_nlink);
	put_u64((u64)st->st_size);
	put_u64(time_ns(st->st_mtim));
	put_u64((u64)st->st_dev);
	put_u64((u64)st->st_ino);
	put_text(name);
	put_str(target, len > 0 ? (size_t)len : 0);
}

/* Answer with the entry that `fd`, closed here, names; or with an error. */
static void answer_entry(u16 type, u64 id, const char *name, int fd)
{
	struct stat st;
	if (fd >= 0 && fstat(fd, &st) < 0) {
		int error = -errno;
		close(fd);
		fd = error;
	}
	if (fd < 0) {
		answer_error(id, fd, "%s", strerror(-fd));
		return;
	}
	begin(type | ANSWER, 0, id);
	put_entry(name, &st, fd, "");
	end();
	close(fd);
}

static int bad_path(const char *path)
{
	return *path != '/' || strlen(path) >= PATH_MAX;
}

static void malformed(u64 id)
{
	answer_error(id, EINVAL, "malformed request");
}

/* --- requests -------------------------------------------------------------------------------------------------------- */

static void on_stat(u64 id, struct in *in)
{
	u32 flags = take_u32(in);
	const char *path = take_str(in);
	if (!take_end(in) || bad_path(path))
		malformed(id);
	else
		answer_entry(TYPE_STAT, id, name_of(path), open_inside(path, flags & FILE_FOLLOW ? O_PATH : O_PATH | O_NOFOLLOW));
}

static void on_mkdir(u64 id, struct in *in)
{
	struct who who = take_who(in);
	char *path = take_str(in);
	const char *directory, *name;
	struct owner owner;
	int made = 0, fd;
	if (!take_end(in) || bad_path(path)) {
		malformed(id);
		return;
	}
	int error = find_owner(who.flags & FILE_USER ? who.user : "", &owner);
	if (error < 0) {
		answer_error(id, error, "no such user");
		return;
	}
	if (who.flags & FILE_PARENTS && (fd = open_directory(path)) >= 0) {
		answer_entry(TYPE_MKDIR, id, name_of(path), fd);
		return;
	}
	if ((error = split_path(path, &directory, &name)) < 0) {
		answer_error(id, error == -EINVAL ? -EEXIST : error, "%s", strerror(error == -EINVAL ? EEXIST : -error));
		return;
	}
	int parent = who.flags & FILE_PARENTS ? make_path(directory, owner) : open_directory(directory);
	fd = parent < 0 ? parent : make_directory(parent, name, who.flags & FILE_MODE ? who.mode : 0755, owner, &made);
	if (fd >= 0 && !made && !(who.flags & FILE_PARENTS)) {
		close(fd);
		fd = -EEXIST;
	}
	if (fd == -ENOTDIR && !(who.flags & FILE_PARENTS))
		fd = parent < 0 ? -ENOTDIR : -EEXIST; /* something else has the name */
	close_fd(&parent);
	answer_entry(TYPE_MKDIR, id, name, fd);
}

static int move_entry(const char *from_directory, const char *from, const char *to_directory, const char *to)
{
	int source = open_directory(from_directory), fd = source, target = -1, error;
	if (fd >= 0 && (fd = open_entry(source, from)) >= 0) { /* so that what is missing is told from where it is missing */
		close(fd);
		fd = target = open_directory(to_directory);
		if (fd >= 0 && renameat(source, from, target, to) < 0)
			fd = -errno;
		else if (fd >= 0)
			fd = open_entry(target, to);
	}
	error = fd;
	close_fd(&source);
	close_fd(&target);
	return error;
}

static void on_move(u64 id, struct in *in)
{
	char *from = take_str(in), *to = take_str(in);
	const char *from_directory, *from_name, *to_directory, *to_name;
	if (!take_end(in)) {
		malformed(id);
		return;
	}
	int error = split_path(from, &from_directory, &from_name);
	if (!error)
		error = split_path(to, &to_directory, &to_name);
	answer_entry(TYPE_MOVE, id, error ? "" : to_name, error ? error : move_entry(from_directory, from_name, to_directory, to_name));
}

static void on_chmod(u64 id, struct in *in)
{
	struct who who = take_who(in);
	const char *path = take_str(in);
	struct owner owner;
	if (!take_end(in) || bad_path(path)) {
		malformed(id);
		return;
	}
	int error = who.flags & FILE_USER ? find_owner(who.user, &owner) : 0;
	if (error < 0) {
		answer_error(id, error, "no such user");
		return;
	}
	int fd = open_inside(path, O_PATH);
	if (fd >= 0 && who.flags & FILE_USER)
		error = change_owner(fd, owner);
	if (fd >= 0 && !error && who.flags & FILE_MODE)
		error = change_mode(fd, who.mode);
	if (error < 0) {
		close(fd);
		fd = error;
	}
	answer_entry(TYPE_CHMOD, id, name_of(path), fd);
}

#endif
