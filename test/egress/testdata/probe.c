/*
 * Tries one way out of a sandbox and says what became of it, in one line:
 *
 *	open            the way is open, or something was sent without a refusal
 *	answer HEX      so many bytes came back
 *	refused NAME    what the kernel says, at the step that NAME follows: "refused connect Connection refused"
 *	closed          the other end closed without a word
 *	silence         nothing came within the limit
 *
 * Usage: probe KIND ARGUMENTS, see the table at the end.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netpacket/packet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 65536 };

/* How long nothing may come: LIMIT_MS of the environment, else 3 s. */
static int limit = 3000;

static unsigned char data[MOST];

static int refused(const char *step)
{
	printf("refused %s %s\n", step, strerror(errno));
	return 0;
}

static size_t unhex(const char *s, unsigned char *out)
{
	size_t n = 0;
	unsigned v;

	while (s != NULL && n < MOST && sscanf(s, "%2x", &v) == 1) {
		out[n++] = (unsigned char)v;
		s += 2;
	}
	return n;
}

static socklen_t address(const char *host, const char *port, struct sockaddr_storage *a)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)a;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)a;
	char name[128];
	char *scope;

	memset(a, 0, sizeof *a);
	if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons((uint16_t)atoi(port));
		return sizeof *v4;
	}
	snprintf(name, sizeof name, "%s", host);
	scope = strchr(name, '%');
	if (scope != NULL) {
		*scope++ = 0;
		v6->sin6_scope_id = if_nametoindex(scope);
	}
	if (inet_pton(AF_INET6, name, &v6->sin6_addr) != 1) {
		fprintf(stderr, "%s is no address\n", host);
		exit(2);
	}
	v6->sin6_family = AF_INET6;
	v6->sin6_port = htons((uint16_t)atoi(port));
	return sizeof *v6;
}

/* Prints what comes, until the end, an error or the limit. */
static int answer(int s)
{
	size_t n = 0;
	struct pollfd p = {.fd = s, .events = POLLIN};

	for (;;) {
		ssize_t got;

		if (poll(&p, 1, limit) == 0)
			break;
		got = recv(s, data + n, MOST - n, 0);
		if (got < 0)
			return n == 0 ? refused("recv") : 0;
		if (got == 0 && n == 0) {
			puts("closed");
			return 0;
		}
		if (got == 0 || (n += (size_t)got) == MOST)
			break;
		/* What there is is enough; more may come at once. */
		if (poll(&p, 1, 200) == 0)
			break;
	}
	if (n == 0) {
		puts("silence");
		return 0;
	}
	printf("answer ");
	for (size_t i = 0; i < n; i++)
		printf("%02x", data[i]);
	putchar('\n');
	return 0;
}

static int finish(int s)
{
	struct pollfd p = {.fd = s, .events = POLLOUT};
	int e = 0;
	socklen_t len = sizeof e;

	if (errno != EINPROGRESS)
		return refused("connect"), -1;
	if (poll(&p, 1, limit) == 0)
		return puts("silence"), -1;
	getsockopt(s, SOL_SOCKET, SO_ERROR, &e, &len);
	errno = e;
	return e == 0 ? 0 : (refused("connect"), -1);
}

/* tcp HOST PORT [HEX [HEX2]]: the second is sent once the first was answered. */
static int tcp(char **v)
{
	struct sockaddr_storage a;
	socklen_t len = address(v[0], v[1], &a);
	int s = socket(a.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
	size_t n;

	if (s < 0)
		return refused("socket");
	if (connect(s, (struct sockaddr *)&a, len) != 0 && finish(s) != 0)
		return 0;
	if (v[2] == NULL)
		return puts("open"), 0;
	n = unhex(v[2], data);
	if (send(s, data, n, MSG_NOSIGNAL) < 0)
		return refused("send");
	if (v[3] != NULL) {
		struct pollfd p = {.fd = s, .events = POLLIN};

		poll(&p, 1, limit);
		while (recv(s, data, MOST, MSG_DONTWAIT) > 0)
			;
		n = unhex(v[3], data);
		if (send(s, data, n, MSG_NOSIGNAL) < 0)
			return refused("send");
	}
	return answer(s);
}

/* udp HOST PORT HEX: connected; sendto: without connecting. */
static int datagram(char **v, int connected)
{
	struct sockaddr_storage a;
	socklen_t len = address(v[0], v[1], &a);
	int s = socket(a.ss_family, SOCK_DGRAM, 0);
	size_t n = unhex(v[2], data);

	if (s < 0)
		return refused("socket");
	if (connected && connect(s, (struct sockaddr *)&a, len) != 0)
		return refused("connect");
	if (sendto(s, data, n, 0, connected ? NULL : (struct sockaddr *)&a, connected ? 0 : len) < 0)
		return refused("send");
	return answer(s);
}

static int udp(char **v) { return datagram(v, 1); }
static int send_to(char **v) { return datagram(v, 0); }

/* fastopen HOST PORT HEX: data in the SYN, without a connect call. */
static int fastopen(char **v)
{
	struct sockaddr_storage a;
	socklen_t len = address(v[0], v[1], &a);
	int s = socket(a.ss_family, SOCK_STREAM, 0);
	size_t n = unhex(v[2], data);

	if (s < 0)
		return refused("socket");
	if (sendto(s, data, n, MSG_FASTOPEN | MSG_NOSIGNAL, (struct sockaddr *)&a, len) < 0)
		return refused("send");
	return answer(s);
}

/* source FROM HOST PORT HEX: a datagram with another's address. */
static int source(char **v)
{
	struct sockaddr_storage from, to;
	socklen_t flen = address(v[0], "0", &from), tlen = address(v[1], v[2], &to);
	int s = socket(to.ss_family, SOCK_DGRAM, 0), on = 1;
	size_t n = unhex(v[3], data);

	if (s < 0)
		return refused("socket");
	(void)setsockopt(s, SOL_IP, IP_FREEBIND, &on, sizeof on);
	(void)setsockopt(s, SOL_IP, IP_TRANSPARENT, &on, sizeof on);
	if (bind(s, (struct sockaddr *)&from, flen) != 0)
		return refused("bind");
	if (sendto(s, data, n, 0, (struct sockaddr *)&to, tlen) < 0)
		return refused("send");
	return answer(s);
}

/* detour VIA HOST PORT: loose source routing. */
static int detour(char **v)
{
	unsigned char option[8] = {IPOPT_LSRR, 7, 4, 0, 0, 0, 0, IPOPT_EOL};
	struct sockaddr_storage a;
	socklen_t len = address(v[1], v[2], &a);
	int s = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

	inet_pton(AF_INET, v[0], option + 3);
	if (s < 0)
		return refused("socket");
	if (setsockopt(s, SOL_IP, IP_OPTIONS, option, sizeof option) != 0)
		return refused("setsockopt");
	if (connect(s, (struct sockaddr *)&a, len) != 0 && finish(s) != 0)
		return 0;
	return puts("open"), 0;
}

/* raw PROTOCOL HOST HEX: what follows the IP header. */
static int raw(char **v)
{
	struct sockaddr_storage a;
	socklen_t len = address(v[1], "0", &a);
	int s = socket(a.ss_family, SOCK_RAW, atoi(v[0]));
	size_t n = unhex(v[2], data);

	if (s < 0)
		return refused("socket");
	if (sendto(s, data, n, 0, (struct sockaddr *)&a, len) < 0)
		return refused("send");
	return answer(s);
}

/* ping HOST HEX: the socket for echo requests that needs no right. */
static int ping(char **v)
{
	struct sockaddr_storage a;
	socklen_t len = address(v[0], "0", &a);
	int s = socket(a.ss_family, SOCK_DGRAM, a.ss_family == AF_INET ? IPPROTO_ICMP : IPPROTO_ICMPV6);
	size_t n = unhex(v[1], data);

	if (s < 0)
		return refused("socket");
	if (sendto(s, data, n, 0, (struct sockaddr *)&a, len) < 0)
		return refused("send");
	return answer(s);
}

/* frame HEX: a whole frame out of the link. */
static int frame(char **v)
{
	struct sockaddr_ll a = {.sll_family = AF_PACKET, .sll_ifindex = (int)if_nametoindex("eth0"), .sll_halen = 6};
	int s = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));
	size_t n = unhex(v[0], data);

	if (s < 0)
		return refused("socket");
	if (sendto(s, data, n, 0, (struct sockaddr *)&a, sizeof a) < 0)
		return refused("send");
	return puts("open"), 0;
}

/* socket DOMAIN TYPE PROTOCOL: only whether there is one. */
static int only(char **v)
{
	int s = socket(atoi(v[0]), atoi(v[1]), atoi(v[2]));

	return s < 0 ? refused("socket") : (puts("open"), 0);
}

/* reroute: takes the default route away. */
static int reroute(char **v)
{
	/* struct nlmsghdr of RTM_DELROUTE with NLM_F_REQUEST and NLM_F_ACK, struct rtmsg of the main table; musl has neither. */
	struct {
		uint32_t len;
		uint16_t type, flags;
		uint32_t seq, pid;
		uint8_t family, dst_len, src_len, tos, table, protocol, scope, kind;
		uint32_t rflags;
	} m = {.len = sizeof m, .type = 25, .flags = 5, .family = AF_INET, .table = 254};
	struct {
		uint32_t len;
		uint16_t type, flags;
		uint32_t seq, pid;
		int32_t error;
		char rest[512];
	} reply;
	int s = socket(AF_NETLINK, SOCK_RAW, 0);

	(void)v;
	if (s < 0)
		return refused("socket");
	if (send(s, &m, sizeof m, 0) < 0)
		return refused("send");
	if (recv(s, &reply, sizeof reply, 0) < 0)
		return refused("recv");
	errno = -reply.error;
	return errno != 0 ? refused("answer") : (puts("open"), 0);
}

/* readdress ADDRESS: gives the link another address. */
static int readdress(char **v)
{
	struct ifreq r = {.ifr_name = "eth0"};
	struct sockaddr_in *a = (struct sockaddr_in *)&r.ifr_addr;
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	if (s < 0)
		return refused("socket");
	a->sin_family = AF_INET;
	inet_pton(AF_INET, v[0], &a->sin_addr);
	return ioctl(s, SIOCSIFADDR, &r) != 0 ? refused("ioctl") : (puts("open"), 0);
}

/* resend A PORT B PORT HEX: a socket that is connected to A sends to B. */
static int resend(char **v)
{
	struct sockaddr_storage a, b;
	socklen_t alen = address(v[0], v[1], &a), blen = address(v[2], v[3], &b);
	int s = socket(a.ss_family, SOCK_DGRAM, 0);
	size_t n = unhex(v[4], data);

	if (s < 0)
		return refused("socket");
	if (connect(s, (struct sockaddr *)&a, alen) != 0)
		return refused("connect");
	if (sendto(s, data, n, 0, (struct sockaddr *)&b, blen) < 0)
		return refused("send");
	return answer(s);
}

/* batch A PORT B PORT HEX: two datagrams with one call, to A and to B. */
static int batch(char **v)
{
	struct sockaddr_storage a, b;
	socklen_t alen = address(v[0], v[1], &a), blen = address(v[2], v[3], &b);
	int s = socket(a.ss_family, SOCK_DGRAM, 0);
	struct iovec one = {.iov_base = "x", .iov_len = 1}, two = {.iov_base = data, .iov_len = unhex(v[4], data)};
	struct mmsghdr m[2] = {
		{.msg_hdr = {.msg_name = &a, .msg_namelen = alen, .msg_iov = &one, .msg_iovlen = 1}},
		{.msg_hdr = {.msg_name = &b, .msg_namelen = blen, .msg_iov = &two, .msg_iovlen = 1}},
	};

	if (s < 0)
		return refused("socket");
	switch (sendmmsg(s, m, 2, 0)) {
	case -1:
		return refused("send");
	case 1:
		return puts("refused send the second"), 0;
	}
	return puts("open"), 0;
}

/* again KIND A PORT B PORT HEX: a socket (tcp, udp) that was connected to A is connected to B. */
static int again(char **v)
{
	struct sockaddr_storage a, b;
	socklen_t alen = address(v[1], v[2], &a), blen = address(v[3], v[4], &b);
	struct sockaddr none = {.sa_family = AF_UNSPEC};
	int s = socket(a.ss_family, strcmp(v[0], "tcp") == 0 ? SOCK_STREAM : SOCK_DGRAM, 0);
	size_t n = unhex(v[5], data);

	if (s < 0)
		return refused("socket");
	if (connect(s, (struct sockaddr *)&a, alen) != 0)
		return refused("first");
	if (connect(s, &none, sizeof none) != 0)
		return refused("disconnect");
	if (connect(s, (struct sockaddr *)&b, blen) != 0)
		return refused("connect");
	if (send(s, data, n, MSG_NOSIGNAL) < 0)
		return refused("send");
	return answer(s);
}

/* option LEVEL NAME HEX HOST PORT HEX: a datagram with an option of the socket's; one that may not be set changes nothing. */
static int option(char **v)
{
	struct sockaddr_storage a;
	socklen_t len = address(v[3], v[4], &a);
	int s = socket(a.ss_family, SOCK_DGRAM, 0);
	size_t n = unhex(v[2], data);

	if (s < 0)
		return refused("socket");
	(void)setsockopt(s, atoi(v[0]), atoi(v[1]), data, (socklen_t)n);
	n = unhex(v[5], data);
	if (sendto(s, data, n, 0, (struct sockaddr *)&a, len) < 0)
		return refused("send");
	return answer(s);
}

static const struct {
	const char *name;
	int args;
	int (*run)(char **);
} kinds[] = {
	{"tcp", 2, tcp},       {"udp", 3, udp},         {"sendto", 3, send_to}, {"fastopen", 3, fastopen},
	{"source", 4, source}, {"detour", 3, detour},   {"raw", 3, raw},        {"ping", 2, ping},
	{"frame", 1, frame},   {"socket", 3, only},     {"reroute", 0, reroute}, {"readdress", 1, readdress},
	{"resend", 5, resend}, {"batch", 5, batch},     {"again", 6, again},    {"option", 6, option},
};

int main(int argc, char **argv)
{
	if (getenv("LIMIT_MS") != NULL)
		limit = atoi(getenv("LIMIT_MS"));
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		if (argc > 1 && strcmp(argv[1], kinds[i].name) == 0 && argc >= 2 + kinds[i].args)
			return kinds[i].run(argv + 2);
	fprintf(stderr, "no such probe\n");
	return 2;
}
