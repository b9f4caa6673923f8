package perf

import (
	"encoding/json"
	"errors"
	"os/exec"
	"slices"
	"testing"

	"github.com/sandsea/sandsea/bench"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// TestNativeCreateIsAtLeastThreeTimesFasterThanCrun compares the medians of five interleaved rounds.
func TestNativeCreateIsAtLeastThreeTimesFasterThanCrun(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:crun")
	require.Feature(t, "bin:busybox")
	const least = 3.0
	binary, err := server.Binary(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), binary, "bench", "create", "--json", "--rounds", "5", "--warmup", "10", "--native", "40",
		"--crun", "8", "--rate", "0s").Output()
	if err != nil {
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Logf("%s", e.Stderr)
		}
		t.Fatalf("sandsea bench create: %v\n%s", err, out)
	}
	var d bench.Document
	if err := json.Unmarshal(out, &d); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	if d.Failures > 0 {
		t.Errorf("%d failures: %q", d.Failures, d.Errors)
	}
	at := slices.IndexFunc(d.Results, func(r bench.Result) bool {
		return r.Metric == "create_ready_ratio" && r.Of == "native" && r.Against == "crun"
	})
	if at < 0 {
		t.Fatalf("no ratio in\n%s", out)
	}
	r := d.Results[at]
	t.Logf("native is %.1f times faster than crun (95 %%: %.1f to %.1f)", *r.Value, *r.Low, *r.High)
	if *r.Value < least {
		t.Errorf("native is %.2f times faster than crun, want at least %.0f\n%s", *r.Value, least, out)
	}
}
