/* SPDX-License-Identifier: Apache-2.0 */
/*
 * driver.c - runs the file helper in a scratch root, for tests: driver ROOT UID GID OPTIONS [GROUP…]
 *
 * It begins as root of fresh user, mount, pid and uts namespaces, with the socket as descriptor 3. OPTIONS are letters:
 * p mounts /proc, t a tmpfs on /mnt, o an overlay of ROOT-lower on ROOT, n forbids files without a name, s renames
 * /tmp/other to /tmp/f whenever a time is about to be set.
 */
#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>

static bool swaps;

static int swap_and_set_time(int fd, const char *name, const struct timespec ts[2], int flags)
{
	if (swaps)
		rename("/tmp/other", "/tmp/f");
	return utimensat(fd, name, ts, flags);
}

#define utimensat swap_and_set_time
#define FW_IDLE_MS 700
#define TEMP_AGE 0
#include "files.c"

#include <grp.h>
#include <stdlib.h>
#include <sys/mount.h>

static void need(int result, const char *what)
{
	if (result < 0) {
		perror(what);
		exit(3);
	}
}

int main(int argc, char **argv)
{
	gid_t groups[64];
	int n = 0;

	if (argc < 5)
		return 3;
	need(sethostname("inside", 6), "sethostname");
	need(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
	if (strchr(argv[4], 'o')) {
		char opts[3 * 4096];

		(void)snprintf(opts, sizeof(opts), "userxattr,lowerdir=%s-lower,upperdir=%s-upper,workdir=%s-work", argv[1],
			       argv[1], argv[1]);
		need(mount("overlay", argv[1], "overlay", 0, opts), "overlay");
	}
	need(chroot(argv[1]), "chroot");
	need(chdir("/"), "chdir");
	if (strchr(argv[4], 'p'))
		need(mount("proc", "/proc", "proc", 0, NULL), "proc");
	if (strchr(argv[4], 't'))
		need(mount("tmpfs", "/mnt", "tmpfs", 0, "mode=1777,size=8m"), "tmpfs");
	if (strchr(argv[4], 'n'))
		unnamed = FAILS;
	swaps = strchr(argv[4], 's') != NULL;
	for (int i = 5; i < argc && n < 64; i++)
		groups[n++] = (gid_t)atoi(argv[i]);
	need(setgroups((size_t)n, groups), "setgroups");
	need(setresgid((gid_t)atoi(argv[3]), (gid_t)atoi(argv[3]), (gid_t)atoi(argv[3])), "setresgid");
	need(setresuid((uid_t)atoi(argv[2]), (uid_t)atoi(argv[2]), (uid_t)atoi(argv[2])), "setresuid");
	return serve_files(3);
}
