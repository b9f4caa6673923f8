package require

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// recorder stands in for a test and notes its end.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper()                        {}
func (r *recorder) Skipf(format string, a ...any)  { r.skipped = fmt.Sprintf(format, a...) }
func (r *recorder) Fatalf(format string, a ...any) { r.failed = fmt.Sprintf(format, a...) }

func TestThat(t *testing.T) {
	absent := errors.New("not in this kernel")
	for _, c := range []struct {
		name     string
		required string
		err      error
		skip     bool
		fail     bool
	}{
		{"what is there neither skips nor fails", "fancy", nil, false, false},
		{"what is absent skips", "", absent, true, false},
		{"what is absent and required fails", "kvm,fancy", absent, false, true},
		{"a part of a required name does not count", "fancyfancy", absent, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("SANDSEA_REQUIRE", c.required)
			r := &recorder{}
			That(r, "fancy", c.err)
			if (r.skipped != "") != c.skip || (r.failed != "") != c.fail {
				t.Errorf("skipped %q, failed %q", r.skipped, r.failed)
			}
			if said := r.skipped + r.failed; c.err != nil && !strings.Contains(said, "not in this kernel") {
				t.Errorf("the reason is missing in %q", said)
			}
		})
	}
}

func TestAnUnknownFeatureIsNeverThere(t *testing.T) {
	if probe("no such thing") == nil || probe("bin:no-such-program-here") == nil {
		t.Error("found what does not exist")
	}
}
