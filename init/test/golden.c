/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the bytes of one message of each kind, of a plan and of a spec, as this side of the wire lays them out. */
#include <stdio.h>
#include <string.h>

#include "wire.h"

static void print(const char *name, const void *p, size_t n)
{
	const unsigned char *b = p;

	printf("%s ", name);
	for (size_t i = 0; i < n; i++)
		printf("%02x", b[i]);
	printf("\n");
}

static struct ss_message m;

static struct ss_message *begin(uint16_t kind, uint64_t cookie)
{
	memset(&m, 0, sizeof m);
	m.version = SS_VERSION;
	m.kind = kind;
	m.seq = 0x01020304;
	m.cookie = cookie;
	return &m;
}

static void end(const char *name)
{
	print(name, &m, sizeof m);
}

static void facts(uint16_t kind, uint32_t count)
{
	begin(kind, 0);
	m.u.facts.version = SS_VERSION;
	m.u.facts.flags = SS_FACT_SECCOMP | SS_FACT_USERNS;
	m.u.facts.caps = 0xa80425fb;
	m.u.facts.nofile = 65536;
	m.u.facts.masks = 27;
	m.u.facts.count = count;
}

static void process(uint16_t kind)
{
	begin(kind, 0x1122334455667788);
	m.u.process.state = SS_EXITED;
	m.u.process.pid = 4321;
	m.u.process.status = 0x0700;
	m.u.process.utime_us = 1000001;
	m.u.process.stime_us = 2000002;
	m.u.process.maxrss = 3 << 20;
	m.u.process.wall_ns = 4000000004;
}

int main(void)
{
	const uint64_t number = 0x1122334455667788;
	struct {
		struct ss_plan head;
		uint8_t filter[16];
	} plan;
	struct {
		struct ss_spec head;
		uint32_t groups[2];
		char strings[24];
	} spec;
	static const char strings[] = "sh\0-c\0true\0A=b\0/home\0\0\0";

	begin(SS_HELLO, 0)->u.hello.epoch = 9;
	end("hello");
	begin(SS_PREPARE, 0);
	end("prepare");
	begin(SS_PREPARED, 0);
	end("prepared");
	begin(SS_SETUP, 0);
	end("setup");
	begin(SS_SPAWN, number)->u.spawn.flags = SS_SPAWN_ERR;
	end("spawn");
	begin(SS_SPAWN, number)->u.spawn.flags = SS_SPAWN_TTY;
	end("spawn_tty");
	begin(SS_SPAWN, number)->u.spawn.flags = SS_SPAWN_ERR | SS_SPAWN_STATE;
	end("spawn_state");
	begin(SS_SERVE_FILES, 0);
	end("serve_files");
	begin(SS_OPENPTY, 0);
	end("openpty");
	begin(SS_PTY, 0);
	end("pty");
	begin(SS_SIGNAL, number)->u.signal.signal = 15;
	end("signal");
	begin(SS_ACK, number);
	end("ack");
	facts(SS_READY, 0);
	end("ready");
	begin(SS_STARTED, number)->u.started.pid = 4321;
	end("started");
	begin(SS_FAILED, number);
	m.u.failed.step = SS_STEP_EXEC;
	m.u.failed.error = 2;
	m.u.failed.flags = SS_FAILED_INTERPRETER;
	end("failed");
	process(SS_EXIT);
	end("exit");
	facts(SS_ROSTER, 3);
	end("roster");
	process(SS_PROCESS);
	end("process");
	begin(SS_ROSTER_END, 0);
	end("roster_end");
	begin(SS_SERVING, 0)->u.started.pid = 4321;
	end("serving");
	begin(SS_SIGNALLED, number)->u.failed.error = 3;
	end("signalled");

	memset(&plan, 0, sizeof plan);
	plan.head.magic = SS_PLAN_MAGIC;
	plan.head.version = SS_VERSION;
	plan.head.size = sizeof plan;
	plan.head.flags = SS_PLAN_NO_NEW_PRIVS;
	plan.head.caps = 0xa80425fb;
	plan.head.nofile = 1024;
	plan.head.shm_size = 64 << 20;
	plan.head.ncpus = 2;
	plan.head.filter_len = 2;
	strcpy(plan.head.hostname, "box");
	strcpy(plan.head.resolver, "100.64.0.1");
	plan.head.cpus[0] = 1 << 1;
	plan.head.cpus[1] = 1 << 3;
	for (unsigned i = 0; i < sizeof plan.filter; i++)
		plan.filter[i] = (uint8_t)(i + 1);
	print("plan", &plan, sizeof plan);

	memset(&spec, 0, sizeof spec);
	spec.head.magic = SS_SPEC_MAGIC;
	spec.head.version = SS_VERSION;
	spec.head.umask = 027;
	spec.head.uid = 1000;
	spec.head.gid = 1001;
	spec.head.ngroups = 2;
	spec.head.argc = 3;
	spec.head.envc = 1;
	spec.groups[0] = 1001;
	spec.groups[1] = 2000;
	memcpy(spec.strings, strings, 21);
	spec.head.size = 64 + 8 + 21;
	print("spec", &spec, spec.head.size);
	return 0;
}
