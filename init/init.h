/* SPDX-License-Identifier: Apache-2.0 */
/*
 * init.h - what the parts of sandsea-init share.
 *
 * main.c: start and event loop. line.c: the control socket, slots and what is to be said of them. setup.c: the way from
 * the nursery into the sandbox. spawn.c: commands and the file helper, from the clone on.
 */
#ifndef SANDSEA_INIT_H
#define SANDSEA_INIT_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include "wire.h"

/* Descriptors that the spawner hands over. */
#define FD_CONTROL 3
#define FD_ROOT 4
#define FD_DEV 5
#define FD_SYS 6

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif

/* What is to be said about a slot; in the order in which it is said. */
#define SAY_ANNOUNCE 1u
#define SAY_STARTED 2u
#define SAY_FAILED 4u
#define SAY_EXIT 8u

struct slot {
	uint64_t cookie;
	pid_t pid;      /* 0 once reaped */
	int pid_told;   /* as said in STARTED */
	int errors;     /* read end of the error pipe while starting, else -1 */
	uint8_t state;  /* enum ss_state */
	uint8_t say;
	uint32_t seq;
	struct ss_failed failure; /* step != 0: the start failed; said once the child is reaped */
	int status;
	uint64_t utime_us, stime_us, maxrss, begun_ns, wall_ns;
};

struct received {
	struct ss_message m;
	int fds[SS_MAX_FDS];
	int nfds;
	bool lost; /* descriptors did not fit into our table */
};

/* The plan in force; plan is mapped from the sealed memfd. */
extern const struct ss_plan *plan;
extern const struct ss_instruction *filter;
extern struct ss_facts facts;

/* struct sock_filter and sock_fprog; libc has no header for them. */
struct ss_instruction {
	uint16_t code;
	uint8_t jt, jf;
	uint32_t k;
};

/* line.c */
extern struct slot slots[SS_SLOTS];
extern unsigned slots_top; /* slots from here on are free */
int line_receive(struct received *r, int flags);
void line_drop(struct received *r, int from);
bool line_answer(const struct ss_message *m);
bool line_answer_fd(const struct ss_message *m, int fd);
bool line_has_room(void);
void line_hello(uint32_t seq);
bool line_flush(void);
struct slot *slot_take(uint64_t cookie);
struct slot *slot_by_cookie(uint64_t cookie);
struct slot *slot_by_pid(pid_t pid);
void slot_free(struct slot *s);
struct ss_message message(uint16_t kind, uint32_t seq, uint64_t cookie);
_Noreturn void die(enum ss_end how);

/* setup.c */
uint32_t prepare(void);
uint32_t setup(int plan_fd, int root_fd);
bool leave_nursery(void);
void name_host(void);
void name_resolver(void);
bool set_caps(uint64_t caps);

/* spawn.c */
void spawn(struct received *r);
void serve(struct received *r);
void open_pty(struct received *r);
void spawn_errors(struct slot *s);
void reap(void);
const void *map_sealed(int fd, size_t min, size_t max, size_t *size);

/* main.c */
extern int events;
extern bool root_given, sys_given; /* the spawner gave a root, a sysfs */
uint64_t now_ns(void);
void default_signals(void);

#endif
