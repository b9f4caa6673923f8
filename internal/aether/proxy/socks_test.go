package proxy

import (
	"bytes"
	"io"
	"testing"
)

// said is what a client sends, and what it is sent.
type said struct {
	io.Reader
	bytes.Buffer
}

func (s *said) Read(b []byte) (int, error) { return s.Reader.Read(b) }

func FuzzSOCKS(f *testing.F) {
	f.Add([]byte{5, 1, 0, 5, 1, 0, 3, 9, 'a', '.', 'e', 'x', 'a', 'm', 'p', 'l', 'e', 1, 187})
	f.Add([]byte{5, 2, 2, 0, 5, 1, 0, 1, 192, 0, 2, 1, 0, 80})
	f.Add([]byte{5, 1, 0, 5, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1, 0, 80})
	f.Add([]byte{5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		c := &said{Reader: r}
		host, port, code, err := greet(c)
		if err == nil && (host == "" || port == 0 || code != 0 || len(host) > 255) {
			t.Fatalf("%q %d %d", host, port, code)
		}
		if err == nil {
			// What comes behind is the target's.
			taken := in[:len(in)-r.Len()]
			if _, _, _, err := greet(&said{Reader: bytes.NewReader(taken[:len(taken)-1])}); err == nil {
				t.Fatal("more was taken than needed")
			}
		}
		if c.Len() > 2 {
			t.Fatalf("answered %x", c.Bytes())
		}
	})
}
