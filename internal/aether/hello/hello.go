// Package hello reads the first message of a TLS connection, as far as a forwarder must know it: which server is asked
// for. It reads bytes that anybody may have sent: it never takes more than Most of them and accepts nothing that two
// servers could read in different ways.
package hello

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Most is how many bytes a ClientHello may take, with the headers of its records. Those of browsers with post-quantum key
// shares have 2 KiB.
const Most = 32 << 10

// The record and handshake types of TLS.
const (
	recordHeader    = 5
	RecordCipher    = 20 // change cipher spec
	RecordHandshake = 22
	clientHello     = 1
	maxRecord       = 1 << 14
)

// The extensions that are looked at.
const (
	extServerName = 0
	extALPN       = 16
	extECH        = 0xfe0d
)

// Hello is what a client said.
type Hello struct {
	// ServerName as it was sent; empty: none was.
	ServerName string
	ALPN       []string
	// ECH: there is an encrypted ClientHello inside; ServerName is that of the outer one.
	ECH bool
}

// ErrMalformed is in every error about what was sent.
var ErrMalformed = errors.New("malformed ClientHello")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// Looks reports whether a connection that begins with that byte speaks TLS, or pretends to.
func Looks(first byte) bool { return first >= 20 && first <= 24 }

// Read reads one ClientHello, over as many records as it takes, and gives the bytes as they came beside what they mean.
// The bytes read are given with an error too.
func Read(r io.Reader) (raw []byte, h Hello, err error) {
	var message []byte // the handshake message, without the headers of records
	want := 4
	for len(message) < want {
		at := len(raw)
		if raw, err = more(r, raw, recordHeader); err != nil {
			return raw, h, err
		}
		head := raw[at:]
		size := int(binary.BigEndian.Uint16(head[3:]))
		switch {
		case head[0] != RecordHandshake:
			return raw, h, malformed("record of type %d", head[0])
		case head[1] != 3:
			return raw, h, malformed("record of version %d.%d", head[1], head[2])
		case size == 0 || size > maxRecord:
			return raw, h, malformed("record of %d bytes", size)
		}
		if raw, err = more(r, raw, size); err != nil {
			return raw, h, err
		}
		message = append(message, raw[at+recordHeader:]...)
		if message[0] != clientHello {
			return raw, h, malformed("handshake message of type %d", message[0])
		}
		if len(message) >= 4 {
			want = 4 + int(message[1])<<16 + int(message[2])<<8 + int(message[3])
			if want > Most {
				return raw, h, malformed("%d bytes, at most %d", want, Most)
			}
		}
	}
	if len(message) != want {
		return raw, h, malformed("%d bytes behind it", len(message)-want)
	}
	h, err = parse(message[4:])
	return raw, h, err
}

func more(r io.Reader, raw []byte, n int) ([]byte, error) {
	if len(raw)+n > Most {
		return raw, malformed("more than %d bytes", Most)
	}
	at := len(raw)
	raw = append(raw, make([]byte, n)...)
	got, err := io.ReadFull(r, raw[at:])
	if errors.Is(err, io.EOF) && at > 0 {
		err = io.ErrUnexpectedEOF
	}
	return raw[:at+got], err
}

// bytes is what is left to parse.
type bytes struct {
	b  []byte
	ok bool
}

func (s *bytes) take(n int) []byte {
	if !s.ok || len(s.b) < n {
		s.ok = false
		return nil
	}
	b := s.b[:n]
	s.b = s.b[n:]
	return b
}

func (s *bytes) uint8() int {
	if b := s.take(1); b != nil {
		return int(b[0])
	}
	return 0
}

func (s *bytes) uint16() int {
	if b := s.take(2); b != nil {
		return int(binary.BigEndian.Uint16(b))
	}
	return 0
}

// within parses what a length in front bounds.
func (s *bytes) within(n int) *bytes { return &bytes{b: s.take(n), ok: s.ok} }

// parse reads the body of a ClientHello, RFC 8446 section 4.1.2.
func parse(body []byte) (h Hello, err error) {
	s := &bytes{b: body, ok: true}
	s.take(2 + 32) // version, random
	s.take(s.uint8())
	s.take(s.uint16()) // cipher suites
	s.take(s.uint8())  // compression methods
	if s.ok && len(s.b) == 0 {
		return h, nil // no extensions, as before TLS 1.2
	}
	all := s.within(s.uint16())
	if !s.ok || len(s.b) != 0 {
		return h, malformed("lengths do not add up")
	}
	seen := map[int]bool{}
	for len(all.b) > 0 {
		kind := all.uint16()
		ext := all.within(all.uint16())
		if !all.ok {
			return h, malformed("lengths of extensions do not add up")
		}
		if seen[kind] {
			return h, malformed("extension %d twice", kind)
		}
		seen[kind] = true
		switch kind {
		case extServerName:
			h.ServerName, err = serverName(ext)
		case extALPN:
			h.ALPN, err = protocols(ext)
		case extECH:
			// Everybody sends one with noise in it; what it holds is for the server alone.
			h.ECH = true
		}
		if err != nil {
			return h, err
		}
	}
	return h, nil
}

// serverName reads a list that may hold one name only: which of several counts is up to the server.
func serverName(s *bytes) (string, error) {
	list := s.within(s.uint16())
	kind := list.uint8()
	name := list.take(list.uint16())
	if !s.ok || !list.ok || len(s.b) != 0 || len(list.b) != 0 || kind != 0 || len(name) == 0 {
		return "", malformed("server name")
	}
	return string(name), nil
}

func protocols(s *bytes) (all []string, err error) {
	list := s.within(s.uint16())
	for list.ok && len(list.b) > 0 {
		all = append(all, string(list.take(list.uint8())))
	}
	if !s.ok || !list.ok || len(s.b) != 0 {
		return nil, malformed("protocols")
	}
	return all, nil
}
