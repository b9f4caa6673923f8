/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.h - the line between an edge and one sandsea-init.
 *
 * A SOCK_SEQPACKET socket carries messages of exactly 64 bytes, little-endian, with at most eight descriptors. What
 * varies in size is a sealed memfd with a fixed header, of which only bounds are checked. Package internal/chronus/wire is the
 * other end; testdata/golden.txt holds the bytes that both ends must agree on.
 *
 * Any change of a layout raises SS_VERSION; an edge speaks every version younger than the longest lived sandbox.
 */
#ifndef SANDSEA_WIRE_H
#define SANDSEA_WIRE_H

#include <stdint.h>

#define SS_VERSION 1
#define SS_MESSAGE 64
#define SS_MAX_FDS 8
#define SS_SLOTS 1024

/* Kinds. To PID 1 below 128, from it above. */
enum ss_kind {
	SS_HELLO = 1,       /* greets; answered by ROSTER, one PROCESS per slot, ROSTER_END */
	SS_SETUP = 2,       /* fds: plan [, root]. Once; answered by READY, or FAILED and exit */
	SS_SPAWN = 3,       /* fds: spec, cgroup directory, in, out [, err] [, state in, state out]; STARTED or FAILED */
	SS_SERVE_FILES = 4, /* fds: spec (ids only), socket; SERVING or FAILED */
	SS_OPENPTY = 5,     /* where SS_FACT_PTY is set; PTY or FAILED */
	SS_SIGNAL = 6,      /* SIGNALLED */
	SS_ACK = 7,         /* no answer */
	SS_REROOT = 8,      /* reserved */
	SS_PROCESSES = 9,   /* reserved */
	SS_PREPARE = 10,    /* at most once, before SETUP: what does not depend on it; PREPARED, or FAILED and exit */

	SS_READY = 129,
	SS_STARTED = 130,
	SS_FAILED = 131,
	SS_EXIT = 132, /* repeated after every HELLO until ACK */
	SS_ROSTER = 133,
	SS_PROCESS = 134,
	SS_ROSTER_END = 135,
	SS_SERVING = 136,
	SS_SIGNALLED = 137,
	SS_PTY = 138, /* fds: master of a new terminal, unlocked */
	SS_PREPARED = 139,
};

struct ss_hello {
	uint64_t epoch; /* of the instance; never falls */
	uint8_t zero[40];
};

struct ss_spawn {
	uint32_t flags; /* SS_SPAWN_ERR */
	uint8_t zero[44];
};
#define SS_SPAWN_ERR 1u /* a fifth descriptor is standard error; else it goes to standard output */
#define SS_SPAWN_TTY 2u /* where SS_FACT_PTY is set: in is a terminal, which becomes the controlling one */
#define SS_SPAWN_STATE 4u /* where SS_FACT_SHELL is set: the last two are the command's SS_FD_STATE_IN and _OUT */
/* Above what scripts use, below bash's own 255. */
#define SS_FD_STATE_IN 250
#define SS_FD_STATE_OUT 251

struct ss_signal {
	int32_t signal;
	uint8_t zero[44];
};

struct ss_started { /* STARTED, SERVING */
	int32_t pid;
	uint8_t zero[44];
};

struct ss_failed { /* FAILED; SIGNALLED with only error set */
	uint32_t step;
	int32_t error;
	uint32_t flags; /* SS_FAILED_* */
	uint8_t zero[36];
};
#define SS_FAILED_INTERPRETER 1u /* exec: the file is there, what should run it is not */
#define SS_FAILED_SLOTS 2u       /* fork: all slots hold processes or exits nobody acknowledged */

struct ss_facts { /* READY, ROSTER */
	uint32_t version;
	uint32_t flags; /* SS_FACT_* */
	uint64_t caps;  /* bounding set of everything that runs inside */
	uint64_t nofile;
	uint32_t masks; /* masked and read-only paths */
	uint32_t count; /* ROSTER: PROCESS messages that follow */
	uint8_t zero[16];
};
#define SS_FACT_SECCOMP 1u
#define SS_FACT_USERNS 2u
#define SS_FACT_NO_NEW_PRIVS 4u
#define SS_FACT_PTY 8u /* knows OPENPTY and SS_SPAWN_TTY */
#define SS_FACT_SHELL 16u /* knows SS_SPAWN_STATE */

struct ss_process { /* PROCESS, EXIT */
	uint32_t state; /* enum ss_state */
	int32_t pid;
	int32_t status; /* of wait4, once exited */
	uint32_t zero;
	uint64_t utime_us, stime_us;
	uint64_t maxrss; /* bytes */
	uint64_t wall_ns;
};

enum ss_state { SS_FREE = 0, SS_STARTING = 1, SS_RUNNING = 2, SS_EXITED = 3 };

struct ss_message {
	uint16_t version;
	uint16_t kind;
	uint32_t seq; /* chosen by the edge, echoed in the answer; 0 where nobody asked */
	uint64_t cookie; /* number of the process, 1 to 2^63-1; 0 where none is meant */
	union {
		struct ss_hello hello;
		struct ss_spawn spawn;
		struct ss_signal signal;
		struct ss_started started;
		struct ss_failed failed;
		struct ss_facts facts;
		struct ss_process process;
		uint8_t bytes[48];
	} u;
};

/* Steps at which a start fails. Up to 31: of a command; from 32: of the sandbox. */
enum ss_step {
	SS_STEP_FORK = 1,
	SS_STEP_STDIO = 2,
	SS_STEP_CGROUP = 3,
	SS_STEP_CWD = 4,
	SS_STEP_USER = 5,
	SS_STEP_FILTER = 6,
	SS_STEP_EXEC = 7,
	SS_STEP_SPEC = 8,
	SS_STEP_LIMITS = 9,
	SS_STEP_PTY = 10,

	SS_STEP_PLAN = 32,
	SS_STEP_LOOPBACK = 33,
	SS_STEP_ROOT = 34,
	SS_STEP_PROC = 35,
	SS_STEP_DEV = 36,
	SS_STEP_PTS = 37,
	SS_STEP_SHM = 38,
	SS_STEP_MQUEUE = 39,
	SS_STEP_SYS = 40,
	SS_STEP_MASK = 41,
	SS_STEP_CPUS = 42,
	SS_STEP_PIVOT = 43,
	SS_STEP_HOSTNAME = 44,
	SS_STEP_CAPS = 45,
	SS_STEP_NOFILE = 46,
	SS_STEP_EVENTS = 47,
	SS_STEP_CGROUPNS = 48,
	SS_STEP_STAGE = 49,
};

/* How PID 1 itself ends. */
enum ss_end {
	SS_END_ORPHANED = 10, /* nobody holds the other end of the line */
	SS_END_PROTOCOL = 11, /* the other end broke this contract */
	SS_END_SETUP = 12,    /* FAILED was sent */
	SS_END_NOT_PID1 = 13,
	SS_END_INTERNAL = 14,
};

/* The plan memfd: this header, then filter_len instructions of struct sock_filter. */
#define SS_PLAN_MAGIC 0x4e4c5053u /* "SPLN" */
#define SS_MAX_FILTER 4096
struct ss_plan {
	uint32_t magic;
	uint32_t version;
	uint32_t size; /* of the whole memfd */
	uint32_t flags;
	uint64_t caps;     /* bounding set */
	uint64_t nofile;   /* hard and soft limit of open files of what runs inside */
	uint64_t shm_size; /* bytes of /dev/shm */
	uint32_t ncpus;    /* what /sys/devices/system/cpu/online shows; 0: the machine's own */
	uint32_t filter_len;
	char hostname[64]; /* ends in NUL; empty: left as it is */
	uint8_t cpus[128]; /* affinity, bit i of byte i/8; all zero: left as it is */
	char resolver[16]; /* IPv4 address for /etc/resolv.conf, ends in NUL; empty: the file is left as it is */
};
#define SS_PLAN_NO_NEW_PRIVS 1u

/* The spec memfd: this header, ngroups of uint32_t, then argc + envc + 1 strings (argv, env, cwd), each ended by NUL. */
#define SS_SPEC_MAGIC 0x43505353u /* "SSPC" */
#define SS_MAX_SPEC (4u << 20)
#define SS_MAX_STRINGS (1u << 18)
#define SS_MAX_GROUPS 65536u
struct ss_spec {
	uint32_t magic;
	uint32_t version;
	uint32_t size; /* of the whole memfd */
	uint32_t umask;
	uint32_t uid, gid;
	uint32_t ngroups;
	uint32_t argc, envc;
	uint32_t zero[7];
};

_Static_assert(sizeof(struct ss_message) == SS_MESSAGE, "message is 64 bytes");
_Static_assert(sizeof(struct ss_plan) == 256, "plan header is 256 bytes");
_Static_assert(sizeof(struct ss_spec) == 64, "spec header is 64 bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is the machine's own order");

#endif
