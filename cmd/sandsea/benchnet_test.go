package main

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/policy"
)

func TestTheBenchsAetherAsksNobodyForUpstreams(t *testing.T) {
	c, err := config.Parse("aether.toml", benchAether())
	if err != nil {
		t.Fatal(err)
	}
	if want := []netip.AddrPort{netip.AddrPortFrom(benchFar, 53)}; !slices.Equal(c.Resolvers, want) {
		t.Errorf("resolvers %v, want %v", c.Resolvers, want)
	}
	for _, name := range []string{
		policy.PyPI, policy.NPM, policy.Golang, policy.Crates, policy.Debian, policy.Maven, policy.RubyGems,
	} {
		s := c.Services[name]
		if len(s.URLs) == 0 || (name == policy.Golang) != (s.Checksums == "off") {
			t.Errorf("%s: %+v", name, s)
		}
	}
	if c.Limits.Flows < 5000 || c.Limits.ProjectFlows < 5000 {
		t.Errorf("limits %+v", c.Limits)
	}
}

func TestTheBenchsPolicyOpensOneName(t *testing.T) {
	p, err := benchPolicy()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		q    policy.Question
		want bool
	}{
		{policy.Question{Name: benchName, Addr: benchFar, Port: benchPort, Protocol: policy.TCP}, true},
		{policy.Question{Name: benchName, Port: 80, Protocol: policy.TCP}, false},
		{policy.Question{Name: "other.bench.test", Port: benchPort, Protocol: policy.TCP}, false},
		{policy.Question{Addr: benchFar, Port: benchPort, Protocol: policy.TCP}, false},
	} {
		if v := policy.Evaluate(p, p.Start, c.q, nil); v.Allow != c.want {
			t.Errorf("%+v: %+v", c.q, v)
		}
	}
}

func TestResidentOf(t *testing.T) {
	for _, c := range []struct {
		text string
		want int64
		fail string
	}{
		{"Name:\tx\nVmPeak:\t 9 kB\nVmRSS:\t   1234 kB\nRssAnon:\t 5 kB\n", 1234 * 1024, ""},
		{"VmRSS:\t0 kB\n", 0, ""},
		{"Name:\tkthreadd\n", 0, "no VmRSS"},
		{"VmRSS:\tmuch kB\n", 0, "much"},
	} {
		path := filepath.Join(t.TempDir(), "status")
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := residentOf(path)
		if got != c.want || (err != nil) != (c.fail != "") || err != nil && !strings.Contains(err.Error(), c.fail) {
			t.Errorf("%q: %d, %v", c.text, got, err)
		}
	}
}

func TestAwait(t *testing.T) {
	late, broken := errors.New("late"), errors.New("broken")
	calls := 0
	if err := await(t.Context(), late, func() (bool, error) { calls++; return calls == 3, nil }); err != nil || calls != 3 {
		t.Errorf("%d calls, %v", calls, err)
	}
	if err := await(t.Context(), late, func() (bool, error) { return false, broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestBenchTellsWhatItCannotDo(t *testing.T) {
	for _, c := range []struct {
		args []string
		text string
	}{
		{[]string{"net", "--rounds=0"}, "--rounds 0: at least 1"},
		{[]string{"net", "--samples=0"}, "--samples 0: at least 1"},
		{[]string{"net", "--burst=-1"}, "--burst -1: at least 0"},
		{[]string{"net", "--streams=-1s"}, "--streams -1s: at least 0s"},
		{[]string{"net", "--flows=many"}, "flows"},
		{[]string{"net", "extra"}, "extra"},
		{[]string{"create", "--rounds=0"}, "--rounds 0: at least 1"},
		{[]string{"create", "--crun=0"}, "--crun 0: at least 1"},
		{[]string{"create", "--rate=-1s"}, "--rate -1s: at least 0s"},
		{[]string{"run", "--n=0"}, "--n 0: at least 1"},
		{[]string{"run", "--in-flight=0"}, "--in-flight 0: at least 1"},
	} {
		r := program{args: append([]string{"bench"}, c.args...)}.run(t)
		if os.Geteuid() != 0 && !strings.Contains(r.stderr, c.text) { // then root is what is missing first
			continue
		}
		if r.code != 2 || !strings.Contains(r.stderr, c.text) || r.stdout != "" {
			t.Errorf("%q: exit %d, %q, %q", c.args, r.code, r.stdout, r.stderr)
		}
	}
}
