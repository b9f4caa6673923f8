package forward

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sandsea/sandsea/internal/aether/hello"
)

// speech is what a connection turns out to be.
type speech int

const (
	unsaid speech = iota // more is needed to tell
	isTLS
	isHTTP
	isRaw
	// perhapsHTTP needs more to tell, too, and looks much like a request.
	perhapsHTTP
)

// maxLine is how long the first line of something that may be HTTP can be.
const maxLine = 16 << 10

var errLine = errors.New("the first line is too long")

// pause is how long a client may wait in the middle of its first words, where other protocols than TLS and HTTP may be
// spoken: what it said then goes on, since it may be waiting for an answer to that. HTTP clients never pause there.
const pause = time.Second

// sniff looks into a connection until it can tell what is spoken. patient: for as long as the connection's deadline lets
// it; else it leaves unsaid what a client says that pauses or ends, unless that looks like a request.
func (c *conn) sniff(patient bool) (speech, error) {
	hurried := time.Time{} // when a client must have said what may be a request
	for {
		is := classify(c.early)
		if is != unsaid && is != perhapsHTTP {
			return is, nil
		}
		if len(c.early) > maxLine {
			return is, errLine
		}
		if !patient && len(c.early) > 0 {
			if hurried.IsZero() {
				hurried = time.Now().Add(firstWords)
			}
			until := hurried
			if is == unsaid {
				until = time.Now().Add(pause)
			}
			_ = c.SetReadDeadline(until) // on a closed one, more sees it
		}
		err := c.more()
		if err != nil && !patient && is == unsaid && len(c.early) > 0 && (errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, io.EOF)) {
			return unsaid, nil
		}
		if err != nil {
			return is, err
		}
	}
}

// trickle passes the first words of a client on as they come, until it is certain that they are not HTTP. What looks like
// a request is held back, and one ends here.
func (c *conn) trickle(up net.Conn) error {
	var said []byte // passed on
	for {
		is := classify(append(said, c.early...))
		switch is {
		case isRaw:
			return nil
		case unsaid:
			if _, err := up.Write(c.early); err != nil {
				return err
			}
			said, c.early = append(said, c.early...), nil
			_ = c.SetReadDeadline(time.Time{}) // on a closed one, more sees it
		case perhapsHTTP:
			_ = c.SetReadDeadline(time.Now().Add(firstWords))
		default:
			return mismatch(ruleProtocol, "HTTP in small pieces")
		}
		if len(said)+len(c.early) > maxLine {
			return errLine
		}
		if err := c.more(); err != nil {
			if is == perhapsHTTP {
				return mismatch(ruleProtocol, "half of a request")
			}
			return ended(err)
		}
	}
}

// methods are those that servers know, which makes lines with them requests even without a version (HTTP/0.9).
var methods = []string{"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PRI"}

// classify tells from the first bytes what is spoken. HTTP is what any server, however lenient, could take for a request: a
// line whose first word is a token, however long, and which has a version, a method that is known, or a path or URL behind it.
func classify(b []byte) speech {
	if len(b) > 0 && (hello.Looks(b[0]) || b[0] == 0x80) {
		return isTLS
	}
	b = bytes.TrimLeft(b, blank)
	line, whole := b, false
	if i := bytes.IndexByte(b, '\n'); i >= 0 {
		line, whole = b[:i], true
	}
	end := bytes.IndexFunc(line, func(r rune) bool { return !isToken(r) })
	switch {
	case end == 0:
		return isRaw
	case end < 0 && whole:
		return isRaw // one word
	case end < 0:
		return unsaid
	case !strings.ContainsRune(blank, rune(line[end])):
		return isRaw
	}
	word, rest := string(line[:end]), bytes.TrimLeft(line[end:], blank)
	version := bytes.Contains(bytes.ToUpper(rest), []byte("HTTP/"))
	if bytes.IndexByte(rest, 0) >= 0 && !version {
		return isRaw
	}
	request := version || slices.Contains(methods, strings.ToUpper(word)) || bytes.HasPrefix(rest, []byte("/")) || bytes.Contains(rest, []byte("://"))
	// A carriage return alone ends the lines of some servers.
	whole = whole || version && bytes.IndexByte(rest, '\r') >= 0
	switch {
	case whole && request:
		return isHTTP
	case whole:
		return isRaw
	case request || len(rest) == 0:
		return perhapsHTTP
	}
	return unsaid
}

// blank is what parts words, for lenient servers.
const blank = " \t\r\v\f\n"

func isToken(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("!#$%&'*+-.^_`|~", r)
}
