package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

func TestBatchesGiveOneResultPerFileInOrder(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	big := bytes.Repeat([]byte("x"), 5<<20)
	wrote, err := sb.WriteFiles(ctx, &sandseav1.WriteBatchRequest{User: "alice", Files: []*sandseav1.FileToWrite{
		{Path: "/home/alice/a/one", Data: []byte("1\x00\xff"), Mode: 0o600},
		{Path: "relative", Data: []byte("2")},
		{Path: "/etc/passwd", Data: []byte("3")},
		{Path: "/home/alice", Data: []byte("4")},
		{Path: "/home/alice/big", Data: big},
		{Path: "/home/alice/empty"},
	}})
	if err != nil || len(wrote) != 6 {
		t.Fatalf("%d results, %v", len(wrote), err)
	}
	if i := wrote[0].GetInfo(); i.GetMode() != 0o600 || i.GetUid() != 1000 || client.FileError(wrote[0]) != nil {
		t.Errorf("the first: %v", wrote[0])
	}
	refusedWith(t, "a relative path", client.FileError(wrote[1]), syscall.EINVAL)
	if wrote[1].GetError().GetField() != "path" || wrote[1].GetError().GetKind() != "invalid" {
		t.Errorf("a relative path: %v", wrote[1])
	}
	refusedWith(t, "another's file", client.FileError(wrote[2]), syscall.EACCES)
	refusedWith(t, "a directory", client.FileError(wrote[3]), syscall.EISDIR)
	if wrote[4].GetInfo().GetSize() != int64(len(big)) || wrote[5].GetInfo().GetPath() != "/home/alice/empty" {
		t.Errorf("the last: %v, %v", wrote[4], wrote[5])
	}

	read, err := sb.ReadFiles(ctx, &sandseav1.ReadBatchRequest{Paths: []string{
		"/home/alice/a/one", "/none", "/home", "relative", "/home/alice/big", "/proc/sys/kernel/ostype", "/home/alice/empty",
	}})
	if err != nil || len(read) != 7 {
		t.Fatalf("%d results, %v", len(read), err)
	}
	if !bytes.Equal(read[0].GetData(), []byte("1\x00\xff")) || read[0].GetInfo().GetMode() != 0o600 {
		t.Errorf("the first: %v", read[0])
	}
	for i, want := range map[int]syscall.Errno{
		1: syscall.ENOENT, 2: syscall.EISDIR, 3: syscall.EINVAL, 4: syscall.EFBIG,
	} {
		refusedWith(t, read[i].GetPath(), client.FileError(read[i]), want)
	}
	if m := read[4].GetMessage(); !strings.Contains(m, fmt.Sprint(len(big))) {
		t.Errorf("a big file: %q", m)
	}
	if string(read[5].GetData()) != "Linux\n" || len(read[6].GetData()) != 0 || client.FileError(read[6]) != nil {
		t.Errorf("the last: %v, %v", read[5], read[6])
	}
	// 13 files of 5 MiB are 65 MiB: the last does not fit any more.
	paths := strings.Split(strings.Repeat("/home/alice/big ", 13), " ")[:13]
	read, err = sb.ReadFiles(ctx, &sandseav1.ReadBatchRequest{Paths: paths, MaxBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range read[:12] {
		if !bytes.Equal(f.GetData(), big) {
			t.Errorf("%d bytes, %s", len(f.GetData()), f.GetMessage())
		}
	}
	refusedWith(t, "beyond 64 MiB", client.FileError(read[12]), syscall.EFBIG)
}

func TestBatchesAreLimited(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	_, err := sb.ReadFiles(ctx, &sandseav1.ReadBatchRequest{Paths: make([]string, 1001)})
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Invalid || e.Field != "paths" {
		t.Errorf("1001 paths: %v", err)
	}
	_, err = sb.ReadFiles(ctx, &sandseav1.ReadBatchRequest{MaxBytes: 65 << 20})
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Invalid || e.Field != "max_bytes" {
		t.Errorf("65 MiB: %v", err)
	}
	_, err = sb.WriteFiles(ctx, &sandseav1.WriteBatchRequest{Files: []*sandseav1.FileToWrite{
		{Path: "/tmp/a", Data: make([]byte, 33<<20)}, {Path: "/tmp/b", Data: make([]byte, 33<<20)},
	}})
	if !errors.Is(err, errdefs.Invalid) {
		t.Errorf("66 MiB: %v", err)
	}
	if got := sh(t, sb, "ls /tmp"); got != "" {
		t.Errorf("left: %q", got)
	}
	wrote, err := sb.WriteFiles(ctx, &sandseav1.WriteBatchRequest{Files: []*sandseav1.FileToWrite{
		{Path: "/tmp/a", Data: make([]byte, 63<<20)},
	}})
	if err != nil || wrote[0].GetInfo().GetSize() != 63<<20 {
		t.Errorf("63 MiB: %v, %v", wrote, err)
	}
}

func TestModesOwnersAndTimesAreChangedWithTheUsersRights(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	sh(t, sb, "echo x >/tmp/f; ln -s f /tmp/link; ln -s /none /tmp/dangling")
	mode := uint32(0o4750)
	at := time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC)
	i, err := sb.ChangeFile(ctx, &sandseav1.ChangeFileRequest{
		Path: "/tmp/link", Mode: &mode, Owner: "alice", ModifiedAt: timestamppb.New(at),
	})
	if err != nil || i.GetMode() != mode || i.GetUid() != 1000 || i.GetGid() != 1000 || !i.GetModifiedAt().AsTime().Equal(at) {
		t.Errorf("changed: %v, %v", i, err)
	}
	// Alice may change what is hers, and give nothing away.
	mode = 0o600
	if i, err = sb.ChangeFile(ctx, &sandseav1.ChangeFileRequest{Path: "/tmp/f", User: "alice", Mode: &mode}); err != nil ||
		i.GetMode() != 0o600 {
		t.Errorf("her own: %v, %v", i, err)
	}
	_, err = sb.ChangeFile(ctx, &sandseav1.ChangeFileRequest{Path: "/tmp/f", User: "alice", Owner: "root"})
	refusedWith(t, "given away", err, syscall.EPERM)
	_, err = sb.ChangeFile(ctx, &sandseav1.ChangeFileRequest{Path: "/etc/passwd", User: "alice", Mode: &mode})
	refusedWith(t, "root's", err, syscall.EPERM)
	// The link itself, also one that leads nowhere.
	if i, err = sb.ChangeFile(ctx, &sandseav1.ChangeFileRequest{Path: "/tmp/dangling", NoFollow: true, Owner: "5:7"}); err != nil ||
		i.GetUid() != 5 || i.GetGid() != 7 || i.GetLink() != "/none" {
		t.Errorf("a link: %v, %v", i, err)
	}
	for field, req := range map[string]*sandseav1.ChangeFileRequest{
		"mode":  {Path: "/tmp/link", NoFollow: true, Mode: &mode},
		"owner": {Path: "/tmp/link", Owner: "nobody-such"},
		"":      {Path: "/tmp/link"},
	} {
		_, err = sb.ChangeFile(ctx, req)
		if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Field != field {
			t.Errorf("%v: %v", req, err)
		}
	}

	if i, err = sb.MakeLink(ctx, &sandseav1.MakeLinkRequest{Path: "/tmp/new", Target: "../not/there", User: "alice"}); err != nil ||
		i.GetType() != sandseav1.FileType_FILE_TYPE_SYMLINK || i.GetLink() != "../not/there" || i.GetUid() != 1000 {
		t.Errorf("made: %v, %v", i, err)
	}
	_, err = sb.MakeLink(ctx, &sandseav1.MakeLinkRequest{Path: "/tmp/new", Target: "x"})
	refusedWith(t, "again", err, syscall.EEXIST)
}

func TestWhatIsWrittenAndUnpackedCanBeGivenAway(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	i, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "/tmp/f", Owner: "alice"}, "x")
	if err != nil || i.GetUid() != 1000 || i.GetGid() != 1000 {
		t.Errorf("written: %v, %v", i, err)
	}
	_, err = write(t, sb, &sandseav1.WriteFileHeader{Path: "/tmp/g", User: "alice", Owner: "bob"}, "x")
	refusedWith(t, "alice for bob", err, syscall.EPERM)
	if got := sh(t, sb, "ls -A /tmp"); got != "f\n" {
		t.Errorf("left: %q", got)
	}
	// Directories that no entry is for are made on the way.
	sh(t, sb, "mkdir -p /src/deep/er; echo x >/src/deep/er/f; ln -s f /src/deep/er/l; cd /src; tar cf /up.tar deep/er/f deep/er/l")
	var tarball bytes.Buffer
	if _, err := sb.ReadFile(ctx, &sandseav1.ReadFileRequest{Path: "/up.tar"}, &tarball); err != nil {
		t.Fatal(err)
	}
	if _, err := sb.UploadTar(ctx, &sandseav1.UploadTarHeader{Path: "/new/tree", Owner: "alice"}, &tarball); err != nil {
		t.Fatal(err)
	}
	want := "root /new\nalice /new/tree\nalice /new/tree/deep\nalice /new/tree/deep/er\nalice /new/tree/deep/er/f\nalice /new/tree/deep/er/l\n"
	if got := sh(t, sb, "cd /; stat -c '%U %n' /new /new/tree /new/tree/deep /new/tree/deep/er /new/tree/deep/er/*"); got != want {
		t.Errorf("owners: %q", got)
	}
}
