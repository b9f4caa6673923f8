package nodeapi_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/api/node/v1/nodev1connect"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/edge/nodeapi"
	"github.com/sandsea/sandsea/internal/edge/runner/edgetest"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// door is a node's door over a fake machine, with clients on its socket.
type door struct {
	*edgetest.Edge
	server *nodeapi.Server
	edge   nodev1connect.EdgeServiceClient
	proc   sandseav1connect.ProcessServiceClient
	file   sandseav1connect.FileServiceClient
}

// as is an interceptor that says who calls.
func as(projects string) connect.Interceptor {
	return headers{func(h http.Header) {
		h.Set(sandboxpb.ProjectsHeader, projects)
		h.Set(sandboxpb.PrincipalHeader, "user:test")
	}}
}

type headers struct{ set func(http.Header) }

func (x headers) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		x.set(r.Header())
		return next(ctx, r)
	}
}

func (x headers) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, s connect.Spec) connect.StreamingClientConn {
		c := next(ctx, s)
		x.set(c.RequestHeader())
		return c
	}
}

func (headers) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func newDoor(t *testing.T, change ...func(*nodeapi.Config)) *door {
	t.Helper()
	d := &door{Edge: edgetest.New(t)}
	cfg := nodeapi.Config{
		Runner: d.Runner, Room: d.Room, Identity: nodeapi.Identity{Number: edgetest.Number, Epoch: 3, Name: "n42"},
		Capabilities: d.Caps, Version: "test", Now: time.Now, Log: slog.New(slog.DiscardHandler),
	}
	for _, c := range change {
		c(&cfg)
	}
	var err error
	if d.server, err = nodeapi.New(cfg); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node.sock")
	ln, err := nodeapi.ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("mode of the socket: %v, %v", fi.Mode(), err)
	}
	if err := d.server.Serve(ln); err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		ctx, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		_ = d.server.Shutdown(ctx)
	})
	d.dial(&http.Client{Transport: transport}, "http://node", "default")
	return d
}

func (d *door) dial(c *http.Client, url, projects string) {
	opts := connect.WithInterceptors(as(projects))
	d.edge = nodev1connect.NewEdgeServiceClient(c, url, opts)
	d.proc = sandseav1connect.NewProcessServiceClient(c, url, opts)
	d.file = sandseav1connect.NewFileServiceClient(c, url, opts)
}

func (d *door) request(id sandbox.ID) *nodev1.CreateRequest {
	return &nodev1.CreateRequest{
		Id: string(id), Project: "default/team", NodeEpoch: 3, By: "user:test", Digest: "d",
		Spec:   &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "debian"}, Labels: map[string]string{"a": "b"}},
		Layers: []string{"sha256:" + strings.Repeat("0", 64)},
	}
}

func kindOf(err error) errdefs.Kind { return errdefs.KindOf(errwire.FromConnect(err)) }

func (d *door) create(t *testing.T) string {
	t.Helper()
	id := d.ID()
	res, err := d.edge.Create(t.Context(), connect.NewRequest(d.request(id)))
	if err != nil {
		t.Fatal(err)
	}
	s := res.Msg.GetSandbox()
	if s.GetId() != string(id) || s.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING || s.GetNode() != "n42" ||
		s.GetEpoch() != 1 || s.GetSpec().GetLimits().GetPids() != sandbox.DefaultPids || len(s.GetEnforcement()) == 0 {
		t.Fatalf("%v", s)
	}
	return string(id)
}

func run(id string, argv ...string) *connect.Request[sandseav1.RunRequest] {
	return connect.NewRequest(&sandseav1.RunRequest{Id: id, Command: &sandseav1.Command{Argv: argv}})
}

func TestASandboxThroughTheDoor(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	res, err := d.proc.Run(t.Context(), run(id, "abc"))
	if err != nil {
		t.Fatal(err)
	}
	if m := res.Msg; string(m.GetStdout()) != "a\nc\n" || string(m.GetStderr()) != "b\n" || m.GetNumber() != 1 ||
		m.GetResult().GetStdoutBytes() != 4 || m.GetResult().GetExitCode() != 0 {
		t.Fatalf("%v", m)
	}
	got, err := d.edge.Get(t.Context(), connect.NewRequest(&nodev1.GetRequest{Id: id}))
	if err != nil || got.Msg.GetSandbox().GetUsage().GetMemoryBytes() == 0 || got.Msg.GetSandbox().GetUsage().GetOutputBytes() == 0 {
		t.Fatalf("%v, %v", got, err)
	}
	ext, err := d.edge.ExtendTTL(t.Context(), connect.NewRequest(&nodev1.ExtendTTLRequest{Id: id, TtlMs: 7200_000}))
	if err != nil || time.Until(ext.Msg.GetSandbox().GetExpiresAt().AsTime()) > 2*time.Hour {
		t.Fatalf("%v, %v", ext, err)
	}
	for range 2 {
		st, err := d.edge.Stop(t.Context(), connect.NewRequest(&nodev1.StopRequest{Id: id, By: "user:eve"}))
		if err != nil {
			t.Fatal(err)
		}
		if e := st.Msg.GetSandbox().GetEnd(); e.GetCause() != "stopped" || e.GetBy() != "user:eve" || e.GetAt() == nil {
			t.Fatalf("%v", e)
		}
	}
	_, err = d.proc.Run(t.Context(), run(id, "true"))
	if e := errdefs.From(errwire.FromConnect(err)); e.Kind != errdefs.FailedPrecondition || e.Cause != "stopped" {
		t.Fatalf("%v", err)
	}
	list, err := d.proc.List(t.Context(), connect.NewRequest(&sandseav1.ListProcessesRequest{Id: id}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
}

func TestAStrangersSandboxLooksLikeNone(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	never := string(d.ID())
	messages := map[string]string{}
	for who, projects := range map[string]string{"a stranger": "other,defaul,default/team/x", "nobody": "", "the owner": "x,default/team", "the owner's parent": "default"} {
		d2 := *d
		d2.dial(&http.Client{Transport: d.transport(t)}, "http://node", projects)
		_, err := d2.edge.Get(t.Context(), connect.NewRequest(&nodev1.GetRequest{Id: id}))
		if strings.HasPrefix(who, "the owner") {
			if err != nil {
				t.Errorf("%s: %v", who, err)
			}
			continue
		}
		if kindOf(err) != errdefs.NotFound {
			t.Errorf("%s: %v", who, err)
			continue
		}
		_, err2 := d2.edge.Get(t.Context(), connect.NewRequest(&nodev1.GetRequest{Id: never}))
		messages[strings.ReplaceAll(err.Error(), sandbox.ID(id).Short(), "X")] = strings.ReplaceAll(err2.Error(), sandbox.ID(never).Short(), "X")
		for name, call := range map[string]func() error{
			"stop": func() error {
				_, err := d2.edge.Stop(t.Context(), connect.NewRequest(&nodev1.StopRequest{Id: id}))
				return err
			},
			"extend": func() error {
				_, err := d2.edge.ExtendTTL(t.Context(), connect.NewRequest(&nodev1.ExtendTTLRequest{Id: id, TtlMs: 1}))
				return err
			},
			"run": func() error { _, err := d2.proc.Run(t.Context(), run(id, "true")); return err },
			"signal": func() error {
				_, err := d2.proc.Signal(t.Context(), connect.NewRequest(&sandseav1.SignalRequest{Id: id, Number: 1, Signal: 9}))
				return err
			},
			"list": func() error {
				_, err := d2.proc.List(t.Context(), connect.NewRequest(&sandseav1.ListProcessesRequest{Id: id}))
				return err
			},
			"stat": func() error {
				_, err := d2.file.Stat(t.Context(), connect.NewRequest(&sandseav1.StatFileRequest{Id: id, Path: "/"}))
				return err
			},
			"attach": func() error {
				st, err := d2.proc.Attach(t.Context(), connect.NewRequest(&sandseav1.AttachRequest{Id: id, Number: 1}))
				if err != nil {
					return err
				}
				defer st.Close()
				for st.Receive() {
				}
				return st.Err()
			},
		} {
			if err := call(); kindOf(err) != errdefs.NotFound {
				t.Errorf("%s may %s: %v", who, name, err)
			}
		}
	}
	for a, b := range messages {
		if a != b {
			t.Errorf("an id that exists says %q, one that does not %q", a, b)
		}
	}
}

// transport reaches the door's socket anew.
func (d *door) transport(t *testing.T) *http.Transport {
	t.Helper()
	srv := d.server
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "again.sock"))
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.Serve(ln); err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", ln.Addr().String())
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

func TestCreatesThatThisNodeMustNotTake(t *testing.T) {
	d := newDoor(t)
	other, err := sandbox.Mint(7, bytes.NewReader(make([]byte, 13)))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*nodev1.CreateRequest)
		kind   errdefs.Kind
	}{
		"an older epoch":       {func(m *nodev1.CreateRequest) { m.NodeEpoch = 2 }, errdefs.Refused},
		"another node's id":    {func(m *nodev1.CreateRequest) { m.Id = string(other) }, errdefs.Invalid},
		"no id":                {func(m *nodev1.CreateRequest) { m.Id = "" }, errdefs.Invalid},
		"no project":           {func(m *nodev1.CreateRequest) { m.Project = "" }, errdefs.Invalid},
		"no layers":            {func(m *nodev1.CreateRequest) { m.Layers = nil }, errdefs.Invalid},
		"a layer by tag":       {func(m *nodev1.CreateRequest) { m.Layers = []string{"debian"} }, errdefs.Invalid},
		"limits out of bounds": {func(m *nodev1.CreateRequest) { m.Spec.Limits = &sandseav1.Limits{MemoryBytes: 5} }, errdefs.Invalid},
		"more than there is":   {func(m *nodev1.CreateRequest) { m.Spec.Limits = &sandseav1.Limits{MemoryBytes: 1 << 45} }, errdefs.Refused},
		"a feature it has not": {func(m *nodev1.CreateRequest) { m.Spec.Require = []string{"gpu"} }, errdefs.Refused},
		"a network rule": {func(m *nodev1.CreateRequest) {
			m.Spec.Network = &sandseav1.NetworkPolicy{Services: map[string]bool{"pypi": true}}
		}, errdefs.FailedPrecondition},
		"an unknown entrypoint": {func(m *nodev1.CreateRequest) { m.Spec.Entrypoint = &sandseav1.Entrypoint{Mode: 99} }, errdefs.Invalid},
	} {
		m := d.request(d.ID())
		c.change(m)
		_, err := d.edge.Create(t.Context(), connect.NewRequest(m))
		if kindOf(err) != c.kind {
			t.Errorf("%s: %v, want %s", name, err, c.kind)
		}
	}
	if b := d.World.Boxes(); len(b) != 0 {
		t.Errorf("left behind: %v", b)
	}
}

func TestStreamsOfACommand(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	st, err := d.proc.Start(t.Context(), connect.NewRequest(&sandseav1.StartRequest{
		Id: id, Command: &sandseav1.Command{Argv: []string{"bytes", "1000000"}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var out bytes.Buffer
	var number int64
	var last *sandseav1.ProcessEvent
	for st.Receive() {
		last = st.Msg().GetEvent()
		if s := last.GetStarted(); s != nil {
			number = s.GetNumber()
		}
		if o := last.GetData(); o != nil {
			if o.GetOffset() != int64(out.Len()) {
				t.Fatalf("a piece at %d, want %d", o.GetOffset(), out.Len())
			}
			out.Write(o.GetData())
		}
	}
	if st.Err() != nil || number != 1 || out.Len() != 1000000 || last.GetExited().GetResult().GetStdoutBytes() != 1000000 {
		t.Fatalf("%v: process %d, %d bytes, last %v", st.Err(), number, out.Len(), last)
	}
	at, err := d.proc.Attach(t.Context(), connect.NewRequest(&sandseav1.AttachRequest{Id: id, Number: 1, StdoutOffset: 999990}))
	if err != nil {
		t.Fatal(err)
	}
	defer at.Close()
	var tail []byte
	for at.Receive() {
		tail = append(tail, at.Msg().GetEvent().GetData().GetData()...)
	}
	if !bytes.Equal(tail, out.Bytes()[999990:]) {
		t.Fatalf("%q", tail)
	}
}

func TestFirstBytesComeAtOnce(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	begin := time.Now()
	st, err := d.proc.Start(t.Context(), connect.NewRequest(&sandseav1.StartRequest{
		Id: id, Command: &sandseav1.Command{Argv: []string{"tick", "2", "5"}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	for st.Receive() {
		if st.Msg().GetEvent().GetData() != nil {
			break
		}
	}
	if dt := time.Since(begin); dt >= 5*time.Second { // when the next ones come
		t.Errorf("the first bytes took %s", dt)
	}
	_ = st.Close()
	wait.Until(t, edgetest.Patience, func() bool { return d.World.Tasks(sandbox.ID(id)) == 0 }, "the abandoned command's end")
}

func TestInputSignalsAndKeys(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	st, err := d.proc.Start(t.Context(), connect.NewRequest(&sandseav1.StartRequest{
		Id: id, Command: &sandseav1.Command{Argv: []string{"cat"}}, Stdin: true, Detached: true, Key: "k",
	}))
	if err != nil {
		t.Fatal(err)
	}
	for st.Receive() {
		if !st.Msg().GetEvent().GetStarted().GetInputOpen() {
			t.Error("the input is not open")
		}
	}
	if err := errors.Join(st.Err(), st.Close()); err != nil {
		t.Fatal(err)
	}
	in, err := d.proc.SendInput(t.Context(), connect.NewRequest(&sandseav1.SendInputRequest{Id: id, Number: 1, Data: []byte("hi\n")}))
	if err != nil || in.Msg.GetNextOffset() != 3 {
		t.Fatalf("%v, %v", in, err)
	}
	if _, err := d.proc.CloseInput(t.Context(), connect.NewRequest(&sandseav1.CloseInputRequest{Id: id, Number: 1})); err != nil {
		t.Fatal(err)
	}
	again := connect.NewRequest(&sandseav1.RunRequest{Id: id, Key: "k", Command: &sandseav1.Command{Argv: []string{"cat"}}})
	if _, err := d.proc.Run(t.Context(), again); kindOf(err) != errdefs.AlreadyExists {
		t.Fatalf("a Run under a Start's key: %v", err)
	}
	if _, err := d.proc.Signal(t.Context(), connect.NewRequest(&sandseav1.SignalRequest{Id: id, Number: 9, Signal: 9})); kindOf(err) != errdefs.NotFound {
		t.Fatalf("%v", err)
	}
	stdin := make([]byte, 10<<20)
	big := connect.NewRequest(&sandseav1.RunRequest{Id: id, Key: "big", Stdin: stdin, Command: &sandseav1.Command{Argv: []string{"count"}}})
	for n := range 2 {
		res, err := d.proc.Run(t.Context(), big)
		if err != nil || strings.TrimSpace(string(res.Msg.GetStdout())) != fmt.Sprint(len(stdin)) || res.Msg.GetResult().GetReplayed() != (n == 1) {
			t.Fatalf("%v, %v", res.Msg.GetResult(), err)
		}
	}
	res, err := d.proc.Run(t.Context(), connect.NewRequest(&sandseav1.RunRequest{
		Id: id, MaxOutputBytes: 1000, Command: &sandseav1.Command{Argv: []string{"bytes", "5000"}},
	}))
	if m := res.Msg; err != nil || len(m.GetStdout()) != 1000 || m.GetStdoutGapBytes() != 4000 || m.GetStdoutGapAt() != 500 || !m.GetResult().GetTruncated() {
		t.Fatalf("%v, %v", m.GetResult(), err)
	}
	fail, err := d.proc.Run(t.Context(), run(id, "no-such"))
	if f := fail.Msg.GetResult().GetStartFailure(); err != nil || f.GetKind() != "not_found" || f.GetErrno() != 2 {
		t.Fatalf("%v, %v", f, err)
	}
	killed, err := d.proc.Run(t.Context(), run(id, "oom"))
	if r := killed.Msg.GetResult(); err != nil || !r.GetOom() || r.GetSignalName() != "SIGKILL" || r.GetExitCode() != 137 {
		t.Fatalf("%v, %v", r, err)
	}
}

func TestRosterAndFollow(t *testing.T) {
	d := newDoor(t)
	first := d.create(t)
	res, err := d.edge.Roster(t.Context(), connect.NewRequest(&nodev1.RosterRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	r := res.Msg
	if n := r.GetNode(); n.GetNumber() != int64(edgetest.Number) || n.GetSandboxesRunning() != 1 || n.GetEpoch() != 3 ||
		n.GetMemoryPromisedBytes() != sandbox.DefaultMemory || len(n.GetFeatures()) == 0 || n.GetVersion() != "test" {
		t.Errorf("%v", n)
	}
	if len(r.GetSandboxes()) != 1 || r.GetSandboxes()[0].GetId() != first {
		t.Fatalf("%v", r.GetSandboxes())
	}
	ctx, cancel := context.WithTimeout(t.Context(), edgetest.Patience)
	defer cancel()
	st, err := d.edge.Follow(ctx, connect.NewRequest(&nodev1.FollowRequest{After: r.GetSeq(), Incarnation: r.GetIncarnation()}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	second := d.create(t)
	if _, err := d.edge.Stop(t.Context(), connect.NewRequest(&nodev1.StopRequest{Id: second})); err != nil {
		t.Fatal(err)
	}
	next := r.GetSeq()
	var story []string
	for len(story) < 4 && st.Receive() {
		m := st.Msg()
		if next++; m.GetSeq() != next || m.GetSandbox().GetId() != second {
			t.Fatalf("%v, want %d", m, next)
		}
		story = append(story, m.GetWhat())
	}
	if got := strings.Join(story, " "); got != "creating running stopping ended" {
		t.Fatalf("%q, %v", got, st.Err())
	}
	for name, m := range map[string]*nodev1.FollowRequest{
		"another incarnation": {After: 0, Incarnation: "x"},
		"the future":          {After: next + 1, Incarnation: r.GetIncarnation()},
		"a negative number":   {After: -1, Incarnation: r.GetIncarnation()},
	} {
		st, err := d.edge.Follow(t.Context(), connect.NewRequest(m))
		if err == nil {
			for st.Receive() {
			}
			err = st.Err()
			_ = st.Close()
		}
		if connect.CodeOf(err) != connect.CodeOutOfRange {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEveryCallIsWakingOrStill(t *testing.T) {
	for _, file := range []protoreflect.FileDescriptor{nodev1.File_node_v1_node_proto, sandseav1.File_sandsea_v1_process_proto, sandseav1.File_sandsea_v1_file_proto} {
		for i := range file.Services().Len() {
			s := file.Services().Get(i)
			for k := range s.Methods().Len() {
				name := fmt.Sprintf("/%s/%s", s.FullName(), s.Methods().Get(k).Name())
				if _, ok := nodeapi.Waking(name); !ok {
					t.Errorf("%s is neither", name)
				}
			}
		}
	}
	if _, ok := nodeapi.Waking("/sandsea.v1.ProcessService/Surprise"); ok {
		t.Error("a call that nobody declared is declared")
	}
}

func TestFileCallsForAnEndedSandboxSayWhy(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	if _, err := d.edge.Stop(t.Context(), connect.NewRequest(&nodev1.StopRequest{Id: id})); err != nil {
		t.Fatal(err)
	}
	_, err := d.file.Stat(t.Context(), connect.NewRequest(&sandseav1.StatFileRequest{Id: id, Path: "/etc"}))
	if e := errdefs.From(errwire.FromConnect(err)); e.Cause != "stopped" {
		t.Errorf("%v", err)
	}
	w := d.file.Write(t.Context())
	if err := w.Send(&sandseav1.WriteFileRequest{Data: []byte("no header")}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.CloseAndReceive(); kindOf(err) != errdefs.Invalid {
		t.Errorf("%v", err)
	}
}

func TestASlowReaderHoldsUpNobodyElse(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	slow, err := d.proc.Start(t.Context(), connect.NewRequest(&sandseav1.StartRequest{
		Id: id, Command: &sandseav1.Command{Argv: []string{"bytes", "50000000"}}, Key: "slow",
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	slow.Receive() // and no more
	at, err := d.proc.Attach(t.Context(), connect.NewRequest(&sandseav1.AttachRequest{Id: id, Number: 1}))
	if err != nil {
		t.Fatal(err)
	}
	defer at.Close()
	total := 0
	for at.Receive() {
		total += len(at.Msg().GetEvent().GetData().GetData())
	}
	if at.Err() != nil || total != 50000000 {
		t.Fatalf("%d bytes, %v", total, at.Err())
	}
}

func TestAShutdownLeavesCommandsAlone(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	got := make(chan error, 1)
	go func() { _, err := d.proc.Run(context.Background(), run(id, "sleep", "60")); got <- err }()
	wait.Until(t, edgetest.Patience, func() bool { return d.World.Tasks(sandbox.ID(id)) == 1 })
	ctx, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer stop()
	_ = d.server.Shutdown(ctx)
	if err := <-got; err == nil {
		t.Fatal("a call that was cut off succeeded")
	}
	if d.World.Tasks(sandbox.ID(id)) != 1 {
		t.Fatal("its command was killed")
	}
}
