//go:build ignore

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * line.c - the control socket and the slots.
 *
 * Nothing here waits and nothing grows: what is to be said of a process is a bit in its slot, answers to everything
 * else stand in a short ring, and while the ring is full no further request is read.
 */
#include <string.h>
#include <sys/socket.h>

#include "init.h"

#define ANSWERS 64

struct slot slots[SS_SLOTS];
unsigned slots_top;

static struct ss_message answers[ANSWERS];
static int answer_fds[ANSWERS]; /* goes along and is closed then; -1: none */
static unsigned answers_first, answers_count;

/* The roster that is being told. */
static bool roster_begin, roster_end;
static uint32_t roster_seq;

void die(enum ss_end how)
{
	/* The kernel kills everything else in this pid namespace with PID 1. */
	_exit((int)how);
}

struct ss_message message(uint16_t kind, uint32_t seq, uint64_t cookie)
{
	struct ss_message m;

	memset(&m, 0, sizeof m);
	m.version = SS_VERSION;
	m.kind = kind;
	m.seq = seq;
	m.cookie = cookie;
	return m;
}

/* Receives one message. 1: r is filled. 0: nothing there. -1: the other end is gone. A broken one does not return. */
int line_receive(struct received *r, int flags)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int) * SS_MAX_FDS)];
		struct cmsghdr align;
	} control;
	/* One byte more than a message, so that a longer one shows. */
	char buffer[SS_MESSAGE + 1];
	struct iovec iov = {.iov_base = buffer, .iov_len = sizeof buffer};
	struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	ssize_t n;

	memset(&control, 0, sizeof control);
	r->nfds = 0;
	r->lost = false;
	do
		n = recvmsg(FD_CONTROL, &h, MSG_CMSG_CLOEXEC | flags);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == EAGAIN ? 0 : -1;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&h); c != NULL; c = CMSG_NXTHDR(&h, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		for (size_t i = 0; i < count && r->nfds < SS_MAX_FDS; i++)
			memcpy(&r->fds[r->nfds++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
	}
	if (n == 0)
		return -1;
	r->lost = (h.msg_flags & MSG_CTRUNC) != 0;
	if (n != SS_MESSAGE)
		die(SS_END_PROTOCOL);
	memcpy(&r->m, buffer, SS_MESSAGE);
	if (r->m.version != SS_VERSION)
		die(SS_END_PROTOCOL);
	return 1;
}

/* Closes the descriptors of a message from the given one on. */
void line_drop(struct received *r, int from)
{
	while (r->nfds > from)
		close(r->fds[--r->nfds]);
}

/* Whether a request may be read. Each has at most one answer in the ring, and none may change a roster half told. */
bool line_has_room(void)
{
	return answers_count < ANSWERS && !roster_end;
}

bool line_answer(const struct ss_message *m)
{
	return line_answer_fd(m, -1);
}

/* Takes fd over, unless there is no room. */
bool line_answer_fd(const struct ss_message *m, int fd)
{
	unsigned at = (answers_first + answers_count) % ANSWERS;

	if (answers_count == ANSWERS)
		return false;
	answers[at] = *m;
	answer_fds[at] = fd;
	answers_count++;
	return true;
}

/* Forgets the first answer. */
static void answer_done(void)
{
	if (answer_fds[answers_first] >= 0)
		close(answer_fds[answers_first]);
	answers_first = (answers_first + 1) % ANSWERS;
	answers_count--;
}

/* A new edge asks for everything: what was meant for the old one is dropped. */
void line_hello(uint32_t seq)
{
	while (answers_count > 0)
		answer_done();
	roster_begin = roster_end = true;
	roster_seq = seq;
	for (unsigned i = 0; i < slots_top; i++) {
		struct slot *s = &slots[i];

		if (s->state == SS_FREE)
			continue;
		/* The roster carries the state, so a start that is done needs no other word; an exit is told again. */
		s->say &= (uint8_t)~SAY_STARTED;
		s->say |= SAY_ANNOUNCE;
		if (s->state == SS_EXITED)
			s->say |= SAY_EXIT;
	}
}

/* Sends a message with a descriptor, if fd is not negative. False: the socket is full. */
static bool send_with(const struct ss_message *m, int fd)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec iov = {.iov_base = (void *)m, .iov_len = sizeof *m};
	struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t n;

	if (fd >= 0) {
		memset(&control, 0, sizeof control);
		control.align.cmsg_level = SOL_SOCKET;
		control.align.cmsg_type = SCM_RIGHTS;
		control.align.cmsg_len = CMSG_LEN(sizeof fd);
		memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
		h.msg_control = &control;
		h.msg_controllen = sizeof control;
	}
	do
		n = sendmsg(FD_CONTROL, &h, MSG_DONTWAIT | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	if (n == (ssize_t)sizeof *m)
		return true;
	if (n < 0 && (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM))
		return false;
	die(SS_END_ORPHANED);
}

static bool send_message(const struct ss_message *m)
{
	return send_with(m, -1);
}

static struct ss_message process_message(uint16_t kind, uint32_t seq, const struct slot *s)
{
	struct ss_message m = message(kind, seq, s->cookie);

	m.u.process.state = s->state;
	m.u.process.pid = s->pid_told;
	if (s->state == SS_EXITED) {
		m.u.process.status = s->status;
		m.u.process.utime_us = s->utime_us;
		m.u.process.stime_us = s->stime_us;
		m.u.process.maxrss = s->maxrss;
		m.u.process.wall_ns = s->wall_ns;
	}
	return m;
}

/* Says one thing about a slot. False: the socket is full. */
static bool say(struct slot *s)
{
	struct ss_message m;

	if (s->say & SAY_STARTED) {
		m = message(SS_STARTED, s->seq, s->cookie);
		m.u.started.pid = s->pid_told;
		if (!send_message(&m))
			return false;
		s->say &= (uint8_t)~SAY_STARTED;
	}
	if (s->say & SAY_FAILED) {
		m = message(SS_FAILED, s->seq, s->cookie);
		m.u.failed = s->failure;
		if (!send_message(&m))
			return false;
		slot_free(s);
		return true;
	}
	if (s->say & SAY_EXIT) {
		m = process_message(SS_EXIT, 0, s);
		if (!send_message(&m))
			return false;
		s->say &= (uint8_t)~SAY_EXIT; /* the slot stays until ACK */
	}
	return true;
}

/* Sends what the socket takes. True: nothing is left to say. */
bool line_flush(void)
{
	while (answers_count > 0) {
		if (!send_with(&answers[answers_first], answer_fds[answers_first]))
			return false;
		answer_done();
	}
	if (roster_begin) {
		struct ss_message m = message(SS_ROSTER, roster_seq, 0);

		m.u.facts = facts;
		m.u.facts.count = 0;
		for (unsigned i = 0; i < slots_top; i++)
			if (slots[i].say & SAY_ANNOUNCE)
				m.u.facts.count++;
		if (!send_message(&m))
			return false;
		roster_begin = false;
	}
	if (roster_end) {
		for (unsigned i = 0; i < slots_top; i++) {
			if (!(slots[i].say & SAY_ANNOUNCE))
				continue;
			struct ss_message m = process_message(SS_PROCESS, roster_seq, &slots[i]);

			if (!send_message(&m))
				return false;
			slots[i].say &= (uint8_t)~SAY_ANNOUNCE;
		}
		struct ss_message m = message(SS_ROSTER_END, roster_seq, 0);

		if (!send_message(&m))
			return false;
		roster_end = false;
	}
	for (unsigned i = 0; i < slots_top; i++)
		if (slots[i].say != 0 && !say(&slots[i]))
			return false;
	return true;
}

struct slot *slot_take(uint64_t cookie)
{
	for (unsigned i = 0; i < SS_SLOTS; i++) {
		struct slot *s = &slots[i];

		if (s->state != SS_FREE)
			continue;
		memset(s, 0, sizeof *s);
		s->cookie = cookie;
		s->errors = -1;
		s->state = SS_STARTING;
		if (i >= slots_top)
			slots_top = i + 1;
		return s;
	}
	return NULL;
}

struct slot *slot_by_cookie(uint64_t cookie)
{
	for (unsigned i = 0; i < slots_top; i++)
		if (slots[i].state != SS_FREE && slots[i].cookie == cookie)
			return &slots[i];
	return NULL;
}

struct slot *slot_by_pid(pid_t pid)
{
	for (unsigned i = 0; i < slots_top; i++)
		if (slots[i].state != SS_FREE && slots[i].pid == pid)
			return &slots[i];
	return NULL;
}

void slot_free(struct slot *s)
{
	s->state = SS_FREE;
	s->say = 0;
	s->cookie = 0;
	s->pid = 0;
	while (slots_top > 0 && slots[slots_top - 1].state == SS_FREE)
		slots_top--;
}
