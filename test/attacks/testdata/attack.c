/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attack.c - what hostile code inside a sandbox tries.
 *
 * `attack NAME [ARG…]` makes one kind of attempt and prints a line for each try: its name, a tab, "done" or the name of
 * the error, and perhaps a tab and more. It judges nothing: the Go test knows what must not be "done". Everything here
 * is chosen so that an attempt that succeeds shows, but harms no machine: a clock is set to what it says, a reboot
 * call only asks about Ctrl-Alt-Del.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_process_mrelease
#define SYS_process_mrelease 448
#endif

static const char *error_name(int e)
{
	static char other[24];

	switch (e) {
#define E(x) case x: return #x;
	E(EPERM) E(ENOENT) E(ESRCH) E(EINTR) E(EIO) E(ENXIO) E(E2BIG) E(ENOEXEC) E(EBADF) E(ECHILD) E(EAGAIN) E(ENOMEM)
	E(EACCES) E(EFAULT) E(EBUSY) E(EEXIST) E(EXDEV) E(ENODEV) E(ENOTDIR) E(EISDIR) E(EINVAL) E(ENFILE) E(EMFILE)
	E(ENOTTY) E(ETXTBSY) E(EFBIG) E(ENOSPC) E(ESPIPE) E(EROFS) E(EMLINK) E(EPIPE) E(ENOSYS) E(ENOTEMPTY) E(ELOOP)
	E(ENODATA) E(EOVERFLOW) E(EOPNOTSUPP) E(EAFNOSUPPORT) E(EPROTONOSUPPORT) E(ESOCKTNOSUPPORT) E(EADDRINUSE)
	E(EADDRNOTAVAIL) E(ENETUNREACH) E(EHOSTUNREACH) E(ECONNREFUSED) E(ETIMEDOUT) E(EDQUOT) E(EKEYREVOKED) E(EPROTOTYPE)
#undef E
	}
	snprintf(other, sizeof other, "errno%d", e);
	return other;
}

/* Prints one try. A result below zero stands for errno. */
static void say(const char *name, long result)
{
	printf("%s\t%s\n", name, result < 0 ? error_name(errno) : "done");
	fflush(stdout);
}

static void note(const char *name, const char *how, ...)
{
	va_list a;

	va_start(a, how);
	printf("%s\t", name);
	vprintf(how, a);
	printf("\n");
	va_end(a);
	fflush(stdout);
}

#define TRY(name, call) do { errno = 0; say(name, (long)(call)); } while (0)
#define SYS(name, ...) TRY(name, syscall(__VA_ARGS__))

/* In a child, since it may end it. A signal shows as its number. */
#define CHILD(name, call)                                                                                              \
	do {                                                                                                           \
		int st_;                                                                                               \
		pid_t p_ = fork();                                                                                     \
		if (p_ == 0) {                                                                                         \
			errno = 0;                                                                                     \
			say(name, (long)(call));                                                                       \
			_exit(0);                                                                                      \
		}                                                                                                      \
		if (p_ > 0 && waitpid(p_, &st_, 0) == p_ && WIFSIGNALED(st_))                                          \
			note(name, "signal%d", WTERMSIG(st_));                                                         \
	} while (0)

static int open_any(const char *path) { return open(path, O_RDONLY | O_CLOEXEC); }

/* ---- calls into the kernel ---- */

static long fork_with(unsigned long flags)
{
	long p = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);

	if (p == 0)
		_exit(0);
	if (p > 0)
		waitpid((pid_t)p, NULL, 0);
	return p;
}

static long fork3(uint64_t flags)
{
	uint64_t a[11] = {flags, 0, 0, 0, SIGCHLD};
	long p = syscall(SYS_clone3, a, sizeof a);

	if (p == 0)
		_exit(0);
	if (p > 0)
		waitpid((pid_t)p, NULL, 0);
	return p;
}

static void namespaces(void)
{
	static const struct { const char *name; unsigned long flag; } kinds[] = {
		{"user", 0x10000000}, {"mnt", 0x00020000}, {"pid", 0x20000000}, {"net", 0x40000000}, {"ipc", 0x08000000},
		{"uts", 0x04000000}, {"cgroup", 0x02000000}, {"time", 0x80},
	};
	char name[96], path[64];

	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		snprintf(name, sizeof name, "unshare %s", kinds[i].name);
		CHILD(name, syscall(SYS_unshare, kinds[i].flag));
		if (kinds[i].flag != 0x80) {
			snprintf(name, sizeof name, "clone %s", kinds[i].name);
			CHILD(name, fork_with(kinds[i].flag));
		}
		snprintf(name, sizeof name, "clone3 %s", kinds[i].name);
		CHILD(name, fork3(kinds[i].flag));
		snprintf(path, sizeof path, "/proc/1/ns/%s", kinds[i].name);
		snprintf(name, sizeof name, "open %s", path);
		TRY(name, open_any(path));
		snprintf(path, sizeof path, "/proc/self/ns/%s", kinds[i].name);
		snprintf(name, sizeof name, "setns own %s", kinds[i].name);
		CHILD(name, syscall(SYS_setns, open_any(path), 0));
	}
	CHILD("clone user behind high bits", fork_with(0x100000000ul | 0x10000000));
	CHILD("setns by pidfd of 1", syscall(SYS_setns, syscall(SYS_pidfd_open, 1, 0), 0x10000000 | 0x00020000));
}

static void mounts(void)
{
	uint64_t attr[4] = {0, 1, 0, 0};

	SYS("mount tmpfs", SYS_mount, "none", "/tmp", "tmpfs", 0, "");
	SYS("mount proc", SYS_mount, "none", "/tmp", "proc", 0, "");
	SYS("mount cgroup", SYS_mount, "none", "/tmp", "cgroup", 0, "memory");
	SYS("mount cgroup2", SYS_mount, "none", "/tmp", "cgroup2", 0, "");
	SYS("mount bind", SYS_mount, "/proc/1/root", "/tmp", "", MS_BIND, "");
	SYS("mount remount /proc/sys", SYS_mount, "", "/proc/sys", "", MS_REMOUNT | MS_BIND, "");
	SYS("mount remount /", SYS_mount, "", "/", "", MS_REMOUNT | MS_BIND, "");
	SYS("mount shared", SYS_mount, "", "/", "", MS_SHARED | MS_REC, "");
	SYS("umount /proc/kcore", SYS_umount2, "/proc/kcore", MNT_DETACH);
	SYS("umount /proc/sys", SYS_umount2, "/proc/sys", MNT_DETACH);
	SYS("umount /sys/kernel", SYS_umount2, "/sys/kernel", MNT_DETACH);
	SYS("umount /dev", SYS_umount2, "/dev", MNT_DETACH);
	SYS("umount /", SYS_umount2, "/", MNT_DETACH);
	SYS("pivot_root", SYS_pivot_root, "/", "/tmp");
	SYS("fsopen", SYS_fsopen, "proc", 0);
	SYS("fspick", SYS_fspick, AT_FDCWD, "/proc", 0);
	SYS("open_tree", SYS_open_tree, AT_FDCWD, "/proc", 1);
	SYS("move_mount", SYS_move_mount, AT_FDCWD, "/tmp", AT_FDCWD, "/var", 0);
	SYS("mount_setattr", SYS_mount_setattr, AT_FDCWD, "/proc/sys", 0, attr, sizeof attr);
	SYS("fsconfig", SYS_fsconfig, 0, 0, "", "", 0);
	SYS("fsmount", SYS_fsmount, 0, 0, 0);
}

static void kernel_calls(void)
{
	char buf[256] = "";
	struct timespec now;
	struct timeval tv;
	struct timex tx = {.modes = ADJ_SETOFFSET};
	uint32_t *handle = (void *)buf; /* its size, its type, then the handle */

	SYS("io_uring_setup", SYS_io_uring_setup, 1, buf);
	SYS("io_uring_enter", SYS_io_uring_enter, 0, 0, 0, 0, 0, 0);
	SYS("io_uring_register", SYS_io_uring_register, 0, 0, 0, 0);
	SYS("bpf", SYS_bpf, 0, buf, 72);
	SYS("userfaultfd", SYS_userfaultfd, 0);
	SYS("keyctl", SYS_keyctl, 0, -3, 1, 0, 0);
	SYS("add_key", SYS_add_key, "user", "k", "v", 1, -3);
	SYS("request_key", SYS_request_key, "user", "k", 0, -3);
	SYS("perf_event_open", SYS_perf_event_open, buf, 0, -1, -1, 0);
	SYS("kexec_load", SYS_kexec_load, 0, 0, 0, 0);
	SYS("kexec_file_load", SYS_kexec_file_load, -1, -1, 0, "", 8);
	SYS("init_module", SYS_init_module, buf, 1, "");
	SYS("finit_module", SYS_finit_module, 0, "", 0);
	SYS("delete_module", SYS_delete_module, "there_is_none", O_NONBLOCK);
	clock_gettime(CLOCK_REALTIME, &now);
	SYS("clock_settime", SYS_clock_settime, CLOCK_REALTIME, &now);
	gettimeofday(&tv, NULL);
	SYS("settimeofday", SYS_settimeofday, &tv, NULL);
	SYS("clock_adjtime", SYS_clock_adjtime, CLOCK_REALTIME, &tx);
	SYS("adjtimex", SYS_adjtimex, &tx);
	SYS("reboot", SYS_reboot, 0xfee1dead, 672274793, 0, 0);
	SYS("swapon", SYS_swapon, "/bin/busybox", 0);
	SYS("swapoff", SYS_swapoff, "/bin/busybox");
	SYS("acct", SYS_acct, NULL);
	SYS("syslog", SYS_syslog, 3, buf, sizeof buf);
	SYS("quotactl", SYS_quotactl, 0x80000100, "/dev/vda", 0, 0);
	handle[0] = 8;
	handle[1] = 1;
	handle[2] = 2; /* the root of ext4 and its like, as shocker.c asked for it */
	SYS("open_by_handle_at", SYS_open_by_handle_at, open_any("/"), buf, O_RDONLY);
	SYS("fanotify_init", SYS_fanotify_init, 0, O_RDONLY);
	SYS("kcmp", SYS_kcmp, 1, getpid(), 0, 0, 0);
	SYS("sethostname", SYS_sethostname, "x", 1);
	SYS("setdomainname", SYS_setdomainname, "x", 1);
	SYS("vhangup", SYS_vhangup);
	SYS("lookup_dcookie", SYS_lookup_dcookie, 0, buf, sizeof buf);
	SYS("nfsservctl", SYS_nfsservctl, 0, 0, 0);
	SYS("move_pages", SYS_move_pages, 1, 0, 0, 0, 0, 0);
	SYS("migrate_pages", SYS_migrate_pages, 1, 0, 0, 0);
	SYS("personality no randomisation", SYS_personality, 0x0040000);
#ifdef __x86_64__
	SYS("iopl", SYS_iopl, 3);
	SYS("ioperm", SYS_ioperm, 0x80, 1, 1);
	SYS("x32 getpid", 0x40000000 | SYS_getpid);
	{
		long r;
		/* The i386 table through the old gate: 20 is getpid there. */
		__asm__ volatile("int $0x80" : "=a"(r) : "a"(20L) : "memory", "r8", "r9", "r10", "r11");
		errno = r < 0 ? (int)-r : 0;
		say("i386 getpid", r);
	}
#endif
	{
		int fifo_ = 1;
		TRY("realtime scheduling", syscall(SYS_sched_setscheduler, 0, SCHED_FIFO, &fifo_));
	}
	TRY("nice -20", syscall(SYS_setpriority, PRIO_PROCESS, 0, -20));
	SYS("ioprio realtime", SYS_ioprio_set, 1, 0, 1 << 13);
	{
		struct rlimit r = {1 << 20, 1 << 20};
		TRY("more open files", setrlimit(RLIMIT_NOFILE, &r));
		r.rlim_cur = r.rlim_max = RLIM_INFINITY;
		TRY("core files", setrlimit(RLIMIT_CORE, &r));
		TRY("locked memory", setrlimit(RLIMIT_MEMLOCK, &r));
	}
	{
		int fd = open("/proc/self/oom_score_adj", O_WRONLY);
		TRY("oom_score_adj -1", fd < 0 ? -1 : write(fd, "-1", 2));
	}
}

static void pid1(void)
{
	char buf[64];
	struct iovec l = {buf, sizeof buf}, r = {(void *)0x400000, sizeof buf};
	int fd = (int)syscall(SYS_pidfd_open, 1, 0);
	struct rlimit lim = {0, 0};
	static const char *const files[] = {
		"/proc/1/fd", "/proc/1/fdinfo", "/proc/1/mem", "/proc/1/maps", "/proc/1/environ", "/proc/1/auxv", "/proc/1/stack",
		"/proc/1/syscall", "/proc/1/root/", "/proc/1/cwd/", "/proc/1/exe", "/proc/1/map_files", "/proc/1/io",
		"/proc/1/personality", "/proc/1/pagemap", "/proc/1/smaps", "/proc/1/task/1/fd", "/proc/1/task/1/mem",
	};

	for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
		int f = open_any(files[i]);
		char name[96];
		long n = f;

		snprintf(name, sizeof name, "read %s", files[i]);
		errno = f < 0 ? errno : 0;
		if (f >= 0) {
			struct stat st;

			fstat(f, &st);
			if (S_ISDIR(st.st_mode)) {
				DIR *d = fdopendir(f);
				struct dirent *e;

				n = -1;
				errno = 0;
				while (d && (e = readdir(d)) != NULL)
					if (e->d_name[0] != '.')
						n = 1;
				if (n < 0 && errno == 0)
					errno = ENOENT;
			} else {
				n = read(f, buf, sizeof buf);
				if (n == 0) {
					n = -1;
					errno = ENODATA;
				}
			}
		}
		say(name, n);
	}
	TRY("write /proc/1/mem", open("/proc/1/mem", O_WRONLY));
	TRY("write /proc/1/exe", open("/proc/1/exe", O_WRONLY));
	TRY("readlink /proc/1/exe", readlink("/proc/1/exe", buf, sizeof buf));
	TRY("write /proc/1/oom_score_adj", open("/proc/1/oom_score_adj", O_WRONLY));
	TRY("write /proc/1/uid_map", open("/proc/1/uid_map", O_WRONLY));
	TRY("write /proc/1/comm", open("/proc/1/comm", O_WRONLY));
	TRY("ptrace attach", ptrace(PTRACE_ATTACH, 1, 0, 0));
	TRY("ptrace seize", ptrace(PTRACE_SEIZE, 1, 0, 0));
	TRY("process_vm_readv", process_vm_readv(1, &l, 1, &r, 1, 0));
	TRY("process_vm_writev", process_vm_writev(1, &l, 1, &r, 1, 0));
	SYS("pidfd_getfd", SYS_pidfd_getfd, fd, 3, 0);
	SYS("process_madvise", SYS_process_madvise, fd, &r, 1, 21, 0);
	SYS("process_mrelease", SYS_process_mrelease, fd, 0);
	SYS("prlimit", SYS_prlimit64, 1, RLIMIT_NOFILE, &lim, NULL);
	SYS("get_robust_list", SYS_get_robust_list, 1, buf, buf + 8);
}

/* What may be done to PID 1 by its namesakes, but must not keep the platform from its work. */
static void slow_pid1(void)
{
	struct sched_param p = {0};
	unsigned long mask = 1;

	TRY("affinity", syscall(SYS_sched_setaffinity, 1, sizeof mask, &mask));
	TRY("nice", syscall(SYS_setpriority, PRIO_PROCESS, 1, 19));
	TRY("idle scheduling", syscall(SYS_sched_setscheduler, 1, 5 /* SCHED_IDLE */, &p));
	TRY("idle io", syscall(SYS_ioprio_set, 1, 1, 3 << 13));
}

static void devices(void)
{
	TRY("mknod block", mknod("/tmp/disk", S_IFBLK | 0666, makedev(254, 0)));
	TRY("mknod block of the machine", mknod("/tmp/vda", S_IFBLK | 0666, makedev(253, 0)));
	TRY("mknod mem", mknod("/tmp/mem", S_IFCHR | 0666, makedev(1, 1)));
	TRY("mknod kmsg", mknod("/tmp/kmsg", S_IFCHR | 0666, makedev(1, 11)));
	TRY("mknod null", mknod("/tmp/null", S_IFCHR | 0666, makedev(1, 3)));
	TRY("mknod whiteout", mknod("/tmp/white", S_IFCHR, makedev(0, 0)));
	TRY("mknod in /dev/shm", mknod("/dev/shm/mem", S_IFCHR | 0666, makedev(1, 1)));
	TRY("mknod in /dev", mknod("/dev/mem", S_IFCHR | 0666, makedev(1, 1)));
	TRY("chmod /dev/null", chmod("/dev/null", 0600));
	TRY("unlink /dev/null", unlink("/dev/null"));
	TRY("write /dev", open("/dev/x", O_CREAT | O_WRONLY, 0600));
	TRY("xattr /dev/null", setxattr("/dev/null", "user.x", "x", 1, 0));
	TRY("utimes /dev/null", utimes("/dev/null", NULL));
}

static void ioctls(void)
{
	static const struct { const char *name; uint32_t cmd; } cmds[] = {
		{"XFS_IOC_SWAPEXT", 0xC0C0586D}, {"XFS_IOC_EXCHANGE_RANGE", 0x40285881}, {"EXT4_IOC_MOVE_EXT", 0xC028660F},
		{"EXT4_IOC_SWAP_BOOT", 0x6611}, {"BTRFS_IOC_SNAP_CREATE_V2", 0x50009417}, {"BTRFS_IOC_SUBVOL_CREATE", 0x5000940E},
		{"TIOCSTI", 0x5412}, {"TIOCLINUX", 0x541C},
	};
	char arg[8192];
	int fd = open("/tmp/a", O_CREAT | O_RDWR, 0600);

	memset(arg, 0, sizeof arg);
	for (size_t i = 0; i < sizeof cmds / sizeof *cmds; i++) {
		char name[96];

		snprintf(name, sizeof name, "%s", cmds[i].name);
		SYS(name, SYS_ioctl, fd, (unsigned long)cmds[i].cmd, arg);
		snprintf(name, sizeof name, "%s behind a high bit", cmds[i].name);
		SYS(name, SYS_ioctl, fd, 0x100000000ul | cmds[i].cmd, arg);
		snprintf(name, sizeof name, "%s behind all high bits", cmds[i].name);
		SYS(name, SYS_ioctl, fd, 0xffffffff00000000ul | cmds[i].cmd, arg);
	}
	{
		struct { uint32_t xflags, extsize, nextents, projid, cowextsize; char pad[8]; } x;
		memset(&x, 0, sizeof x);
		ioctl(fd, 0x801c581f, &x); /* FS_IOC_FSGETXATTR */
		x.projid += 7;
		TRY("another project's quota", ioctl(fd, 0x401c5820, &x));
	}
	{
		int flags = 0x10; /* immutable */
		TRY("immutable", ioctl(fd, 0x40086602, &flags));
	}
}

/* Asks for a new network device over netlink, whose structures libc has no header for. */
static int new_device(void)
{
	struct { uint16_t family, pad; uint32_t pid, groups; } to = {.family = AF_NETLINK};
	struct { uint32_t len; uint16_t type, flags; uint32_t seq, pid; char body[32]; } m;
	struct { uint32_t len; uint16_t type, flags; uint32_t seq, pid; int32_t error; char rest[512]; } answer;
	int s = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 0);

	memset(&m, 0, sizeof m);
	m.len = sizeof m;
	m.type = 16;       /* RTM_NEWLINK */
	m.flags = 1 | 4 | 0x400; /* request, acknowledge, create */
	if (s < 0 || sendto(s, &m, sizeof m, 0, (void *)&to, sizeof to) < 0 || recv(s, &answer, sizeof answer, 0) <= 0)
		return -1;
	errno = -answer.error;
	return answer.error ? -1 : 0;
}

static void sockets(void)
{
	char name[64];

	for (int family = 0; family < 50; family++) {
		static const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET};
		int error = EAFNOSUPPORT;
		int any = -1;

		for (size_t i = 0; any < 0 && i < 4; i++) {
			any = socket(family, types[i] | SOCK_CLOEXEC, 0);
			if (any < 0 && errno != ESOCKTNOSUPPORT && errno != EPROTONOSUPPORT)
				error = errno;
		}
		snprintf(name, sizeof name, "family %d", family);
		errno = error;
		say(name, any);
		if (any >= 0)
			close(any);
	}
	for (int proto = 0; proto < 23; proto++) {
		int s = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, proto);

		snprintf(name, sizeof name, "netlink %d", proto);
		say(name, s);
		if (s >= 0)
			close(s);
	}
	TRY("netlink 12 behind high bits", syscall(SYS_socket, 0x100000000ul | AF_NETLINK, SOCK_RAW, 0x10000000cul));
	TRY("vsock behind high bits", syscall(SYS_socket, 0x100000000ul | 40, SOCK_STREAM, 0));
	TRY("sctp", socket(AF_INET, SOCK_SEQPACKET, 132));
	TRY("dccp", socket(AF_INET, 6, 33));
	TRY("tipc pair", syscall(SYS_socketpair, 30, SOCK_SEQPACKET, 0, (int[2]){0, 0}));
	TRY("new network device", new_device());
}

/* ---- descriptors ---- */

static void descriptors(void)
{
	for (int fd = 0; fd < 1024; fd++) {
		struct stat st;
		char path[32], target[256] = "";
		long n;

		if (fstat(fd, &st) != 0)
			continue;
		snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
		n = readlink(path, target, sizeof target - 1);
		target[n < 0 ? 0 : n] = 0;
		note(path, "%o\t%s", st.st_mode & S_IFMT, target);
	}
}

/* A message as sandsea-init would send it, on whatever there is. */
static void forge(void)
{
	char m[64] = {1, 0, (char)132, 0};

	for (int fd = 0; fd < 16; fd++) {
		char name[32];
		int null = open("/dev/null", O_RDONLY);
		struct iovec v = {m, sizeof m};
		char control[CMSG_SPACE(sizeof(int))];
		struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
		struct cmsghdr *c = CMSG_FIRSTHDR(&h);

		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &null, sizeof null);
		if (fd == null) {
			close(null);
			continue;
		}
		snprintf(name, sizeof name, "sendmsg %d", fd);
		TRY(name, sendmsg(fd, &h, MSG_DONTWAIT));
		close(null);
	}
}

/* ---- what the kernel counts for all ---- */

static void ptys(void)
{
	int n = 0;

	while (open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC) >= 0)
		n++;
	note("ptys", "%d\t%s", n, error_name(errno));
}

static void aio(void)
{
	unsigned long ctx;
	int n = 0;

	for (; n < 100000; n++) {
		ctx = 0;
		if (syscall(SYS_io_setup, 128, &ctx) != 0)
			break;
	}
	note("aio", "%d\t%s", n, error_name(errno));
}

/* Notification instances, which the kernel counts by user. */
static void instances(void)
{
	int n = 0;

	while (inotify_init1(IN_CLOEXEC) >= 0)
		n++;
	note("instances", "%d\t%s", n, error_name(errno));
}

/* Processes, sockets and shared memory of others. */
static void neighbours(void)
{
	DIR *d = opendir("/proc");
	struct dirent *e;
	char line[1024];
	FILE *f;
	int s;

	while (d != NULL && (e = readdir(d)) != NULL)
		if (e->d_name[0] >= '0' && e->d_name[0] <= '9')
			note("process", "%s", e->d_name);
	if (d != NULL)
		closedir(d);
	/* Numbers that are somebody's outside. */
	for (pid_t p = 2; p < 32768; p++)
		if (p != getpid() && kill(p, 0) == 0)
			note("can signal", "%d", p);
	f = fopen("/proc/net/unix", "r");
	if (f != NULL && fgets(line, sizeof line, f) != NULL)
		while (fgets(line, sizeof line, f) != NULL)
			note("socket", "%.*s", (int)strcspn(line, "\n"), line);
	if (f != NULL)
		fclose(f);
	for (int port = 1; port < 65536; port++) {
		struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
					 .sin_addr = {htonl(INADDR_LOOPBACK)}}, own;
		socklen_t size = sizeof own;

		s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		/* A socket may meet itself at a port that nobody listens on. */
		if (connect(s, (void *)&to, sizeof to) == 0 && getsockname(s, (void *)&own, &size) == 0 &&
		    own.sin_port != to.sin_port)
			note("port", "%d", port);
		close(s);
	}
	for (int id = 0; id < 256; id++)
		if (shmat(id, NULL, SHM_RDONLY) != (void *)-1)
			note("shared memory", "%d", id);
	f = fopen("/proc/net/dev", "r");
	while (f != NULL && fgets(line, sizeof line, f) != NULL)
		if (strchr(line, ':') != NULL) {
			const char *name = line + strspn(line, " ");

			note("device", "%.*s", (int)strcspn(name, ":"), name);
		}
	/* The machine's hypervisor and this machine itself, by its other door. */
	for (unsigned cid = 0; cid < 4; cid++) {
		struct { uint16_t family, zero; uint32_t port, cid; char pad[4]; } to = {40, 0, 2024, cid, ""};

		s = socket(40, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (s >= 0 && connect(s, (void *)&to, sizeof to) == 0)
			note("vsock", "%u", cid);
		if (s >= 0)
			close(s);
	}
	note("looked", "done");
}

/* ---- a walk through everything that can be read ---- */

static char **marks;
static time_t walk_end;
static long walked, opened;
static char walk_buf[1 << 20];

static void too_long(int sig)
{
	(void)sig;
}

static int visit(const char *path, const struct stat *st, int type, struct FTW *f)
{
	ssize_t n = 0, got;
	int fd;

	(void)f;
	if (time(NULL) >= walk_end)
		return 1;
	walked++;
	if (type != FTW_F && type != FTW_SL)
		return 0;
	if (S_ISLNK(st->st_mode)) {
		n = readlink(path, walk_buf, sizeof walk_buf - 1);
	} else if ((fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY)) >= 0) {
		opened++;
		alarm(1); /* some give a byte now and then */
		while (n < (ssize_t)sizeof walk_buf - 1 && (got = read(fd, walk_buf + n, sizeof walk_buf - 1 - (size_t)n)) > 0) {
			n += got;
			if (S_ISCHR(st->st_mode))
				break;
		}
		alarm(0);
		close(fd);
	}
	if (n > 0) {
		walk_buf[n] = 0;
		for (char **m = marks; *m != NULL; m++)
			if (memmem(walk_buf, (size_t)n, *m, strlen(*m)) != NULL)
				note("found", "%s\t%s", path, *m);
	}
	/* What it opens for writing outside of its own processes and terminals reaches the machine. */
	if (S_ISREG(st->st_mode) && strncmp(path, "/dev/", 5) != 0 && (path[6] < '0' || path[6] > '9') &&
	    strncmp(path, "/proc/self/", 11) != 0 && strncmp(path, "/proc/thread-self/", 18) != 0 &&
	    (fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC)) >= 0) {
		note("can write", "%s", path);
		close(fd);
	}
	return 0;
}

static void walk(const char *seconds, char **what)
{
	struct sigaction sa = {.sa_handler = too_long};

	sigaction(SIGALRM, &sa, NULL);
	marks = what;
	walk_end = time(NULL) + atoi(seconds);
	for (const char *const *dir = (const char *const[]){"/proc", "/sys", "/dev", NULL}; *dir != NULL; dir++) {
		int stopped;

		/* What goes away meanwhile, as a device of the machine's may, breaks a walk off. */
		do
			stopped = nftw(*dir, visit, 64, FTW_PHYS);
		while (stopped != 0 && errno == ENOENT && time(NULL) < walk_end);
		note(*dir, "%s", stopped == 0 ? "done" : "stopped");
	}
	note("walked", "%ld\t%ld", walked, opened);
}

/* ---- races ---- */

/* Whether a process is the platform's: until its exec, a command is. */
static bool is_platform(pid_t p)
{
	char path[64], comm[32] = "";
	int fd;

	snprintf(path, sizeof path, "/proc/%d/comm", p);
	fd = open_any(path);
	if (fd < 0)
		return false;
	if (read(fd, comm, sizeof comm - 1) < 0)
		comm[0] = 0;
	close(fd);
	return strncmp(comm, "sandsea-", 8) == 0;
}

/* Goes for everything of the platform that comes by, for a while. */
static void hunt(const char *seconds)
{
	long tries = 0, hits = 0;
	time_t end = time(NULL) + atoi(seconds);

	while (time(NULL) < end) {
		DIR *d = opendir("/proc");
		struct dirent *e;

		while (d != NULL && (e = readdir(d)) != NULL) {
			static const char *const files[] = {"mem", "maps", "environ", "auxv", "exe"};
			static const char *const links[] = {"exe", "fd/3", "fd/0", "root", "cwd", "ns/mnt"};
			char path[64], buf[64];
			pid_t p = atoi(e->d_name);
			struct iovec l = {buf, sizeof buf}, r = {(void *)0x400000, sizeof buf};
			ssize_t got;
			int fd;

			if (p <= 0 || p == getpid())
				continue;
			if (!is_platform(p))
				continue;
			tries++;
			for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
				snprintf(path, sizeof path, "/proc/%d/%s", p, files[i]);
				fd = open(path, i == 0 ? O_RDWR : O_RDONLY);
				if (fd < 0)
					continue;
				/* Of one that has ended already there is nothing to read. */
				got = pread(fd, buf, sizeof buf, i == 0 ? 0x400000 : 0);
				close(fd);
				if (got <= 0)
					continue;
				if (is_platform(p)) {
					note("got", "%s\t%d", files[i], p);
					hits++;
				}
			}
			for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
				snprintf(path, sizeof path, "/proc/%d/%s", p, links[i]);
				if (readlink(path, buf, sizeof buf) > 0 && is_platform(p)) {
					note("got", "%s\t%d", links[i], p);
					hits++;
				}
			}
			if (ptrace(PTRACE_SEIZE, p, 0, 0) == 0) {
				if (is_platform(p)) {
					note("traced", "%d", p);
					hits++;
				}
				ptrace(PTRACE_DETACH, p, 0, 0);
			}
			if (process_vm_readv(p, &l, 1, &r, 1, 0) > 0 && is_platform(p)) {
				note("read", "%d", p);
				hits++;
			}
			fd = (int)syscall(SYS_pidfd_open, p, 0);
			if (fd >= 0) {
				if (syscall(SYS_pidfd_getfd, fd, 3, 0) >= 0 && is_platform(p)) {
					note("took", "%d", p);
					hits++;
				}
				close(fd);
			}
		}
		if (d != NULL)
			closedir(d);
	}
	note("tries", "%ld", tries);
	note("hits", "%ld", hits);
}

/* Exchanges a directory and a symbolic link at a path, for ever. */
static void swap(const char *path, const char *target)
{
	char other[512];

	snprintf(other, sizeof other, "%s.other", path);
	mkdir(path, 0777);
	if (symlink(target, other) != 0 && errno != EEXIST) {
		say("symlink", -1);
		return;
	}
	note("swapping", "done");
	for (;;)
		syscall(SYS_renameat2, AT_FDCWD, path, AT_FDCWD, other, 2 /* RENAME_EXCHANGE */);
}

/* ---- ways out of the root ---- */

static void roots(void)
{
	struct stat before, after;
	int top = open("/", O_RDONLY | O_DIRECTORY);

	fstat(top, &before);
	mkdir("/tmp/cell", 0755);
	TRY("chroot", chroot("/tmp/cell"));
	TRY("fchdir", fchdir(top));
	for (int i = 0; i < 64; i++)
		if (chdir("..") != 0)
			break;
	TRY("chroot up", chroot("."));
	stat("/", &after);
	note("same root", "%s", before.st_dev == after.st_dev && before.st_ino == after.st_ino ? "yes" : "no");
	TRY("host's proc", open("/proc/1/root/etc/hostname", O_RDONLY));
	TRY("root of init", chroot("/proc/1/root"));
	TRY("cwd of init", chdir("/proc/1/cwd"));
}

/* ---- bombs: each takes all it gets and then keeps it ---- */

static _Noreturn void hold(const char *what, long n)
{
	note(what, "%ld\t%s", n, error_name(errno));
	for (;;)
		pause();
}

static void *sleeper(void *arg)
{
	pause();
	return arg;
}

static void bomb(const char *kind)
{
	long n = 0;

	signal(SIGPIPE, SIG_IGN);
	if (!strcmp(kind, "forks")) {
		for (;;)
			if (fork() < 0)
				usleep(1000);
	} else if (!strcmp(kind, "zombies")) {
		for (;;) {
			pid_t p = fork();

			if (p == 0)
				_exit(0);
			if (p < 0)
				hold(kind, n);
			n++;
		}
	} else if (!strcmp(kind, "threads")) {
		pthread_t t;
		pthread_attr_t a;

		pthread_attr_init(&a);
		pthread_attr_setstacksize(&a, 16384);
		while (pthread_create(&t, &a, sleeper, NULL) == 0)
			n++;
		hold(kind, n);
	} else if (!strcmp(kind, "memory")) {
		for (;; n++) {
			char *p = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			if (p == MAP_FAILED)
				hold(kind, n);
			memset(p, 1, 1 << 20);
		}
	} else if (!strcmp(kind, "memory of many")) {
		for (;; n++) {
			pid_t p = fork();

			if (p < 0)
				hold(kind, n);
			if (p == 0) {
				char *m = mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

				if (m != MAP_FAILED)
					memset(m, 1, 2 << 20);
				pause();
			}
		}
	} else if (!strcmp(kind, "shared memory")) {
		for (;; n++) {
			int id = shmget(IPC_PRIVATE, 1 << 20, IPC_CREAT | 0600);
			char *p = id < 0 ? (void *)-1 : shmat(id, NULL, 0);

			if (p == (void *)-1)
				hold(kind, n);
			memset(p, 1, 1 << 20); /* which outlives the process */
			shmdt(p);
		}
	} else if (!strcmp(kind, "descriptors")) {
		for (;;) {
			int fd = open("/dev/null", O_RDONLY);

			if (fd >= 0) {
				n++;
				continue;
			}
			if (errno != EMFILE || fork() < 0)
				hold(kind, n);
			syscall(SYS_close_range, 3, ~0u, 0);
		}
	} else if (!strcmp(kind, "pipes")) {
		for (;;) {
			int fds[2];

			if (pipe2(fds, O_NONBLOCK) != 0)
				hold(kind, n);
			fcntl(fds[1], F_SETPIPE_SZ, 1 << 20);
			while (write(fds[1], walk_buf, sizeof walk_buf) > 0)
				;
			n++;
		}
	} else if (!strcmp(kind, "sockets")) {
		for (;;) {
			int fds[2];

			if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, fds) != 0)
				hold(kind, n);
			while (send(fds[0], walk_buf, 65536, 0) > 0)
				;
			n++;
		}
	} else if (!strcmp(kind, "inodes")) {
		mkdir("/root/many", 0755);
		for (;; n++) {
			char path[64];
			int fd;

			snprintf(path, sizeof path, "/root/many/%ld-a-name-of-some-length", n);
			fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
			if (fd < 0)
				hold(kind, n);
			close(fd);
		}
	} else if (!strcmp(kind, "names")) {
		/* Each look-up of what is not there is remembered. */
		for (;; n++) {
			char path[64];
			struct stat st;

			snprintf(path, sizeof path, "/root/none-%ld-a-name-of-some-length", n);
			stat(path, &st);
		}
	} else if (!strcmp(kind, "disk")) {
		int fd = open("/root/big", O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
		ssize_t w;

		for (size_t i = 0; i < sizeof walk_buf; i++)
			walk_buf[i] = (char)(i * 2654435761u >> 13);
		while ((w = write(fd, walk_buf, sizeof walk_buf)) > 0)
			n += w;
		hold(kind, n);
	} else if (!strcmp(kind, "deep")) {
		/* A tree deeper than any path. */
		int error = 0;

		if (chdir("/root") != 0)
			hold(kind, -1);
		for (; n < 5000; n++)
			if (mkdir("d", 0755) != 0 || chdir("d") != 0) {
				error = errno;
				break;
			}
		errno = error;
		note(kind, "%ld\t%s", n, error_name(errno));
	} else if (!strcmp(kind, "output")) {
		memset(walk_buf, 'y', sizeof walk_buf);
		for (;;)
			if (write(1, walk_buf, sizeof walk_buf) < 0)
				hold(kind, -1);
	} else if (!strcmp(kind, "files in memory")) {
		for (;; n++) {
			int fd = memfd_create("x", 0);

			if (fd < 0 || ftruncate(fd, 1 << 20) != 0 || write(fd, walk_buf, sizeof walk_buf) < 0)
				hold(kind, n);
		}
	} else if (!strcmp(kind, "processor")) {
		for (;;)
			n++;
	}
	exit(2);
}

/* Dies with a core, if cores are made. */
static void crash(void)
{
	raise(SIGSEGV);
}

int main(int argc, char **argv)
{
	static const struct { const char *name; void (*run)(void); } plain[] = {
		{"namespaces", namespaces}, {"mounts", mounts}, {"kernel", kernel_calls}, {"pid1", pid1},
		{"slow_pid1", slow_pid1}, {"devices", devices}, {"ioctls", ioctls}, {"sockets", sockets},
		{"descriptors", descriptors}, {"forge", forge}, {"neighbours", neighbours}, {"roots", roots}, {"crash", crash},
	};
	static const struct { const char *name; void (*run)(void); } held[] = {
		{"ptys", ptys}, {"aio", aio}, {"instances", instances},
	};
	const char *what = argc > 1 ? argv[1] : "", *arg = argc > 2 ? argv[2] : "";

	for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
		if (!strcmp(what, plain[i].name)) {
			plain[i].run();
			return 0;
		}
	for (size_t i = 0; i < sizeof held / sizeof *held; i++)
		if (!strcmp(what, held[i].name)) {
			held[i].run();
			if (*arg)
				pause(); /* with all it got */
			return 0;
		}
	if (!strcmp(what, "walk"))
		walk(arg, argv + 3);
	else if (!strcmp(what, "hunt"))
		hunt(arg);
	else if (!strcmp(what, "swap") && argc > 3)
		swap(arg, argv[3]);
	else if (!strcmp(what, "bomb"))
		bomb(arg);
	else
		return 2;
	return 0;
}
