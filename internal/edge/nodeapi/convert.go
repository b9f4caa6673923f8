package nodeapi

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/chronus/files"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

func at(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// valid makes a string of outside one that a message can carry.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func (s *Server) sandbox(x runner.Snapshot) *sandseav1.Sandbox {
	m := Sandbox(x)
	m.Node = s.cfg.Identity.Name
	return m
}

// Sandbox is the message for a snapshot, without its node's name.
func Sandbox(x runner.Snapshot) *sandseav1.Sandbox {
	m := &sandseav1.Sandbox{
		Id: string(x.ID), Project: x.Project, Spec: sandboxpb.FromSpec(x.Spec),
		State: sandboxpb.FromState(x.State, x.End.Cause),
		Epoch: x.Epoch, CreatedAt: at(x.Created), ReadyAt: at(x.Ready), ExpiresAt: at(x.Expires),
		Layers: sandboxpb.FromDigests(x.Layers), IdleForMs: x.IdleFor.Milliseconds(), ImageDigest: string(x.Image),
		Config: sandboxpb.FromConfig(x.Config), NetworkPhase: x.Phase,
	}
	for _, name := range slices.Sorted(maps.Keys(x.Enforcement)) {
		m.Enforcement = append(m.Enforcement, &sandseav1.Enforcement{Name: name, Mechanism: x.Enforcement[name]})
	}
	if x.State == sandbox.Ended {
		m.End = &sandseav1.End{Cause: string(x.End.Cause), Detail: valid(x.End.Detail), By: valid(x.End.By), At: at(x.Ended)}
	}
	return m
}

func (s *Server) node(all []runner.Snapshot) *sandseav1.Node {
	running := int64(0)
	for _, x := range all {
		if x.State == sandbox.Running {
			running++
		}
	}
	load, caps, self := s.cfg.Room.Load(), s.cfg.Capabilities, s.cfg.Identity
	m := &sandseav1.Node{
		Name: self.Name, Number: int64(self.Number), Epoch: self.Epoch, State: sandseav1.NodeState_NODE_STATE_READY,
		Kernel: caps.Kernel, Version: s.cfg.Version, Cpus: int64(caps.CPUs), MemoryBytes: caps.Memory,
		DiskFreeBytes: load.DiskFree, SandboxesRunning: running, MemoryPromisedBytes: load.Memory,
		CpuMillisPromised: load.CPUMillis, SandboxesMax: int64(load.MaxSandboxes), SeenAt: timestamppb.New(s.cfg.Now()),
	}
	for _, f := range caps.Features {
		m.Features = append(m.Features, &sandseav1.Feature{
			Name: f.Name, Status: string(f.Status), Mechanism: f.Mechanism, Fix: f.Fix,
		})
	}
	return m
}

func fromCommand(m *sandseav1.Command) sessions.Command {
	return sessions.Command{
		Argv: m.GetArgv(), Env: m.GetEnv(), ReplaceEnv: m.GetEnvMode() == sandseav1.EnvMode_ENV_MODE_REPLACE,
		User: m.GetUser(),
		Cwd:  m.GetCwd(), MergeStderr: m.GetMergeStderr(), Timeout: milliseconds(m.GetTimeoutMs()),
		Overflow: fromOverflow(m.GetOverflow()),
	}
}

var overflows = map[sandseav1.Overflow]sessions.Overflow{
	sandseav1.Overflow_OVERFLOW_UNSPECIFIED: sessions.OverflowHeadTail,
	sandseav1.Overflow_OVERFLOW_HEAD_TAIL:   sessions.OverflowHeadTail,
	sandseav1.Overflow_OVERFLOW_TAIL:        sessions.OverflowTail,
	sandseav1.Overflow_OVERFLOW_HEAD:        sessions.OverflowHead,
	sandseav1.Overflow_OVERFLOW_FAIL:        sessions.OverflowFail,
}

// fromOverflow leaves a value that nobody knows for the check of the command.
func fromOverflow(o sandseav1.Overflow) sessions.Overflow {
	known, ok := overflows[o]
	if !ok {
		return sessions.Overflow(o.String())
	}
	return known
}

func toOverflow(o sessions.Overflow) sandseav1.Overflow {
	for m, known := range overflows {
		if known == o && m != sandseav1.Overflow_OVERFLOW_UNSPECIFIED {
			return m
		}
	}
	return sandseav1.Overflow_OVERFLOW_UNSPECIFIED
}

func toCommand(c sessions.Command) *sandseav1.Command {
	m := &sandseav1.Command{
		User: valid(c.User), Cwd: valid(c.Cwd), MergeStderr: c.MergeStderr, TimeoutMs: c.Timeout.Milliseconds(),
		EnvMode: sandseav1.EnvMode_ENV_MODE_MERGE, Overflow: toOverflow(c.Overflow),
	}
	if c.ReplaceEnv {
		m.EnvMode = sandseav1.EnvMode_ENV_MODE_REPLACE
	}
	for _, a := range c.Argv {
		m.Argv = append(m.Argv, valid(a))
	}
	if len(c.Env) > 0 {
		m.Env = map[string]string{}
		for k, v := range c.Env {
			m.Env[valid(k)] = valid(v)
		}
	}
	return m
}

func toResult(r sessions.Result) *sandseav1.Result {
	m := &sandseav1.Result{
		ExitCode: int32(r.ExitCode), Signal: int32(r.Signal), SignalName: signalName(r.Signal), TimedOut: r.TimedOut,
		Oom:       r.OOM,
		Truncated: r.Truncated, StdoutBytes: r.StdoutBytes, StderrBytes: r.StderrBytes, WallUs: r.Wall.Microseconds(),
		CpuUs: r.CPU.Microseconds(), PeakMemoryBytes: r.PeakMemory, InfraError: valid(r.InfraError),
		PausedUs: r.Paused.Microseconds(), OutputExceeded: r.Exceeded,
	}
	if f := r.StartFailure; f != nil {
		m.StartFailure = &sandseav1.StartFailure{Kind: f.Kind, Message: valid(f.Message), Errno: int32(f.Errno)}
	}
	return m
}

func toProcess(i sessions.Info) *sandseav1.Process {
	m := &sandseav1.Process{
		Number: i.Number, Command: toCommand(i.Command), StartedAt: at(i.Started), EndedAt: at(i.Ended), HostPid: i.HostPid,
		InputOpen: i.InputOpen, Terminal: toTerminal(i.Terminal), Shell: i.Shell,
	}
	switch i.State {
	case sessions.Running:
		m.State = sandseav1.ProcessState_PROCESS_STATE_RUNNING
	case sessions.Exited:
		m.State = sandseav1.ProcessState_PROCESS_STATE_EXITED
	case sessions.Failed:
		m.State = sandseav1.ProcessState_PROCESS_STATE_FAILED
	}
	if i.Result != nil {
		m.Result = toResult(*i.Result)
	}
	return m
}

func toEvent(e sessions.Event) *sandseav1.ProcessEvent {
	stream := sandseav1.Stream_STREAM_STDOUT
	if e.Stream == 2 {
		stream = sandseav1.Stream_STREAM_STDERR
	}
	switch {
	case e.Started != nil:
		return &sandseav1.ProcessEvent{Event: &sandseav1.ProcessEvent_Started{Started: toProcess(*e.Started)}}
	case e.Exited != nil:
		return &sandseav1.ProcessEvent{Event: &sandseav1.ProcessEvent_Exited{Exited: toProcess(*e.Exited)}}
	case e.Gap > 0:
		return &sandseav1.ProcessEvent{Event: &sandseav1.ProcessEvent_Gap{
			Gap: &sandseav1.OutputGap{Stream: stream, Offset: e.Offset, Bytes: e.Gap},
		}}
	default:
		return &sandseav1.ProcessEvent{Event: &sandseav1.ProcessEvent_Data{
			Data: &sandseav1.OutputData{Stream: stream, Offset: e.Offset, Data: e.Data},
		}}
	}
}

func toInfo(f files.Info) *sandseav1.FileInfo {
	return &sandseav1.FileInfo{
		Path: escaped(f.Path), Type: toType(f.Type), Size: f.Size, Mode: f.Mode, Uid: f.UID, Gid: f.GID,
		ModifiedAt: at(f.ModTime), Link: escaped(f.Link), Inode: f.Inode, Links: f.Links,
	}
}

// signalNames are Linux's, from 1 on.
var signalNames = [...]string{
	1: "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
	"STKFLT",
	"CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
}

func signalName(n int) string {
	switch {
	case n < 1 || n > 64:
		return ""
	case n < len(signalNames):
		return "SIG" + signalNames[n]
	default:
		return fmt.Sprintf("SIGRTMIN+%d", n-34)
	}
}
