package native

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Exit codes of sandsea-init itself, as in init/wire.h.
const (
	endOrphaned = 10
	endFirst    = endOrphaned
	endLast     = 14
)

// facts are what is known of a dead PID 1.
type facts struct {
	status syscall.WaitStatus
	known  bool // status is
	oom    bool // the out-of-memory counter moved of late
}

// cause follows the order of docs: out of memory; killed from outside, since nothing inside can send SIGKILL to PID 1;
// crashed; orphaned; the workload's doing.
func cause(f facts) backend.Exit {
	switch ws := f.status; {
	case f.oom && (!f.known || ws.Signaled() && ws.Signal() == syscall.SIGKILL):
		return backend.Exit{Cause: sandbox.CauseOOM, Detail: "out of memory"}
	case !f.known:
		return backend.Exit{Cause: sandbox.CauseInfraUnknown, Detail: "the kernel does not tell how PID 1 ended"}
	case ws.Signaled() && ws.Signal() == syscall.SIGKILL:
		return backend.Exit{Cause: sandbox.CauseInfraKilled, Detail: "PID 1 was killed from outside"}
	case ws.Signaled() && crash(ws.Signal()):
		return backend.Exit{Cause: sandbox.CauseInfraInit, Detail: fmt.Sprintf("PID 1 crashed: %v", ws.Signal())}
	case ws.Exited() && ws.ExitStatus() == endOrphaned:
		return backend.Exit{Cause: sandbox.CauseInfraOrphaned, Detail: "neither edge nor keeper held the line"}
	case ws.Exited() && ws.ExitStatus() > endFirst && ws.ExitStatus() <= endLast:
		return backend.Exit{Cause: sandbox.CauseInfraInit, Detail: fmt.Sprintf("PID 1 gave up: %d", ws.ExitStatus())}
	case ws.Signaled():
		return backend.Exit{Cause: sandbox.CauseAgentDestroyed, Detail: fmt.Sprintf("PID 1 ended by %v", ws.Signal())}
	default:
		return backend.Exit{Cause: sandbox.CauseAgentDestroyed, Detail: fmt.Sprintf("PID 1 exited: %d", ws.ExitStatus())}
	}
}

func crash(s syscall.Signal) bool {
	switch s {
	case syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGILL, syscall.SIGABRT, syscall.SIGFPE, syscall.SIGTRAP, syscall.SIGSYS:
		return true
	}
	return false
}

// oomWindow is how long before the end a kill for lack of memory counts as part of it, though somebody looked at the
// counter in between.
const oomWindow = 2 * time.Second

var errNoStatus = errors.New("nobody waits for PID 1")

// evidence gathers the facts about a dead PID 1 and judges them.
func (i *Instance) evidence(ctx context.Context) backend.Exit {
	var f facts
	i.mu.Lock()
	seen, at := i.oom, i.oomAt
	i.mu.Unlock()
	if n, err := i.group.OOMKills(); err == nil {
		f.oom = n > seen || n > 0 && time.Since(at) < oomWindow
	}
	ctx, stop := context.WithTimeoutCause(ctx, statusLimit, errNoStatus)
	defer stop()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		ws, ok, err := pidfd.ExitStatus(i.pidfd)
		if ok {
			f.status, f.known = ws, true
		}
		if err != nil && !errors.Is(err, pidfd.ErrNoExitInfo) {
			i.b.log.Error("cannot read how PID 1 ended", "sandbox", i.id, "err", err)
		}
		if ok || err != nil {
			break
		}
		// Dead, but its parent has not waited for it yet.
		select {
		case <-time.After(pause):
			continue
		case <-ctx.Done():
		}
		break
	}
	e := cause(f)
	if e.Cause == sandbox.CauseInfraInit {
		i.b.log.Error("PID 1 of a sandbox failed", "sandbox", i.id, "detail", e.Detail)
	}
	return e
}
