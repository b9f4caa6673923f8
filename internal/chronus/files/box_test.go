package files_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/files"
	"github.com/sandsea/sandsea/internal/testkit/rawbox"
)

// The whole of it once more where it will run: forked by sandsea-init, behind the system call filter.
func TestInARealSandbox(t *testing.T) {
	box := rawbox.Start(t, rawbox.Options{Populate: func(root string) error {
		return os.WriteFile(filepath.Join(root, "secret"), []byte("secret"), 0o600)
	}})
	h := files.New(box.Open(t).ServeFiles)
	defer h.Close()
	ctx := t.Context()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	root, user := h.As(chronus.IDs{}, "/"), h.As(chronus.IDs{UID: 1000, GID: 1000, Groups: []uint32{1000}}, "/work")
	check(root.MakeDir(ctx, "/work", 0o755, true))
	check(root.Chown(ctx, "/work", 1000, 1000))

	info, err := user.Write(ctx, "a/b", 0, nil, strings.NewReader("content"))
	check(err)
	if info.UID != 1000 || info.GID != 1000 || info.Mode != 0o644 {
		t.Errorf("made %+v", info)
	}
	check(user.Chmod(ctx, "a/b", 0o600))
	_, err = user.Write(ctx, "a/b", 0, nil, strings.NewReader("again"))
	check(err)
	r, err := user.Read(ctx, "a/b", files.Range{})
	check(err)
	b, err := io.ReadAll(r)
	check(errors.Join(err, r.Close()))
	if string(b) != "again" || r.Info().Mode != 0o600 {
		t.Errorf("read %q of %+v", b, r.Info())
	}
	if _, err := user.Read(ctx, "/secret", files.Range{}); !errors.Is(err, errdefs.Denied) {
		t.Errorf("the secret: %v", err)
	}
	r, err = user.Read(ctx, "/proc/sys/kernel/hostname", files.Range{})
	check(err)
	b, err = io.ReadAll(r)
	check(errors.Join(err, r.Close()))
	if string(b) != "box\n" {
		t.Errorf("hostname %q", b)
	}
	check(user.Symlink(ctx, "b", "a/link"))
	check(user.Move(ctx, "a/b", "a/c"))
	var tree bytes.Buffer
	skipped, err := user.DownloadTar(ctx, "a", &tree)
	if err != nil || len(skipped) > 0 {
		t.Errorf("skipped %q, %v", skipped, err)
	}
	done, err := user.UploadTar(ctx, "copy", &tree)
	if err != nil || done.Files != 3 || done.Bytes != 5 {
		t.Errorf("did %+v, %v", done, err)
	}
	check(user.Remove(ctx, "a", true))
	n := 0
	for batch, err := range user.List(ctx, "/work") {
		check(err)
		n += len(batch)
	}
	if n != 1 {
		t.Errorf("%d entries are left", n)
	}
	// The devices of the sandbox are no files either.
	if _, err := root.Read(ctx, "/dev/zero", files.Range{}); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("/dev/zero: %v", err)
	}
	u, err := h.LookupUser(ctx, "root")
	if err != nil || u.IDs.UID != 0 {
		t.Errorf("root is %+v, %v", u, err)
	}
}
