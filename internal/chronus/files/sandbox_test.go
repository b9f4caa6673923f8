package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

// uidBase is root's host id in the scratch sandboxes.
const uidBase = 1_000_000

// driver is the helper's binary, built once.
var driver string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "sandsea-files-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	buildDriver = sync.OnceValue(func() error { return build(dir) })
	code := leak.Main(m)
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

var buildDriver func() error

func build(dir string) error {
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	for _, cc := range []string{"musl-gcc", "gcc", "cc"} {
		if _, err := exec.LookPath(cc); err != nil {
			continue
		}
		driver = filepath.Join(dir, "driver")
		out, err := exec.Command(cc, "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE",
			"-I../../../init", "-o", driver, "testdata/driver.c").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w\n%s", cc, err, out)
		}
		return nil
	}
	return errors.New("no C compiler")
}

// scratch is a sandbox's root with the real helper in it, without the rest of a sandbox.
type scratch struct {
	*Helpers
	t       testing.TB
	root    string
	options string

	mu    sync.Mutex
	procs []*exec.Cmd
	gone  []chan struct{}
}

// newScratch makes a root with a few directories. Options are the driver's.
func newScratch(t testing.TB, options string) *scratch {
	t.Helper()
	require.Root(t)
	if err := buildDriver(); err != nil {
		require.That(t, "cc", err)
	}
	dir := t.TempDir()
	for _, d := range []string{filepath.Dir(dir), dir} {
		must(t, os.Chmod(d, 0o755))
	}
	s := &scratch{t: t, root: filepath.Join(dir, "root"), options: options}
	for _, d := range []string{"", "-lower", "-upper", "-work"} {
		must(t, os.Mkdir(s.root+d, 0o755))
		must(t, os.Chown(s.root+d, uidBase, uidBase))
	}
	seed := s.root
	if strings.Contains(options, "o") {
		seed += "-lower"
	}
	for _, d := range []string{"etc", "tmp", "home", "home/user", "proc", "mnt", "dev"} {
		must(t, os.Mkdir(filepath.Join(seed, d), 0o755))
		must(t, os.Chown(filepath.Join(seed, d), uidBase, uidBase))
	}
	must(t, os.Chmod(filepath.Join(seed, "tmp"), 0o777|os.ModeSticky))
	must(t, os.Chown(filepath.Join(seed, "home/user"), uidBase+1000, uidBase+1000))
	s.Helpers = New(s.start)
	t.Cleanup(s.end)
	// A namespace that cannot be made here is no failure of the code under test; everything after it is.
	_, err := s.As(chronus.IDs{}, "").Stat(t.Context(), "/", false)
	if errors.Is(err, errNoSandbox) {
		require.That(t, "userns", err)
	}
	must(t, err)
	return s
}

var errNoSandbox = errors.New("cannot start a process in namespaces of its own")

// start runs a helper, as chronus.Channel.ServeFiles does.
func (s *scratch) start(_ context.Context, ids chronus.IDs) (*os.File, error) {
	mine, theirs, err := scm.Socketpair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	args := []string{s.root, fmt.Sprint(ids.UID), fmt.Sprint(ids.GID), "-" + s.options}
	for _, g := range ids.Groups {
		args = append(args, fmt.Sprint(g))
	}
	cmd := exec.Command(driver, args...)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	ids0 := []syscall.SysProcIDMap{{ContainerID: 0, HostID: uidBase, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS,
		UidMappings: ids0, GidMappings: ids0, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{}, Pdeathsig: syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		mine.Close()
		return nil, fmt.Errorf("%w: %w", errNoSandbox, err)
	}
	gone := make(chan struct{})
	go func() { defer close(gone); _ = cmd.Wait() }()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.procs = append(s.procs, cmd)
	s.gone = append(s.gone, gone)
	return mine, nil
}

func (s *scratch) end() {
	s.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, gone := range s.gone {
		select {
		case <-gone:
		case <-time.After(20 * time.Second):
			s.t.Error("a helper outlives its socket")
			_ = s.procs[i].Process.Kill()
			<-gone
		}
	}
}

// started counts the helpers so far.
func (s *scratch) started() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.procs)
}

// last gives the latest helper.
func (s *scratch) last() (*os.Process, chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.procs[len(s.procs)-1].Process, s.gone[len(s.gone)-1]
}

func (s *scratch) rootUser() *View { return s.As(chronus.IDs{Groups: []uint32{0}}, "/") }

func (s *scratch) user() *View {
	return s.As(chronus.IDs{UID: 1000, GID: 1000, Groups: []uint32{1000}}, "/home/user")
}

// host gives the path of a sandbox path on the host.
func (s *scratch) host(path string) string { return filepath.Join(s.root, path) }

// put makes a file from outside.
func (s *scratch) put(path, content string, mode os.FileMode, uid int) {
	s.t.Helper()
	must(s.t, os.WriteFile(s.host(path), []byte(content), 0o600))
	must(s.t, os.Chown(s.host(path), uidBase+uid, uidBase+uid))
	must(s.t, os.Chmod(s.host(path), mode))
}

// link makes a symbolic link from outside.
func (s *scratch) link(target, path string, uid int) {
	s.t.Helper()
	must(s.t, os.Symlink(target, s.host(path)))
	must(s.t, os.Lchown(s.host(path), uidBase+uid, uidBase+uid))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// write writes with a view and wants no error.
func write(t testing.TB, v *View, path, content string) Info {
	t.Helper()
	info, err := v.Write(t.Context(), path, 0, nil, strings.NewReader(content))
	must(t, err)
	return info
}

// read reads all.
func read(t testing.TB, v *View, path string) string {
	t.Helper()
	b, err := readAll(t.Context(), v, path, Range{})
	must(t, err)
	return string(b)
}

func readAll(ctx context.Context, v *View, path string, part Range) ([]byte, error) {
	r, err := v.Read(ctx, path, part)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// wantErrno checks kind and errno of an error; errno 0 is not looked at.
func wantErrno(t testing.TB, err error, kind errdefs.Kind, errno syscall.Errno) {
	t.Helper()
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		t.Fatalf("got %v, want %v %v", err, kind, errno)
	}
	if e.Kind != kind || errno != 0 && (e.Errno != int(errno) || e.ErrnoName == "") {
		t.Errorf("got kind %v, errno %d %s (%v), want %v %d", e.Kind, e.Errno, e.ErrnoName, err, kind, int(errno))
	}
}

// names lists the entries of a host directory, hidden ones too.
func names(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	got := []string{}
	for _, e := range entries {
		got = append(got, e.Name())
	}
	return got
}
