package tty

import (
	"errors"
	"io"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func terminal(t *testing.T) (master, peer *os.File) {
	t.Helper()
	master, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	peer, err = Peer(master)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() })
	return master, peer
}

func TestBothEndsOfATerminalTalk(t *testing.T) {
	master, peer := terminal(t)
	if err := MakeRaw(peer); err != nil {
		t.Fatal(err)
	}
	if ready, err := Readable(master); err != nil || ready {
		t.Errorf("a new terminal is readable: %v, %v", ready, err)
	}
	buf := make([]byte, 16)
	if _, err := peer.WriteString("out\n\x03"); err != nil {
		t.Fatal(err)
	}
	if n, err := master.Read(buf); err != nil || string(buf[:n]) != "out\n\x03" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	if _, err := master.WriteString("in\x04"); err != nil {
		t.Fatal(err)
	}
	if n, err := peer.Read(buf); err != nil || string(buf[:n]) != "in\x04" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	peer.Close()
	if n, err := master.Read(buf); !errors.Is(err, syscall.EIO) {
		t.Errorf("at the end: %d, %v", n, err)
	}
	if ready, err := Readable(master); err != nil || !ready {
		t.Errorf("the end does not show: %v, %v", ready, err)
	}
}

func TestTheSizeIsWhatWasSetLast(t *testing.T) {
	master, peer := terminal(t)
	for _, want := range []Size{{80, 24}, {1, 1}, {65535, 65535}} {
		if err := SetSize(master, want); err != nil {
			t.Fatal(err)
		}
		for _, f := range []*os.File{master, peer} {
			if got, err := GetSize(f); err != nil || got != want {
				t.Errorf("size %v, %v, want %v", got, err, want)
			}
		}
	}
}

func TestOnlyAMasterIsTakenForOne(t *testing.T) {
	master, peer := terminal(t)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	reads, err := os.OpenFile("/dev/ptmx", os.O_RDONLY|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reads.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	for name, f := range map[string]*os.File{"its peer": peer, "a device": null, "a pipe": w, "one to read only": reads} {
		if err := CheckMaster(int(f.Fd())); err == nil {
			t.Errorf("%s is taken for a master", name)
		}
	}
	dup, err := Duplicate(master)
	if err != nil {
		t.Fatal(err)
	}
	own, err := Master(dup)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	peer.Close()
	if _, err := io.ReadAll(own); !errors.Is(err, syscall.EIO) {
		t.Errorf("the duplicate is of another terminal: %v", err)
	}
}
