package e2e

import (
	"errors"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// layer imports a layer of its own name and gives that.
func layer(t testing.TB, name string, files []server.File, cfg *sandseav1.ImageConfig) string {
	t.Helper()
	if _, err := serve(t).Import(within(t, 60*time.Second), name, files, cfg); err != nil {
		t.Fatal(err)
	}
	return name
}

func busybox(t testing.TB) []server.File {
	t.Helper()
	files, err := server.Busybox(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func of(env *sandseav1.Environment) func(*sandseav1.SandboxSpec) {
	return func(s *sandseav1.SandboxSpec) { s.Environment = env }
}

func TestTheImagesConfigIsHonouredAndTheSandboxsGoesFirst(t *testing.T) {
	t.Parallel()
	layer(t, "configured", busybox(t), &sandseav1.ImageConfig{
		User: "alice", Workdir: "/srv", Env: []string{"A=image", "B=image", "PATH=/bin"},
		Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{"echo entry $A; sleep 1000"},
	})
	const show = "id -un; pwd; echo $A $B"
	sb := open(t, of(&sandseav1.Environment{Image: "configured"}))
	if got := sh(t, sb, show); got != "alice\n/srv\nimage image\n" {
		t.Errorf("the image's: %q", got)
	}
	if all, err := sb.Processes(within(t, 10*time.Second)); err != nil || len(all) != 1 {
		t.Errorf("mode idle started something: %v %v", all, err)
	}
	sb = open(t, of(&sandseav1.Environment{Image: "configured"}), func(s *sandseav1.SandboxSpec) {
		s.User, s.Workdir, s.Env = "bob", "/tmp", map[string]string{"A": "sandbox"}
	})
	if got := sh(t, sb, show); got != "bob\n/tmp\nsandbox image\n" {
		t.Errorf("the sandbox's: %q", got)
	}
}

func TestEntrypointModes(t *testing.T) {
	t.Parallel()
	layer(t, "with-entrypoint", busybox(t), &sandseav1.ImageConfig{
		Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{"echo from the image; sleep 1000"},
	})
	image := open(t, of(&sandseav1.Environment{Image: "with-entrypoint"}), func(s *sandseav1.SandboxSpec) {
		s.Entrypoint = &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_IMAGE}
	})
	awaitOutput(t, image, 1, "from the image\n")
	if p := process(t, image, 1); p.GetState() != sandseav1.ProcessState_PROCESS_STATE_RUNNING {
		t.Errorf("process 1: %v", p)
	}
	sh(t, image, "true")
	// Its own end is the sandbox's, with its output and status kept.
	argv := open(t, func(s *sandseav1.SandboxSpec) {
		s.Entrypoint = &sandseav1.Entrypoint{
			Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV, Argv: []string{"sh", "-c", "echo bye; sleep 0.3; exit 7"},
		}
	})
	if end := ended(t, argv, 30*time.Second); end.GetCause() != "completed" || !strings.Contains(end.GetDetail(), "7") || end.GetBy() != "workload" {
		t.Errorf("ended %v", end)
	}
	out, last := attach(t, argv, &sandseav1.AttachRequest{Number: 1})
	if string(out[sandseav1.Stream_STREAM_STDOUT]) != "bye\n" || last.GetResult().GetExitCode() != 7 {
		t.Errorf("%q %v", out, last)
	}
	_, err := serve(t).Client.Create(within(t, 20*time.Second), spec(func(s *sandseav1.SandboxSpec) {
		s.Entrypoint = &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_IMAGE}
	}), "")
	if !errors.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), "entrypoint") {
		t.Errorf("an image without one: %v", err)
	}
}

func TestLayersLieInTheirOrderAndTheUpperOnTop(t *testing.T) {
	t.Parallel()
	base := append(busybox(t),
		server.File{Name: "l/"}, server.File{Name: "l/all", Body: "base"}, server.File{Name: "l/base", Body: "base"},
		server.File{Name: "l/gone", Body: "base"}, server.File{Name: "l/dir/"}, server.File{Name: "l/dir/base", Body: "base"},
		server.File{Name: "l/opaque/"}, server.File{Name: "l/opaque/base", Body: "base"},
		server.File{Name: "l/tobefile/"}, server.File{Name: "l/tobefile/x", Body: "x"}, server.File{Name: "l/tobedir", Body: "f"},
	)
	layer(t, "stack-base", base, &sandseav1.ImageConfig{Env: []string{"FROM=base", "BASE=1"}})
	// Whiteouts are of OCI layers; in a plain archive such a name is a name.
	oci, err := server.OCI([][]server.File{
		{
			{Name: "l/"},
			{Name: "l/all", Body: "workspace"},
			{Name: "l/workspace", Body: "lower"},
			{Name: "l/dropped", Body: "x"},
			{Name: "l/dir/"},
			{Name: "l/dir/workspace", Body: "w"},
			{Name: "l/.wh.gone"},
			{Name: "l/opaque/"},
			{Name: "l/opaque/.wh..wh..opq"},
			{Name: "l/opaque/workspace", Body: "w"},
			{Name: "l/tobefile", Body: "file"},
			{Name: "l/tobedir/"},
			{Name: "l/tobedir/in", Body: "in"},
		},
		{{Name: "l/"}, {Name: "l/workspace", Body: "workspace"}, {Name: "l/.wh.dropped"}},
	}, &sandseav1.ImageConfig{Env: []string{"FROM=workspace", "WORK=1"}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = serve(t).ImportArchive(within(t, 60*time.Second), "stack-workspace", sandseav1.ArchiveFormat_ARCHIVE_FORMAT_OCI, oci, nil)
	if err != nil {
		t.Fatal(err)
	}
	layer(t, "stack-tool1", []server.File{
		{Name: "l/"},
		{Name: "l/all", Body: "tool1"},
		{Name: "l/tool", Body: "tool1"},
		{Name: "l/suid", Body: "x", Mode: 0o4755},
		{Name: "l/hard", Hard: "l/tool"},
		{Name: "l/xattr", Body: "x", Xattrs: map[string]string{"user.note": "kept"}},
		{Name: "l/" + strings.Repeat("n", 255), Body: "long"},
		{Name: "l/null", Device: &[2]int64{1, 3}, Mode: 0o666},
	}, nil)
	layer(t, "stack-tool2", []server.File{{Name: "l/"}, {Name: "l/all", Body: "tool2"}, {Name: "l/tool", Body: "tool2"}}, nil)
	env := &sandseav1.Environment{Base: "stack-base", Workspace: "stack-workspace", Toolkits: []string{"stack-tool1", "stack-tool2"}}
	sb := open(t, of(env))
	if n := len(info(t, sb).GetLayers()); n != 5 {
		t.Errorf("%d layers", n)
	}
	for line, want := range map[string]string{
		"cat /l/all":                       "tool2",
		"cat /l/base":                      "base",
		"cat /l/workspace":                 "workspace",
		"cat /l/tool":                      "tool2",
		"cat /l/hard":                      "tool1",
		"ls /l/gone 2>/dev/null; true":     "",
		"ls /l/dropped 2>/dev/null; true":  "",
		"echo $FROM $BASE $WORK":           "workspace 1 1\n",
		"ls -A /l/dir | tr '\\n' ,":        "base,workspace,",
		"ls -A /l/opaque":                  "workspace\n",
		"cat /l/tobefile":                  "file",
		"cat /l/tobedir/in":                "in",
		"stat -c '%a %U' /l/suid":          "4755 root\n",
		"ls /l | grep -c nnnnnnnn":         "1\n",
		"ls -a /l | grep -c '[.]wh'; true": "0\n",
		"cat /l/null 2>/dev/null; echo $?": "1\n",
	} {
		if got := sh(t, sb, line); got != want {
			t.Errorf("%s: got %q, want %q", line, got, want)
		}
	}
	sh(t, sb, "echo -n upper >/l/all; rm /l/base; rm -r /l/dir; mkdir /l/dir; echo -n new >/l/dir/new; ls /l/dir | grep -c base; true")
	if got := sh(t, sb, "cat /l/all; ls /l/base 2>/dev/null; ls -A /l/dir"); got != "uppernew\n" {
		t.Errorf("on top: %q", got)
	}
	// The next sandbox has none of that.
	if got := sh(t, open(t, of(env)), "cat /l/all /l/base"); got != "tool2base" {
		t.Errorf("a second one: %q", got)
	}
	// Another order, another outcome.
	swapped := &sandseav1.Environment{Base: "stack-base", Toolkits: []string{"stack-tool2", "stack-tool1"}}
	if got := sh(t, open(t, of(swapped)), "cat /l/all /l/gone"); got != "tool1base" {
		t.Errorf("swapped: %q", got)
	}
	// A composition with a name is the same.
	c := serve(t).Client
	res, err := c.Images.Compose(within(t, 20*time.Second), connect.NewRequest(&sandseav1.ComposeImageRequest{
		Name: "stack", Base: "stack-base", Workspace: "stack-workspace", Toolkits: []string{"stack-tool1", "stack-tool2"},
	}))
	if err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"stack", res.Msg.GetImage().GetDigest()} {
		if got := sh(t, open(t, of(&sandseav1.Environment{Image: ref})), "cat /l/all /l/base"); got != "tool2base" {
			t.Errorf("%s: %q", ref, got)
		}
	}
}

func TestAnImageInUseIsKeptAndAnUnusedOneGoes(t *testing.T) {
	t.Parallel()
	c := serve(t).Client
	layer(t, "to-be-removed", append(busybox(t), server.File{Name: "unique", Body: t.Name()}), nil)
	sb := open(t, of(&sandseav1.Environment{Image: "to-be-removed"}))
	ctx := within(t, 30*time.Second)
	_, err := c.Images.Delete(ctx, connect.NewRequest(&sandseav1.DeleteImageRequest{Ref: "to-be-removed"}))
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("in use: %v", err)
	}
	if _, err := c.Images.Delete(ctx, connect.NewRequest(&sandseav1.DeleteImageRequest{Ref: "to-be-removed", Force: true})); err != nil {
		t.Errorf("by force: %v", err)
	}
	if got := sh(t, sb, "cat /unique"); got != t.Name() {
		t.Errorf("its sandbox lost it: %q", got)
	}
	_, err = c.Create(ctx, spec(of(&sandseav1.Environment{Image: "to-be-removed"})), "")
	if !errors.Is(err, errdefs.NotFound) {
		t.Errorf("after it: %v", err)
	}
}

func TestAnArchiveThatIsNoneIsRefused(t *testing.T) {
	t.Parallel()
	s := serve(t)
	ctx := within(t, 60*time.Second)
	for name, files := range map[string][]server.File{
		"dots":           {{Name: "../x", Body: "x"}},
		"through a link": {{Name: "l", Link: "/etc"}, {Name: "l/x", Body: "x"}},
	} {
		_, err := s.Import(ctx, "hostile", files, nil)
		if err == nil {
			// Taken as a path inside is as good.
			sb := open(t, of(&sandseav1.Environment{Base: "busybox", Workspace: "hostile"}))
			sh(t, sb, "true")
			continue
		}
		if k := errdefs.KindOf(err); k != errdefs.Invalid && k != errdefs.FailedPrecondition {
			t.Errorf("%s: %v", name, err)
		}
	}
	up, err := s.Client.UploadImage(ctx, strings.NewReader(strings.Repeat("this is no archive ", 1000)))
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = s.Client.ImportImage(ctx, &sandseav1.ImportImageRequest{
		Source: &sandseav1.ImportImageRequest_Archive{Archive: &sandseav1.ArchiveSource{
			Upload: up, Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS,
		}},
		Name: "garbage",
	}, nil)
	if !errors.Is(err, errdefs.Invalid) {
		t.Errorf("garbage: %v", err)
	}
}

func TestASandboxOfAnImageWithoutAShellStillServesFiles(t *testing.T) {
	t.Parallel()
	layer(t, "bare", []server.File{{Name: "only", Body: "file"}}, nil)
	sb := open(t, of(&sandseav1.Environment{Image: "bare"}))
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/only"}); err != nil || got != "file" {
		t.Errorf("got %q, %v", got, err)
	}
	if r := run(t, sb, client.Argv("sh")).GetResult(); r.GetStartFailure().GetKind() != "not_found" {
		t.Errorf("got %v", r)
	}
}
