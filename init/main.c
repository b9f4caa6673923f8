//go:build ignore

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - start and event loop of PID 1.
 *
 * It waits for nothing but events: a start that hangs, a stopped child or an edge that does not read hold up nobody
 * else. When the last holder of the other end of the control socket is gone it kills all and ends.
 */
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#include "init.h"

/* Tags of events; slots are tagged with their index. */
#define TAG_CONTROL (SS_SLOTS + 0)
#define TAG_SIGNAL (SS_SLOTS + 1)

int events = -1;
bool root_given, sys_given;

static int signals = -1;
static uint64_t last_epoch;

uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static _Noreturn void orphaned(void)
{
	kill(-1, SIGKILL);
	die(SS_END_ORPHANED);
}

static bool all_zero(const uint8_t *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (p[i] != 0)
			return false;
	return true;
}

/*
 * Descriptors 0 to 2 become an empty sealed file: whatever the spawner left there must not reach a helper, and no
 * number up to FD_SYS may be given to something else.
 */
static bool arrange_descriptors(void)
{
	int fd;
	bool ok;

	if (syscall(SYS_close_range, FD_SYS + 1, ~0u, 0) != 0)
		return false;
	if (fcntl(FD_CONTROL, F_SETFD, FD_CLOEXEC) != 0 || fcntl(FD_DEV, F_SETFD, FD_CLOEXEC) != 0)
		return false;
	root_given = fcntl(FD_ROOT, F_SETFD, FD_CLOEXEC) == 0;
	sys_given = fcntl(FD_SYS, F_SETFD, FD_CLOEXEC) == 0;
	fd = memfd_create("empty", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	ok = fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) == 0;
	for (int i = 0; ok && i < 3; i++)
		ok = fd == i || dup2(fd, i) == i;
	if (ok && !root_given)
		ok = fd == FD_ROOT || dup3(fd, FD_ROOT, O_CLOEXEC) == FD_ROOT;
	if (ok && !sys_given)
		ok = fd == FD_SYS || dup3(fd, FD_SYS, O_CLOEXEC) == FD_SYS;
	if (fd > 2 && fd != FD_ROOT && fd != FD_SYS)
		close(fd);
	/* One of 0 to 2 may be the file itself, which a helper is to keep. */
	for (int i = 0; ok && i < 3; i++)
		ok = fcntl(i, F_SETFD, 0) == 0;
	return ok;
}

/* By the system call: libc keeps 32 to 34 to itself, and who was started by posix_spawn has some of them ignored. */
void default_signals(void)
{
	struct {
		void (*handler)(int);
		unsigned long flags;
		void (*restorer)(void);
		uint64_t mask;
	} sa;

	memset(&sa, 0, sizeof sa);
	for (int i = 1; i <= 64; i++)
		syscall(SYS_rt_sigaction, i, &sa, NULL, sizeof sa.mask);
}

/* Every signal has its default disposition, which for PID 1 means that nothing from inside reaches it. */
static bool prepare_signals(void)
{
	struct sigaction sa;
	sigset_t set;

	default_signals();
	memset(&sa, 0, sizeof sa);
	/* Unlike the default, ignoring holds against the namespaces outside too. */
	sa.sa_handler = SIG_IGN;
	sigaction(SIGTERM, &sa, NULL);
	sigaction(SIGINT, &sa, NULL);
	sigaction(SIGHUP, &sa, NULL);
	sigaction(SIGQUIT, &sa, NULL);
	sigaction(SIGPIPE, &sa, NULL);
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	if (sigprocmask(SIG_SETMASK, &set, NULL) != 0)
		return false;
	signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return signals >= 0;
}

static bool watch(int fd, uint32_t tag, uint32_t what, int op)
{
	struct epoll_event e = {.events = what, .data.u32 = tag};

	return epoll_ctl(events, op, fd, &e) == 0;
}

static void on_signal(const struct received *r)
{
	struct ss_message m = message(SS_SIGNALLED, r->m.seq, r->m.cookie);
	struct slot *s = slot_by_cookie(r->m.cookie);

	if (r->m.u.signal.signal < 0 || r->m.u.signal.signal > 64)
		die(SS_END_PROTOCOL);
	/* The pid is ours until we wait for it, so it cannot be another process's. */
	if (s == NULL || s->pid == 0)
		m.u.failed.error = ESRCH;
	else if (kill(s->pid, r->m.u.signal.signal) != 0)
		m.u.failed.error = errno;
	line_answer(&m);
}

static void on_message(struct received *r)
{
	uint64_t cookie = r->m.cookie;
	bool numbered = r->m.kind == SS_SPAWN || r->m.kind == SS_SIGNAL || r->m.kind == SS_ACK;

	if (numbered != (cookie != 0) || cookie >> 63 != 0)
		die(SS_END_PROTOCOL);
	switch (r->m.kind) {
	case SS_HELLO:
		if (r->nfds != 0 || !all_zero(r->m.u.hello.zero, sizeof r->m.u.hello.zero) ||
		    r->m.u.hello.epoch < last_epoch)
			die(SS_END_PROTOCOL);
		last_epoch = r->m.u.hello.epoch;
		line_hello(r->m.seq);
		break;
	case SS_SPAWN:
		spawn(r);
		break;
	case SS_SERVE_FILES:
		serve(r);
		break;
	case SS_OPENPTY:
		if (r->nfds != 0 || !all_zero(r->m.u.bytes, sizeof r->m.u.bytes))
			die(SS_END_PROTOCOL);
		open_pty(r);
		break;
	case SS_SIGNAL:
		if (r->nfds != 0)
			die(SS_END_PROTOCOL);
		on_signal(r);
		break;
	case SS_ACK: {
		struct slot *s = slot_by_cookie(cookie);

		if (r->nfds != 0)
			die(SS_END_PROTOCOL);
		/* An exit is acknowledged once it was told; of anything else there is nothing to forget. */
		if (s != NULL && s->state == SS_EXITED)
			slot_free(s);
		break;
	}
	default:
		die(SS_END_PROTOCOL);
	}
	line_drop(r, 0);
}

static void on_control(uint32_t what)
{
	struct received r;

	/* A bounded number at a time: children and exits get their turn. */
	for (int i = 0; i < 32 && line_has_room(); i++) {
		int got = line_receive(&r, MSG_DONTWAIT);

		if (got < 0)
			orphaned();
		if (got == 0) {
			if (what & (EPOLLHUP | EPOLLERR))
				orphaned();
			return;
		}
		on_message(&r);
	}
}

static _Noreturn void loop(void)
{
	uint32_t armed = 0;

	for (;;) {
		struct epoll_event got[32];
		struct signalfd_siginfo drop[8];
		bool said = line_flush();
		uint32_t want = (line_has_room() ? EPOLLIN : 0u) | (said ? 0u : EPOLLOUT);
		int n;

		if (want != armed || armed == 0) {
			if (!watch(FD_CONTROL, TAG_CONTROL, want, EPOLL_CTL_MOD))
				die(SS_END_INTERNAL);
			armed = want;
		}
		n = epoll_wait(events, got, 32, -1);
		if (n < 0 && errno != EINTR)
			die(SS_END_INTERNAL);
		for (int i = 0; i < n; i++) {
			uint32_t tag = got[i].data.u32;

			if (tag == TAG_CONTROL) {
				on_control(got[i].events);
			} else if (tag == TAG_SIGNAL) {
				while (read(signals, drop, sizeof drop) > 0)
					;
				reap();
			} else if (tag < SS_SLOTS && slots[tag].state != SS_FREE && slots[tag].errors >= 0) {
				spawn_errors(&slots[tag]);
			}
		}
	}
}

/* Answers that a step went wrong, with errno, and ends. */
static _Noreturn void give_up(const struct received *r, uint32_t step)
{
	struct ss_message m = message(SS_FAILED, r->m.seq, 0);

	m.u.failed.step = step;
	m.u.failed.error = errno;
	if (send(FD_CONTROL, &m, sizeof m, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
		die(SS_END_ORPHANED);
	die(SS_END_SETUP);
}

/* Says one thing at once; nothing was said before that could have filled the socket. */
static void tell(const struct ss_message *m)
{
	if (!line_answer(m) || !line_flush())
		die(SS_END_ORPHANED);
}

/*
 * The way to SETUP. Between PREPARE and SETUP this process may wait for long: it is one of those that an edge keeps
 * ready, and ends with it.
 */
static void await_setup(struct received *r)
{
	bool prepared = false;

	for (;;) {
		if (line_receive(r, 0) <= 0)
			die(SS_END_ORPHANED);
		if (r->m.kind != SS_PREPARE)
			break;
		if (prepared || r->m.cookie != 0 || r->nfds != 0 || r->lost ||
		    !all_zero(r->m.u.bytes, sizeof r->m.u.bytes))
			die(SS_END_PROTOCOL);
		uint32_t step = prepare();

		if (step != 0)
			give_up(r, step);
		prepared = true;
		struct ss_message m = message(SS_PREPARED, r->m.seq, 0);

		tell(&m);
	}
	/* A root comes from the spawner or with SETUP: exactly one of them. */
	if (r->m.kind != SS_SETUP || r->m.cookie != 0 || r->nfds != (root_given ? 1 : 2) || r->lost)
		die(SS_END_PROTOCOL);
}

int main(void)
{
	struct received r;
	uint32_t step;

	if (getpid() != 1)
		return SS_END_NOT_PID1;
	/* The file's mode 0711 and host root's ownership do the same for the time before this call. */
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	prctl(PR_SET_NAME, "sandsea-init", 0, 0, 0);
	umask(022);
	if (!arrange_descriptors() || !prepare_signals())
		die(SS_END_INTERNAL);

	await_setup(&r);
	step = setup(r.fds[0], r.nfds > 1 ? r.fds[1] : -1);
	if (step == 0) {
		events = epoll_create1(EPOLL_CLOEXEC);
		if (events < 0 || !watch(FD_CONTROL, TAG_CONTROL, EPOLLIN, EPOLL_CTL_ADD) ||
		    !watch(signals, TAG_SIGNAL, EPOLLIN, EPOLL_CTL_ADD))
			step = SS_STEP_EVENTS;
	}
	if (step != 0)
		give_up(&r, step);
	line_drop(&r, 0);

	struct ss_message ready = message(SS_READY, r.m.seq, 0);

	ready.u.facts = facts;
	tell(&ready);
	/*
	 * The kernel makes whoever unmounts wait for all processors. Nobody else need wait for that too: the answer is on
	 * its way, and no request is read before it is done.
	 */
	if (!leave_nursery())
		die(SS_END_SETUP);
	name_host(); /* nor for these */
	name_resolver();
	loop();
}
