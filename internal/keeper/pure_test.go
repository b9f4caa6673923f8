package keeper

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/internal/record"
)

// TestClocksCountActiveTimeOnly runs on synctest's clock: exact to the nanosecond.
func TestClocksCountActiveTimeOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		var c clock
		check := func(when string, left, due time.Duration, runs bool) {
			t.Helper()
			if got := c.remaining(time.Now()); got != left {
				t.Errorf("%s: %v left, want %v", when, got, left)
			}
			at, ok := c.due()
			if ok != runs || (ok && at.Sub(begun) != due) {
				t.Errorf("%s: due after %v, %v; want %v, %v", when, at.Sub(begun), ok, due, runs)
			}
		}
		check("never armed", 0, 0, false)
		c.arm(time.Minute, time.Now(), false)
		check("armed", time.Minute, time.Minute, true)
		time.Sleep(10 * time.Second)
		check("after 10 s", 50*time.Second, time.Minute, true)
		c.suspend(time.Now())
		time.Sleep(time.Hour)
		c.suspend(time.Now())
		check("suspended for an hour", 50*time.Second, 0, false)
		c.resume(time.Now())
		check("resumed", 50*time.Second, time.Hour+time.Minute, true)
		time.Sleep(20 * time.Second)
		c.resume(time.Now())
		check("resumed again", 30*time.Second, time.Hour+time.Minute, true)
		c.suspend(time.Now())
		c.arm(5*time.Second, time.Now(), true)
		time.Sleep(time.Second)
		check("armed anew while suspended", 5*time.Second, 0, false)
		c.resume(time.Now())
		time.Sleep(time.Minute)
		check("long due", 0, time.Since(begun)-55*time.Second, true)
		c.suspend(time.Now())
		c.resume(time.Now())
		check("due while suspended stays due", 0, time.Since(begun), true)
		c.arm(0, time.Now(), false)
		check("disarmed", 0, 0, false)
	})
}

func TestDeadlinesComeInOrder(t *testing.T) {
	var d deadlines
	now := time.Now()
	entries := make([]*deadline, 100)
	for i := range entries {
		entries[i] = &deadline{key: Key{Number: int64(i)}, index: -1}
		d.set(entries[i], now.Add(time.Duration(i*37%100)*time.Second))
	}
	d.remove(entries[3])
	d.remove(entries[3])
	d.set(entries[4], now.Add(-time.Second))
	if got := d.next(now); got != entries[4] {
		t.Fatalf("first is %v", got)
	}
	last := now.Add(-time.Hour)
	n := 0
	for e := d.next(now.Add(time.Hour)); e != nil; e = d.next(now.Add(time.Hour)) {
		if e.at.Before(last) || e == entries[3] {
			t.Fatalf("%v after %v", e.at, last)
		}
		last = e.at
		d.remove(e)
		n++
	}
	if n != 99 {
		t.Errorf("%d entries", n)
	}
}

func TestMessagesComeOutAsTheyWentIn(t *testing.T) {
	decode := func(b []byte) (any, error) {
		k, _, r := open(b)
		switch k {
		case kHello:
			return decodeHello(r)
		case kHold:
			return decodeSandbox(r)
		case kRecord:
			return decodeExec(r)
		case kRearm:
			return decodeKey(r)
		case kReply:
			return decodeReply(r)
		default:
			return decodeEvent(r)
		}
	}
	at := time.Unix(0, 1234567890123456789)
	for _, m := range []struct {
		msg any
		b   []byte
	}{
		{hello{7, "data", 3}, hello{7, "data", 3}.encode(kHello)},
		{sandboxMsg{id: "s1"}, sandboxMsg{id: "s1"}.encode(kHold, 1)},
		{
			sandboxMsg{"s1", at, 5, true, true, [3]bool{true, false, true}},
			sandboxMsg{"s1", at, 5, true, true, [3]bool{true, false, true}}.encode(kHold, 1),
		},
		{execMsg{key: Key{"s1", 1}}, execMsg{key: Key{"s1", 1}}.encode(kRecord, 1)},
		{fullExec(), fullExec().encode(kRecord, 1)},
		{
			keyMsg{Key{"s1", 2}, at, 3, record.Stderr, record.Range{From: 4, To: 5}},
			keyMsg{Key{"s1", 2}, at, 3, record.Stderr, record.Range{From: 4, To: 5}}.encode(kRearm, 1),
		},
		{reply{"invalid", "o", "m"}, reply{"invalid", "o", "m"}.encode(1)},
		{Event{1, Fired, Key{"s1", 0}, 2, 3}, encodeEvent(Event{1, Fired, Key{"s1", 0}, 2, 3})},
	} {
		got, err := decode(m.b)
		if err != nil || !reflect.DeepEqual(got, m.msg) {
			t.Errorf("got %+v, %v; want %+v", got, err, m.msg)
		}
		// A later version adds fields at the end.
		if got, err := decode(append(m.b, 1, 2, 3, 4)); err != nil || !reflect.DeepEqual(got, m.msg) {
			t.Errorf("with more at the end: %+v, %v; want %+v", got, err, m.msg)
		}
	}
}

func fullExec() execMsg {
	return execMsg{
		Key{"s1", 1 << 50},
		record.Caps{Head: 1, Tail: 2},
		3, true,
		[]streamMsg{{1, true, []record.Range{{From: 4, To: 5}}, false}, {2, false, nil, true}},
		true, false,
		7,
	}
}

func FuzzMessages(f *testing.F) {
	f.Add(fullExec().encode(kRecord, 1))
	f.Add(sandboxMsg{id: "s1"}.encode(kHold, 1))
	f.Add(encodeEvent(Event{1, Fired, Key{"s1", 0}, 2, 3}))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, decode := range []func(*reader) error{
			func(r *reader) error { _, err := decodeHello(r); return err },
			func(r *reader) error { m, err := decodeSandbox(r); return worth(err, m.fileCount() > 3) },
			func(r *reader) error {
				m, err := decodeExec(r)
				if err == nil {
					_, _, again := open(m.encode(kRecord, 1))
					if n, err := decodeExec(again); err != nil || !reflect.DeepEqual(m, n) {
						t.Errorf("%+v became %+v, %v", m, n, err)
					}
				}
				return worth(err, m.fileCount() > 2*maxStreams+2)
			},
			func(r *reader) error { _, err := decodeKey(r); return err },
			func(r *reader) error { _, err := decodeReply(r); return err },
			func(r *reader) error { _, err := decodeEvent(r); return err },
		} {
			_, _, r := open(b)
			if err := decode(r); errors.Is(err, errWorthless) {
				t.Error(err)
			}
		}
	})
}

var errWorthless = errors.New("a bound was passed")

func worth(err error, bad bool) error {
	if err == nil && bad {
		return errWorthless
	}
	return err
}

func TestTheIndexRemembersWhatIsNotForgotten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keeper.index")
	reopen := func(old *index, boot, data string) *index {
		t.Helper()
		if old != nil {
			if err := old.close(); err != nil {
				t.Fatal(err)
			}
		}
		x, err := openIndex(path, boot, data, nil)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	x := reopen(nil, "boot", "data")
	if _, err := openIndex(path, "boot", "data", nil); !errors.Is(err, ErrRunning) {
		t.Errorf("a second holder: %v", err)
	}
	for i := range int64(3) {
		if err := errors.Join(x.add(Fired, Key{"s1", i}), x.add(Overflow, Key{"s2", i})); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(x.forget(Key{"s1", 1}), x.forget(Key{"s3", 1})); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time from the file as compacted
		x = reopen(x, "boot", "data")
		for i := range int64(3) {
			if got := x.has(Fired, Key{"s1", i}); got != (i != 1) {
				t.Errorf("s1 %d: %v", i, got)
			}
			if !x.has(Overflow, Key{"s2", i}) || x.has(Fired, Key{"s2", i}) {
				t.Errorf("s2 %d", i)
			}
		}
	}
	// A long life does not make a long file.
	for i := range int64(60000) {
		if err := errors.Join(x.add(Fired, Key{"s9", i}), x.forget(Key{"s9", i})); err != nil {
			t.Fatal(err)
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Size() > compactAt+1000 {
		t.Errorf("%d bytes, %v", fi.Size(), err)
	}
	x = reopen(x, "boot", "data")
	if len(x.live) != 5 {
		t.Errorf("%d marks", len(x.live))
	}
	for _, other := range [][2]string{{"later boot", "data"}, {"later boot", "other"}} {
		x = reopen(x, other[0], other[1])
		if len(x.live) != 0 {
			t.Errorf("%v: %d marks of another time", other, len(x.live))
		}
		if err := x.add(Fired, Key{"s1", 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := x.close(); err != nil {
		t.Fatal(err)
	}
}

func FuzzIndex(f *testing.F) {
	const head = "sandsea-keeper 1 b d\n"
	f.Add([]byte(head + "fired s1 1\noverflow s2 0\ngone s1 1\nfired s3"))
	f.Fuzz(func(t *testing.T, b []byte) {
		live := parseIndex(b, head)
		again := head
		for m := range live {
			if m.key.Number < 0 || m.key.Sandbox == "" {
				t.Fatalf("mark %+v", m)
			}
			again += fmt.Sprintf("%s %s %d\n", m.kind, m.key.Sandbox, m.key.Number)
		}
		if got := parseIndex([]byte(again), head); len(got) != len(live) {
			t.Errorf("%d marks became %d", len(live), len(got))
		}
	})
}
