package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const limit = 20 * time.Second

// TestMain gives the examples a server, named by the variables that the client reads, and looks whether anything is left.
func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	before, err := leak.Take()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	s, err := testserver.New(testserver.Config{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	os.Setenv("SANDSEA_URL", s.URL)
	os.Setenv("SANDSEA_TOKEN", s.Token)
	code := m.Run()
	s.Close()
	if err := leak.Compare(before); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

var py = &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "py"}}

func connectTo(t *testing.T, s *testserver.Server) *client.Client {
	t.Helper()
	return newClient(t, client.Config{URL: s.URL, Token: s.Token})
}

func newClient(t *testing.T, cfg client.Config) *client.Client {
	t.Helper()
	// A connection that was still being dialled is idle only after the clean-up.
	tr := &http.Transport{IdleConnTimeout: time.Second}
	t.Cleanup(tr.CloseIdleConnections)
	cfg.HTTP = &http.Client{Transport: tr}
	c, err := client.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func create(t *testing.T, c *client.Client) *client.Sandbox {
	t.Helper()
	sb, err := c.Create(t.Context(), py, "")
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func TestErrorsComeBackWithKindAndFields(t *testing.T) {
	s := testserver.Start(t, testserver.Config{Images: []string{"debian:bookworm", "py"}})
	c := connectTo(t, s)
	sb := create(t, c)
	spec := func(change func(*sandseav1.SandboxSpec)) *sandseav1.SandboxSpec {
		out := &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "py"}, Limits: &sandseav1.Limits{}}
		change(out)
		return out
	}
	tests := map[string]struct {
		call func() error
		want errdefs.Error
	}{
		"an image that is not there, with its neighbours": {
			func() error {
				_, err := c.Create(t.Context(), spec(func(s *sandseav1.SandboxSpec) { s.Environment.Image = "debain" }), "")
				return err
			},
			errdefs.Error{Kind: errdefs.NotFound, Object: `image "debain"`, Field: "environment.image", Near: []string{"debian:bookworm"}, Stage: "image"},
		},
		"more memory than any node has, with the limit": {
			func() error {
				_, err := c.Create(t.Context(), spec(func(s *sandseav1.SandboxSpec) { s.Limits.MemoryBytes = 64 << 30 }), "")
				return err
			},
			errdefs.Error{Kind: errdefs.Exhausted, Field: "limits.memory_bytes", Limit: "23.4 GiB", Stage: "queue"},
		},
		"what no node enforces, with the feature": {
			func() error {
				_, err := c.Create(t.Context(), spec(func(s *sandseav1.SandboxSpec) { s.Require = []string{"exit_facts"} }), "")
				return err
			},
			errdefs.Error{Kind: errdefs.FailedPrecondition, Field: "require", Feature: "exit_facts", Stage: "queue"},
		},
		"a file that is not there, with the errno": {
			func() error {
				_, err := sb.ReadFile(t.Context(), &sandseav1.ReadFileRequest{Path: "/none"}, io.Discard)
				return err
			},
			errdefs.Error{Kind: errdefs.NotFound, Object: "/none", Errno: 2, ErrnoName: "ENOENT"},
		},
		"a malformed id": {
			func() error { _, err := c.Sandbox("nonsense").Info(t.Context()); return err },
			errdefs.Error{Kind: errdefs.Invalid, Field: "id"},
		},
		"an end of a sandbox, with its cause": {
			func() error {
				gone := create(t, c)
				if err := s.End(t.Context(), gone.ID, "oom"); err != nil {
					return err
				}
				var err error
				wait.Until(t, limit, func() bool {
					_, err = gone.Run(t.Context(), client.Argv("true"))
					return errors.Is(err, errdefs.FailedPrecondition)
				}, "the end is known")
				return err
			},
			errdefs.Error{Kind: errdefs.FailedPrecondition, Cause: "oom"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := tt.call()
			if err == nil {
				t.Fatal("no error")
			}
			if !errors.Is(err, tt.want.Kind) {
				t.Errorf("%v is no %s", err, tt.want.Kind)
			}
			e := errdefs.From(err)
			if e.Hint == "" {
				t.Errorf("%v has no hint", e)
			}
			got := errdefs.Error{
				Kind: e.Kind, Object: tt.want.Object, Field: e.Field, Limit: e.Limit, Cause: e.Cause, Feature: e.Feature, Near: e.Near,
				Errno: e.Errno, ErrnoName: e.ErrnoName, Stage: e.Stage,
			}
			if tt.want.Object != "" {
				got.Object = e.Object
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestTokensThatAreRefused(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	dir := t.TempDir()
	file := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	reader, err := s.IAM.Create(t.Context(), iam.Request{Principal: "user:reader", Project: "default", May: []string{"sandbox.list"}})
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		cfg  client.Config
		kind errdefs.Kind
		text string
	}{
		"one that is unknown":            {client.Config{Token: "sst_nobody_0000"}, errdefs.Unauthenticated, "token"},
		"one without the right":          {client.Config{Token: reader}, errdefs.Denied, "user:reader: may not sandbox.create"},
		"a file that others can read":    {client.Config{TokenFile: file("open", s.Token, 0o644)}, errdefs.FailedPrecondition, "others can read it (0644). Run: chmod 600"},
		"a file that is not there":       {client.Config{TokenFile: filepath.Join(dir, "none")}, errdefs.Unauthenticated, "no such file"},
		"a file without a token":         {client.Config{TokenFile: file("empty", "\n", 0o600)}, errdefs.Unauthenticated, "holds no token"},
		"a file with something else":     {client.Config{TokenFile: file("odd", "two words", 0o600)}, errdefs.Unauthenticated, "holds no token"},
		"a file larger than any token":   {client.Config{TokenFile: file("huge", strings.Repeat("x", 5000), 0o600)}, errdefs.Unauthenticated, "holds no token"},
		"a project that it covers not":   {client.Config{Token: s.Token, Project: "other"}, errdefs.Denied, "project other"},
		"the address is none":            {client.Config{URL: "7070", Token: s.Token}, errdefs.Invalid, "http://HOST:PORT"},
		"the address has another scheme": {client.Config{URL: "ftp://x", Token: s.Token}, errdefs.Invalid, "http://HOST:PORT"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if tt.cfg.URL == "" {
				tt.cfg.URL = s.URL
			}
			if tt.cfg.Token == "" {
				t.Setenv("SANDSEA_TOKEN", "")
			}
			c, err := client.New(tt.cfg)
			if err == nil {
				_, err = c.Create(t.Context(), py, "")
			}
			if !errors.Is(err, tt.kind) || !strings.Contains(fmt.Sprint(err), tt.text) {
				t.Errorf("got %v (%s), want %s with %q", err, errdefs.KindOf(err), tt.kind, tt.text)
			}
		})
	}
}

func TestTheEnvironmentNamesServerTokenAndProject(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte(s.Token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SANDSEA_URL", s.URL+"/")
	t.Setenv("SANDSEA_TOKEN", "")
	t.Setenv("SANDSEA_TOKEN_FILE", path)
	t.Setenv("SANDSEA_PROJECT", "default/team")
	c := newClient(t, client.Config{})
	if c.URL() != s.URL {
		t.Errorf("URL = %s, want %s", c.URL(), s.URL)
	}
	res, err := c.IAM.WhoAmI(t.Context(), connect.NewRequest(&sandseav1.WhoAmIRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if res.Msg.GetPrincipal() != "user:admin" || res.Msg.GetProject() != "default/team" {
		t.Errorf("whoami = %v", res.Msg)
	}
}

func TestATokenHasNoSpaceAroundIt(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	for name, where := range map[string]func(string) client.Config{
		"of the environment": func(token string) client.Config {
			t.Setenv("SANDSEA_TOKEN", token)
			return client.Config{URL: s.URL}
		},
		"of the configuration": func(token string) client.Config {
			t.Setenv("SANDSEA_TOKEN", "")
			return client.Config{URL: s.URL, Token: token}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t, where(" \t"+s.Token+"\r\n"))
			if _, err := c.IAM.WhoAmI(t.Context(), connect.NewRequest(&sandseav1.WhoAmIRequest{})); err != nil {
				t.Error(err)
			}
			_, err := client.New(where("two\nlines"))
			if !errors.Is(err, errdefs.Unauthenticated) || strings.Contains(err.Error(), "lines") {
				t.Errorf("a token that is none: %v", err)
			}
		})
	}
}

func TestAnAnswerThatCannotBeReadIsNoFaultOfTheRequest(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/connect+proto")
		_, _ = io.WriteString(w, "\x00\x00\x00\x00\x04\xff\xff\xff\xff")
	}))
	defer srv.Close()
	sb := newClient(t, client.Config{URL: srv.URL, Token: "x"}).Sandbox("x")
	for _, err := range sb.Attach(t.Context(), &sandseav1.AttachRequest{Number: 1}) {
		if !errors.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), "cannot be read") {
			t.Errorf("a call that may be repeated: %v", err)
		}
	}
	for _, err := range sb.Start(t.Context(), &sandseav1.StartRequest{}) {
		if !errors.Is(err, errdefs.Unknown) || !strings.Contains(err.Error(), "it may have been done") {
			t.Errorf("a call that may not: %v", err)
		}
	}
}

func TestNoServer(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + ln.Addr().String()
	ln.Close()
	c := newClient(t, client.Config{URL: url, Token: "x"})
	want := "cannot reach " + url + ": connection refused. Start it: sudo sandsea up"
	if _, err := c.Create(t.Context(), py, ""); fmt.Sprint(err) != want || !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("a call: %v, want %s", err, want)
	}
	for _, err := range c.Watch(t.Context(), &sandseav1.WatchSandboxesRequest{}) {
		if fmt.Sprint(err) != want || !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("a stream: %v, want %s", err, want)
		}
	}
	if _, err := c.Sandbox("x").WriteFile(t.Context(), &sandseav1.WriteFileHeader{}, strings.NewReader("x")); fmt.Sprint(err) != want {
		t.Errorf("an upload: %v, want %s", err, want)
	}
}

func TestAServerOfAnotherKind(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(srv.Close)
	c := newClient(t, client.Config{URL: srv.URL, Token: "x"})
	_, err := c.Create(t.Context(), py, "")
	if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), "is no Sandsea server") {
		t.Errorf("got %v", err)
	}
}

// link is a network between client and server that can be cut.
type link struct {
	ln    net.Listener
	to    string
	mu    sync.Mutex
	conns []net.Conn // guarded by mu
}

func newLink(t *testing.T, url string) *link {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &link{ln: ln, to: strings.TrimPrefix(url, "http://")}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", l.to)
			if err != nil {
				in.Close()
				continue
			}
			l.mu.Lock()
			l.conns = append(l.conns, in, out)
			l.mu.Unlock()
			wg.Go(func() { pass(out, in) })
			wg.Go(func() { pass(in, out) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		l.cut()
		wg.Wait()
	})
	return l
}

func pass(to, from net.Conn) {
	defer to.Close()
	_, _ = io.Copy(to, from)
}

func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		c.Close()
	}
	l.conns = nil
}

func (l *link) url() string { return "http://" + l.ln.Addr().String() }

// hold lets one call of the node wait until release; asked is closed when it has come.
func hold(s *testserver.Server, call string) (asked chan struct{}, release func()) {
	asked, gate := make(chan struct{}), make(chan struct{})
	var once, open sync.Once
	s.Edge.Before(func(ctx context.Context, c string) error {
		if c != call {
			return nil
		}
		once.Do(func() { close(asked) })
		select {
		case <-gate:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return asked, func() { open.Do(func() { close(gate) }) }
}

func TestALostAnswer(t *testing.T) {
	tests := map[string]struct {
		call string
		do   func(context.Context, *client.Client, *client.Sandbox) error
		kind errdefs.Kind
		text string
	}{
		"of a create is unknown and names the key": {
			"create", func(ctx context.Context, c *client.Client, _ *client.Sandbox) error {
				_, err := c.Create(ctx, py, "k-41")
				return err
			},
			errdefs.Unknown, "Ask again with the same key: --key k-41",
		},
		"of a look is unavailable": {
			"get", func(ctx context.Context, _ *client.Client, sb *client.Sandbox) error {
				_, err := sb.Info(ctx)
				return err
			},
			errdefs.Unavailable, "Try again",
		},
		"of a stop is unavailable, since stopping again is safe": {
			"stop", func(ctx context.Context, _ *client.Client, sb *client.Sandbox) error { return sb.Stop(ctx) },
			errdefs.Unavailable, "Try again",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := testserver.Start(t, testserver.Config{})
			l := newLink(t, s.URL)
			c := newClient(t, client.Config{URL: l.url(), Token: s.Token})
			sb := create(t, c)
			asked, release := hold(s, tt.call)
			defer release()
			failed := make(chan error, 1)
			go func() { failed <- tt.do(t.Context(), c, sb) }()
			select {
			case <-asked:
			case err := <-failed:
				t.Fatalf("the node was not asked: %v", err)
			}
			l.cut()
			err := <-failed
			if !errors.Is(err, tt.kind) || !strings.Contains(fmt.Sprint(err), tt.text) {
				t.Errorf("got %v (%s), want %s with %q", err, errdefs.KindOf(err), tt.kind, tt.text)
			}
		})
	}
}

func TestADeadlineOfTheCaller(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	sb := create(t, c)
	for call, tt := range map[string]struct {
		do   func(context.Context) error
		want errdefs.Kind
	}{
		"create": {func(ctx context.Context) error { _, err := c.Create(ctx, py, "k"); return err }, errdefs.Unknown},
		"get":    {func(ctx context.Context) error { _, err := sb.Info(ctx); return err }, errdefs.Deadline},
	} {
		t.Run(call, func(t *testing.T) {
			_, release := hold(s, call)
			defer release()
			ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer stop()
			if err := tt.do(ctx); !errors.Is(err, tt.want) {
				t.Errorf("got %v (%s), want %s", err, errdefs.KindOf(err), tt.want)
			}
		})
	}
}

func TestAStreamThatIsLeftEndsItsCommand(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	sb := create(t, c)
	for ev, err := range sb.Start(t.Context(), &sandseav1.StartRequest{Command: client.Argv("sleep", "1000")}) {
		if err != nil {
			t.Fatal(err)
		}
		if ev.GetStarted() != nil {
			break
		}
	}
	wait.Until(t, limit, func() bool { return s.Running() == 0 }, "the command ends")
}

func TestACanceledRunEndsItsCommand(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	sb := create(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := sb.Run(ctx, client.Argv("sleep", "1000"))
		failed <- err
	}()
	wait.Until(t, limit, func() bool { return s.Running() == 1 }, "the command runs")
	cancel()
	if err := <-failed; !errors.Is(err, errdefs.Canceled) {
		t.Errorf("got %v, want canceled", err)
	}
	wait.Until(t, limit, func() bool { return s.Running() == 0 }, "the command ends")
}

func TestAWatchThatIsLeftDoesNotWaitForMore(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	left := make(chan error, 1)
	go func() {
		for ev, err := range c.Watch(t.Context(), &sandseav1.WatchSandboxesRequest{}) {
			if err != nil || ev.GetWhat() == "running" {
				left <- err
				return
			}
		}
		left <- errors.New("the watch ended by itself")
	}()
	// The watch begins some time after it is asked for, so there must be something to see again and again.
	wait.Until(t, limit, func() bool {
		create(t, c)
		select {
		case err := <-left:
			if err != nil {
				t.Fatal(err)
			}
			return true
		default:
			return false
		}
	}, "the loop is left at its first event")
}

func TestAttachReadsARecordFromAnyOffset(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	sb := create(t, c)
	res, err := sb.Run(t.Context(), client.Shell("printf 0123456789; printf abc >&2; exit 7"))
	if err != nil {
		t.Fatal(err)
	}
	if string(res.GetStdout()) != "0123456789" || string(res.GetStderr()) != "abc" || res.GetResult().GetExitCode() != 7 {
		t.Errorf("run = %v", res)
	}
	for off := range int64(11) {
		var out bytes.Buffer
		var exited *sandseav1.Process
		for ev, err := range sb.Attach(t.Context(), &sandseav1.AttachRequest{Number: res.GetNumber(), StdoutOffset: off, StderrOffset: 3}) {
			if err != nil {
				t.Fatal(err)
			}
			out.Write(ev.GetData().GetData())
			if e := ev.GetExited(); e != nil {
				exited = e
			}
		}
		if out.String() != "0123456789"[off:] || exited.GetResult().GetExitCode() != 7 {
			t.Errorf("from %d: %q, %v", off, out.String(), exited)
		}
	}
}

func TestInputByOffsetIsTakenOnce(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	sb := create(t, connectTo(t, s))
	var out bytes.Buffer
	for ev, err := range sb.Start(t.Context(), &sandseav1.StartRequest{Command: client.Argv("cat"), Stdin: true}) {
		if err != nil {
			t.Fatal(err)
		}
		out.Write(ev.GetData().GetData())
		p := ev.GetStarted()
		if p == nil {
			continue
		}
		for range 2 { // the second is a repeat
			if next, err := sb.SendInput(t.Context(), p.GetNumber(), 0, []byte("hello")); err != nil || next != 5 {
				t.Fatalf("SendInput = %d, %v", next, err)
			}
		}
		if err := sb.CloseInput(t.Context(), p.GetNumber()); err != nil {
			t.Fatal(err)
		}
	}
	if out.String() != "hello" {
		t.Errorf("cat wrote %q", out.String())
	}
}

func TestAKeyGivesTheSameSandboxAndTheSameResult(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	first, err := c.Create(t.Context(), py, "k")
	if err != nil {
		t.Fatal(err)
	}
	again, err := c.Create(t.Context(), py, "k")
	if err != nil || again.ID != first.ID {
		t.Errorf("again = %v, %v, want %s", again, err, first.ID)
	}
	for i := range 2 {
		res, err := first.RunRequest(t.Context(), &sandseav1.RunRequest{Command: client.Shell("echo $$"), Key: "r"})
		if err != nil || res.GetNumber() != 1 || res.GetResult().GetReplayed() != (i > 0) {
			t.Errorf("run %d = %v, %v", i, res, err)
		}
	}
}

func TestResolve(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	sb := create(t, c)
	wait.Until(t, limit, func() bool {
		id, err := c.Resolve(t.Context(), sb.ID[:8])
		return err == nil && id == sb.ID
	}, "the first letters are enough")
	for in, want := range map[string]errdefs.Kind{"zzzz": errdefs.NotFound, "abc": errdefs.Invalid} {
		if _, err := c.Resolve(t.Context(), in); !errors.Is(err, want) {
			t.Errorf("Resolve(%q): %v, want %s", in, err, want)
		}
	}
	if id, err := c.Resolve(t.Context(), strings.Repeat("s", 27)); err != nil || len(id) != 27 {
		t.Errorf("a full id asks nobody: %q, %v", id, err)
	}
}

func TestListGoesThroughAllPages(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	for res, err := range c.CreateBatch(t.Context(), &sandseav1.CreateBatchRequest{Spec: py, Count: 7}) {
		if err != nil || res.GetSandbox() == nil {
			t.Fatalf("batch: %v, %v", res, err)
		}
	}
	wait.Until(t, limit, func() bool {
		seen := map[string]bool{}
		for sb, err := range c.List(t.Context(), &sandseav1.ListSandboxesRequest{PageSize: 2}) {
			if err != nil {
				t.Fatal(err)
			}
			seen[sb.GetId()] = true
		}
		return len(seen) == 7
	}, "seven sandboxes on four pages")
}

func TestFiles(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	sb := create(t, connectTo(t, s))
	want := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	size := int64(len(want))
	if _, err := sb.WriteFile(t.Context(), &sandseav1.WriteFileHeader{Path: "/w/big", Size: &size}, bytes.NewReader(want)); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	info, err := sb.ReadFile(t.Context(), &sandseav1.ReadFileRequest{Path: "/w/big"}, &got)
	if err != nil || !bytes.Equal(got.Bytes(), want) || info.GetSize() != size {
		t.Errorf("read %d bytes, %v, %v", got.Len(), info, err)
	}
	list, err := sb.ListFiles(t.Context(), &sandseav1.ListFilesRequest{Path: "/w"})
	if err != nil || len(list) != 1 || list[0].GetPath() != "/w/big" {
		t.Errorf("list = %v, %v", list, err)
	}
	broken := errors.New("disk full")
	if _, err := sb.ReadFile(t.Context(), &sandseav1.ReadFileRequest{Path: "/w/big"}, failing{broken}); !errors.Is(err, broken) {
		t.Errorf("a writer that fails: %v", err)
	}
	if _, err := sb.WriteFile(t.Context(), &sandseav1.WriteFileHeader{Path: "/w/half"}, failing{broken}); !errors.Is(err, broken) {
		t.Errorf("a reader that fails: %v", err)
	}
	if _, err := sb.Stat(t.Context(), &sandseav1.StatFileRequest{Path: "/w/half"}); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("half a file was written: %v", err)
	}
	if _, err := sb.WriteFile(t.Context(), &sandseav1.WriteFileHeader{Path: "/w", Size: &size}, bytes.NewReader(want)); errdefs.From(err).ErrnoName != "EISDIR" {
		t.Errorf("a write onto a directory: %v", err)
	}
}

type failing struct{ error }

func (f failing) Read([]byte) (int, error)  { return 0, f.error }
func (f failing) Write([]byte) (int, error) { return 0, f.error }

func TestTreesGoUpAndDown(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	sb := create(t, connectTo(t, s))
	if _, err := sb.WriteFile(t.Context(), &sandseav1.WriteFileHeader{Path: "/src/a/b.txt"}, strings.NewReader("b")); err != nil {
		t.Fatal(err)
	}
	var tree bytes.Buffer
	if _, err := sb.DownloadTar(t.Context(), &sandseav1.DownloadTarRequest{Path: "/src"}, &tree); err != nil {
		t.Fatal(err)
	}
	up, err := sb.UploadTar(t.Context(), &sandseav1.UploadTarHeader{Path: "/dst"}, &tree)
	if err != nil || up.GetFiles() != 1 {
		t.Fatalf("upload = %v, %v", up, err)
	}
	var got bytes.Buffer
	if _, err := sb.ReadFile(t.Context(), &sandseav1.ReadFileRequest{Path: "/dst/a/b.txt"}, &got); err != nil || got.String() != "b" {
		t.Errorf("got %q, %v", got.String(), err)
	}
}

func TestAnImageIsImportedOnce(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	for i := range 2 {
		name, err := c.UploadImage(t.Context(), strings.NewReader("an archive"))
		if err != nil {
			t.Fatal(err)
		}
		steps := 0
		img, existed, err := c.ImportImage(t.Context(), &sandseav1.ImportImageRequest{
			Name: "task", Source: &sandseav1.ImportImageRequest_Archive{Archive: &sandseav1.ArchiveSource{
				Upload: name, Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS,
			}},
		}, func(*sandseav1.ImportProgress) { steps++ })
		if err != nil || img.GetName() != "task" || existed != (i > 0) || steps == 0 {
			t.Errorf("import %d = %v, existed %v, %d steps, %v", i, img, existed, steps, err)
		}
	}
}

func TestStopManyGivesAResultForEach(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	ids := []string{create(t, c).ID, "nonsense"}
	results := map[string]string{}
	for res, err := range c.StopMany(t.Context(), &sandseav1.StopManyRequest{Ids: ids}) {
		if err != nil {
			t.Fatal(err)
		}
		results[res.GetId()] = res.GetError().GetKind()
	}
	if diff := cmp.Diff(map[string]string{ids[0]: "", "nonsense": "invalid"}, results); diff != "" {
		t.Error(diff)
	}
}

func TestExtendTTL(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	sb := create(t, connectTo(t, s))
	if err := sb.ExtendTTL(t.Context(), 2*time.Hour); err != nil {
		t.Fatal(err)
	}
	info, err := sb.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if left := time.Until(info.GetExpiresAt().AsTime()); left < 119*time.Minute || left > 121*time.Minute {
		t.Errorf("ends in %s", left)
	}
}

func TestADetachedCommandOutlivesItsStream(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	c := connectTo(t, s)
	sb := create(t, c)
	if _, err := sb.Run(t.Context(), client.Argv("true")); err != nil {
		t.Fatal(err)
	}
	for range sb.Start(t.Context(), &sandseav1.StartRequest{Command: client.Argv("sleep", "1000"), Detached: true}) {
		continue
	}
	if s.Running() != 1 {
		t.Error("the detached command does not run")
	}
}
