package netslot

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/policy"
)

var (
	closed   = policy.Walls{}
	named    = policy.Walls{Names: true}
	openings = policy.Walls{Openings: []policy.Opening{
		{Prefix: netip.MustParsePrefix("10.1.0.0/16"), Ports: policy.Ports{First: 80, Last: 90}, Protocol: policy.TCP},
		{Prefix: netip.MustParsePrefix("10.1.2.0/24"), Ports: policy.Ports{First: 443, Last: 443}, Protocol: policy.TCP},
		{Prefix: netip.MustParsePrefix("10.1.0.0/16"), Ports: policy.Ports{First: 53, Last: 53}, Protocol: policy.UDP},
		{Prefix: netip.MustParsePrefix("203.0.113.7/32"), Ports: policy.Ports{First: 1, Last: 65535}, Protocol: policy.TCP},
	}}
)

const (
	no     = "ECONNREFUSED"
	no6    = "ENETUNREACH"
	denied = "EPERM"
	absent = "EPROTONOSUPPORT"
)

// TestMatrix asks from inside for everything that leads anywhere, with each kind of walls, and looks at what reached
// the far side.
func TestMatrix(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	p := newProxy(t, g)
	a, b := s.attached(g), s.attached(g)
	port := a.do(ask{Op: "serve", To: netip.MustParseAddrPort("[::]:0")})
	there := b.do(ask{Op: "serve", To: netip.MustParseAddrPort("[::]:0")})
	if err := b.slot.Set(policy.Walls{Names: true, Openings: openings.Openings}); err != nil {
		t.Fatal(err)
	}
	self, other := a.slot.Addr().String(), b.slot.Addr().String()
	in := "inside"
	tests := []struct {
		how, to string
		// with walls closed, names only, openings only; "=" is the same as before, "tcp"/"udp" that the proxy had it.
		want [3]string
	}{
		// Inside nothing changes.
		{"tcp", "127.0.0.1:" + port, [3]string{in, in, in}},
		{"udp", "127.0.0.1:" + port, [3]string{in, in, in}},
		{"tcp", "127.8.9.10:" + port, [3]string{in, in, in}},
		{"tcp", "0.0.0.0:" + port, [3]string{in, in, in}},
		{"tcp", self + ":" + port, [3]string{in, in, in}},
		{"udp", self + ":" + port, [3]string{in, in, in}},
		{"tcp", "[::1]:" + port, [3]string{in, in, in}},
		{"udp", "[::1]:" + port, [3]string{in, in, in}},
		{"tcp", "[::]:" + port, [3]string{in, in, in}},
		{"tcp", "[::ffff:127.0.0.1]:" + port, [3]string{in, in, in}},
		{"udp", "[::ffff:127.0.0.1]:" + port, [3]string{in, in, in}},
		{"tcp", "127.0.0.1:7001", [3]string{no, no, no}},

		// The gateway.
		{"tcp", "100.64.0.1:53", [3]string{no, "tcp", no}},
		{"tcp", "100.64.0.1:80", [3]string{no, "tcp", no}},
		{"tcp", "100.64.0.1:1080", [3]string{no, "tcp", no}},
		{"tcp", "100.64.0.1:3128", [3]string{no, "tcp", no}},
		{"udp", "100.64.0.1:53", [3]string{no, "udp", no}},
		{"tcp", "[::ffff:100.64.0.1]:80", [3]string{no, "tcp", no}},
		{"udp", "[::ffff:100.64.0.1]:53", [3]string{no, "udp", no}},
		{"tcp", "100.64.0.1:22", [3]string{no, no, no}},
		{"tcp", "100.64.0.1:7001", [3]string{no, no, no}},
		{"udp", "100.64.0.1:7001", [3]string{no, no, no}},
		{"tcp", "100.64.0.0:80", [3]string{no, no, no}},
		{"tcp", "100.64.0.2:80", [3]string{no, no, no}},

		// Addresses that stand for names.
		{"tcp", "198.18.0.0:1", [3]string{no, "tcp", no}},
		{"tcp", "198.18.77.5:443", [3]string{no, "tcp", no}},
		{"tcp", "198.19.255.255:65535", [3]string{no, "tcp", no}},
		{"udp", "198.18.77.5:443", [3]string{no, "udp", no}},
		{"tcp", "[::ffff:198.18.77.5]:443", [3]string{no, "tcp", no}},
		{"udp", "[::ffff:198.18.77.5]:443", [3]string{no, "udp", no}},
		{"tcp", "198.17.255.255:443", [3]string{no, no, no}},
		{"tcp", "198.20.0.0:443", [3]string{no, no, no}},

		// Openings.
		{"tcp", "10.1.0.0:80", [3]string{no, no, "tcp"}},
		{"tcp", "10.1.255.255:90", [3]string{no, no, "tcp"}},
		{"tcp", "10.1.2.3:85", [3]string{no, no, "tcp"}},
		{"tcp", "10.1.2.3:443", [3]string{no, no, "tcp"}},
		{"tcp", "[::ffff:10.1.2.3]:443", [3]string{no, no, "tcp"}},
		{"udp", "10.1.2.3:53", [3]string{no, no, "udp"}},
		{"udp", "[::ffff:10.1.2.3]:53", [3]string{no, no, "udp"}},
		{"tcp", "203.0.113.7:22", [3]string{no, no, "tcp"}},
		{"tcp", "10.1.2.3:79", [3]string{no, no, no}},
		{"tcp", "10.1.2.3:91", [3]string{no, no, no}},
		{"tcp", "10.1.3.3:443", [3]string{no, no, no}},
		{"tcp", "10.1.2.3:53", [3]string{no, no, no}},
		{"udp", "10.1.2.3:80", [3]string{no, no, no}},
		{"udp", "203.0.113.7:22", [3]string{no, no, no}},
		{"tcp", "10.0.255.255:80", [3]string{no, no, no}},
		{"tcp", "10.2.0.0:80", [3]string{no, no, no}},
		{"tcp", "203.0.113.6:80", [3]string{no, no, no}},

		// Others.
		{"tcp", other + ":" + there, [3]string{no, no, no}},
		{"udp", other + ":" + there, [3]string{no, no, no}},
		{"tcp", "[::ffff:" + other + "]:" + there, [3]string{no, no, no}},
		{"tcp", "169.254.169.254:80", [3]string{no, no, no}},
		{"tcp", "192.168.0.1:80", [3]string{no, no, no}},
		{"tcp", "172.17.0.1:80", [3]string{no, no, no}},
		{"tcp", "8.8.8.8:53", [3]string{no, no, no}},
		{"udp", "8.8.8.8:53", [3]string{no, no, no}},
		{"tcp", "1.0.0.127:80", [3]string{no, no, no}},
		{"udp", "224.0.0.251:5353", [3]string{no, no, no}},
		{"udp", "239.255.255.250:1900", [3]string{no, no, no}},
		{"udp", "255.255.255.255:67", [3]string{no, no, no}},
		{"udp", "240.0.0.1:1", [3]string{no, no, no}},
		{"connected udp", "8.8.8.8:53", [3]string{no, no, no}},
		{"connected udp", "198.18.0.9:53", [3]string{no, "udp", no}},
		{"fastopen", "8.8.8.8:443", [3]string{no, no, no}},
		{"fastopen", "198.18.0.9:443", [3]string{no, "tcp", no}},

		// IPv6.
		{"tcp", "[2001:db8::1]:443", [3]string{no6, no6, no6}},
		{"udp", "[2001:db8::1]:53", [3]string{no6, no6, no6}},
		{"tcp", "[fe80::1%eth0]:80", [3]string{no6, no6, no6}},
		{"udp", "[ff02::1%eth0]:5353", [3]string{no6, no6, no6}},
		{"tcp", "[64:ff9b::c612:1]:80", [3]string{no6, no6, no6}},
		{"tcp", "[::c612:1]:80", [3]string{no6, no6, no6}},
		{"tcp", "[fd00::1]:80", [3]string{no6, no6, no6}},
		{"tcp", "[::2]:80", [3]string{no6, no6, no6}},

		// Sockets of other kinds.
		{"raw icmp", "198.18.0.9:0", [3]string{denied, denied, denied}},
		{"raw tcp", "198.18.0.9:0", [3]string{denied, denied, denied}},
		{"raw udp", "198.18.0.9:0", [3]string{denied, denied, denied}},
		{"raw any", "198.18.0.9:0", [3]string{denied, denied, denied}},
		{"raw icmp6", "[::1]:0", [3]string{denied, denied, denied}},
		{"ping", "198.18.0.9:0", [3]string{"EACCES", "EACCES", "EACCES"}}, // the kernel's own, by sysctl ping_group_range
		{"ping6", "[::1]:0", [3]string{"EACCES", "EACCES", "EACCES"}},
		{"mptcp", "198.18.0.9:0", [3]string{absent, absent, absent}},
		{"udplite", "198.18.0.9:0", [3]string{absent, absent, absent}},
	}
	if len(tests)*3 < 240 {
		t.Fatalf("%d cases", len(tests)*3)
	}
	for i, w := range []policy.Walls{closed, named, openings} {
		if err := a.slot.Set(w); err != nil {
			t.Fatal(err)
		}
		state := []string{"closed", "names", "openings"}[i]
		for _, c := range tests {
			t.Run(state+" "+c.how+" "+c.to, func(t *testing.T) {
				want := c.want[i]
				to := netip.MustParseAddrPort(c.to)
				// What the proxy sees is IPv4.
				plain := netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
				got := a.do(request(t, c.how, to))
				if got == "EINVAL" && strings.HasPrefix(c.how, "raw") {
					t.Fatal("not tried")
				}
				seen := p.take()
				if want == "tcp" || want == "udp" {
					line := fmt.Sprintf("%s %s > %s", want, self, plain)
					if got != want+" "+plain.String() || !slices.Equal(seen, []string{line}) {
						t.Errorf("got %q, and the far side saw %q", got, seen)
					}
					return
				}
				if got != want {
					t.Errorf("got %q, want %q", got, want)
				}
				if len(seen) > 0 {
					t.Errorf("the far side saw %q", seen)
				}
			})
		}
	}
}

// request is what a box does for a row of the matrix.
func request(t *testing.T, how string, to netip.AddrPort) ask {
	t.Helper()
	r := ask{Op: "dial", Family: family(to.Addr()), Type: unix.SOCK_STREAM, To: to}
	switch how {
	case "tcp":
	case "udp":
		r.Op, r.Type = "send", unix.SOCK_DGRAM
	case "connected udp":
		r.Op, r.Type = "sendConnected", unix.SOCK_DGRAM
	case "fastopen":
		r.Op = "fastopen"
	case "raw icmp":
		r.Op, r.Type, r.Kind = "socket", unix.SOCK_RAW, unix.IPPROTO_ICMP
	case "raw tcp":
		r.Op, r.Type, r.Kind = "socket", unix.SOCK_RAW, unix.IPPROTO_TCP
	case "raw udp":
		r.Op, r.Type, r.Kind = "socket", unix.SOCK_RAW, unix.IPPROTO_UDP
	case "raw any":
		r.Op, r.Type, r.Kind = "socket", unix.SOCK_RAW, unix.IPPROTO_RAW
	case "raw icmp6":
		r.Op, r.Type, r.Kind = "socket", unix.SOCK_RAW, unix.IPPROTO_ICMPV6
	case "ping":
		r.Op, r.Type, r.Kind = "socket", unix.SOCK_DGRAM, unix.IPPROTO_ICMP
	case "ping6":
		r.Op, r.Type, r.Kind = "socket", unix.SOCK_DGRAM, unix.IPPROTO_ICMPV6
	case "mptcp":
		r.Op, r.Kind = "socket", unix.IPPROTO_MPTCP
	case "udplite":
		r.Op, r.Type, r.Kind = "socket", unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE
	default:
		t.Fatal(how)
	}
	return r
}
