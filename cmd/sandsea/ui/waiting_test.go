package ui

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"
)

func TestWaitsAreShownAfterASecond(t *testing.T) {
	for _, tt := range []struct {
		took time.Duration
		want string
	}{
		{900 * time.Millisecond, ""},
		{1100 * time.Millisecond, "sandsea: waiting for a slot, limit 60 s\n"},
		{11 * time.Second, "sandsea: waiting for a slot, limit 60 s\nsandsea: waiting for a slot, 10 s so far, limit 60 s\n"},
		{45 * time.Second, "sandsea: waiting for a slot, limit 60 s\nsandsea: waiting for a slot, 10 s so far, limit 60 s\n" +
			"sandsea: waiting for a slot, 40 s so far, limit 60 s\n"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var errs bytes.Buffer
			done := (&IO{Err: &errs}).Waiting("a slot", time.Minute)
			<-time.After(tt.took)
			done()
			if errs.String() != tt.want {
				t.Errorf("after %s: %q, want %q", tt.took, errs.String(), tt.want)
			}
		})
	}
}

func TestSpansAndTimes(t *testing.T) {
	for d, want := range map[time.Duration]string{
		200 * time.Millisecond: "200 ms", time.Minute: "60 s", 90 * time.Second: "90 s", 5 * time.Minute: "5 min", 301 * time.Second: "301 s",
		2 * time.Hour: "120 min", 24 * time.Hour: "24 h", 1500 * time.Millisecond: "1500 ms",
	} {
		if got := Span(d); got != want {
			t.Errorf("Span(%s) = %q, want %q", d, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		300 * time.Microsecond: "0.3 ms", 48 * time.Millisecond: "48 ms", 8200 * time.Millisecond: "8.2 s", 65 * time.Second: "1:05 min",
	} {
		if got := Took(d); got != want {
			t.Errorf("Took(%s) = %q, want %q", d, got, want)
		}
	}
}

func TestQuietLeavesOutNotesAndProgress(t *testing.T) {
	var errs bytes.Buffer
	s := &IO{Err: &errs, Quiet: true}
	s.Note("a note")
	s.NewProgress().Update("download", 1, 2, "bytes", "", true)
	if errs.Len() > 0 {
		t.Errorf("said %q", errs.String())
	}
}

func TestTextsAreCutInTheMiddle(t *testing.T) {
	for _, tt := range []struct {
		ascii bool
		in    string
		width int
		want  string
	}{
		{false, "debian:bookworm+git,python3", 15, "debian:…python3"},
		{true, "debian:bookworm+git,python3", 15, "debian...ython3"},
		{false, "short", 15, "short"},
		{false, "名前名前名前名前", 9, "名前…名前"},
		{false, "abcdef", 3, "abc"},
	} {
		if got := (&IO{ASCII: tt.ascii}).Middle(tt.in, tt.width); got != tt.want {
			t.Errorf("cut(%q, %d) = %q, want %q", tt.in, tt.width, got, tt.want)
		}
	}
}
