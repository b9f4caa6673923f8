package e2e

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

func TestNamesThatAreNoTextAreShownAndCarried(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	sh(t, sb, `mkdir /odd; cd /odd; for n in 'new
line' "$(printf 'bad\377')" "$(printf 'tab\there')" '--' ' '; do echo x >"./$n"; done`)
	list, err := sb.ListFiles(ctx, &sandseav1.ListFilesRequest{Path: "/odd"})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, f := range list {
		got[f.GetPath()] = true
	}
	for _, want := range []string{"/odd/new\nline", `/odd/bad\xff`, "/odd/tab\there", "/odd/--", "/odd/ "} {
		if !got[want] {
			t.Errorf("%q is not listed: %v", want, got)
		}
	}
	if body, err := read(t, sb, &sandseav1.ReadFileRequest{Path: "/odd/new\nline"}); err != nil || body != "x\n" {
		t.Errorf("a name with a newline: %q, %v", body, err)
	}
	if _, err := sb.Stat(ctx, &sandseav1.StatFileRequest{Path: "/odd/bad\xff"}); !errors.Is(err, errdefs.Invalid) ||
		!strings.Contains(err.Error(), "UTF-8") {
		t.Errorf("a request for a name that is no text: %v", err)
	}
	// A tar stream carries it both ways.
	var b bytes.Buffer
	if skipped, err := sb.DownloadTar(ctx, &sandseav1.DownloadTarRequest{Path: "/odd"}, &b); err != nil || len(skipped) > 0 {
		t.Errorf("skipped %q, %v", skipped, err)
	}
	if _, err := sb.UploadTar(ctx, &sandseav1.UploadTarHeader{Path: "/copy"}, &b); err != nil {
		t.Fatal(err)
	}
	sh(t, sb, `cat "/copy/$(printf 'bad\377')"; ls /odd >/a; ls /copy >/b; cmp /a /b`)
}

// What is read while it changes gives a whole stream and says what is not in it.
func TestATreeThatChangesIsPackedAndListed(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, "mkdir -p /t; cd /t; for i in $(seq 300); do mkdir d$i; echo $i >d$i/f; done; mkfifo pipe; ln -s loop loop")
	start(t, sb, client.Shell(
		"cd /t; while :; do for i in $(seq 300); do rm -rf d$i; mkdir d$i; head -c $((i*100)) /dev/zero >d$i/f; done; done"))
	ctx := within(t, 60*time.Second)
	for range 5 {
		var b bytes.Buffer
		skipped, err := sb.DownloadTar(ctx, &sandseav1.DownloadTarRequest{Path: "/t"}, &b)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(strings.Join(skipped, "\n"), "pipe") {
			t.Errorf("skipped %q", skipped)
		}
		for tr := tar.NewReader(&b); ; {
			_, err := tr.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("the stream is broken: %v", err)
			}
		}
		if _, err := sb.ListFiles(ctx, &sandseav1.ListFilesRequest{Path: "/t"}); err != nil {
			t.Errorf("list: %v", err)
		}
	}
}

// hwm is the most memory that a process of ours had since it was asked to forget.
func hwm(t *testing.T, pid int) (kib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &kib); err == nil {
			return kib
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

func TestAGibibyteGoesBothWaysInFlatMemory(t *testing.T) {
	s := serve(t)
	sb := open(t)
	pid := s.Pid("up")
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil {
		t.Skipf("the high water mark cannot be set back: %v", err)
	}
	const size = 1 << 30
	n := int64(size)
	ctx := within(t, 5*time.Minute)
	if _, err := sb.WriteFile(ctx, &sandseav1.WriteFileHeader{Path: "/big", Size: &n}, io.LimitReader(nothing{}, size)); err != nil {
		t.Fatal(err)
	}
	got := &counter{}
	if _, err := sb.ReadFile(ctx, &sandseav1.ReadFileRequest{Path: "/big"}, got); err != nil || got.n != size {
		t.Errorf("%d bytes, %v", got.n, err)
	}
	got.n = 0
	if _, err := sb.DownloadTar(ctx, &sandseav1.DownloadTarRequest{Path: "/big"}, got); err != nil || got.n < size {
		t.Errorf("%d bytes of a tar stream, %v", got.n, err)
	}
	if most := hwm(t, pid); most > 512<<10 {
		t.Errorf("the server had %d KiB", most)
	}
}

// nothing gives zeros without end.
type nothing struct{}

func (nothing) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// counter counts what is written.
type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}
