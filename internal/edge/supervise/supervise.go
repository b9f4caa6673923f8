// Package supervise starts the processes that must outlive an edge (keeper, spawner), finds them again, and starts them
// anew when they die.
//
// Such a process runs in a session and, where there is a place for it, a v2 cgroup of its own, so that ending the
// edge's does not end it. A living one that answers at the socket is adopted, never doubled; one that runs another
// program than the edge is renewed first, in place or by a successor. One that dies is started again at once; when it
// keeps dying, after growing pauses. The log of the process is a bounded file.
//
// It does not know what the processes do: the caller gives the command line, how to connect, and what to tell a new
// connection.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// The times that supervision goes by.
const (
	// readyWithin bounds how long a started process may take to answer.
	readyWithin = 10 * time.Second
	// endsWithin is how long one that hangs up may take to be gone.
	endsWithin = 5 * time.Second
	// steady is how long a process must have lived for its death to be the first of a row again.
	steady = 10 * time.Second
	// firstPause comes after the second death in a row, then twice as long each time up to lastPause: the fifth is still
	// made good within 200 ms.
	firstPause = 10 * time.Millisecond
	lastPause  = 10 * time.Second
	// polite is how long a process may take to follow SIGTERM.
	polite = 5 * time.Second
	// logCheck is how often a living process's log is looked at, in the edge's life.
	logCheck = time.Minute
)

// maxLog is where a log is begun anew; the former one is kept beside it.
const maxLog = 1 << 20

// Conn is what the caller makes of a connection. If it has Done() <-chan struct{}, its end makes for a new one.
type Conn interface{ Close() error }

// Config describes one process.
type Config[C Conn] struct {
	// Name of it, for logs and errors: "keeper".
	Name string
	// Argv and Env start it. Argv[0] is a path.
	Argv []string
	Env  []string
	// Socket is where it listens (SOCK_SEQPACKET).
	Socket string
	// Dial connects. It is tried until it succeeds, so it should not wait.
	Dial func(ctx context.Context) (C, error)
	// OnConnect is called with each new connection before anybody else has it; an error ends the connection. May be
	// nil.
	OnConnect func(ctx context.Context, c C) error
	// Renew has a process that runs another program than ours go on as this one; its connections may break. An error
	// leaves it as it is, or dead. May be nil.
	Renew func(ctx context.Context, program *os.File) error
	// Successor starts a process that takes the socket over from one that runs another program than ours and is ended
	// then; nil: such a one is adopted as it is.
	Successor []string
	// Cgroup is the v2 cgroup directory for it, made when absent; empty: it stays in ours.
	Cgroup string
	// LogFile takes what it prints.
	LogFile string
	// Cloneflags are the namespaces that it is started in, as syscall.CLONE_NEWNS.
	Cloneflags uintptr
	// Protect exempts it from the out-of-memory killer as far as we may. Its children inherit that.
	Protect bool
	Log     *slog.Logger
}

// Daemon supervises one process.
type Daemon[C Conn] struct {
	cfg    Config[C]
	ctx    context.Context // of the supervision; ended by Close
	cancel context.CancelCauseFunc
	gone   sync.WaitGroup

	mu   sync.Mutex
	conn C        // guarded by mu
	up   bool     // conn is one; guarded by mu
	proc *os.File // pidfd of the process conn is of; guarded by mu
	pid  int      // guarded by mu
}

// Start adopts the process or starts it, connects, and supervises it from then on. It returns when OnConnect has, or
// with what stood in the way.
func Start[C Conn](ctx context.Context, cfg Config[C]) (*Daemon[C], error) {
	d := &Daemon[C]{cfg: cfg}
	d.ctx, d.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	if err := d.ensure(ctx); err != nil {
		d.cancel(err)
		return nil, fmt.Errorf("start %s: %w", cfg.Name, err)
	}
	d.gone.Go(d.supervise)
	return d, nil
}

// Pid is the process's number, 0 while there is none.
func (d *Daemon[C]) Pid() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.up {
		return 0
	}
	return d.pid
}

// Close ends the supervision and the connection; the process lives on. Idempotent.
func (d *Daemon[C]) Close() error {
	d.cancel(errClosed)
	d.gone.Wait()
	return d.disconnect()
}

func (d *Daemon[C]) disconnect() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.up {
		return nil
	}
	d.up = false
	d.proc.Close()
	return d.conn.Close()
}

// errClosed ends a supervision.
var errClosed = errors.New("the supervision ended")

// errLate: it runs but does not speak.
var errLate = errors.New("it did not answer in time")

// errAbsent: no process listens at the socket.
var errAbsent = errors.New("no process listens")

// ensure connects to the process, which is started if there is none.
func (d *Daemon[C]) ensure(ctx context.Context) error {
	if err := d.renew(ctx); err != nil {
		d.cfg.Log.Warn("daemon is not renewed", "daemon", d.cfg.Name, "err", err)
	}
	err := d.reconnect(ctx)
	if err == nil {
		d.cfg.Log.Info("daemon adopted", "daemon", d.cfg.Name, "pid", d.Pid())
		return nil
	}
	if !errors.Is(err, errAbsent) {
		return err
	}
	return d.launch(ctx)
}

// reconnect is connect that goes on trying for a process that hangs up, as one does that is about to be gone.
func (d *Daemon[C]) reconnect(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, endsWithin, errLate)
	defer cancel()
	for {
		err := d.connect(ctx)
		if err == nil || errors.Is(err, errAbsent) || !hungUp(err) {
			return err
		}
		t := time.NewTimer(10 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		}
	}
}

// hungUp reports whether a connection ended as that to a process that goes does.
func hungUp(err error) bool {
	for _, end := range []error{io.EOF, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

// renew makes a process that runs another program than ours one of ours.
func (d *Daemon[C]) renew(ctx context.Context) error {
	if d.cfg.Renew == nil && d.cfg.Successor == nil {
		return nil
	}
	proc, pid, err := listener(ctx, d.cfg.Socket)
	if errors.Is(err, errAbsent) {
		return nil
	}
	if err != nil {
		return err
	}
	defer proc.Close()
	program, err := os.Open("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("open our own program: %w", err)
	}
	defer program.Close()
	same, err := runs(pid, program)
	if err != nil || same {
		return err
	}
	began := time.Now()
	if d.cfg.Renew != nil {
		err = d.cfg.Renew(ctx, program)
	} else {
		err = d.succeed(ctx, proc)
	}
	if err == nil {
		d.cfg.Log.Info("daemon renewed", "daemon", d.cfg.Name, "before", pid, "took", time.Since(began))
	}
	return err
}

// runs reports whether the process runs that very file.
func runs(pid int, program *os.File) (bool, error) {
	ours, err := program.Stat()
	if err != nil {
		return false, fmt.Errorf("look at our own program: %w", err)
	}
	its, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false, fmt.Errorf("look at the program of process %d: %w", pid, err)
	}
	return os.SameFile(ours, its), nil
}

// succeed starts a successor, waits until it has the socket, and ends the one before.
func (d *Daemon[C]) succeed(ctx context.Context, before *os.File) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyWithin, errLate)
	defer cancel()
	ended, pid, err := d.run(d.cfg.Successor)
	if err != nil {
		return err
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		proc, now, err := listener(ctx, d.cfg.Socket)
		if err == nil {
			proc.Close()
		}
		if err == nil && now == pid {
			return end(ctx, before)
		}
		select {
		case <-tick.C:
		case state := <-ended:
			return fmt.Errorf("the successor ended before it answered (%s); see %s", state, d.cfg.LogFile)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// connect makes one attempt.
func (d *Daemon[C]) connect(ctx context.Context) error {
	// A connection that says nothing tells who listens.
	proc, pid, err := listener(ctx, d.cfg.Socket)
	if err != nil {
		return err
	}
	conn, err := d.cfg.Dial(ctx)
	if err != nil {
		proc.Close()
		return err
	}
	if d.cfg.OnConnect != nil {
		if err := d.cfg.OnConnect(ctx, conn); err != nil {
			return errors.Join(err, conn.Close(), proc.Close())
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conn, d.proc, d.pid, d.up = conn, proc, pid, true
	return nil
}

// listener gives the process that listens at socket, errAbsent if none does.
func listener(ctx context.Context, socket string) (proc *os.File, pid int, err error) {
	c, err := scm.Dial(ctx, socket)
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, 0, fmt.Errorf("%w: %w", errAbsent, err)
	}
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = c.Close() }()
	cred, err := c.Peer()
	if err != nil {
		return nil, 0, err
	}
	if int(cred.UID) != os.Geteuid() {
		return nil, 0, errdefs.New(errdefs.Denied, socket, "uid %d listens there", cred.UID)
	}
	proc, err = c.PeerPidfd()
	return proc, cred.Pid, err
}

// launch starts the process and connects to it.
func (d *Daemon[C]) launch(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyWithin, errLate)
	defer cancel()
	ended, _, err := d.run(d.cfg.Argv)
	if err != nil {
		return err
	}
	pause := time.Millisecond
	for {
		if err = d.connect(ctx); err == nil {
			d.cfg.Log.Info("daemon started", "daemon", d.cfg.Name, "pid", d.Pid())
			return nil
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
			pause = min(pause*2, 50*time.Millisecond)
		case state := <-ended:
			t.Stop()
			return fmt.Errorf("it ended before it answered (%s); see %s", state, d.cfg.LogFile)
		case <-ctx.Done():
			t.Stop()
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// run starts a process with that command line; ended tells once how it ended.
func (d *Daemon[C]) run(argv []string) (ended <-chan string, pid int, err error) {
	out, err := d.openLog()
	if err != nil {
		return nil, 0, err
	}
	defer out.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, 0, fmt.Errorf("open null device: %w", err)
	}
	defer null.Close()
	group := d.openCgroup()
	if group != nil {
		defer group.Close()
	}
	cmd := d.command(argv, null, out, group)
	err = cmd.Start()
	if err != nil && group != nil {
		// Born elsewhere is better than not at all; it is moved if that can be.
		d.cfg.Log.Debug("daemon cannot be born in its cgroup", "daemon", d.cfg.Name, "err", err)
		cmd = d.command(argv, null, out, nil)
		if err = cmd.Start(); err == nil {
			procs := filepath.Join(d.cfg.Cgroup, "cgroup.procs")
			if err := os.WriteFile(procs, []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
				d.cfg.Log.Warn("daemon stays in our cgroup", "daemon", d.cfg.Name, "err", err)
			}
		}
	}
	if err != nil {
		return nil, 0, fmt.Errorf("run %s: %w", argv[0], err)
	}
	if d.cfg.Protect {
		d.protect(cmd.Process.Pid)
	}
	c := make(chan string, 1)
	// It ends with the process, or with us.
	go func() {
		_ = cmd.Wait()
		c <- cmd.ProcessState.String()
	}()
	return c, cmd.Process.Pid, nil
}

func (d *Daemon[C]) command(argv []string, in, out, group *os.File) *exec.Cmd {
	// No context: it is to outlive every one of ours.
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // see above
	cmd.Env = d.cfg.Env
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: d.cfg.Cloneflags}
	if group != nil {
		cmd.SysProcAttr.UseCgroupFD = true
		cmd.SysProcAttr.CgroupFD = int(group.Fd())
	}
	if cmd.Env == nil {
		cmd.Env = []string{}
	}
	return cmd
}

func (d *Daemon[C]) openCgroup() *os.File {
	if d.cfg.Cgroup == "" {
		return nil
	}
	err := os.MkdirAll(d.cfg.Cgroup, 0o755)
	if err == nil {
		var group *os.File
		if group, err = os.Open(d.cfg.Cgroup); err == nil {
			return group
		}
	}
	d.cfg.Log.Warn("daemon gets no cgroup", "daemon", d.cfg.Name, "err", err)
	return nil
}

// protect makes the process as safe from the out-of-memory killer as we may.
func (d *Daemon[C]) protect(pid int) {
	path := fmt.Sprintf("/proc/%d/oom_score_adj", pid)
	var err error
	for _, adj := range []string{"-1000", "-500", "0"} {
		if err = os.WriteFile(path, []byte(adj), 0); err == nil {
			return
		}
	}
	d.cfg.Log.Debug("out-of-memory score stays", "daemon", d.cfg.Name, "err", err)
}

// openLog opens the log for appending, begun anew when it is long.
func (d *Daemon[C]) openLog() (*os.File, error) {
	if fi, err := os.Stat(d.cfg.LogFile); err == nil && fi.Size() > maxLog {
		if err := os.Rename(d.cfg.LogFile, d.cfg.LogFile+".1"); err != nil {
			return nil, fmt.Errorf("put log away: %w", err)
		}
	}
	f, err := os.OpenFile(d.cfg.LogFile, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return f, nil
}

// trimLog bounds the log of a living process, which appends to the file whatever we do.
func trimLog(path string) error {
	if fi, err := os.Stat(path); err == nil && fi.Size() <= 2*maxLog {
		return nil
	}
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path+".1", b[max(len(b)-maxLog, 0):], 0o600)
	}
	if err == nil {
		err = os.Truncate(path, 0)
	}
	if err != nil {
		return fmt.Errorf("trim log: %w", err)
	}
	return nil
}

// supervise waits for the connection or the process to end, and makes new ones.
func (d *Daemon[C]) supervise() {
	row, begun := 0, time.Now()
	for d.await() {
		d.mu.Lock()
		dead, err := pidfd.Done(d.proc)
		d.mu.Unlock()
		d.lost()
		if err == nil && !dead && d.again() {
			continue
		}
		if time.Since(begun) > steady {
			row = 0
		}
		for {
			d.cfg.Log.Warn("daemon died", "daemon", d.cfg.Name, "row", row)
			if !d.sleep(backoff(row)) {
				return
			}
			row++
			begun = time.Now()
			err := d.ensure(d.ctx)
			if err == nil {
				break
			}
			if d.ctx.Err() != nil {
				return
			}
			d.cfg.Log.Error("start daemon", "daemon", d.cfg.Name, "err", err)
		}
	}
}

// backoff is the pause before the start that follows n deaths in a row.
func backoff(n int) time.Duration {
	if n == 0 {
		return 0
	}
	return min(firstPause<<min(n-1, 20), lastPause)
}

func (d *Daemon[C]) sleep(pause time.Duration) bool {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
		return d.ctx.Err() == nil
	case <-d.ctx.Done():
		return false
	}
}

// await returns true when the connection or its process is gone, false when the supervision ends.
func (d *Daemon[C]) await() bool {
	d.mu.Lock()
	conn, proc := d.conn, d.proc
	d.mu.Unlock()
	ctx, cancel := context.WithCancelCause(d.ctx)
	var broken <-chan struct{}
	if c, ok := any(conn).(interface{ Done() <-chan struct{} }); ok {
		broken = c.Done()
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	died := make(chan struct{})
	wg.Go(func() {
		if err := pidfd.Wait(ctx, proc); err != nil && ctx.Err() == nil {
			d.cfg.Log.Error("wait for daemon", "daemon", d.cfg.Name, "err", err)
		}
		close(died)
	})
	tick := time.NewTicker(logCheck)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if err := trimLog(d.cfg.LogFile); err != nil {
				d.cfg.Log.Warn("log of daemon", "daemon", d.cfg.Name, "err", err)
			}
		case <-broken:
			// Of a process that dies the connection breaks first.
			select {
			case <-died:
			case <-time.After(10 * time.Millisecond):
			}
			return d.ctx.Err() == nil
		case <-died:
			return d.ctx.Err() == nil
		}
	}
}

func (d *Daemon[C]) lost() {
	if err := d.disconnect(); err != nil {
		d.cfg.Log.Debug("close connection", "daemon", d.cfg.Name, "err", err)
	}
}

// again connects anew to a process that lives; one that does not answer in time is killed.
func (d *Daemon[C]) again() bool {
	ctx, cancel := context.WithTimeoutCause(d.ctx, readyWithin, errLate)
	defer cancel()
	d.cfg.Log.Warn("connection to daemon broke", "daemon", d.cfg.Name)
	for ctx.Err() == nil {
		err := d.connect(ctx)
		if err == nil {
			return true
		}
		if errors.Is(err, errAbsent) {
			return false // it died since
		}
		d.sleep(50 * time.Millisecond)
	}
	if d.ctx.Err() == nil {
		d.cfg.Log.Error("daemon does not answer, it is killed", "daemon", d.cfg.Name)
		if err := Stop(d.ctx, d.cfg.Socket, d.cfg.Cgroup); err != nil {
			d.cfg.Log.Error("kill daemon", "daemon", d.cfg.Name, "err", err)
		}
	}
	return false
}

// Stop ends the process that listens at socket, if one does: SIGTERM, after a while SIGKILL. Then whatever is left in
// its cgroup is killed and the cgroup removed; empty: there is none. It returns when the process is gone. Idempotent.
func Stop(ctx context.Context, socket, cgroup string) error {
	proc, _, err := listener(ctx, socket)
	switch {
	case err == nil:
		defer proc.Close()
		if err := end(ctx, proc); err != nil {
			return fmt.Errorf("stop the process at %s: %w", socket, err)
		}
	case errors.Is(err, errAbsent):
	default:
		return fmt.Errorf("stop the process at %s: %w", socket, err)
	}
	if cgroup == "" {
		return nil
	}
	return removeCgroup(ctx, cgroup)
}

func end(ctx context.Context, proc *os.File) error {
	if err := pidfd.Signal(proc, syscall.SIGTERM); err != nil {
		if errors.Is(err, os.ErrProcessDone) {
			return nil
		}
		return err
	}
	soon, cancel := context.WithTimeoutCause(ctx, polite, errLate)
	defer cancel()
	err := pidfd.Wait(soon, proc)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if err := pidfd.Signal(proc, syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return pidfd.Wait(ctx, proc)
}

func removeCgroup(ctx context.Context, dir string) error {
	err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("end cgroup: %w", err)
	}
	// What was killed leaves a moment later.
	for pause := time.Millisecond; ; pause = min(pause*2, 100*time.Millisecond) {
		err := os.Remove(dir)
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("remove cgroup: %w", errors.Join(context.Cause(ctx), err))
		}
	}
}
