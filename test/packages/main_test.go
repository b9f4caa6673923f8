package packages

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const (
	imageLimit   = 10 * time.Minute
	commandLimit = 5 * time.Minute
	callLimit    = 30 * time.Second
)

// shared is the server of the tests that do not change it, with the image "debian".
var shared struct {
	once sync.Once
	s    *server.Server
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if s := shared.s; s != nil {
		if err := s.Down(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
		if code != 0 {
			fmt.Fprintf(os.Stderr, "log of the shared server:\n%s", s.Log())
		}
	}
	os.Exit(code)
}

// errNoDebian: this machine cannot make one.
var errNoDebian = errors.New("no Debian root file system")

// serve gives the shared server.
func serve(t testing.TB) *server.Server {
	t.Helper()
	require.Root(t)
	shared.once.Do(func() {
		ctx, stop := context.WithTimeoutCause(context.Background(), imageLimit, errors.New("making the image took too long"))
		defer stop()
		if shared.s, shared.err = server.Launch(ctx, server.Config{}); shared.err == nil {
			shared.err = importDebian(ctx, shared.s)
		}
	})
	ready(t, shared.err)
	return shared.s
}

func ready(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, errNoDebian) {
		require.That(t, "debian", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// importDebian makes the image "debian", of the same archive as that of test/e2e.
func importDebian(ctx context.Context, s *server.Server) error {
	path, err := server.Debian(ctx, "python3-minimal", "python3-pip", "sudo", "procps")
	if err != nil {
		return fmt.Errorf("%w: %w", errNoDebian, err)
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	up, err := s.Client.UploadImage(ctx, f)
	if err != nil {
		return err
	}
	_, _, err = s.Client.ImportImage(ctx, archive("debian", up), nil)
	return err
}

func archive(name, upload string) *sandseav1.ImportImageRequest {
	return &sandseav1.ImportImageRequest{
		Source: &sandseav1.ImportImageRequest_Archive{Archive: &sandseav1.ArchiveSource{
			Upload: upload, Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS,
		}},
		Name: name,
	}
}

// box is a sandbox with a policy.
type box struct {
	*client.Sandbox
	t testing.TB
}

// allow is the policy that allows package services and nothing else.
func allow(services ...string) *sandseav1.NetworkPolicy {
	p := &sandseav1.NetworkPolicy{Services: map[string]bool{}}
	for _, s := range services {
		p.Services[s] = true
	}
	return p
}

// asOf dates a policy.
func asOf(p *sandseav1.NetworkPolicy, at time.Time) *sandseav1.NetworkPolicy {
	p.AsOf = timestamppb.New(at)
	return p
}

// open makes a sandbox of Debian with toolkits that ends with the test.
func open(t testing.TB, policy *sandseav1.NetworkPolicy, toolkits ...string) box {
	t.Helper()
	return openOn(t, serve(t), policy, toolkits...)
}

func openOn(t testing.TB, s *server.Server, policy *sandseav1.NetworkPolicy, toolkits ...string) box {
	t.Helper()
	sb, err := s.Client.Create(within(t, 2*callLimit), &sandseav1.SandboxSpec{
		Backend:     sandseav1.Backend_BACKEND_CONTAINER,
		Environment: &sandseav1.Environment{Base: "debian", Toolkits: toolkits},
		Limits:      &sandseav1.Limits{MemoryBytes: 2 << 30, CpuMillis: 2000},
		Network:     policy,
	}, "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() {
		ctx, stop := context.WithTimeoutCause(context.WithoutCancel(t.Context()), 2*callLimit, context.DeadlineExceeded)
		defer stop()
		if err := sb.Stop(ctx); err != nil {
			t.Errorf("stop: %v", err)
		}
		if t.Failed() {
			t.Logf("flow log of %s:\n%s", sb.ID, logText(ctx, sb))
		}
	})
	return box{sb, t}
}

// within bounds a test's calls.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, stop := context.WithTimeoutCause(t.Context(), d, fmt.Errorf("the test's limit of %s", d))
	t.Cleanup(stop)
	return ctx
}

// try runs a shell line and gives what it wrote, both streams together, and how it ended.
func (b box) try(line string) (out string, code int32) {
	b.t.Helper()
	cmd := client.Shell(line)
	cmd.MergeStderr, cmd.TimeoutMs = true, commandLimit.Milliseconds()
	res, err := b.Run(within(b.t, commandLimit+callLimit), cmd)
	if err != nil {
		b.t.Fatalf("%s: %v", line, err)
	}
	if r := res.GetResult(); r.GetTimedOut() || r.GetStartFailure() != nil || r.GetInfraError() != "" {
		b.t.Fatalf("%s: %v\n%s", line, r, res.GetStdout())
	}
	return string(res.GetStdout()), res.GetResult().GetExitCode()
}

// sh runs a shell line that must exit with 0 and gives what it wrote.
func (b box) sh(line string) string {
	b.t.Helper()
	out, code := b.try(line)
	if code != 0 {
		b.t.Fatalf("%s: exit code %d\n%s", line, code, out)
	}
	return out
}

// refused runs a shell line that must fail and say all of words.
func (b box) refused(line string, words ...string) {
	b.t.Helper()
	out, code := b.try(line)
	if code == 0 {
		b.t.Errorf("%s: it worked\n%s", line, out)
	}
	for _, w := range words {
		if !strings.Contains(out, w) {
			b.t.Errorf("%s: does not say %q:\n%s", line, w, out)
		}
	}
}

// write makes a file.
func (b box) write(path, text string) {
	b.t.Helper()
	_, err := b.WriteFile(within(b.t, callLimit), &sandseav1.WriteFileHeader{Path: path}, strings.NewReader(text))
	if err != nil {
		b.t.Fatalf("write %s: %v", path, err)
	}
}

// timed runs a shell line that must exit with 0 and tells how long it took.
func (b box) timed(line string) time.Duration {
	b.t.Helper()
	began := time.Now()
	b.sh(line)
	return time.Since(began)
}

// log is the sandbox's flow log, complete: the connections of commands that ended have ended too, so that what came over
// them has been reported, and a question that is refused and comes behind it all is in the log.
func (b box) log() (events []*sandseav1.NetworkEvent) {
	b.t.Helper()
	ctx := within(b.t, 2*callLimit)
	quiet := func() bool {
		i, err := b.Info(ctx)
		if err != nil {
			b.t.Fatalf("get: %v", err)
		}
		return i.GetUsage().GetNetFlows() == 0
	}
	if !wait.For(callLimit, quiet) {
		b.t.Fatal("connections stay open though all commands have ended")
	}
	last := fmt.Sprintf("mark-%d.test", marks.Add(1))
	b.refused("getent hosts " + last)
	written := func() bool {
		var err error
		if events, err = readLog(ctx, b.Sandbox); err != nil {
			b.t.Fatalf("flow log: %v", err)
		}
		return slices.ContainsFunc(events, func(e *sandseav1.NetworkEvent) bool { return e.GetName() == last && e.GetDenied() })
	}
	if !wait.For(callLimit, written) {
		b.t.Fatalf("the flow log does not come to its end:\n%s", logText(ctx, b.Sandbox))
	}
	return events
}

// marks counts the names that log asks for.
var marks atomic.Int64

func readLog(ctx context.Context, sb *client.Sandbox) (all []*sandseav1.NetworkEvent, err error) {
	for m, err := range sb.Log(ctx, &sandseav1.NetworkLogRequest{}) {
		if err != nil {
			return all, err
		}
		all = append(all, m.GetEvents()...)
	}
	return all, nil
}

// mostLines of a flow log are shown.
const mostLines = 30

func logText(ctx context.Context, sb *client.Sandbox) string {
	events, err := readLog(ctx, sb)
	var b strings.Builder
	for _, e := range events[max(0, len(events)-mostLines):] {
		fmt.Fprintf(&b, "%d %s %s %s %s denied=%t rule=%q %s %d bytes %s\n", e.GetSeq(), e.GetService(), e.GetProtocol(), e.GetName(),
			e.GetVersion(), e.GetDenied(), e.GetRule(), e.GetSource(), e.GetReceivedBytes(), e.GetError())
	}
	if err != nil {
		fmt.Fprintln(&b, err)
	}
	return b.String()
}

// files are the artefacts of a service that the sandbox got, its lists and metadata apart.
func (b box) files(service string) (out []*sandseav1.NetworkEvent) {
	b.t.Helper()
	for _, e := range b.log() {
		if e.GetKind() == sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_ARTEFACT && e.GetService() == service &&
			e.GetProtocol() == "file" && !e.GetDenied() && e.GetError() == "" {
			out = append(out, e)
		}
	}
	return out
}

// denied looks for a refusal in the flow log: of a service, with a name and the beginning of a rule's.
func (b box) denied(service, name, rule string) {
	b.t.Helper()
	for _, e := range b.log() {
		if e.GetDenied() && e.GetService() == service && e.GetName() == name && strings.HasPrefix(e.GetRule(), rule) {
			return
		}
	}
	b.t.Errorf("the flow log has no refusal of %s %q by rule %q", service, name, rule)
}

// shortened looks for a list in the flow log that a rule made shorter.
func (b box) shortened(service, name, rule string) {
	b.t.Helper()
	for _, e := range b.log() {
		if !e.GetDenied() && e.GetService() == service && e.GetName() == name && e.GetProtocol() == "list" &&
			strings.HasPrefix(e.GetRule(), rule) {
			return
		}
	}
	b.t.Errorf("the flow log has no list of %s %q made shorter by rule %q", service, name, rule)
}

// twice installs the same in two sandboxes, of which the first fills the cache, and gives the second. The second's
// artefacts must be those of the first, and none of their bytes may have come from upstream.
func twice(t testing.TB, service, line string, least int, toolkits ...string) box {
	t.Helper()
	first := open(t, allow(service), toolkits...)
	cold := first.timed(line)
	got := first.files(service)
	if len(got) < least {
		t.Errorf("the first install got %d artefacts, not %d or more", len(got), least)
	}
	digests := map[string]bool{}
	var fetched, total int64
	for _, e := range got {
		digests[e.GetDigest()] = true
		total += e.GetReceivedBytes()
		if e.GetSource() == "upstream" {
			fetched += e.GetReceivedBytes()
		}
		if e.GetReceivedBytes() <= 0 || len(e.GetDigest()) != 64 || e.GetRule() == "" && e.GetSource() == "" {
			t.Errorf("not all is told of an artefact: %v", e)
		}
	}
	second := open(t, allow(service), toolkits...)
	warm := second.timed(line)
	again := second.files(service)
	for _, e := range again {
		if e.GetSource() != "cache" {
			t.Errorf("of the second install, %s %s came from %q", e.GetName(), e.GetVersion(), e.GetSource())
		}
		if !digests[e.GetDigest()] {
			t.Errorf("the second install got %s %s with digest %s, which the first did not", e.GetName(), e.GetVersion(), e.GetDigest())
		}
	}
	if len(again) < len(digests) {
		t.Errorf("the second install got %d artefacts, the first %d", len(again), len(digests))
	}
	t.Logf("%s: %d artefacts of %.1f MB, %.1f MB of them from upstream: %.1f s, then %.1f s from the cache: %.1f times faster",
		service, len(got), float64(total)/1e6, float64(fetched)/1e6, cold.Seconds(), warm.Seconds(), cold.Seconds()/warm.Seconds())
	return second
}
