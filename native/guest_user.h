/* SPDX-License-Identifier: Apache-2.0
 *
 * guestd: paths beneath the sandbox's root, and users by its passwd and group files. The rules are those of commands in containers
 * (kernel/enter.py `find_user`). Both files are whatever somebody inside made of them.
 */
#ifndef GUEST_USER_H
#define GUEST_USER_H

#include "guest_base.h"

enum { MAX_ACCOUNTS = 1 << 20, MAX_GROUPS = 64, MAX_ID = 65534, MAX_HOME = 1024, MAX_LOGIN = 256 };

struct user {
	u32 uid, gid;
	gid_t groups[MAX_GROUPS];
	int n_groups;
	char home[MAX_HOME], name[MAX_LOGIN];
};

static int open_how(int dir, const char *path, u64 flags, u64 mode, u64 resolve)
{
	struct open_how how = { .flags = flags | O_CLOEXEC, .mode = mode, .resolve = resolve };
	long fd;
	int tries = 8; /* EAGAIN: something on the way was renamed */
	do
		fd = syscall(SYS_openat2, dir, path, &how, sizeof(how));
	while (fd < 0 && errno == EAGAIN && --tries);
	return fd < 0 ? -errno : (int)fd;
}

/* A descriptor beneath the sandbox's root, wherever links lead; or a negative errno. */
static int open_inside(const char *path, int flags)
{
	return open_how(guest.root, path, (u64)(unsigned)flags, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
}

/* The text of a small regular file of the sandbox, or NULL; freed by the caller. */
static char *read_inside(const char *path)
{
	struct stat st;
	int fd = open_inside(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
	if (fd < 0)
		return NULL;
	char *text = NULL;
	if (!fstat(fd, &st) && S_ISREG(st.st_mode)) {
		size_t size = st.st_size < MAX_ACCOUNTS ? (size_t)st.st_size : MAX_ACCOUNTS, len = 0;
		ssize_t got;
		if ((text = malloc(size + 1))) {
			while (len < size && (got = read(fd, text + len, size - len)) > 0)
				len += (size_t)got;
			for (size_t i = 0; i < len; i++)
				if (!text[i])
					text[i] = '?';
			text[len] = 0;
		}
	}
	close(fd);
	return text;
}

struct field {
	const char *at;
	size_t len;
};

/* The next line's fields, split at colons: how many (at most `most`), 0 at the end. */
static int next_row(const char **at, struct field *fields, int most)
{
	int n = 0;
	if (!**at)
		return 0;
	for (const char *c = *at;; c++) {
		const char *begin = c;
		c += strcspn(c, ":\n");
		if (n < most)
			fields[n++] = (struct field){ begin, (size_t)(c - begin) };
		if (*c != ':') {
			*at = *c ? c + 1 : c;
			return n;
		}
	}
}

static int is_text(struct field field, const char *text, size_t len)
{
	return field.len == len && !memcmp(field.at, text, len);
}

static int parse_id(struct field field, u32 *id)
{
	u32 value = 0;
	if (!field.len || field.len > 5)
		return 0;
	for (size_t i = 0; i < field.len; i++) {
		if (field.at[i] < '0' || field.at[i] > '9')
			return 0;
		value = value * 10 + (u32)(field.at[i] - '0');
	}
	*id = value;
	return value <= MAX_ID;
}

static void copy_field(char *to, size_t size, struct field field)
{
	size_t len = field.len < size - 1 ? field.len : size - 1;
	memcpy(to, field.at, len);
	to[len] = 0;
}

static int find_group(struct field wanted, u32 *gid)
{
	char *text = NULL;
	struct field row[4];
	int found = parse_id(wanted, gid);
	if (found || !(text = read_inside("/etc/group")))
		return found;
	for (const char *at = text; !found && *at;)
		if (next_row(&at, row, 4) >= 3 && is_text(row[0], wanted.at, wanted.len))
			found = parse_id(row[2], gid);
	free(text);
	return found;
}

static void find_groups(struct user *user)
{
	char *text = read_inside("/etc/group");
	struct field row[4];
	size_t len = strlen(user->name);
	u32 gid;
	for (const char *at = text; at && *at && user->n_groups < MAX_GROUPS;) {
		if (next_row(&at, row, 4) < 4 || !parse_id(row[2], &gid))
			continue;
		for (const char *name = row[3].at, *end = row[3].at + row[3].len; name < end;) {
			const char *comma = memchr(name, ',', (size_t)(end - name));
			size_t n = (size_t)((comma ? comma : end) - name);
			if (n == len && !memcmp(name, user->name, n)) {
				user->groups[user->n_groups++] = gid;
				break;
			}
			name += n + 1;
		}
	}
	free(text);
}

/* `name`, `number`, either with `:group`; empty: root. 0, or a negative errno with `problem` set. */
static int look_up_user(const char *wanted, struct user *user, const char **problem)
{
	const char *colon = strchr(wanted, ':');
	struct field name = { wanted, colon ? (size_t)(colon - wanted) : strlen(wanted) }, row[6];
	if (!name.len)
		name = (struct field){ "root", 4 };
	u32 number = 0;
	int numeric = parse_id(name, &number), found = 0;
	user->uid = user->gid = 0;
	user->n_groups = 0;
	char *text = read_inside("/etc/passwd");
	for (const char *at = text; at && *at && !found;) {
		if (next_row(&at, row, 6) < 6 || !is_text(row[numeric ? 2 : 0], name.at, name.len))
			continue;
		found = parse_id(row[2], &user->uid) && parse_id(row[3], &user->gid);
		if (found) {
			copy_field(user->home, sizeof(user->home), row[5].len ? row[5] : (struct field){ "/", 1 });
			copy_field(user->name, sizeof(user->name), row[0]);
		}
	}
	free(text);
	if (!found) {
		*problem = "no such user in the sandbox's /etc/passwd";
		user->uid = numeric ? number : 0;
		user->gid = 0;
		copy_field(user->name, sizeof(user->name), name);
		strcpy(user->home, numeric ? "/" : "/root");
		if (!numeric && !is_text(name, "root", 4))
			return -ENOENT;
	}
	if (colon && colon[1]) {
		*problem = "no such group in the sandbox's /etc/group";
		return find_group((struct field){ colon + 1, strlen(colon + 1) }, &user->gid) ? 0 : -ENOENT;
	}
	if (user->uid && found)
		find_groups(user); /* root needs no further groups */
	return 0;
}

/* Whether a file is as it was at the last call. */
static int unchanged(const char *path, struct stat *was)
{
	struct stat st = { 0 };
	int fd = open_inside(path, O_PATH);
	if (fd >= 0)
		fstat(fd, &st);
	close_fd(&fd);
	int same = st.st_ino == was->st_ino && st.st_dev == was->st_dev && st.st_size == was->st_size &&
		   st.st_ctim.tv_sec == was->st_ctim.tv_sec && st.st_ctim.tv_nsec == was->st_ctim.tv_nsec;
	*was = st;
	return same;
}

/* As `look_up_user`. The last answer holds while the files do: most commands are one user's. */
static int find_user(const char *wanted, struct user *user, const char **problem)
{
	static struct user last;
	static struct stat passwd, group;
	static char last_wanted[MAX_LOGIN];
	static int known;
	int same = unchanged("/etc/passwd", &passwd);
	if (last.uid || strchr(wanted, ':') || !known) /* else its groups do not come from there */
		same &= unchanged("/etc/group", &group);
	if (known && same && !strcmp(wanted, last_wanted)) {
		*user = last;
		return 0;
	}
	int error = look_up_user(wanted, user, problem);
	known = !error && strlen(wanted) < sizeof(last_wanted);
	if (known) {
		last = *user;
		strcpy(last_wanted, wanted);
	}
	return error;
}

#endif
