package eventfd

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAnEventIsReadableBetweenSetAndClear(t *testing.T) {
	e, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	readable := func() bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(e.FD()), Events: unix.POLLIN}}, 0)
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Poll([]unix.PollFd{{Fd: int32(e.FD()), Events: unix.POLLIN}}, 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		return n == 1
	}
	for range 2 {
		if readable() {
			t.Fatal("readable before Set")
		}
		for range 3 {
			if err := e.Set(); err != nil {
				t.Fatal(err)
			}
		}
		if !readable() {
			t.Fatal("not readable after Set")
		}
		if err := e.Clear(); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Clear(); err != nil {
		t.Fatal(err)
	}
}
