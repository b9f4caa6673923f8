package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
)

// golden are the bytes that the C end prints, by name.
func golden(t testing.TB) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile("../../../init/testdata/golden.txt")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for line := range strings.Lines(string(text)) {
		name, digits, _ := strings.Cut(strings.TrimSpace(line), " ")
		b, err := hex.DecodeString(digits)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		out[name] = b
	}
	return out
}

const number = 0x1122334455667788

func examples() map[string]message {
	h := func(k kind, cookie int64) head { return head{kind: k, seq: 0x01020304, cookie: cookie} }
	facts := func(k kind, count uint32) message {
		return message{
			head: h(k, 0), version: Version, flags: factSeccomp | factUserNS, caps: 0xa80425fb, nofile: 65536, masks: 27,
			count: count,
		}
	}
	process := func(k kind) message {
		return message{
			head: h(k, number), state: stateExited, pid: 4321, status: 0x0700, utime: 1000001, stime: 2000002,
			maxrss: 3 << 20, wall: 4000000004,
		}
	}
	return map[string]message{
		"hello":       {head: h(kindHello, 0), epoch: 9},
		"prepare":     {head: h(kindPrepare, 0)},
		"prepared":    {head: h(kindPrepared, 0)},
		"setup":       {head: h(kindSetup, 0)},
		"spawn":       {head: h(kindSpawn, number), flags: spawnErr},
		"spawn_tty":   {head: h(kindSpawn, number), flags: spawnTTY},
		"spawn_state": {head: h(kindSpawn, number), flags: spawnErr | spawnState},
		"serve_files": {head: h(kindServeFiles, 0)},
		"openpty":     {head: h(kindOpenPTY, 0)},
		"pty":         {head: h(kindPTY, 0)},
		"signal":      {head: h(kindSignal, number), signal: 15},
		"ack":         {head: h(kindAck, number)},
		"ready":       facts(kindReady, 0),
		"started":     {head: h(kindStarted, number), pid: 4321},
		"failed":      {head: h(kindFailed, number), step: 7, errno: 2, flags: failedInterpreter},
		"exit":        process(kindExit),
		"roster":      facts(kindRoster, 3),
		"process":     process(kindProcess),
		"roster_end":  {head: h(kindRosterEnd, 0)},
		"serving":     {head: h(kindServing, 0), pid: 4321},
		"signalled":   {head: h(kindSignalled, number), errno: 3},
	}
}

func TestBothEndsLayOutMessagesAlike(t *testing.T) {
	want := golden(t)
	for name, m := range examples() {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(hex.EncodeToString(want[name]), hex.EncodeToString(m.encode())); diff != "" {
				t.Errorf("encoded (-C +Go):\n%s", diff)
			}
			got, err := decode(want[name])
			if err != nil {
				t.Fatal(err)
			}
			if got != m {
				t.Errorf("decoded %+v, want %+v", got, m)
			}
		})
	}
	setup := Setup{
		Hostname: "box", OpenFiles: 1024, NoNewPrivs: true, Caps: 0xa80425fb, CPUs: []int{1, 11}, ShmBytes: 64 << 20,
		Resolver: netip.MustParseAddr("100.64.0.1"),
		Filter:   []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
	}
	plan, err := setup.encode()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(plan, want["plan"]) {
		t.Errorf("plan:\n%x, want\n%x", plan, want["plan"])
	}
	ids := chronus.IDs{UID: 1000, GID: 1001, Groups: []uint32{1001, 2000}}
	spec, err := encodeSpec(ids, 0o027, []string{"sh", "-c", "true"}, []string{"A=b"}, "/home")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(spec, want["spec"]) {
		t.Errorf("spec:\n%x, want\n%x", spec, want["spec"])
	}
	if n := len(examples()) + 2; len(want) != n {
		t.Errorf("the C end prints %d examples, this one knows %d", len(want), n)
	}
}

func TestBrokenMessagesAreRefused(t *testing.T) {
	good := golden(t)
	change := func(name string, at int, to byte) []byte {
		b := bytes.Clone(good[name])
		b[at] = to
		return b
	}
	zero := func(name string, from, to int) []byte {
		b := bytes.Clone(good[name])
		clear(b[from:to])
		return b
	}
	for _, c := range []struct {
		name  string
		bytes []byte
	}{
		{"nothing", nil},
		{"one byte less", good["exit"][:63]},
		{"one byte more", append(bytes.Clone(good["exit"]), 0)},
		{"another version", change("exit", 0, 2)},
		{"an unknown kind", change("exit", 2, 99)},
		{"a reserved kind", change("ack", 2, 5)},
		{"a negative number", change("exit", 15, 0x80)},
		{"padding in use", change("started", 63, 1)},
		{"padding of a process in use", change("exit", 28, 1)},
		{"a request from the inside", good["spawn"]},
		{"a pid of nobody", zero("started", 16, 20)},
		{"an exit that is none", change("exit", 24, 0x7f)},
		{"an exit of what runs", change("exit", 16, 2)},
		{"a state that there is not", change("process", 16, 7)},
		{"a roster of too many", change("roster", 46, 1)},
		{"facts of another version", change("ready", 16, 2)},
		{"facts about a process", change("ready", 8, 1)},
		{"a failure of no step", change("failed", 16, 0)},
		{"an errno that there is not", change("failed", 22, 1)},
		{"a process without number", zero("exit", 8, 16)},
		{"time beyond measure", change("exit", 39, 0xff)},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := decode(c.bytes)
			if err == nil {
				err = m.check()
			}
			if !errors.Is(err, errMessage) {
				t.Errorf("got %+v, %v", m, err)
			}
		})
	}
}

func FuzzDecode(f *testing.F) {
	for _, b := range golden(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b)
		if err != nil {
			return
		}
		// What is accepted says all that is in the bytes.
		if !bytes.Equal(m.encode(), b) {
			t.Errorf("%x decodes to %+v, which encodes to %x", b, m, m.encode())
		}
		if m.check() == nil {
			if e := m.exit(); e.CPU < 0 || e.Wall < 0 || e.MaxRSS < 0 {
				t.Errorf("accepted %+v", e)
			}
		}
	})
}

func TestCommandsAreCheckedBeforeTheyAreSent(t *testing.T) {
	long := strings.Repeat("x", MaxString+1)
	many := make([]string, 0, 32)
	for range 17 {
		many = append(many, long[:MaxString])
	}
	for _, c := range []struct {
		name  string
		spawn chronus.Spawn
		kind  errdefs.Kind
		field string
		errno syscall.Errno
	}{
		{name: "plain", spawn: chronus.Spawn{Argv: []string{"a", ""}, Env: []string{"", "=", "A=b=c"}, Cwd: "/"}},
		{name: "as long as may be", spawn: chronus.Spawn{Argv: many[:15], Env: []string{long[1:]}, Cwd: "/"}},
		{
			name: "NUL in an argument", spawn: chronus.Spawn{Argv: []string{"a", "b\x00"}}, kind: errdefs.Invalid,
			field: "argv",
		},
		{
			name: "NUL in a variable", spawn: chronus.Spawn{Argv: []string{"a"}, Env: []string{"\x00"}},
			kind: errdefs.Invalid, field: "env",
		},
		{
			name: "NUL in the directory", spawn: chronus.Spawn{Argv: []string{"a"}, Cwd: "/\x00"}, kind: errdefs.Invalid,
			field: "cwd",
		},
		{
			name: "no such umask", spawn: chronus.Spawn{Argv: []string{"a"}, Umask: 0o1000}, kind: errdefs.Invalid,
			field: "umask",
		},
		{
			name: "the user that means nobody", spawn: chronus.Spawn{IDs: chronus.IDs{UID: 1<<32 - 1}},
			kind: errdefs.Invalid, field: "user",
		},
		{
			name: "the group that means nobody", spawn: chronus.Spawn{IDs: chronus.IDs{GID: 1<<32 - 1}},
			kind: errdefs.Invalid, field: "user",
		},
		{
			name: "too many groups", spawn: chronus.Spawn{IDs: chronus.IDs{Groups: make([]uint32, 65537)}},
			kind: errdefs.Invalid, field: "groups",
		},
		{name: "a long string", spawn: chronus.Spawn{Argv: []string{long}}, errno: syscall.E2BIG},
		{name: "long in all", spawn: chronus.Spawn{Argv: many}, errno: syscall.E2BIG},
		{name: "many strings", spawn: chronus.Spawn{Env: make([]string, 1<<18+1)}, errno: syscall.E2BIG},
		{name: "a long directory", spawn: chronus.Spawn{Cwd: strings.Repeat("x", 4096)}, errno: syscall.ENAMETOOLONG},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := c.spawn
			_, err := encodeSpec(s.IDs, s.Umask, s.Argv, s.Env, s.Cwd)
			var start *chronus.StartError
			switch {
			case c.kind != "":
				if !errors.Is(err, c.kind) || errdefs.From(err).Field != c.field {
					t.Errorf("got %v (field %q)", err, errdefs.From(err).Field)
				}
			case c.errno != 0:
				if !errors.As(err, &start) || start.Errno != c.errno {
					t.Errorf("got %v", err)
				}
			case err != nil:
				t.Error(err)
			}
		})
	}
}

func TestSetUpsAreCheckedBeforeTheyAreSent(t *testing.T) {
	for _, c := range []struct {
		field string
		setup Setup
	}{
		{"hostname", Setup{Hostname: strings.Repeat("h", 64)}},
		{"hostname", Setup{Hostname: "a\x00b"}},
		{"resolver", Setup{Resolver: netip.IPv6Loopback()}},
		{"open_files", Setup{OpenFiles: -1}},
		{"shm_bytes", Setup{ShmBytes: -1}},
		{"filter", Setup{Filter: make([]byte, 7)}},
		{"filter", Setup{Filter: make([]byte, 8*4097)}},
		{"cpus", Setup{CPUs: []int{1024}}},
		{"cpus", Setup{CPUs: []int{-1}}},
		{"visible_cpus", Setup{VisibleCPUs: -1}},
	} {
		_, err := c.setup.encode()
		if !errors.Is(err, errdefs.Invalid) || errdefs.From(err).Field != c.field {
			t.Errorf("%+v: got %v", c.setup, err)
		}
	}
}
