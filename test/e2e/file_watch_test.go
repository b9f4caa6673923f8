package e2e

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// watched is a watch that a test reads word by word.
type watched struct {
	t    *testing.T
	next func() (*sandseav1.WatchFilesResponse, error, bool)
}

// watch begins one and waits until it is in force.
func watch(t *testing.T, sb *client.Sandbox, req *sandseav1.WatchFilesRequest) *watched {
	t.Helper()
	next, stop := iter.Pull2(sb.WatchFiles(within(t, 60*time.Second), req))
	t.Cleanup(stop)
	w := &watched{t, next}
	if got := w.word(); !strings.HasPrefix(got, "READY ") {
		t.Fatalf("the first word is %q", got)
	}
	return w
}

func (w *watched) word() string {
	w.t.Helper()
	m, err, ok := w.next()
	if err != nil || !ok {
		w.t.Fatalf("the watch ended: %v", err)
	}
	s := strings.TrimPrefix(m.GetChange().String(), "FILE_CHANGE_")
	if m.GetFrom() != "" {
		s += " " + m.GetFrom()
	}
	return s + " " + m.GetPath()
}

func (w *watched) want(words ...string) {
	w.t.Helper()
	for _, want := range words {
		if got := w.word(); got != want {
			w.t.Fatalf("got %q, want %q", got, want)
		}
	}
}

func TestWatchMissesNothingInADirectoryMadeAndFilledAtOnce(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, "mkdir /work")
	w := watch(t, sb, &sandseav1.WatchFilesRequest{Path: "/work", Recursive: true})
	const rounds, files = 20, 10
	sh(t, sb, fmt.Sprintf(
		"for i in $(seq %d); do mkdir -p /work/$i/a/b; for j in $(seq %d); do echo x >/work/$i/a/b/$j; done; done; echo >/work/end",
		rounds, files))
	seen := map[string]int{}
	for {
		word := w.word()
		if word == "CREATED /work/end" {
			break
		}
		if path, ok := strings.CutPrefix(word, "CREATED "); ok {
			seen[path]++
		} else if !strings.HasPrefix(word, "MODIFIED ") {
			t.Errorf("told %q", word)
		}
	}
	if len(seen) != rounds*(3+files) {
		t.Errorf("told of %d paths, want %d", len(seen), rounds*(3+files))
	}
	for path, n := range seen {
		if n != 1 {
			t.Errorf("%s was told %d times", path, n)
		}
	}
	// What lies in a layer of the image is watched too, and a move within is one.
	layers := watch(t, sb, &sandseav1.WatchFilesRequest{Path: "/", Recursive: true})
	sh(t, sb, "echo more >>/etc/passwd; mv /work/end /etc/end")
	layers.want("MODIFIED /etc/passwd", "MOVED /work/end /etc/end")
}

func TestWatchEndsWithWhatItWatchesAndWithItsSandbox(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, "mkdir /work; sleep 1000 </dev/null >/dev/null 2>&1 & cd /work")
	w := watch(t, sb, &sandseav1.WatchFilesRequest{Path: "/work", Recursive: true})
	sh(t, sb, "rmdir /work")
	w.want("REMOVED /work")
	if _, err, ok := w.next(); ok || err != nil {
		t.Errorf("the end: %v", err)
	}
	w = watch(t, sb, &sandseav1.WatchFilesRequest{Path: "/tmp"})
	if err := sb.Stop(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	_, err, _ := w.next()
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Cause == "" {
		t.Errorf("the sandbox has ended: %v", err)
	}
}

func TestWatchObeysRightsAndLimits(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, "mkdir -m 700 /home/closed; mkdir -m 777 /pub")
	first := func(req *sandseav1.WatchFilesRequest) error {
		for _, err := range sb.WatchFiles(within(t, 20*time.Second), req) {
			return err
		}
		return nil
	}
	refusedWith(t, "a closed directory", first(&sandseav1.WatchFilesRequest{Path: "/home/closed", User: "alice"}), syscall.EACCES)
	refusedWith(t, "nothing", first(&sandseav1.WatchFilesRequest{Path: "/none"}), syscall.ENOENT)
	if err := first(&sandseav1.WatchFilesRequest{Path: "/proc/1/root/etc"}); err == nil {
		t.Error("the file helper went through /proc/1/root")
	}
	w := watch(t, sb, &sandseav1.WatchFilesRequest{Path: "/home", User: "alice", Recursive: true})
	w.want("GAP /home/closed")
	for range 31 {
		watch(t, sb, &sandseav1.WatchFilesRequest{Path: "/pub"})
	}
	if err := first(&sandseav1.WatchFilesRequest{Path: "/pub"}); !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("one too many: %v", err)
	}
	// A neighbour has its own.
	watch(t, open(t), &sandseav1.WatchFilesRequest{Path: "/tmp"})
}

func TestAWatchThatIsLeftIsRemoved(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for range 40 { // more than there may be at a time
		ctx, stop := context.WithCancel(within(t, 20*time.Second))
		for m, err := range sb.WatchFiles(ctx, &sandseav1.WatchFilesRequest{Path: "/", Recursive: true}) {
			if err != nil {
				t.Fatal(err)
			}
			if m.GetChange() == sandseav1.FileChange_FILE_CHANGE_READY {
				break
			}
		}
		stop()
	}
}

func TestAStoppedFileHelperHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	sb := open(t)
	if _, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "/tmp/f"}, "x"); err != nil {
		t.Fatal(err)
	}
	stopHelpers := `for p in /proc/[0-9]*; do if grep -q sandsea-files $p/comm 2>/dev/null; then kill -STOP ${p#/proc/} && echo stopped; fi; done`
	if got := sh(t, sb, stopHelpers); !strings.Contains(got, "stopped") {
		t.Skipf("root inside cannot stop a helper: %q", got)
	}
	ctx, stop := context.WithTimeoutCause(t.Context(), 10*time.Second, errors.New("it is held up"))
	defer stop()
	if _, err := sb.Stat(ctx, &sandseav1.StatFileRequest{Path: "/tmp/f"}); err != nil {
		t.Error(err)
	}
}
