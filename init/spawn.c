//go:build ignore

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spawn.c - commands and the file helper.
 *
 * A child is a plain fork into the command's cgroup: nothing of it, not even a stop, can hold up PID 1. It does all
 * that is particular to the command itself and tells a failure over a pipe that closes at its exec. Until that exec it is as
 * untraceable as PID 1, and no code of the sandbox runs in it.
 */
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "files.h"
#include "init.h"

#define SEALS (F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#define SECCOMP_SET_MODE_FILTER 1

struct clone_arguments {
	uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

struct filter_program {
	uint16_t len;
	const struct ss_instruction *filter;
};

/* A parsed spec memfd. */
struct spec {
	const struct ss_spec *head;
	const uint32_t *groups;
	char **argv, **envp;
	const char *cwd;
};

/* Maps a memfd that nobody can change any more. NULL: it is not one, or of a wrong size. */
const void *map_sealed(int fd, size_t min, size_t max, size_t *size)
{
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);
	void *p;

	if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &st) != 0)
		return NULL;
	if (st.st_size < 0 || (size_t)st.st_size < min || (size_t)st.st_size > max)
		return NULL;
	p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (p == MAP_FAILED)
		return NULL;
	*size = (size_t)st.st_size;
	return p;
}

/* Every bound is checked before it is used; strings must fill the rest of the file exactly. */
static bool parse_spec(int fd, struct spec *out)
{
	size_t size, at, count;
	const struct ss_spec *h = map_sealed(fd, sizeof *h, SS_MAX_SPEC, &size);
	const char *text, *end;
	char **table;

	if (h == NULL || h->magic != SS_SPEC_MAGIC || h->version != SS_VERSION || h->size != size)
		return false;
	if (h->ngroups > SS_MAX_GROUPS || h->argc > SS_MAX_STRINGS || h->envc > SS_MAX_STRINGS || h->umask > 0777)
		return false;
	/* To setresuid and its kin this number means: leave it. */
	if (h->uid == UINT32_MAX || h->gid == UINT32_MAX)
		return false;
	at = sizeof *h + h->ngroups * sizeof(uint32_t);
	if (at > size)
		return false;
	out->head = h;
	out->groups = (const uint32_t *)(h + 1);
	count = (size_t)h->argc + h->envc + 1;
	table = mmap(NULL, (count + 2) * sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (table == MAP_FAILED)
		return false;
	text = (const char *)h + at;
	end = (const char *)h + size;
	out->argv = table;
	out->envp = table + h->argc + 1;
	for (size_t i = 0; i < count; i++) {
		const char *nul = text < end ? memchr(text, 0, (size_t)(end - text)) : NULL;

		if (nul == NULL)
			return false;
		if (i < h->argc)
			out->argv[i] = (char *)text;
		else if (i < (size_t)h->argc + h->envc)
			out->envp[i - h->argc] = (char *)text;
		else
			out->cwd = text;
		text = nul + 1;
	}
	return text == end;
}

/* Runs in the child: says where the start failed, and ends it. */
static _Noreturn void fail(int errors, uint32_t step, int error, uint32_t flags)
{
	struct ss_failed f;

	memset(&f, 0, sizeof f);
	f.step = step;
	f.error = error;
	f.flags = flags;
	/* Shorter than PIPE_BUF, so whole or not at all; without a reader there is nobody to tell. */
	if (write(errors, &f, sizeof f) != (ssize_t)sizeof f)
		_exit(126);
	_exit(127);
}

static bool limit(int what, rlim_t value)
{
	struct rlimit r = {.rlim_cur = value, .rlim_max = value};

	return setrlimit(what, &r) == 0;
}

/*
 * Puts this process before PID 1 when memory runs out: what holds it may be pipes or files in memory, which no process
 * looks large for, and the end of PID 1 would be that of the sandbox. To be dumpable opens our files in /proc to
 * ourselves; nobody inside has the capabilities that it takes to trace us.
 */
static void expendable(void)
{
	int fd;

	prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
	fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	if (fd < 0)
		return;
	/* A wish: where it cannot be, the largest is chosen. */
	(void)!write(fd, "500", 3);
	close(fd);
}

/* What a child sheds of PID 1 before anything else. */
static bool plain_process(void)
{
	sigset_t none;

	default_signals();
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	setsid();
	expendable();
	/* No core file is that short, and unlike 0 this also keeps a core from a program that the machine pipes it to. */
	return (plan->nofile == 0 || limit(RLIMIT_NOFILE, plan->nofile)) && limit(RLIMIT_CORE, 1);
}

/*
 * Takes the asked ids. The filter is loaded in between: it needs CAP_SYS_ADMIN (so that set-user-id programs still gain
 * rights, it does not rely on no_new_privs), which goes with the change of user, or else with the capabilities.
 */
static uint32_t take_ids(const struct spec *s, bool no_new_privs)
{
	const struct ss_spec *h = s->head;

	if (syscall(SYS_setgroups, (size_t)h->ngroups, s->groups) != 0 ||
	    syscall(SYS_setresgid, h->gid, h->gid, h->gid) != 0)
		return SS_STEP_USER;
	if (no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		return SS_STEP_FILTER;
	if (plan->filter_len > 0) {
		struct filter_program p = {.len = (uint16_t)plan->filter_len, .filter = filter};

		if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &p) != 0)
			return SS_STEP_FILTER;
	}
	if (syscall(SYS_setresuid, h->uid, h->uid, h->uid) != 0)
		return SS_STEP_USER;
	/* Root keeps what the bounding set holds; another user has nothing left already. */
	if (!set_caps(h->uid == 0 ? facts.caps : 0))
		return SS_STEP_USER;
	return 0;
}

/* execve that tells a missing program from one whose interpreter is missing. */
static int try_exec(const char *path, const struct spec *s, uint32_t *flags)
{
	execve(path, s->argv, s->envp);
	if (errno == ENOENT && faccessat(AT_FDCWD, path, F_OK, 0) == 0)
		*flags = SS_FAILED_INTERPRETER;
	else
		*flags = 0;
	return *flags ? ENOENT : errno;
}

/* execvp's rules, but without a shell for files that no handler knows. Returns the error. */
static int search_exec(const struct spec *s, uint32_t *flags)
{
	const char *name = s->argv[0], *path = DEFAULT_PATH;
	size_t length = strlen(name);
	int worst = ENOENT;

	*flags = 0;
	if (length == 0)
		return ENOENT;
	if (strchr(name, '/') != NULL)
		return try_exec(name, s, flags);
	if (length > NAME_MAX)
		return ENAMETOOLONG;
	for (char **e = s->envp; *e != NULL; e++)
		if (strncmp(*e, "PATH=", 5) == 0) {
			path = *e + 5;
			break;
		}
	for (;;) {
		char file[PATH_MAX + NAME_MAX + 2];
		size_t n = strcspn(path, ":");
		int error;

		if (n < PATH_MAX) {
			/* An empty entry is the working directory. */
			memcpy(file, path, n);
			if (n > 0)
				file[n++] = '/';
			memcpy(file + n, name, length + 1);
			error = try_exec(file, s, flags);
			if (*flags != 0)
				return error;
			if (error == EACCES)
				worst = EACCES;
			else if (error != ENOENT && error != ENOTDIR && error != ESTALE && error != ENODEV &&
				 error != ETIMEDOUT)
				return error;
		}
		path += strcspn(path, ":");
		if (*path == 0)
			return worst;
		path++;
	}
}

/* Where the descriptors of a state begin; below them all is of the same kind in every SPAWN. */
static int before_state(uint32_t flags)
{
	return flags & SS_SPAWN_ERR ? 5 : 4;
}

static _Noreturn void command(const struct received *r, int errors)
{
	struct spec s;
	uint32_t step, asked = r->m.u.spawn.flags, flags = 0;
	int error, state = before_state(asked);

	memset(&s, 0, sizeof s);
	if (!parse_spec(r->fds[0], &s) || s.head->argc == 0)
		fail(errors, SS_STEP_SPEC, EINVAL, 0);
	/* All received numbers are above FD_SYS, so none is overwritten before it is used. */
	if (dup2(r->fds[2], 0) < 0 || dup2(r->fds[3], 1) < 0 || dup2(asked & SS_SPAWN_ERR ? r->fds[4] : 1, 2) < 0 ||
	    dup3(errors, FD_CONTROL, O_CLOEXEC) < 0)
		fail(errors, SS_STEP_STDIO, errno, 0);
	errors = FD_CONTROL;
	/* Received numbers rise, so that these are 8 at least; and by way of low ones, since they may be 250 or 251. */
	if ((asked & SS_SPAWN_STATE) && (dup2(r->fds[state], FD_ROOT) < 0 || dup2(r->fds[state + 1], FD_DEV) < 0))
		fail(errors, SS_STEP_STDIO, errno, 0);
	if (syscall(SYS_close_range, asked & SS_SPAWN_STATE ? FD_SYS : FD_CONTROL + 1, ~0u, 0) != 0)
		fail(errors, SS_STEP_STDIO, errno, 0);
	if (asked & SS_SPAWN_STATE) {
		if (dup2(FD_ROOT, SS_FD_STATE_IN) < 0 || dup2(FD_DEV, SS_FD_STATE_OUT) < 0)
			fail(errors, SS_STEP_STDIO, errno, 0);
		close(FD_ROOT);
		close(FD_DEV);
	}
	if (!plain_process())
		fail(errors, SS_STEP_LIMITS, errno, 0);
	/* Of a session just made, so that it is nobody else's; a terminal of another session is refused. */
	if ((asked & SS_SPAWN_TTY) && ioctl(0, TIOCSCTTY, 0) != 0)
		fail(errors, SS_STEP_PTY, errno, 0);
	umask((mode_t)s.head->umask);
	step = take_ids(&s, (plan->flags & SS_PLAN_NO_NEW_PRIVS) != 0);
	if (step != 0)
		fail(errors, step, errno, 0);
	/* With the user's rights, and with no descriptor open that a path through /proc/self/fd could reach. */
	if (chdir(s.cwd) != 0)
		fail(errors, SS_STEP_CWD, errno, 0);
	error = search_exec(&s, &flags);
	fail(errors, SS_STEP_EXEC, error, flags);
}

static _Noreturn void helper(const struct received *r)
{
	struct spec s;

	memset(&s, 0, sizeof s);
	if (!parse_spec(r->fds[0], &s) || dup3(r->fds[1], FD_CONTROL, 0) < 0 ||
	    syscall(SYS_close_range, FD_CONTROL + 1, ~0u, 0) != 0 || !plain_process() || take_ids(&s, true) != 0 ||
	    chdir("/") != 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0)
		_exit(126);
	prctl(PR_SET_NAME, "sandsea-files", 0, 0, 0);
	umask(022);
	_exit(serve_files(FD_CONTROL));
}

/* A fork; into a cgroup if cgroup is not negative. */
static pid_t fork_into(int cgroup)
{
	struct clone_arguments a;

	memset(&a, 0, sizeof a);
	a.exit_signal = SIGCHLD;
	if (cgroup >= 0) {
		a.flags = CLONE_INTO_CGROUP;
		a.cgroup = (uint64_t)cgroup;
	}
	return (pid_t)syscall(SYS_clone3, &a, sizeof a);
}

static void refuse(const struct received *r, uint32_t step, int error, uint32_t flags)
{
	struct ss_message m = message(SS_FAILED, r->m.seq, r->m.cookie);

	m.u.failed.step = step;
	m.u.failed.error = error;
	m.u.failed.flags = flags;
	line_answer(&m);
}

void spawn(struct received *r)
{
	uint32_t flags = r->m.u.spawn.flags;
	int want = before_state(flags) + (flags & SS_SPAWN_STATE ? 2 : 0);
	struct slot *s;
	struct epoll_event e;
	int pipes[2];
	pid_t pid;

	if ((flags & ~(SS_SPAWN_ERR | SS_SPAWN_TTY | SS_SPAWN_STATE)) != 0 || (!r->lost && r->nfds != want))
		die(SS_END_PROTOCOL);
	s = slot_by_cookie(r->m.cookie);
	if (s != NULL) {
		s->seq = r->m.seq;
		if (s->state == SS_RUNNING || s->state == SS_EXITED)
			s->say |= SAY_STARTED;
		if (s->state == SS_EXITED)
			s->say |= SAY_EXIT;
		return;
	}
	if (r->lost) {
		refuse(r, SS_STEP_STDIO, EMFILE, 0);
		return;
	}
	s = slot_take(r->m.cookie);
	if (s == NULL) {
		refuse(r, SS_STEP_FORK, EAGAIN, SS_FAILED_SLOTS);
		return;
	}
	if (pipe2(pipes, O_CLOEXEC | O_NONBLOCK) != 0) {
		refuse(r, SS_STEP_STDIO, errno, 0);
		slot_free(s);
		return;
	}
	e.events = EPOLLIN;
	e.data.u32 = (uint32_t)(s - slots);
	if (epoll_ctl(events, EPOLL_CTL_ADD, pipes[0], &e) != 0) {
		refuse(r, SS_STEP_STDIO, errno, 0);
		close(pipes[0]);
		close(pipes[1]);
		slot_free(s);
		return;
	}
	s->errors = pipes[0];
	s->seq = r->m.seq;
	s->begun_ns = now_ns();
	pid = fork_into(r->fds[1]);
	if (pid == 0)
		command(r, pipes[1]);
	close(pipes[1]);
	if (pid < 0) {
		int error = errno;

		refuse(r, error == EAGAIN || error == ENOMEM ? SS_STEP_FORK : SS_STEP_CGROUP, error, 0);
		epoll_ctl(events, EPOLL_CTL_DEL, pipes[0], &e);
		close(pipes[0]);
		slot_free(s);
		return;
	}
	s->pid = s->pid_told = pid;
}

/* The file helpers that live; one beyond is only not helped. */
static pid_t helpers[64];

static pid_t *find_helper(pid_t pid)
{
	for (size_t i = 0; i < sizeof helpers / sizeof *helpers; i++)
		if (helpers[i] == pid)
			return &helpers[i];
	return NULL;
}

void serve(struct received *r)
{
	struct ss_message m = message(SS_SERVING, r->m.seq, 0);
	pid_t pid, *free_place;

	if (!r->lost && r->nfds != 2)
		die(SS_END_PROTOCOL);
	if (r->lost) {
		refuse(r, SS_STEP_STDIO, EMFILE, 0);
		return;
	}
	pid = fork_into(-1);
	if (pid == 0)
		helper(r);
	if (pid < 0) {
		refuse(r, SS_STEP_FORK, errno, 0);
		return;
	}
	free_place = find_helper(0);
	if (free_place != NULL)
		*free_place = pid;
	m.u.started.pid = pid;
	line_answer(&m);
}

/* Makes a terminal in the sandbox's own devpts, whose mount and name nothing inside can change. */
void open_pty(struct received *r)
{
	struct ss_message m = message(SS_PTY, r->m.seq, 0);
	int locked = 0, fd = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);

	if (fd < 0 || ioctl(fd, TIOCSPTLCK, &locked) != 0)
		refuse(r, SS_STEP_PTY, errno, 0);
	else if (line_answer_fd(&m, fd))
		return;
	if (fd >= 0)
		close(fd);
}

/* The error pipe of a start has something to say: a failure, or by its end that the exec happened. */
void spawn_errors(struct slot *s)
{
	struct ss_failed f;
	struct epoll_event unused = {0};
	ssize_t n = read(s->errors, &f, sizeof f);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	/* Other children may hold this end until they close it, which would keep a mere close from ending the watch. */
	epoll_ctl(events, EPOLL_CTL_DEL, s->errors, &unused);
	close(s->errors);
	s->errors = -1;
	if (n == (ssize_t)sizeof f && f.step != 0) {
		/* Said once the child is reaped, so that its cgroup is then empty. */
		s->failure = f;
		return;
	}
	s->state = SS_RUNNING;
	s->say |= SAY_STARTED;
}

static uint64_t micros(struct timeval t)
{
	return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_usec;
}

/* Waits for everything that is dead. What has no slot is an orphan or a file helper, and nobody asks for it. */
void reap(void)
{
	for (;;) {
		struct rusage ru;
		struct slot *s;
		int status;
		pid_t *helper, pid = wait4(-1, &status, WNOHANG | __WALL | WUNTRACED, &ru);

		if (pid < 0 && errno == EINTR)
			continue;
		if (pid <= 0)
			return;
		helper = find_helper(pid);
		if (WIFSTOPPED(status)) {
			/* Whoever may signal a helper can stop it; then all that its user asks of it would wait. */
			if (helper != NULL)
				kill(pid, SIGCONT);
			continue;
		}
		if (helper != NULL)
			*helper = 0;
		s = slot_by_pid(pid);
		if (s == NULL)
			continue;
		/* Dead, so whatever it had to say is in the pipe; an end without a word means that it ran. */
		if (s->errors >= 0)
			spawn_errors(s);
		s->pid = 0;
		if (s->failure.step != 0) {
			s->say |= SAY_FAILED;
			continue;
		}
		s->state = SS_EXITED;
		s->say |= SAY_EXIT;
		s->status = status;
		s->utime_us = micros(ru.ru_utime);
		s->stime_us = micros(ru.ru_stime);
		s->maxrss = (uint64_t)ru.ru_maxrss * 1024u;
		s->wall_ns = now_ns() - s->begun_ns;
	}
}
