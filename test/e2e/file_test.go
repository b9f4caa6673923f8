package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

func write(t testing.TB, sb *client.Sandbox, h *sandseav1.WriteFileHeader, body string) (*sandseav1.FileInfo, error) {
	t.Helper()
	return sb.WriteFile(within(t, 30*time.Second), h, strings.NewReader(body))
}

func read(t testing.TB, sb *client.Sandbox, req *sandseav1.ReadFileRequest) (string, error) {
	t.Helper()
	var b bytes.Buffer
	_, err := sb.ReadFile(within(t, 30*time.Second), req, &b)
	return b.String(), err
}

// refusedWith checks the errno of a file call that was refused.
func refusedWith(t testing.TB, what string, err error, want syscall.Errno) {
	t.Helper()
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || syscall.Errno(e.Errno) != want || e.ErrnoName == "" {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func TestFilesAreWrittenWholeWithParentsAndTheUsersRights(t *testing.T) {
	t.Parallel()
	sb := open(t)
	fi, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "/home/alice/a/b/c.txt", User: "alice", Mode: 0o640}, "one\r\ntwo\x00")
	if err != nil {
		t.Fatal(err)
	}
	if fi.GetSize() != 9 || fi.GetMode() != 0o640 || fi.GetUid() != 1000 || fi.GetGid() != 1000 {
		t.Errorf("written: %v", fi)
	}
	if got := sh(t, sb, "stat -c '%U %a' /home/alice/a /home/alice/a/b /home/alice/a/b/c.txt"); got != "alice 755\nalice 755\nalice 640\n" {
		t.Errorf("owners: %q", got)
	}
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/home/alice/a/b/c.txt"}); err != nil || got != "one\r\ntwo\x00" {
		t.Errorf("got %q, %v", got, err)
	}
	// Another write replaces it, keeps its mode, and readers of the old one keep theirs.
	if fi, err = write(t, sb, &sandseav1.WriteFileHeader{Path: "/home/alice/a/b/c.txt", User: "alice"}, "new"); err != nil || fi.GetMode() != 0o640 {
		t.Errorf("again: %v, %v", fi, err)
	}
	if got := sh(t, sb, "cat /home/alice/a/b/c.txt; ls -A /home/alice/a/b"); got != "newc.txt\n" {
		t.Errorf("got %q", got)
	}
	_, err = write(t, sb, &sandseav1.WriteFileHeader{Path: "/etc/passwd", User: "alice"}, "x")
	refusedWith(t, "alice writes /etc/passwd", err, syscall.EACCES)
	if !strings.HasPrefix(sh(t, sb, "cat /etc/passwd"), "root:") {
		t.Error("it was changed")
	}
	_, err = write(t, sb, &sandseav1.WriteFileHeader{Path: "/home"}, "x")
	refusedWith(t, "a directory", err, syscall.EISDIR)
	_, err = write(t, sb, &sandseav1.WriteFileHeader{Path: "/etc/passwd/x"}, "x")
	refusedWith(t, "below a file", err, syscall.ENOTDIR)
	// A wrong size changes nothing.
	for _, size := range []int64{2, 4} {
		_, err = write(t, sb, &sandseav1.WriteFileHeader{Path: "/home/alice/a/b/c.txt", Size: &size}, "xyz")
		if err == nil {
			t.Errorf("3 bytes as %d", size)
		}
	}
	if got := sh(t, sb, "cat /home/alice/a/b/c.txt; ls -A /home/alice/a/b"); got != "newc.txt\n" {
		t.Errorf("after refused writes: %q", got)
	}
	// A relative path begins at the working directory.
	if _, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "relative.txt"}, "r"); err != nil || sh(t, sb, "cat /relative.txt") != "r" {
		t.Errorf("relative: %v", err)
	}
}

func TestFilesAreReadWithTheUsersRightsAndUpToALimit(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, "printf 0123456789 >/tmp/f; chmod 600 /tmp/f; mkfifo /tmp/fifo; ln -s /etc/passwd /tmp/link; ln -s /tmp/loop /tmp/loop")
	_, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/f", User: "bob"})
	refusedWith(t, "bob reads root's file", err, syscall.EACCES)
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/f", Offset: 3, Length: 4}); err != nil || got != "3456" {
		t.Errorf("a part: %q, %v", got, err)
	}
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/f", Offset: 100}); err != nil || got != "" {
		t.Errorf("beyond the end: %q, %v", got, err)
	}
	got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/f", MaxBytes: 9})
	if err == nil || got != "" || !strings.Contains(err.Error(), "10") {
		t.Errorf("10 bytes with a limit of 9: %q, %v", got, err)
	}
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/f", MaxBytes: 10}); err != nil || got != "0123456789" {
		t.Errorf("10 bytes with a limit of 10: %q, %v", got, err)
	}
	_, err = read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/none"})
	refusedWith(t, "a missing file", err, syscall.ENOENT)
	_, err = read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp"})
	refusedWith(t, "a directory", err, syscall.EISDIR)
	_, err = read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/loop"})
	refusedWith(t, "a loop of links", err, syscall.ELOOP)
	for _, odd := range []string{"/tmp/fifo", "/dev/zero", "/dev/tty"} {
		if _, err := read(t, sb, &sandseav1.ReadFileRequest{Path: odd}); err == nil {
			t.Errorf("%s was read as a file", odd)
		}
	}
	for _, path := range []string{"", "/tmp/\x00", strings.Repeat("x/", 4000)} {
		if _, err := read(t, sb, &sandseav1.ReadFileRequest{Path: path}); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%.20q: %v", path, err)
		}
	}
	// Links are followed inside, and lead nowhere else.
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/link"}); err != nil || !strings.HasPrefix(got, "root:x:0:0:root:/root:/bin/sh\nalice") {
		t.Errorf("a link: %.40q, %v", got, err)
	}
	if got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "../../../../../../etc/passwd"}); err != nil || !strings.Contains(got, "alice") {
		t.Errorf("upwards: %.40q, %v", got, err)
	}
	_, err = read(t, sb, &sandseav1.ReadFileRequest{Path: "/proc/1/root/etc/shadow"})
	if err == nil {
		t.Error("the file helper went through /proc/1/root")
	}
}

func TestFilesOfAnySizeStreamBothWays(t *testing.T) {
	t.Parallel()
	sb := open(t)
	const size = 64 << 20
	source := func() io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{2}), size) }
	want := sha256.New()
	_, _ = io.Copy(want, source())
	began := time.Now()
	if _, err := sb.WriteFile(within(t, 60*time.Second), &sandseav1.WriteFileHeader{Path: "/tmp/big"}, source()); err != nil {
		t.Fatal(err)
	}
	wrote := time.Since(began)
	if got := sh(t, sb, "sha256sum </tmp/big"); got != fmt.Sprintf("%x  -\n", want.Sum(nil)) {
		t.Errorf("inside: %s", got)
	}
	began = time.Now()
	got := sha256.New()
	fi, err := sb.ReadFile(within(t, 60*time.Second), &sandseav1.ReadFileRequest{Path: "/tmp/big"}, got)
	if err != nil || fi.GetSize() != size || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Errorf("read back: %v, %v", fi, err)
	}
	t.Logf("64 MiB in %s, out %s", wrote, time.Since(began))
	// A sparse terabyte is refused by its size before a byte moves.
	sh(t, sb, "dd of=/tmp/sparse bs=1M seek=1048576 count=0 2>/dev/null")
	if _, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/tmp/sparse", MaxBytes: 1 << 30}); err == nil {
		t.Error("a terabyte was read")
	}
}

func TestDirectoriesAreListedMadeMovedAndRemoved(t *testing.T) {
	t.Parallel()
	s := serve(t)
	sb := open(t)
	ctx := within(t, 60*time.Second)
	mkdir := func(r *sandseav1.MakeDirRequest) error {
		r.Id = sb.ID
		_, err := s.Client.Files.MakeDir(ctx, connect.NewRequest(r))
		return err
	}
	remove := func(path string, all bool) error {
		_, err := s.Client.Files.Remove(ctx, connect.NewRequest(&sandseav1.RemoveFileRequest{Id: sb.ID, Path: path, Recursive: all}))
		return err
	}
	move := func(from, to string) error {
		_, err := s.Client.Files.Move(ctx, connect.NewRequest(&sandseav1.MoveFileRequest{Id: sb.ID, From: from, To: to}))
		return err
	}
	if err := mkdir(&sandseav1.MakeDirRequest{Path: "/tmp/d", Mode: 0o700, User: "alice"}); err != nil {
		t.Fatal(err)
	}
	refusedWith(t, "again", mkdir(&sandseav1.MakeDirRequest{Path: "/tmp/d"}), syscall.EEXIST)
	refusedWith(t, "without its parent", mkdir(&sandseav1.MakeDirRequest{Path: "/tmp/x/y"}), syscall.ENOENT)
	refusedWith(t, "no right", mkdir(&sandseav1.MakeDirRequest{Path: "/etc/x", User: "alice"}), syscall.EACCES)
	for range 2 {
		if err := mkdir(&sandseav1.MakeDirRequest{Path: "/tmp/d/e/f", Parents: true}); err != nil {
			t.Error(err)
		}
	}
	sh(t, sb, "cd /tmp/d; echo hi >b; ln -s b c; mkfifo p; i=0; while [ $i -lt 1500 ]; do : >e/$i; i=$((i+1)); done")
	files, err := sb.ListFiles(ctx, &sandseav1.ListFilesRequest{Path: "/tmp/d"})
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, f := range files {
		lines = append(lines, fmt.Sprintf("%s %s %s", f.GetPath(), strings.TrimPrefix(f.GetType().String(), "FILE_TYPE_"), f.GetLink()))
	}
	slices.Sort(lines)
	if got := strings.Join(lines, ","); got != "/tmp/d/b REGULAR ,/tmp/d/c SYMLINK b,/tmp/d/e DIRECTORY ,/tmp/d/p OTHER " {
		t.Errorf("listed %q", got)
	}
	if files, err = sb.ListFiles(ctx, &sandseav1.ListFilesRequest{Path: "/tmp/d/e"}); err != nil || len(files) != 1501 {
		t.Errorf("%d files, %v", len(files), err)
	}
	_, err = sb.ListFiles(ctx, &sandseav1.ListFilesRequest{Path: "/tmp/d", User: "bob"})
	refusedWith(t, "bob lists alice's", err, syscall.EACCES)
	_, err = sb.ListFiles(ctx, &sandseav1.ListFilesRequest{Path: "/tmp/d/b"})
	refusedWith(t, "a file as a directory", err, syscall.ENOTDIR)
	link, err := sb.Stat(ctx, &sandseav1.StatFileRequest{Path: "/tmp/d/c", NoFollow: true})
	if err != nil || link.GetType() != sandseav1.FileType_FILE_TYPE_SYMLINK || link.GetLink() != "b" {
		t.Errorf("the link itself: %v, %v", link, err)
	}
	target, err := sb.Stat(ctx, &sandseav1.StatFileRequest{Path: "/tmp/d/c"})
	if err != nil || target.GetType() != sandseav1.FileType_FILE_TYPE_REGULAR || target.GetSize() != 3 {
		t.Errorf("what it leads to: %v, %v", target, err)
	}
	if err := move("/tmp/d/b", "/tmp/moved"); err != nil || sh(t, sb, "cat /tmp/moved") != "hi\n" {
		t.Errorf("move: %v", err)
	}
	refusedWith(t, "move of nothing", move("/tmp/d/b", "/tmp/x"), syscall.ENOENT)
	refusedWith(t, "a full directory", remove("/tmp/d", false), syscall.ENOTEMPTY)
	refusedWith(t, "a missing file", remove("/tmp/none", false), syscall.ENOENT)
	for range 2 {
		if err := remove("/tmp/d", true); err != nil {
			t.Errorf("remove all: %v", err)
		}
	}
	if got := sh(t, sb, "ls /tmp"); got != "moved\n" {
		t.Errorf("left %q", got)
	}
}

func TestRemovingATreeDoesNotFollowItsLinks(t *testing.T) {
	t.Parallel()
	s := serve(t)
	sb := open(t)
	sh(t, sb, "mkdir -p /srv/keep /tmp/d; echo x >/srv/keep/f; ln -s /srv/keep /tmp/d/link; ln -s / /tmp/d/root")
	_, err := s.Client.Files.Remove(within(t, 20*time.Second),
		connect.NewRequest(&sandseav1.RemoveFileRequest{Id: sb.ID, Path: "/tmp/d", Recursive: true}))
	if err != nil || sh(t, sb, "cat /srv/keep/f; ls /tmp") != "x\n" {
		t.Errorf("%v", err)
	}
}

func TestTarsGoUpAndDownWithModesLinksAndEmptyDirectories(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	when := time.Unix(1_600_000_000, 0)
	var up bytes.Buffer
	w := tar.NewWriter(&up)
	for _, h := range []*tar.Header{
		{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o750},
		{Name: "dir/empty/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "dir/run.sh", Typeflag: tar.TypeReg, Mode: 0o755, Size: 10, ModTime: when},
		{Name: "dir/link", Typeflag: tar.TypeSymlink, Linkname: "run.sh"},
		{Name: "dir/hard", Typeflag: tar.TypeLink, Linkname: "dir/run.sh"},
		{Name: "dir/name with \"quotes\" é\n", Typeflag: tar.TypeReg, Mode: 0o600},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			_, _ = w.Write([]byte("#!/bin/sh\n"))
		}
	}
	_ = w.Close()
	res, err := sb.UploadTar(ctx, &sandseav1.UploadTarHeader{Path: "/home/alice/up", User: "alice"}, bytes.NewReader(up.Bytes()))
	if err != nil || res.GetBytes() != 10 {
		t.Fatal(res, err)
	}
	got := sh(t, sb, "cd /home/alice/up/dir && stat -c '%n %a %U %F' . empty run.sh link hard | sed 's/regular empty file/regular file/'; readlink link; stat -c %Y run.sh; [ run.sh -ef hard ]")
	want := ". 750 alice directory\nempty 755 alice directory\nrun.sh 755 alice regular file\nlink 777 alice symbolic link\n" +
		"hard 755 alice regular file\nrun.sh\n1600000000\n"
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	sh(t, sb, "cd /home/alice/up/dir && mkfifo pipe")
	var down bytes.Buffer
	skipped, err := sb.DownloadTar(ctx, &sandseav1.DownloadTarRequest{Path: "/home/alice/up"}, &down)
	if err != nil || len(skipped) != 1 || !strings.HasSuffix(skipped[0], "pipe") {
		t.Errorf("left out %q, %v", skipped, err)
	}
	seen := map[string]*tar.Header{}
	for r := tar.NewReader(&down); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		seen[strings.TrimSuffix(strings.TrimPrefix(h.Name, "up/"), "/")] = h
	}
	if h := seen["dir/link"]; h == nil || h.Typeflag != tar.TypeSymlink || h.Linkname != "run.sh" {
		t.Errorf("the link came as %v of %v", h, seen)
	}
	if h := seen["dir/empty"]; h == nil || h.Typeflag != tar.TypeDir {
		t.Errorf("the empty directory came as %v", h)
	}
	if h := seen["dir/run.sh"]; h == nil || h.Mode&0o777 != 0o755 || h.ModTime.Unix() != when.Unix() {
		t.Errorf("run.sh came as %v", h)
	}
	if seen["dir/name with \"quotes\" é\n"] == nil {
		t.Errorf("an odd name is missing among %v", seen)
	}
}

func TestAHostileTarStaysBelowItsDirectory(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for name, headers := range map[string][]*tar.Header{
		"dots":       {{Name: "../../escaped", Typeflag: tar.TypeReg}},
		"absolute":   {{Name: "/escaped", Typeflag: tar.TypeReg}},
		"a link":     {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/"}, {Name: "l/escaped", Typeflag: tar.TypeReg}},
		"hard link":  {{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../etc/passwd"}},
		"a device":   {{Name: "d", Typeflag: tar.TypeBlock, Devmajor: 8}},
		"a size lie": {{Name: "s", Typeflag: tar.TypeReg, Size: 1 << 40}},
	} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range headers {
			h.Mode = 0o644
			_ = w.WriteHeader(h)
		}
		_ = w.Flush()
		b.Write(make([]byte, 1024))
		_, err := sb.UploadTar(within(t, 20*time.Second), &sandseav1.UploadTarHeader{Path: "/tmp/in/deep"}, &b)
		if got := sh(t, sb, "ls / | grep escaped; ls /tmp/in /tmp | grep escaped; find /tmp/in -type b; true"); got != "" {
			t.Errorf("%s: %q (%v)", name, got, err)
		}
	}
}

func TestManyFileCallsAtOnce(t *testing.T) {
	t.Parallel()
	sb := open(t)
	var g errgroup.Group
	for i := range 40 {
		g.Go(func() error {
			path, user := fmt.Sprintf("/tmp/many/%d", i), []string{"root", "alice", "bob"}[i%3]
			if i%3 > 0 {
				path = fmt.Sprintf("/tmp/many-%s/%d", user, i)
			}
			body := strings.Repeat(fmt.Sprint(i), 1000)
			if _, err := write(t, sb, &sandseav1.WriteFileHeader{Path: path, User: user}, body); err != nil {
				return err
			}
			got, err := read(t, sb, &sandseav1.ReadFileRequest{Path: path, User: user})
			if err != nil || got != body {
				return fmt.Errorf("%s: %d bytes, %w", path, len(got), err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

func TestAFullDiskLeavesTheOldFile(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.DiskBytes = 16 << 20 })
	if _, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "/srv/f"}, "old"); err != nil {
		t.Fatal(err)
	}
	_, err := sb.WriteFile(within(t, 30*time.Second), &sandseav1.WriteFileHeader{Path: "/srv/f"},
		io.LimitReader(rand.NewChaCha8([32]byte{3}), 64<<20))
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.ErrnoName != "EDQUOT" && e.ErrnoName != "ENOSPC" {
		t.Errorf("64 MiB into 16: %v", err)
	}
	if got := sh(t, sb, "cat /srv/f; ls -A /srv"); got != "oldf\n" {
		t.Errorf("got %q", got)
	}
}
