package attacks

import (
	"context"
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

// Calls for a user go where that user may, whatever is swapped under the path meanwhile.
func TestChangesAndWatchesFollowNoSwap(t *testing.T) {
	h := attacked(t)
	sb := h.open(t)
	sh(t, sb, "mkdir -m 700 /secret; echo s >/secret/key; chmod 600 /secret/key; mkdir -m 777 /pub; echo root >/etc/target")
	swap := client.Shell("cd /pub; while :; do mkdir x; echo >x/target; rm -r x; ln -s /etc x; rm x; ln -s /secret x; rm x; done")
	swap.User = "alice"
	begin(t, sb, swap)
	begin(t, sb, client.Shell("while :; do echo >/secret/told; rm /secret/told; done"))

	ctx, done := context.WithTimeoutCause(t.Context(), 5*time.Second, errors.New("long enough"))
	defer done()
	told := make(chan error, 1)
	go func() {
		for {
			for m, err := range sb.WatchFiles(ctx, &sandseav1.WatchFilesRequest{Path: "/pub", User: "alice", Recursive: true}) {
				if err != nil {
					break
				}
				if strings.HasSuffix(m.GetPath(), "/told") || strings.HasSuffix(m.GetPath(), "/key") {
					told <- fmt.Errorf("alice is told of %s", m.GetPath())
					return
				}
			}
			if ctx.Err() != nil {
				told <- nil
				return
			}
		}
	}()
	mode, at := uint32(0o777), timestamppb.New(time.Unix(1, 0))
	for ctx.Err() == nil {
		for _, path := range []string{"/pub/x/target", "/pub/x/key", "/pub/x"} {
			_, _ = sb.ChangeFile(ctx, &sandseav1.ChangeFileRequest{Path: path, User: "alice", Mode: &mode, ModifiedAt: at})
			_, _ = sb.ChangeFile(ctx, &sandseav1.ChangeFileRequest{Path: path, User: "alice", NoFollow: true, ModifiedAt: at})
			_, _ = sb.MakeLink(ctx, &sandseav1.MakeLinkRequest{Path: path + "2", Target: "/secret", User: "alice"})
		}
	}
	if err := <-told; err != nil {
		t.Error(err)
	}
	want := "700 0\n600 0\n644 0\n755 0\n"
	if got := sh(t, sb, "stat -c '%a %u' /secret /secret/key /etc/target /etc; touch -d @1 /ref; "+
		"for f in /secret /secret/key /etc/target; do test $f -nt /ref || echo $f is old; done; ls /etc | grep target2"+
		"; ls /secret | grep key2; :"); got != want {
		t.Errorf("after the swaps: %q, want %q", got, want)
	}
}

// The links of /proc are nobody's way out, of none of the calls.
func TestFileCallsDoNotGoThroughTheLinksOfProc(t *testing.T) {
	h := attacked(t)
	sb := h.open(t)
	ctx := within(t)
	mode := uint32(0o777)
	for _, path := range []string{"/proc/1/root/etc/passwd", "/proc/self/root/tmp", "/proc/self/cwd/etc", "/proc/self/fd/0", "/proc/1/exe"} {
		_, change := sb.ChangeFile(ctx, &sandseav1.ChangeFileRequest{Path: path, Mode: &mode})
		_, link := sb.MakeLink(ctx, &sandseav1.MakeLinkRequest{Path: path + "/x", Target: "y"})
		var watch error
		for _, err := range sb.WatchFiles(ctx, &sandseav1.WatchFilesRequest{Path: path, Recursive: true}) {
			watch = err
			break
		}
		read, err := sb.ReadFiles(ctx, &sandseav1.ReadBatchRequest{Paths: []string{path}})
		if err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{
			"change": change, "link": link, "watch": watch, "read": client.FileError(read[0]),
		} {
			if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Errno == 0 || syscall.Errno(e.Errno) == syscall.EIO {
				t.Errorf("%s %s: %v", what, path, err)
			}
		}
	}
	h.isWell(t)
}

// What one sandbox watches is taken from no other's share.
func TestWatchesOfOneAreNotTheOthers(t *testing.T) {
	h := attacked(t)
	room := func(s *sandseav1.SandboxSpec) { s.Limits.OpenFiles = 4096 }
	sb, other := h.open(t, room), h.open(t)
	said(t, sb, begin(t, sb, client.Argv("/bin/attack", "instances", "and hold")), "instances")
	first := func(sb *client.Sandbox) error {
		for _, err := range sb.WatchFiles(within(t), &sandseav1.WatchFilesRequest{Path: "/tmp"}) {
			return err
		}
		return nil
	}
	err := first(sb)
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Exhausted || e.Limit != "fs.inotify.max_user_instances" {
		t.Errorf("without an instance left: %v", err)
	}
	if err := first(other); err != nil {
		t.Errorf("a neighbour: %v", err)
	}
}
