package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/testkit/golden"
	"github.com/sandsea/sandsea/internal/testkit/require"
	platform "github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// realLimit bounds a wait for something that a real server does.
const realLimit = 30 * time.Second

// nobody has no rights on this machine.
const nobody = 65534

// real is a server of the platform itself, with an image.
type real struct {
	*platform.Server
	t   *testing.T
	dir string // for files of a case
}

func (r *real) env() []string {
	return []string{"SANDSEA_URL=http://" + r.Addr(), "SANDSEA_TOKEN_FILE=" + filepath.Join(r.Dir, "admin.token")}
}

// out runs a command that must work, and gives its output.
func (r *real) out(args ...string) string {
	r.t.Helper()
	got := program{args: args, env: r.env()}.run(r.t)
	if got.code != 0 {
		r.t.Fatalf("%v: %+v", args, got)
	}
	return strings.TrimSpace(got.stdout)
}

// TestErrorsOfTheRealPlatform provokes what only the platform itself can do wrong, and holds the sentence, the exit code and
// the form for programs against what is recorded.
func TestErrorsOfTheRealPlatform(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:busybox")
	s := platform.Start(t, platform.Config{})
	if err := s.ImportBusybox(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		code int
		args func(*real) []string
		as   *syscall.Credential
		by   []string // a program that runs it
	}{
		{name: "port taken", code: 1, args: func(r *real) []string {
			return []string{"up", "--data", filepath.Join(r.dir, "data"), "--listen", r.Addr()}
		}},
		{name: "data in use", code: 1, args: func(r *real) []string { return []string{"up", "--data", r.Dir, "--listen", "127.0.0.1:0"} }},
		{
			name: "unwritable", code: 1, args: func(r *real) []string { return []string{"up", "--data", filepath.Join(r.dir, "ro", "data")} },
			by: []string{"unshare", "-m", "sh", "-c", `mkdir -p ro && mount -t tmpfs -o ro none ro && exec "$0" "$@"`},
		},
		{
			name: "not root", code: 1, args: func(*real) []string { return []string{"up", "--data", "/nowhere"} },
			as: &syscall.Credential{Uid: nobody, Gid: nobody},
		},
		{name: "too big", code: 1, args: func(*real) []string { return []string{"create", "--memory", "4T"} }},
		{name: "image", code: 1, args: func(*real) []string { return []string{"create", "--image", "busibox"} }},
		{name: "archive", code: 1, args: func(r *real) []string {
			tarball, err := platform.Tar([]platform.File{{Name: "a", Body: "x"}, {Name: "../../etc/x", Body: "x"}})
			if err != nil {
				r.t.Fatal(err)
			}
			file := filepath.Join(r.dir, "evil.tar")
			if err := os.WriteFile(file, tarball, 0o600); err != nil {
				r.t.Fatal(err)
			}
			return []string{"image", "import", "rootfs:" + file}
		}},
		{name: "unknown id", code: 1, args: func(*real) []string { return []string{"inspect", "7q3k"} }},
		{name: "ended by idling", code: 125, args: func(r *real) []string {
			id := r.out("create", "--idle", "1s")
			wait.Until(r.t, realLimit, func() bool { return strings.Contains(r.out("ls", "--all"), id+"  idle ") }, "it ends by idling")
			return []string{"exec", id, "--", "true"}
		}},
		{name: "time limit", code: 124, args: func(*real) []string { return []string{"run", "--timeout", "300ms", "--", "sleep", "60"} }},
		{name: "out of memory", code: 137, args: func(*real) []string {
			return []string{"run", "--memory", "32M", "--", "sh", "-c", "x=a; while :; do x=$x$x; done"}
		}},
		{name: "no program", code: 127, args: func(*real) []string { return []string{"run", "--", "pytst"} }},
		{name: "not executable", code: 126, args: func(*real) []string { return []string{"run", "--", "/etc/passwd"} }},
		{name: "unenforceable", code: 1, args: func(*real) []string { return []string{"create", "--require", "time_travel"} }},
		{name: "file missing inside", code: 1, args: func(r *real) []string { return []string{"cp", r.out("create") + ":/none", "/dev/null"} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &real{Server: s, t: t, dir: t.TempDir()}
			args := tt.args(r)
			run := func(args ...string) ran {
				p := program{args: args, env: r.env(), as: tt.as, dir: r.dir}
				if tt.as != nil || tt.by != nil {
					p.path = s.Binary
				}
				p.by = tt.by
				return p.run(t)
			}
			text, jsons := run(args...), run(append([]string{"--json"}, args...)...)
			if text.code != tt.code || jsons.code != tt.code {
				t.Errorf("exit %d and with --json %d, want %d", text.code, jsons.code, tt.code)
			}
			line := jsons.stderr
			if tt.code == 124 || tt.code == 137 || tt.code == 126 || tt.code == 127 {
				line = regexp.MustCompile(`"message":"[^\n]*`).FindString(jsons.stdout) // a result, not an error
			} else {
				checkErrorLine(t, jsons.stderr)
			}
			out := fmt.Sprintf("$ sandsea %s\n%s[exit %d]\n%s", ui.Text(strings.Join(args, " ")), text.stderr, text.code, line)
			golden.Equal(t, filepath.Join("errors", "real", strings.ReplaceAll(tt.name, " ", "_")+".txt"), []byte(r.steady(out)))
		})
	}
}

// steady takes out what differs from run to run and from machine to machine.
func (r *real) steady(text string) string {
	for _, f := range []struct{ from, to string }{
		{regexp.QuoteMeta(r.dir), "DIR"},
		{regexp.QuoteMeta(r.Dir), "DATA"},
		{regexp.QuoteMeta(r.Addr()) + `\b`, "127.0.0.1:7070"},
		{`--listen 127(\.\d+){3}:[1-9]\d+`, "--listen 127.0.0.1:7071"},
		{`pid \d+`, "pid 812"},
		{`up \d+[smh]`, "up 3s"},
		{`largest node has [0-9.]+ .iB`, "largest node has 23.4 GiB"},
		{`"limit":"[0-9.]+ .iB"`, `"limit":"23.4 GiB"`},
	} {
		text = regexp.MustCompile(f.from).ReplaceAllString(text, f.to)
	}
	return steady(text, nil)
}

func TestAPackageThatIsNotThere(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:mmdebstrap")
	s := platform.Start(t, platform.Config{})
	r := &real{Server: s, t: t}
	got := program{args: []string{"image", "import", "debian:bookworm", "--include", "pyton3"}, env: r.env()}.run(t)
	if strings.Contains(got.stderr, "cannot be fetched") {
		require.That(t, "debian", fmt.Errorf("%s", got.stderr))
	}
	if got.code != 1 || !strings.HasSuffix(got.stderr, "sandsea: debian:bookworm: no package pyton3. Did you mean python3? Nothing imported\n") {
		t.Errorf("%+v", got)
	}
}

// The terminal of the real platform: what is typed arrives, sizes follow, Ctrl-C is the command's, and a session that was
// left goes on.
func TestShellOfTheRealPlatform(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:busybox")
	s := platform.Start(t, platform.Config{})
	if err := s.ImportBusybox(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := &real{Server: s, t: t}
	id := r.out("create")
	x := onTerminal(t, 100, append(r.env(), "TERM=xterm-kitty"), "shell", id)
	x.types("echo size $(stty size) term $TERM; marker=here\r")
	x.untilShown("size 50 100 term xterm-kitty")
	x.size(60)
	wait.Until(t, realLimit, func() bool {
		x.types("stty size\r")
		return strings.Contains(x.shown(), "\n50 60\n")
	}, "the size follows")
	x.types("echo sleeps; sleep 1000\r")
	x.untilShown("\nsleeps\n")
	wait.Until(t, realLimit, func() bool {
		x.types("\x03")
		return strings.HasSuffix(x.shown(), "/ #\n")
	}, "Ctrl-C ends the command")
	if err := s.Kill("up"); err != nil {
		t.Fatal(err)
	}
	if err := s.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.untilShown("sandsea: link lost, back in ")
	x.types("echo kept $marker\r")
	x.untilShown("kept here")
	x.types("\r~.")
	code, text := x.exits()
	if code != 0 || !strings.Contains(text, "detached; process 1 goes on") {
		t.Errorf("exit %d, %q", code, text)
	}
	x.wasGivenBack()
	again := onTerminal(t, 80, r.env(), "exec", "--attach", "1", id)
	again.untilShown("kept here")
	again.types("echo again $marker; exit 6\r")
	if code, text := again.exits(); code != 6 || !strings.Contains(text, "again here") {
		t.Errorf("exit %d, %q", code, text)
	}
	again.wasGivenBack()
}
