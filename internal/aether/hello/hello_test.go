package hello_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"testing/iotest"
	"time"

	"github.com/sandsea/sandsea/internal/aether/hello"
)

// spoken gives what crypto/tls says first under that configuration.
func spoken(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	client, server := net.Pipe()
	go func() { _ = tls.Client(client, cfg).HandshakeContext(context.Background()) }()
	defer client.Close()
	raw, _, err := hello.Read(server)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// records cuts the handshake message of one record into records of n bytes.
func records(raw []byte, n int) []byte {
	var out []byte
	for part := range slices.Chunk(raw[5:], n) {
		out = append(out, 22, 3, 1)
		out = binary.BigEndian.AppendUint16(out, uint16(len(part)))
		out = append(out, part...)
	}
	return out
}

// build makes a ClientHello in one record, with these extensions.
func build(exts ...[]byte) []byte {
	body := append([]byte{3, 3}, make([]byte, 32)...)
	body = append(body, 0, 0, 2, 0x13, 0x01, 1, 0)
	all := slices.Concat(exts...)
	body = binary.BigEndian.AppendUint16(body, uint16(len(all)))
	body = append(body, all...)
	return wrap(body)
}

func wrap(body []byte) []byte {
	msg := append([]byte{1, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body...)
	return append([]byte{22, 3, 1, byte(len(msg) >> 8), byte(len(msg))}, msg...)
}

func ext(kind uint16, body []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(body)))
	return append(b, body...)
}

// sni is a server name extension of those names.
func sni(names ...string) []byte {
	var list []byte
	for _, n := range names {
		list = append(list, 0)
		list = binary.BigEndian.AppendUint16(list, uint16(len(n)))
		list = append(list, n...)
	}
	return ext(0, append(binary.BigEndian.AppendUint16(nil, uint16(len(list))), list...))
}

func TestRead(t *testing.T) {
	plain := spoken(t, &tls.Config{ServerName: "a.example", NextProtos: []string{"h2", "http/1.1"}})
	old := append([]byte{3, 1}, make([]byte, 32)...)
	old = append(old, 0, 0, 2, 0, 0x2f, 1, 0)
	for _, c := range []struct {
		name string
		raw  []byte
		want string
		alpn []string
		ech  bool
		bad  bool
	}{
		{"what crypto/tls says", plain, "a.example", []string{"h2", "http/1.1"}, false, false},
		{"cut into records of 100 bytes", records(plain, 100), "a.example", []string{"h2", "http/1.1"}, false, false},
		{"cut into records of 1 byte", records(plain, 1), "a.example", []string{"h2", "http/1.1"}, false, false},
		{"without a name", spoken(t, &tls.Config{InsecureSkipVerify: true}), "", nil, false, false},
		{"without extensions", wrap(old), "", nil, false, false},
		{"the outer name of an encrypted one", build(sni("outer.example"), ext(0xfe0d, []byte{0, 1, 2})), "outer.example", nil, true, false},
		{"capitals and a dot as they came", build(sni("A.Example.")), "A.Example.", nil, false, false},
		{"two names", build(sni("a.example", "b.example")), "", nil, false, true},
		{"two name extensions", build(sni("a.example"), sni("b.example")), "", nil, false, true},
		{"an empty name", build(sni("")), "", nil, false, true},
		{"no name in the list", build(sni()), "", nil, false, true},
		{"bytes behind the extensions", wrap(append(slices.Clone(build(sni("a.example"))[9:]), 0)), "", nil, false, true},
		{"a second message in the record", func() []byte {
			b := build(sni("a.example"))
			b = append(b, 1, 0, 0, 0)
			binary.BigEndian.PutUint16(b[3:], uint16(len(b)-5))
			return b
		}(), "", nil, false, true},
		{"an alert first", append([]byte{21, 3, 1, 0, 2, 1, 0}, plain...), "", nil, false, true},
		{"an empty record first", append([]byte{22, 3, 1, 0, 0}, plain...), "", nil, false, true},
		{"a record of SSL 2", []byte{0x80, 46, 1, 3, 1, 0, 0, 0}, "", nil, false, true},
		{"another handshake message", []byte{22, 3, 1, 0, 4, 2, 0, 0, 0}, "", nil, false, true},
		{"a message too long", []byte{22, 3, 1, 0, 4, 1, 0xff, 0, 0}, "", nil, false, true},
		{"an extension longer than all", build(ext(0, []byte{0, 9, 0})), "", nil, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			const rest = "what comes next"
			in := bytes.NewReader(append(slices.Clone(c.raw), rest...))
			raw, h, err := hello.Read(iotest.OneByteReader(in))
			if c.bad {
				if !errors.Is(err, hello.ErrMalformed) {
					t.Fatalf("got %+v, %v", h, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if h.ServerName != c.want || !slices.Equal(h.ALPN, c.alpn) && c.alpn != nil || h.ECH != c.ech {
				t.Errorf("got %+v", h)
			}
			left, _ := io.ReadAll(in)
			if !bytes.Equal(raw, c.raw) || string(left) != rest {
				t.Errorf("took %d of %d bytes, left %q", len(raw), len(c.raw), left)
			}
		})
	}
}

func TestACutHelloIsNoneAndBounded(t *testing.T) {
	raw := build(sni("a.example"))
	for n := range raw {
		if _, h, err := hello.Read(bytes.NewReader(raw[:n])); err == nil {
			t.Fatalf("%d of %d bytes were read as %+v", n, len(raw), h)
		}
	}
	endless := bytes.NewReader(bytes.Repeat([]byte{22, 3, 1, 0, 4, 1, 0, 0x7f, 0xff}, hello.Most))
	if got, _, err := hello.Read(endless); err == nil || len(got) > hello.Most {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// FuzzClientHello compares with what crypto/tls, a server, takes from the same bytes.
func FuzzClientHello(f *testing.F) {
	f.Add(spoken(f, &tls.Config{ServerName: "a.example"}))
	f.Add(records(spoken(f, &tls.Config{ServerName: "b.example", NextProtos: []string{"h2"}}), 33))
	f.Add(build(sni("a.example"), ext(0xfe0d, []byte{1})))
	f.Add([]byte{22, 3, 1, 0, 1, 1})
	f.Fuzz(func(t *testing.T, in []byte) {
		raw, h, err := hello.Read(bytes.NewReader(in))
		if !bytes.HasPrefix(in, raw) || len(raw) > hello.Most {
			t.Fatalf("%d bytes that were not sent so", len(raw))
		}
		if err != nil {
			return
		}
		var seen *tls.ClientHelloInfo
		enough := errors.New("enough")
		_ = tls.Server(readOnly{bytes.NewReader(raw)}, &tls.Config{GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
			seen = i
			return nil, enough
		}}).HandshakeContext(context.Background())
		if seen != nil && seen.ServerName != h.ServerName {
			t.Fatalf("we read %q, the server %q", h.ServerName, seen.ServerName)
		}
	})
}

// readOnly is a connection that nothing is heard of.
type readOnly struct{ r io.Reader }

func (c readOnly) Read(b []byte) (int, error) { return c.r.Read(b) }

func (readOnly) Write(b []byte) (int, error)      { return len(b), nil }
func (readOnly) Close() error                     { return nil }
func (readOnly) LocalAddr() net.Addr              { return nil }
func (readOnly) RemoteAddr() net.Addr             { return nil }
func (readOnly) SetDeadline(time.Time) error      { return nil }
func (readOnly) SetReadDeadline(time.Time) error  { return nil }
func (readOnly) SetWriteDeadline(time.Time) error { return nil }
