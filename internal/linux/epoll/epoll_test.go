package epoll

import (
	"os"
	"testing"
)

func TestReadyDescriptorsComeWithTheirTokens(t *testing.T) {
	p, err := New(8)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	fd := int(r.Fd())
	const token = 0xfedcba9876543210
	if err := p.Add(fd, In, token); err != nil {
		t.Fatal(err)
	}
	if evs, err := p.Wait(0); err != nil || len(evs) != 0 {
		t.Fatalf("idle: %v, %v", evs, err)
	}
	if _, err := w.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	evs, err := p.Wait(-1)
	if err != nil || len(evs) != 1 || evs[0].Token != token || evs[0].Ready&In == 0 {
		t.Fatalf("readable: %+v, %v", evs, err)
	}
	if err := p.Mod(fd, 0, token); err != nil {
		t.Fatal(err)
	}
	if evs, err := p.Wait(0); err != nil || len(evs) != 0 {
		t.Fatalf("not waited for: %v, %v", evs, err)
	}
	w.Close()
	if evs, err := p.Wait(-1); err != nil || len(evs) != 1 || evs[0].Ready&Hup == 0 {
		t.Fatalf("hung up: %+v, %v", evs, err)
	}
	for range 2 {
		if err := p.Del(fd); err != nil {
			t.Fatal(err)
		}
	}
	if evs, err := p.Wait(0); err != nil || len(evs) != 0 {
		t.Fatalf("deleted: %v, %v", evs, err)
	}
}
