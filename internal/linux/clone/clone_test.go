package clone_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/clone"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/userns"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const base = 0x7ff00000

func start(t *testing.T, s clone.Spec) *clone.Child {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root for namespaces")
	}
	c, err := clone.Start(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = pidfd.Signal(c.Pidfd, syscall.SIGKILL)
		c.Pidfd.Close()
	})
	return c
}

func reap(t *testing.T, c *clone.Child) syscall.WaitStatus {
	t.Helper()
	var ws syscall.WaitStatus
	for {
		_, err := syscall.Wait4(c.Pid, &ws, 0, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return ws
	}
}

// run runs a shell script as root of a user namespace, with its output as descriptor 1, and returns what it wrote.
func run(t *testing.T, flags uint64, script string) string {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	c := start(t, clone.Spec{
		Flags: flags, Path: "/bin/sh", Argv: []string{"sh", "-c", script}, Files: []*os.File{null, w, w, nil, r},
	})
	for _, err := range []error{userns.WriteMaps(c.Pid, base), c.Release(), c.Exec(), w.Close()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	if ws := reap(t, c); ws.ExitStatus() != 0 {
		t.Fatalf("status %v: %s", ws, out)
	}
	return string(out)
}

func TestTheProgramIsRootOfItsNamespaces(t *testing.T) {
	out := run(t, unix.CLONE_NEWUSER|unix.CLONE_NEWPID|unix.CLONE_NEWNS,
		"echo $$; cat /proc/self/uid_map; grep -E '^(Uid|Groups|CapEff):' /proc/self/status")
	want := "1\n         0 2146435072      65536\nUid:\t0\t0\t0\t0\nGroups:\t \n"
	if !strings.HasPrefix(out, want) {
		t.Errorf("output %q, want it to begin with %q", out, want)
	}
	if strings.Contains(out, "CapEff:\t0000000000000000") {
		t.Errorf("no capabilities: %q", out)
	}
}

func TestTheProgramHasItsDescriptorsAndNoOthers(t *testing.T) {
	// One that a careless parent might have left to us.
	leaked, err := unix.FcntlInt(0, unix.F_DUPFD, 200)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leaked)
	out := run(t, unix.CLONE_NEWUSER, "ls /proc/$$/fd")
	got := strings.Fields(out)
	// The shell opens some for itself, from 10 on.
	got = slices.DeleteFunc(got, func(n string) bool { return n == "10" || n == "11" })
	if !slices.Equal(got, []string{"0", "1", "2", "4"}) {
		t.Errorf("descriptors %q, want 0 1 2 4", got)
	}
}

func TestANamespaceBelongsToTheOwnerThatIsNamed(t *testing.T) {
	for _, owner := range []uint32{0, base} {
		c := start(t, clone.Spec{
			Flags: unix.CLONE_NEWUSER, Owner: owner, Path: "/bin/cat", Argv: []string{"cat", "/proc/self/status"},
		})
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", c.Pid))
		if err != nil {
			t.Fatal(err)
		}
		got, err := unix.IoctlGetUint32(int(ns.Fd()), unix.NS_GET_OWNER_UID)
		ns.Close()
		if err != nil || got != owner {
			t.Errorf("owner %d, %v, want %d", got, err, owner)
		}
		if err := errors.Join(userns.WriteMaps(c.Pid, base), c.Release(), c.Exec()); err != nil {
			t.Error(err)
		}
		reap(t, c)
		// No thread of ours is left with another user or without its capabilities.
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		own, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range tasks {
			b, err := os.ReadFile("/proc/self/task/" + task.Name() + "/status")
			if errors.Is(err, os.ErrNotExist) {
				continue // it ended
			}
			if got, want := identity(b), identity(own); got != want || err != nil {
				t.Errorf("thread %s is %q, %v, the process %q", task.Name(), got, err, want)
			}
		}
	}
}

// identity are the lines of a status file that tell users and capabilities.
func identity(status []byte) string {
	var out []string
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "Uid:") || strings.HasPrefix(line, "Cap") {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return strings.Join(out, "; ")
}

func TestManyAtOnceWhileTheCallerCollectsGarbage(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root for namespaces")
	}
	stop := make(chan struct{})
	var gc sync.WaitGroup
	gc.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for k := range 50 {
				r, w, err := os.Pipe()
				if err != nil {
					t.Error(err)
					return
				}
				c, err := clone.Start(clone.Spec{
					Flags: unix.CLONE_NEWUSER | unix.CLONE_NEWPID, Path: "/bin/echo",
					Argv: []string{"echo", fmt.Sprint("number ", k)}, Files: []*os.File{nil, w, w},
				})
				if err != nil {
					t.Error(err)
					return
				}
				err = errors.Join(userns.WriteMaps(c.Pid, base), c.Release(), c.Exec(), w.Close())
				out, rerr := io.ReadAll(r)
				r.Close()
				var ws syscall.WaitStatus
				_, werr := syscall.Wait4(c.Pid, &ws, 0, nil)
				c.Pidfd.Close()
				if err != nil || rerr != nil || werr != nil || string(out) != fmt.Sprintf("number %d\n", k) {
					t.Errorf("child %d wrote %q: %v, %v, %v, %v", k, out, ws, err, rerr, werr)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	gc.Wait()
}

// TestChildrenThatWaitHoldNothingOfTheCaller: else, after the death of a caller, its peers would not see its end and
// children that wait at the same time would keep each other waiting.
func TestChildrenThatWaitHoldNothingOfTheCaller(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	spec := clone.Spec{Flags: unix.CLONE_NEWUSER, Path: "/bin/true", Argv: []string{"true"}, Files: []*os.File{nil, nil, nil}}
	var children []*clone.Child
	for range 4 {
		children = append(children, start(t, spec))
	}
	for _, c := range children {
		wait.Until(t, 20*time.Second, func() bool {
			fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.Pid))
			return err == nil && len(fds) == 1
		}, "a child with its gate alone")
	}
	w.Close()
	if n, err := r.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("read %d, %v, want the end", n, err)
	}
	for _, c := range children {
		_ = c.Exec()
		reap(t, c)
	}
}

func TestWhatGoesWrongIsTold(t *testing.T) {
	t.Run("a program that is not there", func(t *testing.T) {
		c := start(t, clone.Spec{Flags: unix.CLONE_NEWUSER, Path: "/no/such/program", Argv: []string{"x"}})
		if err := errors.Join(userns.WriteMaps(c.Pid, base), c.Release()); err != nil {
			t.Fatal(err)
		}
		err := c.Exec()
		if !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), "exec") {
			t.Errorf("err = %v", err)
		}
		reap(t, c)
	})
	t.Run("a namespace without a map", func(t *testing.T) {
		c := start(t, clone.Spec{Flags: unix.CLONE_NEWUSER, Path: "/bin/true", Argv: []string{"true"}})
		if err := c.Release(); err != nil {
			t.Fatal(err)
		}
		if err := c.Exec(); !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.EINVAL) {
			t.Errorf("err = %v", err)
		}
		reap(t, c)
	})
	t.Run("a child that is not released", func(t *testing.T) {
		c := start(t, clone.Spec{Flags: unix.CLONE_NEWUSER, Path: "/bin/true", Argv: []string{"true"}})
		if err := c.Exec(); err == nil {
			t.Error("no error")
		}
		reap(t, c)
	})
	t.Run("a child that is killed before its release", func(t *testing.T) {
		c := start(t, clone.Spec{Flags: unix.CLONE_NEWUSER, Path: "/bin/true", Argv: []string{"true"}})
		if err := pidfd.Signal(c.Pidfd, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = c.Exec() // returns
		if ws := reap(t, c); ws.Signal() != syscall.SIGKILL {
			t.Errorf("status %v", ws)
		}
	})
	t.Run("a cgroup that is none", func(t *testing.T) {
		if os.Getuid() != 0 {
			t.Skip("needs root for namespaces")
		}
		f, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := clone.Start(clone.Spec{Cgroup: f, Path: "/bin/true", Argv: []string{"true"}}); err == nil {
			t.Error("no error")
		}
	})
}
