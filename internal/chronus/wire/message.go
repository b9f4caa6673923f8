package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/chronus"
)

// Version of the layouts.
const Version = 1

const (
	messageSize = 64
	slots       = 1024
)

type kind uint16

const (
	kindHello      kind = 1
	kindSetup      kind = 2
	kindSpawn      kind = 3
	kindServeFiles kind = 4
	kindOpenPTY    kind = 5
	kindSignal     kind = 6
	kindAck        kind = 7
	kindPrepare    kind = 10

	kindReady     kind = 129
	kindStarted   kind = 130
	kindFailed    kind = 131
	kindExit      kind = 132
	kindRoster    kind = 133
	kindProcess   kind = 134
	kindRosterEnd kind = 135
	kindServing   kind = 136
	kindSignalled kind = 137
	kindPTY       kind = 138
	kindPrepared  kind = 139
)

const (
	spawnErr          = 1
	spawnTTY          = 2
	spawnState        = 4
	failedInterpreter = 1

	factSeccomp    = 1
	factUserNS     = 2
	factNoNewPrivs = 4
	factPTY        = 8
	factShell      = 16

	stateStarting = 1
	stateRunning  = 2
	stateExited   = 3
)

// head begins every message.
type head struct {
	kind   kind
	seq    uint32
	cookie int64
}

// message is one of either direction, with the fields that its kind uses.
type message struct {
	head
	epoch   uint64 // hello
	flags   uint32 // spawn, failed, facts
	signal  int32  // signal
	pid     int32  // started, serving, process, exit
	step    uint32 // failed
	errno   int32  // failed, signalled
	version uint32 // facts
	caps    uint64
	nofile  uint64
	masks   uint32
	count   uint32
	state   uint32 // process, exit
	status  int32
	utime   uint64 // µs
	stime   uint64 // µs
	maxrss  uint64 // bytes
	wall    uint64 // ns

	file *os.File // pty: what came along
}

var errMessage = errors.New("broken message")

var le = binary.LittleEndian

// encode gives the bytes of a message.
func (m *message) encode() []byte {
	b := make([]byte, messageSize)
	le.PutUint16(b[0:], Version)
	le.PutUint16(b[2:], uint16(m.kind))
	le.PutUint32(b[4:], m.seq)
	le.PutUint64(b[8:], uint64(m.cookie))
	body := b[16:]
	switch m.kind {
	case kindHello:
		le.PutUint64(body[0:], m.epoch)
	case kindSpawn:
		le.PutUint32(body[0:], m.flags)
	case kindSignal:
		le.PutUint32(body[0:], uint32(m.signal))
	case kindStarted, kindServing:
		le.PutUint32(body[0:], uint32(m.pid))
	case kindFailed, kindSignalled:
		le.PutUint32(body[0:], m.step)
		le.PutUint32(body[4:], uint32(m.errno))
		le.PutUint32(body[8:], m.flags)
	case kindReady, kindRoster:
		le.PutUint32(body[0:], m.version)
		le.PutUint32(body[4:], m.flags)
		le.PutUint64(body[8:], m.caps)
		le.PutUint64(body[16:], m.nofile)
		le.PutUint32(body[24:], m.masks)
		le.PutUint32(body[28:], m.count)
	case kindProcess, kindExit:
		le.PutUint32(body[0:], m.state)
		le.PutUint32(body[4:], uint32(m.pid))
		le.PutUint32(body[8:], uint32(m.status))
		le.PutUint64(body[16:], m.utime)
		le.PutUint64(body[24:], m.stime)
		le.PutUint64(body[32:], m.maxrss)
		le.PutUint64(body[40:], m.wall)
	}
	return b
}

// decode reads a message and checks all that can be checked without knowing what was asked. Every byte counts: what a
// kind does not use must be zero.
func decode(b []byte) (message, error) {
	var m message
	if len(b) != messageSize {
		return m, fmt.Errorf("%w: %d bytes", errMessage, len(b))
	}
	if v := le.Uint16(b[0:]); v != Version {
		return m, fmt.Errorf("%w: version %d", errMessage, v)
	}
	m.kind = kind(le.Uint16(b[2:]))
	m.seq = le.Uint32(b[4:])
	cookie := le.Uint64(b[8:])
	if cookie > math.MaxInt64 {
		return m, fmt.Errorf("%w: number %d", errMessage, cookie)
	}
	m.cookie = int64(cookie)
	body := b[16:]
	used := 0
	switch m.kind {
	case kindHello:
		m.epoch, used = le.Uint64(body[0:]), 8
	case kindSpawn:
		m.flags, used = le.Uint32(body[0:]), 4
	case kindSignal:
		m.signal, used = int32(le.Uint32(body[0:])), 4
	case kindStarted, kindServing:
		m.pid, used = int32(le.Uint32(body[0:])), 4
	case kindFailed, kindSignalled:
		m.step, m.errno, m.flags, used = le.Uint32(body[0:]), int32(le.Uint32(body[4:])), le.Uint32(body[8:]), 12
	case kindReady, kindRoster:
		m.version, m.flags = le.Uint32(body[0:]), le.Uint32(body[4:])
		m.caps, m.nofile = le.Uint64(body[8:]), le.Uint64(body[16:])
		m.masks, m.count, used = le.Uint32(body[24:]), le.Uint32(body[28:]), 32
	case kindProcess, kindExit:
		m.state, m.pid, m.status = le.Uint32(body[0:]), int32(le.Uint32(body[4:])), int32(le.Uint32(body[8:]))
		m.utime, m.stime = le.Uint64(body[16:]), le.Uint64(body[24:])
		m.maxrss, m.wall, used = le.Uint64(body[32:]), le.Uint64(body[40:]), 48
		if le.Uint32(body[12:]) != 0 {
			return m, fmt.Errorf("%w: kind %d: padding in use", errMessage, m.kind)
		}
	case kindPrepare, kindSetup, kindServeFiles, kindOpenPTY, kindAck, kindRosterEnd, kindPrepared, kindPTY:
	default:
		return m, fmt.Errorf("%w: kind %d", errMessage, m.kind)
	}
	for _, x := range body[used:] {
		if x != 0 {
			return m, fmt.Errorf("%w: kind %d: padding in use", errMessage, m.kind)
		}
	}
	return m, nil
}

// check looks at what an answer of the inside may say at all.
func (m *message) check() error {
	var ok bool // what is not named here is not right
	numbered := m.cookie != 0
	switch m.kind {
	case kindStarted:
		ok = numbered && m.pid > 1
	case kindServing:
		ok = !numbered && m.pid > 1
	case kindFailed:
		ok = m.step != 0 && m.errno >= 0 && m.errno < 4096
	case kindSignalled:
		ok = numbered && m.step == 0 && m.flags == 0 && m.errno >= 0 && m.errno < 4096
	case kindReady, kindRoster:
		ok = !numbered && m.version == Version && m.count <= slots && m.nofile <= math.MaxInt64
	case kindRosterEnd, kindPrepared, kindPTY:
		ok = !numbered
	case kindProcess, kindExit:
		ok = numbered && m.pid > 1
		if m.state == stateExited {
			const most = math.MaxInt64 / 1000 / 4
			ws := syscall.WaitStatus(m.status)
			ok = ok && (ws.Exited() || ws.Signaled()) &&
				m.utime < most && m.stime < most && m.maxrss <= math.MaxInt64 && m.wall <= math.MaxInt64
		} else {
			ok = ok && m.kind == kindProcess && (m.state == stateStarting || m.state == stateRunning)
		}
	}
	if !ok {
		return fmt.Errorf("%w: kind %d from the inside: %+v", errMessage, m.kind, *m)
	}
	return nil
}

func (m *message) exit() chronus.Exit {
	return chronus.Exit{
		Number: m.cookie,
		Status: syscall.WaitStatus(m.status),
		CPU:    time.Duration(m.utime+m.stime) * time.Microsecond,
		MaxRSS: int64(m.maxrss),
		Wall:   time.Duration(m.wall),
	}
}

func (m *message) inForce() chronus.InForce {
	return chronus.InForce{
		Version:    m.version,
		Seccomp:    m.flags&factSeccomp != 0,
		Caps:       m.caps,
		UserNS:     m.flags&factUserNS != 0,
		NoNewPrivs: m.flags&factNoNewPrivs != 0,
		Masks:      int(m.masks),
		OpenFiles:  int64(m.nofile),
		Terminals:  m.flags&factPTY != 0,
		Shells:     m.flags&factShell != 0,
	}
}

// commandSteps are the steps of a command by their number; 8 and 9 are this side's fault or the limits'.
var commandSteps = map[uint32]chronus.Step{
	1:  chronus.StepFork,
	2:  chronus.StepStdio,
	3:  chronus.StepCgroup,
	4:  chronus.StepCwd,
	5:  chronus.StepUser,
	6:  chronus.StepFilter,
	7:  chronus.StepExec,
	8:  "spec",
	9:  "limits",
	10: chronus.StepTerminal,
}

// setupSteps are the steps of a sandbox's start by their number.
var setupSteps = map[uint32]string{
	32: "plan",
	33: "loopback",
	34: "root",
	35: "/proc",
	36: "/dev",
	37: "/dev/pts",
	38: "/dev/shm",
	39: "/dev/mqueue",
	40: "/sys",
	41: "masked paths",
	42: "cpus",
	43: "pivot",
	44: "hostname",
	45: "capabilities",
	46: "open files",
	47: "events",
	48: "control group namespace",
	49: "stage",
}

func (m *message) startError() *chronus.StartError {
	step, ok := commandSteps[m.step]
	if !ok {
		step = chronus.Step(fmt.Sprintf("step %d", m.step))
	}
	return &chronus.StartError{
		Step:        step,
		Errno:       syscall.Errno(m.errno),
		Interpreter: step == chronus.StepExec && m.flags&failedInterpreter != 0,
	}
}
