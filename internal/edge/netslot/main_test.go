package netslot

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/cgroupbpf"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/linux/transparent"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// role is the environment variable by which the test's own binary knows that it is somebody else.
const role = "SANDSEA_NETSLOT_TEST"

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "inside":
		inside(os.Stdin, os.Stdout)
	case "attacher":
		attacher()
	default:
		os.Exit(leak.Main(m))
	}
}

// station is a place for an edge: a data directory and a parent of control groups.
type station struct {
	t      testing.TB
	cfg    Config
	groups int
}

func newStation(t testing.TB) *station {
	t.Helper()
	require.Root(t)
	require.Feature(t, "cgroup2")
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	if err != nil || len(mounts) == 0 {
		t.Fatal(err)
	}
	dir := t.TempDir()
	leak.Check(t, dir)
	tag := leak.Tag()
	s := &station{t: t, cfg: Config{Dir: dir, Tag: tag, Cgroup: filepath.Join(mounts[0].Mountpoint, "sandsea-"+tag)}}
	if err := os.Mkdir(s.cfg.Cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.rmdir(s.cfg.Cgroup) })
	return s
}

// rmdir removes a group once its processes are gone.
func (s *station) rmdir(path string) {
	var err error
	if !wait.For(20*time.Second, func() bool { err = os.Remove(path); return err == nil || errors.Is(err, os.ErrNotExist) }) {
		s.t.Error(err)
	}
}

// gate opens the gate, which is destroyed with the test.
func (s *station) gate() *Gate {
	s.t.Helper()
	g := s.again()
	s.t.Cleanup(func() {
		// The test's own context has ended by now.
		g, err := Open(context.Background(), s.cfg)
		if err == nil {
			err = g.Destroy(context.Background())
		}
		if err != nil {
			s.t.Errorf("destroy the gate: %v", err)
		}
	})
	return g
}

// again opens the gate once more. It is closed with the test.
func (s *station) again() *Gate {
	s.t.Helper()
	g, err := Open(s.t.Context(), s.cfg)
	require.That(s.t, "egress", err)
	s.t.Cleanup(func() {
		if err := g.Close(); err != nil {
			s.t.Error(err)
		}
	})
	return g
}

// box is a process in namespaces of its own, as a sandbox, that does as it is told.
type box struct {
	t    testing.TB
	name string
	cmd  *exec.Cmd
	in   *json.Encoder
	out  *bufio.Scanner
	mu   sync.Mutex
	// ns is the network namespace, id that of the group.
	ns   *os.File
	id   uint64
	slot *Slot
}

// idBase are host ids that nobody has.
const idBase = 1 << 30

// box starts a process in a group below path. Its root owns its network namespace, with every capability in it.
func (s *station) box(group string) *box {
	s.t.Helper()
	s.groups++
	name := fmt.Sprintf("b%d", s.groups)
	if group == "" {
		group = s.cfg.Cgroup
	}
	path := filepath.Join(group, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { s.rmdir(path) })
	// A command's process is below the sandbox's own group.
	below := filepath.Join(path, "e1")
	if err := os.Mkdir(below, 0o755); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { s.rmdir(below) })
	dir, err := os.Open(below)
	if err != nil {
		s.t.Fatal(err)
	}
	defer dir.Close()
	b := &box{t: s.t, name: name, cmd: exec.Command("/proc/self/exe")}
	if b.id, err = cgroupbpf.ID(path); err != nil {
		s.t.Fatal(err)
	}
	// A call that waits with a limit is not taken up again after a signal, and Go's scheduler sends some.
	b.cmd.Env = []string{role + "=inside", "GODEBUG=asyncpreemptoff=1"}
	b.cmd.Stderr = os.Stderr
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: idBase, Size: 65536}}
	b.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET, UseCgroupFD: true, CgroupFD: int(dir.Fd()),
		UidMappings: ids, GidMappings: ids, Pdeathsig: syscall.SIGKILL,
		Credential: &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
	}
	in, err := b.cmd.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := b.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := b.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		in.Close()
		if err := b.cmd.Wait(); err != nil {
			s.t.Errorf("%s: %v", name, err)
		}
	})
	b.in, b.out = json.NewEncoder(in), bufio.NewScanner(out)
	if b.ns, err = netns.OfProcess(b.cmd.Process.Pid); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { b.ns.Close() })
	if got := b.do(ask{Op: "up"}); got != "ok" {
		s.t.Fatal(got)
	}
	return b
}

// attached is a box with a slot.
func (s *station) attached(g *Gate) *box {
	s.t.Helper()
	b := s.box("")
	var err error
	if b.slot, err = g.Attach(s.t.Context(), b.ns, b.name, b.id); err != nil {
		s.t.Fatal(err)
	}
	return b
}

// ask is what a box is told to do.
type ask struct {
	Op                 string
	Family, Type, Kind int
	To                 netip.AddrPort
	From               netip.Addr // foreign source
	Frame              []byte
}

// do gives "ok", what was read, or the name of the error.
func (b *box) do(a ask) string {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.in.Encode(a); err != nil {
		b.t.Fatal(err)
	}
	if !b.out.Scan() {
		b.t.Fatalf("%s has ended: %v", b.name, b.out.Err())
	}
	return b.out.Text()
}

// family of an address as a box should use it: 4, or 6 also for IPv4 in IPv6.
func family(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func (b *box) tcp(to string) string {
	b.t.Helper()
	at := netip.MustParseAddrPort(to)
	return b.do(ask{Op: "dial", Family: family(at.Addr()), Type: unix.SOCK_STREAM, To: at})
}

func (b *box) udp(to string) string {
	b.t.Helper()
	at := netip.MustParseAddrPort(to)
	return b.do(ask{Op: "send", Family: family(at.Addr()), Type: unix.SOCK_DGRAM, To: at})
}

// inside is what a box's process does: it answers each line by a line.
func inside(r io.Reader, w io.Writer) {
	in := bufio.NewScanner(r)
	for in.Scan() {
		var a ask
		said := ""
		err := json.Unmarshal(in.Bytes(), &a)
		if err == nil {
			said, err = perform(a)
		}
		if errno, ok := errors.AsType[unix.Errno](err); ok {
			said = unix.ErrnoName(errno)
		} else if err != nil {
			said = err.Error()
		}
		fmt.Fprintln(w, said)
	}
}

// held is the connection that "hold" made.
var held = -1

func perform(a ask) (string, error) {
	switch a.Op {
	case "use":
		if _, err := unix.Write(held, []byte("x")); err != nil {
			return "", err
		}
		fallthrough
	case "hear":
		buf := make([]byte, 16)
		n, err := unix.Read(held, buf)
		return string(buf[:max(n, 0)]), err
	case "up":
		return "ok", up("lo")
	case "serve":
		return serve(a)
	case "frame":
		return "ok", frame(a.Frame)
	}
	fd, err := unix.Socket(a.Family, a.Type|unix.SOCK_CLOEXEC, a.Kind)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	if a.Op == "socket" {
		return "ok", nil
	}
	// Far more than anything takes that is answered or refused.
	patience := unix.NsecToTimeval(int64(20 * time.Second))
	if a.From.IsValid() {
		patience = unix.NsecToTimeval(int64(50 * time.Millisecond))
		if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1); err != nil {
			return "", err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: a.From.As4()}); err != nil {
			return "", err
		}
	}
	for _, o := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, o, &patience); err != nil {
			return "", err
		}
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1); err != nil {
		return "", err
	}
	var to unix.Sockaddr = &unix.SockaddrInet6{Port: int(a.To.Port()), Addr: a.To.Addr().As16(), ZoneId: zone(a.To)}
	if a.Family == unix.AF_INET {
		to = &unix.SockaddrInet4{Port: int(a.To.Port()), Addr: a.To.Addr().As4()}
	}
	switch a.Op {
	case "hold":
		if err := unix.Connect(fd, to); err != nil {
			return "", err
		}
		held, err = unix.Dup(fd)
		return "ok", err
	case "dial":
		if err := unix.Connect(fd, to); err != nil {
			return "", err
		}
	case "send":
		if err := unix.Sendto(fd, []byte("hello"), 0, to); err != nil {
			return "", err
		}
	case "fastopen":
		if err := unix.Sendto(fd, []byte("hello"), unix.MSG_FASTOPEN, to); err != nil {
			return "", err
		}
	case "sendConnected":
		if err := unix.Connect(fd, to); err != nil {
			return "", err
		}
		if err := unix.Sendto(fd, []byte("hello"), 0, nil); err != nil {
			return "", err
		}
	case "large":
		if err := unix.Sendto(fd, make([]byte, 20000), 0, to); err != nil {
			return "", err
		}
	default:
		return "", fmt.Errorf("cannot %q", a.Op)
	}
	buf := make([]byte, 256)
	n, err := unix.Read(fd, buf)
	return string(buf[:max(n, 0)]), err
}

func zone(to netip.AddrPort) uint32 {
	if to.Addr().Zone() == "" {
		return 0
	}
	i, err := net.InterfaceByName(to.Addr().Zone())
	if err != nil {
		return 0
	}
	return uint32(i.Index)
}

func up(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
}

// serve answers connections and datagrams at an address with "inside".
func serve(a ask) (string, error) {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(a.To))
	if err != nil {
		return "", err
	}
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a.To.Addr(), port)))
	if err != nil {
		return "", err
	}
	go answer(l, func(net.Conn) string { return "inside" })
	go func() {
		buf := make([]byte, 256)
		for {
			_, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort([]byte("inside"), from)
		}
	}()
	return fmt.Sprint(port), nil
}

// frame sends an Ethernet frame out of eth0, below all that judges sockets.
func frame(b []byte) error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	i, err := net.InterfaceByName("eth0")
	if err != nil {
		return err
	}
	return unix.Sendto(fd, b, 0, &unix.SockaddrLinklayer{Ifindex: i.Index, Halen: 6})
}

func answer(l net.Listener, say func(net.Conn) string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		if c.LocalAddr().(*net.TCPAddr).Port == echoPort {
			say(c)
			go func() { _, _ = io.Copy(c, c) }()
			continue
		}
		_, _ = io.WriteString(c, say(c))
		c.Close()
	}
}

// echoPort is where connections stay and bytes come back.
const echoPort = 7777

// proxy stands where Aether does: it tells everybody what they reached, and remembers it.
type proxy struct {
	mu   sync.Mutex
	seen []string   // guarded by mu
	open []net.Conn // guarded by mu: those that stay
}

// cut resets the connections that stayed, as Aether does with flows that are no longer allowed.
func (p *proxy) cut(t testing.TB) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.open {
		if err := errors.Join(c.(*net.TCPConn).SetLinger(0), c.Close()); err != nil {
			t.Error(err)
		}
	}
	p.open = nil
}

func (p *proxy) note(what string, from netip.AddrPort, to netip.AddrPort) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen = append(p.seen, fmt.Sprintf("%s %s > %s", what, from.Addr(), to))
	return what + " " + to.String()
}

// take gives what was reached since the last time.
func (p *proxy) take() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.seen
	p.seen = nil
	return s
}

func newProxy(t testing.TB, g *Gate) *proxy {
	t.Helper()
	p := &proxy{}
	var done sync.WaitGroup
	t.Cleanup(func() {
		done.Wait()
		p.cut(t)
	})
	local := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), wire.PortTransparent)
	at := []netip.AddrPort{local}
	for _, port := range []uint16{wire.PortDNS, wire.PortMirrors, wire.PortSOCKS, wire.PortProxy} {
		at = append(at, netip.AddrPortFrom(wire.Gateway, port))
	}
	for _, a := range at {
		l, err := transparent.Listen(g.ns, a)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		done.Go(func() {
			answer(l, func(c net.Conn) string {
				if c.LocalAddr().(*net.TCPAddr).Port == echoPort {
					p.mu.Lock()
					p.open = append(p.open, c)
					p.mu.Unlock()
				}
				return p.note("tcp", c.RemoteAddr().(*net.TCPAddr).AddrPort(), c.LocalAddr().(*net.TCPAddr).AddrPort())
			})
		})
		c, err := transparent.ListenPacket(g.ns, a)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		done.Go(func() {
			buf := make([]byte, 1<<16)
			for {
				_, from, to, err := transparent.ReadFrom(c, buf)
				if err != nil {
					return
				}
				said := p.note("udp", from, to)
				if a == local {
					err = reply(g, to, from, said)
				} else {
					_, err = c.WriteToUDPAddrPort([]byte(said), from)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	return p
}

// reply answers a datagram from the address that it was sent to.
func reply(g *Gate, from, to netip.AddrPort, said string) error {
	f, err := g.UDP(from)
	if err != nil {
		return err
	}
	defer f.Close()
	c, err := net.FilePacketConn(f)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.WriteTo([]byte(said), net.UDPAddrFromAddrPort(to))
	return err
}
