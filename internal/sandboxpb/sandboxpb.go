// Package sandboxpb turns the public messages into the pure model and back: specs, images, states, ends. Servers and
// edges both use it, so that a field means the same on both sides, and it names the headers of the line between them.
// Nothing here decides anything; a value that the model does not know comes out as it went in or as its zero value.
package sandboxpb

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Headers between servers and edges.
const (
	// ProjectsHeader carries the project paths that the authenticated caller covers, comma-separated.
	ProjectsHeader = "Sandsea-Projects"
	// PrincipalHeader carries who calls, as "user:admin", for records.
	PrincipalHeader = "Sandsea-Principal"
)

// SplitProjects reads the value of ProjectsHeader.
func SplitProjects(header string) []string {
	var out []string
	for p := range strings.SplitSeq(header, ",") {
		if p = strings.TrimSpace(p); p != "" {
			out = append(out, p)
		}
	}
	return out
}

// Covers reports whether one of the paths is the project or an ancestor of it.
func Covers(paths []string, project string) bool {
	return slices.ContainsFunc(paths, func(p string) bool {
		rest, ok := strings.CutPrefix(project, p)
		return ok && p != "" && (rest == "" || rest[0] == '/')
	})
}

// milliseconds gives ms as a duration; values that a duration cannot hold become the nearest that it can, so that the
// check of bounds sees them as what they are: far out.
func milliseconds(ms int64) time.Duration {
	const most = math.MaxInt64 / int64(time.Millisecond)
	return time.Duration(max(-most, min(most, ms))) * time.Millisecond
}

// ToSpec is the spec that a message asks for, not validated. A nil message is an empty spec. An enum value that this
// version does not know is Invalid here, since the model has no word for it.
func ToSpec(m *sandseav1.SandboxSpec) (sandbox.Spec, error) {
	s := sandbox.Spec{
		Class: m.GetClass(),
		Environment: sandbox.Environment{
			Image: m.GetEnvironment().GetImage(), Base: m.GetEnvironment().GetBase(),
			Workspace: m.GetEnvironment().GetWorkspace(), Toolkits: slices.Clone(m.GetEnvironment().GetToolkits()),
		},
		Limits: ToLimits(m.GetLimits()),
		Idle:   milliseconds(m.GetIdleMs()), TTL: milliseconds(m.GetTtlMs()),
		User: m.GetUser(), Env: maps.Clone(m.GetEnv()), Workdir: m.GetWorkdir(), Labels: maps.Clone(m.GetLabels()),
		Argv: slices.Clone(m.GetEntrypoint().GetArgv()), NoNewPrivs: m.GetNoNewPrivs(),
		Require: slices.Clone(m.GetRequire()), Job: m.GetJob(), Rollout: m.GetRollout(), Attempt: int(m.GetAttempt()),
		ParentID: m.GetParent().GetId(), ParentSeq: m.GetParent().GetSeq(),
	}
	var err error
	if s.Network, err = ToPolicy("network", m.GetNetwork()); err != nil {
		return s, err
	}
	switch m.GetBackend() {
	case sandseav1.Backend_BACKEND_UNSPECIFIED:
	case sandseav1.Backend_BACKEND_CONTAINER:
		s.Backend = "container"
	default:
		return s, errdefs.New(errdefs.Invalid, "", "backend: %d is not known", m.GetBackend()).
			WithField("backend", "").WithHint("Use BACKEND_CONTAINER")
	}
	switch m.GetEntrypoint().GetMode() {
	case sandseav1.EntrypointMode_ENTRYPOINT_MODE_UNSPECIFIED:
	case sandseav1.EntrypointMode_ENTRYPOINT_MODE_IDLE:
		s.Entrypoint = sandbox.EntrypointIdle
	case sandseav1.EntrypointMode_ENTRYPOINT_MODE_IMAGE:
		s.Entrypoint = sandbox.EntrypointImage
	case sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV:
		s.Entrypoint = sandbox.EntrypointArgv
	default:
		return s, errdefs.New(errdefs.Invalid, "", "entrypoint.mode: %d is not known", m.GetEntrypoint().GetMode()).
			WithField("entrypoint.mode", "").WithHint("Use idle, image or argv")
	}
	return s, nil
}

// FromSpec is the message for a spec.
func FromSpec(s sandbox.Spec) *sandseav1.SandboxSpec {
	m := &sandseav1.SandboxSpec{
		Class: s.Class,
		Environment: &sandseav1.Environment{
			Image: s.Environment.Image, Base: s.Environment.Base, Workspace: s.Environment.Workspace,
			Toolkits: slices.Clone(s.Environment.Toolkits),
		},
		Limits: FromLimits(s.Limits), IdleMs: s.Idle.Milliseconds(), TtlMs: s.TTL.Milliseconds(),
		User: s.User, Env: maps.Clone(s.Env), Workdir: s.Workdir, Labels: maps.Clone(s.Labels),
		NoNewPrivs: s.NoNewPrivs, Require: slices.Clone(s.Require), Job: s.Job, Rollout: s.Rollout,
		Attempt: int32(s.Attempt),
	}
	if s.Backend == "container" {
		m.Backend = sandseav1.Backend_BACKEND_CONTAINER
	}
	m.Network = FromPolicy(s.Network)
	if s.Entrypoint != "" || len(s.Argv) > 0 {
		m.Entrypoint = &sandseav1.Entrypoint{Mode: entrypoints[s.Entrypoint], Argv: slices.Clone(s.Argv)}
	}
	if s.ParentID != "" {
		m.Parent = &sandseav1.Parent{Id: s.ParentID, Seq: s.ParentSeq}
	}
	return m
}

var entrypoints = map[sandbox.EntrypointMode]sandseav1.EntrypointMode{
	sandbox.EntrypointIdle:  sandseav1.EntrypointMode_ENTRYPOINT_MODE_IDLE,
	sandbox.EntrypointImage: sandseav1.EntrypointMode_ENTRYPOINT_MODE_IMAGE,
	sandbox.EntrypointArgv:  sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV,
}

// ToLimits reads limits.
func ToLimits(m *sandseav1.Limits) sandbox.Limits {
	return sandbox.Limits{
		Memory: m.GetMemoryBytes(), CPUMillis: m.GetCpuMillis(), Disk: m.GetDiskBytes(), Pids: m.GetPids(),
		OpenFiles: m.GetOpenFiles(), Output: m.GetOutputBytes(),
	}
}

// FromLimits writes limits.
func FromLimits(l sandbox.Limits) *sandseav1.Limits {
	return &sandseav1.Limits{
		MemoryBytes: l.Memory, CpuMillis: l.CPUMillis, DiskBytes: l.Disk, Pids: l.Pids, OpenFiles: l.OpenFiles,
		OutputBytes: l.Output,
	}
}

// FromState is the public word for a state. A lost sandbox is one that ended with the cause infra_lost.
func FromState(s sandbox.State, cause sandbox.Cause) sandseav1.SandboxState {
	switch s {
	case sandbox.Creating:
		return sandseav1.SandboxState_SANDBOX_STATE_CREATING
	case sandbox.Running:
		return sandseav1.SandboxState_SANDBOX_STATE_RUNNING
	case sandbox.Stopping:
		return sandseav1.SandboxState_SANDBOX_STATE_STOPPING
	case sandbox.Ended:
		if cause == sandbox.CauseInfraLost {
			return sandseav1.SandboxState_SANDBOX_STATE_LOST
		}
		return sandseav1.SandboxState_SANDBOX_STATE_ENDED
	default:
		return sandseav1.SandboxState_SANDBOX_STATE_UNSPECIFIED
	}
}

// Over reports whether a state is one that nothing leaves.
func Over(s sandseav1.SandboxState) bool {
	return s == sandseav1.SandboxState_SANDBOX_STATE_ENDED || s == sandseav1.SandboxState_SANDBOX_STATE_LOST
}

// ToConfig reads an image config.
func ToConfig(m *sandseav1.ImageConfig) image.Config {
	return image.Config{
		User: m.GetUser(), Workdir: m.GetWorkdir(), Env: slices.Clone(m.GetEnv()),
		Entrypoint: slices.Clone(m.GetEntrypoint()), Cmd: slices.Clone(m.GetCmd()),
	}
}

// FromConfig writes an image config.
func FromConfig(c image.Config) *sandseav1.ImageConfig {
	return &sandseav1.ImageConfig{User: c.User, Workdir: c.Workdir, Env: c.Env, Entrypoint: c.Entrypoint, Cmd: c.Cmd}
}

// ToLayers reads layers; a malformed digest is an error.
func ToLayers(ms []*sandseav1.Layer) ([]image.Layer, error) {
	out := make([]image.Layer, 0, len(ms))
	for _, m := range ms {
		d, err := image.ParseDigest(m.GetDigest())
		if err != nil {
			return nil, fmt.Errorf("layer: %w", err)
		}
		out = append(out, image.Layer{Digest: d, Bytes: m.GetBytes(), Files: m.GetFiles(), Source: m.GetSource()})
	}
	return out, nil
}

// FromLayers writes layers.
func FromLayers(ls []image.Layer) []*sandseav1.Layer {
	out := make([]*sandseav1.Layer, 0, len(ls))
	for _, l := range ls {
		out = append(out, &sandseav1.Layer{Digest: string(l.Digest), Bytes: l.Bytes, Files: l.Files, Source: l.Source})
	}
	return out
}

// ToDigests reads layer digests as a create carries them.
func ToDigests(ss []string) ([]image.Digest, error) {
	out := make([]image.Digest, 0, len(ss))
	for _, s := range ss {
		d, err := image.ParseDigest(s)
		if err != nil {
			return nil, fmt.Errorf("layer: %w", err)
		}
		out = append(out, d)
	}
	return out, nil
}

// FromDigests writes layer digests.
func FromDigests(ds []image.Digest) []string {
	out := make([]string, 0, len(ds))
	for _, d := range ds {
		out = append(out, string(d))
	}
	return out
}

// BriefBytes is the size above which Brief leaves something out.
const BriefBytes = 32 << 10

// Brief is a sandbox as servers and the store keep it. All sandboxes of a node are told in one message, and ends go to
// the store many at a time: what only the node needs (variables, arguments, policy, the image's config) is left out of
// one that is too large for that. Get of a living one tells everything.
func Brief(m *sandseav1.Sandbox) *sandseav1.Sandbox {
	if proto.Size(m) <= BriefBytes {
		return m
	}
	out := proto.CloneOf(m)
	out.Config = nil
	if s := out.GetSpec(); s != nil {
		s.Env, s.Network = nil, nil
		if s.GetEntrypoint() != nil {
			s.Entrypoint.Argv = nil
		}
	}
	return out
}

// EncodeEnded is the value of the record of an end (keys.EndedSandbox): the sandbox as it is shown, as JSON.
func EncodeEnded(s *sandseav1.Sandbox) ([]byte, error) {
	b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(Brief(s))
	if err != nil {
		return nil, fmt.Errorf("encode the end of sandbox %s: %w", s.GetId(), err)
	}
	return b, nil
}

// DecodeEnded reads the record of an end, also one that a later version wrote.
func DecodeEnded(b []byte) (*sandseav1.Sandbox, error) {
	var s sandseav1.Sandbox
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, &s); err != nil {
		return nil, errdefs.New(errdefs.DataLoss, "record of an end", "cannot be read: %v", err).Wrap(err)
	}
	return &s, nil
}
