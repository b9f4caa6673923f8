package sandboxpb_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

func TestSpecSurvivesTheWire(t *testing.T) {
	text := rapid.StringMatching(`[a-z]{1,8}`)
	gen := rapid.Custom(func(t *rapid.T) sandbox.Spec {
		return sandbox.Spec{
			Backend: "container", Class: text.Draw(t, "class"),
			Environment: sandbox.Environment{
				Base: text.Draw(t, "base"), Workspace: text.Draw(t, "workspace"),
				Toolkits: rapid.SliceOfN(text, 1, 3).Draw(t, "toolkits"),
			},
			Limits: sandbox.Limits{
				Memory: rapid.Int64().Draw(t, "memory"), CPUMillis: rapid.Int64().Draw(t, "cpu"), Disk: 1, Pids: 2, OpenFiles: 3,
				Output: 4,
			},
			Idle:    time.Duration(rapid.Int64Range(0, 1<<40).Draw(t, "idle")) * time.Millisecond,
			TTL:     time.Duration(rapid.Int64Range(0, 1<<40).Draw(t, "ttl")) * time.Millisecond,
			Network: drawPolicy(t),
			User:    text.Draw(t, "user"), Env: rapid.MapOfN(text, text, 1, 3).Draw(t, "env"), Workdir: "/w",
			Labels:     rapid.MapOfN(text, text, 1, 3).Draw(t, "labels"),
			Entrypoint: rapid.SampledFrom([]sandbox.EntrypointMode{"idle", "image", "argv"}).Draw(t, "mode"),
			Argv:       rapid.SliceOfN(text, 1, 3).Draw(t, "argv"), NoNewPrivs: rapid.Bool().Draw(t, "nnp"),
			Require: rapid.SliceOfN(text, 1, 3).Draw(t, "require"), Job: text.Draw(t, "job"), Rollout: text.Draw(t, "rollout"),
			Attempt: rapid.IntRange(0, 1<<20).Draw(t, "attempt"), ParentID: text.Draw(t, "parent"),
			ParentSeq: rapid.Int64Range(0, 9).Draw(t, "seq"),
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		want := gen.Draw(t, "spec")
		got, err := sandboxpb.ToSpec(sandboxpb.FromSpec(want))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
		if got.Digest() != want.Digest() {
			t.Fatal("the digest changed")
		}
	})
}

func TestEveryFieldOfTheMessageReachesTheSpec(t *testing.T) {
	// A field that is added to the message and forgotten here would be dropped in silence.
	m := &sandseav1.SandboxSpec{}
	n := m.ProtoReflect().Descriptor().Fields().Len()
	if n != 18 {
		t.Errorf("SandboxSpec has %d fields, the conversion knows 18", n)
	}
	if n := (&sandseav1.Limits{}).ProtoReflect().Descriptor().Fields().Len(); n != 6 {
		t.Errorf("Limits has %d fields, the conversion knows 6", n)
	}
}

func TestUnknownEnumsAreInvalid(t *testing.T) {
	for _, m := range []*sandseav1.SandboxSpec{
		{Backend: 99}, {Entrypoint: &sandseav1.Entrypoint{Mode: 99}},
	} {
		if _, err := sandboxpb.ToSpec(m); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%v: got %v, want Invalid", m, err)
		}
	}
}

func TestDurationsBeyondTheModelStayBeyondItsBounds(t *testing.T) {
	for _, ms := range []int64{math.MaxInt64, math.MaxInt64 / 1000, math.MinInt64, -1} {
		s, err := sandboxpb.ToSpec(&sandseav1.SandboxSpec{
			TtlMs: ms, Environment: &sandseav1.Environment{Image: "x"},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Validate(); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("ttl_ms %d: got %v, want Invalid", ms, err)
		}
	}
}

func TestCovers(t *testing.T) {
	for _, tc := range []struct {
		paths   []string
		project string
		want    bool
	}{
		{[]string{"default"}, "default", true},
		{[]string{"default"}, "default/team/x", true},
		{[]string{"default/team"}, "default", false},
		{[]string{"default/team"}, "default/teams", false},
		{[]string{"a", "default/team"}, "default/team/x", true},
		{[]string{""}, "default", false},
		{nil, "default", false},
	} {
		if got := sandboxpb.Covers(tc.paths, tc.project); got != tc.want {
			t.Errorf("%v covers %q: got %v", tc.paths, tc.project, got)
		}
	}
	if diff := cmp.Diff([]string{"a", "b/c"}, sandboxpb.SplitProjects(" a,b/c ,,")); diff != "" {
		t.Error(diff)
	}
}

func TestEndedRecordOfALaterVersionIsRead(t *testing.T) {
	want := &sandseav1.Sandbox{
		Id: "s1", Project: "default", State: sandseav1.SandboxState_SANDBOX_STATE_ENDED, End: &sandseav1.End{Cause: "oom"},
	}
	b, err := sandboxpb.EncodeEnded(want)
	if err != nil {
		t.Fatal(err)
	}
	b = append(b[:len(b)-1], []byte(`,"a_later_field":{"x":1}}`)...)
	got, err := sandboxpb.DecodeEnded(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if _, err := sandboxpb.DecodeEnded([]byte("{")); !errors.Is(err, errdefs.DataLoss) {
		t.Errorf("torn record: got %v, want DataLoss", err)
	}
}

func TestBriefBoundsWhatIsKeptOfALargeSandboxAndOfNoOther(t *testing.T) {
	small := &sandseav1.Sandbox{
		Id: "s1", Config: &sandseav1.ImageConfig{User: "u"}, Spec: &sandseav1.SandboxSpec{Env: map[string]string{"A": "1"}},
	}
	if sandboxpb.Brief(small) != small {
		t.Error("a small one is not what it was")
	}
	large := func() *sandseav1.Sandbox {
		return &sandseav1.Sandbox{
			Id: "s1", Config: &sandseav1.ImageConfig{Env: []string{"A=" + strings.Repeat("a", 1<<20)}},
			Spec: &sandseav1.SandboxSpec{
				Env: map[string]string{"A": strings.Repeat("a", 2<<20)}, Labels: map[string]string{"job": "1"},
				Entrypoint: &sandseav1.Entrypoint{
					Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV, Argv: []string{strings.Repeat("a", 1<<20)},
				},
				Network: &sandseav1.NetworkPolicy{Deny: []string{strings.Repeat("a", 1<<19)}},
			},
		}
	}
	m := large()
	want := &sandseav1.Sandbox{Id: "s1", Spec: &sandseav1.SandboxSpec{
		Labels:     map[string]string{"job": "1"},
		Entrypoint: &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV},
	}}
	if diff := cmp.Diff(want, sandboxpb.Brief(m), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(large(), m, protocmp.Transform()); diff != "" {
		t.Error("its original was changed: " + diff)
	}
}
