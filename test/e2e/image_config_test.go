package e2e

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func entrypoint(mode sandseav1.EntrypointMode, argv ...string) func(*sandseav1.SandboxSpec) {
	return func(s *sandseav1.SandboxSpec) { s.Entrypoint = &sandseav1.Entrypoint{Mode: mode, Argv: argv} }
}

const (
	modeImage = sandseav1.EntrypointMode_ENTRYPOINT_MODE_IMAGE
	modeArgv  = sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV
)

// TestWhatAnImageSaysHoldsForAllThatRunsOrWritesInIt: one table for every way into a sandbox.
func TestWhatAnImageSaysHoldsForAllThatRunsOrWritesInIt(t *testing.T) {
	t.Parallel()
	const show = `echo "$(id -u):$(id -g) $(id -G) $HOME $(pwd) $A $PATH"`
	const path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for name, tc := range map[string]struct {
		cfg  *sandseav1.ImageConfig
		want string
		// owner of a file that a file call writes.
		uid, gid uint32
	}{
		"nothing":       {&sandseav1.ImageConfig{}, "0:0 0 /root / " + " " + path, 0, 0},
		"a name":        {&sandseav1.ImageConfig{User: "alice"}, "1000:1000 1000 50 /home/alice / " + " " + path, 1000, 1000},
		"a known uid":   {&sandseav1.ImageConfig{User: "1000"}, "1000:1000 1000 50 /home/alice / " + " " + path, 1000, 1000},
		"an unknown id": {&sandseav1.ImageConfig{User: "4321"}, "4321:0 0 / / " + " " + path, 4321, 0},
		"uid and gid":   {&sandseav1.ImageConfig{User: "4321:1234"}, "4321:1234 1234 / / " + " " + path, 4321, 1234},
		"name and group": {
			&sandseav1.ImageConfig{User: "alice:staff", Workdir: "/srv", Env: []string{"A=1"}},
			"1000:50 50 /home/alice /srv 1 " + path, 1000, 50,
		},
		"uid and group, own PATH": {
			&sandseav1.ImageConfig{User: "1001:staff", Env: []string{"PATH=/bin:/opt", "A=b c"}},
			"1001:50 50 /nowhere / b c /bin:/opt", 1001, 50,
		},
		"a directory to be made": {
			&sandseav1.ImageConfig{User: "bob", Workdir: "/made/of/parts"},
			"1001:1001 1001 /nowhere /made/of/parts " + " " + path, 1001, 1001,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			img := "config-" + strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), ",", "")
			cfg := tc.cfg
			cfg.Cmd = []string{"/bin/sh", "-c", show + "; sleep 1000"}
			layer(t, img, busybox(t), cfg)
			sb := open(t, of(&sandseav1.Environment{Image: img}), entrypoint(modeImage))
			awaitOutput(t, sb, 1, tc.want+"\n")
			if got := string(run(t, sb, client.Shell(show)).GetStdout()); got != tc.want+"\n" {
				t.Errorf("Run: %q, want %q", got, tc.want)
			}
			out, _ := attach(t, sb, &sandseav1.AttachRequest{Number: start(t, sb, client.Shell(show))})
			if got := string(out[sandseav1.Stream_STREAM_STDOUT]); got != tc.want+"\n" {
				t.Errorf("Start: %q, want %q", got, tc.want)
			}
			if fi, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "/tmp/mine"}, "x"); err != nil || fi.GetUid() != tc.uid || fi.GetGid() != tc.gid {
				t.Errorf("a file: %v %v", fi, err)
			}
		})
	}
}

func TestAWorkingDirectoryIsMadeAsDockerMakesIt(t *testing.T) {
	t.Parallel()
	files := append(busybox(t), server.File{Name: "srv/mine/", UID: 1000, GID: 1000, Mode: 0o750}, server.File{Name: "srv/file"},
		server.File{Name: "srv/link", Link: "mine"})
	layer(t, "workdirs", files, &sandseav1.ImageConfig{User: "alice"})
	in := func(dir string) (string, error) {
		sb, err := serve(t).Client.Create(within(t, 60*time.Second), spec(of(&sandseav1.Environment{Image: "workdirs"}),
			func(s *sandseav1.SandboxSpec) { s.Workdir = dir }), "")
		if err != nil {
			return "", err
		}
		defer func() {
			if err := sb.Stop(within(t, 60*time.Second)); err != nil {
				t.Error(err)
			}
		}()
		return sh(t, sb, "pwd; stat -c '%u:%g %a' ."), nil
	}
	for dir, want := range map[string]string{
		"/new":      "/new\n0:0 755\n",
		"/srv/a/b":  "/srv/a/b\n0:0 755\n",
		"/srv/mine": "/srv/mine\n1000:1000 750\n",
		"/srv/link": "/srv/mine\n1000:1000 750\n",
		"/tmp/d/..": "/tmp\n0:0 1777\n",
	} {
		for range 2 { // what is remembered of the first holds for the next
			if got, err := in(dir); err != nil || got != want {
				t.Errorf("%s: %q %v, want %q", dir, got, err, want)
			}
		}
	}
	for _, dir := range []string{"/srv/file", "/srv/file/x", "/proc/x"} {
		_, err := in(dir)
		if !errors.Is(err, errdefs.FailedPrecondition) || errdefs.From(err).Field != "workdir" || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

func TestAnImageWhoseUserIsMissingSaysSo(t *testing.T) {
	t.Parallel()
	for name, user := range map[string]string{"nobody-of-this-name": "carol", "no-group": "alice:nogroup"} {
		layer(t, name, busybox(t), &sandseav1.ImageConfig{User: user, Cmd: []string{"/bin/true"}})
		sb := open(t, of(&sandseav1.Environment{Image: name}))
		f := run(t, sb, client.Argv("/bin/true")).GetResult().GetStartFailure()
		if f.GetKind() != "user" || !strings.Contains(f.GetMessage(), user) {
			t.Errorf("Run as %s: %v", user, f)
		}
		p := process(t, sb, start(t, sb, client.Argv("/bin/true")))
		if f := p.GetResult().GetStartFailure(); f.GetKind() != "user" || !strings.Contains(f.GetMessage(), user) {
			t.Errorf("Start as %s: %v", user, p)
		}
		cmd := client.Argv("/bin/true")
		cmd.User = "root"
		if r := run(t, sb, cmd).GetResult(); r.GetExitCode() != 0 {
			t.Errorf("as root: %v", r)
		}
		_, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "/tmp/x"}, "x")
		if !errors.Is(err, errdefs.NotFound) {
			t.Errorf("a file as %s: %v", user, err)
		}
		// As an entrypoint it never was ready.
		_, err = serve(t).Client.Create(within(t, 60*time.Second), spec(of(&sandseav1.Environment{Image: name}), entrypoint(modeImage)), "")
		if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), user) {
			t.Errorf("entrypoint as %s: %v", user, err)
		}
	}
}

func TestAnEntrypointsEndIsItsSandboxs(t *testing.T) {
	t.Parallel()
	layer(t, "ends", busybox(t), &sandseav1.ImageConfig{Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{"echo up; exit 3"}})
	sb := open(t, of(&sandseav1.Environment{Image: "ends"}), entrypoint(modeImage))
	if end := ended(t, sb, 20*time.Second); end.GetCause() != "completed" || !strings.Contains(end.GetDetail(), "code 3") {
		t.Errorf("ended %v", end)
	}
	out, last := attach(t, sb, &sandseav1.AttachRequest{Number: 1})
	if string(out[sandseav1.Stream_STREAM_STDOUT]) != "up\n" || last.GetResult().GetExitCode() != 3 {
		t.Errorf("%q %v", out, last)
	}
	if all, err := sb.Processes(within(t, 20*time.Second)); err != nil || len(all) != 1 || all[0].GetNumber() != 1 ||
		all[0].GetResult().GetExitCode() != 3 {
		t.Errorf("list: %v %v", all, err)
	}
	// One that cannot start: the create says why, and so does the end for who comes later.
	label := map[string]string{"test": "a-failing-entrypoint"}
	_, err := serve(t).Client.Create(within(t, 60*time.Second), spec(entrypoint(modeArgv, "/no/such"), labelled(label)), "")
	if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), "/no/such") {
		t.Errorf("a program that is not there: %v", err)
	}
	var end *sandseav1.End
	wait.Until(t, 20*time.Second, func() bool {
		for sb, err := range serve(t).Client.List(within(t, 20*time.Second), &sandseav1.ListSandboxesRequest{Labels: label, All: true}) {
			if err != nil {
				t.Fatal(err)
			}
			end = sb.GetEnd()
		}
		return end.GetCause() != ""
	}, "the end is told")
	if !strings.Contains(end.GetDetail(), "did not start") || !strings.Contains(end.GetDetail(), "/no/such") {
		t.Errorf("its end: %v", end)
	}
	// Nothing to start.
	layer(t, "starts-nothing", busybox(t), nil)
	_, err = serve(t).Client.Create(within(t, 60*time.Second), spec(of(&sandseav1.Environment{Image: "starts-nothing"}), entrypoint(modeImage)), "")
	if !errors.Is(err, errdefs.Invalid) || errdefs.From(err).Field != "entrypoint.mode" {
		t.Errorf("an image with nothing to start: %v", err)
	}
}
