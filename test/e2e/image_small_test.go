package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// hub is the registry of names without one.
var hub = strings.TrimPrefix(name.DefaultRegistry, "index.")

// tiny builds a static program that needs nothing.
func tiny(t testing.TB) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "tiny")
	cmd := exec.CommandContext(within(t, 3*time.Minute), "go", "build", "-o", out, "./testdata/tiny")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, text)
	}
	body, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// imageOf makes an image of layers, lowest first, as a registry or docker save has it.
func imageOf(t testing.TB, cfg v1.Config, layers ...[]server.File) v1.Image {
	t.Helper()
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH})
	for _, files := range layers {
		var b []byte
		if err == nil {
			b, err = server.Tar(files)
		}
		var l v1.Layer
		if err == nil {
			l, err = tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil },
				tarball.WithMediaType(types.OCILayer))
		}
		if err == nil {
			img, err = mutate.AppendLayers(img, l)
		}
	}
	if err == nil {
		img, err = mutate.Config(img, cfg)
	}
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// saved is an image as docker save writes it.
func saved(t testing.TB, ref string, img v1.Image) []byte {
	t.Helper()
	tag, err := name.NewTag(ref)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := tarball.Write(tag, img, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// importSaved imports an archive of docker save under its own name.
func importSaved(ctx context.Context, c *client.Client, archive []byte, reference string) (*sandseav1.Image, error) {
	up, err := c.UploadImage(ctx, bytes.NewReader(archive))
	if err != nil {
		return nil, err
	}
	img, _, err := c.ImportImage(ctx, &sandseav1.ImportImageRequest{Source: &sandseav1.ImportImageRequest_Archive{
		Archive: &sandseav1.ArchiveSource{Upload: up, Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_DOCKER, Reference: reference},
	}}, nil)
	return img, err
}

// TestImagesOfOneProgramWork: as FROM scratch and distroless make them, with no shell, no /etc/passwd, no /tmp, no mount
// points.
func TestImagesOfOneProgramWork(t *testing.T) {
	t.Parallel()
	program := server.File{Name: "tiny", Body: tiny(t), Mode: 0o755}
	const path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, tc := range []struct {
		name  string
		cfg   v1.Config
		files []server.File
		want  string // what the program says of itself
		uid   uint32
	}{
		{"scratch:1", v1.Config{Entrypoint: []string{"/tiny"}, Cmd: []string{"wait"}}, []server.File{program}, "0 0 / <nil> /root " + path + " []\n", 0},
		{
			"scratch:user",
			v1.Config{User: "65532:65532", WorkingDir: "/app", Env: []string{"PATH=/"}, Entrypoint: []string{"/tiny", "wait"}},
			[]server.File{program},
			"65532 65532 /app <nil> / / []\n", 65532,
		},
		{
			"distroless:1",
			v1.Config{User: "nonroot", Env: []string{"SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"}, Cmd: []string{"/tiny", "wait"}},
			[]server.File{
				program,
				{Name: "etc/passwd", Body: "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n"},
				{Name: "home/nonroot/", UID: 65532, GID: 65532, Mode: 0o700},
				{Name: "tmp/", Mode: 0o1777},
			},
			"65532 65532 / <nil> /home/nonroot " + path + " []\n", 65532,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ref := fmt.Sprintf("tests/%s", tc.name)
			img, err := importSaved(within(t, 60*time.Second), serve(t).Client, saved(t, ref, imageOf(t, tc.cfg, tc.files)), "")
			if err != nil || img.GetName() != ref {
				t.Fatalf("import: %v %v", img, err)
			}
			sb := open(t, of(&sandseav1.Environment{Image: ref}))
			if got := string(run(t, sb, client.Argv("/tiny")).GetStdout()); got != tc.want {
				t.Errorf("it says %q, want %q", got, tc.want)
			}
			if r := run(t, sb, client.Argv("/tiny", "exit", "7")); r.GetResult().GetExitCode() != 7 || string(r.GetStdout()) != "bye\n" {
				t.Errorf("exit: %v", r)
			}
			byNumber := client.Argv("/tiny")
			byNumber.User = "1234:99"
			if got := string(run(t, sb, byNumber).GetStdout()); !strings.HasPrefix(got, "1234 99 ") {
				t.Errorf("a user by number: %q", got)
			}
			byName := client.Argv("/tiny")
			byName.User = "nobody"
			if f := run(t, sb, byName).GetResult().GetStartFailure(); f.GetKind() != "user" || !strings.Contains(f.GetMessage(), "nobody") {
				t.Errorf("a user that is not there: %v", f)
			}
			for _, argv := range [][]string{{"/bin/sh", "-c", "true"}, {"sh", "-c", "true"}, {"bash"}} {
				f := run(t, sb, client.Argv(argv...)).GetResult().GetStartFailure()
				if f.GetKind() != "not_found" || !strings.Contains(f.GetMessage(), argv[0]) {
					t.Errorf("%q: %v", argv, f)
				}
			}
			// Files need nothing of the image.
			for _, user := range []string{"root", "1234"} {
				path := "/data/" + user + "/f"
				if user != "root" {
					path = "/dev/shm/f"
				}
				fi, err := write(t, sb, &sandseav1.WriteFileHeader{Path: path, User: user}, "content")
				if err != nil {
					t.Errorf("write as %s: %v %v", user, fi, err)
				}
				if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: path, User: user}); got != "content" || err != nil {
					t.Errorf("read as %s: %q %v", user, got, err)
				}
			}
			if tc.uid != 0 {
				_, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "/etc/x"}, "x")
				refusedWith(t, "the default user writes into /etc", err, syscall.EACCES)
			}
			// The image's own program by itself.
			own := open(t, of(&sandseav1.Environment{Image: ref}), entrypoint(modeImage))
			awaitOutput(t, own, 1, "waiting\n")
			if err := own.Signal(within(t, 20*time.Second), 1, int(syscall.SIGTERM), false); err != nil {
				t.Fatal(err)
			}
			if end := ended(t, own, 20*time.Second); end.GetCause() != "completed" {
				t.Errorf("ended %v", end)
			}
		})
	}
}

func TestDockerSaveArchivesAreImportedByName(t *testing.T) {
	t.Parallel()
	program := server.File{Name: "tiny", Body: tiny(t), Mode: 0o755}
	a := imageOf(t, v1.Config{Cmd: []string{"/tiny", "exit", "1"}}, []server.File{program})
	b := imageOf(t, v1.Config{Cmd: []string{"/tiny", "exit", "2"}}, []server.File{program}, []server.File{{Name: "more", Body: "x"}})
	tag := func(s string) name.Tag {
		out, err := name.NewTag(s)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	var both bytes.Buffer
	if err := tarball.MultiWrite(map[name.Tag]v1.Image{tag("saved/a:1"): a, tag("saved/b:latest"): b}, &both); err != nil {
		t.Fatal(err)
	}
	img, err := importSaved(within(t, 60*time.Second), serve(t).Client, both.Bytes(), "saved/b")
	if err != nil || img.GetName() != "saved/b:latest" || len(img.GetLayers()) != 2 || img.GetConfig().GetCmd()[2] != "2" {
		t.Fatalf("%v %v", img, err)
	}
	// Found as Docker lets people write it.
	for _, ref := range []string{"saved/b", "saved/b:latest", hub + "/saved/b"} {
		sb := open(t, of(&sandseav1.Environment{Image: ref}))
		if got := string(run(t, sb, client.Argv("/tiny")).GetStdout()); !strings.HasPrefix(got, "0 0 /") {
			t.Errorf("%s: %q", ref, got)
		}
	}
	_, err = importSaved(within(t, 60*time.Second), serve(t).Client, both.Bytes(), "")
	if err == nil || !strings.Contains(err.Error(), "has 2 images") {
		t.Errorf("no reference: %v", err)
	}
	_, err = importSaved(within(t, 60*time.Second), serve(t).Client, both.Bytes(), "saved/c")
	if err == nil || !strings.Contains(err.Error(), "saved/a:1") {
		t.Errorf("another reference: %v", err)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		t.Error("no answer in time")
	}
}
