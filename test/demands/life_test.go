package demands

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestD27CreateReturnsReadyOrNamesTheStage(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.TtlMs = 3600_000 })
	// At once, without a retry.
	if got := sh(t, sb, "echo up"); got != "up\n" {
		t.Errorf("got %q", got)
	}
	if _, err := write(t, sb, "", "/tmp/x", "x"); err != nil {
		t.Error(err)
	}
	ctx := within(t, 60*time.Second)
	create := func(s *sandseav1.SandboxSpec, ready int64) error {
		_, err := serve(t).Client.Sandboxes.Create(ctx, connect.NewRequest(&sandseav1.CreateSandboxRequest{
			Spec: s, ReadyTimeoutMs: ready,
		}))
		return err
	}
	for name, tt := range map[string]struct {
		change func(*sandseav1.SandboxSpec)
		kind   errdefs.Kind
		stage  string
		retry  bool
	}{
		"no image":   {func(s *sandseav1.SandboxSpec) { s.Environment.Image = "none" }, errdefs.NotFound, "image", false},
		"too large":  {func(s *sandseav1.SandboxSpec) { s.Limits.MemoryBytes = 1 << 49 }, errdefs.Exhausted, "queue", true},
		"no program": {argv("/no/such"), errdefs.FailedPrecondition, "start", false},
		"no request": {func(s *sandseav1.SandboxSpec) { s.Workdir = "\x00" }, errdefs.Invalid, "", false},
	} {
		began := time.Now()
		e := fault(t, name, create(spec(tt.change), 5000), tt.kind)
		if e.Stage != tt.stage || e.Retryable() != tt.retry || time.Since(began) > 20*time.Second {
			t.Errorf("%s: stage %q, retry %v, %v", name, e.Stage, e.Retryable(), e)
		}
	}
}

// argv makes a sandbox's entrypoint.
func argv(args ...string) func(*sandseav1.SandboxSpec) {
	return func(s *sandseav1.SandboxSpec) {
		s.Entrypoint = &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV, Argv: args}
	}
}

func TestD28ACreateThatWasGivenUpLeavesNothingOrIsFoundByItsKey(t *testing.T) {
	t.Parallel()
	c := serve(t).Client
	mark := map[string]string{"d28": t.Name()}
	alive := func() (ids []string) {
		for sb, err := range c.List(within(t, 30*time.Second), &sandseav1.ListSandboxesRequest{Labels: mark}) {
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, sb.GetId())
		}
		return ids
	}
	var g errgroup.Group
	for i := range 12 {
		g.Go(func() error {
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Duration(i)*4*time.Millisecond, errors.New("given up"))
			defer cancel()
			sb, err := c.Create(ctx, spec(func(s *sandseav1.SandboxSpec) { s.Labels = mark }), "")
			if err == nil {
				return sb.Stop(within(t, 60*time.Second)) // it was faster
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	wait.Until(t, 60*time.Second, func() bool { return len(alive()) == 0 }, "nothing is left")

	ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Millisecond, errors.New("given up"))
	defer cancel()
	key := "d28-" + rand.Text()
	keyed := func(ctx context.Context) (*client.Sandbox, error) {
		return c.Create(ctx, spec(func(s *sandseav1.SandboxSpec) { s.Labels = mark }), key)
	}
	_, _ = keyed(ctx)
	sb, err := keyed(within(t, 60*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, sb)
	again, err := keyed(within(t, 60*time.Second))
	if err != nil || again.ID != sb.ID {
		t.Errorf("the same key gave %v, %v", again, err)
	}
	wait.Until(t, 20*time.Second, func() bool { ids := alive(); return len(ids) == 1 && ids[0] == sb.ID }, "one is there")
}

func TestD29StopIsIdempotentAndBounded(t *testing.T) {
	t.Parallel()
	sb := open(t)
	start(t, sb, &sandseav1.StartRequest{Command: client.Shell("trap '' TERM; while :; do sleep 1; done")})
	ctx := within(t, 30*time.Second)
	var g errgroup.Group
	for range 8 { // while it ends, too
		g.Go(func() error { return sb.Stop(ctx) })
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if err := sb.Stop(ctx); err != nil {
		t.Errorf("after its end: %v", err)
	}
	// One that nobody knows: a typed answer at once, which cleaning up may pass over.
	other := "s" + strings.Repeat("0", 26)
	if err := serve(t).Client.Sandbox(other).Stop(ctx); !errors.Is(err, errdefs.NotFound) && !errors.Is(err, errdefs.Invalid) {
		t.Errorf("an unknown one: %v", err)
	}
}

func TestD30AClientWorksFromManyGoroutinesAtOnce(t *testing.T) {
	t.Parallel()
	sb := open(t)
	var g errgroup.Group
	for i := range 32 {
		g.Go(func() error {
			res, err := sb.Run(within(t, 60*time.Second), client.Argv("echo", fmt.Sprint(i)))
			if err == nil && string(res.GetStdout()) != fmt.Sprintln(i) {
				err = fmt.Errorf("call %d: %q", i, res.GetStdout())
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	// Several event loops are Python's: sdk/python/tests/test_demands.py.
}

func TestD31AHandleIsItsIDAndAnswersTheSpecInForce(t *testing.T) {
	t.Parallel()
	s := serve(t)
	asked := spec(worker, func(s *sandseav1.SandboxSpec) {
		s.Env, s.Labels = map[string]string{"A": "b"}, map[string]string{"d31": "x"}
	})
	sb, err := s.Client.Create(within(t, 60*time.Second), asked, "")
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, sb)
	handle, err := json.Marshal(sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	// Another process: nothing but the id and where the server is.
	other, err := client.New(client.Config{URL: s.Client.URL(), TokenFile: s.Dir + "/admin.token"})
	if err != nil {
		t.Fatal(err)
	}
	var id string
	if err := json.Unmarshal(handle, &id); err != nil {
		t.Fatal(err)
	}
	img, err := other.Images.Get(within(t, 20*time.Second), connect.NewRequest(&sandseav1.GetImageRequest{Ref: "worker"}))
	if err != nil {
		t.Fatal(err)
	}
	check := func(how string, got *sandseav1.Sandbox) {
		t.Helper()
		if got.GetImageDigest() == "" || got.GetImageDigest() != img.Msg.GetImage().GetDigest() {
			t.Errorf("%s: digest %q, want %q", how, got.GetImageDigest(), img.Msg.GetImage().GetDigest())
		}
		c := got.GetConfig()
		if c.GetUser() != "alice" || c.GetWorkdir() != "/srv" || !slices.Contains(c.GetEnv(), "LAYER=image") {
			t.Errorf("%s: config %v", how, c)
		}
		sp := got.GetSpec()
		if sp.GetEnv()["A"] != "b" || sp.GetLabels()["d31"] != "x" || sp.GetLimits().GetMemoryBytes() != 256<<20 ||
			sp.GetLimits().GetPids() == 0 || sp.GetTtlMs() == 0 {
			t.Errorf("%s: spec %v", how, sp)
		}
		// It survives JSON.
		b, err := protojson.Marshal(got)
		back := &sandseav1.Sandbox{}
		if err == nil {
			err = protojson.Unmarshal(b, back)
		}
		if err != nil || !proto.Equal(got, back) {
			t.Errorf("%s: through JSON: %v", how, err)
		}
	}
	got, err := other.Sandbox(id).Info(within(t, 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	check("get", got)
	listed := func() (found *sandseav1.Sandbox) {
		for sb, err := range other.List(within(t, 20*time.Second), &sandseav1.ListSandboxesRequest{Labels: map[string]string{"d31": "x"}}) {
			if err != nil {
				t.Fatal(err)
			}
			found = sb
		}
		return found
	}
	wait.Until(t, 20*time.Second, func() bool { return listed() != nil }, "it is listed")
	check("list", listed())
	if err := other.Sandbox(id).Stop(within(t, 60*time.Second)); err != nil {
		t.Fatal(err)
	}
	if got, err = other.Sandbox(id).Info(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	check("after the end", got)
}

func TestD32LookingIsNoUse(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.IdleMs = 2500 })
	n := start(t, sb, &sandseav1.StartRequest{Command: client.Argv("echo", "x")})
	ctx := within(t, 60*time.Second)
	ended := wait.For(30*time.Second, func() bool {
		i, err := sb.Info(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if i.GetState() == sandseav1.SandboxState_SANDBOX_STATE_ENDED {
			return i.GetEnd().GetCause() == "idle"
		}
		_, _ = sb.Processes(ctx)
		for range sb.Attach(ctx, &sandseav1.AttachRequest{Number: n, NoFollow: true}) {
		}
		for range serve(t).Client.List(ctx, &sandseav1.ListSandboxesRequest{}) {
			break
		}
		return false
	})
	if !ended {
		t.Errorf("it was kept alive by being looked at: %v", info(t, sb))
	}
	// That looking does not wake a paused sandbox arrives with pausing.
}

func TestD33NamesAreLabelsAndNeverIDs(t *testing.T) {
	t.Parallel()
	labels := map[string]string{
		"session": "hello-world__bZZeEkw__verifier__grade", "key.with.dots/and-more": "v.1", "long": strings.Repeat("x", 256),
		strings.Repeat("k", 256): "",
	}
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Labels = labels })
	for k, v := range labels {
		var ids []string
		wait.Until(t, 20*time.Second, func() bool {
			ids = nil
			for x, err := range serve(t).Client.List(within(t, 20*time.Second), &sandseav1.ListSandboxesRequest{Labels: map[string]string{k: v}}) {
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, x.GetId())
			}
			return len(ids) > 0
		}, "found by "+k)
		if len(ids) != 1 || ids[0] != sb.ID {
			t.Errorf("%.20s: found %v", k, ids)
		}
	}
	_, err := serve(t).Client.Create(within(t, 20*time.Second), spec(func(s *sandseav1.SandboxSpec) {
		s.Labels = map[string]string{"a": strings.Repeat("x", 257)}
	}), "")
	if e := fault(t, "a longer one", err, errdefs.Invalid); e.Field != "labels" {
		t.Errorf("a longer one: %v", e)
	}
}

func TestD34AfterTheEndEveryCallSaysSoAndWhy(t *testing.T) {
	t.Parallel()
	sb := open(t)
	n := start(t, sb, &sandseav1.StartRequest{Command: client.Argv("cat"), Stdin: true})
	stop(t, sb)
	ctx := within(t, 60*time.Second)
	first := func(seq func(func(*sandseav1.ProcessEvent, error) bool)) (err error) {
		for _, err = range seq {
			break
		}
		return err
	}
	_, runErr := sb.Run(ctx, client.Shell("true"))
	_, keyErr := sb.RunRequest(ctx, &sandseav1.RunRequest{Command: client.Shell("true"), Key: "k"})
	_, inErr := sb.SendInput(ctx, n, 0, []byte("x"))
	_, readErr := sb.ReadFile(ctx, &sandseav1.ReadFileRequest{Path: "/etc/passwd"}, io.Discard)
	_, writeErr := write(t, sb, "", "/tmp/x", "x")
	_, statErr := sb.Stat(ctx, &sandseav1.StatFileRequest{Path: "/"})
	_, shellErr := sb.OpenShell(ctx, &sandseav1.OpenShellRequest{})
	for name, err := range map[string]error{
		"run": runErr, "run with a key": keyErr, "input": inErr, "read": readErr, "write": writeErr, "stat": statErr,
		"shell": shellErr, "start": first(sb.Start(ctx, &sandseav1.StartRequest{Command: client.Shell("true")})),
		"end of input": sb.CloseInput(ctx, n), "signal": sb.Signal(ctx, n, 9, false), "ttl": sb.ExtendTTL(ctx, time.Hour),
	} {
		if e := fault(t, name, err, errdefs.FailedPrecondition); e.Cause != "stopped" || e.Retryable() {
			t.Errorf("%s: cause %q, %v", name, e.Cause, e)
		}
	}
}

// TestD34ACommandThatRunsAsTheSandboxEndsIsToldSo: never as a command that failed.
func TestD34ACommandThatRunsAsTheSandboxEndsIsToldSo(t *testing.T) {
	t.Parallel()
	sb := open(t)
	var g errgroup.Group
	g.Go(func() error {
		_, err := sb.Run(within(t, 60*time.Second), client.Shell("touch /tmp/there; exec sleep 1000"))
		return err
	})
	wait.Until(t, 20*time.Second, func() bool {
		return run(t, sb, client.Shell("test -e /tmp/there")).GetResult().GetExitCode() == 0
	}, "it runs")
	stop(t, sb)
	if e := fault(t, "a run", g.Wait(), errdefs.FailedPrecondition); e.Cause != "stopped" {
		t.Errorf("a run: %v", e)
	}
}

func TestD35LimitsAreFractionsAndTheWorkloadSeesThem(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) {
		s.Limits = &sandseav1.Limits{CpuMillis: 500, MemoryBytes: 96 << 20, DiskBytes: 64 << 20}
	})
	if got := sh(t, sb, "nproc; grep -c ^processor /proc/cpuinfo || true"); !strings.HasPrefix(got, "1\n") {
		t.Errorf("half a CPU looks like %q", got)
	}
	l := info(t, sb).GetSpec().GetLimits()
	if l.GetCpuMillis() != 500 || l.GetMemoryBytes() != 96<<20 || l.GetDiskBytes() != 64<<20 {
		t.Errorf("in force: %v", l)
	}
	r := run(t, sb, client.Shell("head -c 80m /dev/zero >/tmp/f")).GetResult()
	if r.GetExitCode() == 0 {
		t.Error("80 MiB fit on a disk of 64 MiB")
	}
	r = run(t, sb, client.Shell("rm -f /tmp/f; x=$(head -c 200m /dev/zero | tr '\\0' x); echo ${#x}")).GetResult()
	if !r.GetOom() && r.GetExitCode() == 0 {
		t.Errorf("200 MiB fit into 96 MiB of memory: %v", r)
	}
	// Half a CPU: two seconds of work take at least three.
	r = run(t, sb, client.Shell("i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done")).GetResult()
	if r.GetCpuUs() > 1_000_000 && r.GetWallUs() < r.GetCpuUs()*3/2 {
		t.Errorf("%d us of CPU time in %d us", r.GetCpuUs(), r.GetWallUs())
	}
}

func TestD36TheEntrypointIsNoneTheImagesOrAnArgv(t *testing.T) {
	t.Parallel()
	idle := open(t, worker)
	if all, err := idle.Processes(within(t, 20*time.Second)); err != nil || len(all) != 0 {
		t.Errorf("idle: %v, %v", all, err)
	}
	own := open(t, worker, func(s *sandseav1.SandboxSpec) {
		s.Entrypoint = &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_IMAGE}
	})
	await(t, own, 1, "from the image\n")
	if p := process(t, own, 1); p.GetState() != sandseav1.ProcessState_PROCESS_STATE_RUNNING || len(p.GetCommand().GetArgv()) != 3 {
		t.Errorf("the image's: %v", p)
	}
	given := open(t, worker, argv("/bin/sh", "-c", "echo here; sleep 1; exit 6"))
	wait.Until(t, 30*time.Second, func() bool {
		return info(t, given).GetState() == sandseav1.SandboxState_SANDBOX_STATE_ENDED
	}, "it ends with its entrypoint")
	if end := info(t, given).GetEnd(); end.GetCause() != "completed" {
		t.Errorf("the end: %v", end)
	}
	got := attach(t, given, &sandseav1.AttachRequest{Number: 1})
	if string(got.data[stdout]) != "here\n" || got.end.GetResult().GetExitCode() != 6 {
		t.Errorf("its log and exit: %q, %v", got.data[stdout], got.end)
	}
}

func TestD37EndpointsAreURLsThatTheClientReaches(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	sh(t, sb, "mkdir /www; echo -n from inside >/www/a.txt")
	for port, address := range map[int]string{8001: "127.0.0.1", 8002: "0.0.0.0", 8003: "[::1]"} {
		e, err := sb.Endpoint(ctx, port, 0)
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("http://%s/endpoint/%s/%d/", serve(t).Addr(), sb.ID, port); e.GetUrl() != want {
			t.Fatalf("%s, want %s", e.GetUrl(), want)
		}
		get := func() (status int, kind, body string) {
			t.Helper()
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, e.GetUrl()+"a.txt", nil)
			if err != nil {
				t.Fatal(err)
			}
			for name, value := range e.GetHeaders() {
				r.Header.Set(name, value)
			}
			res, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			b, err := io.ReadAll(res.Body)
			if err != nil {
				t.Fatal(err)
			}
			return res.StatusCode, res.Header.Get("Sandsea-Error"), string(b)
		}
		if status, kind, body := get(); status != http.StatusBadGateway || kind != "unavailable" ||
			!strings.Contains(body, fmt.Sprintf("nobody listens at port %d yet", port)) {
			t.Errorf("%s, not open yet: %d %s %s", address, status, kind, body)
		}
		start(t, sb, &sandseav1.StartRequest{Command: client.Argv("httpd", "-f", "-p", fmt.Sprintf("%s:%d", address, port), "-h", "/www")})
		wait.Until(t, 20*time.Second, func() bool {
			status, _, body := get()
			return status == http.StatusOK && body == "from inside"
		}, address+" is reached")
	}
}

func TestD38ImagesAreNamedAndMadeOnce(t *testing.T) {
	t.Parallel()
	s := serve(t)
	files, err := server.Busybox(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, server.File{Name: "srv/d38", Body: "d38"})
	digests := make([]string, 4)
	var g errgroup.Group
	for i := range digests {
		g.Go(func() error {
			img, err := s.Import(within(t, 120*time.Second), "registry:5000/team/d38@v"+fmt.Sprint(i), files, nil)
			digests[i] = img.GetDigest()
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if len(slices.Compact(digests)) != 1 {
		t.Errorf("equal imports gave %v", digests)
	}
	for _, ref := range []string{"registry:5000/team/d38@v2", digests[0]} {
		sb := open(t, func(s *sandseav1.SandboxSpec) { s.Environment.Image = ref })
		if got := sh(t, sb, "cat /srv/d38"); got != "d38" {
			t.Errorf("%s: %q", ref, got)
		}
	}
	// That a reference is read as Docker reads it is checked where registries are: internal/layers/build.
}

func TestD39CapabilitiesComeFromOneCheapCall(t *testing.T) {
	t.Parallel()
	ctx := within(t, 20*time.Second)
	ask := func(class string) (*sandseav1.CapabilitiesResponse, error) {
		res, err := serve(t).Client.Sandboxes.Capabilities(ctx, connect.NewRequest(&sandseav1.CapabilitiesRequest{
			Backend: sandseav1.Backend_BACKEND_CONTAINER, Class: class,
		}))
		if err != nil {
			return nil, err
		}
		return res.Msg, nil
	}
	m, err := ask("")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"cpu": "limit", "memory": "limit", "disk": "limit", "pids": "limit", "gpu": "none"} {
		if m.GetResources()[name] != want {
			t.Errorf("%s: %q, want %q", name, m.GetResources()[name], want)
		}
	}
	// All or nothing, by whether the node enforces policies: TestCapabilitiesAreWhatTheNodesEnforce.
	if e := m.GetNetworkEntries(); m.GetNetworkChanges() != slices.Equal(e, []string{"cidr", "domain", "git", "ipv4", "service", "wildcard"}) ||
		m.GetNetworkChanges() != (len(e) > 0) {
		t.Errorf("network: %v", m)
	}
	for _, f := range []string{"endpoint", "entrypoint", "shell", "terminal", "watch"} {
		if !slices.Contains(m.GetFeatures(), f) {
			t.Errorf("no %s among %v", f, m.GetFeatures())
		}
	}
	for _, f := range []string{"pause", "fork"} {
		if slices.Contains(m.GetFeatures(), f) {
			t.Errorf("%s is promised and does not work yet", f)
		}
	}
	if m.GetLargest().GetMemoryBytes() == 0 || m.GetSandboxesMax() == 0 || m.GetCreatesAtOnce() == 0 {
		t.Errorf("sizes: %v", m)
	}
	if again, err := ask("native"); err != nil || !proto.Equal(again.GetLargest(), m.GetLargest()) && again.GetLargest().GetMemoryBytes() != m.GetLargest().GetMemoryBytes() {
		t.Errorf("asked by name: %v, %v", again, err)
	}
	_, err = ask("gvisor")
	fault(t, "an unknown class", err, errdefs.Invalid)
}

func TestD40AQuotaIsWaitedFor(t *testing.T) {
	t.Skip("quotas of projects arrive with the issue of many tenants; a full node's Retry-After is TestD27's")
}
