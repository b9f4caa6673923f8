package apiserver_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/fakeedge"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

func TestListFiltersAndPages(t *testing.T) {
	h := newHouse(t, 3)
	c := h.admin()
	var ids []string
	for i := range 23 {
		sb, err := c.tryCreate(t.Context(), spec(func(s *pb.SandboxSpec) {
			s.Labels = map[string]string{"n": fmt.Sprint(i), "odd": fmt.Sprint(i%2 == 1)}
		}), "")
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.GetId())
	}
	var got []string
	r := &pb.ListSandboxesRequest{PageSize: 10}
	for pages := 0; ; pages++ {
		l := c.list(t, r)
		if l.GetTotal() != 23 {
			t.Fatalf("total %d", l.GetTotal())
		}
		for _, sb := range l.GetSandboxes() {
			got = append(got, sb.GetId())
		}
		if r.PageToken = l.GetNextPageToken(); r.PageToken == "" {
			if pages != 2 {
				t.Errorf("%d pages", pages+1)
			}
			break
		}
	}
	slices.Reverse(got)
	if !slices.Equal(got, ids) {
		t.Errorf("newest first: got %v, want the reverse of %v", got, ids)
	}
	if l := c.list(t, &pb.ListSandboxesRequest{Labels: map[string]string{"odd": "true"}}); l.GetTotal() != 11 {
		t.Errorf("by label: %d, want 11", l.GetTotal())
	}
	for _, prefix := range []string{ids[3][:8], ids[3][1:8], ids[3]} {
		if l := c.list(t, &pb.ListSandboxesRequest{IdPrefix: prefix}); l.GetTotal() != 1 ||
			l.GetSandboxes()[0].GetId() != ids[3] {
			t.Errorf("by prefix %s: %v", prefix, l)
		}
	}
	// What has ended is shown on demand, with or without its node's memory of it.
	stopped, err := c.sandboxes.Stop(t.Context(), connect.NewRequest(&pb.StopSandboxRequest{Id: ids[0]}))
	if err != nil || stopped.Msg.GetSandbox().GetEnd().GetBy() != "user:admin" {
		t.Fatalf("stop: %v, %v", stopped, err)
	}
	for _, forget := range []bool{false, true} {
		if forget {
			for _, e := range h.edges {
				e.Forget()
				e.Restart()
			}
		}
		until(t, "the end is in the list", func() bool {
			ended := []pb.SandboxState{pb.SandboxState_SANDBOX_STATE_ENDED}
			return c.list(t, &pb.ListSandboxesRequest{}).GetTotal() == 22 &&
				c.list(t, &pb.ListSandboxesRequest{All: true}).GetTotal() == 23 &&
				c.list(t, &pb.ListSandboxesRequest{States: ended}).GetTotal() == 1
		})
	}
}

func TestStopIsIdempotent(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	stop := func(id string) (*pb.Sandbox, error) {
		r, err := c.sandboxes.Stop(t.Context(), connect.NewRequest(&pb.StopSandboxRequest{Id: id}))
		if err != nil {
			return nil, errwire.FromConnect(err)
		}
		return r.Msg.GetSandbox(), nil
	}
	first, err := stop(sb.GetId())
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		h.edges[0].Forget()
		again, err := stop(sb.GetId())
		if err != nil || again.GetEnd().GetCause() != "stopped" ||
			!again.GetEnd().GetAt().AsTime().Equal(first.GetEnd().GetAt().AsTime()) {
			t.Errorf("again: %v, %v", again, err)
		}
	}
	ghost, err := sandbox.Mint(1, strings.NewReader(strings.Repeat("x", 64)))
	if err != nil {
		t.Fatal(err)
	}
	_, err = stop(string(ghost))
	if e := kindIs(t, err,
		errdefs.NotFound); e.Error() != "sandbox "+ghost.Short()+": none in project default. All: sandsea ls --all" {
		t.Errorf("got %v", e)
	}
	nowhere, err := sandbox.Mint(99, strings.NewReader(strings.Repeat("x", 64)))
	if err != nil {
		t.Fatal(err)
	}
	_, err = stop(string(nowhere))
	kindIs(t, err, errdefs.NotFound)
}

func TestEveryCallOnAnEndedSandboxTellsItsCause(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	if _, err := h.edges[0].End(t.Context(), sb.GetId(), "oom", "platform"); err != nil {
		t.Fatal(err)
	}
	h.edges[0].Forget()
	until(t, "the end is known", func() bool {
		return c.list(t, &pb.ListSandboxesRequest{
			States: []pb.SandboxState{pb.SandboxState_SANDBOX_STATE_ENDED},
		}).GetTotal() == 1
	})
	_, err := c.processes.Run(t.Context(), connect.NewRequest(&pb.RunRequest{Id: sb.GetId()}))
	e := kindIs(t, errwire.FromConnect(err), errdefs.FailedPrecondition)
	if e.Cause != "oom" || !strings.HasPrefix(e.Error(), "sandbox "+sb.GetId()[:8]+" ended ") {
		t.Errorf("got %v, cause %q", e, e.Cause)
	}
	got, err := c.get(t, sb.GetId())
	if err != nil || got.GetEnd().GetCause() != "oom" {
		t.Errorf("get: %v, %v", got, err)
	}
}

func TestExtendTTL(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	r, err := c.sandboxes.ExtendTTL(t.Context(), connect.NewRequest(&pb.ExtendTTLRequest{Id: sb.GetId(), TtlMs: 3600_000}))
	if err != nil || time.Until(r.Msg.GetSandbox().GetExpiresAt().AsTime()) < 59*time.Minute {
		t.Errorf("got %v, %v", r, err)
	}
	for _, ms := range []int64{0, -1, 30*24*3600_000 + 1} {
		_, err := c.sandboxes.ExtendTTL(t.Context(), connect.NewRequest(&pb.ExtendTTLRequest{Id: sb.GetId(), TtlMs: ms}))
		kindIs(t, errwire.FromConnect(err), errdefs.Invalid)
	}
}

func TestWatchTellsWhatHappensAndResumes(t *testing.T) {
	h := newHouse(t, 2)
	c := h.admin()
	watch := func(r *pb.WatchSandboxesRequest) (next func() *pb.WatchSandboxesResponse, stop func()) {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		stream, err := c.sandboxes.Watch(ctx, connect.NewRequest(r))
		if err != nil {
			t.Fatal(err)
		}
		return func() *pb.WatchSandboxesResponse {
				if !stream.Receive() {
					t.Fatalf("watch ended: %v", stream.Err())
				}
				return stream.Msg()
			}, func() {
				cancel()
				_ = stream.Close()
			}
	}
	// A foreign cursor is a gap at once, so that the subscription is known to stand.
	next, stop := watch(&pb.WatchSandboxesRequest{Cursor: "other-1"})
	gap := next()
	if !gap.GetGap() || gap.GetSandbox() != nil {
		t.Fatalf("got %v, want a gap", gap)
	}
	sb := c.create(t, "")
	created := next()
	if created.GetWhat() != "running" || created.GetSandbox().GetId() != sb.GetId() || created.GetGap() {
		t.Errorf("got %v", created)
	}
	if _, err := c.sandboxes.Stop(t.Context(), connect.NewRequest(&pb.StopSandboxRequest{Id: sb.GetId()})); err != nil {
		t.Fatal(err)
	}
	if e := next(); e.GetWhat() != "ended" || e.GetSandbox().GetEnd().GetCause() != "stopped" {
		t.Errorf("got %v", e)
	}
	stop()
	next, stop = watch(&pb.WatchSandboxesRequest{Cursor: created.GetCursor()})
	if e := next(); e.GetWhat() != "ended" || e.GetGap() {
		t.Errorf("resumed: got %v", e)
	}
	stop()
	next, stop = watch(&pb.WatchSandboxesRequest{Cursor: gap.GetCursor(), Id: sb.GetId()})
	defer stop()
	if e := next(); e.GetWhat() != "running" {
		t.Errorf("from the gap: got %v", e)
	}
}

func TestStreamsPassInBothDirections(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	run, err := c.processes.Run(t.Context(), connect.NewRequest(&pb.RunRequest{
		Id: sb.GetId(), Command: &pb.Command{Argv: []string{"echo", "hi"}}, Stdin: []byte("in"),
	}))
	if err != nil || string(run.Msg.GetStdout()) != "echo hi\nin" {
		t.Errorf("run: %v, %v", run, err)
	}
	if asked := h.edges[0].Asked(); asked[len(asked)-1] != "default" {
		t.Errorf("projects header %q", asked[len(asked)-1])
	}
	// A reader that goes away ends the node's stream.
	var ended atomic.Bool
	h.edges[0].After(func(call string) error {
		if call == "start ended" {
			ended.Store(true)
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.processes.Start(ctx, connect.NewRequest(&pb.StartRequest{
		Id: sb.GetId(), Command: &pb.Command{Argv: []string{"yes"}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	var total int64
	began := time.Now()
	for total < 64<<20 && stream.Receive() {
		d := stream.Msg().GetEvent().GetData()
		if d != nil && d.GetOffset() != total {
			t.Fatalf("offset %d, want %d", d.GetOffset(), total)
		}
		total += int64(len(d.GetData()))
	}
	t.Logf("%.0f MB/s through the server", float64(total)/1e6/time.Since(began).Seconds())
	cancel()
	_ = stream.Close()
	until(t, "the node's stream ends", ended.Load)
}

func TestBrokenUploadChangesNothing(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	var began, broken atomic.Bool
	h.edges[0].After(func(call string) error {
		switch call {
		case "write began":
			began.Store(true)
		case "write broken":
			broken.Store(true)
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	up := c.files.Write(ctx)
	if err := up.Send(&pb.WriteFileRequest{Header: &pb.WriteFileHeader{Id: sb.GetId(), Path: "/half"}, Data: make([]byte,
		1<<20)}); err != nil {
		t.Fatal(err)
	}
	if err := up.Send(&pb.WriteFileRequest{Data: make([]byte, 1<<20)}); err != nil {
		t.Fatal(err)
	}
	until(t, "the node reads", began.Load)
	cancel()
	conn, err := up.Conn()
	if err != nil {
		t.Fatal(err)
	}
	// The test's own client must not end in good order either.
	t.Cleanup(func() { _ = conn.CloseRequest() })
	_ = conn.CloseResponse()
	until(t, "the node sees a broken stream", broken.Load)
	if _, ok := h.edges[0].File(sb.GetId(), "/half"); ok {
		t.Error("half a file was taken for a whole one")
	}
	empty := c.files.Write(t.Context())
	_, err = empty.CloseAndReceive()
	kindIs(t, errwire.FromConnect(err), errdefs.Invalid)
	headless := c.files.Write(t.Context())
	_ = headless.Send(&pb.WriteFileRequest{Data: []byte("x")})
	_, err = headless.CloseAndReceive()
	kindIs(t, errwire.FromConnect(err), errdefs.Invalid)
	huge := c.files.Write(t.Context())
	_ = huge.Send(&pb.WriteFileRequest{Header: &pb.WriteFileHeader{Id: sb.GetId(), Path: "/f"}, Data: make([]byte, 2<<20)})
	if _, err := huge.CloseAndReceive(); err == nil {
		t.Error("a frame of 2 MiB was taken")
	}
}

func TestPanicIsInternalAndNamesTheRequest(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	h.edges[0].Before(func(_ context.Context, call string) error {
		if call == "run" {
			return errors.New("something odd")
		}
		return nil
	})
	_, err := c.processes.Run(t.Context(), connect.NewRequest(&pb.RunRequest{Id: sb.GetId()}))
	e := kindIs(t, errwire.FromConnect(err), errdefs.Internal)
	if !strings.Contains(e.Error(), "r-") {
		t.Errorf("got %v", e)
	}
}

func TestImages(t *testing.T) {
	h := newHouse(t, 2)
	c := h.admin()
	ctx := t.Context()
	built := &nodev1.Built{
		Name: "debian:bookworm+git", Layers: []*pb.Layer{{Digest: string(digest("deb")), Bytes: 9, Files: 3}},
		Config: &pb.ImageConfig{Env: []string{"PATH=/bin"}},
	}
	for _, e := range h.edges {
		e.Builds(built)
	}
	importImage := func(r *pb.ImportImageRequest) (img *pb.Image, existed bool, stages int, err error) {
		stream, err := c.images.Import(ctx, connect.NewRequest(r))
		if err != nil {
			return nil, false, 0, err
		}
		defer stream.Close()
		for stream.Receive() {
			if stream.Msg().GetProgress() != nil {
				stages++
			} else {
				img, existed = stream.Msg().GetImage(), stream.Msg().GetExisted()
			}
		}
		return img, existed, stages, errwire.FromConnect(stream.Err())
	}
	debian := func(name string) *pb.ImportImageRequest {
		return &pb.ImportImageRequest{
			Source: &pb.ImportImageRequest_Debian{Debian: &pb.DebianSource{Suite: "bookworm"}}, Name: name,
			Config: &pb.ImageConfig{User: "worker"},
		}
	}
	img, existed, stages, err := importImage(debian(""))
	if err != nil || existed || stages == 0 || img.GetName() != "debian:bookworm+git" ||
		img.GetConfig().GetUser() != "worker" {
		t.Fatalf("import: %v, existed %v, %d stages, %v", img, existed, stages, err)
	}
	again, existed, _, err := importImage(debian(""))
	if err != nil || !existed || again.GetDigest() != img.GetDigest() ||
		!again.GetCreatedAt().AsTime().Equal(img.GetCreatedAt().AsTime()) {
		t.Errorf("again: %v, existed %v, %v", again, existed, err)
	}
	// New content under the same name replaces it.
	built2 := &nodev1.Built{Name: built.GetName(), Layers: []*pb.Layer{{Digest: string(digest("deb2"))}}}
	for _, e := range h.edges {
		e.Builds(built2)
	}
	renewed, existed, _, err := importImage(debian(""))
	if err != nil || existed || renewed.GetDigest() == img.GetDigest() {
		t.Errorf("refresh: %v, existed %v, %v", renewed, existed, err)
	}

	got, err := c.images.Get(ctx, connect.NewRequest(&pb.GetImageRequest{Ref: renewed.GetDigest()}))
	if err != nil || got.Msg.GetImage().GetName() != renewed.GetName() {
		t.Errorf("by digest: %v, %v", got, err)
	}
	_, err = c.images.Get(ctx, connect.NewRequest(&pb.GetImageRequest{Ref: "debain"}))
	if e := kindIs(t, errwire.FromConnect(err), errdefs.NotFound); e.Error() !=
		`image "debain": none. Did you mean debian:bookworm+git? All: sandsea image ls` {
		t.Errorf("got %v", e)
	}

	compose := func(name string, toolkits ...string) (*pb.Image, error) {
		r, err := c.images.Compose(ctx, connect.NewRequest(&pb.ComposeImageRequest{
			Name: name, Base: "debian:bookworm+git", Workspace: "ws", Toolkits: toolkits,
		}))
		if err != nil {
			return nil, errwire.FromConnect(err)
		}
		return r.Msg.GetImage(), nil
	}
	env, err := compose("env", "tools")
	if err != nil || len(env.GetLayers()) != 3 || env.GetLayers()[2].GetDigest() != string(digest("tools")) {
		t.Errorf("compose: %v, %v", env, err)
	}
	if same, err := compose("env", "tools"); err != nil || same.GetDigest() != env.GetDigest() {
		t.Errorf("compose again: %v, %v", same, err)
	}
	_, err = compose("env", "go")
	kindIs(t, err, errdefs.AlreadyExists)
	for _, name := range []string{"", "sha256:x", "-a", "a b", "a//b", "../x", "a/../b", "a\x00", strings.Repeat("a",
		257)} {
		_, err := compose(name)
		kindIs(t, err, errdefs.Invalid)
	}

	sb, err := c.tryCreate(ctx, &pb.SandboxSpec{Environment: &pb.Environment{Image: "env"}}, "")
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.images.List(ctx, connect.NewRequest(&pb.ListImagesRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	users := map[string]int64{}
	for _, i := range list.Msg.GetImages() {
		users[i.GetName()] = i.GetUsers()
	}
	if users["env"] != 1 || users["ws"] != 1 || users["py"] != 0 {
		t.Errorf("users: %v", users)
	}
	remove := func(ref string, force bool) error {
		_, err := c.images.Delete(ctx, connect.NewRequest(&pb.DeleteImageRequest{Ref: ref, Force: force}))
		return errwire.FromConnect(err)
	}
	if e := kindIs(t, remove("env", false), errdefs.FailedPrecondition); e.Field != "force" {
		t.Errorf("got %+v", e)
	}
	if err := remove("env", true); err != nil {
		t.Error(err)
	}
	if _, err := c.sandboxes.Stop(ctx, connect.NewRequest(&pb.StopSandboxRequest{Id: sb.GetId()})); err != nil {
		t.Fatal(err)
	}
	if err := remove(renewed.GetDigest(), false); err != nil {
		t.Error(err)
	}
	for _, e := range h.edges {
		if kept := e.Kept(); slices.Contains(kept, string(digest("deb2"))) || !slices.Contains(kept, string(digest("py"))) {
			t.Errorf("collected with %v", kept)
		}
	}
	kindIs(t, remove("env", false), errdefs.NotFound)
}

func TestUploadThenImportOnTheSameNode(t *testing.T) {
	h := newHouse(t, 2)
	c := h.admin()
	for _, e := range h.edges {
		e.Builds(&nodev1.Built{Name: "up", Layers: []*pb.Layer{{Digest: string(digest("up"))}}})
	}
	up := c.images.Upload(t.Context())
	for range 3 {
		if err := up.Send(&pb.UploadImageRequest{Data: make([]byte, 1<<20)}); err != nil {
			t.Fatal(err)
		}
	}
	sent, err := up.CloseAndReceive()
	if err != nil || sent.Msg.GetBytes() != 3<<20 || !strings.HasPrefix(sent.Msg.GetUpload(), "1-") {
		t.Fatalf("upload: %v, %v", sent, err)
	}
	for upload, want := range map[string]errdefs.Kind{
		sent.Msg.GetUpload(): "", "1-none": errdefs.NotFound, "none": errdefs.Invalid, "77-x": errdefs.Unavailable,
		"-": errdefs.Invalid,
	} {
		stream, err := c.images.Import(t.Context(), connect.NewRequest(&pb.ImportImageRequest{
			Source: &pb.ImportImageRequest_Archive{Archive: &pb.ArchiveSource{Upload: upload}},
		}))
		if err != nil {
			t.Fatal(err)
		}
		for stream.Receive() {
		}
		if err := errwire.FromConnect(stream.Err()); errdefs.KindOf(err) != want {
			t.Errorf("%s: got %v, want %q", upload, err, want)
		}
		_ = stream.Close()
	}
}

func TestEqualImportsAreOneAndEndWithTheirLastWatcher(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	h.edges[0].Builds(&nodev1.Built{Name: "one", Layers: []*pb.Layer{{Digest: string(digest("one"))}}})
	var builds, cancelled, joined atomic.Int64
	release := make(chan struct{})
	h.edges[0].Before(func(ctx context.Context, call string) error {
		if call != "build" {
			return nil
		}
		builds.Add(1)
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			cancelled.Add(1)
			return ctx.Err()
		}
	})
	start := func(ctx context.Context) error {
		stream, err := c.images.Import(ctx, connect.NewRequest(&pb.ImportImageRequest{
			Source: &pb.ImportImageRequest_Debian{Debian: &pb.DebianSource{Suite: "bookworm"}},
		}))
		if err != nil {
			return err
		}
		defer stream.Close()
		for first := true; stream.Receive(); first = false {
			if first {
				joined.Add(1)
			}
		}
		return stream.Err()
	}
	// Alone: leaving cancels the build.
	ctx, cancel := context.WithCancel(t.Context())
	alone := make(chan error, 1)
	go func() { alone <- start(ctx) }()
	until(t, "the build runs", func() bool { return builds.Load() == 1 })
	if h.stored(keys.Imports) != 1 {
		t.Error("no sign of the import in the store")
	}
	cancel()
	<-alone
	joined.Store(0)
	until(t, "the build is cancelled", func() bool { return cancelled.Load() == 1 && h.stored(keys.Imports) == 0 })
	// Together: one build for all, and one that leaves disturbs nobody.
	ctx, cancel = context.WithCancel(t.Context())
	var wg sync.WaitGroup
	errs := make([]error, 5)
	for i := range errs {
		wg.Go(func() {
			use := t.Context()
			if i == 0 {
				use = ctx
			}
			errs[i] = start(use)
		})
	}
	until(t, "all watch the build", func() bool { return joined.Load() == 5 && builds.Load() > 1 })
	cancel()
	close(release)
	wg.Wait()
	for _, err := range errs[1:] {
		if err != nil {
			t.Error(err)
		}
	}
	if builds.Load() != 2 {
		t.Errorf("%d builds, want one for all", builds.Load()-1)
	}
	until(t, "no sign is left", func() bool { return h.stored(keys.Imports) == 0 })
}

// buildBlocked lets every build of node 1 wait for release, and counts them.
func buildBlocked(h *house) (builds *atomic.Int64, release chan struct{}) {
	builds, release = new(atomic.Int64), make(chan struct{})
	h.edges[0].Before(func(ctx context.Context, call string) error {
		if call != "build" {
			return nil
		}
		builds.Add(1)
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return builds, release
}

// importDebian imports under a name and waits for the end.
func importDebian(ctx context.Context, c client, name string) (existed bool, err error) {
	stream, err := c.images.Import(ctx, connect.NewRequest(&pb.ImportImageRequest{
		Source: &pb.ImportImageRequest_Debian{Debian: &pb.DebianSource{Suite: "bookworm"}}, Name: name,
	}))
	if err != nil {
		return false, err
	}
	defer stream.Close()
	for stream.Receive() {
		existed = stream.Msg().GetExisted()
	}
	return existed, errwire.FromConnect(stream.Err())
}

func TestADeletionNeitherWaitsForAnImportNorHoldsUpOthers(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	h.edges[0].Builds(&nodev1.Built{Layers: []*pb.Layer{{Digest: string(digest("one"))}}})
	builds, release := buildBlocked(h)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(release)
	begin := func(name string) {
		wg.Go(func() {
			if _, err := importDebian(t.Context(), c, name); err != nil {
				t.Error(err)
			}
		})
	}
	begin("first")
	until(t, "the first import runs", func() bool { return builds.Load() == 1 })
	ctx, stop := context.WithTimeout(t.Context(), limit/2)
	defer stop()
	r, err := c.images.Delete(ctx, connect.NewRequest(&pb.DeleteImageRequest{Ref: "go"}))
	if err != nil || r.Msg.GetFreedBytes() != 0 {
		t.Errorf("delete while an import runs: %v, %v", r, err)
	}
	begin("second")
	until(t, "the second import runs", func() bool { return builds.Load() == 2 })
}

func TestAnImageThatIsDeletedWhileItIsImportedAgainHasItsName(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	h.edges[0].Builds(&nodev1.Built{Layers: []*pb.Layer{{Digest: string(digest("one"))}}})
	if _, err := importDebian(t.Context(), c, "task"); err != nil {
		t.Fatal(err)
	}
	builds, release := buildBlocked(h)
	done := make(chan error, 1)
	go func() {
		existed, err := importDebian(t.Context(), c, "task")
		if existed {
			t.Error("it is said to have been here")
		}
		done <- err
	}()
	until(t, "the import runs", func() bool { return builds.Load() == 1 })
	if _, err := c.images.Delete(t.Context(), connect.NewRequest(&pb.DeleteImageRequest{Ref: "task"})); err != nil {
		t.Error(err)
	}
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if _, err := c.images.Get(t.Context(), connect.NewRequest(&pb.GetImageRequest{Ref: "task"})); err != nil {
		t.Errorf("after its import: %v", err)
	}
}

func TestNodes(t *testing.T) {
	h := newHouse(t, 2, func(c *fakeedge.Config) { c.Lacks = []string{node.FeatureDebian} })
	c := h.admin()
	l, err := c.nodes.List(t.Context(), connect.NewRequest(&pb.ListNodesRequest{}))
	if err != nil || len(l.Msg.GetNodes()) != 2 || l.Msg.GetNodes()[1].GetState() != pb.NodeState_NODE_STATE_READY {
		t.Fatalf("list: %v, %v", l, err)
	}
	n, err := c.nodes.Get(t.Context(), connect.NewRequest(&pb.GetNodeRequest{Name: "n2"}))
	if err != nil || n.Msg.GetNode().GetNumber() != 2 || n.Msg.GetNode().GetKernel() == "" {
		t.Errorf("get: %v, %v", n, err)
	}
	_, err = c.nodes.Get(t.Context(), connect.NewRequest(&pb.GetNodeRequest{Name: "n3"}))
	if e := kindIs(t, errwire.FromConnect(err), errdefs.NotFound); len(e.Near) == 0 {
		t.Errorf("got %+v", e)
	}
	stream, err := c.images.Import(t.Context(), connect.NewRequest(&pb.ImportImageRequest{
		Source: &pb.ImportImageRequest_Debian{Debian: &pb.DebianSource{Suite: "bookworm"}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for stream.Receive() {
	}
	if e := kindIs(t, errwire.FromConnect(stream.Err()), errdefs.FailedPrecondition); e.Feature != node.FeatureDebian {
		t.Errorf("got %+v", e)
	}
}

func TestSweepRemovesWhatIsNoLongerPromised(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	ended, living := c.create(t, "ended"), c.create(t, "living")
	if _, err := c.tryCreate(t.Context(), spec(func(s *pb.SandboxSpec) { s.Job = "j" }), "job"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.sandboxes.Stop(t.Context(), connect.NewRequest(&pb.StopSandboxRequest{Id: ended.GetId()})); err != nil {
		t.Fatal(err)
	}
	until(t, "the end is recorded", func() bool { return h.stored(keys.Ended) == 1 })
	sweep := func(in time.Duration) (sandboxes, createKeys, ends int) {
		t.Helper()
		if err := h.server.Sweep(t.Context(), time.Now().Add(in)); err != nil {
			t.Fatal(err)
		}
		return h.stored(keys.Sandboxes), h.stored(keys.CreateKeys), h.stored(keys.Ended)
	}
	if s, k, e := sweep(23 * time.Hour); s != 3 || k != 3 || e != 1 {
		t.Errorf("after 23 h: %d records, %d keys, %d ends", s, k, e)
	}
	// The keys of what lives, and of a job, stay.
	if s, k, e := sweep(25 * time.Hour); s != 2 || k != 2 || e != 0 {
		t.Errorf("after 25 h: %d records, %d keys, %d ends", s, k, e)
	}
	if again := c.create(t, "living"); again.GetId() != living.GetId() {
		t.Error("the key of a living sandbox was forgotten")
	}
}

// A server that has started while a node is cut off from the store knows nothing of it: its registration has lapsed.
func TestSweepKeepsTheKeysOfSandboxesOfWhichNobodyCanSay(t *testing.T) {
	h := newHouse(t, 1)
	sb := h.admin().create(t, "mine")
	if _, err := h.store.Txn(t.Context(), nil, []store.Op{store.Delete(keys.Node(1))}, nil); err != nil {
		t.Fatal(err)
	}
	h.serve()
	sweep := func() int {
		t.Helper()
		if err := h.server.Sweep(t.Context(), time.Now().Add(25*time.Hour)); err != nil {
			t.Fatal(err)
		}
		return h.stored(keys.CreateKeys)
	}
	if _, _, _, there := h.watcher.Node(1); there {
		t.Fatal("the node is there")
	}
	if n := sweep(); n != 1 {
		t.Fatalf("%d keys while the sandbox may live", n)
	}
	// The record goes a day after the end.
	record := keys.Sandbox(sb.GetProject(), sb.GetId())
	if _, err := h.store.Txn(t.Context(), nil, []store.Op{store.Delete(record)}, nil); err != nil {
		t.Fatal(err)
	}
	if n := sweep(); n != 0 {
		t.Errorf("%d keys after the sandbox's record went", n)
	}
}
