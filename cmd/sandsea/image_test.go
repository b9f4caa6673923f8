package main

import (
	"testing"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

func TestWhatAnInterruptedImportKeepsIsToldWhenItIsKnown(t *testing.T) {
	const before, all = "no image was made", 41 << 20
	for name, tt := range map[string]struct {
		progress *sandseav1.ImportProgress
		want     string
	}{
		"all fetched": {
			&sandseav1.ImportProgress{Stage: "download", Done: all, Total: all, Unit: "bytes", Finished: true},
			"no image was made; 41 MiB of packages kept in the cache",
		},
		"under way":        {&sandseav1.ImportProgress{Stage: "download", Done: all / 2, Total: all, Unit: "bytes"}, before},
		"broken off":       {&sandseav1.ImportProgress{Stage: "download", Done: all / 2, Total: all, Unit: "bytes", Finished: true}, before},
		"nothing to fetch": {&sandseav1.ImportProgress{Stage: "download", Unit: "bytes", Finished: true}, before},
		"another stage":    {&sandseav1.ImportProgress{Stage: "write", Done: all, Total: all, Unit: "bytes", Finished: true}, before},
	} {
		if got := keptOf(tt.progress, before); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
