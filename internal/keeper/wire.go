package keeper

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/sandsea/sandsea/internal/record"
)

// The wire: one SOCK_SEQPACKET message is one request, reply or event, little-endian, kind first. A request's number
// comes back in its reply. Fields are only ever added at the end of a message; a reader takes missing ones for zero.
// Files travel beside the message, in the order that the decoder below says.

// wireVersion is what this code speaks; a peer of another version is refused.
const wireVersion = 1

// maxMessage bounds a message; the longest is a record with many pins.
const maxMessage = 32 << 10

// Bounds of what a message may hold.
const (
	maxName    = 128
	maxStreams = 4
	maxPins    = 64
)

type kind uint8

// The numbers of living keepers: what comes new gets one of its own, as kUpgrade.
const (
	kHello kind = iota + 1
	kHold
	kRecord
	kRearm
	kSuspend
	kContinue
	kRetain
	kCloseInput
	kRelease
	kRoster
	kAck
	kPin

	kWelcome kind = iota + 64
	kReply
	kHeldSandbox
	kHeldExec
	kEvent
)

// feature is a set of what a peer can do beside what every peer of this version can.
type feature uint32

const (
	// terminals: Stream.Terminal is known.
	terminals feature = 1 << iota
	// upgrades: it can become another program.
	upgrades
)

// features are this code's.
const features = terminals | upgrades

// hello opens a connection in both directions.
type hello struct {
	version  uint32
	dataID   string
	features feature
}

// sandboxMsg is a Sandbox without its files, which follow as control, pidfd, kill as far as they are present.
type sandboxMsg struct {
	id        string
	hard      time.Time
	budget    int64
	suspended bool
	fired     bool
	files     [3]bool
}

// streamMsg is a Stream without its files.
type streamMsg struct {
	stream   record.Stream
	closed   bool
	pins     []record.Range
	terminal bool
}

// execMsg is an Exec without its files: pipe and file of each stream, then stdin and kill as far as they are present,
// then terminal and feed of each stream that has them.
type execMsg struct {
	key       Key
	caps      record.Caps
	remaining time.Duration
	fired     bool
	streams   []streamMsg
	stdin     bool
	kill      bool
	settled   int64
}

// keyMsg serves all requests about one key.
type keyMsg struct {
	key       Key
	hard      time.Time
	remaining time.Duration
	stream    record.Stream
	span      record.Range // Retain uses From
}

// reply answers a request; an empty kind is success.
type reply struct {
	kind   string
	object string
	msg    string
}

func count(present ...bool) (n int) {
	for _, p := range present {
		if p {
			n++
		}
	}
	return n
}

func (m sandboxMsg) fileCount() int { return count(m.files[:]...) }

func (m execMsg) fileCount() int {
	return 2*len(m.streams) + count(m.stdin, m.kill) + 2*m.terminals()
}

// terminals counts the streams that are a terminal's.
func (m execMsg) terminals() (n int) {
	for _, s := range m.streams {
		n += count(s.terminal)
	}
	return n
}

// writer builds a message.
type writer struct{ b []byte }

func begin(k kind, id uint32) *writer {
	w := &writer{b: make([]byte, 0, 128)}
	w.u8(uint8(k))
	w.u32(id)
	return w
}

func (w *writer) u8(v uint8)             { w.b = append(w.b, v) }
func (w *writer) u32(v uint32)           { w.b = binary.LittleEndian.AppendUint32(w.b, v) }
func (w *writer) u64(v uint64)           { w.b = binary.LittleEndian.AppendUint64(w.b, v) }
func (w *writer) i64(v int64)            { w.u64(uint64(v)) }
func (w *writer) dur(v time.Duration)    { w.i64(int64(v)) }
func (w *writer) span(r record.Range)    { w.i64(r.From); w.i64(r.To) }
func (w *writer) stream(s record.Stream) { w.u8(uint8(s)) }

func (w *writer) flag(v bool) {
	if v {
		w.u8(1)
	} else {
		w.u8(0)
	}
}

func (w *writer) str(s string) {
	s = s[:min(len(s), math.MaxUint16)]
	w.b = binary.LittleEndian.AppendUint16(w.b, uint16(len(s)))
	w.b = append(w.b, s...)
}

func (w *writer) time(t time.Time) {
	if t.IsZero() {
		w.i64(0)
	} else {
		w.i64(max(t.UnixNano(), 1))
	}
}

func (w *writer) key(k Key) {
	w.str(k.Sandbox)
	w.i64(k.Number)
}

// reader takes a message apart. Past the end every field is zero, which is what a field that an older peer does not
// know should be; cut says that it ended within a field, which no peer of ours sends.
type reader struct {
	b   []byte
	cut bool
	bad error
}

func open(msg []byte) (k kind, id uint32, r *reader) {
	r = &reader{b: msg}
	k = kind(r.u8())
	return k, r.u32(), r
}

func (r *reader) take(n int) []byte {
	if len(r.b) == 0 {
		return nil
	}
	if len(r.b) < n {
		r.cut, r.b = true, nil
		return nil
	}
	p := r.b[:n]
	r.b = r.b[n:]
	return p
}

func (r *reader) u8() uint8 {
	if p := r.take(1); p != nil {
		return p[0]
	}
	return 0
}

func (r *reader) u32() uint32 {
	if p := r.take(4); p != nil {
		return binary.LittleEndian.Uint32(p)
	}
	return 0
}

func (r *reader) u64() uint64 {
	if p := r.take(8); p != nil {
		return binary.LittleEndian.Uint64(p)
	}
	return 0
}

func (r *reader) i64() int64            { return int64(r.u64()) }
func (r *reader) dur() time.Duration    { return time.Duration(r.i64()) }
func (r *reader) flag() bool            { return r.u8() != 0 }
func (r *reader) span() record.Range    { return record.Range{From: r.i64(), To: r.i64()} }
func (r *reader) stream() record.Stream { return record.Stream(r.u8()) }

func (r *reader) str() string {
	p := r.take(2)
	if p == nil {
		return ""
	}
	n := int(binary.LittleEndian.Uint16(p))
	if n == 0 {
		return ""
	}
	if len(r.b) < n {
		r.cut, r.b = true, nil
		return ""
	}
	return string(r.take(n))
}

func (r *reader) time() time.Time {
	if n := r.i64(); n != 0 {
		return time.Unix(0, n)
	}
	return time.Time{}
}

func (r *reader) key() Key {
	k := Key{Sandbox: r.str(), Number: r.i64()}
	if !validName(k.Sandbox) || k.Number < 0 {
		r.fail("key %.20q %d", k.Sandbox, k.Number)
	}
	return k
}

// validName holds for sandbox ids and for whatever else can stand as a word in the index.
func validName(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return s != "" && len(s) <= maxName
}

func (r *reader) fail(format string, args ...any) {
	if r.bad == nil {
		r.bad = fmt.Errorf("bad message: "+format, args...)
	}
}

func (r *reader) err() error {
	if r.bad == nil && r.cut {
		r.fail("cut short")
	}
	return r.bad
}

func (m hello) encode(k kind) []byte {
	w := begin(k, 0)
	w.u32(m.version)
	w.str(m.dataID)
	w.u32(uint32(m.features))
	return w.b
}

func decodeHello(r *reader) (hello, error) {
	m := hello{version: r.u32(), dataID: r.str(), features: feature(r.u32())}
	return m, r.err()
}

func (m sandboxMsg) encode(k kind, id uint32) []byte {
	w := begin(k, id)
	w.str(m.id)
	w.time(m.hard)
	w.i64(m.budget)
	w.flag(m.suspended)
	w.flag(m.fired)
	for _, f := range m.files {
		w.flag(f)
	}
	return w.b
}

func decodeSandbox(r *reader) (sandboxMsg, error) {
	m := sandboxMsg{id: r.str(), hard: r.time(), budget: r.i64(), suspended: r.flag(), fired: r.flag()}
	for i := range m.files {
		m.files[i] = r.flag()
	}
	if !validName(m.id) {
		r.fail("sandbox %.20q", m.id)
	}
	return m, r.err()
}

func (m execMsg) encode(k kind, id uint32) []byte {
	w := begin(k, id)
	w.key(m.key)
	w.i64(m.caps.Head)
	w.i64(m.caps.Tail)
	w.dur(m.remaining)
	w.flag(m.fired)
	w.flag(m.stdin)
	w.flag(m.kill)
	w.u8(uint8(len(m.streams)))
	for _, s := range m.streams {
		w.stream(s.stream)
		w.flag(s.closed)
		w.u8(uint8(len(s.pins)))
		for _, p := range s.pins {
			w.span(p)
		}
	}
	for _, s := range m.streams {
		w.flag(s.terminal)
	}
	w.i64(m.settled)
	return w.b
}

func decodeExec(r *reader) (execMsg, error) {
	m := execMsg{
		key: r.key(), caps: record.Caps{Head: r.i64(), Tail: r.i64()}, remaining: r.dur(),
		fired: r.flag(), stdin: r.flag(), kill: r.flag(),
	}
	if m.key.Number == 0 || m.caps.Head < 0 || m.caps.Tail < 0 || m.remaining < 0 {
		r.fail("command %v caps %v remaining %v", m.key, m.caps, m.remaining)
	}
	n := int(r.u8())
	if n > maxStreams {
		r.fail("%d streams", n)
		return m, r.err()
	}
	for range n {
		s := streamMsg{stream: r.stream(), closed: r.flag()}
		pins := int(r.u8())
		if pins > maxPins {
			r.fail("%d pins", pins)
			return m, r.err()
		}
		for range pins {
			s.pins = append(s.pins, r.span())
		}
		for _, o := range m.streams {
			if o.stream == s.stream {
				r.fail("stream %d twice", s.stream)
			}
		}
		m.streams = append(m.streams, s)
	}
	for i := range m.streams {
		m.streams[i].terminal = r.flag()
	}
	if m.settled = r.i64(); m.settled < 0 {
		r.fail("%d bytes settled", m.settled)
	}
	return m, r.err()
}

func (m keyMsg) encode(k kind, id uint32) []byte {
	w := begin(k, id)
	w.key(m.key)
	w.time(m.hard)
	w.dur(m.remaining)
	w.stream(m.stream)
	w.span(m.span)
	return w.b
}

func decodeKey(r *reader) (keyMsg, error) {
	m := keyMsg{key: r.key(), hard: r.time(), remaining: r.dur(), stream: r.stream(), span: r.span()}
	if m.remaining < 0 {
		r.fail("remaining %v", m.remaining)
	}
	return m, r.err()
}

func (m reply) encode(id uint32) []byte {
	w := begin(kReply, id)
	w.str(m.kind)
	w.str(m.object)
	w.str(m.msg)
	return w.b
}

func decodeReply(r *reader) (reply, error) {
	m := reply{kind: r.str(), object: r.str(), msg: r.str()}
	return m, r.err()
}

func encodeEvent(e Event) []byte {
	w := begin(kEvent, 0)
	w.u64(e.Seq)
	w.str(string(e.Kind))
	w.key(e.Key)
	w.stream(e.Stream)
	w.i64(e.Size)
	return w.b
}

func decodeEvent(r *reader) (Event, error) {
	e := Event{Seq: r.u64(), Kind: EventKind(r.str()), Key: r.key(), Stream: r.stream(), Size: r.i64()}
	return e, r.err()
}

func encodeAck(seq uint64) []byte {
	w := begin(kAck, 0)
	w.u64(seq)
	return w.b
}
