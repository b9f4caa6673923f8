package wire_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/wire"
	"github.com/sandsea/sandsea/internal/linux/memfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/testkit/rawbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const limit = 20 * time.Second

// harness runs commands in a box and gathers their ends.
type harness struct {
	t    testing.TB
	box  *rawbox.Box
	line *wire.Channel

	mu     sync.Mutex
	number int64
	ends   map[int64]chan chronus.Exit
}

func start(t testing.TB, o rawbox.Options) *harness {
	t.Helper()
	h := &harness{t: t, box: rawbox.Start(t, o), ends: map[int64]chan chronus.Exit{}}
	h.attach(h.box.Open(t))
	return h
}

// attach takes the ends from a line from now on.
func (h *harness) attach(line *wire.Channel) {
	h.line = line
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e, err := range line.Exits() {
			if err != nil {
				return
			}
			h.end(e.Number) <- e
		}
	}()
	h.t.Cleanup(func() {
		line.Close()
		<-done
	})
}

func (h *harness) end(number int64) chan chronus.Exit {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ends[number] == nil {
		h.ends[number] = make(chan chronus.Exit, 4)
	}
	return h.ends[number]
}

func (h *harness) next() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.number++
	return h.number
}

func ctx(t testing.TB) context.Context {
	c, stop := context.WithTimeout(context.Background(), limit)
	t.Cleanup(stop)
	return c
}

func argv(args ...string) chronus.Spawn {
	return chronus.Spawn{Argv: args, Env: []string{"PATH=/bin"}, Cwd: "/", Umask: 0o022}
}

func sh(script string) chronus.Spawn { return argv("sh", "-c", script) }

func asUser(s chronus.Spawn) chronus.Spawn {
	s.IDs = chronus.IDs{UID: 1000, GID: 1000, Groups: []uint32{1000, 2000}}
	return s
}

// spawn starts a command with stdin from a string and both outputs in one pipe, whose text comes from the channel.
func (h *harness) spawn(s chronus.Spawn, cgroup *os.File) (int64, <-chan string, error) {
	h.t.Helper()
	s.Number = h.next()
	in, err := os.Open("/dev/null")
	if err != nil {
		h.t.Fatal(err)
	}
	defer in.Close()
	r, w, err := os.Pipe()
	if err != nil {
		h.t.Fatal(err)
	}
	_, err = h.line.Spawn(ctx(h.t), s, chronus.Stdio{Cgroup: cgroup, In: in, Out: w})
	w.Close()
	out := make(chan string, 1)
	go func() {
		var b bytes.Buffer
		_, _ = io.Copy(&b, r)
		r.Close()
		out <- b.String()
	}()
	return s.Number, out, err
}

func (h *harness) wait(number int64) chronus.Exit {
	h.t.Helper()
	select {
	case e := <-h.end(number):
		if err := h.line.Ack(number); err != nil {
			h.t.Fatalf("ack %d: %v", number, err)
		}
		return e
	case <-time.After(limit):
		h.t.Fatalf("process %d does not end", number)
	}
	return chronus.Exit{}
}

// run runs a command to its end.
func (h *harness) run(s chronus.Spawn) (string, chronus.Exit) {
	h.t.Helper()
	number, out, err := h.spawn(s, h.box.Exec(h.t))
	if err != nil {
		h.t.Fatalf("spawn %q: %v", s.Argv, err)
	}
	e := h.wait(number)
	return strings.TrimSpace(<-out), e
}

func startError(t testing.TB, err error) *chronus.StartError {
	t.Helper()
	e, ok := errors.AsType[*chronus.StartError](err)
	if !ok {
		t.Fatalf("got %v, want a start error", err)
	}
	return e
}

func TestACommandRunsAndItsEndIsTold(t *testing.T) {
	h := start(t, rawbox.Options{})
	out, e := h.run(sh("echo hello; echo world >&2; exit 7"))
	if out != "hello\nworld" {
		t.Errorf("output %q", out)
	}
	if !e.Status.Exited() || e.Status.ExitStatus() != 7 || e.Wall <= 0 || e.MaxRSS <= 0 {
		t.Errorf("exit %+v", e)
	}
	out, e = h.run(sh("kill -TERM $$"))
	if !e.Status.Signaled() || e.Status.Signal() != syscall.SIGTERM {
		t.Errorf("exit %+v, output %q", e, out)
	}
}

// warmth is every way to a set-up: in one go, and prepared before there is a root.
func warmth(t *testing.T, test func(t *testing.T, warm bool)) {
	t.Run("in one go", func(t *testing.T) { test(t, false) })
	t.Run("prepared", func(t *testing.T) { test(t, true) })
}

func TestSetUpTellsWhatIsInForce(t *testing.T) {
	b := rawbox.Start(t, rawbox.Options{})
	c := wire.New(b.Control)
	defer c.Close()
	got, err := c.Setup(ctx(t), wire.Setup{
		Hostname: "there", OpenFiles: 77, NoNewPrivs: true, Caps: wire.DefaultCaps &^ 1, Filter: allowAll,
	})
	if err != nil {
		t.Fatal(err)
	}
	want := chronus.InForce{
		Version: wire.Version, Seccomp: true, Caps: wire.DefaultCaps &^ 1, UserNS: true, NoNewPrivs: true,
		Masks: got.Masks, OpenFiles: 77, Terminals: true, Shells: true,
	}
	if got != want || got.Masks < 10 {
		t.Errorf("got %+v, want %+v", got, want)
	}
	again, list, err := c.Hello(ctx(t))
	if err != nil || again != got || len(list) != 0 {
		t.Errorf("greeting: %+v, %v, %v", again, list, err)
	}
}

// allowAll is a program of one instruction: return ALLOW.
var allowAll = []byte{6, 0, 0, 0, 0, 0, 0xff, 0x7f}

func TestTheSandboxAsACommandSeesIt(t *testing.T) { warmth(t, seenFromInside) }

func seenFromInside(t *testing.T, warm bool) {
	h := start(t, rawbox.Options{Warm: warm, Setup: func(s *wire.Setup) {
		s.OpenFiles = 333
		s.VisibleCPUs = 3
		s.CPUs = []int{0}
		s.ShmBytes = 1 << 20
		s.Resolver = netip.MustParseAddr("100.64.0.1")
	}})
	user := func(script string) chronus.Spawn { return asUser(sh(script)) }
	for _, c := range []struct {
		name  string
		spawn chronus.Spawn
		want  string
		exit  int
	}{
		{"its name", sh("hostname"), "box", 0},
		{"its root is its own", sh("ls /"), "bin\ndev\netc\nhome\nproc\nroot\nsys\ntmp", 0},
		{"root's ids", sh("id"), "uid=0(root) gid=0(root)", 0},
		{"a user's ids", user("id"), "uid=1000(user) gid=1000(user) groups=1000(user),2000(extra)", 0},
		{
			"a user's capabilities", user("grep -E 'Cap(Inh|Prm|Eff|Amb)' /proc/self/status"),
			"CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapAmb:\t0000000000000000", 0,
		},
		{
			"root's capabilities", sh("grep -E 'Cap' /proc/self/status"),
			"CapInh:\t0000000000000000\nCapPrm:\t00000000a80425fb\nCapEff:\t00000000a80425fb\nCapBnd:\t00000000a80425fb\n" +
				"CapAmb:\t0000000000000000", 0,
		},
		{"the filter and no more", sh("grep -E 'Seccomp:|NoNewPrivs' /proc/self/status"), "NoNewPrivs:\t0\nSeccomp:\t2", 0},
		{
			"signals are as new", argv("grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"),
			"SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000", 0,
		},
		{"the limits", sh("ulimit -n; ulimit -Hn; ulimit -c; ulimit -Hc; umask"), "333\n333\n0\n0\n0022", 0},
		{"three descriptors", argv("ls", "/proc/self/fd"), "0\n1\n2\n3", 0}, // 3 is the directory that ls reads
		{
			"the processors", sh("cat /sys/devices/system/cpu/online; nproc; grep Cpus_allowed_list /proc/self/status"),
			"0-2\n1\nCpus_allowed_list:\t0", 0,
		},
		{"a session of its own", sh("set -- $(cat /proc/self/stat); test $6 != 0 && echo yes"), "yes", 0},
		// PID 1, shells, ls and grep, and nobody else: the pipe's other end may not be there yet.
		{"only its own processes", sh("n=$(ls /proc | grep -c '^[0-9]'); test $n -ge 3 && test $n -le 5 && echo yes"), "yes", 0},
		{"its resolver", sh("cat /etc/resolv.conf; ls -l /etc/resolv.conf | cut -c1-10"), "nameserver 100.64.0.1\noptions timeout:1 attempts:5\n-rw-r--r--", 0},
		{"loopback is up and alone", sh("ip -o addr | grep -c 'inet 127.0.0.1'; ip -o link | wc -l"), "1\n1", 0},
		{
			"masked files are empty",
			sh("cd /proc; for f in kcore keys key-users kmsg kallsyms interrupts timer_list sched_debug " +
				"kpagecount kpageflags kpagecgroup sysrq-trigger vmallocinfo zoneinfo; do test ! -e $f || cat $f; done | wc -c"),
			"0", 0,
		},
		{"masked directories are empty", sh("ls -A /sys/firmware /sys/kernel /proc/driver | grep -v -e : -e '^$'"), "", 1},
		{
			"no sysctl can be set", sh("echo 1 > /proc/sys/kernel/pid_max"),
			"sh: can't create /proc/sys/kernel/pid_max: Read-only file system", 1,
		},
		{
			"sysfs is read-only", sh("touch /sys/x; mkdir /sys/devices/y"),
			"touch: /sys/x: Read-only file system\nmkdir: can't create directory '/sys/devices/y': Read-only file system", 1,
		},
		{
			"devices work", sh("echo x > /dev/null; head -c 3 /dev/zero | od -An -tx1; head -c 4 /dev/urandom | wc -c"),
			"00 00 00\n4", 0,
		},
		{"no devices can be added", sh("touch /dev/x"), "touch: /dev/x: Read-only file system", 1},
		{
			"shared memory is bounded",
			sh("cd /dev/shm; dd if=/dev/zero of=big bs=1024 count=2048 2>&1 | grep -c 'No space'; rm big; ls -A"), "1", 0,
		},
		{"shared memory is everybody's", user("echo hi > /dev/shm/f && cat /dev/shm/f; rm /dev/shm/f"), "hi", 0},
		{"a terminal can be made", sh("exec 3<>/dev/ptmx && ls /dev/pts"), "0\nptmx", 0},
		{"no cgroup file is there", sh("cat /proc/self/cgroup | grep '^0:'; ls -A /sys/fs/cgroup"), "", 0},
		{"nothing of the nursery is left", sh("grep -E ' /(mnt|init)|nursery' /proc/self/mountinfo"), "", 1},
		{"mounting is refused", sh("mount -t tmpfs none /tmp"), "mount: permission denied (are you root?)", 1},
		{
			"the stage shows nothing but shared memory, and that once",
			sh("grep -c ' /shm /dev/shm ' /proc/self/mountinfo; grep -E ' /(root|proc|dev) /' /proc/self/mountinfo"), "1", 1,
		},
		{
			"nothing lies over the root", sh("ls -d /../bin /proc/self/root/../bin; ls /../init"),
			"/../bin\n/proc/self/root/../bin\nls: /../init: No such file or directory", 1,
		},
		{"unmounting is refused", sh("umount /proc"), "umount: can't unmount /proc: Operation not permitted", 1},
		{"no user namespace in it", sh("unshare -U true"), "unshare: unshare(0x10000000): Operation not permitted", 1},
		{"no set-up is left to a user", user("hostname other"), "hostname: sethostname: Operation not permitted", 1},
		{"the umask of the request", func() chronus.Spawn { s := sh("umask"); s.Umask = 0o077; return s }(), "0077", 0},
		{
			"the directory of the request", func() chronus.Spawn { s := user("pwd"); s.Cwd = "/home/user"; return s }(),
			"/home/user", 0,
		},
		{
			"the environment and no more", func() chronus.Spawn {
				s := argv("env")
				s.Env = []string{
					"PATH=/bin", "A=1",
					"A=2", "odd",
				}
				return s
			}(),
			"PATH=/bin\nA=1\nA=2\nodd", 0,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, e := h.run(c.spawn)
			if c.name == "no cgroup file is there" {
				if !strings.HasPrefix(out, "0::/e") || strings.Contains(out, "sandsea") || strings.Contains(out, "\n") {
					t.Errorf("got %q", out)
				}
				return
			}
			if out != c.want || !e.Status.Exited() || e.Status.ExitStatus() != c.exit {
				t.Errorf("got %q, exit %#x; want %q, %d", out, e.Status, c.want, c.exit)
			}
		})
	}
}

func TestStartsThatFailSayWhere(t *testing.T) {
	h := start(t, rawbox.Options{Populate: func(root string) error {
		return errors.Join(
			os.WriteFile(root+"/bin/plain", []byte("no program"), 0o755),
			os.WriteFile(root+"/bin/locked", []byte("#!/bin/sh\n"), 0o644),
			os.WriteFile(root+"/bin/script", []byte("#!/no/such/interpreter\n"), 0o755),
			os.Symlink("nowhere", root+"/bin/dangling"),
			os.Mkdir(root+"/closed", 0o700),
		)
	}})
	in := func(dir string, s chronus.Spawn) chronus.Spawn { s.Cwd = dir; return s }
	ids := func(uid, gid uint32, s chronus.Spawn) chronus.Spawn {
		s.IDs = chronus.IDs{UID: uid, GID: gid}
		return s
	}
	for _, c := range []struct {
		name  string
		spawn chronus.Spawn
		want  chronus.StartError
	}{
		{"an unknown program", argv("nonsuch"), chronus.StartError{Step: chronus.StepExec, Errno: syscall.ENOENT}},
		{"an unknown path", argv("/bin/nonsuch"), chronus.StartError{Step: chronus.StepExec, Errno: syscall.ENOENT}},
		{"no name at all", argv(""), chronus.StartError{Step: chronus.StepExec, Errno: syscall.ENOENT}},
		{"a dangling link", argv("/bin/dangling"), chronus.StartError{Step: chronus.StepExec, Errno: syscall.ENOENT}},
		{"not executable", argv("locked"), chronus.StartError{Step: chronus.StepExec, Errno: syscall.EACCES}},
		{"a directory", argv("/bin"), chronus.StartError{Step: chronus.StepExec, Errno: syscall.EACCES}},
		{"no known format", argv("plain"), chronus.StartError{Step: chronus.StepExec, Errno: syscall.ENOEXEC}},
		{
			"a missing interpreter", argv("/bin/script"),
			chronus.StartError{Step: chronus.StepExec, Errno: syscall.ENOENT, Interpreter: true},
		},
		{
			"a missing interpreter, searched", argv("script"),
			chronus.StartError{Step: chronus.StepExec, Errno: syscall.ENOENT, Interpreter: true},
		},
		{"a long name", argv(strings.Repeat("n", 256)), chronus.StartError{
			Step:  chronus.StepExec,
			Errno: syscall.ENAMETOOLONG,
		}},
		{"a missing directory", in("/nowhere", argv("true")), chronus.StartError{
			Step:  chronus.StepCwd,
			Errno: syscall.ENOENT,
		}},
		{"a directory that is a file", in("/bin/sh", argv("true")), chronus.StartError{
			Step:  chronus.StepCwd,
			Errno: syscall.ENOTDIR,
		}},
		{
			"a descriptor as directory", in("/proc/self/fd/3", argv("true")),
			chronus.StartError{Step: chronus.StepCwd, Errno: syscall.ENOTDIR},
		},
		{
			"a directory through the line to PID 1", in("/proc/1/root", asUser(argv("true"))),
			chronus.StartError{Step: chronus.StepCwd, Errno: syscall.EACCES},
		},
		{
			"a directory that the user may not enter", in("/closed", asUser(argv("true"))),
			chronus.StartError{Step: chronus.StepCwd, Errno: syscall.EACCES},
		},
		{"a user out of range", ids(70000, 0, argv("true")), chronus.StartError{
			Step:  chronus.StepUser,
			Errno: syscall.EINVAL,
		}},
		{"a group out of range", ids(0, 70000, argv("true")), chronus.StartError{
			Step:  chronus.StepUser,
			Errno: syscall.EINVAL,
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cgroup := h.box.Exec(t)
			_, out, err := h.spawn(c.spawn, cgroup)
			if got := startError(t, err); *got != c.want {
				t.Errorf("got %+v, want %+v", *got, c.want)
			}
			<-out // every copy of the pipe's end is closed
			// The child is gone, so its group can go at once.
			if err := syscall.Rmdir(cgroup.Name()); err != nil {
				t.Errorf("remove its control group: %v", err)
			}
		})
	}
	t.Run("a control group that is none", func(t *testing.T) {
		f, err := os.Open("/")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		_, _, err = h.spawn(argv("true"), f)
		if got := startError(t, err); got.Step != chronus.StepCgroup {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a control group of somebody else", func(t *testing.T) {
		dir := h.box.Dir + "/foreign"
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		_, _, err = h.spawn(argv("true"), f)
		if got := startError(t, err); got.Step != chronus.StepCgroup || got.Errno != syscall.EACCES {
			t.Errorf("got %+v", got)
		}
	})
	if out, e := h.run(sh("echo still here")); out != "still here" || e.Status != 0 {
		t.Errorf("afterwards: %q, %#x", out, e.Status)
	}
}

func TestSetUserIDProgramsWorkUnlessForbidden(t *testing.T) {
	for _, c := range []struct {
		name   string
		forbid bool
		want   string
	}{
		{"as a rule", false, "1000 0"},
		{"without new privileges", true, "1000 1000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := start(t, rawbox.Options{
				Populate: withHelper(t, 0o755|os.ModeSetuid),
				Setup:    func(s *wire.Setup) { s.NoNewPrivs = c.forbid },
			})
			if out, _ := h.run(asUser(helper("ids"))); out != c.want {
				t.Errorf("real and effective user %q, want %q", out, c.want)
			}
		})
	}
}

func TestCallsThatAreRefused(t *testing.T) {
	h := start(t, rawbox.Options{Populate: withHelper(t, 0o755)})
	for _, c := range []struct {
		call, want string
	}{
		{"ptrace-attach-1", "operation not permitted"},
		{"ptrace-seize-1", "operation not permitted"},
		{"process-vm-readv-1", "operation not permitted"},
		{"pidfd-getfd-1", "operation not permitted"},
		{"prlimit-1", "operation not permitted"},
		{"kcmp-1", "operation not permitted"},
		{"io-uring-setup", "operation not permitted"},
		{"keyctl", "operation not permitted"},
		{"add-key", "operation not permitted"},
		{"bpf", "operation not permitted"},
		{"userfaultfd", "operation not permitted"},
		{"mount", "operation not permitted"},
		{"unshare-user", "operation not permitted"},
		{"clone-user", "operation not permitted"},
		{"clone3", "function not implemented"},
		{"nf-socket", "operation not permitted"},
		{"swapext", "operation not permitted"},
		{"swapext-high", "operation not permitted"},
		{"tiocsti-high", "operation not permitted"},
		{"future-call", "function not implemented"},
		{"x32-getpid", "function not implemented"},
		{"plain-ioctl", "inappropriate ioctl for device"},
		{"getpid", "none"},
	} {
		t.Run(c.call, func(t *testing.T) {
			if out, e := h.run(helper(c.call)); out != c.want {
				t.Errorf("got %q (%#x), want %q", out, e.Status, c.want)
			}
		})
	}
}

func TestSignals(t *testing.T) {
	h := start(t, rawbox.Options{})
	number, out, err := h.spawn(sh("trap 'echo got; exit 3' USR1; echo up; while :; do sleep 0.05; done"), h.box.Exec(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := h.line.Signal(ctx(t), number, 0); err != nil {
		t.Error(err)
	}
	// The trap may not be set yet, in which case the signal ends the shell: either way its end is told.
	if err := h.line.Signal(ctx(t), number, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	e := h.wait(number)
	text := <-out
	if trapped := text == "up\ngot\n"; trapped && e.Status.ExitStatus() != 3 ||
		!trapped && e.Status.Signal() != syscall.SIGUSR1 {
		t.Errorf("output %q, exit %#x", text, e.Status)
	}
	if err := h.line.Signal(ctx(t), number, syscall.SIGTERM); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("signal after the end: %v", err)
	}
	if err := h.line.Signal(ctx(t), 999, syscall.SIGTERM); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("signal to nobody: %v", err)
	}
	if err := h.line.Signal(ctx(t), number, 65); !errors.Is(err, errdefs.Invalid) {
		t.Errorf("no such signal: %v", err)
	}
	// A process that init has already reaped but that nobody acknowledged is gone as well.
	number, out, err = h.spawn(argv("true"), h.box.Exec(t))
	if err != nil {
		t.Fatal(err)
	}
	<-out
	e = <-h.end(number)
	if err := h.line.Signal(ctx(t), number, syscall.SIGTERM); !errors.Is(err, errdefs.NotFound) || e.Status != 0 {
		t.Errorf("signal before the acknowledgement: %v, exit %+v", err, e)
	}
	if err := h.line.Ack(number); err != nil {
		t.Error(err)
	}
	if err := h.line.Ack(number); err != nil {
		t.Errorf("a second acknowledgement: %v", err)
	}
}

func TestANewEdgeIsToldEverything(t *testing.T) {
	h := start(t, rawbox.Options{})
	sleeper, _, err := h.spawn(sh("sleep 1000"), h.box.Exec(t))
	if err != nil {
		t.Fatal(err)
	}
	gone, _, err := h.spawn(sh("exit 5"), h.box.Exec(t))
	if err != nil {
		t.Fatal(err)
	}
	<-h.end(gone)
	h.line.Close()

	// Meanwhile nobody reads.
	second := wire.New(h.box.Control)
	defer second.Close()
	facts, list, err := second.Hello(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	if !facts.Seccomp || !facts.UserNS || facts.Caps != wire.DefaultCaps {
		t.Errorf("facts %+v", facts)
	}
	if len(list) != 2 || list[0].Number != sleeper || list[0].Exited || list[0].Pid <= 1 || list[1].Number != gone ||
		!list[1].Exited || list[1].Exit.Status.ExitStatus() != 5 {
		t.Errorf("list %+v", list)
	}
	for e, err := range second.Exits() { // told again behind the greeting
		if err != nil || e.Number != gone {
			t.Errorf("exit %+v, %v", e, err)
		}
		break
	}
	// A start of a known number answers its state and starts nothing.
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	io := chronus.Stdio{Cgroup: h.box.Exec(t), In: null, Out: null}
	for _, number := range []int64{sleeper, gone} {
		again := sh("echo must not run > /ran")
		again.Number = number
		if pid, err := second.Spawn(ctx(t), again, io); err != nil || pid <= 1 {
			t.Errorf("start of %d again: %d, %v", number, pid, err)
		}
	}
	if err := second.Ack(gone); err != nil {
		t.Error(err)
	}
	if err := second.Ack(sleeper); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("acknowledging what runs: %v", err)
	}
	h.attach(second)
	if out, _ := h.run(sh("ls /ran")); !strings.Contains(out, "No such file") {
		t.Errorf("it was started twice: %q", out)
	}
	if err := second.Signal(ctx(t), sleeper, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	if e := h.wait(sleeper); e.Status.Signal() != syscall.SIGKILL {
		t.Errorf("exit %#x", e.Status)
	}
	third := wire.New(h.box.Control)
	second.Close()
	defer third.Close()
	if _, list, err := third.Hello(ctx(t)); err != nil || len(list) != 0 {
		t.Errorf("what was acknowledged is listed: %+v, %v", list, err)
	}
}

func TestOrphansAreReapedInSilence(t *testing.T) {
	h := start(t, rawbox.Options{})
	out, e := h.run(sh("for i in 1 2 3 4 5; do (sh -c 'sleep 0.02' & ) ; done; (exit 9) & wait $!; exit $?"))
	if e.Status.ExitStatus() != 9 {
		t.Errorf("exit %#x, %q", e.Status, out)
	}
	// ps itself, its shell, PID 1 and the header: nothing is left, dead or alive.
	if !wait.For(limit, func() bool {
		out, _ = h.run(sh("ps -o pid,stat,args | grep -v -E 'ps|sh -c' | wc -l"))
		return out == "4" || out == "3" || out == "2"
	}) {
		out, _ = h.run(argv("ps"))
		t.Errorf("left:\n%s", out)
	}
	out, _ = h.run(sh("ps -o stat | grep -c Z"))
	if out != "0" {
		t.Errorf("%s zombies", out)
	}
}

func TestManyAtOnce(t *testing.T) {
	h := start(t, rawbox.Options{})
	cgroup := h.box.Exec(t)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			number, out, err := h.spawn(sh("sleep 0.1; exit "+strconv.Itoa(i)), cgroup)
			if err != nil {
				t.Errorf("%d: %v", i, err)
				return
			}
			if e := h.wait(number); e.Status.ExitStatus() != i {
				t.Errorf("%d: exit %#x", i, e.Status)
			}
			<-out
		})
	}
	wg.Wait()
}

func TestNoExitIsLost(t *testing.T) {
	const runs, workers = 2000, 8
	h := start(t, rawbox.Options{})
	cgroup := h.box.Exec(t)
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	begin := time.Now()
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range runs / workers {
				s := argv("/bin/true")
				want := 0
				if (i+w)%7 == 0 {
					s, want = argv("/bin/false"), 1
				}
				s.Number = h.next()
				if _, err := h.line.Spawn(ctx(t), s, chronus.Stdio{Cgroup: cgroup, In: null, Out: null}); err != nil {
					t.Error(err)
					return
				}
				if e := h.wait(s.Number); e.Status.ExitStatus() != want || !e.Status.Exited() {
					t.Errorf("exit %#x, want %d", e.Status, want)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d commands, %.2f ms each", runs, float64(time.Since(begin).Microseconds())/1000/runs)
}

func TestSlotsAreBounded(t *testing.T) {
	h := start(t, rawbox.Options{})
	cgroup := h.box.Exec(t)
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	io := chronus.Stdio{Cgroup: cgroup, In: null, Out: null}
	// Exits that nobody acknowledges fill the slots as well as what runs.
	for range 1024 {
		s := argv("/bin/true")
		s.Number = h.next()
		if _, err := h.line.Spawn(ctx(t), s, io); err != nil {
			t.Fatal(err)
		}
	}
	s := argv("/bin/true")
	s.Number = h.next()
	_, err = h.line.Spawn(ctx(t), s, io)
	if got := startError(t, err); *got != (chronus.StartError{Step: chronus.StepFork, Errno: syscall.EAGAIN}) {
		t.Errorf("got %+v", got)
	}
	second := wire.New(h.box.Control)
	defer second.Close()
	h.line.Close()
	_, list, err := second.Hello(ctx(t))
	if err != nil || len(list) != 1024 {
		t.Fatalf("listed %d, %v", len(list), err)
	}
	seen := map[int64]bool{}
	for e, err := range second.Exits() {
		if err != nil || e.Status != 0 || seen[e.Number] {
			t.Fatalf("exit %+v, %v", e, err)
		}
		seen[e.Number] = true
		if err := second.Ack(e.Number); err != nil {
			t.Fatal(err)
		}
		if len(seen) == 1024 {
			break
		}
	}
	if _, err := second.Spawn(ctx(t), s, io); err != nil {
		t.Errorf("after the acknowledgements: %v", err)
	}
}

func TestAStoppedChildHoldsUpNobody(t *testing.T) {
	h := start(t, rawbox.Options{})
	stopped, _, err := h.spawn(sh("kill -STOP $$; exit 4"), h.box.Exec(t))
	if err != nil {
		t.Fatal(err)
	}
	if !wait.For(limit, func() bool {
		out, _ := h.run(sh("ps -o stat,args | grep -c '^T'"))
		return out == "1"
	}) {
		t.Fatal("it does not stop")
	}
	select {
	case e := <-h.end(stopped):
		t.Errorf("a stop is told as an end: %+v", e)
	default:
	}
	if err := h.line.Signal(ctx(t), stopped, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if e := h.wait(stopped); e.Status.ExitStatus() != 4 {
		t.Errorf("exit %#x", e.Status)
	}
}

func TestNothingInsideReachesPID1(t *testing.T) {
	h := start(t, rawbox.Options{})
	for _, path := range []string{
		"mem", "environ", "maps", "smaps", "auxv", "exe", "root", "cwd", "fd", "fdinfo", "ns/user", "ns/mnt", "syscall",
		"stack", "io",
		"pagemap", "personality", "map_files", "task/1/mem", "task/1/fd", "clear_refs", "timers", "patch_state",
	} {
		out, e := h.run(sh("f=/proc/1/" + path + "; if test -L $f; then readlink $f; elif test -d $f" +
			"; then ls /proc/1/" + path + "; else head -c 1 /proc/1/" + path + " > /tmp/byte; fi"))
		if e.Status.Exited() && e.Status.ExitStatus() == 0 {
			t.Errorf("root reads /proc/1/%s: %q", path, out)
		}
	}
	for _, c := range []string{
		"echo 1000 > /proc/1/oom_score_adj", "echo x > /proc/1/comm", "echo 1 > /proc/1/clear_refs",
		"echo 0 > /proc/1/coredump_filter",
		"echo 0 0 1 > /proc/1/uid_map", "echo x > /proc/1/mem", "cp /bin/true /proc/1/exe", "echo 1 > /proc/1/autogroup",
	} {
		if out, e := h.run(sh(c)); e.Status.ExitStatus() == 0 {
			t.Errorf("root may %s: %q", c, out)
		}
	}
	for sig := 1; sig <= 64; sig++ {
		if sig == 32 || sig == 33 {
			continue // the shell has no name for them
		}
		h.run(sh("kill -" + strconv.Itoa(sig) + " 1"))
	}
	h.run(sh("kill -9 -1"))
	if out, e := h.run(sh("echo alive")); out != "alive" || e.Status != 0 {
		t.Errorf("afterwards: %q, %#x", out, e.Status)
	}
}

func TestNobodyHoldsTheLineSoEverythingEnds(t *testing.T) {
	h := start(t, rawbox.Options{})
	_, out, err := h.spawn(sh("trap '' TERM HUP; (setsid sh -c 'sleep 1000' &); sleep 1000"), h.box.Exec(t))
	if err != nil {
		t.Fatal(err)
	}
	h.line.Close()
	h.box.Control.Close()
	if ws := h.box.Wait(t, limit); !ws.Exited() || ws.ExitStatus() != 10 {
		t.Errorf("PID 1 ended with %#x, want exit 10", ws)
	}
	<-out // every process that held the pipe is gone
}

func TestWhoBreaksTheContractEndsTheSandbox(t *testing.T) {
	message := func(kind, at int, b byte) []byte {
		m := make([]byte, 64)
		m[0], m[2] = wire.Version, byte(kind)
		if at > 0 {
			m[at] = b
		}
		return m
	}
	for _, c := range []struct {
		name  string
		bytes []byte
	}{
		{"a short message", make([]byte, 63)},
		{"a long message", make([]byte, 65)},
		{"another version", append([]byte{9}, message(1, 0, 0)[1:]...)},
		{"an unknown kind", message(77, 0, 0)},
		{"a reserved kind", message(8, 0, 0)},
		{"a terminal with padding", message(5, 60, 1)},
		{"a terminal with a number", message(5, 8, 1)},
		{"an answer", message(129, 0, 0)},
		{"a second set-up", message(2, 0, 0)},
		{"a start without number", message(3, 0, 0)},
		{"a start without descriptors", message(3, 8, 1)},
		{"a negative number", message(7, 15, 0x80)},
		{"a greeting with padding", message(1, 60, 1)},
		{"a signal that there is not", func() []byte { m := message(6, 8, 1); m[16] = 65; return m }()},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := rawbox.Start(t, rawbox.Options{})
			b.Open(t)
			conn, err := scm.New(b.Control)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := conn.Send(ctx(t), c.bytes); err != nil {
				t.Fatal(err)
			}
			if ws := b.Wait(t, limit); !ws.Exited() || ws.ExitStatus() != 11 {
				t.Errorf("PID 1 ended with %#x, want exit 11", ws)
			}
		})
	}
}

func TestWhoBreaksTheContractOfPreparationEndsTheSandbox(t *testing.T) {
	prepare := func() []byte {
		m := make([]byte, 64)
		m[0], m[2] = wire.Version, 10
		return m
	}
	root, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for _, c := range []struct {
		name string
		warm bool
		act  func(t *testing.T, line *wire.Channel, conn *scm.Conn)
	}{
		{"a second preparation", true, func(t *testing.T, line *wire.Channel, _ *scm.Conn) {
			if err := line.Prepare(ctx(t)); err != nil {
				t.Fatal(err)
			}
			if err := line.Prepare(ctx(t)); !errors.Is(err, errdefs.Unavailable) {
				t.Errorf("got %v", err)
			}
		}},
		{"a preparation with padding", true, func(t *testing.T, _ *wire.Channel, conn *scm.Conn) {
			m := prepare()
			m[63] = 1
			if err := conn.Send(ctx(t), m); err != nil {
				t.Fatal(err)
			}
		}},
		{"a preparation with a descriptor", true, func(t *testing.T, _ *wire.Channel, conn *scm.Conn) {
			if err := conn.Send(ctx(t), prepare(), root); err != nil {
				t.Fatal(err)
			}
		}},
		{"a set-up without a root", true, func(t *testing.T, line *wire.Channel, _ *scm.Conn) {
			if _, err := line.Setup(ctx(t), wire.Setup{}); !errors.Is(err, errdefs.Unavailable) {
				t.Errorf("got %v", err)
			}
		}},
		{"a set-up with a second root", false, func(t *testing.T, line *wire.Channel, _ *scm.Conn) {
			if _, err := line.Setup(ctx(t), wire.Setup{Root: root}); !errors.Is(err, errdefs.Unavailable) {
				t.Errorf("got %v", err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := rawbox.Start(t, rawbox.Options{Warm: c.warm})
			line := wire.New(b.Control)
			defer line.Close()
			dup, err := syscall.Dup(int(b.Control.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			conn, err := scm.New(os.NewFile(uintptr(dup), "control"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			c.act(t, line, conn)
			if ws := b.Wait(t, limit); !ws.Exited() || ws.ExitStatus() != 11 {
				t.Errorf("PID 1 ended with %#x, want exit 11", ws)
			}
		})
	}
	t.Run("nobody holds the line of one that is prepared", func(t *testing.T) {
		b := rawbox.Start(t, rawbox.Options{Warm: true})
		line := wire.New(b.Control)
		if err := line.Prepare(ctx(t)); err != nil {
			t.Fatal(err)
		}
		line.Close()
		b.Control.Close()
		if ws := b.Wait(t, limit); !ws.Exited() || ws.ExitStatus() != 10 {
			t.Errorf("PID 1 ended with %#x, want exit 10", ws)
		}
	})
}

func TestRootFileSystemsThatDoNotStart(t *testing.T) {
	link := func(name string) func(string) error {
		return func(root string) error { return os.Symlink("/etc", root+"/"+name) }
	}
	for _, c := range []struct {
		name     string
		populate func(string) error
		step     string
	}{
		{"dev is a link", link("dev"), "/dev"},
		{"proc is a link", link("proc"), "/proc"},
		{"sys is a link", link("sys"), "/sys"},
		{"proc is a file", func(root string) error { return os.WriteFile(root+"/proc", nil, 0o644) }, "/proc"},
	} {
		warmth(t, func(t *testing.T, warm bool) {
			b := rawbox.Start(t, rawbox.Options{Populate: c.populate, Warm: warm})
			line := wire.New(b.Control)
			defer line.Close()
			if warm {
				if err := line.Prepare(ctx(t)); err != nil {
					t.Fatal(err)
				}
			}
			_, err := line.Setup(ctx(t), wire.Setup{Caps: wire.DefaultCaps, Root: b.Root()})
			step, ok := errors.AsType[*wire.SetupError](err)
			if !ok || step.Step != c.step || !errors.Is(err, errdefs.FailedPrecondition) {
				t.Errorf("%s: got %v", c.name, err)
			}
			if ws := b.Wait(t, limit); ws.ExitStatus() != 12 {
				t.Errorf("PID 1 ended with %#x, want exit 12", ws)
			}
		})
	}
	t.Run("what does not depend on the root is told by itself", func(t *testing.T) {
		b := rawbox.Start(t, rawbox.Options{Warm: true, NoDev: true})
		line := wire.New(b.Control)
		defer line.Close()
		step, ok := errors.AsType[*wire.SetupError](line.Prepare(ctx(t)))
		if !ok || step.Step != "/dev" {
			t.Errorf("got %v", step)
		}
	})
	t.Run("more open files than there may be", func(t *testing.T) {
		b := rawbox.Start(t, rawbox.Options{})
		line := wire.New(b.Control)
		defer line.Close()
		_, err := line.Setup(ctx(t), wire.Setup{OpenFiles: 1 << 40})
		if step, ok := errors.AsType[*wire.SetupError](err); !ok || step.Step != "open files" {
			t.Errorf("got %v", err)
		}
	})
	t.Run("sysfs of its own", func(t *testing.T) {
		h := start(t, rawbox.Options{NoSys: true, Warm: true})
		if out, _ := h.run(sh("ls /sys/class/net; touch /sys/x")); out != "lo\ntouch: /sys/x: Read-only file system" {
			t.Errorf("got %q", out)
		}
	})
	t.Run("a device node of the image is a name and no more", func(t *testing.T) {
		h := start(t, rawbox.Options{Populate: func(root string) error {
			return syscall.Mknod(root+"/zero", syscall.S_IFCHR|0o666, 1<<8|5)
		}})
		if out, _ := h.run(sh("head -c 1 /zero")); !strings.Contains(out, "Permission denied") {
			t.Errorf("got %q", out)
		}
	})
}

func TestCapabilitiesInsideDoNotReachPID1Either(t *testing.T) {
	const sysPtrace = 1 << 19
	h := start(t, rawbox.Options{
		Populate: withHelper(t, 0o755),
		Setup: func(s *wire.Setup) {
			s.Caps |= sysPtrace
			s.Filter = nil
		},
	})
	for _, call := range []string{
		"ptrace-attach-1", "ptrace-seize-1", "process-vm-readv-1", "pidfd-getfd-1", "kcmp-1",
		"prlimit-1",
	} {
		if out, _ := h.run(helper(call)); out != "operation not permitted" {
			t.Errorf("%s: %q", call, out)
		}
	}
	for _, path := range []string{"mem", "environ", "maps", "exe", "fd/3", "root", "cwd"} {
		if out, e := h.run(sh("cat /proc/1/" + path + " > /dev/null || readlink /proc/1/" + path)); e.Status == 0 {
			t.Errorf("/proc/1/%s: %q", path, out)
		}
	}
}

func TestAFileHelperHasTheRightsOfItsUserAndNoMore(t *testing.T) {
	h := start(t, rawbox.Options{})
	helpers := func() string {
		out, _ := h.run(sh("cd /proc; for p in [0-9]*; do grep -q '^Name:.sandsea-files' $p/status 2>/dev/null && " +
			"grep -E '^(Uid|Gid|Groups|CapPrm|CapEff|Seccomp|NoNewPrivs|SigBlk):' $p/status; done"))
		return out
	}
	for _, c := range []struct {
		name string
		ids  chronus.IDs
		want []string
	}{
		{"root", chronus.IDs{}, []string{
			"Uid:\t0\t0\t0\t0", "Gid:\t0\t0\t0\t0", "Groups:\t ", "SigBlk:\t0000000000000000", "CapPrm:\t00000000a80425fb",
			"CapEff:\t00000000a80425fb", "NoNewPrivs:\t1", "Seccomp:\t2",
		}},
		{"a user", chronus.IDs{UID: 1000, GID: 1001, Groups: []uint32{1001, 2000}}, []string{
			"Uid:\t1000\t1000\t1000\t1000", "Gid:\t1001\t1001\t1001\t1001", "Groups:\t1001 2000 ", "SigBlk:\t0000000000000000",
			"CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := h.line.ServeFiles(ctx(t), c.ids)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			want := strings.Join(c.want, "\n")
			got := ""
			if !wait.For(limit, func() bool { got = helpers(); return got == want }) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if out, e := h.run(sh("for p in /proc/[0-9]*; do grep -q '^Name:.sandsea-files' $p/status && " +
				"ls $p/fd && cat $p/environ && exit 0; done; exit 1")); e.Status.ExitStatus() == 0 {
				t.Errorf("root reads the helper: %q", out)
			}
			f.Close()
			if !wait.For(limit, func() bool { return helpers() == "" }) {
				t.Error("it lives on without its socket")
			}
		})
	}
	t.Run("rights that cannot be taken", func(t *testing.T) {
		f, err := h.line.ServeFiles(ctx(t), chronus.IDs{UID: 70000})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := scm.New(f)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, _, err := conn.Recv(ctx(t), make([]byte, 64)); !errors.Is(err, io.EOF) {
			t.Errorf("got %v", err)
		}
	})
}

func TestSetUpIsQuick(t *testing.T) {
	var took []time.Duration
	for range 20 {
		b := rawbox.Start(t, rawbox.Options{})
		begin := time.Now()
		b.Open(t)
		took = append(took, time.Since(begin))
		if err := b.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(took)
	t.Logf("set-up with its filter: median %s, longest %s", took[10], took[19])
	// What else the machine does makes some slow, never all.
	if took[2] > 50*time.Millisecond {
		t.Errorf("set-up takes %s", took[2])
	}
}

func TestAPausedSandboxAnswersWhenItGoesOn(t *testing.T) {
	h := start(t, rawbox.Options{})
	freeze := func(v string) {
		if err := os.WriteFile(h.box.Dir+"/cgroup.freeze", []byte(v), 0); err != nil {
			t.Fatal(err)
		}
	}
	freeze("1")
	if !wait.For(limit, func() bool {
		b, _ := os.ReadFile(h.box.Dir + "/cgroup.events")
		return strings.Contains(string(b), "frozen 1")
	}) {
		t.Fatal("it does not freeze")
	}
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	s := argv("true")
	s.Number = h.next()
	stdio := chronus.Stdio{Cgroup: h.box.Exec(t), In: null, Out: null}
	short, stop := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer stop()
	_, err = h.line.Spawn(short, s, stdio)
	if !errors.Is(err, errdefs.Unknown) {
		t.Errorf("got %v, want that nobody knows", err)
	}
	freeze("0")
	if e := h.wait(s.Number); e.Status != 0 {
		t.Errorf("exit %+v", e)
	}
}

// le32 puts little-endian words one behind the other.
func le32(words ...uint32) []byte {
	var b []byte
	for _, w := range words {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return b
}

func TestSpecsAndPlansAreReadWithinTheirBounds(t *testing.T) {
	const magic = 0x43505353
	// spec makes a memfd of a head, a body, and a size that may lie.
	spec := func(size int, ngroups, argc, envc uint32, body string) []byte {
		b := le32(magic, wire.Version, uint32(size), 0o22, 0, 0, ngroups, argc, envc, 0, 0, 0, 0, 0, 0, 0)
		return append(b, body...)
	}
	const good = "/bin/true\x00/\x00"
	b := rawbox.Start(t, rawbox.Options{})
	line := b.Open(t)
	conn, err := scm.New(b.Control)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	line.Close()
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	cgroup := b.Exec(t)
	number := byte(0)
	spawn := func(t *testing.T, f *os.File) []byte {
		t.Helper()
		number++
		m := make([]byte, 64)
		m[0], m[2], m[8] = wire.Version, 3, number
		if err := conn.Send(ctx(t), m, f, cgroup, null, null); err != nil {
			t.Fatal(err)
		}
		answer := make([]byte, 64)
		for {
			if _, _, err := conn.Recv(ctx(t), answer); err != nil {
				t.Fatal(err)
			}
			if answer[2] != 132 { // an end of one before
				return answer
			}
		}
	}
	for _, c := range []struct {
		name  string
		bytes []byte
		kind  byte
	}{
		{"as it should be", spec(64+len(good), 0, 1, 0, good), 130},
		{"empty", nil, 131},
		{"shorter than its head", make([]byte, 63), 131},
		{"of another magic", append(le32(1), spec(64+len(good), 0, 1, 0, good)[4:]...), 131},
		{"of another version", append(le32(magic, 9), spec(64+len(good), 0, 1, 0, good)[8:]...), 131},
		{"that says a smaller size", spec(64, 0, 1, 0, good), 131},
		{"that says a larger size", spec(1<<20, 0, 1, 0, good), 131},
		{"with groups beyond its end", spec(64+len(good), 4, 1, 0, good), 131},
		{"with more groups than there may be", spec(64+len(good), 1<<30, 1, 0, good), 131},
		{"with groups that wrap around", spec(64+len(good), 1<<30|1, 1, 0, good), 131},
		{"with strings beyond its end", spec(64+len(good), 0, 5, 0, good), 131},
		{"with more strings than there may be", spec(64+len(good), 0, 1<<31, 1<<31, good), 131},
		{"with fewer strings", spec(64+len(good), 0, 0, 0, good), 131},
		{"without a program", spec(64+2, 0, 0, 0, "/\x00"), 131},
		{"whose last string does not end", spec(64+len(good)-1, 0, 1, 0, good[:len(good)-1]), 131},
		{"with something behind", spec(64+len(good)+1, 0, 1, 0, good+"x"), 131},
	} {
		t.Run("a spec "+c.name, func(t *testing.T) {
			f, err := memfd.Sealed("spec", c.bytes)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if got := spawn(t, f); got[2] != c.kind || c.kind == 131 && got[16] != 8 {
				t.Errorf("answer of kind %d, step %d", got[2], got[16])
			}
		})
	}
	t.Run("a spec that can still be changed", func(t *testing.T) {
		f, err := memfd.Create("spec")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(spec(64+len(good), 0, 1, 0, good)); err != nil {
			t.Fatal(err)
		}
		if got := spawn(t, f); got[2] != 131 || got[16] != 8 {
			t.Errorf("answer of kind %d, step %d", got[2], got[16])
		}
	})
	t.Run("a spec that is no memfd", func(t *testing.T) {
		if got := spawn(t, null); got[2] != 131 || got[16] != 8 {
			t.Errorf("answer of kind %d, step %d", got[2], got[16])
		}
	})
	for _, c := range []struct {
		name  string
		bytes []byte
	}{
		{"empty", nil},
		{"of zeros", make([]byte, 256)},
		{"with a longer filter than there is", append(le32(0x4e4c5053, wire.Version, 256, 0, 0, 0, 0, 0, 0, 0, 0, 9),
			make([]byte, 208)...)},
		{"with an endless hostname", append(append(le32(0x4e4c5053, wire.Version, 256, 0, 0, 0, 0, 0, 0, 0, 0, 0),
			strings.Repeat("h", 64)...), make([]byte, 144)...)},
		{"with unknown flags", append(le32(0x4e4c5053, wire.Version, 256, 2), make([]byte, 240)...)},
	} {
		t.Run("a plan "+c.name, func(t *testing.T) {
			b := rawbox.Start(t, rawbox.Options{})
			conn, err := scm.New(b.Control)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			f, err := memfd.Sealed("plan", c.bytes)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			m := make([]byte, 64)
			m[0], m[2] = wire.Version, 2
			if err := conn.Send(ctx(t), m, f); err != nil {
				t.Fatal(err)
			}
			if _, _, err := conn.Recv(ctx(t), m); err != nil || m[2] != 131 || m[16] != 32 {
				t.Errorf("answer of kind %d, step %d, %v", m[2], m[16], err)
			}
			if ws := b.Wait(t, limit); ws.ExitStatus() != 12 {
				t.Errorf("PID 1 ended with %#x, want exit 12", ws)
			}
		})
	}
}
