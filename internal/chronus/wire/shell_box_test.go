package wire_test

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/wire"
	"github.com/sandsea/sandsea/internal/linux/memfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/testkit/rawbox"
)

// named gives a file of a user inside, and the descriptor that only names it.
func named(t *testing.T, f *os.File, err error, uid int) (file, path *os.File) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	path, err = memfd.Path(f)
	if err := errors.Join(err, f.Chown(rawbox.Base+uid, rawbox.Base+uid), f.Chmod(0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = f.Close()
		_ = path.Close()
	})
	return f, path
}

func TestACommandGetsTheDescriptorsOfItsState(t *testing.T) {
	h := start(t, rawbox.Options{})
	const script = `ls /proc/self/fd | tr '\n' ' '; cat /proc/self/fd/250; echo left 1<>/proc/self/fd/251; head -c 2000 /dev/zero 1<>/proc/self/fd/251`
	for _, c := range []struct {
		name  string
		owner int
		spawn chronus.Spawn
		err   bool // the two streams are parted
		out   string
		left  string
	}{
		{"its owner", 1000, asUser(sh(script)), true, "0 1 2 250 251 3 given", "left\n"},
		{"with one stream", 1000, asUser(sh("exec 2>/dev/null;" + script)), false, "0 1 2 250 251 3 given", "left\n"},
		{"another user", 0, asUser(sh("exec 2>/dev/null;" + script)), true, "0 1 2 250 251 3 ", "\x00\x00\x00\x00\x00"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := memfd.Sealed("in", []byte("given"))
			_, in := named(t, f, err, c.owner)
			f, err = memfd.Sized("out", 1000)
			state, out := named(t, f, err, c.owner)
			null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer null.Close()
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			io := chronus.Stdio{Cgroup: h.box.Exec(t), In: null, Out: w, StateIn: in, StateOut: out}
			if c.err {
				io.Err = null
			}
			c.spawn.Number = h.next()
			_, err = h.line.Spawn(ctx(t), c.spawn, io)
			w.Close()
			if err != nil {
				t.Fatal(err)
			}
			h.wait(c.spawn.Number)
			var b bytes.Buffer
			if _, err := b.ReadFrom(r); err != nil {
				t.Fatal(err)
			}
			left := make([]byte, 5)
			if _, err := state.ReadAt(left, 0); err != nil {
				t.Fatal(err)
			}
			if b.String() != c.out || string(left) != c.left {
				t.Errorf("got %q, left %q; want %q, %q", b.String(), left, c.out, c.left)
			}
			if fi, err := state.Stat(); err != nil || fi.Size() != 1000 {
				t.Errorf("the file has grown: %v, %v", fi, err)
			}
		})
	}
}

func TestAStateWithoutItsDescriptorsEndsTheSandbox(t *testing.T) {
	b := rawbox.Start(t, rawbox.Options{})
	b.Open(t)
	conn, err := scm.New(b.Control)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	m := make([]byte, 64)
	m[0], m[2], m[8], m[16] = wire.Version, 3, 1, 4
	if err := conn.Send(ctx(t), m, null, null, null, null, null); err != nil {
		t.Fatal(err)
	}
	if ws := b.Wait(t, limit); !ws.Exited() || ws.ExitStatus() != 11 {
		t.Errorf("PID 1 ended with %#x, want exit 11", ws)
	}
}
