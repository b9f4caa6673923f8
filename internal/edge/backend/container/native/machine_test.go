package native

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/chronus/wire"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/uidrange"
	"github.com/sandsea/sandsea/internal/edge/upper"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/layers/blob/posix"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/layers/compose"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/linux/seccomp"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/spawner"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const patience = 20 * time.Second

// theMachine is shared by the tests of this package, since making a disk takes its time.
var theMachine machine

// machine is everything that is on a node beside the Backend. Edges come and go on it.
type machine struct {
	once sync.Once
	err  error

	dir     string
	tag     string
	groups  *cgroup.Manager
	uppers  *upper.Store
	blobs   *posix.Store
	layers  *compose.Composer
	filter  []byte
	busybox image.Digest
	undo    []func() error

	mu    sync.Mutex
	roles map[string]*exec.Cmd // guarded by mu
}

// use makes the machine when it is first wanted.
func use(tb testing.TB) *machine {
	tb.Helper()
	require.Root(tb)
	m := &theMachine
	m.once.Do(func() { m.err = m.build() })
	if m.err != nil {
		tb.Fatal(m.err)
	}
	return m
}

func (m *machine) build() (err error) {
	m.roles = map[string]*exec.Cmd{}
	m.tag = leak.Tag()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if m.dir, err = os.MkdirTemp("", "sandsea-native-"); err != nil {
		return err
	}
	m.undo = append(m.undo, func() error { return os.RemoveAll(m.dir) })
	if m.groups, err = cgroup.Open(cgroup.Config{Tag: m.tag, Log: log}); err != nil {
		return err
	}
	m.undo = append(m.undo, func() error { return m.groups.Destroy(context.Background()) })
	m.uppers, err = upper.Open(context.Background(), upper.Config{Dir: m.dir, Log: log, ImageBytes: 4 << 30})
	if err != nil {
		return err
	}
	m.undo = append(m.undo, m.uppers.Destroy)
	if m.blobs, err = posix.Open(filepath.Join(m.dir, "blobs")); err != nil {
		return err
	}
	if m.layers, err = compose.New(compose.Config{Blobs: m.blobs, Log: log}); err != nil {
		return err
	}
	m.undo = append(m.undo, m.layers.Close)
	if m.filter, err = seccomp.Default(); err != nil {
		return err
	}
	rootfs, err := busyboxRootfs()
	if err != nil {
		return err
	}
	if m.busybox, err = m.layer(rootfs); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(m.dir, "run"), 0o700); err != nil {
		return err
	}
	for _, role := range []string{"keeper", "spawner"} {
		if err := m.startRole(role); err != nil {
			return err
		}
	}
	return nil
}

// layer imports a tar of a root file system.
func (m *machine) layer(r io.Reader) (image.Digest, error) {
	b, err := build.New(build.Config{Store: m.blobs, Dir: m.dir})
	if err != nil {
		return "", err
	}
	res, err := b.Rootfs(context.Background(), r, build.ArchiveOptions{Name: "test"})
	if err != nil {
		return "", err
	}
	return res.Layers[0].Digest, nil
}

// startRole starts the keeper or the spawner, or another after its death.
func (m *machine) startRole(role string) error {
	m.endRole(role)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SANDSEA_TEST_ROLE="+role+" "+filepath.Join(m.dir, "run"))
	cmd.Stderr = os.Stderr
	if role == "spawner" {
		cmd.SysProcAttr = spawner.Attr()
	} else {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	}
	if _, err := cmd.StdinPipe(); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	m.mu.Lock()
	m.roles[role] = cmd
	m.mu.Unlock()
	return nil
}

// endRole kills it.
func (m *machine) endRole(role string) {
	m.mu.Lock()
	cmd := m.roles[role]
	delete(m.roles, role)
	m.mu.Unlock()
	if cmd != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

func (m *machine) destroy() error {
	for _, role := range []string{"spawner", "keeper"} {
		m.endRole(role)
	}
	var errs []error
	for i := len(m.undo) - 1; i >= 0; i-- {
		errs = append(errs, m.undo[i]())
	}
	return errors.Join(errs...)
}

func (m *machine) dialKeeper(tb testing.TB) *keeper.Conn {
	tb.Helper()
	var c *keeper.Conn
	var err error
	if !wait.For(patience, func() bool {
		c, err = keeper.Dial(context.Background(), filepath.Join(m.dir, "run", "keeper.sock"), dataID)
		return err == nil
	}) {
		tb.Fatal(err)
	}
	return c
}

// edge is a Backend with what belongs to one life of an edge.
type edge struct {
	*Backend
	keeper  *keeper.Conn
	spawner spawner.Client
	ranges  *uidrange.Pool
}

// open makes an edge out of what the machine holds, with nothing made ready ahead.
func (m *machine) open(tb testing.TB) *edge {
	tb.Helper()
	return m.openWarm(tb, 0)
}

// openWarm is open for an edge that keeps so many sandboxes ready.
func (m *machine) openWarm(tb testing.TB, warm int) *edge {
	tb.Helper()
	e := &edge{keeper: m.dialKeeper(tb)}
	held, err := e.keeper.Roster(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	roster := map[string]*keeper.Sandbox{}
	for _, h := range held {
		if h.Sandbox != nil {
			roster[h.Sandbox.ID] = h.Sandbox
			h.Sandbox.Kill.Close()
		}
	}
	var taken sync.Map
	tb.Cleanup(func() {
		for id, h := range roster {
			if _, ok := taken.Load(id); !ok {
				h.Control.Close()
				h.Pidfd.Close()
			}
		}
	})
	e.spawner = spawner.Redial(filepath.Join(m.dir, "run", "spawner.sock"), dataID, patience)
	log := slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	e.ranges, err = uidrange.Open(uidrange.Config{Tag: "7e57da7a", Dir: filepath.Join(m.dir, "ranges"), Log: log})
	if err != nil {
		tb.Fatal(err)
	}
	e.Backend, err = New(Config{
		Spawner: e.spawner, Keeper: e.keeper, Cgroups: m.groups, Uppers: m.uppers, Ranges: e.ranges, Layers: m.layers,
		Filter: m.filter, Caps: wire.DefaultCaps, Output: filepath.Join(m.dir, "output"), Warm: warm, Log: log,
		Held: func(id sandbox.ID) (control, pidfd *os.File, ok bool) {
			h := roster[string(id)]
			if h == nil {
				return nil, nil, false
			}
			if _, twice := taken.LoadOrStore(string(id), true); twice {
				return nil, nil, false
			}
			return h.Control, h.Pidfd, true
		},
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(e.close)
	return e
}

// close is the end of an edge's life; its sandboxes go on. Idempotent.
func (e *edge) close() {
	_ = e.Backend.Close()
	_ = e.spawner.Close()
	_ = e.ranges.Close()
	_ = e.keeper.Close()
}

// left lists what there is of any sandbox.
func (m *machine) left(tb testing.TB) []string {
	tb.Helper()
	var out []string
	groups, err := m.groups.Names()
	if err != nil {
		tb.Fatal(err)
	}
	for _, n := range groups {
		out = append(out, "control group "+n)
	}
	uppers, err := m.uppers.Names()
	if err != nil {
		tb.Fatal(err)
	}
	for _, n := range uppers {
		out = append(out, "writable layer "+n)
	}
	return out
}

// spec is what most tests start.
func (m *machine) spec(id sandbox.ID) backend.Spec {
	return backend.Spec{ID: id, Plan: m.plan(), Limits: smallLimits, Hard: time.Now().Add(time.Hour)}
}

func (m *machine) plan() plan.Plan {
	return plan.Plan{Layers: []image.Digest{m.busybox}, Hostname: "box"}
}

var smallLimits = sandbox.Limits{
	Memory: 128 << 20, CPUMillis: 1000, Disk: 64 << 20, Pids: 64, OpenFiles: 1024, Output: 8 << 20,
}

// busyboxRootfs is a tar of a root file system around the machine's static busybox.
func busyboxRootfs() (io.Reader, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return nil, fmt.Errorf("busybox-static is needed: %w", err)
	}
	binary, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	applets, err := exec.Command(path, "--list").Output()
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	var werr error
	add := func(h *tar.Header, content []byte) {
		h.Size = int64(len(content))
		h.ModTime = time.Unix(1700000000, 0)
		if werr == nil {
			werr = w.WriteHeader(h)
		}
		if werr == nil {
			_, werr = w.Write(content)
		}
	}
	for _, d := range []string{"bin", "etc", "dev", "proc", "sys", "root", "home", "var", "usr", "usr/bin"} {
		add(&tar.Header{Name: d + "/", Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	add(&tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, nil)
	add(&tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, binary)
	// Set-user-id works only for a file of its own.
	add(&tar.Header{Name: "bin/su", Typeflag: tar.TypeReg, Mode: 0o4755}, binary)
	add(&tar.Header{Name: "usr/bin/tool", Typeflag: tar.TypeReg, Mode: 0o755}, []byte("#!/bin/sh\n"))
	for a := range strings.FieldsSeq(string(applets)) {
		if a != "busybox" && a != "su" {
			add(&tar.Header{Name: "bin/" + a, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil)
		}
	}
	add(&tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644},
		[]byte("root::0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home:/bin/sh\n"))
	add(&tar.Header{Name: "etc/group", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:\nuser:x:1000:\n"))
	// A device of the host's disk, world readable: an image may say so, the sandbox must not be able to use it.
	add(&tar.Header{Name: "etc/disk", Typeflag: tar.TypeBlock, Mode: 0o666, Devmajor: 254, Devminor: 0}, nil)
	if werr == nil {
		werr = w.Close()
	}
	return &buf, werr
}

// smallTar is a tar of regular files and, as overlayfs makes them, whiteouts.
func smallTar(tb testing.TB, files map[string]string, whiteouts ...string) io.Reader {
	tb.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{
			Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content)), ModTime: time.Unix(1700000000, 0),
		}); err != nil {
			tb.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			tb.Fatal(err)
		}
	}
	for _, name := range whiteouts {
		h := &tar.Header{Name: name, Typeflag: tar.TypeChar, ModTime: time.Unix(1700000000, 0)}
		if err := w.WriteHeader(h); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return &buf
}
