package golden

import (
	"fmt"
	"strings"
	"testing"
)

type recorder struct {
	testing.TB
	said string
}

func (r *recorder) Helper()                        {}
func (r *recorder) Name() string                   { return "TestX" }
func (r *recorder) Errorf(format string, a ...any) { r.said = fmt.Sprintf(format, a...) }

func TestEqual(t *testing.T) {
	Equal(t, "hello.txt", []byte("hello\nworld\n"))
	if *update {
		return
	}
	r := &recorder{TB: t}
	Equal(r, "hello.txt", []byte("hello\nmoon\n"))
	if !strings.Contains(r.said, "moon") || !strings.Contains(r.said, "-update") {
		t.Errorf("a difference is not told: %q", r.said)
	}
}
