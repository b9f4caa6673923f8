package spawner

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"syscall"
)

// The wire: little-endian messages of a fixed size on a SOCK_SEQPACKET socket, so that one read gives one message with
// its descriptors. Fields are only ever added in what is zero now; a peer of another version is refused at the
// greeting.
const (
	wireMagic   uint32 = 0x53504e31 // "1NPS"
	wireVersion uint16 = 1

	requestSize = 128
	replySize   = 512
	// maxFiles is the largest number of descriptors in one message: cgroup, root, dev, sys and the v1 tasks files.
	maxFiles = 4 + maxTasks
	maxTasks = 8
)

type kind uint16

const (
	kindHello kind = 1
	kindSpawn kind = 2
)

// request is what the edge sends. Files of a spawn: cgroup, root unless NoRoot is set, dev, sys when Sys is set, then
// Tasks.
type request struct {
	Kind    kind
	Seq     uint64
	UIDBase uint32
	Tasks   uint8
	Sys     bool
	NoRoot  bool
	// Name is the sandbox's id, or for a greeting the id of the data directory.
	Name string
}

const nameSize = requestSize - 32

func (r request) encode() ([]byte, error) {
	if len(r.Name) > nameSize {
		return nil, fmt.Errorf("name of %d bytes, at most %d", len(r.Name), nameSize)
	}
	b := make([]byte, requestSize)
	le := binary.LittleEndian
	le.PutUint32(b[0:], wireMagic)
	le.PutUint16(b[4:], wireVersion)
	le.PutUint16(b[6:], uint16(r.Kind))
	le.PutUint64(b[8:], r.Seq)
	le.PutUint32(b[16:], r.UIDBase)
	b[20] = r.Tasks
	if r.Sys {
		b[21] = 1
	}
	if r.NoRoot {
		b[22] = 1
	}
	copy(b[32:], r.Name)
	return b, nil
}

func decodeRequest(b []byte) (request, error) {
	if len(b) != requestSize {
		return request{}, fmt.Errorf("request of %d bytes, want %d", len(b), requestSize)
	}
	le := binary.LittleEndian
	if m := le.Uint32(b); m != wireMagic {
		return request{}, fmt.Errorf("request with magic %#x", m)
	}
	if v := le.Uint16(b[4:]); v != wireVersion {
		return request{}, fmt.Errorf("request of wire version %d, this is %d", v, wireVersion)
	}
	r := request{
		Kind: kind(le.Uint16(b[6:])), Seq: le.Uint64(b[8:]), UIDBase: le.Uint32(b[16:]), Tasks: b[20], Sys: b[21] == 1,
		NoRoot: b[22] == 1, Name: cString(b[32:]),
	}
	if r.Tasks > maxTasks {
		return request{}, fmt.Errorf("request with %d tasks files, at most %d", r.Tasks, maxTasks)
	}
	return r, nil
}

// reply answers the request with the same Seq. Files of a spawn: pidfd, control.
type reply struct {
	Seq   uint64
	Pid   int32
	Errno syscall.Errno // 0 with a Text is an error without a number
	// Text is what went wrong, empty for success; in the answer to a greeting the id of the data directory.
	Text string
}

const textSize = replySize - 24

func (r reply) encode() []byte {
	b := make([]byte, replySize)
	le := binary.LittleEndian
	le.PutUint32(b[0:], wireMagic)
	le.PutUint16(b[4:], wireVersion)
	le.PutUint64(b[8:], r.Seq)
	le.PutUint32(b[16:], uint32(r.Pid))
	le.PutUint32(b[20:], uint32(r.Errno))
	copy(b[24:24+textSize], r.Text)
	return b
}

func decodeReply(b []byte) (reply, error) {
	if len(b) != replySize {
		return reply{}, fmt.Errorf("reply of %d bytes, want %d", len(b), replySize)
	}
	le := binary.LittleEndian
	if m, v := le.Uint32(b), le.Uint16(b[4:]); m != wireMagic || v != wireVersion {
		return reply{}, fmt.Errorf("reply with magic %#x, version %d", m, v)
	}
	return reply{
		Seq: le.Uint64(b[8:]), Pid: int32(le.Uint32(b[16:])), Errno: syscall.Errno(le.Uint32(b[20:])), Text: cString(b[24:]),
	}, nil
}

func cString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}
