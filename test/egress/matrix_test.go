package egress

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"google.golang.org/protobuf/proto"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/farside"
)

// marker stands in everything that must not get out.
const marker = "bypass"

var payload = hex.EncodeToString([]byte(marker))

func ports(list ...int32) []*sandseav1.PortRange {
	var out []*sandseav1.PortRange
	for _, p := range list {
		out = append(out, &sandseav1.PortRange{First: p})
	}
	return out
}

func domain(name string, list ...int32) *sandseav1.NetworkRule {
	return &sandseav1.NetworkRule{Target: &sandseav1.NetworkRule_Domain{Domain: name}, Ports: ports(list...)}
}

func cidr(prefix string, list ...int32) *sandseav1.NetworkRule {
	return &sandseav1.NetworkRule{Target: &sandseav1.NetworkRule_Cidr{Cidr: prefix}, Ports: ports(list...)}
}

func reject(r *sandseav1.NetworkRule) *sandseav1.NetworkRule {
	r = proto.Clone(r).(*sandseav1.NetworkRule)
	r.Reject = true
	return r
}

func overUDP(r *sandseav1.NetworkRule) *sandseav1.NetworkRule {
	r = proto.Clone(r).(*sandseav1.NetworkRule)
	r.Protocol = sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP
	return r
}

// rules of the phase "agent"; the phase "grade" has none.
func rules() *sandseav1.NetworkPolicy {
	return &sandseav1.NetworkPolicy{Phases: []*sandseav1.NetworkPhase{
		{Name: "agent", Rules: []*sandseav1.NetworkRule{
			domain("allowed.example"), reject(domain("rejected.wild.example")), domain("*.wild.example"),
			domain("loopback.example"), domain("private.example"), domain("metadata.example"), domain("host.example"), domain("zero.example"),
			cidr(direct.Addr().String(), int32(direct.Port())),
			overUDP(cidr(datagram.Addr().String(), int32(datagram.Port()))),
			overUDP(domain("clock.example", int32(clock.Port()))),
		}},
		{Name: "grade"},
	}}
}

// reports is where kernels say which multicast groups they are in.
var reports = netip.MustParseAddr("ff02::16")

// mayLeave says which packets the rules let out of the host, Aether's questions among them.
func (h *house) mayLeave(p farside.Packet) bool {
	to := p.To.Addr()
	switch {
	case to == farside.Host, to == farside.Host6, to == reports: // answers, and the kernel's own word on what it listens to
		return true
	case bytes.Contains(p.Raw, []byte(marker)):
		return false
	case p.Protocol == 17 && p.To == netip.AddrPortFrom(resolver, 53):
		return true
	case p.Protocol == 6 && to == site:
		return p.To.Port() == 80 || p.To.Port() == 443
	case p.Protocol == 6 && p.To == direct, p.Protocol == 17 && (p.To == datagram || p.To == clock):
		return true
	case p.Protocol == 17 && p.To == netip.AddrPortFrom(datagram.Addr(), 0): // the rest of a large one
		return true
	}
	return false
}

// escaped are the packets that no rule allowed, and names that nobody may ask.
func (h *house) escaped() []string {
	var out []string
	for _, p := range h.world.Seen(func(p farside.Packet) bool { return !h.mayLeave(p) }) {
		out = append(out, fmt.Sprintf("protocol %d to %s", p.Protocol, p.To))
	}
	for _, name := range h.world.names() {
		if _, known := zone[name]; !known || strings.HasPrefix(name, "denied") || name == "neighbour.example" ||
			name == "wild.example" || name == "xwild.example" || name == "rejected.wild.example" {
			out = append(out, "question for "+name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// control is an attempt that must succeed: without it a matrix of refusals says nothing.
type control struct {
	name string
	argv []string
	want string // in the answer
}

func controls(t *testing.T, sb *client.Sandbox) []control {
	allowed := address(t, sb, "allowed.example")
	greet, viaSocks := socks5("allowed.example", 80)
	return []control{
		{"a name over HTTP", []string{"tcp", allowed, "80", get("allowed.example", "/a")}, "far says allowed.example/a"},
		{"a name over TLS", []string{"tcp", allowed, "443", hello(t, "allowed.example")}, "\x16\x03\x03"},
		{"a name below a wildcard", []string{"tcp", address(t, sb, "a.b.wild.example"), "80", get("a.b.wild.example", "/")}, "far says a.b.wild"},
		{"an address", []string{"tcp", direct.Addr().String(), itoa(direct.Port()), hex.EncodeToString([]byte("ping"))}, "ping"},
		{"an address over UDP", []string{"udp", datagram.Addr().String(), itoa(datagram.Port()), hex.EncodeToString([]byte("dgram"))}, "dgram"},
		{"a name over UDP", []string{"udp", address(t, sb, "clock.example"), itoa(clock.Port()), hex.EncodeToString([]byte("tick"))}, "tick"},
		{"an address over UDP in pieces", []string{
			"udp", datagram.Addr().String(), itoa(datagram.Port()), strings.Repeat(hex.EncodeToString([]byte("pieces")), 1500),
		}, "piecespieces"},
		{"a proxy by CONNECT", []string{
			"tcp", gateway, "3128", text("CONNECT allowed.example:80 HTTP/1.1", "Host: allowed.example:80"), get("allowed.example", "/c"),
		}, "far says allowed.example/c"},
		{"a proxy by its absolute form", []string{
			"tcp", gateway, "3128", get("allowed.example", "http://allowed.example/d"),
		}, "far says allowed.example/d"},
		{"SOCKS5", []string{"tcp", gateway, "1080", greet, viaSocks}, "\x05\x00"},
	}
}

// attempt is one that must come to nothing on the far side.
type attempt struct {
	name string
	argv []string
	// quiet ones are not refused at once: the name of a connection is known only after it is there.
	quiet bool
}

// attempts are those of a sandbox beside another one, whose address is neighbour.
func attempts(t *testing.T, sb *client.Sandbox, neighbour string) []attempt {
	t.Helper()
	allowed := address(t, sb, "allowed.example")
	var out []attempt
	add := func(name string, argv ...string) { out = append(out, attempt{name: name, argv: argv}) }
	late := func(name string, argv ...string) { out = append(out, attempt{name: name, argv: argv, quiet: true}) }

	// Addresses, over TCP and as data of a first packet, over UDP connected and not.
	for _, to := range []struct{ what, addr string }{
		{"a public address", "198.51.100.99"},
		{"the address of an allowed name", site.String()},
		{"the metadata service", "169.254.169.254"},
		{"another cloud's metadata", "100.100.100.200"},
		{"a private network", "10.1.2.3"},
		{"another private network", "172.16.5.6"},
		{"a third one", "192.168.7.8"},
		{"the host", farside.Host.String()},
		{"the world's resolver", resolver.String()},
		{"another sandbox", neighbour},
		{"an address that stands for no name", "198.19.7.7"},
		{"multicast", "224.0.0.251"},
		{"broadcast", "255.255.255.255"},
		{"an old network", "240.0.0.1"},
		{"public over IPv6", "2001:db8:9::9"},
		{"metadata over IPv6", "fd00:ec2::254"},
		{"IPv4 inside IPv6", "::ffff:198.51.100.99"},
		{"the metadata service inside IPv6", "::ffff:169.254.169.254"},
		{"NAT64", "64:ff9b::c633:6463"},
		{"6to4", "2002:c633:6463::1"},
		{"a link-local one", "fe80::1%eth0"},
		{"multicast over IPv6", "ff02::1%eth0"},
	} {
		add("TCP to "+to.what, "tcp", to.addr, "443", payload)
		if netip.MustParsePrefix("198.18.0.0/15").Contains(netip.MustParseAddr(strings.TrimSuffix(to.addr, "%eth0"))) {
			late("UDP to "+to.what, "udp", to.addr, "443", payload) // there a name over UDP is allowed
			continue
		}
		add("UDP to "+to.what, "udp", to.addr, "443", payload)
	}
	for _, port := range []string{"22", "25", "53", "853", "8080", "65535"} {
		add("TCP to the address of an allowed name, port "+port, "tcp", site.String(), port, payload)
		late("TCP to an allowed name, port "+port, "tcp", allowed, port, payload)
	}
	add("a port beside the allowed one", "tcp", direct.Addr().String(), "5433", payload)
	add("UDP where TCP is allowed", "udp", direct.Addr().String(), itoa(direct.Port()), payload)
	add("TCP where UDP is allowed", "tcp", datagram.Addr().String(), itoa(datagram.Port()), payload)
	late("QUIC to an allowed name", "udp", allowed, "443", payload)
	add("port 0", "tcp", "198.51.100.99", "0", payload)
	add("a datagram without connecting", "sendto", "198.51.100.99", "53", payload)
	add("a datagram to an IPv4 address inside IPv6", "sendto", "::ffff:198.51.100.99", "53", payload)
	add("data in a SYN", "fastopen", "198.51.100.99", "443", payload)
	add("data in a SYN over IPv6", "fastopen", "2001:db8:9::9", "443", payload)
	add("another's source address", "source", neighbour, "198.51.100.99", "53", payload)
	late("another's source address, to the resolver", "source", neighbour, gateway, "53", payload)
	add("a source route", "detour", site.String(), "198.51.100.99", "443")
	// Sockets that were let through once.
	away := []string{"198.51.100.99", "53", payload}
	add("a datagram elsewhere from a connected socket", append([]string{"resend", datagram.Addr().String(), itoa(datagram.Port())}, away...)...)
	add("a datagram elsewhere in one call with an allowed one", append([]string{"batch", datagram.Addr().String(), itoa(datagram.Port())}, away...)...)
	add("a socket for datagrams connected once more", append([]string{"again", "udp", datagram.Addr().String(), itoa(datagram.Port())}, away...)...)
	add("a connection made once more", append([]string{"again", "tcp", direct.Addr().String(), itoa(direct.Port())}, away...)...)
	// Options, by their numbers: what they are for, and what a datagram that has them could be taken for.
	for _, o := range []struct{ what, level, name, value string }{
		{"the link by its name", "1", "25", "6574683000"},
		{"the loopback by its name", "1", "25", "6c6f00"},
		{"the gate's mark", "1", "36", "01000000"},
		{"a mark of every bit", "1", "36", "ffffffff"},
		{"no routing", "1", "5", "01000000"},
		{"broadcast", "1", "6", "01000000"},
		{"the size of segments", "17", "103", "0100"},
		{"transparency", "0", "19", "01000000"},
		{"fragments by ourselves", "0", "10", "03000000"},
		{"a TTL of 1", "0", "2", "01000000"},
		{"a router alert", "0", "4", "94040000"},
		{"a recorded route", "0", "4", "0707040000000000"},
	} {
		add("a datagram with "+o.what, append([]string{"option", o.level, o.name, o.value}, away...)...)
	}
	large := strings.Repeat(payload, 1500)
	add("a datagram in many pieces", "udp", "198.51.100.99", "53", large)
	for _, port := range []string{"22", "443", "3129", "7001", "8443"} {
		add("the gateway, port "+port, "tcp", gateway, port, payload)
	}

	// Sockets that are no TCP or UDP.
	echo := "0800f7ff00000000" + payload
	add("echo request", "ping", "198.51.100.99", echo)
	add("echo request over IPv6", "ping", "2001:db8:9::9", "8000000000000000"+payload)
	for _, p := range []struct{ what, number string }{
		{"ICMP", "1"}, {"IP in IP", "4"}, {"TCP", "6"}, {"UDP", "17"}, {"IPv6 in IP", "41"}, {"GRE", "47"}, {"SCTP", "132"}, {"whole packets", "255"},
	} {
		add("raw "+p.what, "raw", p.number, "198.51.100.99", payload)
	}
	add("raw IPv6", "raw", "58", "2001:db8:9::9", payload)
	add("a frame", "frame", "ffffffffffff000000000000"+"0800"+payload)
	add("an SCTP socket", "socket", "2", "1", "132")
	add("an MPTCP socket", "socket", "2", "1", "262")
	add("a vsock", "socket", "40", "1", "0")
	add("a packet socket", "socket", "17", "3", "768")
	add("an XDP socket", "socket", "44", "3", "0")
	add("a bluetooth socket", "socket", "31", "3", "1")
	add("the default route taken away", "reroute")
	add("another address", "readdress", neighbour)

	// Names that are allowed and lead where nobody may go.
	for _, name := range []string{"loopback.example", "private.example", "metadata.example", "host.example", "zero.example"} {
		late("an allowed name that is "+zone[name], "tcp", address(t, sb, name), "80", get(name, "/"+marker))
	}

	// Names in TLS and HTTP that are not the one that was dialled.
	late("another server name", "tcp", allowed, "443", hello(t, "denied.example"))
	late("the server name of a neighbour on the address", "tcp", allowed, "443", hello(t, "neighbour.example"))
	late("an allowed server name at another allowed name", "tcp", allowed, "443", hello(t, "x.wild.example"))
	late("no server name", "tcp", allowed, "443", hello(t, ""))
	late("another Host", "tcp", allowed, "80", get("neighbour.example", "/"+marker))
	late("another Host on the second request", "tcp", allowed, "80", get("allowed.example", "/"), get("denied.example", "/"+marker))
	late("two Hosts", "tcp", allowed, "80", text("GET /"+marker+" HTTP/1.1", "Host: allowed.example", "Host: denied.example"))
	late("an absolute form of another host", "tcp", allowed, "80",
		text("GET http://denied.example/"+marker+" HTTP/1.1", "Host: allowed.example"))
	late("no Host", "tcp", allowed, "80", text("GET /"+marker+" HTTP/1.1"))
	late("a request hidden behind chunks and a length", "tcp", allowed, "80", hex.EncodeToString([]byte(
		"POST / HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"+
			"GET /"+marker+" HTTP/1.1\r\nHost: denied.example\r\n\r\n")))
	late("an upgrade at another host", "tcp", allowed, "80",
		text("GET /"+marker+" HTTP/1.1", "Host: denied.example", "Connection: Upgrade", "Upgrade: websocket"))
	late("HTTP/2 without TLS", "tcp", allowed, "80",
		hex.EncodeToString([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+marker)))

	// Proxies.
	for _, to := range []string{
		"denied.example:443", "neighbour.example:80", "198.51.100.99:443", site.String() + ":443", "169.254.169.254:80", "127.0.0.1:7272", "localhost:80",
		farside.Host.String() + ":22", "[" + farside.Host6.String() + "]:22", "[2001:db8:9::9]:443", "[::1]:80", "[::ffff:169.254.169.254]:80", gateway + ":53", "allowed.example:22",
		"0.0.0.0:80", "2130706433:80", "0x7f.1:80", "[64:ff9b::a9fe:a9fe]:80", "[2002:a9fe:a9fe::]:80", "[fe80::1%25lo]:80", "localhost.:80",
		"metadata.google.internal:80", "169.254.169.254.:80", "0251.0376.0251.0376:80", "denied.example.:443", "allowed.example.denied.example:443",
	} {
		late("CONNECT "+to, "tcp", gateway, "3128", text("CONNECT "+to+" HTTP/1.1", "Host: "+to), get("allowed.example", "/"+marker))
		host, port, _ := strings.Cut(to, "]:")
		if !strings.HasPrefix(to, "[") {
			host, port, _ = strings.Cut(to, ":")
		}
		greet, connect := socks5(strings.Trim(host, "["), number(port))
		late("SOCKS5 to "+to, "tcp", gateway, "1080", greet, connect)
	}
	late("CONNECT with another server name", "tcp", gateway, "3128",
		text("CONNECT allowed.example:443 HTTP/1.1", "Host: allowed.example:443"), hello(t, "denied.example"))
	late("the proxy with another Host", "tcp", gateway, "3128",
		text("GET http://denied.example/"+marker+" HTTP/1.1", "Host: allowed.example"))
	late("the proxy to a mirror's own address", "tcp", gateway, "3128",
		text("GET http://"+gateway+":53/"+marker+" HTTP/1.1", "Host: "+gateway))
	return out
}

// added are the lines that before lacks.
func added(before, after []string) []string {
	return slices.DeleteFunc(after, func(s string) bool { return slices.Contains(before, s) })
}

func number(port string) (n uint16) {
	_, _ = fmt.Sscan(port, &n)
	return n
}

// denials are questions to the resolver that must not leave the host.
func denials() []struct {
	name string
	typ  dnsmessage.Type
} {
	var out []struct {
		name string
		typ  dnsmessage.Type
	}
	for _, name := range []string{
		"denied.example", "neighbour.example", "wild.example", "xwild.example", "rejected.wild.example", "sub.allowed.example", "example",
		"DENIED.example", "allowed.example.denied.example", "c2VjcmV0LWRhdGEtYnlwYXNz.denied.example", "xn--llowed-cua.example",
		"254.169.254.169.in-addr.arpa", "localhost", "metadata.google.internal",
	} {
		for _, typ := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA, dnsmessage.TypeTXT, dnsmessage.TypeMX, 65} {
			out = append(out, struct {
				name string
				typ  dnsmessage.Type
			}{name, typ})
		}
	}
	return out
}

func TestMatrix(t *testing.T) {
	h := open(t)
	sb, other := h.sandbox(t, rules()), h.sandbox(t, rules())
	neighbour := strings.TrimSpace(run(t, other, "ip -4 -o addr show dev eth0 | sed 's/.*inet \\([0-9.]*\\).*/\\1/'"))
	if _, err := netip.ParseAddr(neighbour); err != nil {
		t.Fatalf("the other sandbox has the address %q", neighbour)
	}
	users := []string{"root", "1000"}

	t.Run("what is allowed works", func(t *testing.T) {
		for _, user := range users {
			for _, c := range controls(t, sb) {
				got := ""
				if c.argv[0] == "udp" {
					for try := 0; try < 3 && (got == "" || got == "silence"); try++ { // a datagram may be lost
						got = probe(t, sb, user, c.argv...)
					}
				} else {
					got = probePatiently(t, sb, user, c.argv...)
				}
				if !strings.Contains(got, c.want) {
					t.Errorf("%s, as %s: %.200q, want %q", c.name, user, got, c.want)
				}
			}
		}
		if left := h.escaped(); len(left) > 0 {
			t.Errorf("meanwhile these left the host: %q", left)
		}
	})

	t.Run("everything else stays inside", func(t *testing.T) {
		n := 0
		for _, user := range users {
			for _, a := range attempts(t, sb, neighbour) {
				n++
				before := h.escaped()
				got := probe(t, sb, user, a.argv...)
				if _, said, ok := strings.Cut(got, "far says "); ok && strings.Contains(said, marker) {
					t.Errorf("%s, as %s: the far side answered %.200q", a.name, user, got)
				}
				if !a.quiet && got == "silence" {
					t.Errorf("%s, as %s: nobody refuses it", a.name, user)
				}
				if after := h.escaped(); len(after) > len(before) {
					t.Errorf("%s, as %s: BYPASS: %q (told: %.100q)", a.name, user, added(before, after), got)
				}
			}
			for _, d := range denials() {
				n++
				for _, kind := range []string{"udp", "tcp"} {
					if code, a := ask(t, sb, user, kind, d.name, d.typ); a.IsValid() || code == dnsmessage.RCodeSuccess.String() {
						t.Errorf("%s %s over %s, as %s: %s %s", d.name, d.typ, kind, user, code, a)
					}
				}
			}
		}
		t.Logf("%d attempts", n)
		if n < 80 {
			t.Errorf("only %d attempts", n)
		}
		// What was sent late would be seen by now.
		time.Sleep(time.Second)
		if left := h.escaped(); len(left) > 0 {
			t.Errorf("these left the host: %q", left)
		}
	})

	t.Run("a phase without rules closes everything", func(t *testing.T) {
		open := controls(t, sb)
		if _, err := sb.SetPhase(t.Context(), "grade"); err != nil {
			t.Fatal(err)
		}
		count := len(h.world.Seen(func(farside.Packet) bool { return true }))
		for _, c := range open {
			if got := probe(t, sb, "root", c.argv...); strings.Contains(got, c.want) {
				t.Errorf("%s: %.100q", c.name, got)
			}
		}
		if now := h.world.Seen(func(farside.Packet) bool { return true }); len(now) > count {
			t.Errorf("%d packets left the host, the last to %s", len(now)-count, now[len(now)-1].To)
		}
	})

	t.Run("a sandbox without a policy has no way at all", func(t *testing.T) {
		closed := h.sandbox(t, nil)
		count := len(h.world.Seen(func(farside.Packet) bool { return true }))
		for _, to := range []string{"198.51.100.99", gateway, direct.Addr().String(), "169.254.169.254", "2001:db8:9::9"} {
			if got := probe(t, closed, "root", "tcp", to, "80", payload); !strings.HasPrefix(got, "refused") {
				t.Errorf("%s: %q", to, got)
			}
		}
		if now := h.world.Seen(func(farside.Packet) bool { return true }); len(now) > count {
			t.Errorf("%d packets left the host", len(now)-count)
		}
	})
}

func run(t *testing.T, sb *client.Sandbox, script string) string {
	t.Helper()
	res, err := sb.Run(t.Context(), client.Shell(script))
	if err != nil {
		t.Fatal(err)
	}
	return string(res.GetStdout())
}
