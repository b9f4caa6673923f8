package demands

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

func write(t testing.TB, sb *client.Sandbox, user, path, body string) (*sandseav1.FileInfo, error) {
	t.Helper()
	return sb.WriteFile(within(t, 30*time.Second), &sandseav1.WriteFileHeader{Path: path, User: user}, strings.NewReader(body))
}

func read(t testing.TB, sb *client.Sandbox, req *sandseav1.ReadFileRequest) (string, error) {
	t.Helper()
	var b bytes.Buffer
	_, err := sb.ReadFile(within(t, 30*time.Second), req, &b)
	return b.String(), err
}

func TestD21FileCallsActAsAUserWithThatUsersRights(t *testing.T) {
	t.Parallel()
	sb := open(t, worker) // alice is the default user
	if r := run(t, sb, as("root", "echo secret >/srv/f; chmod 600 /srv/f; echo own >/srv/r; chown alice /srv/r; chmod 0 /srv/r")).GetResult(); r.GetExitCode() != 0 {
		t.Fatal(r)
	}
	for _, path := range []string{"/srv/f", "/srv/r"} {
		_, err := read(t, sb, &sandseav1.ReadFileRequest{Path: path})
		if e := fault(t, "a file without rights", err, errdefs.Denied); e.ErrnoName != "EACCES" {
			t.Errorf("%s: %v", path, e)
		}
		if body, err := read(t, sb, &sandseav1.ReadFileRequest{Path: path, User: "root"}); err != nil || body == "" {
			t.Errorf("%s as root: %q, %v", path, body, err)
		}
	}
	_, err := write(t, sb, "", "/srv/new", "x")
	fault(t, "a write into root's directory", err, errdefs.Denied)
	_, err = sb.ListFiles(within(t, 30*time.Second), &sandseav1.ListFilesRequest{Path: "/root"})
	fault(t, "root's home", err, errdefs.Denied)
}

func TestD22AWriteMakesParentsAndReplaces(t *testing.T) {
	t.Parallel()
	sb := open(t, worker)
	if _, err := write(t, sb, "", "/tmp/a/b/c.txt", "a longer first text\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := write(t, sb, "", "/tmp/a/b/c.txt", "short\n"); err != nil {
		t.Fatal(err)
	}
	got := string(run(t, sb, as("", "cat /tmp/a/b/c.txt; stat -c %U /tmp/a /tmp/a/b /tmp/a/b/c.txt")).GetStdout())
	if got != "short\nalice\nalice\nalice\n" {
		t.Errorf("got %q", got)
	}
	_, err := write(t, sb, "", "/tmp/a/b", "x")
	if e := fault(t, "onto a directory", err, errdefs.FailedPrecondition); e.ErrnoName != "EISDIR" {
		t.Errorf("onto a directory: %v", e)
	}
}

func TestD23AReadIsBoundedAtItsSource(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, "head -c 1000000 /dev/zero >/tmp/f")
	got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/f", MaxBytes: 999_999})
	e := fault(t, "a larger file", err, errdefs.FailedPrecondition)
	if e.ErrnoName != "EFBIG" || !strings.Contains(e.Msg, "1000000") || got != "" {
		t.Errorf("a larger file: %d bytes, %v", len(got), e)
	}
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/f", MaxBytes: 1_000_000}); err != nil || len(got) != 1_000_000 {
		t.Errorf("just as large: %d bytes, %v", len(got), err)
	}
	// Files of no size have content all the same, and no end.
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/proc/self/maps", MaxBytes: 10}); err == nil {
		t.Errorf("a file of size 0: %q", got)
	}
}

func TestD24ErrorsCarryErrnoNameAndPath(t *testing.T) {
	t.Parallel()
	sb := open(t, worker)
	ctx := within(t, 30*time.Second)
	_, missing := read(t, sb, &sandseav1.ReadFileRequest{Path: "/no/such"})
	_, dir := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp"})
	_, denied := read(t, sb, &sandseav1.ReadFileRequest{Path: "/root/x"})
	_, notDir := sb.ListFiles(ctx, &sandseav1.ListFilesRequest{Path: "/etc/passwd"})
	for _, tt := range []struct {
		err   error
		kind  errdefs.Kind
		errno syscall.Errno
		name  string
		path  string
	}{
		{missing, errdefs.NotFound, syscall.ENOENT, "ENOENT", "/no/such"},
		{dir, errdefs.FailedPrecondition, syscall.EISDIR, "EISDIR", "/tmp"},
		{denied, errdefs.Denied, syscall.EACCES, "EACCES", "/root/x"},
		{notDir, errdefs.FailedPrecondition, syscall.ENOTDIR, "ENOTDIR", "/etc/passwd"},
	} {
		if e := fault(t, tt.path, tt.err, tt.kind); e.Errno != int(tt.errno) || e.ErrnoName != tt.name || e.Object != tt.path {
			t.Errorf("%s: errno %d %s of %q", tt.path, e.Errno, e.ErrnoName, e.Object)
		}
	}
	// That they are the builtins too is Python's: sdk/python/tests/test_demands.py.
}

func TestD25TreesKeepModesLinksAndEmptyDirectories(t *testing.T) {
	t.Parallel()
	sb := open(t, worker)
	ctx := within(t, 60*time.Second)
	var up bytes.Buffer
	w := tar.NewWriter(&up)
	for _, h := range []tar.Header{
		{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o750, Uid: 4242},
		{Name: "bin/tool", Typeflag: tar.TypeReg, Mode: 0o755, Uid: 4242, Size: 4},
		{Name: "bin/link", Typeflag: tar.TypeSymlink, Linkname: "tool"},
		{Name: "empty/", Typeflag: tar.TypeDir, Mode: 0o700},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			_, _ = w.Write([]byte("tool"))
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := sb.UploadTar(ctx, &sandseav1.UploadTarHeader{Path: "/tmp/tree"}, &up); err != nil {
		t.Fatal(err)
	}
	got := string(run(t, sb, as("", "cd /tmp/tree; stat -c '%n %a %U %F' bin bin/tool bin/link empty; readlink bin/link; mkfifo bin/pipe")).GetStdout())
	want := "bin 750 alice directory\nbin/tool 755 alice regular file\nbin/link 777 alice symbolic link\nempty 700 alice directory\ntool\n"
	if got != want {
		t.Errorf("unpacked:\n%s", got)
	}
	// Another owner, where the acting user may give it.
	if _, err := sb.WriteFile(ctx, &sandseav1.WriteFileHeader{Path: "/tmp/theirs", User: "root", Owner: "bob:staff", Mode: 0o751},
		strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, sb, "stat -c '%U %G %a' /tmp/theirs"); got != "bob staff 751\n" {
		t.Errorf("an owner that was asked for: %q", got)
	}

	var down bytes.Buffer
	skipped, err := sb.DownloadTar(ctx, &sandseav1.DownloadTarRequest{Path: "/tmp/tree"}, &down)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(&down); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, fmt.Sprintf("%s %c %o %s", strings.TrimSuffix(h.Name, "/"), h.Typeflag, fs.FileMode(h.Mode).Perm(), h.Linkname))
	}
	for _, want := range []string{"bin/tool 0 755 ", "bin/link 2 777 tool", "empty 5 700 "} {
		if !slices.ContainsFunc(names, func(n string) bool { return strings.HasSuffix(n, want) }) {
			t.Errorf("packed %q lack %q", names, want)
		}
	}
	if len(skipped) != 1 || !strings.HasSuffix(skipped[0], "bin/pipe") {
		t.Errorf("left out: %q", skipped)
	}
}

func TestD26ABatchAnswersForEachItemInOrder(t *testing.T) {
	t.Parallel()
	sb := open(t, worker)
	ctx := within(t, 30*time.Second)
	written, err := sb.WriteFiles(ctx, &sandseav1.WriteBatchRequest{Files: []*sandseav1.FileToWrite{
		{Path: "/tmp/d26/deep/a", Data: []byte("a"), Mode: 0o755},
		{Path: "relative"},
		{Path: "/tmp"},
		{Path: "/root/x"},
		{Path: "/tmp/d26/b", Data: []byte("b\x00b")},
	}})
	if err != nil || len(written) != 5 {
		t.Fatal(written, err)
	}
	for i, want := range []string{"", "invalid", "EISDIR", "EACCES", ""} {
		e := written[i].GetError()
		if want == "" && (e != nil || written[i].GetInfo() == nil) || want != "" && e.GetErrnoName() != want && e.GetKind() != want {
			t.Errorf("write %d: %v", i, written[i])
		}
	}
	files, err := sb.ReadFiles(ctx, &sandseav1.ReadBatchRequest{
		Paths: []string{"/tmp/d26/b", "/tmp/none", "relative", "/tmp", "/root/x", "/tmp/d26/deep/a"},
	})
	if err != nil || len(files) != 6 {
		t.Fatal(files, err)
	}
	for i, want := range []string{"", "ENOENT", "invalid", "EISDIR", "EACCES", ""} {
		e := files[i].GetError()
		if want == "" && e != nil || want != "" && e.GetErrnoName() != want && e.GetKind() != want {
			t.Errorf("read %d: %v", i, files[i])
		}
	}
	if string(files[0].GetData()) != "b\x00b" || string(files[5].GetData()) != "a" || files[5].GetInfo().GetMode()&0o777 != 0o755 {
		t.Errorf("read %v", files)
	}
}
