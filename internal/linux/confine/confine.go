// Package confine runs one foreign program, with all that it starts, as nobody in particular.
//
// The program is root in a user namespace of its own whose ids lie in a range that the caller owns, and has mount, pid,
// ipc and uts namespaces of its own; /tmp is a fresh tmpfs and shows the directories that the caller binds there. It
// shares the host's network. It is the first process of its pid namespace: when it ends, when the context ends, or when
// the calling process dies in whatever way, all its descendants are killed with it. Needs root.
package confine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// IDs is the size of the range of user and group ids.
const IDs = 65536

// Bind shows a directory of the host at /tmp/<Name>.
type Bind struct {
	Source   string
	Name     string
	ReadOnly bool
}

// Spec is a program to run.
type Spec struct {
	// Args are the program, looked up in the host's PATH, and its arguments.
	Args []string
	Env  []string
	// IDBase is the host's id for root inside; IDs ids from it on must be the caller's.
	IDBase int
	Binds  []Bind
	// Hide are directories that look empty inside.
	Hide []string
	// Stdout and Stderr may be nil. Status, if set, gets what is written to descriptor 3.
	Stdout, Stderr, Status io.Writer
}

// Run runs the program and returns when it and all its descendants are gone. A program that ends with another code than
// 0 is an *exec.ExitError; an end of ctx is its cause.
func Run(ctx context.Context, s Spec) error {
	if len(s.Args) == 0 {
		return errors.New("confine: no program")
	}
	errc := make(chan error, 1)
	go func() {
		// Never unlocked: the thread has a mount namespace of its own and ends with this goroutine. It lives as long as
		// the program, since its death is the parent death signal.
		runtime.LockOSThread()
		errc <- run(ctx, s)
	}()
	return <-errc
}

func run(ctx context.Context, s Spec) error {
	if err := view(s); err != nil {
		return fmt.Errorf("confine %s: %w", s.Args[0], err)
	}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: s.IDBase, Size: IDs}}
	cmd := exec.CommandContext(ctx, s.Args[0], s.Args[1:]...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = "/", s.Env, s.Stdout, s.Stderr
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{Uid: 0, Gid: 0},
		Setsid:     true,
		Pdeathsig:  syscall.SIGKILL,
	}
	status, err := pipeTo(cmd, s.Status)
	if err != nil {
		return fmt.Errorf("confine %s: %w", s.Args[0], err)
	}
	err = cmd.Start()
	status.started()
	if err == nil {
		err = cmd.Wait()
	}
	status.wait()
	if cerr := context.Cause(ctx); cerr != nil {
		return cerr
	}
	if err != nil {
		return fmt.Errorf("confine %s: %w", s.Args[0], err)
	}
	return nil
}

// pipe carries descriptor 3 to a writer.
type pipe struct {
	r, w *os.File
	done chan struct{}
}

func pipeTo(cmd *exec.Cmd, to io.Writer) (*pipe, error) {
	if to == nil {
		return nil, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.ExtraFiles = []*os.File{w}
	p := &pipe{r: r, w: w, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		_, _ = io.Copy(to, r)
	}()
	return p, nil
}

func (p *pipe) started() {
	if p != nil {
		_ = p.w.Close()
	}
}

// wait ends when the program's side is closed, which it is once its pid namespace is gone.
func (p *pipe) wait() {
	if p != nil {
		<-p.done
		_ = p.r.Close()
	}
}

// view gives this thread a mount namespace as the program is to see it.
func view(s Spec) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("new mount namespace: %w", err)
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Opened before /tmp is covered, where they may lie, and after the unshare, since only mounts of this namespace
	// can be bound in it.
	fds := make([]int, len(s.Binds))
	for i, b := range s.Binds {
		if b.Name == "" || filepath.Base(b.Name) != b.Name {
			return fmt.Errorf("bad name %q", b.Name)
		}
		fd, err := unix.Open(b.Source, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", b.Source, err)
		}
		defer func() { _ = unix.Close(fd) }()
		fds[i] = fd
	}
	opts := fmt.Sprintf("mode=1777,uid=%d,gid=%d", s.IDBase, s.IDBase)
	if err := unix.Mount("sandsea", "/tmp", "tmpfs", unix.MS_NODEV|unix.MS_NOSUID, opts); err != nil {
		return fmt.Errorf("cover /tmp: %w", err)
	}
	for i, b := range s.Binds {
		to := filepath.Join("/tmp", b.Name)
		if err := unix.Mkdir(to, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", to, err)
		}
		if err := unix.Mount(fmt.Sprintf("/proc/thread-self/fd/%d", fds[i]), to, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s: %w", b.Source, err)
		}
		if b.ReadOnly {
			if err := unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
				return fmt.Errorf("bind %s read-only: %w", b.Source, err)
			}
		}
	}
	for _, h := range s.Hide {
		err := unix.Mount("sandsea", h, "tmpfs", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID, "mode=755")
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("hide %s: %w", h, err)
		}
	}
	return nil
}
