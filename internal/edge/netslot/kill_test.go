package netslot

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestTheFirstPacketOfALinkArrives(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	p := newProxy(t, g)
	for range 20 {
		b := s.attached(g)
		if err := b.slot.Set(named); err != nil {
			t.Fatal(err)
		}
		r := ask{Op: "large", Family: unix.AF_INET, Type: unix.SOCK_DGRAM, To: netip.MustParseAddrPort("198.18.0.1:443")}
		if got := b.do(r); got != "udp 198.18.0.1:443" {
			t.Fatalf("%s, and the far side saw %q", got, p.take())
		}
	}
}

func TestARestartLeavesTheWallsInForce(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	newProxy(t, g)
	open, shut, direct, nobody := s.attached(g), s.attached(g), s.attached(g), s.attached(g)
	for b, w := range map[*box]policy.Walls{open: named, direct: openings, nobody: named} {
		if err := b.slot.Set(w); err != nil {
			t.Fatal(err)
		}
	}
	look := func(when string, orphan string) {
		t.Helper()
		for _, c := range []struct {
			b        *box
			to, want string
		}{
			{open, "198.18.0.1:443", "tcp 198.18.0.1:443"},
			{open, "10.1.2.3:80", no},
			{shut, "198.18.0.1:443", no},
			{shut, "10.1.2.3:80", no},
			{direct, "198.18.0.1:443", no},
			{direct, "10.1.2.3:80", "tcp 10.1.2.3:80"},
			{nobody, "198.18.0.1:443", orphan},
			{nobody, "10.1.2.3:80", no},
		} {
			if got := c.b.tcp(c.to); got != c.want {
				t.Errorf("%s: %s to %s: %q, want %q", when, c.b.name, c.to, got, c.want)
			}
		}
	}
	look("before", "tcp 198.18.0.1:443")
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	look("without an edge", "tcp 198.18.0.1:443")
	g = s.again()
	look("with a new edge", "tcp 198.18.0.1:443")
	for _, b := range []*box{open, shut, direct} {
		number := b.slot.Number()
		slot, err := g.Adopt(number, b.id)
		if err != nil {
			t.Fatal(err)
		}
		if slot.Number() != number || slot.Addr() != b.slot.Addr() {
			t.Errorf("adopted %d %s, want %d %s", slot.Number(), slot.Addr(), number, b.slot.Addr())
		}
		b.slot = slot
		if _, err := g.Adopt(number, b.id); !errors.Is(err, errdefs.AlreadyExists) {
			t.Errorf("adopted twice: %v", err)
		}
	}
	for _, n := range []uint32{0, 4711, MaxNumber + 1, 1<<32 - 1} {
		if _, err := g.Adopt(n, 1); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("adopted slot %d: %v", n, err)
		}
	}
	look("adopted", "tcp 198.18.0.1:443")
	for range 2 {
		if err := g.Settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		look("settled", no)
	}
	// New ones keep away from numbers that are taken.
	fifth := s.attached(g)
	for _, b := range []*box{open, shut, direct} {
		if b.slot.Number() == fifth.slot.Number() {
			t.Errorf("slot %d was given twice", fifth.slot.Number())
		}
	}
	if err := open.slot.Set(closed); err != nil {
		t.Fatal(err)
	}
	if got := open.tcp("198.18.0.1:443"); got != no {
		t.Error(got)
	}
	if err := shut.slot.Set(openings); err != nil {
		t.Fatal(err)
	}
	if got := shut.tcp("10.1.2.3:80"); got != "tcp 10.1.2.3:80" {
		t.Error(got)
	}
}

func TestASlotAdoptedByAnotherGroupIsClosed(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	newProxy(t, g)
	a, b := s.attached(g), s.box("")
	if err := a.slot.Set(named); err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	g = s.again()
	if _, err := g.Adopt(a.slot.Number(), b.id); err != nil {
		t.Fatal(err)
	}
	if err := g.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := a.tcp("198.18.0.1:443"); got != no {
		t.Error(got)
	}
}

func TestAttachRefusesWhatCannotBe(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	a, b := s.attached(g), s.box("")
	if _, err := g.Attach(t.Context(), b.ns, b.name, a.id); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("a second slot of a group: %v", err)
	}
	if _, err := g.Attach(t.Context(), a.ns, b.name, b.id); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("a second link of a namespace: %v", err)
	}
	file, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := g.Attach(t.Context(), file, b.name, b.id); err == nil {
		t.Error("a link of no namespace")
	}
	if got := b.tcp("198.18.0.1:443"); got != no {
		t.Error(got)
	}
	host, err := netns.OfProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	for _, ns := range []*os.File{host, g.ns} {
		if _, err := g.Attach(t.Context(), ns, b.name, b.id); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("a link of ourselves: %v", err)
		}
	}
	ctx, stop := context.WithCancelCause(t.Context())
	cause := errors.New("changed my mind")
	stop(cause)
	if _, err := g.Attach(ctx, b.ns, b.name, b.id); !errors.Is(err, cause) {
		t.Errorf("canceled: %v", err)
	}
	// None of it keeps the box from its slot.
	if _, err := g.Attach(t.Context(), b.ns, b.name, b.id); err != nil {
		t.Error(err)
	}
	if err := a.slot.Release(); err != nil {
		t.Fatal(err)
	}
	if err := a.slot.Release(); err != nil {
		t.Fatal(err)
	}
	if err := a.slot.Set(named); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("walls of a released slot: %v", err)
	}
	if left := leftovers(t, g); !strings.HasPrefix(left, "links 2 ") || !strings.HasSuffix(left, ", groups 1, openings 0, sources 0") {
		t.Error(left)
	}
}

func TestANumberRestsWhileItsLinkLives(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	a := s.attached(g)
	if err := a.slot.Release(); err != nil {
		t.Fatal(err)
	}
	// As after four million slots.
	g.mu.Lock()
	g.last = MaxNumber
	g.mu.Unlock()
	if b := s.attached(g); b.slot.Number() != 2 {
		t.Errorf("slot %d, while the link of slot 1 is there", b.slot.Number())
	}
}

func TestWithoutAFreeNumberAttachIsRefused(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	g.max = 3
	for range 3 {
		s.attached(g)
	}
	b := s.box("")
	_, err := g.Attach(t.Context(), b.ns, b.name, b.id)
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Exhausted || !strings.Contains(e.Msg, "3") {
		t.Errorf("%v", err)
	}
}

func TestAFileFromBeforeTheMachineStartedIsNoGate(t *testing.T) {
	s := newStation(t)
	if err := os.Mkdir(s.cfg.Dir+"/run", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.cfg.Dir+"/run/gate.netns", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	g := s.gate()
	newProxy(t, g)
	a := s.attached(g)
	if err := a.slot.Set(named); err != nil {
		t.Fatal(err)
	}
	if got := a.tcp("198.18.0.1:443"); got != "tcp 198.18.0.1:443" {
		t.Error(got)
	}
}

func TestAnOpenThatFailsLeavesNothingOfItsOwn(t *testing.T) {
	s := newStation(t)
	broken := s.cfg
	broken.Cgroup = t.TempDir() // no control group: the programs have no place
	if _, err := Open(t.Context(), broken); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatal(err)
	}
	path := s.cfg.Dir + "/run/gate.netns"
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("gate of a failed start: %v", err)
	}
	// One that was there before may have sandboxes.
	s.gate()
	if _, err := Open(t.Context(), broken); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatal(err)
	}
	ns, err := netns.Open(path)
	if err != nil {
		t.Fatalf("gate of others: %v", err)
	}
	ns.Close()
}

func TestAFilterThatSomebodyFlushedIsClosedAndMadeAgain(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	p := newProxy(t, g)
	a, b := s.attached(g), s.unseen(g)
	for _, x := range []*box{a, b} {
		if err := x.slot.Set(named); err != nil {
			t.Fatal(err)
		}
	}
	c, err := nftables.New(nftables.WithNetNSFd(int(g.ns.Fd())))
	if err != nil {
		t.Fatal(err)
	}
	c.FlushRuleset()
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	// Nobody forwards it, and nobody answers.
	r := ask{
		Op: "dial", Family: unix.AF_INET, Type: unix.SOCK_STREAM, To: netip.MustParseAddrPort("198.18.0.1:443"),
		From: b.slot.Addr(),
	}
	if got, seen := b.do(r), p.take(); got == "tcp 198.18.0.1:443" || len(seen) > 0 {
		t.Errorf("without the filter: %q, the far side saw %q", got, seen)
	}
	if err := a.slot.Set(openings); err == nil {
		t.Error("walls were set that are not there")
	}
	if err := a.slot.Set(named); err != nil {
		t.Fatal(err)
	}
	if got := a.tcp("198.18.0.1:443"); got != "tcp 198.18.0.1:443" {
		t.Error(got)
	}
	if got := b.tcp("198.18.0.1:443"); got != no {
		t.Errorf("whose walls were not set again: %q", got)
	}
}

func TestNumbersStandForAddresses(t *testing.T) {
	for number, want := range map[uint32]string{
		1: "100.64.1.1", 255: "100.64.1.255", 256: "100.64.2.0", MaxNumber: "100.127.255.254",
	} {
		if got := (&Slot{number: number}).Addr(); got.String() != want {
			t.Errorf("slot %d is %s, want %s", number, got, want)
		}
	}
}

// leftovers tells what there is at the gate.
func leftovers(t testing.TB, g *Gate) string {
	t.Helper()
	numbers, err := g.links.List()
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(numbers)
	groups, open, err := g.wall.Size()
	if err != nil {
		t.Fatal(err)
	}
	sources, err := g.table.Sources()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("links %d %v, groups %d, openings %d, sources %d", len(numbers), numbers, groups, open, len(sources))
}

const nothing = "links 0 [], groups 0, openings 0, sources 0"

// attacher is an edge that attaches for ever, and says so.
func attacher() {
	g, err := Open(context.Background(), Config{Dir: os.Args[1], Tag: os.Args[2], Cgroup: os.Args[3]})
	if err != nil {
		fmt.Println(err)
		return
	}
	var all sync.WaitGroup
	for worker := range uint64(2) {
		all.Go(func() {
			for i := uint64(1); ; i++ {
				if err := cycle(g, worker<<32|i, i%3 == 0); err != nil {
					fmt.Println(err)
					return
				}
				fmt.Println("ok")
			}
		})
	}
	all.Wait()
}

// cycle is a slot's life, or, if it is held, all but its end.
func cycle(g *Gate, group uint64, hold bool) error {
	ns, err := netns.New()
	if err != nil {
		return err
	}
	s, err := g.Attach(context.Background(), ns, strconv.FormatUint(group, 10), group)
	if err == nil {
		w := policy.Walls{Names: true, Openings: openings.Openings[:1+group%4]}
		err = s.Set(w)
	}
	if hold && err == nil {
		return nil // the namespace too, as long as the process lives
	}
	if err == nil {
		err = s.Release()
	}
	return errors.Join(err, ns.Close())
}

func TestKilledInTheMiddleOfAttachingLeavesNothing(t *testing.T) {
	s := newStation(t)
	if err := s.gate().Close(); err != nil {
		t.Fatal(err)
	}
	for _, lives := range []int{1, 2, 5, 20, 40} {
		cmd := exec.Command("/proc/self/exe", s.cfg.Dir, s.cfg.Tag, s.cfg.Cgroup)
		cmd.Env = []string{role + "=attacher"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for range lives {
			if !lines.Scan() || lines.Text() != "ok" {
				t.Errorf("the attacher: %q, %v", lines.Text(), lines.Err())
				break
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait() // killed
		g := s.again()
		if err := g.Settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		// Links whose namespaces died with the process go by themselves, in the background.
		left := ""
		if !wait.For(30*time.Second, func() bool { left = leftovers(t, g); return left == nothing }) {
			t.Errorf("after %d slots: %s", lives, left)
		}
		if len(g.table.Classes()) > 0 {
			t.Errorf("classes %v are left", g.table.Classes())
		}
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// cycles is how many lives of slots are tried; the environment variable CYCLES asks for more.
func cycles(t testing.TB) int {
	t.Helper()
	if v := os.Getenv("CYCLES"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return 1000
}

func TestAThousandSlotsLeaveNothing(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	n := cycles(t)
	const workers = 4
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for i := w; i < n; i += workers {
				if err := cycle(g, uint64(i)+1, false); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	left := ""
	if !wait.For(60*time.Second, func() bool { left = leftovers(t, g); return left == nothing }) {
		t.Error(left)
	}
	if len(g.slots)+len(g.groups)+len(g.found) > 0 || len(g.table.Classes()) > 0 {
		t.Errorf("slots %v, classes %v", slices.Collect(maps.Keys(g.slots)), g.table.Classes())
	}
	if err := g.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestDestroyLeavesNothing(t *testing.T) {
	s := newStation(t)
	g := s.again()
	a := s.attached(g)
	if err := g.Exempt(s.cfg.Cgroup + "/" + a.name); err != nil {
		t.Fatal(err)
	}
	if err := g.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(g.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if got := a.do(ask{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_RAW, Kind: unix.IPPROTO_ICMP}); got != "ok" {
		t.Errorf("a program is left: %s", got)
	}
	if _, err := Open(t.Context(), Config{Dir: s.cfg.Dir, Tag: s.cfg.Tag, Cgroup: s.cfg.Dir}); !errors.Is(err, errdefs.FailedPrecondition) ||
		!strings.Contains(err.Error(), "control groups") {
		t.Errorf("without control groups: %v", err)
	}
}

func TestAGateThatCannotBeOpenedCanBeRemoved(t *testing.T) {
	s := newStation(t)
	g := s.again()
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), Config{Dir: s.cfg.Dir, Tag: s.cfg.Tag, Cgroup: s.cfg.Dir}); err == nil {
		t.Fatal("it opens without control groups")
	}
	for range 2 {
		if err := Remove(s.cfg.Dir); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(g.Path()); !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}
}

func BenchmarkAttach(b *testing.B) {
	s := newStation(b)
	g := s.gate()
	slots, spaces := make([]*Slot, b.N), make([]*os.File, b.N)
	for i := range b.N {
		var err error
		if spaces[i], err = netns.New(); err != nil {
			b.Fatal(err)
		}
	}
	b.ResetTimer()
	for i := range b.N {
		var err error
		if slots[i], err = g.Attach(b.Context(), spaces[i], "b", uint64(i)+1); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	for i := range b.N {
		if err := errors.Join(slots[i].Release(), spaces[i].Close()); err != nil {
			b.Fatal(err)
		}
	}
	wait.For(time.Minute, func() bool { n, _ := g.links.List(); return len(n) == 0 })
}

// BenchmarkAttachMany attaches from eight goroutines.
func BenchmarkAttachMany(b *testing.B) {
	s := newStation(b)
	g := s.gate()
	slots, spaces := make([]*Slot, b.N), make([]*os.File, b.N)
	for i := range b.N {
		var err error
		if spaces[i], err = netns.New(); err != nil {
			b.Fatal(err)
		}
	}
	b.ResetTimer()
	var all sync.WaitGroup
	for w := range 8 {
		all.Go(func() {
			for i := w; i < b.N; i += 8 {
				var err error
				if slots[i], err = g.Attach(b.Context(), spaces[i], "b", uint64(i)+1); err != nil {
					b.Error(err)
				}
			}
		})
	}
	all.Wait()
	b.StopTimer()
	for i := range b.N {
		if err := errors.Join(slots[i].Release(), spaces[i].Close()); err != nil {
			b.Fatal(err)
		}
	}
	wait.For(time.Minute, func() bool { n, _ := g.links.List(); return len(n) == 0 })
}

// BenchmarkSet changes the walls of one of a thousand slots, which all have openings: the same, or each its own.
func BenchmarkSet(b *testing.B) {
	for _, own := range []bool{false, true} {
		b.Run(fmt.Sprintf("own=%v", own), func(b *testing.B) {
			s := newStation(b)
			g := s.gate()
			slots := make([]*Slot, 1000)
			walls := func(i int) policy.Walls {
				w := policy.Walls{Names: true, Openings: slices.Clone(openings.Openings)}
				if own {
					w.Openings[0].Ports.Last = uint16(100 + i)
				}
				return w
			}
			for i := range slots {
				// Walls need no link.
				s, err := g.reserve("b", uint64(i)+1)
				if err != nil {
					b.Fatal(err)
				}
				slots[i] = s
				if err := s.Set(walls(i)); err != nil {
					b.Fatal(err)
				}
			}
			b.ResetTimer()
			for i := range b.N {
				w := closed
				if i%2 == 1 {
					w = walls(i / 2 % 1000)
				}
				if err := slots[i/2%1000].Set(w); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			if err := g.Settle(b.Context()); err != nil {
				b.Fatal(err)
			}
		})
	}
}

func BenchmarkRelease(b *testing.B) {
	s := newStation(b)
	g := s.gate()
	slots := make([]*Slot, b.N)
	for i := range b.N {
		var err error
		if slots[i], err = g.reserve("b", uint64(i)+1); err != nil {
			b.Fatal(err)
		}
		if err := slots[i].Set(named); err != nil {
			b.Fatal(err)
		}
	}
	b.ResetTimer()
	for _, s := range slots {
		if err := s.Release(); err != nil {
			b.Fatal(err)
		}
	}
}

func TestAGateWithoutADirectoryIsKeptByNoMount(t *testing.T) {
	s := newStation(t)
	g, err := Open(t.Context(), Config{Tag: s.cfg.Tag, Cgroup: s.cfg.Cgroup})
	if err != nil {
		t.Fatal(err)
	}
	var ns unix.Stat_t
	if err := unix.Fstat(int(g.Namespace().Fd()), &ns); err != nil {
		t.Fatal(err)
	}
	kept, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Root != fmt.Sprintf("net:[%d]", ns.Ino), false
	})
	if err != nil || len(kept) > 0 || g.Path() != "" {
		t.Errorf("mounts %v, %v, path %q", kept, err, g.Path())
	}
	if err := g.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
}
