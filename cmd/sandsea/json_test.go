package main

import (
	"bytes"
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/bench"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/node"
)

// written are the field tables of docs/json.md: heading to names.
func written(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/json.md")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	for _, part := range strings.Split(string(text), "\n### ")[1:] {
		name, body, _ := strings.Cut(part, "\n")
		body, _, _ = strings.Cut(body, "\n## ")
		for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\|").FindAllStringSubmatch(body, -1) {
			out[name] = append(out[name], row[1])
		}
	}
	return out
}

func names(o object) []string {
	var out []string
	for _, m := range o {
		out = append(out, m.name)
	}
	return out
}

// jsonFields are the names under which a struct is written.
func jsonFields(v any) []string {
	var out []string
	for t, i := reflect.TypeOf(v), 0; i < t.NumField(); i++ {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		out = append(out, name)
	}
	return out
}

// TestEveryDocumentIsWrittenDown holds docs/json.md against what is printed.
func TestEveryDocumentIsWrittenDown(t *testing.T) {
	run := finished{sandbox: "s", schema: "sandsea.run/1", argv: []string{"x"}, outcome: &outcome{result: &sandseav1.Result{TimedOut: true}}}
	full := errdefs.New(errdefs.Exhausted, "o", "m").WithField("f", "l").WithRetryAfter(time.Second)
	full.Cause, full.Feature, full.Stage, full.Near, full.ErrnoName = "c", "f", "image", []string{"n"}, "ENOENT"
	got := map[string][]string{
		"sandsea.run/1":      names(run.document(run.trouble())),
		"sandsea.sandbox/1":  append(names(document("", &sandseav1.Sandbox{})), "processes"),
		"sandsea.event/1":    names(document("", &sandseav1.WatchSandboxesResponse{})),
		"sandsea.image/1":    append(names(document("", &sandseav1.Image{})), "existed"),
		"sandsea.node/1":     names(document("", &sandseav1.Node{})),
		"sandsea.whoami/1":   names(document("", &sandseav1.WhoAmIResponse{})),
		"sandsea.doctor/1":   names(doctorDocument(node.Capabilities{}, nil, "", true)),
		"sandsea.process/1":  {"schema", "sandbox", "number"},
		"sandsea.stop/1":     {"schema", "id", "error"},
		"sandsea.image_rm/1": {"schema", "name", "freed_bytes"},
		"sandsea.version/1":  {"schema", "version"},
		"sandsea.top/1":      names(busy().document(useView)),
		"TopNode":            names(busy().document(useView)[1].value.([]object)[0]),
		"TopSandbox":         names(busy().document(useView)[2].value.([]object)[0]),
		"sandsea.net_top/1":  names(busy().document(netView)),
		"NetTopSandbox":      names(busy().document(netView)[1].value.([]object)[0]),
		"sandsea.flow/1":     names(flowDocument("s", &sandseav1.NetworkEvent{})),
		"sandsea.net_check/1": append([]string{"schema", "sandbox", "asked"},
			names(members((&sandseav1.CheckNetworkResponse{}).ProtoReflect()))...),
		"sandsea.endpoint/1": append([]string{"schema", "sandbox", "port"},
			names(members((&sandseav1.EndpointResponse{}).ProtoReflect()))...),
		"sandsea.setting/1": {"schema", "name", "value", "origin"},
		"DoctorFeature":     {"name", "status", "mechanism", "fix", "optional"},
		"DoctorService":     {"name", "upstreams", "found", "missing"},
		"DoctorBackend":     {"enforces_all", "summary"},
		"sandsea.bench/1":   jsonFields(bench.Document{}),
		"BenchMachine":      jsonFields(bench.Machine{}),
		"BenchResult":       jsonFields(bench.Result{}),
		"sandsea.output/1":  {"schema", "number", "event", "stream", "offset", "data", "bytes", "result"},
		"error":             append(names(errorObject(full)), "request", "candidates", "key", "count"),
	}
	for _, m := range []proto.Message{
		&sandseav1.StartFailure{}, &sandseav1.Result{}, &sandseav1.SandboxSpec{}, &sandseav1.Environment{}, &sandseav1.Limits{},
		&sandseav1.NetworkPolicy{}, &sandseav1.NetworkLimits{}, &sandseav1.NetworkPhase{}, &sandseav1.PortRange{},
		&sandseav1.NetworkRule{}, &sandseav1.Entrypoint{}, &sandseav1.Parent{}, &sandseav1.Enforcement{}, &sandseav1.End{},
		&sandseav1.Usage{}, &sandseav1.Process{}, &sandseav1.Command{}, &sandseav1.Layer{}, &sandseav1.ImageConfig{}, &sandseav1.Feature{},
		&sandseav1.TerminalSize{},
	} {
		got[string(m.ProtoReflect().Descriptor().Name())] = names(members(m.ProtoReflect()))
	}
	got["NetworkRule"] = append(got["NetworkRule"], "domain", "cidr", "service") // one of them
	sorted := cmp.Transformer("set", func(in []string) map[string]bool {
		out := map[string]bool{}
		for _, s := range in {
			out[s] = true
		}
		return out
	})
	if diff := cmp.Diff(written(t), got, sorted); diff != "" {
		t.Errorf("docs/json.md (-written +printed):\n%s", diff)
	}
}

func TestDocumentsLeaveNothingOut(t *testing.T) {
	sb := &sandseav1.Sandbox{
		Id: "s1", State: sandseav1.SandboxState_SANDBOX_STATE_LOST, CreatedAt: timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 600, time.FixedZone("", 3600))),
		Spec: &sandseav1.SandboxSpec{
			Env: map[string]string{"B": "<2>", "A": "\u202e"}, Limits: &sandseav1.Limits{MemoryBytes: 1 << 52},
			Network: &sandseav1.NetworkPolicy{Services: map[string]bool{"pypi": true}},
		},
		Enforcement: []*sandseav1.Enforcement{{Name: "limit.memory"}},
	}
	var out bytes.Buffer
	if err := printJSON(&out, document("sandsea.sandbox/1", sb)); err != nil {
		t.Fatal(err)
	}
	want := `{"schema":"sandsea.sandbox/1","id":"s1","project":"","spec":{"backend":"unspecified","class":"","environment":null,` +
		`"limits":{"memory_bytes":4503599627370496,"cpu_millis":0,"disk_bytes":0,"pids":0,"open_files":0,"output_bytes":0},"idle_ms":0,` +
		`"ttl_ms":0,"network":{"services":{"pypi":true},"phases":[],"phase":"","as_of":null,` +
		`"deny":[],"inspect_tls":false,"limits":null,"pin":[]},"user":"","env":{"A":"\u202e","B":"<2>"},"workdir":"","labels":{},"entrypoint":null,` +
		`"no_new_privs":false,"require":[],"job":"","rollout":"","attempt":0,"parent":null},"state":"lost","node":"","epoch":0,` +
		`"created_at":"2026-01-02T02:04:05.0000006Z","ready_at":null,"expires_at":null,"end":null,"layers":[],` +
		`"enforcement":[{"name":"limit.memory","mechanism":""}],"usage":null,"idle_for_ms":0,"image_digest":"","config":null,"network_phase":""}` + "\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestWordsOfALaterVersionAreNumbers(t *testing.T) {
	d := sandseav1.SandboxState(0).Descriptor()
	for n, want := range map[protoreflect.EnumNumber]string{0: "unspecified", 2: "running", 99: "99"} {
		if got := enumWord(d, n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

func TestJSONIsHarmlessToTerminalsAndTheSameToPrograms(t *testing.T) {
	in := "esc\x1b[31m c1\u009b del\x7f bidi\u202e zero\u200b tag\U000e0001 <&> ünï 名"
	var out bytes.Buffer
	if err := printJSON(&out, object{{"text", in}}); err != nil {
		t.Fatal(err)
	}
	for _, r := range strings.TrimSuffix(out.String(), "\n") {
		if ui.Hostile(r) {
			t.Errorf("holds %U: %q", r, out.String())
		}
	}
	var back struct{ Text string }
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || back.Text != in {
		t.Errorf("read back %q, %v", back.Text, err)
	}
}

func TestTooMuchOutputIsCutAndSaid(t *testing.T) {
	a := &app{io: &ui.IO{}, json: true}
	out := &outcome{result: &sandseav1.Result{}}
	piece := &sandseav1.OutputData{Stream: sandseav1.Stream_STREAM_STDOUT, Data: make([]byte, 40<<20)}
	for range 2 {
		if err := a.passOn(out, piece); err != nil {
			t.Fatal(err)
		}
	}
	if len(out.stdout) != jsonKeep || !out.cut {
		t.Errorf("kept %d, cut %v", len(out.stdout), out.cut)
	}
	doc := finished{outcome: out, argv: []string{"x"}}.document(nil)
	for _, m := range doc {
		if m.name == "truncated" && m.value != true {
			t.Error("not said to be truncated")
		}
	}
}
