package forward

import (
	"bufio"
	"bytes"
	"net/http"
	"strings"
	"testing"
)

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		name, said string
		want       speech
	}{
		{"nothing", "", unsaid},
		{"a handshake record", "\x16\x03\x01", isTLS},
		{"an alert", "\x15", isTLS},
		{"SSL 2", "\x80\x2e\x01", isTLS},
		{"a request", "GET / HTTP/1.1\r\n", isHTTP},
		{"half of one", "GET / HT", perhapsHTTP},
		{"a method", "GET", unsaid},
		{"a method and a blank", "FOO ", perhapsHTTP},
		{"a path", "FOO /x", perhapsHTTP},
		{"half a line of another protocol", "USER me", unsaid},
		{"a carriage return for a line's end", "GET / HTTP/1.1\rHost: x\r\r", isHTTP},
		{"a carriage return for a blank", "GET\r/ HTTP/1.1\n", isHTTP},
		{"small letters", "get / http/1.1\n", isHTTP},
		{"a method of its own", "X-FOO!bar / HTTP/1.0\n", isHTTP},
		{"tabs", "GET\t/\tHTTP/1.1\n", isHTTP},
		{"empty lines and blanks first", "\r\n \r\nGET / HTTP/1.1\n", isHTTP},
		{"bytes beyond ASCII", "GET /\xff\xfe HTTP/1.1\n", isHTTP},
		{"control characters", "GET /\x01\x02 HTTP/1.1\n", isHTTP},
		{"HTTP/2", "PRI * HTTP/2.0\r\n", isHTTP},
		{"HTTP/0.9", "GET /\r\n", isHTTP},
		{"HTTP/0.9 with a URL", "get http://a.example/\n", isHTTP},
		{"a line of another protocol", "EHLO me\r\n", isRaw},
		{"SSH", "SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", isRaw},
		{"a word alone", "PING\r\n", isRaw},
		{"a part of a word", "PI", unsaid},
		{"a long word", strings.Repeat("x", 40), unsaid},
		{"a long word alone", strings.Repeat("x", 40) + "\n", isRaw},
		{"a long method", strings.Repeat("x", 4000) + " / HTTP/1.1\r\n", isHTTP},
		{"a zero", "\x00\x00", isRaw},
		{"a zero in a line", "003egit-upload-pack /x.git\x00host=y\x00", isRaw},
		{"binary behind letters", "AMQP\x00\x00\x09\x01", isRaw},
		{"LDAP", "\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\x00\x80\x00", isRaw},
		{"Redis", "*1\r\n$4\r\nPING\r\n", isRaw},
		{"an answer", "HTTP/1.1 200 OK\r\n", isRaw},
	} {
		if got := classify([]byte(c.said)); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

// FuzzClassify looks for what passes as no HTTP and is a request to the parser of net/http, or that with blanks and empty
// lines taken away as lenient servers do.
func FuzzClassify(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"))
	f.Add([]byte("\r\n\tPOST /x HTTP/1.0\r\n\r\n"))
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Fuzz(func(t *testing.T, said []byte) {
		if len(said) > 2<<10 {
			t.Skip("each beginning is looked at: that is enough")
		}
		before := unsaid
		for n := range len(said) + 1 {
			now := classify(said[:n])
			if before != unsaid && before != perhapsHTTP && now != before {
				t.Fatalf("%q is %d, and %d with more", said[:n-1], before, now)
			}
			before = now
		}
		for _, b := range [][]byte{said, bytes.TrimLeft(said, "\r\n\t ")} {
			_, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(b)))
			if err == nil && before != isHTTP {
				t.Fatalf("%q is a request, and was taken for %d", said, before)
			}
		}
	})
}
