//go:build ignore

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * setup.c - the way from the nursery into the sandbox.
 *
 * Everything is mounted by descriptor, in two steps. What is the same for every sandbox is made first, possibly long
 * before there is one: /proc, /dev and /sys with all that lies on and in them, on a stage, a tmpfs at the nursery's
 * /mnt. The sandbox's root is then attached to the stage, and the three are moved into it, each with all its mounts.
 * Below the root, which an image filled, no symbolic link is ever followed: an image whose /proc, /dev or /sys is one
 * does not start. All mounts happen before the pivot, while the nursery's whole /proc is still visible, without which the
 * kernel refuses a new one to a user namespace.
 */
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "init.h"

/* The parts of the mount interface for which libc has no header. */
#define X_FSOPEN_CLOEXEC 1u
#define X_FSCONFIG_SET_STRING 1u
#define X_FSCONFIG_CMD_CREATE 6u
#define X_FSCONFIG_CMD_RECONFIGURE 7u
#define X_FSPICK_CLOEXEC 1u
#define X_FSPICK_EMPTY_PATH 8u
#define X_FSMOUNT_CLOEXEC 1u
#define X_ATTR_RDONLY 0x1u
#define X_ATTR_NOSUID 0x2u
#define X_ATTR_NODEV 0x4u
#define X_ATTR_NOEXEC 0x8u
#define X_MOVE_F_EMPTY_PATH 0x4u
#define X_MOVE_T_EMPTY_PATH 0x40u
#define X_TREE_CLONE 0x1u
#define X_RESOLVE_NO_MAGICLINKS 0x2u
#define X_RESOLVE_NO_SYMLINKS 0x4u
#define X_RESOLVE_IN_ROOT 0x10u

#define CAP_SETGID_ 6
#define CAP_SETUID_ 7
#define CAP_KILL_ 5
#define CAP_SYS_ADMIN_ 21
#define CAPS_VERSION 0x20080522u

/* An id that nobody needs to have: as saved id it keeps even root inside from prlimit on PID 1. */
#define ODD_ID 65534

struct open_how_ {
	uint64_t flags, mode, resolve;
};

struct mount_attributes {
	uint64_t set, clear, propagation, userns;
};

const struct ss_plan *plan;
const struct ss_instruction *filter;
struct ss_facts facts;

/* The stage, once it is made. Its tmpfs is the only one: each super block costs every memory cgroup of the machine. */
static int stage = -1;
/* The file on it that covers the list of processors, open for writing, or -1 if the kernel shows none. */
static int online = -1;
/* What the file that it covers says. */
static char machine_cpus[256];
static size_t machine_cpus_size;

/* Shown as empty: what tells of the host, reaches it, or has crashed it when read. */
static const char *const masked[] = {
	"proc/acpi",
	"proc/asound",
	"proc/cmdline",
	"proc/config.gz",
	"proc/driver",
	"proc/interrupts",
	"proc/iomem",
	"proc/ioports",
	"proc/kallsyms",
	"proc/kcore",
	"proc/key-users",
	"proc/keys",
	"proc/kmsg",
	"proc/kpagecgroup",
	"proc/kpagecount",
	"proc/kpageflags",
	"proc/latency_stats",
	"proc/mtrr",
	"proc/pagetypeinfo",
	"proc/pressure",
	"proc/sched_debug",
	"proc/schedstat",
	"proc/scsi",
	"proc/slabinfo",
	"proc/sysrq-trigger",
	"proc/timer_list",
	"proc/timer_stats",
	"proc/vmallocinfo",
	"proc/vmcore",
	"proc/zoneinfo",
	"sys/devices/virtual/block",
	"sys/devices/virtual/powercap",
	"sys/firmware",
	"sys/kernel",
};

static const char *const read_only[] = {
	"proc/bus",
	"proc/fs",
	"proc/irq",
	"proc/sys",
};

/* Opens a path below a directory for its name alone. */
static int below(int dir, const char *path, int flags)
{
	struct open_how_ how = {
		.flags = (uint64_t)(O_PATH | O_CLOEXEC | O_NOFOLLOW | flags),
		.resolve = X_RESOLVE_IN_ROOT | X_RESOLVE_NO_SYMLINKS | X_RESOLVE_NO_MAGICLINKS,
	};

	return (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
}

/* A mount point at the top of the root; made where the image has none. */
static int mount_point(const char *name, mode_t mode)
{
	int fd = below(FD_ROOT, name, O_DIRECTORY);
	struct stat st;

	if (fd < 0 && errno == ENOENT && mkdirat(FD_ROOT, name, mode) == 0)
		fd = below(FD_ROOT, name, O_DIRECTORY);
	/* O_PATH with O_NOFOLLOW opens a link itself; with O_DIRECTORY it is ENOTDIR, so this is a second lock. */
	if (fd >= 0 && (fstat(fd, &st) != 0 || !S_ISDIR(st.st_mode))) {
		close(fd);
		errno = ENOTDIR;
		return -1;
	}
	return fd;
}

static bool attach(int mount, int target)
{
	return syscall(SYS_move_mount, mount, "", target, "", X_MOVE_F_EMPTY_PATH | X_MOVE_T_EMPTY_PATH) == 0;
}

static bool restrict_mount(int fd, uint64_t set)
{
	struct mount_attributes a = {.set = set};

	return syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &a, sizeof a) == 0;
}

/* A detached bind mount of what the path names below dir; "" for dir itself. */
static int bind_of(int dir, const char *path)
{
	return (int)syscall(SYS_open_tree, dir, path,
			    X_TREE_CLONE | (unsigned)O_CLOEXEC | (*path ? 0u : (unsigned)AT_EMPTY_PATH));
}

/* A new detached mount. Options are pairs of key and value, ended by NULL. */
static int new_mount(const char *type, const char *const *options, unsigned attributes)
{
	int fs = (int)syscall(SYS_fsopen, type, X_FSOPEN_CLOEXEC), fd = -1, error;
	bool ok = fs >= 0;

	for (; ok && options != NULL && options[0] != NULL; options += 2)
		ok = syscall(SYS_fsconfig, fs, X_FSCONFIG_SET_STRING, options[0], options[1], 0) == 0;
	if (ok && syscall(SYS_fsconfig, fs, X_FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
		fd = (int)syscall(SYS_fsmount, fs, X_FSMOUNT_CLOEXEC, attributes);
	error = errno;
	if (fs >= 0)
		close(fs);
	errno = error;
	return fd;
}

/* Attaches and closes both. */
static bool place(int mount, int target)
{
	bool ok = mount >= 0 && target >= 0 && attach(mount, target);
	int error = errno;

	if (mount >= 0)
		close(mount);
	if (target >= 0)
		close(target);
	errno = error;
	return ok;
}

static void decimal(char *out, uint64_t v)
{
	char digits[24];
	int n = 0;

	do
		digits[n++] = (char)('0' + v % 10);
	while ((v /= 10) != 0);
	while (n > 0)
		*out++ = digits[--n];
	*out = 0;
}

static bool read_plan(int fd)
{
	size_t size;
	const struct ss_plan *p = map_sealed(fd, sizeof *p, sizeof *p + SS_MAX_FILTER * sizeof *filter, &size);

	errno = EINVAL;
	if (p == NULL || p->magic != SS_PLAN_MAGIC || p->version != SS_VERSION || p->size != size)
		return false;
	if (p->filter_len > SS_MAX_FILTER || size != sizeof *p + p->filter_len * sizeof *filter)
		return false;
	if (memchr(p->hostname, 0, sizeof p->hostname) == NULL || memchr(p->resolver, 0, sizeof p->resolver) == NULL ||
	    (p->flags & ~SS_PLAN_NO_NEW_PRIVS) != 0 || p->ncpus > 65536)
		return false;
	plan = p;
	filter = (const struct ss_instruction *)(p + 1);
	return true;
}

static bool loopback_up(void)
{
	struct ifreq r;
	int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), error;
	bool ok;

	if (s < 0)
		return false;
	memset(&r, 0, sizeof r);
	memcpy(r.ifr_name, "lo", 3);
	ok = ioctl(s, SIOCGIFFLAGS, &r) == 0;
	/* A pooled network is up already, and not ours to change. */
	if (ok && (r.ifr_flags & IFF_UP) == 0) {
		r.ifr_flags |= IFF_UP;
		ok = ioctl(s, SIOCSIFFLAGS, &r) == 0;
	}
	error = errno;
	close(s);
	errno = error;
	return ok;
}

/* Makes the stage, with a directory for each thing that is put on it. */
static bool make_stage(void)
{
	static const char *const options[] = {"size", "4m", "mode", "0755", NULL};
	static const char *const dirs[] = {"root", "proc", "dev", "sys", "empty"};

	/* No mount of ours shows anywhere else. */
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
		return false;
	stage = new_mount("tmpfs", options, X_ATTR_NOSUID | X_ATTR_NODEV);
	if (stage < 0 || syscall(SYS_move_mount, stage, "", AT_FDCWD, "/mnt", X_MOVE_F_EMPTY_PATH) != 0)
		return false;
	for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
		if (mkdirat(stage, dirs[i], 0555) != 0)
			return false;
	return mkdirat(stage, "shm", 0777) == 0 && fchmodat(stage, "shm", 01777, 0) == 0;
}

/* Whether root inside is somebody else outside. */
static bool in_user_namespace(int proc)
{
	static const char whole[] = "         0          0 4294967295\n";
	char map[64] = "";
	int fd = openat(proc, "1/uid_map", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	ssize_t n = fd >= 0 ? read(fd, map, sizeof map - 1) : -1;

	if (fd >= 0)
		close(fd);
	return n > 0 && strcmp(map, whole) != 0;
}

static bool mount_proc(void)
{
	int fd;

	if (!place(new_mount("proc", NULL, X_ATTR_NOSUID | X_ATTR_NODEV | X_ATTR_NOEXEC),
		   below(stage, "proc", O_DIRECTORY)))
		return false;
	fd = below(stage, "proc/1/uid_map", 0);
	if (fd < 0)
		return false;
	close(fd);
	fd = below(stage, "proc", O_DIRECTORY);
	if (fd < 0)
		return false;
	if (in_user_namespace(fd))
		facts.flags |= SS_FACT_USERNS;
	close(fd);
	return true;
}

/* Attaches a mount that the spawner gave; its descriptor stays. */
static bool attach_given(int mount, const char *name, uint64_t attributes)
{
	int target = below(stage, name, O_DIRECTORY), error;
	bool ok = target >= 0 && attach(mount, target) && restrict_mount(mount, attributes);

	error = errno;
	if (target >= 0)
		close(target);
	errno = error;
	return ok;
}

static bool mount_pts(void)
{
	/* All sandboxes draw on one number of terminals, kernel.pty.max; of 3,072 none may take the most. */
	static const char *const options[] = {"ptmxmode", "0666", "mode", "0620", "gid", "5", "max", "256", NULL};

	return place(new_mount("devpts", options, X_ATTR_NOSUID | X_ATTR_NOEXEC), below(stage, "dev/pts", O_DIRECTORY));
}

static bool mount_mqueue(void)
{
	int target = below(stage, "dev/mqueue", O_DIRECTORY), fd;

	if (target < 0)
		return errno == ENOENT;
	fd = new_mount("mqueue", NULL, X_ATTR_NOSUID | X_ATTR_NODEV | X_ATTR_NOEXEC);
	if (fd < 0 && errno == ENODEV) {
		close(target);
		return true;
	}
	return place(fd, target);
}

static bool mount_sys(void)
{
	const unsigned attributes = X_ATTR_RDONLY | X_ATTR_NOSUID | X_ATTR_NODEV | X_ATTR_NOEXEC;

	if (sys_given)
		return attach_given(FD_SYS, "sys", attributes);
	return place(new_mount("sysfs", NULL, attributes), below(stage, "sys", O_DIRECTORY));
}

/* Puts a restricted bind mount of (dir, path) over target, and closes target. */
static bool cover(int dir, const char *path, int target, uint64_t attributes)
{
	int fd = bind_of(dir, path), error;

	if (fd >= 0 && !restrict_mount(fd, attributes)) {
		error = errno;
		close(fd);
		errno = error;
		fd = -1;
	}
	return place(fd, target);
}

static bool mask_paths(void)
{
	struct stat st;

	for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) {
		int fd = below(stage, masked[i], 0);
		bool ok;

		if (fd < 0 && errno == ENOENT)
			continue;
		if (fd < 0 || fstat(fd, &st) != 0)
			return false;
		if (S_ISDIR(st.st_mode))
			ok = cover(stage, "empty", fd, X_ATTR_RDONLY | X_ATTR_NOSUID | X_ATTR_NODEV | X_ATTR_NOEXEC);
		else
			ok = cover(FD_DEV, "null", fd, X_ATTR_RDONLY | X_ATTR_NOSUID | X_ATTR_NOEXEC);
		if (!ok)
			return false;
		facts.masks++;
	}
	for (size_t i = 0; i < sizeof read_only / sizeof *read_only; i++) {
		int fd = below(stage, read_only[i], 0);

		if (fd < 0 && errno == ENOENT)
			continue;
		if (fd < 0 || !cover(fd, "", fd, X_ATTR_RDONLY | X_ATTR_NOSUID | X_ATTR_NODEV | X_ATTR_NOEXEC))
			return false;
		facts.masks++;
	}
	return true;
}

/* Covers the list of processors with a file that is filled once their number is known. */
static bool cover_cpus(void)
{
	int target = below(stage, "sys/devices/system/cpu/online", 0), fd;
	ssize_t n;

	if (target < 0)
		return errno == ENOENT;
	fd = openat(stage, "sys/devices/system/cpu/online", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	n = fd >= 0 ? read(fd, machine_cpus, sizeof machine_cpus) : -1;
	if (fd >= 0)
		close(fd);
	online = openat(stage, "online", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
	if (n < 0 || online < 0) {
		close(target);
		return false;
	}
	machine_cpus_size = (size_t)n;
	return cover(stage, "online", target, X_ATTR_RDONLY | X_ATTR_NOSUID | X_ATTR_NODEV | X_ATTR_NOEXEC);
}

/* What nproc and its like read shows the quota, not the machine. */
static bool show_cpus(void)
{
	char text[32] = "0";
	size_t n = 1;

	if (online < 0)
		return true;
	if (plan->ncpus == 0)
		return write(online, machine_cpus, machine_cpus_size) == (ssize_t)machine_cpus_size;
	if (plan->ncpus > 1) {
		text[n++] = '-';
		decimal(text + n, plan->ncpus - 1);
		n = strlen(text);
	}
	text[n++] = '\n';
	return write(online, text, n) == (ssize_t)n;
}

/* Bounds the tmpfs, of which all but /dev/shm is out of reach from here on. */
static bool size_shm(void)
{
	int fs = (int)syscall(SYS_fspick, stage, "", X_FSPICK_CLOEXEC | X_FSPICK_EMPTY_PATH), error;
	char size[24];
	bool ok;

	/* The few pages beside /dev/shm are not the workload's to fill. */
	decimal(size, (plan->shm_size != 0 ? plan->shm_size : 64u << 20) + 65536);
	ok = fs >= 0 && syscall(SYS_fsconfig, fs, X_FSCONFIG_SET_STRING, "size", size, 0) == 0 &&
	     syscall(SYS_fsconfig, fs, X_FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0) == 0;
	error = errno;
	if (fs >= 0)
		close(fs);
	errno = error;
	return ok;
}

static bool attach_root(void)
{
	int target = below(stage, "root", O_DIRECTORY), error;
	/* A device node that an image brings along is a name and no more. */
	bool ok = target >= 0 && attach(FD_ROOT, target) && restrict_mount(FD_ROOT, X_ATTR_NODEV);

	error = errno;
	if (target >= 0)
		close(target);
	errno = error;
	return ok;
}

/* Moves what is mounted on the stage into the root. */
static bool move_in(const char *name)
{
	return place(below(stage, name, O_DIRECTORY), mount_point(name, strcmp(name, "dev") == 0 ? 0755 : 0555));
}

/* From here on paths begin at the new root, on which the old one lies. */
static bool pivot(void)
{
	return fchdir(FD_ROOT) == 0 && syscall(SYS_pivot_root, ".", ".") == 0;
}

/* Takes the old root off the new one, and with it the nursery and the stage. Before it nothing else may run here. */
bool leave_nursery(void)
{
	return umount2(".", MNT_DETACH) == 0 && chdir("/") == 0;
}

/*
 * Gives programs a way from the host's name to an address: a line in /etc/hosts, or the whole file where the image has
 * none. An image in which that is anything but a small regular file goes without. After leave_nursery.
 */
void name_host(void)
{
	static const char localhost[] = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";
	char text[sizeof localhost + sizeof plan->hostname + 16] = "";
	struct open_how_ how = {
		.flags = O_RDWR | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY,
		.resolve = X_RESOLVE_IN_ROOT | X_RESOLVE_NO_SYMLINKS | X_RESOLVE_NO_MAGICLINKS,
	};
	struct stat st;
	char last = '\n';
	ssize_t done;
	int root, fd;

	root = plan->hostname[0] != 0 ? open("/", O_PATH | O_CLOEXEC | O_DIRECTORY) : -1;
	if (root < 0)
		return;
	fd = (int)syscall(SYS_openat2, root, "etc/hosts", &how, sizeof how);
	if (fd < 0 && errno == ENOENT) {
		how.flags |= O_CREAT | O_EXCL;
		how.mode = 0644;
		fd = (int)syscall(SYS_openat2, root, "etc/hosts", &how, sizeof how);
		strcpy(text, localhost);
	}
	close(root);
	if (fd < 0)
		return;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size < 1 << 20 &&
	    (st.st_size == 0 || pread(fd, &last, 1, st.st_size - 1) == 1)) {
		if (last != '\n')
			strcat(text, "\n");
		strcat(text, "127.0.1.1\t");
		strcat(text, plan->hostname);
		strcat(text, "\n");
		done = write(fd, text, strlen(text)); /* on a full disk there is none */
		(void)done;
	}
	close(fd);
}

/*
 * Points programs at the sandbox's resolver: /etc/resolv.conf becomes a file of its own, whatever the image has under
 * that name. An image whose /etc is none goes without. After leave_nursery.
 */
void name_resolver(void)
{
	/* One that is being started again loses questions: they are asked again soon, instead of after the usual 5 s. */
	static const char options[] = "\noptions timeout:1 attempts:5\n";
	char text[sizeof plan->resolver + sizeof options + 16] = "nameserver ";
	struct open_how_ how = {
		.flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
		.resolve = X_RESOLVE_IN_ROOT | X_RESOLVE_NO_MAGICLINKS,
	};
	int root, etc, fd;
	ssize_t done;

	if (plan->resolver[0] == 0)
		return;
	root = open("/", O_PATH | O_CLOEXEC | O_DIRECTORY);
	if (root < 0)
		return;
	if (mkdirat(root, "etc", 0755) != 0 && errno != EEXIST) {
		close(root);
		return;
	}
	etc = (int)syscall(SYS_openat2, root, "etc", &how, sizeof how);
	close(root);
	if (etc < 0)
		return;
	(void)unlinkat(etc, "resolv.conf", 0); /* it may be a link to nowhere, as systemd's is */
	fd = openat(etc, "resolv.conf", O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
	close(etc);
	if (fd < 0)
		return;
	strcat(text, plan->resolver);
	strcat(text, options);
	done = write(fd, text, strlen(text)); /* on a full disk there is none */
	(void)done;
	close(fd);
}

bool set_caps(uint64_t caps)
{
	struct {
		uint32_t version;
		int pid;
	} head = {.version = CAPS_VERSION, .pid = 0};
	struct {
		uint32_t effective, permitted, inheritable;
	} sets[2];

	memset(sets, 0, sizeof sets);
	for (int i = 0; i < 2; i++)
		sets[i].effective = sets[i].permitted = (uint32_t)(caps >> (32 * i));
	return syscall(SYS_capset, &head, sets) == 0;
}

/* Everything that is executed inside gets at most the bounding set; PID 1 keeps what it needs beside that. */
static bool drop_caps(void)
{
	const uint64_t own = 1ull << CAP_SYS_ADMIN_ | 1ull << CAP_SETUID_ | 1ull << CAP_SETGID_ | 1ull << CAP_KILL_;
	uint64_t known = 0;

	for (unsigned c = 0; c < 64 && prctl(PR_CAPBSET_READ, (unsigned long)c, 0, 0, 0) >= 0; c++) {
		known |= 1ull << c;
		if ((plan->caps >> c & 1) == 0 && prctl(PR_CAPBSET_DROP, (unsigned long)c, 0, 0, 0) != 0)
			return false;
		if (prctl(PR_CAPBSET_READ, (unsigned long)c, 0, 0, 0) == 1)
			facts.caps |= 1ull << c;
	}
	if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) != 0)
		return false;
	if (syscall(SYS_setresgid, 0, 0, ODD_ID) != 0 || syscall(SYS_setresuid, 0, 0, ODD_ID) != 0)
		return false;
	return set_caps((facts.caps | own) & known);
}

static bool limits(void)
{
	struct rlimit r;

	if (getrlimit(RLIMIT_NOFILE, &r) != 0)
		return false;
	if (r.rlim_max < plan->nofile) {
		struct rlimit more = {.rlim_cur = plan->nofile, .rlim_max = plan->nofile};

		if (setrlimit(RLIMIT_NOFILE, &more) != 0)
			return false;
		r = more;
	}
	/* PID 1 holds a descriptor for each start under way; children take the plan's limit. */
	r.rlim_cur = r.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &r) != 0)
		return false;
	facts.nofile = plan->nofile != 0 ? plan->nofile : r.rlim_max;
	return true;
}

static bool affinity(void)
{
	for (size_t i = 0; i < sizeof plan->cpus; i++)
		if (plan->cpus[i] != 0)
			return syscall(SYS_sched_setaffinity, 0, sizeof plan->cpus, plan->cpus) >= 0;
	return true;
}

/* Makes everything that does not depend on the sandbox. Returns the step that failed, with errno, or 0. */
uint32_t prepare(void)
{
	/* The one that the clone made is rooted at the spawner's group; from here it is at the sandbox's own. */
	if (unshare(CLONE_NEWCGROUP) != 0)
		return SS_STEP_CGROUPNS;
	if (!loopback_up())
		return SS_STEP_LOOPBACK;
	if (!make_stage())
		return SS_STEP_STAGE;
	if (!mount_proc())
		return SS_STEP_PROC;
	if (!attach_given(FD_DEV, "dev", X_ATTR_RDONLY | X_ATTR_NOSUID | X_ATTR_NOEXEC))
		return SS_STEP_DEV;
	if (!mount_pts())
		return SS_STEP_PTS;
	if (!place(bind_of(stage, "shm"), below(stage, "dev/shm", O_DIRECTORY)))
		return SS_STEP_SHM;
	if (!mount_mqueue())
		return SS_STEP_MQUEUE;
	if (!mount_sys())
		return SS_STEP_SYS;
	if (!mask_paths())
		return SS_STEP_MASK;
	if (!cover_cpus())
		return SS_STEP_CPUS;
	return 0;
}

/*
 * Goes the rest of the way, or the whole, to a root that came with SETUP (root_fd) or from the spawner. Returns the step
 * that failed, with errno, or 0. Nothing may run before leave_nursery.
 */
uint32_t setup(int plan_fd, int root_fd)
{
	if (!read_plan(plan_fd))
		return SS_STEP_PLAN;
	facts.version = SS_VERSION;
	facts.flags |= SS_FACT_PTY | SS_FACT_SHELL;
	if (stage < 0) {
		uint32_t step = prepare();

		if (step != 0)
			return step;
	}
	if ((root_fd >= 0 && dup3(root_fd, FD_ROOT, O_CLOEXEC) < 0) || !attach_root())
		return SS_STEP_ROOT;
	if (!move_in("proc"))
		return SS_STEP_PROC;
	if (!move_in("dev"))
		return SS_STEP_DEV;
	if (!move_in("sys"))
		return SS_STEP_SYS;
	if (!size_shm())
		return SS_STEP_SHM;
	if (!show_cpus())
		return SS_STEP_CPUS;
	if (!pivot())
		return SS_STEP_PIVOT;
	if (online >= 0)
		close(online);
	close(stage);
	close(FD_ROOT);
	close(FD_DEV);
	close(FD_SYS);
	if (plan->hostname[0] != 0 && sethostname(plan->hostname, strlen(plan->hostname)) != 0)
		return SS_STEP_HOSTNAME;
	if (!limits())
		return SS_STEP_NOFILE;
	if (!affinity())
		return SS_STEP_CPUS;
	if (!drop_caps())
		return SS_STEP_CAPS;
	if (plan->filter_len > 0)
		facts.flags |= SS_FACT_SECCOMP;
	if (plan->flags & SS_PLAN_NO_NEW_PRIVS)
		facts.flags |= SS_FACT_NO_NEW_PRIVS;
	return 0;
}
