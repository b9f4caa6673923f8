package apiserver_test

import (
	"slices"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/fakeedge"
	"github.com/sandsea/sandsea/internal/node"
)

func TestCapabilitiesAreWhatTheNodesEnforce(t *testing.T) {
	tests := map[string]struct {
		lacks   []string
		want    map[string]string
		entries []string
	}{
		"all": {nil, map[string]string{
			"cpu": "limit", "memory": "limit", "disk": "limit", "pids": "limit", "gpu": "none",
		}, []string{"cidr", "domain", "git", "ipv4", "service", "wildcard"}},
		"no disk quota, no network": {[]string{node.FeatureDisk, node.FeatureEgress}, map[string]string{
			"cpu": "limit", "memory": "limit", "disk": "none", "pids": "limit", "gpu": "none",
		}, nil},
	}
	for name, tt := range tests {
		h := newHouse(t, 2, func(c *fakeedge.Config) { c.Lacks, c.Max, c.Memory = tt.lacks, 10, 8<<30 })
		resp, err := h.admin().sandboxes.Capabilities(t.Context(), connect.NewRequest(&pb.CapabilitiesRequest{Class: "native"}))
		if err != nil {
			t.Fatal(err)
		}
		m := resp.Msg
		if diff := cmp.Diff(tt.want, m.GetResources()); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if !slices.Equal(m.GetNetworkEntries(), tt.entries) || m.GetNetworkChanges() != (tt.entries != nil) || m.GetSandboxesMax() != 20 ||
			m.GetCreatesAtOnce() != 8 || m.GetLargest().GetMemoryBytes() != 8<<30 || m.GetLargest().GetCpuMillis() != 2000 {
			t.Errorf("%s: %v", name, m)
		}
	}
}

func TestCapabilitiesOfWhatIsNotKnown(t *testing.T) {
	c := newHouse(t, 1).admin()
	for field, req := range map[string]*pb.CapabilitiesRequest{
		"backend": {Backend: 7}, "class": {Class: "kata"},
	} {
		_, err := c.sandboxes.Capabilities(t.Context(), connect.NewRequest(req))
		if e := kindIs(t, errwire.FromConnect(err), errdefs.Invalid); e.Field != field {
			t.Errorf("%s: field %q", field, e.Field)
		}
	}
	none := newHouse(t, 0).admin()
	_, err := none.sandboxes.Capabilities(t.Context(), connect.NewRequest(&pb.CapabilitiesRequest{}))
	if e := kindIs(t, errwire.FromConnect(err), errdefs.Unavailable); e.RetryAfter == 0 {
		t.Error("no word when to ask again")
	}
}

func TestAFailedCreateNamesItsStage(t *testing.T) {
	h := newHouse(t, 1, func(c *fakeedge.Config) { c.Max = 1 })
	c := h.admin()
	stage := func(err error) (string, bool) {
		t.Helper()
		e := errdefs.From(err)
		if e == nil {
			t.Fatal("it was made")
		}
		return e.Stage, e.Retryable()
	}
	_, err := c.tryCreate(t.Context(), spec(func(s *pb.SandboxSpec) { s.Environment.Image = "none" }), "")
	if s, again := stage(err); s != errdefs.StageImage || again {
		t.Errorf("no such image: stage %q, retry %v: %v", s, again, err)
	}
	_, err = c.tryCreate(t.Context(), spec(func(s *pb.SandboxSpec) { s.Labels = map[string]string{"": ""} }), "")
	if s, again := stage(err); s != "" || again {
		t.Errorf("no valid request: stage %q, retry %v: %v", s, again, err)
	}
	h.edges[0].Refuse(func(string) error {
		return errdefs.New(errdefs.Internal, "sandbox", "it broke")
	})
	_, err = c.tryCreate(t.Context(), spec(), "")
	if s, again := stage(err); s != errdefs.StageStart || again {
		t.Errorf("a broken start: stage %q, retry %v: %v", s, again, err)
	}
	h.edges[0].Refuse(nil)
	sb := c.create(t, "")
	if sb.GetImageDigest() != string(digestOf("py")) || sb.GetConfig() == nil {
		t.Errorf("the image in force is %q, %v", sb.GetImageDigest(), sb.GetConfig())
	}
	_, err = c.tryCreateWithin(t.Context(), spec(), "", 3*time.Second)
	if s, again := stage(err); s != errdefs.StageQueue || !again {
		t.Errorf("no room: stage %q, retry %v: %v", s, again, err)
	}
}
