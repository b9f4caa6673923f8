package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/testkit/golden"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// situation is what a case of TestErrors may set up.
type situation struct {
	t   *testing.T
	s   *testserver.Server
	dir string
	env []string // in addition to the server's
	// keys counts those that were used.
	keys int
}

func (b *situation) create() string {
	b.t.Helper()
	c, err := client.New(client.Config{URL: b.s.URL, Token: b.s.Token})
	if err != nil {
		b.t.Fatal(err)
	}
	sb, err := c.Create(b.t.Context(), &sandseav1.SandboxSpec{
		Environment: &sandseav1.Environment{Image: "debian:bookworm"}, IdleMs: 300_000,
	}, "")
	if err != nil {
		b.t.Fatal(err)
	}
	return sb.ID
}

func (b *situation) file(name, content string, mode os.FileMode) string {
	b.t.Helper()
	path := filepath.Join(b.dir, name)
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		b.t.Fatal(err)
	}
	return path
}

// TestErrors shows every situation in which a command fails: the sentence, the exit code, and the form for programs.
func TestErrors(t *testing.T) {
	const image = "--image=debian:bookworm"
	tests := []struct {
		name  string
		args  func(b *situation) []string
		lacks []string
		code  int
		again bool // what is asked with --json must be another thing than before
	}{
		{name: "no server", code: 1, args: func(b *situation) []string {
			b.env = []string{"SANDSEA_URL=http://127.0.0.1:1"}
			return []string{"ls"}
		}},
		{name: "no server of ours", code: 1, args: func(b *situation) []string {
			b.env = []string{"SANDSEA_URL=" + b.s.URL + "/elsewhere"}
			return []string{"ls"}
		}},
		{name: "no token", code: 1, args: func(b *situation) []string {
			b.env = []string{"SANDSEA_TOKEN=", "SANDSEA_TOKEN_FILE=" + filepath.Join(b.dir, "none")}
			return []string{"ls"}
		}},
		{name: "wrong token", code: 1, args: func(b *situation) []string {
			b.env = []string{"SANDSEA_TOKEN=sst_aaaaaaaaaaaaaaaa_bbbb"}
			return []string{"ls"}
		}},
		{name: "expired token", code: 1, args: func(b *situation) []string {
			token, err := b.s.IAM.Create(b.t.Context(), iam.Request{Principal: "user:ci", Project: "default", TTL: time.Nanosecond})
			if err != nil {
				b.t.Fatal(err)
			}
			b.env = []string{"SANDSEA_TOKEN=" + token}
			return []string{"ls"}
		}},
		{name: "no right", code: 1, args: func(b *situation) []string {
			token, err := b.s.IAM.Create(b.t.Context(), iam.Request{Principal: "user:ci", Project: "default", May: []string{"sandbox.list"}})
			if err != nil {
				b.t.Fatal(err)
			}
			b.env = []string{"SANDSEA_TOKEN=" + token}
			return []string{"create", image}
		}},
		{name: "open secret", code: 1, args: func(b *situation) []string {
			b.env = []string{"SANDSEA_TOKEN=", "SANDSEA_TOKEN_FILE=" + b.file("t.token", b.s.Token, 0o644)}
			return []string{"ls"}
		}},
		{name: "address", code: 1, args: func(b *situation) []string {
			b.env = []string{"SANDSEA_URL=7070"}
			return []string{"ls"}
		}},
		{name: "config", code: 2, args: func(b *situation) []string {
			return []string{"up", "--config", b.file("sandsea.toml", "# ours\n\nmemroy_overcommit = 2.0\n", 0o644)}
		}},
		{name: "config syntax", code: 2, args: func(b *situation) []string {
			return []string{"up", "--config", b.file("sandsea.toml", "data = \"/x\"\nlisten = \n", 0o644)}
		}},
		{name: "config value", code: 2, args: func(b *situation) []string {
			return []string{"up", "--config", b.file("sandsea.toml", "listen = \"7070\"\n", 0o644)}
		}},
		{name: "config missing", code: 2, args: func(b *situation) []string { return []string{"up", "--config", "/none/sandsea.toml"} }},
		{name: "command", code: 2, args: args("stpo")},
		{name: "subcommand", code: 2, args: args("image", "lss")},
		{name: "flag", code: 2, args: args("create", "--memroy", "1G")},
		{name: "flag of run", code: 125, args: args("run", "--memroy", "1G", "--", "true")},
		{name: "flag value", code: 2, args: args("create", "--idle", "5")},
		{name: "argument missing", code: 2, args: args("inspect")},
		{name: "argument too many", code: 2, args: args("ls", "what", "ever")},
		{name: "no unit", code: 2, args: args("create", "--memory", "512")},
		{name: "no size", code: 2, args: args("create", "--memory", "lots")},
		{name: "too big", code: 1, args: args("create", image, "--memory", "64G")},
		{name: "unenforceable", code: 1, lacks: []string{"limit.disk"}, args: args("create", image, "--disk", "2G")},
		{name: "required feature", code: 1, args: args("create", image, "--require", "exit_facts")},
		{name: "image", code: 1, args: args("create", "--image", "debain")},
		{name: "no image chosen", code: 125, args: args("run", "--", "true")},
		{name: "archive", code: 1, args: func(b *situation) []string {
			b.s.Edge.Before(func(_ context.Context, call string) error {
				if call != "build" {
					return nil
				}
				return errdefs.New(errdefs.Invalid, "archive", `entry 213 "../../etc/x" leaves the root`).
					WithHint("Nothing imported; repack without it")
			})
			return []string{"image", "import", "rootfs:" + b.file("evil.tar", "x", 0o644)}
		}},
		{name: "archive missing", code: 1, args: args("image", "import", "rootfs:none.tar")},
		{name: "network rule", code: 2, args: args("create", image, "--allow", "pipy")},
		{name: "network rule url", code: 125, args: args("run", image, "--allow", "https://example.org/x", "--", "true")},
		{name: "no date", code: 2, args: args("create", image, "--as-of", "June")},
		{name: "policy file", code: 2, args: func(b *situation) []string {
			return []string{"create", image, "--network", b.file("policy.toml", "[[phases]]\nname = \"agent\"\nruls = []\n", 0o644)}
		}},
		{name: "policy file missing", code: 2, args: args("create", image, "--network", "none.toml")},
		{name: "policy refused", code: 1, args: func(b *situation) []string {
			return []string{"net", "set", b.create(), "--file", b.file("policy.toml", "[[phases]]\nname = \"agent\"\nrules = [{ domain = \"exa mple.org\" }]\n", 0o644)}
		}},
		{name: "no phase", code: 1, args: func(b *situation) []string { return []string{"net", "phase", b.create(), "grade"} }},
		{name: "no question", code: 2, args: args("net", "check", "s7q3k2m5", "https://example.org/x")},
		{name: "no log named", code: 2, args: args("net", "log")},
		{name: "nothing to set", code: 2, args: args("net", "set", "s7q3k2m5")},
		{name: "unknown id", code: 1, args: args("inspect", "7q3k")},
		{name: "short id", code: 2, args: args("inspect", "7q3")},
		{name: "malformed id", code: 1, args: args("inspect", strings.Repeat("u", 27))},
		{name: "ended", code: 125, args: func(b *situation) []string {
			id := b.create()
			if err := b.s.End(b.t.Context(), id, "idle"); err != nil {
				b.t.Fatal(err)
			}
			b.settle(id, "idle")
			return []string{"exec", id, "--", "true"}
		}},
		{name: "lost", code: 125, args: func(b *situation) []string {
			id := b.create()
			b.s.Edge.Reboot()
			if err := b.s.Edge.Register(b.t.Context()); err != nil {
				b.t.Fatal(err)
			}
			c, err := client.New(client.Config{URL: b.s.URL, Token: b.s.Token})
			if err != nil {
				b.t.Fatal(err)
			}
			wait.Until(b.t, limit, func() bool {
				_, err := c.Sandbox(id).Run(b.t.Context(), client.Argv("true"))
				return errors.Is(err, errdefs.Lost)
			}, "the server knows")
			return []string{"exec", id, "--", "true"}
		}},
		{name: "unknown", code: 1, again: true, args: func(b *situation) []string {
			b.noAnswer()
			b.keys++
			return []string{"create", image, "--key", fmt.Sprintf("k-%d", 40+b.keys)}
		}},
		{name: "key of another create", code: 1, args: func(b *situation) []string {
			if r := (program{args: []string{"create", image, "--key", "k-1"}, env: against(b.s)}).run(b.t); r.code != 0 {
				b.t.Fatal(r)
			}
			return []string{"create", image, "--memory", "1G", "--key", "k-1"}
		}},
		{name: "no terminal", code: 125, args: func(b *situation) []string { return []string{"exec", "-t", b.create(), "--", "bash"} }},
		{name: "unconfirmed", code: 2, args: func(b *situation) []string {
			for range 3 {
				b.create()
			}
			return []string{"stop", "--all"}
		}},
		{name: "unconfirmed image", code: 2, args: func(b *situation) []string {
			b.create()
			return []string{"image", "rm", "debian:bookworm"}
		}},
		{name: "unreadable image", code: 2, args: func(b *situation) []string {
			if err := b.s.SpoilImage("torn"); err != nil {
				b.t.Fatal(err)
			}
			return []string{"image", "rm", "torn"}
		}},
		{name: "file missing inside", code: 1, args: func(b *situation) []string { return []string{"cp", b.create() + ":/none", "/dev/null"} }},
		{name: "file missing here", code: 1, args: func(b *situation) []string { return []string{"cp", "none.txt", b.create() + ":/x"} }},
		{name: "hostile id", code: 1, args: args("inspect", "abcd\x1b[31mred\u202e")},
		{name: "hostile name", code: 1, args: args("create", "--image", "a\x1b[31mred")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := testserver.Start(t, testserver.Config{Images: []string{"debian:bookworm", "go"}, Lacks: tt.lacks})
			b := &situation{t: t, s: s, dir: t.TempDir()}
			p := program{args: tt.args(b), env: append(against(s), b.env...)}
			text := p.run(t)
			words := strings.Join(p.args, " ")
			if tt.again {
				p.args = tt.args(b)
			}
			p.args = append([]string{"--json"}, p.args...)
			jsons := p.run(t)
			if text.code != tt.code || jsons.code != tt.code {
				t.Errorf("exit %d and with --json %d, want %d", text.code, jsons.code, tt.code)
			}
			if text.stdout != "" || jsons.stdout != "" {
				t.Errorf("standard output is not empty: %q, %q", text.stdout, jsons.stdout)
			}
			checkErrorLine(t, jsons.stderr)
			out := fmt.Sprintf("$ sandsea %s\n%s[exit %d]\n%s", ui.Text(words), text.stderr, text.code, jsons.stderr)
			out = strings.ReplaceAll(out, b.dir+"/", "")
			golden.Equal(t, filepath.Join("errors", strings.ReplaceAll(tt.name, " ", "_")+".txt"), []byte(steady(out, s)))
		})
	}
}

func args(list ...string) func(*situation) []string { return func(*situation) []string { return list } }

// settle waits until the server knows how a sandbox ended.
func (b *situation) settle(id, cause string) {
	b.t.Helper()
	c, err := client.New(client.Config{URL: b.s.URL, Token: b.s.Token})
	if err != nil {
		b.t.Fatal(err)
	}
	wait.Until(b.t, limit, func() bool {
		info, err := c.Sandbox(id).Info(b.t.Context())
		return err == nil && info.GetEnd().GetCause() == cause
	}, "the end is known")
}

// noAnswer lets the node do creates and never say so.
func (b *situation) noAnswer() {
	b.s.Edge.After(func(call string) error {
		if call != "create" {
			return nil
		}
		return errdefs.New(errdefs.Unknown, "", "the answer is lost")
	})
}

// checkErrorLine wants one line that holds one error with a kind, a message and a hint.
func checkErrorLine(t *testing.T, stderr string) {
	t.Helper()
	var doc struct {
		Error struct{ Kind, Message, Hint string }
	}
	if err := json.Unmarshal([]byte(stderr), &doc); err != nil || strings.Count(stderr, "\n") != 1 {
		t.Fatalf("%q is not one line of JSON: %v", stderr, err)
	}
	if doc.Error.Kind == "" || doc.Error.Message == "" || doc.Error.Hint == "" {
		t.Errorf("%q: kind, message or hint is empty", stderr)
	}
}

func TestEveryKindHasAWayOut(t *testing.T) {
	for _, kind := range errdefs.Kinds {
		for _, asJSON := range []bool{false, true} {
			var errs bytes.Buffer
			a := &app{io: &ui.IO{Err: &errs}, json: asJSON}
			a.complain(errdefs.New(kind, "sandbox s7q3k2m5", "something happened"))
			if asJSON {
				checkErrorLine(t, errs.String())
				continue
			}
			_, hint, found := strings.Cut(strings.TrimSpace(errs.String()), "something happened. ")
			if kind != errdefs.Canceled && (!found || hint == "") { // who interrupts knows
				t.Errorf("%s: %q has no hint", kind, errs.String())
			}
		}
	}
}

func TestErrorsOfTheMachineGetAKind(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want errdefs.Kind
	}{
		{&fs.PathError{Op: "open", Path: "x", Err: syscall.ENOENT}, errdefs.NotFound},
		{&fs.PathError{Op: "open", Path: "x", Err: syscall.EACCES}, errdefs.Denied},
		{&fs.PathError{Op: "mkdir", Path: "x", Err: syscall.EEXIST}, errdefs.AlreadyExists},
		{&fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}, errdefs.Exhausted},
		{&fs.PathError{Op: "write", Path: "x", Err: syscall.EISDIR}, errdefs.FailedPrecondition},
		{errors.New("a bug"), errdefs.Internal},
		{fmt.Errorf("wrapped: %w", errdefs.New(errdefs.Lost, "", "gone")), errdefs.Lost},
	} {
		if got := explain(tt.err); got.Kind != tt.want || got.HintText() == "" {
			t.Errorf("%v is %s, want %s; hint %q", tt.err, got.Kind, tt.want, got.HintText())
		}
	}
}

func TestAnAmbiguousIDNamesTheCandidates(t *testing.T) {
	// Ids are random: four letters that two of them share cannot be had for the asking, so the error is made here.
	err := errdefs.New(errdefs.Invalid, "", "s7qa names 2 sandboxes (s7qa0000, s7qa1111)").WithField("id", "").WithHint("Give more letters")
	var errs bytes.Buffer
	a := &app{io: &ui.IO{Err: &errs, Out: &errs}, json: true}
	code := a.exitCode(t.Context(), nil, &exitError{code: 2, err: err, fields: object{{"candidates", []string{"s7qa0000", "s7qa1111"}}}})
	want := `{"error":{"kind":"invalid","message":"s7qa names 2 sandboxes (s7qa0000, s7qa1111)","hint":"Give more letters","field":"id","candidates":["s7qa0000","s7qa1111"]}}` + "\n"
	if code != 2 || errs.String() != want {
		t.Errorf("exit %d, %s\nwant %s", code, errs.String(), want)
	}
}
