package flowlog

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

func store(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func read(t testing.TB, dir, sandbox string, from int64) []*sandseav1.NetworkEvent {
	t.Helper()
	events, next, missing, err := Read(dir, sandbox, from, 1<<20)
	if err != nil || missing != 0 || next != from+int64(len(events)) {
		t.Fatalf("read %d events from %d: next %d, %d missing, %v", len(events), from, next, missing, err)
	}
	for i, e := range events {
		if e.GetSeq() != from+int64(i) {
			t.Fatalf("event %d has the number %d", from+int64(i), e.GetSeq())
		}
	}
	return events
}

// brief is an event on one line.
func brief(events []*sandseav1.NetworkEvent) (out []string) {
	for _, e := range events {
		s := fmt.Sprintf("%s x%d", e.GetName(), e.GetCount())
		if e.GetError() != "" {
			s += " " + e.GetError()
		}
		out = append(out, s)
	}
	return out
}

func dns(name string) Event {
	return Event{Phase: "agent", Kind: DNS, Denied: true, Rule: "default reject", Name: name, Protocol: "dns", Source: "REFUSED"}
}

func TestAnEventIsReadAsItWasAdded(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir)
	at := time.Date(2026, 11, 29, 14, 2, 11, 500, time.UTC)
	s.Add("s1", Event{
		At: at, Phase: "agent", Kind: Artefact, Rule: "service pypi", Service: "pypi", Name: "flask", Version: "3.0.3",
		Address: netip.MustParseAddr("192.0.2.7"), Port: 443, Protocol: "file", Sent: 300, Received: 98 << 10, Duration: 1500 * time.Microsecond,
		Source: "cache", Digest: strings.Repeat("ab", 32), Error: "cut short",
	})
	s.Add("s1", Event{At: at, Kind: Connection, Denied: true, Name: "evil\xff.example", Rule: strings.Repeat("r", 2000), Count: 7})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	want := []*sandseav1.NetworkEvent{
		{
			Seq: 0, At: timestamppb.New(at), Phase: "agent", Kind: Artefact, Rule: "service pypi", Service: "pypi", Name: "flask",
			Version: "3.0.3", Address: "192.0.2.7", Port: 443, Protocol: "file", SentBytes: 300, ReceivedBytes: 98 << 10,
			DurationUs: 1500, Source: "cache", Digest: strings.Repeat("ab", 32), Count: 1, Error: "cut short",
		},
		{
			Seq: 1, At: timestamppb.New(at), Kind: Connection, Denied: true, Name: "evil\uFFFD.example", Rule: strings.Repeat("r", mostText),
			Count: 7,
		},
	}
	if diff := cmp.Diff(want, read(t, dir, "s1", 0), protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

func TestEqualEventsAreFolded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := store(t, dir)
		began := time.Now()
		add := func(name string, n int) {
			for range n {
				e := dns(name)
				e.Sent, e.Duration = 40, time.Since(began)
				s.Add("s1", e)
			}
			synctest.Wait()
		}
		add("a.example", 1)
		add("b.example", 1)
		if got := brief(read(t, dir, "s1", 0)); !slices.Equal(got, []string{"a.example x1", "b.example x1"}) {
			t.Fatalf("at once: %v", got)
		}
		add("a.example", 4)
		time.Sleep(3 * time.Second)
		add("a.example", 5)
		if got := read(t, dir, "s1", 2); len(got) > 0 {
			t.Fatalf("too soon: %v", brief(got))
		}
		time.Sleep(Window - 3*time.Second)
		synctest.Wait()
		got := read(t, dir, "s1", 2)
		if !slices.Equal(brief(got), []string{"a.example x9"}) {
			t.Fatalf("after ten seconds: %v", brief(got))
		}
		if e := got[0]; e.GetSentBytes() != 9*40 || e.GetDurationUs() != 3e6 || !e.GetAt().AsTime().Equal(began) {
			t.Errorf("the repeats: %v", e)
		}
		// Those that go on are told every ten seconds; those that come again later are told at once.
		add("a.example", 2)
		add("b.example", 1)
		if got := brief(read(t, dir, "s1", 3)); !slices.Equal(got, []string{"b.example x1"}) {
			t.Fatalf("later: %v", got)
		}
		time.Sleep(2 * Window)
		synctest.Wait()
		if got := brief(read(t, dir, "s1", 4)); !slices.Equal(got, []string{"a.example x2"}) {
			t.Fatalf("the end: %v", got)
		}
		if st := s.Stats(); st != (Stats{Added: 14, Folded: 11}) || s.folds != 0 {
			t.Errorf("%+v, %d folds", st, s.folds)
		}
	})
}

func TestWhatDiffersIsNotFolded(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir)
	base := Event{Kind: Connection, Name: "a.example", Port: 443}
	for _, change := range []func(*Event){
		func(*Event) {}, func(e *Event) { e.Phase = "grade" }, func(e *Event) { e.Kind = DNS }, func(e *Event) { e.Denied = true },
		func(e *Event) { e.Rule = "r" }, func(e *Event) { e.Service = "npm" }, func(e *Event) { e.Name = "b" },
		func(e *Event) { e.Version = "1" }, func(e *Event) { e.Address = netip.MustParseAddr("::1") }, func(e *Event) { e.Port = 80 },
		func(e *Event) { e.Protocol = "tls" }, func(e *Event) { e.Source = "cache" }, func(e *Event) { e.Digest = "00" },
		func(e *Event) { e.Error = "reset" },
	} {
		e := base
		change(&e)
		s.Add("s1", e)
	}
	s.Add("s2", base)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if a, b := read(t, dir, "s1", 0), read(t, dir, "s2", 0); len(a) != 14 || len(b) != 1 {
		t.Errorf("%d and %d events", len(a), len(b))
	}
}

func TestTooManyDifferentEventsAreCountedWithoutNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := store(t, dir)
		const n = burst + 1000
		for i := range n {
			s.Add("s1", dns(fmt.Sprintf("%d.example", i)))
			if i%1000 == 0 {
				synctest.Wait()
			}
		}
		s.Add("s2", dns("quiet.example"))
		s.Add("s1", dns("0.example")) // one that is known is still told apart
		s.Forget("s1")
		events := read(t, dir, "s1", 0)
		var total int64
		for _, e := range events {
			total += e.GetCount()
		}
		last := brief(events[burst:])
		slices.Sort(last)
		if want := []string{" x1000 " + errTooMany, "0.example x1"}; total != n+1 || !slices.Equal(last, want) {
			t.Errorf("%d events, then %v; want %d and %v", total, last, n+1, want)
		}
		if got := brief(read(t, dir, "s2", 0)); !slices.Equal(got, []string{"quiet.example x1"}) {
			t.Errorf("of the other: %v", got)
		}
	})
}

// A sandbox that fills its log with long names must not be able to push out, within the hour, what it did before.
func TestLongNamesDoNotWashALogAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := store(t, dir)
		s.Add("s1", dns("it.example"))
		noise := rand.New(rand.NewPCG(1, 2))
		long := func() string { // nothing that could be packed
			b := make([]byte, mostText*3/4)
			for i := range b {
				b[i] = byte(noise.Uint32())
			}
			return base64.StdEncoding.EncodeToString(b)
		}
		for range 3600 {
			for range perSecond {
				e := dns(long())
				e.Version, e.Error = long(), long()
				s.Add("s1", e)
			}
			time.Sleep(time.Second)
		}
		synctest.Wait()
		first, _, missing, err := Read(dir, "s1", 0, 1)
		if err != nil || missing != 0 || first[0].GetName() != "it.example" {
			t.Errorf("%v, %d missing, %v", brief(first), missing, err)
		}
	})
}

// Noise of many sandboxes must not cost another one the names in its log.
func TestTheNoiseOfManyHidesNothingOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := store(t, dir)
		for box := range mostFolds/burst + 1 {
			for i := range burst {
				s.Add(fmt.Sprintf("noisy%d", box), dns(fmt.Sprintf("%d.example", i)))
			}
		}
		s.Add("quiet", dns("bypass.example"))
		synctest.Wait()
		if got := brief(read(t, dir, "quiet", 0)); !slices.Equal(got, []string{"bypass.example x1"}) {
			t.Errorf("%q", got)
		}
	})
}

func TestALogGoesOnWithTheNextNumber(t *testing.T) {
	dir := t.TempDir()
	for i := range 3 {
		s := store(t, dir)
		for j := range 5 {
			s.Add("s1", dns(fmt.Sprintf("%d.example", 5*i+j)))
			s.Add("s1", dns(fmt.Sprintf("%d.example", 5*i)))
		}
		if i == 1 {
			s.Forget("s1")
			s.Forget("s1")
		}
		if err := errors.Join(s.Close(), s.Close()); err != nil {
			t.Fatal(err)
		}
		s.Add("s1", dns("late.example"))
		if st := s.Stats(); st.Added != 11 || st.Folded != 5 || st.Lost != 1 {
			t.Errorf("%+v", st)
		}
	}
	var want []string
	for i := range 3 {
		for j := range 5 {
			want = append(want, fmt.Sprintf("%d.example x1", 5*i+j))
		}
		want = append(want, fmt.Sprintf("%d.example x5", 5*i))
	}
	if diff := cmp.Diff(want, brief(read(t, dir, "s1", 0))); diff != "" {
		t.Error(diff)
	}
}

func TestWhatCouldNotBeWrittenIsTold(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir)
	block := filepath.Join(dir, "s1") // a file where its directory should be
	if err := os.WriteFile(block, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		s.Add("s1", dns(fmt.Sprintf("%d.example", i)))
	}
	wait.Until(t, 10*time.Second, func() bool { return s.Stats().Lost == 4 }, "four are lost")
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	s.Add("s1", dns("4.example"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	want := []string{" x4 events were not written: not a directory", "4.example x1"}
	if diff := cmp.Diff(want, brief(read(t, dir, "s1", 0))); diff != "" {
		t.Error(diff)
	}
}

func TestFollowGoesOnUntilTheEnd(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir)
	ended := make(chan struct{})
	got := make(chan string, 100)
	go func() {
		defer close(got)
		next := int64(0)
		for b, err := range Follow(t.Context(), dir, "s1", 0, ended) {
			if err != nil || b.Missing != 0 {
				got <- fmt.Sprint(err, b.Missing)
				return
			}
			for _, e := range b.Events {
				if e.GetSeq() != next {
					got <- fmt.Sprint("number ", e.GetSeq())
				}
				next++
				got <- e.GetName()
			}
			if b.Next != next {
				got <- fmt.Sprint("next ", b.Next)
			}
		}
	}()
	for i := range 3 { // each is seen before the next is there
		name := fmt.Sprintf("%d.example", i)
		s.Add("s1", dns(name))
		select {
		case seen := <-got:
			if seen != name {
				t.Fatalf("got %s, want %s", seen, name)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%s was not seen", name)
		}
	}
	s.Add("s1", dns("2.example"))
	s.Add("s1", dns("last.example"))
	s.Forget("s1")
	close(ended)
	var rest []string
	for seen := range got {
		rest = append(rest, seen)
	}
	if want := []string{"last.example", "2.example"}; !slices.Equal(rest, want) {
		t.Errorf("the rest is %v, want %v", rest, want)
	}
}

func TestFollowEndsWithItsContext(t *testing.T) {
	ctx, stop := context.WithCancelCause(t.Context())
	errGone := errors.New("gone")
	stop(errGone)
	n := 0
	for _, err := range Follow(ctx, t.TempDir(), "s1", 0, nil) {
		if n++; !errors.Is(err, errGone) {
			t.Errorf("got %v", err)
		}
	}
	if n != 1 {
		t.Errorf("%d answers", n)
	}
}

func TestMissingEventsAreCounted(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir)
	for i := range 10 {
		s.Add("s1", dns(fmt.Sprintf("%d.example", i)))
		if i == 4 {
			s.Forget("s1")
		}
	}
	s.Forget("s1")
	wait.Until(t, 10*time.Second, func() bool { return len(segments(t, dir, "s1")) == 2 }, "packed")
	if err := os.Remove(filepath.Join(dir, "s1", segments(t, dir, "s1")[0])); err != nil {
		t.Fatal(err)
	}
	events, next, missing, err := Read(dir, "s1", 2, 100)
	if err != nil || next != 10 || missing != 3 || len(events) != 5 || events[0].GetSeq() != 5 {
		t.Errorf("%v, next %d, %d missing, %v", brief(events), next, missing, err)
	}
	events, next, missing, err = Read(dir, "s1", 6, 2)
	if err != nil || next != 8 || missing != 0 || len(events) != 2 {
		t.Errorf("%v, next %d, %d missing, %v", brief(events), next, missing, err)
	}
}

func segments(t *testing.T, dir, sandbox string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, sandbox))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".seg") {
			out = append(out, e.Name())
		}
	}
	return out
}

func TestASandboxWithoutALogHasNoEvents(t *testing.T) {
	dir := t.TempDir()
	if events := read(t, dir, "s1", 0); len(events) > 0 {
		t.Error(brief(events))
	}
	if err := errors.Join(Remove(dir, "s1"), Remove(filepath.Join(dir, "none"), "s1")); err != nil {
		t.Error(err)
	}
}

func TestRemoveTakesOneLog(t *testing.T) {
	dir := t.TempDir()
	s := store(t, dir)
	s.Add("s1", dns("a.example"))
	s.Add("s2", dns("a.example"))
	s.Forget("s1")
	s.Forget("s2")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Remove(dir, "s1"); err != nil {
		t.Fatal(err)
	}
	if a, b := read(t, dir, "s1", 0), read(t, dir, "s2", 0); len(a) != 0 || len(b) != 1 {
		t.Errorf("%d and %d are left", len(a), len(b))
	}
	for _, bad := range []string{"", ".", "..", "../x", "a/b", "/etc"} {
		if err := Remove(dir, bad); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("remove %q: %v", bad, err)
		}
		if _, _, _, err := Read(dir, bad, 0, 1); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("read %q: %v", bad, err)
		}
	}
}

// TestAnEventIsSmall holds the figure that the format aims at.
func TestAnEventIsSmall(t *testing.T) {
	e := Event{
		At: time.Date(2026, 11, 29, 14, 2, 11, 123456789, time.UTC), Phase: "agent", Kind: Connection, Rule: "domain example.org",
		Name: "example.org", Address: netip.MustParseAddr("192.0.2.77"), Port: 443, Protocol: "tls", Sent: 1420, Received: 123456,
		Duration: 1234567 * time.Microsecond, Count: 1,
	}
	b, err := e.encode(nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(b)+8 > 100 {
		t.Errorf("%d bytes", len(b)+8)
	}
	t.Logf("%d bytes; as JSON %d", len(b)+8, len(protojson.Format(&sandseav1.NetworkEvent{Name: e.Name, Rule: e.Rule})))
}

func BenchmarkAdd(b *testing.B) {
	s := store(b, b.TempDir())
	names := make([]string, 1<<16)
	for i := range names {
		names[i] = fmt.Sprintf("%d.example", i)
	}
	e := Event{Phase: "agent", Kind: DNS, Rule: "domain *.example", Protocol: "dns", Source: "NOERROR"}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		e.Name = names[i%16]
		s.Add(names[i/16%3200], e)
	}
}

func BenchmarkWrite(b *testing.B) {
	s := store(b, b.TempDir())
	bx := &box{id: "s1"}
	e := Event{
		At: time.Now(), Phase: "agent", Kind: Connection, Rule: "domain example.org", Name: "example.org",
		Address: netip.MustParseAddr("192.0.2.77"), Port: 443, Protocol: "tls", Sent: 1420, Received: 123456, Count: 1,
	}
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if buf, err = s.append(bx, &e, buf[:0]); err != nil {
			b.Fatal(err)
		}
	}
}
