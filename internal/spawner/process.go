package spawner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/linux/clone"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/linux/userns"
)

// workers is how many forks may be under way at once. More gain nothing: the kernel serializes the copying of the mount
// namespace and of the descriptor table.
const workers = 4

// greetLimit is how long a new connection may take to say who it is.
const greetLimit = time.Second

var (
	errNoGreeting = errors.New("the peer does not greet")
	errEnded      = errors.New("the spawner ends")
)

// listenLimit is how long a spawner waits for what its predecessor left of its socket.
const listenLimit = 2 * time.Second

// Config of the spawner process.
type Config struct {
	// Socket is the path of the listening socket; a socket that is there is replaced.
	Socket string
	// Takeover takes the socket from a spawner that lives: whoever connects from then on reaches this one. The other is
	// its starter's to end.
	Takeover bool
	// DataID is the id of the data directory that this spawner serves; a client of another one is refused.
	DataID string
	// Init is the sandsea-init binary.
	Init []byte
	Log  *slog.Logger
}

// Validate reports what is missing.
func (c Config) Validate() error {
	switch {
	case !filepath.IsAbs(c.Socket):
		return fmt.Errorf("spawner: socket %q is no absolute path", c.Socket)
	case c.DataID == "" || len(c.DataID) > nameSize:
		return fmt.Errorf("spawner: data directory id of %d bytes", len(c.DataID))
	case len(c.Init) == 0:
		return errors.New("spawner: no sandsea-init binary")
	case c.Log == nil:
		return errors.New("spawner: no log")
	}
	return nil
}

// Attr is how the parent must start the spawner: in a mount namespace and a session of its own.
func Attr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Setsid: true}
}

// Run is the spawner process. It refuses to run in the mount namespace of its parent or of pid 1, since it takes
// every mount away from the namespace that it is in. It returns when ctx ends; the sandboxes go on.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	own, err := mount.OwnNamespace()
	if err != nil {
		return err
	}
	if !own {
		return errors.New("spawner: not in a mount namespace of its own; start it with CLONE_NEWNS")
	}
	at := cfg.Socket
	if cfg.Takeover {
		at += ".next"
	}
	ln, err := listen(ctx, at)
	if err == nil && cfg.Takeover {
		if err = os.Rename(at, cfg.Socket); err != nil {
			_ = ln.Close()
		}
	}
	if err != nil {
		return fmt.Errorf("spawner: %w", err)
	}
	defer func() { _ = ln.Close() }() // the socket's file lies outside the nursery and stays: the next spawner replaces it
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	if err := enterNursery(filepath.Dir(cfg.Socket), cfg.Init); err != nil {
		return fmt.Errorf("spawner: nursery: %w", err)
	}
	// A thread that clones keeps its processor meanwhile, so there are more of them than clones.
	runtime.GOMAXPROCS(max(runtime.NumCPU(), workers+2))

	s := &server{dataID: cfg.DataID, log: cfg.Log, null: null}
	ctx, stop := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	wg.Go(func() {
		defer signal.Stop(children)
		for {
			s.reap()
			select {
			case <-children:
			case <-ctx.Done():
				return
			}
		}
	})
	wg.Go(func() {
		<-ctx.Done()
		s.replace(nil)
	})
	cfg.Log.Info("spawner serves", "socket", cfg.Socket)
	err = s.accept(ctx, ln)
	if ctx.Err() != nil {
		err = nil
	}
	stop(errEnded)
	wg.Wait()
	s.conns.Wait()
	return err
}

// listen makes the socket. A spawner that was killed may have left a child that has not called exec yet and has its
// descriptors for that long, the socket among them: then the address is in use for a moment more.
func listen(ctx context.Context, path string) (*scm.Listener, error) {
	for deadline := time.Now().Add(listenLimit); ; {
		ln, err := scm.Listen(path)
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return ln, err
		}
		select {
		case <-time.After(redialPause):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

const initPath = "/init"

// enterNursery makes the nursery and pivots into it. Children copy this namespace, so it holds two mounts and no more.
func enterNursery(at string, init []byte) error {
	if err := mount.MakePrivate(); err != nil {
		return err
	}
	root, err := mount.New("tmpfs", mount.NoSUID|mount.NoDev, mount.Value("mode", "0755"), mount.Value("size", "8m"),
		mount.Value("nr_inodes", "16"))
	if err != nil {
		return err
	}
	defer root.Close()
	if err := mount.Attach(root, at); err != nil {
		return err
	}
	for _, dir := range []string{"mnt", "proc"} {
		if err := mount.MakeDir(root, dir, 0o755); err != nil {
			return err
		}
	}
	// Mode 0711 and host root's: who runs it inside a user namespace cannot read it, so the kernel makes the process not
	// dumpable and lets nobody inside trace it.
	f, err := os.OpenFile(filepath.Join(at, initPath), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o711)
	if err != nil {
		return err
	}
	_, err = f.Write(init)
	if err == nil {
		err = f.Chmod(0o711)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	// A proc that hides nothing: without it the kernel refuses a new proc in a user namespace.
	proc, err := mount.New("proc", mount.NoSUID|mount.NoDev|mount.NoExec)
	if err != nil {
		return err
	}
	defer proc.Close()
	if err := mount.AttachAt(proc, root, "proc"); err != nil {
		return err
	}
	if err := mount.Set(root, mount.ReadOnly, false); err != nil {
		return err
	}
	return mount.PivotInto(at)
}

type server struct {
	dataID string
	log    *slog.Logger
	null   *os.File
	conns  sync.WaitGroup

	// reaping is held for writing while children are waited for and for reading by a fork, so that the number of a child
	// that died at once is not given to another process while it is still to be written into cgroups.
	reaping sync.RWMutex

	mu      sync.Mutex
	current *scm.Conn // guarded by mu: the edge
}

// replace makes c the connection that is served and closes the one before: there is one edge, and a new connection
// means a new edge.
func (s *server) replace(c *scm.Conn) {
	s.mu.Lock()
	old := s.current
	s.current = c
	s.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
}

func (s *server) accept(ctx context.Context, ln *scm.Listener) error {
	for {
		c, err := ln.Accept(ctx)
		if err != nil {
			return fmt.Errorf("spawner: accept: %w", err)
		}
		if err := s.greet(ctx, c); err != nil {
			if !errors.Is(err, io.EOF) { // the edge looks who listens, and says nothing
				s.log.Warn("spawner refuses a connection", "err", err)
			}
			_ = c.Close()
			continue
		}
		s.replace(c)
		for range workers {
			s.conns.Go(func() { s.work(c) })
		}
	}
}

// greet checks the peer before anything else is read. A peer that says nothing does not hold up the next one for long.
func (s *server) greet(ctx context.Context, c *scm.Conn) error {
	ctx, stop := context.WithTimeoutCause(ctx, greetLimit, errNoGreeting)
	defer stop()
	cred, err := c.Peer()
	if err != nil {
		return err
	}
	if cred.UID != 0 {
		return fmt.Errorf("the peer has uid %d", cred.UID)
	}
	buf := make([]byte, requestSize)
	n, files, err := c.Recv(ctx, buf)
	scm.CloseFiles(files)
	if err != nil {
		return err
	}
	r, err := decodeRequest(buf[:n])
	if err != nil {
		return err
	}
	if r.Kind != kindHello || r.Name != s.dataID {
		_ = c.Send(ctx, reply{Seq: r.Seq, Errno: syscall.EPERM, Text: "another data directory"}.encode())
		return fmt.Errorf("greeting of kind %d for another data directory", r.Kind)
	}
	return c.Send(ctx, reply{Seq: r.Seq, Pid: int32(os.Getpid()), Text: s.dataID}.encode())
}

// work serves one request after the other until the connection ends. Reading only when it is free bounds the number of
// descriptors that this process holds. The connection, not a context, ends it, so that a fork is never left half told.
func (s *server) work(c *scm.Conn) {
	defer func() { _ = c.Close() }()
	ctx := context.Background()
	buf := make([]byte, requestSize)
	for {
		n, files, err := c.Recv(ctx, buf)
		if err != nil {
			if !errors.Is(err, os.ErrClosed) && !errors.Is(err, io.EOF) {
				s.log.Warn("spawner loses its connection", "err", err)
			}
			return
		}
		r, err := decodeRequest(buf[:n])
		if err != nil || r.Kind != kindSpawn {
			scm.CloseFiles(files)
			s.log.Warn("spawner drops a connection that broke the protocol", "kind", r.Kind, "err", err)
			return
		}
		ch, executed, err := s.spawn(r, files)
		if err != nil {
			s.log.Warn("spawn went wrong", "sandbox", r.Name, "err", err)
			errno, _ := errors.AsType[syscall.Errno](err)
			err = c.Send(ctx, reply{Seq: r.Seq, Errno: errno, Text: clip(err.Error(), textSize)}.encode())
		} else {
			err = c.Send(ctx, reply{Seq: r.Seq, Pid: int32(ch.Pid)}.encode(), ch.Pidfd, ch.Control)
			if err != nil {
				// Nobody will ever know of it.
				_ = pidfd.Signal(ch.Pidfd, syscall.SIGKILL)
			}
			scm.CloseFiles([]*os.File{ch.Pidfd, ch.Control})
			// The edge goes on meanwhile: should exec not work, the line to the child ends.
			if xerr := executed(); xerr != nil {
				s.log.Error("a child was lost before it ran", "sandbox", r.Name, "err", xerr)
			}
		}
		scm.CloseFiles(files)
		if err != nil {
			return
		}
	}
}

// namespaces are the sandbox's own. That of control groups is not among them: at the clone it would begin at this
// process's groups, so sandsea-init makes it once it is in its own.
const namespaces = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC |
	syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET

// spawn clones sandsea-init. The child is about to call exec when it returns; executed waits for that, must be called,
// and needs none of the files.
func (s *server) spawn(r request, files []*os.File) (_ Child, executed func() error, err error) {
	need := 2 + int(r.Tasks)
	if !r.NoRoot {
		need++
	}
	if r.Sys {
		need++
	}
	if len(files) != need {
		return Child{}, nil, fmt.Errorf("%d descriptors, want %d: %w", len(files), need, syscall.EINVAL)
	}
	next := func(there bool) (f *os.File) {
		if there {
			f, files = files[0], files[1:]
		}
		return f
	}
	cgroup, root, dev, sys := next(true), next(!r.NoRoot), next(true), next(r.Sys)

	inside, outside, err := scm.Socketpair()
	if err != nil {
		return Child{}, nil, fmt.Errorf("control socket: %w", err)
	}
	defer inside.Close()

	// Until the child is waited for below, nobody else does, so its number stays its own.
	s.reaping.RLock()
	defer s.reaping.RUnlock()
	c, err := clone.Start(clone.Spec{
		Flags:  namespaces,
		Owner:  r.UIDBase,
		Cgroup: cgroup,
		Tasks:  files,
		Path:   initPath,
		Argv:   []string{"sandsea-init"},
		Files:  []*os.File{s.null, s.null, s.null, inside, root, dev, sys},
	})
	if err != nil {
		outside.Close()
		return Child{}, nil, err
	}
	err = userns.WriteMaps(c.Pid, r.UIDBase)
	if err == nil {
		err = c.Release()
	}
	if err != nil {
		err = errors.Join(err, c.Exec()) // not released, it ends; or it had ended, which says why
		c.Pidfd.Close()
		outside.Close()
		return Child{}, nil, err
	}
	return Child{Pid: c.Pid, Pidfd: c.Pidfd, Control: outside}, c.Exec, nil
}

// reap takes away children that have died; their exit status is read by others through their pidfds.
func (s *server) reap() {
	s.reaping.Lock()
	defer s.reaping.Unlock()
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 || err != nil {
			return
		}
	}
}

func clip(s string, n int) string { return s[:min(len(s), n)] }
