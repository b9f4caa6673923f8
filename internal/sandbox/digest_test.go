package sandbox_test

import (
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
)

func TestDigestSeparatesItsParts(t *testing.T) {
	a := sandbox.Digest("run", []byte("ab"), []byte("c"))
	for name, other := range map[string]string{
		"parts cut elsewhere":    sandbox.Digest("run", []byte("a"), []byte("bc")),
		"another operation":      sandbox.Digest("start", []byte("ab"), []byte("c")),
		"an empty part more":     sandbox.Digest("run", []byte("ab"), []byte("c"), nil),
		"parts run together":     sandbox.Digest("run", []byte("abc")),
		"operation in a part":    sandbox.Digest("", []byte("run"), []byte("ab"), []byte("c")),
		"parts in another order": sandbox.Digest("run", []byte("c"), []byte("ab")),
	} {
		if a == other {
			t.Errorf("%s: same digest", name)
		}
	}
	if a != sandbox.Digest("run", []byte("ab"), []byte("c")) || len(a) != 64 {
		t.Errorf("not repeatable, or not 64 digits: %s", a)
	}
}

func rules(list ...policy.Rule) policy.Policy {
	return policy.Policy{Phases: []policy.Phase{{Name: "a", Rules: list}}}
}

func TestSpecDigestIsStableAcrossVersionsAndSeesEveryDifference(t *testing.T) {
	spec := sandbox.Spec{Environment: sandbox.Environment{Image: "py"}, Labels: map[string]string{"a": "1", "b": "2"}}
	// Golden: a change of this value makes every key of a running cluster answer AlreadyExists.
	const want = "4487859161ea06b6fedcf789f0ef5666538d388be554a00396af91d6f4465d55"
	if got := spec.Digest(); got != want {
		t.Errorf("digest of the golden spec: got %s, want %s", got, want)
	}
	same := spec
	same.Labels = map[string]string{"b": "2", "a": "1"}
	same.Env, same.Require = map[string]string{}, []string{}
	same.Network = policy.Policy{Services: map[string]bool{"pypi": false}, Deny: []string{}}
	if same.Digest() != spec.Digest() {
		t.Error("empty and absent, or the order of a map, make a difference")
	}
	for name, change := range map[string]func(*sandbox.Spec){
		"image":          func(s *sandbox.Spec) { s.Environment.Image = "go" },
		"label":          func(s *sandbox.Spec) { s.Labels = map[string]string{"a": "1", "b": "3"} },
		"memory":         func(s *sandbox.Spec) { s.Limits.Memory = 1 << 30 },
		"large memory":   func(s *sandbox.Spec) { s.Limits.Memory = 1<<49 + 1 },
		"ttl":            func(s *sandbox.Spec) { s.TTL = time.Hour },
		"privileges":     func(s *sandbox.Spec) { s.NoNewPrivs = true },
		"toolkits":       func(s *sandbox.Spec) { s.Environment.Toolkits = []string{"x"} },
		"service":        func(s *sandbox.Spec) { s.Network.Services = map[string]bool{"npm": true} },
		"rule":           func(s *sandbox.Spec) { s.Network = rules(policy.Rule{Domain: "a.example"}) },
		"as of":          func(s *sandbox.Spec) { s.Network.AsOf = time.Unix(1e9, 0) },
		"denied":         func(s *sandbox.Spec) { s.Network.Deny = []string{"pypi:a"} },
		"empty in argv":  func(s *sandbox.Spec) { s.Argv = []string{"a", "", "b"} },
		"empty variable": func(s *sandbox.Spec) { s.Env = map[string]string{"LANG": ""} },
		"empty label":    func(s *sandbox.Spec) { s.Labels = map[string]string{"a": "1", "b": "2", "c": ""} },
		"attempt":        func(s *sandbox.Spec) { s.Attempt = 2 },
	} {
		other := spec
		change(&other)
		if other.Digest() == spec.Digest() {
			t.Errorf("%s makes no difference", name)
		}
	}
	a, b := spec, spec
	a.Env, b.Labels = map[string]string{"c": ""}, map[string]string{"a": "1", "b": "2", "c": ""}
	if a.Digest() == b.Digest() {
		t.Error("an empty variable and an empty label make the same difference")
	}
	a, b = spec, spec
	a.Network, b.Network = rules(policy.Rule{Domain: "a.example"}), rules(policy.Rule{Domain: "a.example", Reject: true})
	if a.Digest() == b.Digest() {
		t.Error("whether a rule rejects makes no difference")
	}
	a.Network, b.Network = rules(policy.Rule{Service: "pypi"}), rules(policy.Rule{Service: "pypi"})
	b.Network.Services = map[string]bool{"pypi": false}
	if a.Digest() == b.Digest() {
		t.Error("a service that is rejected before the rule that allows it makes no difference")
	}
	a, b = spec, spec
	a.Environment.Toolkits, b.Environment.Toolkits = []string{"x", "y"}, []string{"y", "x"}
	if a.Digest() == b.Digest() {
		t.Error("the order of toolkits makes no difference")
	}
	a.Limits.Memory, b.Limits.Memory = 1<<60, 1<<60+1
	if a.Digest() == b.Digest() {
		t.Error("large numbers lose digits")
	}
}
