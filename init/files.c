//go:build ignore

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files.c - the file helper: one process with one user's rights that opens, makes and removes files for the edge.
 *
 * It has nothing that its user has not, and the edge believes nothing it says. It never blocks on what it opens: only
 * regular files are handed out. It allocates nothing; one request is served at a time, and each is short: what may be
 * long (listing, removing a tree) is done in slices.
 *
 * A file is written beside its target and takes its place by rename. The unfinished file has no name where the file
 * system allows that (O_TMPFILE), else a hidden one, .sandsea-<16 hex digits>, with a lock (flock) that lives as long
 * as the helper or the edge holds it. When the edge goes away the helper removes its unfinished files; those of a
 * helper that was killed are removed by the next one that writes in the same directory: old enough, unlocked, same
 * owner.
 */
#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h> /* renameat */
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "files_wire.h"

#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_fchmodat2
#define SYS_fchmodat2 452
#endif

/* Of linux/openat2.h, which musl's headers lack. */
struct how {
	uint64_t flags;
	uint64_t mode;
	uint64_t resolve;
};
#define NO_MAGICLINKS 0x02u
#define NO_SYMLINKS 0x04u
#define BENEATH 0x08u
#define IN_ROOT 0x10u

#define NAME_SIZE 256
#define TEMP_PREFIX ".sandsea-"
#define TEMP_LEN (sizeof(TEMP_PREFIX) - 1 + 16)
#ifndef TEMP_AGE
#define TEMP_AGE 5      /* seconds; an unlocked temp file may be one whose maker is about to lock it */
#endif
#define MAX_LINKS 40    /* as the kernel */
#define MAX_RACES 64    /* lookups that a concurrent rename made uncertain */
#define TREE_DEPTH 100  /* open directories while a tree is removed */
#define TREE_SLICE 2000 /* entries removed per request */
#define SWEPT 64

enum kind { FREE = 0, DIRECTORY, UNFINISHED, WATCH };

struct handle {
	enum kind kind;
	int fd;
	int dir;                  /* UNFINISHED: its directory */
	char name[NAME_SIZE];     /* its target there */
	char temp[TEMP_LEN + 1];  /* its hidden name; "" when it has none */
	bool replace;             /* the target is not the file that is written to, but in its way */
	uint32_t made;            /* parents that were made for it, the last components of path */
	uint32_t base;
	char path[FW_PATH_MAX + 1];
};

/* A place is a name in an open directory, or "." for the directory itself. */
struct place {
	int dir;
	char name[NAME_SIZE];
};

/* As the kernel fills it; libc's readdir would allocate. */
struct entry64 {
	uint64_t ino;
	int64_t off;
	uint16_t reclen;
	uint8_t type;
	char name[];
};

static int root = -1;
static struct handle handles[FW_HANDLES];
static uint32_t open_handles;
static union {
	struct fw_request r;
	char bytes[sizeof(struct fw_request) + 2 * FW_PATH_MAX];
} in;
static char path1[FW_PATH_MAX + 1], path2[FW_PATH_MAX + 1];
static struct {
	struct fw_answer a;
	char data[FW_DATA_MAX];
} out;
static union {
	struct entry64 first;
	char bytes[16384];
} listing;
static struct {
	dev_t dev;
	ino_t ino;
} swept[SWEPT];
static unsigned next_swept;
static enum { NOT_TRIED, WORKS, FAILS } unnamed;

static void shut(int fd)
{
	if (fd >= 0)
		close(fd);
}

/* look opens a path below a base. It returns a descriptor or -errno. */
static int look(uint32_t base, const char *path, uint32_t flags, int how_flags)
{
	struct how how = {.flags = (uint64_t)(how_flags | O_CLOEXEC), .resolve = NO_MAGICLINKS};
	int at = root;

	if (!(how_flags & O_PATH)) /* which openat2 refuses together */
		how.flags |= O_NOCTTY;

	if (base == 0) {
		how.resolve |= IN_ROOT;
	} else {
		if (base > FW_HANDLES || handles[base - 1].kind != DIRECTORY)
			return -EBADF;
		at = handles[base - 1].fd;
		how.resolve |= BENEATH;
		if (path[0] == '\0')
			path = ".";
	}
	if (flags & FW_NOSYMLINKS)
		how.resolve |= NO_SYMLINKS;
	for (int races = 0;; races++) {
		long fd = syscall(SYS_openat2, at, path, &how, sizeof(how));
		if (fd >= 0)
			return (int)fd;
		if ((errno != EAGAIN || races == MAX_RACES) && errno != EINTR)
			return -errno;
	}
}

/* self_path names an open file, for calls that know no descriptors of this kind. */
static void self_path(int fd, char path[32])
{
	char digits[12];
	size_t at = strlen(strcpy(path, "/proc/self/fd/")), n = 0;

	for (int v = fd; v > 0 || n == 0; v /= 10)
		digits[n++] = (char)('0' + v % 10);
	while (n > 0)
		path[at++] = digits[--n];
	path[at] = '\0';
}

/* change_mode sets the mode of what was opened for its name alone. */
static int change_mode(int fd, mode_t mode)
{
	static enum { NOT_ASKED, KNOWN, UNKNOWN } call;
	char self[32];

	/* A kernel before 6.6, or a filter that does not know the call, does not come as far as the bad descriptor. */
	if (call == NOT_ASKED)
		call = syscall(SYS_fchmodat2, -1, "x", 0, 0) < 0 && errno == EBADF ? KNOWN : UNKNOWN;
	if (call == KNOWN)
		return (int)syscall(SYS_fchmodat2, fd, "", mode, AT_EMPTY_PATH);
	self_path(fd, self);
	return chmod(self, mode);
}

/* chmod_dir is not led elsewhere by what somebody puts in the directory's place, were it a link of either kind. */
static int chmod_dir(int dir, const char *name, mode_t mode)
{
	int fd = openat(dir, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), err;

	if (fd < 0)
		return -1;
	err = change_mode(fd, mode) < 0 ? errno : 0;
	close(fd);
	errno = err;
	return err ? -1 : 0;
}

static bool is_dots(const char *name)
{
	return name[0] == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/*
 * cut parts path into its parent and its last name, and says whether slashes followed that. The parent is "" when there
 * is none. It writes into path.
 */
static char *cut(char *path, const char **parent, bool *slash)
{
	size_t n = strlen(path);
	char *last;

	*slash = false;
	while (n > 1 && path[n - 1] == '/') {
		path[--n] = '\0';
		*slash = true;
	}
	last = strrchr(path, '/');
	if (!last) {
		*parent = "";
		return path;
	}
	if (last == path) {
		*parent = "/";
		return last + 1;
	}
	*last = '\0';
	*parent = path;
	return last + 1;
}

static const char *or_root(uint32_t base, const char *parent)
{
	return *parent || base ? parent : "/";
}

/*
 * make_dirs makes the missing directories of path. What it made stays when it fails half-way: *made counts them in any
 * case.
 */
static int make_dirs(uint32_t base, const char *path, uint32_t flags, mode_t mode, mode_t last_mode, uint32_t *made)
{
	static char prefix[FW_PATH_MAX + 1];
	int parent, fd = look(base, or_root(base, path), flags, O_PATH | O_DIRECTORY);
	size_t at = 0, n = strlen(path);

	*made = 0;
	if (fd != -ENOENT) {
		shut(fd);
		return fd < 0 ? fd : 0;
	}
	parent = look(base, base ? "" : "/", 0, O_PATH | O_DIRECTORY);
	if (parent < 0)
		return parent;
	while (at < n) {
		size_t start, end;

		while (at < n && path[at] == '/')
			at++;
		start = at;
		while (at < n && path[at] != '/')
			at++;
		end = at;
		if (start == end)
			break;
		if (end - start >= NAME_SIZE) {
			shut(parent);
			return -ENAMETOOLONG;
		}
		memcpy(prefix, path, end);
		prefix[end] = '\0';
		fd = look(base, prefix, flags, O_PATH | O_DIRECTORY);
		if (fd == -ENOENT) {
			mode_t m = strspn(path + end, "/") == n - end ? last_mode : mode;
			int err = 0;

			if (mkdirat(parent, prefix + start, m) == 0) {
				++*made;
				if ((m & 06000) && chmod_dir(parent, prefix + start, m) < 0)
					err = errno;
			} else {
				err = errno;
			}
			fd = look(base, prefix, flags, O_PATH | O_DIRECTORY);
			if (fd < 0 && err) /* else somebody was faster */
				fd = -err;
		}
		shut(parent);
		if (fd < 0)
			return fd;
		parent = fd;
	}
	shut(parent);
	return 0;
}

/* unmake_dirs takes back what make_dirs made, as far as it is empty. */
static void unmake_dirs(uint32_t base, char *path, uint32_t made)
{
	while (made-- > 0) {
		const char *parent;
		bool slash;
		char *name = cut(path, &parent, &slash);
		int dir;

		if (is_dots(name))
			return;
		dir = look(base, or_root(base, parent), 0, O_PATH | O_DIRECTORY);
		if (dir < 0)
			return;
		unlinkat(dir, name, AT_REMOVEDIR);
		shut(dir);
		if (parent != path)
			return;
	}
}

/*
 * is_pseudo tells the file systems whose files are made up for whoever reads them. The edge would see the host's
 * answers, so the helper reads them itself.
 */
static bool is_pseudo(int fd)
{
	struct statfs fs;

	if (fstatfs(fd, &fs) < 0)
		return false;
	switch ((uint32_t)fs.f_type) {
	case 0x9fa0:     /* proc */
	case 0x62656572: /* sysfs */
	case 0x27e0eb:   /* cgroup */
	case 0x63677270: /* cgroup2 */
	case 0x64626720: /* debugfs */
	case 0x74726163: /* tracefs */
	case 0x73636673: /* securityfs */
	case 0xf97cff8c: /* selinuxfs */
	case 0x19800202: /* mqueue */
	case 0xcafe4a11: /* bpf */
	case 0x62656570: /* configfs */
	case 0x6165676c: /* pstore */
	case 0x42494e4d: /* binfmt_misc */
	case 0x6e736673: /* nsfs */
	case 0x7655821:  /* resctrl */
	case 0xde5e81e4: /* efivarfs */
		return true;
	default:
		return false;
	}
}

/*
 * may_follow is the kernel's rule of fs.protected_symlinks, which holds for what it looks up itself: in a directory that
 * all may write to but not clear, as /tmp, a link is followed only by who made it, or if the directory's owner did.
 */
static bool may_follow(int dir, const struct stat *link)
{
	struct stat st;

	if (link->st_uid == geteuid())
		return true;
	return fstat(dir, &st) == 0 && ((st.st_mode & (S_ISVTX | S_IWOTH)) != (S_ISVTX | S_IWOTH) || link->st_uid == st.st_uid);
}

/*
 * find turns a path into a place. With FW_NOFOLLOW a link in the last place is that place, else what it leads to; that
 * need not exist. With FW_PARENTS missing parents are made; path then is the last parent and *made their number.
 */
static int find(uint32_t base, char *path, uint32_t flags, mode_t mode, struct place *p, uint32_t *made)
{
	static char link[FW_PATH_MAX + 1], joined[2 * FW_PATH_MAX + 3];
	uint32_t none;

	if (!made)
		made = &none;
	*made = 0;
	for (int links = 0;; links++) {
		const char *parent;
		bool slash;
		struct stat st;
		ssize_t n;
		char *name;
		int err;

		if (links == MAX_LINKS)
			return -ELOOP;
		name = cut(path, &parent, &slash);
		if (is_dots(name)) {
			/* The whole path names a directory that exists. Put together again what cut parted. */
			if (parent == path && *parent)
				path[strlen(path)] = '/';
			p->dir = look(base, or_root(base, path), flags, O_PATH | O_DIRECTORY);
			strcpy(p->name, ".");
			return p->dir < 0 ? p->dir : 0;
		}
		if (strlen(name) >= sizeof(p->name))
			return -ENAMETOOLONG;
		strcpy(p->name, name);
		if (flags & FW_PARENTS) {
			err = make_dirs(base, parent, flags, mode, mode, made);
			if (err < 0) {
				static char back[FW_PATH_MAX + 1];
				uint32_t count = *made;

				/* make_dirs failed below the ones it made: find the deepest that exists. */
				strcpy(back, parent);
				while (count) {
					const char *up;
					int fd = look(base, or_root(base, back), flags, O_PATH | O_DIRECTORY);

					shut(fd);
					if (fd >= 0)
						break;
					(void)cut(back, &up, &slash);
					if (up != back)
						count = 0;
				}
				unmake_dirs(base, back, count);
				*made = 0;
				return err;
			}
		}
		p->dir = look(base, or_root(base, parent), flags, O_PATH | O_DIRECTORY);
		if (p->dir < 0)
			return p->dir;
		if (fstatat(p->dir, p->name, &st, AT_SYMLINK_NOFOLLOW) < 0) {
			err = errno;
			if (err == ENOENT) {
				if (parent != path)
					*path = '\0';
				return 0;
			}
			shut(p->dir);
			return -err;
		}
		if (S_ISLNK(st.st_mode) && !(flags & FW_NOFOLLOW)) {
			/* The links of /proc say in words what they do not mean. */
			err = is_pseudo(p->dir) ? ELOOP : may_follow(p->dir, &st) ? 0 : EACCES;
			if (err) {
				shut(p->dir);
				return -err;
			}
			n = readlinkat(p->dir, p->name, link, sizeof(link) - 1);
			err = n < 0 ? errno : 0;
			shut(p->dir);
			if (err)
				return err == EINVAL ? -EAGAIN : -err;
			link[n] = '\0';
			if (base)
				return -EXDEV;
			joined[0] = '\0';
			if (link[0] != '/') {
				strcat(joined, parent);
				if (parent == path)
					strcat(joined, "/");
			}
			strcat(joined, link);
			if (slash)
				strcat(joined, "/");
			if (strlen(joined) > FW_PATH_MAX)
				return -ENAMETOOLONG;
			strcpy(path, joined);
			continue;
		}
		if (slash && !S_ISDIR(st.st_mode)) {
			shut(p->dir);
			return -ENOTDIR;
		}
		if (parent != path)
			*path = '\0';
		return 0;
	}
}

static void fill(struct fw_stat *to, const struct stat *st)
{
	to->mode = st->st_mode;
	to->uid = st->st_uid;
	to->gid = st->st_gid;
	to->nlink = (uint32_t)st->st_nlink;
	to->ino = st->st_ino;
	to->dev = st->st_dev;
	to->size = st->st_size;
	to->mtime_sec = st->st_mtim.tv_sec;
	to->mtime_nsec = (uint32_t)st->st_mtim.tv_nsec;
	to->reserved = 0;
}

/* copy reads a pseudo file into memory. */
static int copy(int fd)
{
	int mem = memfd_create("file", MFD_CLOEXEC);
	size_t total = 0;

	if (mem < 0)
		return -errno;
	for (;;) {
		/* The listing's room is free: no handle keeps anything there between requests. */
		ssize_t n = read(fd, listing.bytes, sizeof(listing.bytes)), done = 0;

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			int err = n < 0 ? errno : 0;

			if (!err && lseek(mem, 0, SEEK_SET) < 0)
				err = errno;
			if (err)
				close(mem);
			return err ? -err : mem;
		}
		total += (size_t)n;
		if (total > FW_PSEUDO_MAX) {
			close(mem);
			return -EFBIG;
		}
		while (done < n) {
			ssize_t w = write(mem, listing.bytes + done, (size_t)(n - done));
			if (w < 0) {
				int err = errno;

				close(mem);
				return -err;
			}
			done += w;
		}
	}
}

static int not_a_file(const struct stat *st)
{
	fill(&out.a.stat, st);
	if (S_ISDIR(st->st_mode))
		return -EISDIR;
	if (S_ISLNK(st->st_mode))
		return -ELOOP;
	out.a.flags |= FW_NOT_A_FILE;
	return -ENXIO;
}

static struct handle *take(uint32_t *number)
{
	for (uint32_t i = 0; i < FW_HANDLES; i++) {
		if (handles[i].kind == FREE) {
			*number = i + 1;
			memset(&handles[i], 0, offsetof(struct handle, path));
			handles[i].path[0] = '\0';
			handles[i].fd = handles[i].dir = -1;
			return &handles[i];
		}
	}
	return NULL;
}

static struct handle *given(uint32_t number, enum kind kind)
{
	if (number == 0 || number > FW_HANDLES || handles[number - 1].kind != kind)
		return NULL;
	return &handles[number - 1];
}

/* drop lets go of a handle; done says that an unfinished file has found its place. */
static void drop(struct handle *h, bool done)
{
	if (h->kind == UNFINISHED && !done) {
		if (h->temp[0])
			unlinkat(h->dir, h->temp, 0);
		unmake_dirs(h->base, h->path, h->made);
	}
	if (h->kind != FREE)
		open_handles--;
	h->kind = FREE;
	shut(h->fd);
	shut(h->dir);
}

static bool temp_name(char name[TEMP_LEN + 1])
{
	uint64_t r;

	if (getrandom(&r, sizeof(r), 0) != (ssize_t)sizeof(r))
		return false;
	strcpy(name, TEMP_PREFIX);
	for (size_t i = sizeof(TEMP_PREFIX) - 1; i < TEMP_LEN; i++, r >>= 4)
		name[i] = "0123456789abcdef"[r & 15];
	name[TEMP_LEN] = '\0';
	return true;
}

static bool is_temp(const char *name)
{
	return strlen(name) == TEMP_LEN && strncmp(name, TEMP_PREFIX, sizeof(TEMP_PREFIX) - 1) == 0 &&
	       strspn(name + sizeof(TEMP_PREFIX) - 1, "0123456789abcdef") == 16;
}

/* sweep removes what killed helpers left in a directory, the first time that this one writes there. */
static void sweep(int at)
{
	struct stat st;
	int dir = openat(at, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (dir < 0)
		return;
	if (fstat(dir, &st) < 0)
		goto end;
	for (int i = 0; i < SWEPT; i++)
		if (swept[i].ino == st.st_ino && swept[i].dev == st.st_dev)
			goto end;
	swept[next_swept].ino = st.st_ino;
	swept[next_swept].dev = st.st_dev;
	next_swept = (next_swept + 1) % SWEPT;
	for (;;) {
		long n = syscall(SYS_getdents64, dir, listing.bytes, sizeof(listing.bytes));

		if (n <= 0)
			goto end;
		for (long o = 0; o < n;) {
			const struct entry64 *e = (const void *)(listing.bytes + o);
			int fd;

			o += e->reclen;
			if (!is_temp(e->name) || fstatat(dir, e->name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
			    !S_ISREG(st.st_mode) || st.st_uid != geteuid() || st.st_ctim.tv_sec + TEMP_AGE > time(NULL))
				continue;
			fd = openat(dir, e->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
			if (fd < 0)
				continue;
			if (flock(fd, LOCK_EX | LOCK_NB) == 0)
				unlinkat(dir, e->name, 0);
			close(fd);
		}
	}
end:
	close(dir);
}

/* give_name gives a file without a name one; what stands there is an error. */
static int give_name(int fd, int dir, const char *name)
{
	char self[32];

	if (linkat(fd, "", dir, name, AT_EMPTY_PATH) == 0)
		return 0;
	if (errno != ENOENT && errno != EPERM && errno != EINVAL)
		return -errno;
	/* Kernels before 6.10 ask for a capability; the way through /proc is as old as O_TMPFILE. */
	self_path(fd, self);
	return linkat(AT_FDCWD, self, dir, name, AT_SYMLINK_FOLLOW) < 0 ? -errno : 0;
}

/* can_do_unnamed tries once whether a file without a name can get one later. */
static bool can_do_unnamed(int dir)
{
	char name[TEMP_LEN + 1];
	int fd;

	if (unnamed != NOT_TRIED)
		return unnamed == WORKS;
	fd = openat(dir, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
	if (fd < 0) {
		if (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)
			unnamed = FAILS;
		return false;
	}
	if (temp_name(name)) {
		int err = give_name(fd, dir, name);

		if (err == 0) {
			unlinkat(dir, name, 0);
			unnamed = WORKS;
		} else if (err != -ENOSPC && err != -EDQUOT && err != -EACCES) {
			unnamed = FAILS;
		}
	}
	close(fd);
	return unnamed == WORKS;
}

static int create(void)
{
	uint32_t number, flags = in.r.flags;
	struct handle *h = take(&number);
	struct place p;
	struct stat st;
	int err;

	if (!h)
		return -EMFILE;
	h->base = in.r.base;
	err = find(in.r.base, path1, flags, in.r.mode & 07777, &p, &h->made);
	if (err < 0)
		return err;
	h->kind = UNFINISHED;
	open_handles++;
	h->dir = p.dir;
	h->replace = flags & FW_NOFOLLOW;
	strcpy(h->name, p.name);
	strcpy(h->path, path1);
	if (strcmp(p.name, ".") == 0) {
		err = -EISDIR;
		goto fail;
	}
	if (fstatat(p.dir, p.name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
		if (!S_ISREG(st.st_mode) && !(S_ISLNK(st.st_mode) && h->replace)) {
			err = not_a_file(&st);
			goto fail;
		}
		/* A rename asks the directory only; who may not write to the file may not replace what is in it either. */
		if (!h->replace && faccessat(p.dir, p.name, W_OK, 0) < 0 && errno != ENOENT && errno != ETXTBSY) {
			err = -errno;
			goto fail;
		}
	} else if (errno != ENOENT) {
		err = -errno;
		goto fail;
	}
	sweep(p.dir);
	if (can_do_unnamed(p.dir))
		h->fd = openat(p.dir, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
	if (h->fd < 0) {
		if (!temp_name(h->temp)) {
			err = -EAGAIN;
			goto fail;
		}
		h->fd = openat(p.dir, h->temp, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600);
		if (h->fd < 0) {
			err = -errno;
			h->temp[0] = '\0';
			goto fail;
		}
	}
	if (flock(h->fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK) {
		err = -EAGAIN;
		goto fail;
	}
	out.a.handle = number;
	return h->fd;
fail:
	drop(h, false);
	return err;
}

static int place_file(struct handle *h)
{
	struct stat st;
	bool there = fstatat(h->dir, h->name, &st, AT_SYMLINK_NOFOLLOW) == 0;
	mode_t mode = in.r.mode & 07777;
	int err;

	if (there && !S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
		return not_a_file(&st);
	if (in.r.flags & FW_SET_OWNER) {
		if (fchown(h->fd, in.r.uid, in.r.gid) < 0)
			return -errno;
	} else if (there && S_ISREG(st.st_mode) && !h->replace) {
		struct stat mine;

		/* As writing into it would: the owner stays where that is allowed. */
		if (fstat(h->fd, &mine) == 0 && (mine.st_uid != st.st_uid || mine.st_gid != st.st_gid) &&
		    fchown(h->fd, st.st_uid, st.st_gid) < 0 && mine.st_gid != st.st_gid)
			(void)!fchown(h->fd, (uid_t)-1, st.st_gid);
	}
	if ((in.r.flags & FW_DEFAULT_MODE) && there && S_ISREG(st.st_mode)) {
		mode = st.st_mode & 07777;
		if (geteuid() != 0)
			mode &= ~(mode_t)06000; /* writing takes the set-id bits away */
	}
	if (fchmod(h->fd, mode) < 0)
		return -errno;
	if (in.r.flags & FW_SET_MTIME) {
		struct timespec ts[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = in.r.mtime_sec, .tv_nsec = in.r.mtime_nsec}};

		if (futimens(h->fd, ts) < 0)
			return -errno;
	}
	if (!h->temp[0]) {
		if (!there) {
			err = give_name(h->fd, h->dir, h->name);
			if (err != -EEXIST)
				return err;
		}
		if (!temp_name(h->temp))
			return -EAGAIN;
		err = give_name(h->fd, h->dir, h->temp);
		if (err < 0) {
			h->temp[0] = '\0';
			return err;
		}
	}
	return renameat(h->dir, h->temp, h->dir, h->name) < 0 ? -errno : 0;
}

static int commit(void)
{
	struct handle *h = given(in.r.handle, UNFINISHED);
	struct stat st;
	int err;

	if (!h)
		return -EBADF;
	err = place_file(h);
	if (err == 0 && fstat(h->fd, &st) == 0)
		fill(&out.a.stat, &st);
	drop(h, err == 0);
	return err;
}

static int open_file(void)
{
	int last = in.r.flags & FW_NOFOLLOW ? O_NOFOLLOW : 0;
	struct stat st;
	int fd, mem;

	/* Look before it is opened: even an open that does not block wakes the other end of a pipe. */
	fd = look(in.r.base, path1, in.r.flags, O_PATH | last);
	if (fd < 0)
		return fd;
	if (fstat(fd, &st) < 0) {
		int err = errno;

		close(fd);
		return -err;
	}
	close(fd);
	if (!S_ISREG(st.st_mode))
		return not_a_file(&st);
	fd = look(in.r.base, path1, in.r.flags, O_RDONLY | O_NONBLOCK | last);
	if (fd < 0)
		return fd;
	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
		close(fd);
		return not_a_file(&st);
	}
	fill(&out.a.stat, &st);
	if (!is_pseudo(fd))
		return fd;
	mem = copy(fd);
	close(fd);
	if (mem < 0)
		return mem;
	out.a.flags |= FW_PSEUDO;
	if (fstat(mem, &st) == 0)
		out.a.stat.size = st.st_size;
	return mem;
}

static int stat_path(void)
{
	struct stat st;
	int err = 0, fd = look(in.r.base, path1, in.r.flags, O_PATH | (in.r.flags & FW_NOFOLLOW ? O_NOFOLLOW : 0));

	if (fd < 0)
		return fd;
	if (fstat(fd, &st) < 0)
		err = errno;
	else
		fill(&out.a.stat, &st);
	if (!err && S_ISLNK(st.st_mode)) {
		ssize_t n = readlinkat(fd, "", out.data, FW_PATH_MAX);

		if (n < 0)
			err = errno;
		else
			out.a.data_len = (uint32_t)n;
	}
	close(fd);
	return -err;
}

static int open_dir(void)
{
	uint32_t number;
	struct handle *h = take(&number);
	struct stat st;
	int fd, how = O_DIRECTORY;

	if (!h)
		return -EMFILE;
	how |= in.r.flags & FW_PATHONLY ? O_PATH : O_RDONLY | O_NONBLOCK;
	how |= in.r.flags & FW_NOFOLLOW ? O_NOFOLLOW : 0;
	fd = look(in.r.base, path1, in.r.flags, how);
	if (fd < 0)
		return fd;
	if (fstat(fd, &st) < 0) {
		int err = errno;

		close(fd);
		return -err;
	}
	fill(&out.a.stat, &st);
	if (is_pseudo(fd))
		out.a.flags |= FW_PSEUDO;
	h->kind = DIRECTORY;
	h->fd = fd;
	open_handles++;
	out.a.handle = number;
	return 0;
}

static int next_entries(void)
{
	struct handle *h = given(in.r.handle, DIRECTORY);
	size_t used = 0;

	if (!h)
		return -EBADF;
	while (out.a.count == 0) {
		long n = syscall(SYS_getdents64, h->fd, listing.bytes, sizeof(listing.bytes));
		int64_t before = 0;

		if (n < 0 && errno != ENOENT)
			return -errno;
		if (n <= 0) { /* a directory that was removed meanwhile holds nothing */
			drop(h, true);
			return 0;
		}
		for (long o = 0; o < n;) {
			const struct entry64 *e = (const void *)(listing.bytes + o);
			struct fw_entry fe = {0};
			size_t name = strlen(e->name);
			struct stat st;
			char *to = out.data + used;

			if (FW_DATA_MAX - used < sizeof(fe) + NAME_SIZE + FW_PATH_MAX) {
				/* No room: the directory is read on from the last entry that went in. */
				if (lseek(h->fd, before, SEEK_SET) < 0)
					return -errno;
				break;
			}
			o += e->reclen;
			before = e->off;
			if (is_dots(e->name) || fstatat(h->fd, e->name, &st, AT_SYMLINK_NOFOLLOW) < 0)
				continue;
			fill(&fe.stat, &st);
			fe.name_len = (uint16_t)name;
			if (S_ISLNK(st.st_mode)) {
				ssize_t l = readlinkat(h->fd, e->name, to + sizeof(fe) + name, FW_PATH_MAX);

				if (l < 0)
					continue;
				fe.link_len = (uint16_t)l;
			}
			memcpy(to, &fe, sizeof(fe));
			memcpy(to + sizeof(fe), e->name, name);
			used += sizeof(fe) + name + fe.link_len;
			out.a.count++;
		}
	}
	out.a.data_len = (uint32_t)used;
	return 0;
}

static int make_dir(void)
{
	struct place p;
	mode_t mode = in.r.mode & 07777;
	uint32_t made;
	int err;

	if (in.r.flags & FW_PARENTS) {
		err = make_dirs(in.r.base, path1, in.r.flags, 0755, mode, &made);
		if (made)
			out.a.flags |= FW_DID;
		return err;
	}
	err = find(in.r.base, path1, FW_NOFOLLOW | in.r.flags, 0, &p, NULL);
	if (err == -ENOTDIR) /* "file/" */
		return -EEXIST;
	if (err < 0)
		return err;
	if (strcmp(p.name, ".") == 0)
		err = -EEXIST;
	else if (mkdirat(p.dir, p.name, mode) < 0)
		err = -errno;
	else if ((mode & 06000) && chmod_dir(p.dir, p.name, mode) < 0 && errno != ENOENT && errno != ENOTDIR)
		err = -errno;
	if (err == 0)
		out.a.flags |= FW_DID;
	shut(p.dir);
	return err;
}

static int rename_path(void)
{
	struct place from, to;
	int err = find(in.r.base, path1, FW_NOFOLLOW | in.r.flags, 0, &from, NULL);

	if (err < 0)
		return err;
	err = find(in.r.base, path2, FW_NOFOLLOW | in.r.flags, 0, &to, NULL);
	if (err == 0) {
		if (renameat(from.dir, from.name, to.dir, to.name) < 0)
			err = -errno;
		shut(to.dir);
	}
	shut(from.dir);
	return err;
}

static int unlink_path(void)
{
	struct place p;
	int err = find(in.r.base, path1, FW_NOFOLLOW | in.r.flags, 0, &p, NULL);

	if (err < 0)
		return err;
	if (strcmp(p.name, ".") == 0)
		err = -EBUSY;
	else if (unlinkat(p.dir, p.name, 0) < 0) {
		err = -errno;
		if (err == -EISDIR)
			err = unlinkat(p.dir, p.name, AT_REMOVEDIR) < 0 ? -errno : 0;
	}
	shut(p.dir);
	return err;
}

static void name_culprit(const char *name)
{
	size_t n = strlen(name);

	memcpy(out.data, name, n);
	out.a.data_len = (uint32_t)n;
}

/*
 * remove_tree removes what a place holds, by open directories and never through a link, at most TREE_SLICE entries. It
 * returns 1 when there is more. A directory deeper than TREE_DEPTH is moved up into the topmost one first, so that
 * depth costs neither descriptors nor stack.
 */
static int remove_tree(const struct place *top)
{
	static struct place level[TREE_DEPTH];
	int depth = 0, budget = TREE_SLICE, err = 0;

	if (unlinkat(top->dir, top->name, 0) == 0 || errno == ENOENT)
		return 0;
	if (errno != EISDIR)
		return -errno;
	for (;;) {
		bool down = false;
		int dir;
		long n;

		if (depth == 0) {
			level[0].dir = openat(top->dir, top->name,
					      O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
			if (level[0].dir < 0)
				return errno == ENOENT ? 0 : -errno;
			strcpy(level[0].name, top->name);
			depth = 1;
		}
		dir = level[depth - 1].dir;
		if (lseek(dir, 0, SEEK_SET) < 0) {
			err = -errno;
			goto end;
		}
		while (!down && (n = syscall(SYS_getdents64, dir, listing.bytes, sizeof(listing.bytes))) != 0) {
			if (n < 0 && errno == ENOENT)
				break; /* somebody else has removed it */
			if (n < 0) {
				err = -errno;
				goto end;
			}
			for (long o = 0; o < n && !down;) {
				const struct entry64 *e = (const void *)(listing.bytes + o);

				o += e->reclen;
				if (is_dots(e->name))
					continue;
				if (budget-- == 0) {
					err = 1;
					goto end;
				}
				if (e->type != DT_DIR) {
					if (unlinkat(dir, e->name, 0) == 0 || errno == ENOENT)
						continue;
					err = -errno;
				}
				if (e->type == DT_DIR || err == -EISDIR) {
					err = 0;
					if (unlinkat(dir, e->name, AT_REMOVEDIR) == 0 || errno == ENOENT)
						continue;
					if (errno != ENOTEMPTY && errno != EEXIST)
						err = -errno;
				}
				if (err == 0 && depth == TREE_DEPTH) {
					char name[TEMP_LEN + 1];

					if (!temp_name(name))
						err = -EAGAIN;
					else if (renameat(dir, e->name, level[0].dir, name) < 0)
						err = -errno;
				} else if (err == 0) {
					struct place *l = &level[depth];

					l->dir = openat(dir, e->name,
							O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
					if (l->dir >= 0) {
						strcpy(l->name, e->name);
						depth++;
						down = true;
					} else if (errno != ENOENT) {
						err = -errno;
					}
				}
				if (err < 0) {
					name_culprit(e->name);
					goto end;
				}
			}
		}
		if (down)
			continue;
		/* It is empty now, unless somebody fills it: then the next slice goes on. */
		depth--;
		close(level[depth].dir);
		if (unlinkat(depth ? level[depth - 1].dir : top->dir, level[depth].name, AT_REMOVEDIR) < 0 &&
		    errno != ENOENT) {
			err = errno == ENOTEMPTY ? 1 : -errno;
			if (err < 0)
				name_culprit(level[depth].name);
			goto end;
		}
		if (depth == 0)
			return 0;
	}
end:
	out.a.count = (uint32_t)(TREE_SLICE - (budget > 0 ? budget : 0));
	while (depth > 0)
		close(level[--depth].dir);
	return err;
}

static int remove_path(void)
{
	struct place p;
	int err = find(in.r.base, path1, FW_NOFOLLOW | in.r.flags, 0, &p, NULL);

	if (err < 0)
		return err;
	err = strcmp(p.name, ".") == 0 ? -EBUSY : remove_tree(&p);
	shut(p.dir);
	if (err == 1) {
		out.a.flags |= FW_MORE;
		err = 0;
	}
	return err;
}

static int set_attributes(void)
{
	struct place p;
	struct stat st;
	int fd = -1, err = find(in.r.base, path1, in.r.flags & ~FW_PARENTS, 0, &p, NULL);

	if (err < 0)
		return err;
	/* All of it is done to one thing, whatever takes its name meanwhile. */
	fd = openat(p.dir, p.name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0)
		err = -errno;
	else if ((in.r.flags & FW_DIRECTORY) && !S_ISDIR(st.st_mode))
		err = -ENOTDIR;
	if (err == 0 && (in.r.flags & FW_SET_OWNER) && fchownat(fd, "", in.r.uid, in.r.gid, AT_EMPTY_PATH) < 0)
		err = -errno;
	if (err == 0 && (in.r.flags & FW_SET_MODE) && !S_ISLNK(st.st_mode) && change_mode(fd, in.r.mode & 07777) < 0)
		err = -errno;
	if (err == 0 && (in.r.flags & FW_SET_MTIME)) {
		struct timespec ts[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = in.r.mtime_sec, .tv_nsec = in.r.mtime_nsec}};

		if (utimensat(fd, "", ts, AT_EMPTY_PATH) < 0)
			err = -errno;
	}
	shut(fd);
	shut(p.dir);
	return err;
}

static int make_symlink(void)
{
	char temp[TEMP_LEN + 1];
	struct place p;
	struct stat st;
	int err = find(in.r.base, path1, FW_NOFOLLOW | in.r.flags, 0755, &p, NULL);

	if (err < 0)
		return err;
	if (symlinkat(path2, p.dir, p.name) < 0)
		err = -errno;
	if (err == -EEXIST && (in.r.flags & FW_REPLACE)) {
		if (strcmp(p.name, ".") == 0 ||
		    (fstatat(p.dir, p.name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode)))
			err = -EISDIR;
		else if (!temp_name(temp))
			err = -EAGAIN;
		else if (symlinkat(path2, p.dir, temp) < 0)
			err = -errno;
		else {
			err = renameat(p.dir, temp, p.dir, p.name) < 0 ? -errno : 0;
			if (err < 0)
				unlinkat(p.dir, temp, 0);
		}
	}
	shut(p.dir);
	return err;
}

static int make_link(void)
{
	struct place to, from;
	int err = find(in.r.base, path2, FW_NOFOLLOW | (in.r.flags & ~FW_PARENTS), 0, &from, NULL);

	if (err < 0)
		return err;
	err = find(in.r.base, path1, FW_NOFOLLOW | in.r.flags, 0755, &to, NULL);
	if (err < 0) {
		shut(from.dir);
		return err;
	}
	if (linkat(from.dir, from.name, to.dir, to.name, 0) < 0)
		err = -errno;
	if (err == -EEXIST && (in.r.flags & FW_REPLACE)) {
		struct stat a, b;

		if (fstatat(from.dir, from.name, &a, AT_SYMLINK_NOFOLLOW) == 0 &&
		    fstatat(to.dir, to.name, &b, AT_SYMLINK_NOFOLLOW) == 0 && a.st_ino == b.st_ino && a.st_dev == b.st_dev)
			err = 0; /* it is that file already */
		else if (unlinkat(to.dir, to.name, 0) < 0)
			err = -errno;
		else
			err = linkat(from.dir, from.name, to.dir, to.name, 0) < 0 ? -errno : 0;
	}
	shut(to.dir);
	shut(from.dir);
	return err;
}

static int open_watch(void)
{
	uint32_t number;
	struct handle *h = take(&number);
	int fd;

	if (!h)
		return -EMFILE;
	fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	if (fd < 0)
		return -errno;
	h->kind = WATCH;
	h->fd = fd;
	open_handles++;
	out.a.handle = number;
	return fd;
}

/* open_watched opens what is to be watched, for its name alone. It returns a descriptor or -errno. */
static int open_watched(void)
{
	int fd = look(in.r.base, path1, in.r.flags, O_PATH | (in.r.flags & FW_NOFOLLOW ? O_NOFOLLOW : 0)), dir, err;
	struct stat st;

	if (fd < 0 || (in.r.ino == 0 && path2[0] == '\0'))
		return fd;
	err = fstat(fd, &st) < 0 ? errno : in.r.ino && st.st_ino != in.r.ino ? ESTALE : 0;
	if (err || path2[0] == '\0') {
		if (err)
			close(fd);
		return err ? -err : fd;
	}
	dir = fd;
	fd = is_dots(path2) || strchr(path2, '/') ? -EINVAL : openat(dir, path2, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	if (fd == -1)
		fd = -errno;
	close(dir);
	return fd;
}

static int add_watch(void)
{
	const uint32_t self = IN_MODIFY | IN_CLOSE_WRITE | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF;
	const uint32_t gone = IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO;
	struct handle *h = given(in.r.handle, WATCH);
	char path[32];
	struct stat st;
	int fd, wd, err = 0;

	if (!h)
		return -EBADF;
	fd = open_watched();
	if (fd < 0)
		return fd;
	if (fstat(fd, &st) < 0) {
		err = errno;
		goto end;
	}
	fill(&out.a.stat, &st);
	if ((in.r.flags & FW_DIRECTORY) && !S_ISDIR(st.st_mode)) {
		err = ENOTDIR;
		goto end;
	}
	if (is_pseudo(fd)) {
		out.a.flags |= FW_PSEUDO;
		goto end;
	}
	/* The kernel asks for the right to read, and knows no other way to name what is open. */
	self_path(fd, path);
	wd = inotify_add_watch(h->fd, path, IN_EXCL_UNLINK | (in.r.flags & FW_NAMES ? gone :
							       S_ISDIR(st.st_mode) ? self | gone | IN_CREATE : self));
	if (wd < 0)
		err = errno;
	else
		out.a.count = (uint32_t)wd;
end:
	close(fd);
	return -err;
}

static int remove_watch(void)
{
	struct handle *h = given(in.r.handle, WATCH);

	if (!h)
		return -EBADF;
	return inotify_rm_watch(h->fd, (int)in.r.mode) < 0 ? -errno : 0;
}

static int close_handle(void)
{
	if (in.r.handle == 0 || in.r.handle > FW_HANDLES || handles[in.r.handle - 1].kind == FREE)
		return -EBADF;
	drop(&handles[in.r.handle - 1], false);
	return 0;
}

/* perform answers 0, -errno, or for those that hand one out a descriptor; *mine says that it stays open here. */
static int perform(bool *passes, bool *mine)
{
	*passes = *mine = false;
	switch (in.r.op) {
	case FW_STAT:
		return stat_path();
	case FW_OPEN:
		*passes = true;
		return open_file();
	case FW_CREATE:
		*passes = *mine = true;
		return create();
	case FW_COMMIT:
		return commit();
	case FW_CLOSE:
		return close_handle();
	case FW_DIR:
		return open_dir();
	case FW_NEXT:
		return next_entries();
	case FW_MKDIR:
		return make_dir();
	case FW_RENAME:
		return rename_path();
	case FW_UNLINK:
		return unlink_path();
	case FW_RMTREE:
		return remove_path();
	case FW_SETATTR:
		return set_attributes();
	case FW_SYMLINK:
		return make_symlink();
	case FW_LINK:
		return make_link();
	case FW_WATCH:
		*passes = *mine = true;
		return open_watch();
	case FW_ADD:
		return add_watch();
	case FW_UNWATCH:
		return remove_watch();
	default:
		return -EOPNOTSUPP;
	}
}

static bool send_answer(int sock, int fd)
{
	struct iovec iov = {.iov_base = &out, .iov_len = sizeof(out.a) + out.a.data_len};
	union {
		struct cmsghdr h;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t n;

	if (fd >= 0) {
		struct cmsghdr *c;

		m.msg_control = &control;
		m.msg_controllen = sizeof(control.room);
		c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &fd, sizeof(int));
	}
	do
		n = sendmsg(sock, &m, MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	return n >= 0;
}

/* answer serves the n bytes in the input. False ends the helper. */
static bool answer(int sock, size_t n)
{
	bool passes, mine;
	int result;

	if (n < sizeof(in.r) || in.r.magic != FW_MAGIC || in.r.path_len > FW_PATH_MAX || in.r.path2_len > FW_PATH_MAX ||
	    n != sizeof(in.r) + in.r.path_len + in.r.path2_len)
		return false;
	memcpy(path1, in.bytes + sizeof(in.r), in.r.path_len);
	path1[in.r.path_len] = '\0';
	memcpy(path2, in.bytes + sizeof(in.r) + in.r.path_len, in.r.path2_len);
	path2[in.r.path2_len] = '\0';
	memset(&out.a, 0, sizeof(out.a));
	out.a.magic = FW_MAGIC;
	out.a.op = in.r.op;
	out.a.cookie = in.r.cookie;
	result = perform(&passes, &mine);
	if (result < 0) {
		out.a.error = -result;
		return send_answer(sock, -1);
	}
	if (!passes)
		return send_answer(sock, -1);
	if (!send_answer(sock, result))
		return false;
	if (!mine)
		close(result);
	return true;
}

int serve_files(int sock)
{
	bool last = false;
	int code = 0;

	umask(0);
	root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (root < 0)
		return 1;
	for (;;) {
		struct pollfd p = {.fd = sock, .events = POLLIN};
		ssize_t n;

		if (!last) {
			int ready = poll(&p, 1, open_handles ? -1 : FW_IDLE_MS);

			if (ready < 0 && errno != EINTR) {
				code = 1;
				break;
			}
			/* Idle: no more requests get in, and those that got in while we decided are still served. */
			if (ready == 0) {
				shutdown(sock, SHUT_RD);
				last = true;
			}
		}
		n = recv(sock, in.bytes, sizeof(in.bytes), MSG_TRUNC | MSG_DONTWAIT);
		if (n < 0 && (errno == EINTR || (errno == EAGAIN && !last)))
			continue;
		if (n <= 0)
			break;
		if ((size_t)n > sizeof(in.bytes) || !answer(sock, (size_t)n)) {
			code = 1;
			break;
		}
	}
	for (uint32_t i = 0; i < FW_HANDLES; i++)
		drop(&handles[i], false);
	return code;
}
