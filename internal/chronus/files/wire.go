package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// The numbers of init/files_wire.h.
const (
	wireMagic   = 0x31574653
	wirePathMax = 4096
	wireDataMax = 65536
	wireHandles = 128

	requestSize = 64
	statSize    = 56
	answerSize  = 40 + statSize
	entrySize   = statSize + 8

	pathMax = wirePathMax - 1 // the kernel counts the NUL
	nameMax = 255
)

type op uint32

const (
	opStat op = iota + 1
	opOpen
	opCreate
	opCommit
	opClose
	opDir
	opNext
	opMkdir
	opRename
	opUnlink
	opRmtree
	opSetattr
	opSymlink
	opLink
	opWatch
	opAdd
	opUnwatch
)

// Flags of a request.
const (
	flagNoFollow uint32 = 1 << iota
	flagNoSymlinks
	flagParents
	flagPathOnly
	flagReplace
	flagSetMode
	flagSetOwner
	flagSetMtime
	flagDefaultMode
	flagDirectory
	flagNames
)

// Flags of an answer.
const (
	flagMore uint32 = 1 << iota
	flagDid
	flagNotAFile
	flagPseudo
)

// Types in a mode.
const (
	modeType    = 0o170000
	modeRegular = 0o100000
	modeDir     = 0o040000
	modeLink    = 0o120000
	modePerm    = 0o7777
)

type request struct {
	op     op
	flags  uint32
	base   uint32
	handle uint32
	mode   uint32
	uid    uint32
	gid    uint32
	mtime  time.Time
	ino    uint64
	path   string
	path2  string
}

// changes reports whether the operation may change something in the sandbox, so that it must not be sent twice.
func (r request) changes() bool {
	switch r.op {
	case opStat, opOpen, opDir, opNext, opClose, opWatch, opAdd, opUnwatch:
		return false
	case opCreate:
		// It makes nothing that outlives its helper but parents, which making again finds.
		return false
	default:
		return true
	}
}

func (r request) encode(cookie uint64) []byte {
	le := binary.LittleEndian
	b := make([]byte, requestSize, requestSize+len(r.path)+len(r.path2))
	le.PutUint32(b[0:], wireMagic)
	le.PutUint32(b[4:], uint32(r.op))
	le.PutUint64(b[8:], cookie)
	le.PutUint32(b[16:], r.flags)
	le.PutUint32(b[20:], r.base)
	le.PutUint32(b[24:], r.handle)
	le.PutUint32(b[28:], r.mode)
	le.PutUint32(b[32:], r.uid)
	le.PutUint32(b[36:], r.gid)
	if !r.mtime.IsZero() {
		le.PutUint64(b[40:], uint64(r.mtime.Unix()))
		le.PutUint32(b[48:], uint32(r.mtime.Nanosecond()))
	}
	le.PutUint16(b[52:], uint16(len(r.path)))
	le.PutUint16(b[54:], uint16(len(r.path2)))
	le.PutUint64(b[56:], r.ino)
	b = append(b, r.path...)
	return append(b, r.path2...)
}

type wireStat struct {
	mode, uid, gid, links uint32
	inode, dev            uint64
	size                  int64
	mtime                 time.Time
}

type answer struct {
	op     op
	cookie uint64
	errno  int
	flags  uint32
	handle uint32
	count  uint32
	stat   wireStat
	data   []byte // into the decoded message
}

func decodeStat(b []byte) (wireStat, error) {
	le := binary.LittleEndian
	s := wireStat{
		mode:  le.Uint32(b[0:]),
		uid:   le.Uint32(b[4:]),
		gid:   le.Uint32(b[8:]),
		links: le.Uint32(b[12:]),
		inode: le.Uint64(b[16:]),
		dev:   le.Uint64(b[24:]),
		size:  int64(le.Uint64(b[32:])),
	}
	sec, nsec := int64(le.Uint64(b[40:])), le.Uint32(b[48:])
	if nsec >= 1e9 || s.size < 0 {
		return s, errors.New("size or time out of range")
	}
	s.mtime = time.Unix(sec, int64(nsec))
	return s, nil
}

func decodeAnswer(b []byte) (answer, error) {
	le := binary.LittleEndian
	if len(b) < answerSize {
		return answer{}, fmt.Errorf("%d bytes are no answer", len(b))
	}
	a := answer{
		op:     op(le.Uint32(b[4:])),
		cookie: le.Uint64(b[8:]),
		errno:  int(int32(le.Uint32(b[16:]))),
		flags:  le.Uint32(b[20:]),
		handle: le.Uint32(b[24:]),
		count:  le.Uint32(b[28:]),
		data:   b[answerSize:],
	}
	var err error
	a.stat, err = decodeStat(b[40:])
	switch {
	case le.Uint32(b[0:]) != wireMagic:
		return answer{}, errors.New("not an answer")
	case uint64(le.Uint32(b[32:])) != uint64(len(a.data)) || len(a.data) > wireDataMax:
		return answer{}, fmt.Errorf("answer with %d bytes of data says %d", len(a.data), le.Uint32(b[32:]))
	case a.errno < 0 || a.errno > 4095:
		return answer{}, fmt.Errorf("errno %d", a.errno)
	case a.handle > wireHandles:
		return answer{}, fmt.Errorf("handle %d", a.handle)
	case err != nil:
		return answer{}, err
	}
	return a, nil
}

type wireEntry struct {
	stat wireStat
	name string
	link string
}

// decodeEntries takes the data of an answer to opNext apart.
func decodeEntries(count uint32, b []byte) ([]wireEntry, error) {
	if uint64(count)*(entrySize+1) > uint64(len(b)) {
		return nil, fmt.Errorf("%d entries in %d bytes", count, len(b))
	}
	entries := make([]wireEntry, 0, count)
	for range count {
		if len(b) < entrySize {
			return nil, errors.New("entry is cut off")
		}
		stat, err := decodeStat(b)
		if err != nil {
			return nil, err
		}
		n := int(binary.LittleEndian.Uint16(b[statSize:]))
		l := int(binary.LittleEndian.Uint16(b[statSize+2:]))
		b = b[entrySize:]
		if n+l > len(b) {
			return nil, errors.New("entry is cut off")
		}
		name, link := b[:n], b[n:n+l]
		b = b[n+l:]
		switch {
		case n == 0 || n > nameMax || l > wirePathMax:
			return nil, fmt.Errorf("entry with a name of %d and a link of %d bytes", n, l)
		case bytes.ContainsAny(name, "/\x00") || string(name) == "." || string(name) == "..":
			return nil, fmt.Errorf("%q is no name", name)
		case bytes.IndexByte(link, 0) >= 0:
			return nil, fmt.Errorf("target of link %q has a NUL byte", name)
		case l > 0 && stat.mode&modeType != modeLink:
			return nil, fmt.Errorf("%q has a target but is no link", name)
		}
		entries = append(entries, wireEntry{stat: stat, name: string(name), link: string(link)})
	}
	if len(b) > 0 {
		return nil, errors.New("bytes after the last entry")
	}
	return entries, nil
}
