package testserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/linux/tty"
)

// Programs that are not on this machine and stand for what cannot be had without a kernel's help.
const (
	// OOM dies as the out-of-memory killer's victim.
	OOM = "/fake/oom"
	// Infra is a command of which the platform lost sight.
	Infra = "/fake/infra"
	// Gap writes "head", loses 1 MiB, and writes "tail".
	Gap = "/fake/gap"
)

// lingers is how long output may come after its command has ended: a background child keeps the pipe or the terminal. It
// is long, since what is still on its way then would be lost on a busy machine.
const lingers = 2 * time.Second

// proc is a command with its record.
type proc struct {
	box     *box
	command *pb.Command
	exec    *exec.Cmd
	stdin   io.WriteCloser
	tty     *os.File // our end of its terminal, nil without one

	sending sync.Mutex
	taken   int64 // of its input; guarded by sending

	mu      sync.Mutex
	info    *pb.Process   // guarded by mu
	out     [2]record     // guarded by mu; stdout, stderr
	changed chan struct{} // guarded by mu; closed at each change
	ended   chan struct{}
}

// record is the output of one stream; gap bytes are missing after the first at ones.
type record struct {
	data    []byte
	at, gap int64
}

// sink appends to one stream of a record.
type sink struct {
	p *proc
	i int
}

func (s sink) Write(b []byte) (int, error) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.out[s.i].data = append(s.p.out[s.i].data, b...)
	s.p.wakeLocked()
	return len(b), nil
}

func (p *proc) wakeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *proc) snapshot() *pb.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return proto.CloneOf(p.info)
}

func (b *box) list() []*proc {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.procs)
}

func (b *box) find(number int64) (*proc, error) {
	list := b.list()
	if number < 1 || number > int64(len(list)) {
		return nil, errdefs.New(errdefs.NotFound, fmt.Sprintf("process %d", number), "none in this sandbox")
	}
	return list[number-1], nil
}

func (b *box) kill() {
	for _, p := range b.list() {
		p.signal(syscall.SIGKILL, true)
		<-p.ended
	}
}

func (p *proc) signal(sig syscall.Signal, tree bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exec == nil || p.info.GetState() != pb.ProcessState_PROCESS_STATE_RUNNING {
		return
	}
	pid := p.exec.Process.Pid
	if tree {
		pid = -pid
	}
	_ = syscall.Kill(pid, sig)
}

// start runs a command, or finds the one that its key stands for. With a terminal it runs on one of this size.
func (b *box) start(cmd *pb.Command, key string, stdin bool, terminal *pb.TerminalSize) (*proc, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p := b.keys[key]; p != nil && key != "" {
		return p, true
	}
	p := &proc{box: b, command: cmd, changed: make(chan struct{}), ended: make(chan struct{})}
	b.procs = append(b.procs, p)
	if key != "" {
		b.keys[key] = p
	}
	p.info = &pb.Process{
		Number: int64(len(b.procs)), Command: cmd, State: pb.ProcessState_PROCESS_STATE_RUNNING, StartedAt: timestamppb.Now(),
		InputOpen: stdin || terminal != nil, Terminal: terminal,
	}
	p.launch(stdin)
	return p, false
}

func (p *proc) launch(stdin bool) {
	switch p.command.GetArgv()[0] {
	case OOM:
		p.end(&pb.Result{ExitCode: 137, Signal: 9, SignalName: "SIGKILL", Oom: true, WallUs: 12000})
		return
	case Infra:
		p.end(&pb.Result{ExitCode: 125, InfraError: "the keeper lost its record"})
		return
	case Gap:
		p.out[0] = record{data: []byte("headtail"), at: 4, gap: 1 << 20}
		p.end(&pb.Result{Truncated: true})
		return
	}
	if f := p.begin(stdin); f != nil {
		code := int32(126)
		if f.GetKind() == "not_found" {
			code = 127
		}
		p.end(&pb.Result{ExitCode: code, StartFailure: f})
	}
}

// begin starts the process, or says why it cannot.
func (p *proc) begin(stdin bool) *pb.StartFailure {
	c := p.command
	if u := c.GetUser(); u != "" && u != "root" && u != "0" {
		return &pb.StartFailure{Kind: "user", Message: fmt.Sprintf("the sandbox has no user %q", u)}
	}
	dir := filepath.Join(p.box.dir, c.GetCwd())
	if _, err := os.Stat(dir); err != nil {
		return &pb.StartFailure{Kind: "cwd", Message: fmt.Sprintf("cannot enter the directory %q: %v", c.GetCwd(), syscall.ENOENT), Errno: 2}
	}
	argv := c.GetArgv()
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // its process group is killed instead
	cmd.Dir, cmd.Env = dir, []string{"PATH=/usr/bin:/bin", "HOME=/", "LC_ALL=C"}
	for _, env := range []map[string]string{p.box.spec.GetEnv(), c.GetEnv()} {
		for k, v := range env {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	cmd.WaitDelay = lingers
	read := func() {}
	if size := p.info.GetTerminal(); size != nil {
		var err error
		if read, err = p.onTerminal(cmd, size); err != nil {
			return &pb.StartFailure{Kind: "resources", Message: err.Error()}
		}
	} else {
		cmd.Stdout, cmd.Stderr = sink{p, 0}, sink{p, 1}
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	}
	if stdin && p.tty == nil {
		var err error
		if p.stdin, err = cmd.StdinPipe(); err != nil {
			return &pb.StartFailure{Kind: "resources", Message: err.Error()}
		}
	}
	if err := cmd.Start(); err != nil {
		read()
		return startFailure(argv[0], err)
	}
	p.exec = cmd
	timedOut := false
	var timer *time.Timer
	if ms := c.GetTimeoutMs(); ms > 0 {
		timer = time.AfterFunc(time.Duration(ms)*time.Millisecond, func() {
			p.mu.Lock()
			timedOut = true
			p.mu.Unlock()
			p.signal(syscall.SIGKILL, true)
		})
	}
	began := time.Now()
	go func() {
		_ = cmd.Wait()
		read()
		if timer != nil {
			timer.Stop()
		}
		r := result(cmd.ProcessState, time.Since(began))
		p.mu.Lock()
		if timedOut {
			r.TimedOut, r.ExitCode = true, 124
		}
		p.mu.Unlock()
		p.end(r)
	}()
	return nil
}

// onTerminal gives a command a terminal, whose output is recorded until read returns.
func (p *proc) onTerminal(cmd *exec.Cmd, size *pb.TerminalSize) (read func(), err error) {
	ours, err := tty.Open()
	if err != nil {
		return nil, err
	}
	theirs, err := tty.Peer(ours)
	if err == nil {
		err = tty.SetSize(ours, characters(size))
	}
	if err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	p.tty, p.stdin = ours, ours
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, theirs, theirs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if _, set := p.command.GetEnv()["TERM"]; !set {
		cmd.Env = append(cmd.Env, "TERM=xterm-256color")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(sink{p, 0}, ours) // until no process has its end open
	}()
	return func() {
		_ = theirs.Close()
		select {
		case <-done:
		case <-time.After(lingers):
		}
		_ = ours.Close()
		<-done
	}, nil
}

func characters(s *pb.TerminalSize) tty.Size {
	return tty.Size{Columns: uint16(s.GetColumns()), Rows: uint16(s.GetRows())}
}

func startFailure(name string, err error) *pb.StartFailure {
	switch {
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return &pb.StartFailure{Kind: "not_found", Message: fmt.Sprintf("%q is not there", name), Errno: 2}
	case errors.Is(err, fs.ErrPermission):
		return &pb.StartFailure{Kind: "not_executable", Message: fmt.Sprintf("%q cannot be executed: permission denied", name), Errno: 13}
	}
	return &pb.StartFailure{Kind: "broken_sandbox", Message: err.Error()}
}

func result(st *os.ProcessState, took time.Duration) *pb.Result {
	r := &pb.Result{WallUs: took.Microseconds(), CpuUs: (st.UserTime() + st.SystemTime()).Microseconds()}
	ws, ok := st.Sys().(syscall.WaitStatus)
	switch {
	case ok && ws.Signaled():
		r.ExitCode, r.Signal, r.SignalName = 128+int32(ws.Signal()), int32(ws.Signal()), signalName(ws.Signal())
	default:
		r.ExitCode = int32(st.ExitCode())
	}
	return r
}

func signalName(s syscall.Signal) string {
	switch s {
	case syscall.SIGKILL:
		return "SIGKILL"
	case syscall.SIGTERM:
		return "SIGTERM"
	case syscall.SIGINT:
		return "SIGINT"
	}
	return fmt.Sprintf("SIG%d", int(s))
}

// end files the result.
func (p *proc) end(r *pb.Result) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.StdoutBytes, r.StderrBytes = p.out[0].size(), p.out[1].size()
	p.info.Result, p.info.EndedAt, p.info.InputOpen = r, timestamppb.Now(), false
	p.info.State = pb.ProcessState_PROCESS_STATE_EXITED
	if r.GetStartFailure() != nil {
		p.info.State = pb.ProcessState_PROCESS_STATE_FAILED
	}
	p.wakeLocked()
	close(p.ended)
}

func (r record) size() int64 { return int64(len(r.data)) + r.gap }

// next is the piece at a stream's offset, or nil at its end.
func (r record) next(stream pb.Stream, off int64) *pb.ProcessEvent {
	switch {
	case off >= r.size():
		return nil
	case r.gap > 0 && off >= r.at && off < r.at+r.gap:
		gap := &pb.OutputGap{Stream: stream, Offset: off, Bytes: r.at + r.gap - off}
		return &pb.ProcessEvent{Event: &pb.ProcessEvent_Gap{Gap: gap}}
	}
	from, to := off, int64(len(r.data))
	if r.gap > 0 && off < r.at {
		to = r.at
	} else if r.gap > 0 {
		from = off - r.gap
	}
	data := &pb.OutputData{Stream: stream, Offset: off, Data: bytes.Clone(r.data[from:min(to, from+64<<10)])}
	return &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: data}}
}

// follow sends a record from offsets on, to the end of the process or, without wait, of what there is.
func (p *proc) follow(ctx context.Context, off [2]int64, wait bool, send func(*pb.ProcessEvent) error) error {
	for {
		p.mu.Lock()
		var batch []*pb.ProcessEvent
		for i, stream := range []pb.Stream{pb.Stream_STREAM_STDOUT, pb.Stream_STREAM_STDERR} {
			if ev := p.out[i].next(stream, off[i]); ev != nil {
				batch = append(batch, ev)
				off[i] += int64(len(ev.GetData().GetData())) + ev.GetGap().GetBytes()
			}
		}
		over, changed := p.info.GetResult() != nil, p.changed
		p.mu.Unlock()
		for _, ev := range batch {
			if err := send(ev); err != nil {
				return err
			}
		}
		switch {
		case len(batch) > 0:
			continue
		case over:
			return send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Exited{Exited: p.snapshot()}})
		case !wait:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// processes serves commands.
type processes struct {
	sandseav1connect.UnimplementedProcessServiceHandler
	e *edge
}

func (h processes) Run(ctx context.Context, r *connect.Request[pb.RunRequest]) (*connect.Response[pb.RunResponse], error) {
	b, err := h.e.box(ctx, r.Msg.GetId(), r.Header(), false)
	if err != nil {
		return nil, err
	}
	p, known := b.start(r.Msg.GetCommand(), r.Msg.GetKey(), r.Msg.Stdin != nil, nil)
	if !known && p.stdin != nil {
		_, _ = p.stdin.Write(r.Msg.GetStdin())
		_ = p.stdin.Close()
	}
	select {
	case <-p.ended:
	case <-ctx.Done():
		if r.Msg.GetKey() == "" {
			p.signal(syscall.SIGKILL, true)
		}
		return nil, context.Cause(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	res := proto.CloneOf(p.info.GetResult())
	res.Replayed = known
	out := &pb.RunResponse{Number: p.info.GetNumber(), Result: res, Stdout: p.out[0].data, Stderr: p.out[1].data}
	if p.out[0].gap > 0 {
		out.StdoutGapBytes, out.StdoutGapAt = p.out[0].gap, p.out[0].at
	}
	return connect.NewResponse(out), nil
}

func (h processes) Start(ctx context.Context, r *connect.Request[pb.StartRequest], down *connect.ServerStream[pb.StartResponse]) error {
	b, err := h.e.box(ctx, r.Msg.GetId(), r.Header(), false)
	if err != nil {
		return err
	}
	caller := ctx
	ctx, done := h.e.breakable(ctx)
	defer done()
	p, _ := b.start(r.Msg.GetCommand(), r.Msg.GetKey(), r.Msg.GetStdin(), r.Msg.GetTerminal())
	send := func(ev *pb.ProcessEvent) error { return down.Send(&pb.StartResponse{Event: ev}) }
	started := p.snapshot()
	started.Result = nil
	if err := send(&pb.ProcessEvent{Event: &pb.ProcessEvent_Started{Started: started}}); err != nil {
		return err
	}
	if r.Msg.GetDetached() {
		return nil
	}
	err = p.follow(ctx, [2]int64{}, true, send)
	if caller.Err() != nil && r.Msg.GetKey() == "" {
		p.signal(syscall.SIGKILL, true)
	}
	return err
}

func (h processes) Attach(ctx context.Context, r *connect.Request[pb.AttachRequest], down *connect.ServerStream[pb.AttachResponse]) error {
	b, err := h.e.box(ctx, r.Msg.GetId(), r.Header(), true)
	if err != nil {
		return err
	}
	p, err := b.find(r.Msg.GetNumber())
	if err != nil {
		return err
	}
	ctx, done := h.e.breakable(ctx)
	defer done()
	off := [2]int64{r.Msg.GetStdoutOffset(), r.Msg.GetStderrOffset()}
	return p.follow(ctx, off, !r.Msg.GetNoFollow(), func(ev *pb.ProcessEvent) error {
		return down.Send(&pb.AttachResponse{Event: ev})
	})
}

func (h processes) SendInput(ctx context.Context, r *connect.Request[pb.SendInputRequest]) (*connect.Response[pb.SendInputResponse], error) {
	p, err := h.proc(ctx, r.Msg.GetId(), r.Msg.GetNumber(), r)
	if err != nil {
		return nil, err
	}
	if p.stdin == nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "process", "its input is closed").WithHint("Start it with input")
	}
	p.sending.Lock() // a send whose caller has gone may still wait for the pipe
	defer p.sending.Unlock()
	data := r.Msg.GetData()
	if r.Msg.GetOffset() < p.taken {
		data = data[min(int64(len(data)), p.taken-r.Msg.GetOffset()):]
	}
	n, err := p.stdin.Write(data)
	p.taken += int64(n)
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "process", "it does not read any more").WithHint("See its result")
	}
	return connect.NewResponse(&pb.SendInputResponse{NextOffset: p.taken}), nil
}

func (h processes) CloseInput(ctx context.Context, r *connect.Request[pb.CloseInputRequest]) (*connect.Response[pb.CloseInputResponse], error) {
	p, err := h.proc(ctx, r.Msg.GetId(), r.Msg.GetNumber(), r)
	if err != nil {
		return nil, err
	}
	if p.tty != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "process", "a terminal has no end of input").WithHint("Send the byte 4 (Ctrl-D)")
	}
	if p.stdin != nil {
		_ = p.stdin.Close()
	}
	return connect.NewResponse(&pb.CloseInputResponse{}), nil
}

func (h processes) ResizeTTY(ctx context.Context, r *connect.Request[pb.ResizeTTYRequest]) (*connect.Response[pb.ResizeTTYResponse], error) {
	p, err := h.proc(ctx, r.Msg.GetId(), r.Msg.GetNumber(), r)
	if err != nil {
		return nil, err
	}
	if p.tty == nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "process", "it has no terminal").WithHint("Start it with one")
	}
	if err := tty.SetSize(p.tty, characters(r.Msg.GetSize())); err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "process", "%v", err)
	}
	return connect.NewResponse(&pb.ResizeTTYResponse{}), nil
}

func (h processes) Signal(ctx context.Context, r *connect.Request[pb.SignalRequest]) (*connect.Response[pb.SignalResponse], error) {
	p, err := h.proc(ctx, r.Msg.GetId(), r.Msg.GetNumber(), r)
	if err != nil {
		return nil, err
	}
	p.signal(syscall.Signal(r.Msg.GetSignal()), r.Msg.GetTree())
	return connect.NewResponse(&pb.SignalResponse{}), nil
}

func (h processes) List(ctx context.Context, r *connect.Request[pb.ListProcessesRequest]) (*connect.Response[pb.ListProcessesResponse], error) {
	b, err := h.e.box(ctx, r.Msg.GetId(), r.Header(), true)
	if err != nil {
		return nil, err
	}
	out := &pb.ListProcessesResponse{}
	for _, p := range b.list() {
		out.Processes = append(out.Processes, p.snapshot())
	}
	return connect.NewResponse(out), nil
}

func (h processes) proc(ctx context.Context, id string, number int64, r connect.AnyRequest) (*proc, error) {
	b, err := h.e.box(ctx, id, r.Header(), false)
	if err != nil {
		return nil, err
	}
	return b.find(number)
}

// inside turns a path of the sandbox into one below its directory.
func inside(path string) string {
	if p := strings.TrimPrefix(filepath.Clean("/"+path), "/"); p != "" {
		return p
	}
	return "."
}
