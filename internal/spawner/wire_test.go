package spawner

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
)

func TestMessagesComeBackAsTheyWent(t *testing.T) {
	for name, r := range map[string]request{
		"a greeting":         {Kind: kindHello, Name: "0123456789abcdef"},
		"a spawn":            {Kind: kindSpawn, Seq: 1 << 60, UIDBase: 0x7fc00000, Tasks: maxTasks, Sys: true, Name: "s"},
		"one without a root": {Kind: kindSpawn, Seq: 1, UIDBase: 0x7fc00000, NoRoot: true, Name: "s"},
		"a long name":        {Kind: kindSpawn, Name: strings.Repeat("n", nameSize)},
	} {
		t.Run(name, func(t *testing.T) {
			b, err := r.encode()
			if err != nil {
				t.Fatal(err)
			}
			got, err := decodeRequest(b)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(r, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	if _, err := (request{Name: strings.Repeat("n", nameSize+1)}).encode(); err == nil {
		t.Error("a name that is too long is taken")
	}
	for name, r := range map[string]reply{
		"a child":  {Seq: 7, Pid: 1234},
		"an error": {Seq: 1 << 40, Errno: syscall.ENOSPC, Text: "fork: no space left on device"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := decodeReply(r.encode())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(r, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	got, err := decodeReply(reply{Text: strings.Repeat("x", 2*replySize)}.encode())
	if err != nil || len(got.Text) != textSize {
		t.Errorf("a long text has %d bytes, %v", len(got.Text), err)
	}
}

// TestAnAnswerBeforeTheEndIsHeard: a spawner that answers and ends is found to have done both.
func TestAnAnswerBeforeTheEndIsHeard(t *testing.T) {
	c := &client{gone: make(chan struct{}), err: io.EOF}
	close(c.gone)
	ch := make(chan answer, 1)
	for range 100 {
		ch <- answer{reply: reply{Errno: syscall.ENOSPC, Text: "no room"}}
		if _, err := c.await(t.Context(), "s", 1, ch); !errors.Is(err, errdefs.Exhausted) {
			t.Fatal(err)
		}
	}
	if _, err := c.await(t.Context(), "s", 1, ch); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("no answer: %v", err)
	}
}

// FuzzRequest: whatever bytes come, the answer is a request that is within its bounds, or an error.
func FuzzRequest(f *testing.F) {
	for _, r := range []request{
		{Kind: kindHello, Name: "id"}, {Kind: kindSpawn, Seq: 1, UIDBase: 1 << 30, Tasks: 3, Sys: true}, {Kind: kindSpawn, NoRoot: true},
	} {
		b, err := r.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)-1])
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRequest(b)
		if err != nil {
			return
		}
		if r.Tasks > maxTasks || len(r.Name) > nameSize {
			t.Errorf("out of bounds: %+v", r)
		}
		again, err := r.encode()
		if err != nil {
			t.Fatal(err)
		}
		if r2, err := decodeRequest(again); err != nil || r2 != r {
			t.Errorf("%+v became %+v, %v", r, r2, err)
		}
	})
}

// FuzzReply: as FuzzRequest, at the edge's end.
func FuzzReply(f *testing.F) {
	f.Add(reply{Seq: 1, Pid: 2}.encode())
	f.Add(reply{Errno: syscall.EPERM, Text: "no"}.encode())
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeReply(b)
		if err != nil {
			return
		}
		if len(r.Text) > textSize {
			t.Errorf("text of %d bytes", len(r.Text))
		}
		if r2, err := decodeReply(r.encode()); err != nil || r2 != r {
			t.Errorf("%+v became %+v, %v", r, r2, err)
		}
		if bytes.IndexByte([]byte(r.Text), 0) >= 0 {
			t.Error("a text with NUL")
		}
	})
}
