package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/epoll"
	"github.com/sandsea/sandsea/internal/linux/eventfd"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/linux/timerfd"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/record"
)

// Config is what a keeper process is told by the command that runs it.
type Config struct {
	// Socket is where the edge connects: DIR/run/keeper.sock.
	Socket string
	// DataID is the data directory's id; a peer must know it.
	DataID string
	// Index is the directory of the index file: DIR/run.
	Index string
	// Table is the descriptor of what the program that this process was before has left; 0: it was none.
	Table int
	Log   *slog.Logger

	limits limits // zero: the real ones
}

// recorders is how many loops drain streams: more than one, so that a slow disk under one flood does not hold up every
// stream; few, since they cost a thread each.
const recorders = 2

// maxBacklog is how many messages wait for an edge that does not read before it is cut off. It gets everything again
// when it comes back.
const maxBacklog = 1 << 16

// Run is the keeper process: it returns when ctx ends, with every descriptor given up, or when it cannot go on.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.limits == (limits{}) {
		cfg.limits = defaultLimits()
	}
	raiseOpenFiles(cfg.Log, cfg.limits.openFiles)
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("keeper: %w", err)
	}
	before := &inherited{listen: -1}
	if cfg.Table > 0 {
		if before, err = inherit(cfg.Table, cfg.DataID); err != nil {
			return fmt.Errorf("keeper: %w", err)
		}
	}
	idx, err := openIndex(filepath.Join(cfg.Index, "keeper.index"), strings.TrimSpace(string(boot)), cfg.DataID, before.lock)
	if err != nil {
		return fmt.Errorf("keeper: %w", err)
	}
	defer func() { _ = idx.close() }()
	s, err := newServer(cfg, idx, before.listen)
	if err != nil {
		return fmt.Errorf("keeper: %w", err)
	}
	defer s.close()
	s.restore(before)
	stop := context.AfterFunc(ctx, func() { s.tell(func() { s.ends = true }) })
	defer stop()
	return s.run()
}

// raiseOpenFiles makes room: three descriptors for a sandbox and up to six for a command.
func raiseOpenFiles(log *slog.Logger, want uint64) {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil || l.Cur >= want {
		return
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: want, Max: max(l.Max, want)}); err == nil {
		return
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: l.Max, Max: l.Max}); err != nil {
		log.Warn("limit of open files stays", "limit", l.Cur, "err", err)
	}
}

// held is what the keeper has of a sandbox. Descriptors are -1 where there is none.
type held struct {
	id        string
	control   int
	pidfd     int
	kill      int
	hard      time.Time
	budget    int64
	settled   int64
	suspended bool
	fired     bool
	end       *deadline
	token     uint64 // of the pidfd in the loop
	execs     map[int64]*heldExec
	recorder  *recorder
	tally     *tally
}

// heldExec is what the keeper has of a command.
type heldExec struct {
	key     Key
	caps    record.Caps
	stdin   int
	kill    int
	clock   clock
	end     *deadline
	fired   bool
	streams []*heldStream
}

// heldStream is the server's side of a stream; the rest is the recorder's.
type heldStream struct {
	s      *stream
	pins   []record.Range
	closed bool
}

// peer is one connection. Only the newest that greeted acts.
type peer struct {
	fd      int
	token   uint64
	greeted bool
	foreign bool // of another version of the wire: it may ask for the roster and for an upgrade
	knows   feature
	out     []func() ([]byte, []int) // what waits to be sent; nil bytes: it is no more
	blocked bool                     // it has no room, and the loop waits for some
}

// server is the loop that owns everything but the streams. All its methods run in it, except tell.
type server struct {
	cfg   Config
	log   *slog.Logger
	index *index
	now   func() time.Time

	poll   *epoll.Poll
	mono   *timerfd.Timer
	wall   *timerfd.Timer
	listen int
	ends   bool

	token     uint64
	onReady   map[uint64]func(ready uint32)
	peers     map[uint64]*peer
	edge      *peer
	boxes     map[string]*held
	commands  deadlines // monotonic
	sandboxes deadlines // wall
	monoAt    time.Time // what mono is armed for
	wallAt    time.Time // what wall is armed for
	seq       uint64
	events    []Event // not acknowledged, by Seq
	buf, oob  []byte
	later     []func() // what recorders are told when the present request is answered

	recs  []*recorder
	next  int
	loops sync.WaitGroup

	inbox
}

// newServer makes the loop; listen is a listening socket, or negative to make one.
func newServer(cfg Config, idx *index, listen int) (*server, error) {
	s := &server{
		cfg: cfg, log: cfg.Log, index: idx, now: time.Now, listen: listen,
		onReady: make(map[uint64]func(uint32)), peers: make(map[uint64]*peer), boxes: make(map[string]*held),
		buf: make([]byte, maxMessage), oob: make([]byte, scm.OobSpace()),
	}
	var err error
	if s.poll, err = epoll.New(64); err != nil {
		return nil, err
	}
	if s.wake, err = eventfd.New(); err != nil {
		return nil, err
	}
	if s.mono, err = timerfd.NewMonotonic(); err != nil {
		return nil, err
	}
	if s.wall, err = timerfd.NewWall(); err != nil {
		return nil, err
	}
	for range recorders {
		r, err := newRecorder(cfg.Log, cfg.limits, func(m toServer) { s.tell(func() { s.recorded(m) }) })
		if err != nil {
			return nil, err
		}
		s.recs = append(s.recs, r)
	}
	if s.listen < 0 {
		if s.listen, err = scm.ListenFD(cfg.Socket); err != nil {
			return nil, err
		}
	}
	for _, e := range []struct {
		fd int
		do func(uint32)
	}{
		{s.wake.FD(), func(uint32) { s.obey() }},
		// What is due is looked for after every turn; until then the timers count as not armed.
		{s.mono.FD(), func(uint32) { _ = s.mono.Clear(); s.monoAt = time.Time{} }},
		{s.wall.FD(), func(uint32) { _ = s.wall.Clear(); s.wallAt = time.Time{} }},
		{s.listen, func(uint32) { s.accept() }},
	} {
		if _, err := s.watch(e.fd, e.do); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *server) watch(fd int, do func(uint32)) (uint64, error) {
	s.token++
	s.onReady[s.token] = do
	return s.token, s.poll.Add(fd, epoll.In, s.token)
}

func (s *server) unwatch(fd int, token uint64) {
	if token == 0 {
		return
	}
	delete(s.onReady, token)
	if err := s.poll.Del(fd); err != nil {
		s.log.Warn("leave event loop", "err", err)
	}
}

func (s *server) run() error {
	failed := make(chan error, len(s.recs))
	for _, r := range s.recs {
		s.loops.Go(func() {
			if err := r.run(); err != nil {
				// A keeper that does not record is worse than none: the edge starts another and sends all again.
				failed <- err
				s.tell(func() { s.ends = true })
			}
		})
	}
	s.log.Info("keeper ready", "socket", s.cfg.Socket)
	for !s.ends {
		evs, err := s.poll.Wait(-1)
		if err != nil {
			return fmt.Errorf("keeper: %w", err)
		}
		for _, e := range evs {
			if do := s.onReady[e.Token]; do != nil {
				do(e.Ready)
			}
		}
		s.expire()
	}
	select {
	case err := <-failed:
		return fmt.Errorf("keeper: %w", err)
	default:
		return nil
	}
}

// close gives everything up.
func (s *server) close() {
	for _, b := range s.boxes {
		for _, e := range b.execs {
			closeFD(e.stdin, e.kill)
		}
		closeFD(b.control, b.pidfd, b.kill)
	}
	for _, r := range s.recs {
		r.stop()
	}
	s.loops.Wait()
	for _, p := range s.peers {
		closeFD(p.fd)
	}
	_ = os.Remove(s.cfg.Socket)
	closeFD(s.listen)
	_ = s.wake.Close()
	_ = s.mono.Close()
	_ = s.wall.Close()
	_ = s.poll.Close()
}

func closeFD(fds ...int) {
	for _, fd := range fds {
		if fd >= 0 {
			_ = syscall.Close(fd)
		}
	}
}

// Connections.

func (s *server) accept() {
	fd, err := scm.AcceptFD(s.listen)
	if err != nil {
		if !errors.Is(err, syscall.EAGAIN) {
			s.log.Warn("accept", "err", err)
		}
		return
	}
	cred, err := scm.PeerOf(fd)
	if err != nil || int(cred.UID) != os.Geteuid() {
		s.log.Warn("peer refused", "uid", cred.UID, "pid", cred.Pid, "err", err)
		closeFD(fd)
		return
	}
	p := &peer{fd: fd}
	if p.token, err = s.watch(fd, func(ready uint32) { s.serve(p, ready) }); err != nil {
		s.log.Warn("accept", "err", err)
		closeFD(fd)
		return
	}
	s.peers[p.token] = p
}

func (s *server) hangUp(p *peer) {
	if s.peers[p.token] != p {
		return
	}
	delete(s.peers, p.token)
	s.unwatch(p.fd, p.token)
	closeFD(p.fd)
	p.out = nil
	if s.edge == p {
		s.edge = nil
	}
}

// serve handles what a peer sent, up to a number of messages that keeps the loop fair.
func (s *server) serve(p *peer, ready uint32) {
	if ready&epoll.Out != 0 {
		s.flush(p)
	}
	for range 32 {
		if s.peers[p.token] != p {
			return
		}
		n, fds, err := scm.Recvmsg(p.fd, s.buf, s.oob)
		switch {
		case errors.Is(err, syscall.EAGAIN):
			return
		case errors.Is(err, scm.ErrTruncated) && n > 0 && p.greeted:
			_, id, _ := open(s.buf[:n])
			s.answer(p, id, errdefs.New(errdefs.Exhausted, "keeper", "it can hold no more descriptors"))
			continue
		case err != nil:
			if !errors.Is(err, io.EOF) {
				s.log.Warn("connection broken", "err", err)
			}
			s.hangUp(p)
			return
		}
		s.handle(p, s.buf[:n], fds)
	}
}

func (s *server) send(p *peer, payload []byte) {
	s.push(p, func() ([]byte, []int) { return payload, nil })
}

// push sends what fn gives, now or when the peer has room; fn is called then, since what it speaks of may be gone.
func (s *server) push(p *peer, fn func() ([]byte, []int)) {
	if s.peers[p.token] != p {
		return
	}
	if len(p.out) >= maxBacklog {
		s.log.Warn("edge does not read, connection closed")
		s.hangUp(p)
		return
	}
	p.out = append(p.out, fn)
	if !p.blocked {
		s.flush(p)
	}
}

// flush sends what waits, until the peer has no room.
func (s *server) flush(p *peer) {
	for i, fn := range p.out {
		payload, fds := fn()
		if payload == nil {
			continue
		}
		err := scm.Sendmsg(p.fd, payload, fds)
		if errors.Is(err, syscall.EAGAIN) {
			p.out = p.out[i:]
			s.wantRoom(p, true)
			return
		}
		if err != nil {
			s.log.Warn("send to edge", "err", err)
			s.hangUp(p)
			return
		}
	}
	p.out = nil
	s.wantRoom(p, false)
}

func (s *server) wantRoom(p *peer, on bool) {
	if p.blocked == on {
		return
	}
	p.blocked = on
	what := epoll.In
	if on {
		what |= epoll.Out
	}
	if err := s.poll.Mod(p.fd, what, p.token); err != nil {
		s.log.Warn("wait for room", "err", err)
		s.hangUp(p)
	}
}

func (s *server) answer(p *peer, id uint32, err error) {
	var m reply
	if err != nil {
		e := errdefs.From(err)
		m = reply{kind: string(e.Kind), object: e.Object, msg: e.Msg}
	}
	s.send(p, m.encode(id))
}

// handle does one request. fds are closed here unless a handler keeps them.
func (s *server) handle(p *peer, msg []byte, fds []int) {
	k, id, r := open(msg)
	if !p.greeted {
		scm.CloseAll(fds)
		s.greet(p, k, r)
		return
	}
	if k != kHold && k != kRecord && k != kUpgrade && len(fds) > 0 || p.foreign && k != kRoster && k != kUpgrade {
		scm.CloseAll(fds)
		s.hangUp(p)
		return
	}
	switch k {
	case kHold:
		m, err := decodeSandbox(r)
		if err == nil && m.fileCount() != len(fds) {
			err = fmt.Errorf("%d files, said %d", len(fds), m.fileCount())
		}
		if err != nil {
			scm.CloseAll(fds)
			s.answer(p, id, invalid(err))
			return
		}
		s.answer(p, id, s.hold(m, fds))
	case kRecord:
		m, err := decodeExec(r)
		if err == nil && m.fileCount() != len(fds) {
			err = fmt.Errorf("%d files, said %d", len(fds), m.fileCount())
		}
		if err != nil {
			scm.CloseAll(fds)
			s.answer(p, id, invalid(err))
			return
		}
		s.answer(p, id, s.record(m, fds))
		s.startTold()
	case kRoster:
		s.roster(p, id)
	case kUpgrade:
		s.upgrade(p, id, r, fds)
	case kAck:
		s.ack(r.u64())
	case kRelease:
		m, err := decodeKey(r)
		if err != nil {
			s.answer(p, id, invalid(err))
			return
		}
		b := s.boxes[m.key.Sandbox]
		s.release(m.key)
		s.startTold()
		if b == nil {
			s.answer(p, id, nil)
			return
		}
		// Only once the recorder has let go: who asked takes what is left in the pipes, and must be the only one who does.
		b.recorder.tell(func() { s.tell(func() { s.answer(p, id, nil) }) })
	case kRearm, kSuspend, kContinue, kRetain, kCloseInput, kPin:
		m, err := decodeKey(r)
		if err != nil {
			s.answer(p, id, invalid(err))
			return
		}
		s.answer(p, id, s.request(k, m))
		s.startTold()
	default:
		s.answer(p, id, errdefs.New(errdefs.Invalid, "keeper", "unknown request %d", k))
	}
}

func invalid(err error) error {
	return errdefs.New(errdefs.Invalid, "keeper", "%s", err.Error()).Wrap(err)
}

func (s *server) greet(p *peer, k kind, r *reader) {
	m, err := decodeHello(r)
	if k != kHello || err != nil || m.dataID != s.cfg.DataID {
		s.log.Warn("peer refused", "version", m.version, "err", err)
		// It is told what we are, so that it can say more than that we hung up.
		_ = scm.Sendmsg(p.fd, hello{version: wireVersion}.encode(kWelcome), nil)
		s.hangUp(p)
		return
	}
	p.greeted, p.knows = true, m.features
	if m.version != wireVersion {
		p.foreign = true
		s.send(p, hello{version: wireVersion, dataID: s.cfg.DataID, features: features}.encode(kWelcome))
		return
	}
	if s.edge != nil {
		s.log.Info("edge superseded")
		s.hangUp(s.edge)
	}
	s.edge = p
	s.send(p, hello{version: wireVersion, dataID: s.cfg.DataID, features: features}.encode(kWelcome))
	for _, e := range s.events {
		s.send(p, encodeEvent(e))
	}
}

// tellLater has a recorder told once the answer is on its way: waking it would take the processor from who waits for
// that.
func (s *server) tellLater(r *recorder, fn func()) {
	s.later = append(s.later, func() { r.tell(fn) })
}

func (s *server) startTold() {
	for _, fn := range s.later {
		fn()
	}
	s.later = s.later[:0]
}

// Requests.

func object(k Key) string {
	if k.Number == 0 {
		return "sandbox " + k.Sandbox
	}
	return fmt.Sprintf("command %d of sandbox %s", k.Number, k.Sandbox)
}

func notHeld(k Key) error {
	return errdefs.New(errdefs.NotFound, object(k), "the keeper does not hold it")
}

func (s *server) hold(m sandboxMsg, fds []int) error {
	if s.boxes[m.id] != nil {
		scm.CloseAll(fds)
		return nil
	}
	if !m.hard.IsZero() && !m.files[2] {
		scm.CloseAll(fds)
		return errdefs.New(errdefs.Invalid, "sandbox "+m.id, "a hard end needs its cgroup.kill")
	}
	take := func(present bool) int {
		if !present {
			return -1
		}
		fd := fds[0]
		fds = fds[1:]
		return fd
	}
	b := &held{
		id: m.id, control: take(m.files[0]), pidfd: take(m.files[1]), kill: take(m.files[2]),
		hard: m.hard, budget: m.budget, suspended: m.suspended, execs: make(map[int64]*heldExec),
		recorder: s.recs[s.next%len(s.recs)], tally: &tally{budget: m.budget},
	}
	s.next++
	key := Key{Sandbox: b.id}
	b.end = &deadline{key: key, index: -1}
	if b.pidfd >= 0 {
		var err error
		if b.token, err = s.watch(b.pidfd, func(uint32) { s.died(b) }); err != nil {
			closeFD(b.control, b.pidfd, b.kill)
			return errdefs.New(errdefs.Invalid, "sandbox "+b.id, "its pidfd cannot be waited for: %v", err).Wrap(err)
		}
	}
	s.boxes[b.id] = b
	switch {
	case s.index.has(Overflow, key):
		s.kill(key, b.kill)
		s.emit(Event{Kind: Overflow, Key: key})
	case s.index.has(Fired, key):
		b.fired = true
		s.kill(key, b.kill)
		s.emit(Event{Kind: Fired, Key: key})
	case !b.hard.IsZero():
		s.sandboxes.set(b.end, b.hard)
	}
	return nil
}

func (s *server) record(m execMsg, fds []int) error {
	b := s.boxes[m.key.Sandbox]
	if b == nil {
		scm.CloseAll(fds)
		return errdefs.New(errdefs.FailedPrecondition, object(m.key), "the keeper does not hold its sandbox")
	}
	if b.execs[m.key.Number] != nil {
		scm.CloseAll(fds)
		return nil
	}
	if err := checkExec(m, fds); err != nil {
		scm.CloseAll(fds)
		return err
	}
	b.settled = m.settled
	s.tellLater(b.recorder, func() { b.tally.settled = m.settled })
	e := &heldExec{key: m.key, caps: m.caps, stdin: -1, kill: -1, end: &deadline{key: m.key, index: -1}}
	for _, sm := range m.streams {
		h := &heldStream{pins: sm.pins, s: &stream{
			key: m.key, which: sm.stream, pipe: fds[0], file: fds[1], terminal: -1, feed: -1, caps: m.caps, pins: sm.pins,
			tally: b.tally,
		}}
		fds = fds[2:]
		e.streams = append(e.streams, h)
		s.tellLater(b.recorder, func() { b.recorder.add(h.s) })
	}
	if m.stdin {
		e.stdin, fds = fds[0], fds[1:]
	}
	if m.kill {
		e.kill, fds = fds[0], fds[1:]
	}
	for i, sm := range m.streams {
		if sm.terminal {
			e.streams[i].s.terminal, e.streams[i].s.feed, fds = fds[0], fds[1], fds[2:]
		}
	}
	b.execs[m.key.Number] = e
	if s.index.has(Fired, m.key) {
		e.fired = true
		s.kill(e.key, e.kill)
		s.emit(Event{Kind: Fired, Key: e.key})
		return nil
	}
	e.clock.arm(m.remaining, s.now(), b.suspended)
	s.schedule(e)
	return nil
}

// checkExec refuses what could not be recorded.
func checkExec(m execMsg, fds []int) error {
	if m.remaining > 0 && !m.kill {
		return errdefs.New(errdefs.Invalid, object(m.key), "a deadline needs its cgroup.kill")
	}
	ends := fds[len(fds)-2*m.terminals():]
	for i, sm := range m.streams {
		if sm.terminal {
			if err := checkTerminal(ends[0], ends[1]); err != nil {
				return errdefs.New(errdefs.Invalid, object(m.key), "stream %d: %v", sm.stream, err).Wrap(err)
			}
			ends = ends[2:]
		}
		if !pipe.IsPipe(fds[2*i]) {
			return errdefs.New(errdefs.Invalid, object(m.key), "stream %d is not a pipe", sm.stream)
		}
		var st syscall.Stat_t
		if err := syscall.Fstat(fds[2*i+1], &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG {
			return errdefs.New(errdefs.Invalid, object(m.key), "the record of stream %d is no regular file", sm.stream)
		}
		if err := pipe.CanSpliceTo(fds[2*i+1]); err != nil {
			return errdefs.New(errdefs.Invalid, object(m.key), "the record of stream %d: %v", sm.stream, err).Wrap(err)
		}
	}
	return nil
}

// checkTerminal refuses what is no master, or what a recorder would wait at.
func checkTerminal(master, feed int) error {
	if err := tty.CheckMaster(master); err != nil {
		return err
	}
	switch waits, err := tty.Waits(master); {
	case err != nil:
		return err
	case waits:
		return errors.New("reading its terminal waits")
	case !pipe.IsPipe(feed):
		return errors.New("its feed is not a pipe")
	}
	return nil
}

// schedule puts a command's deadline where its clock says.
func (s *server) schedule(e *heldExec) {
	if at, ok := e.clock.due(); ok && !e.fired {
		s.commands.set(e.end, at)
	} else {
		s.commands.remove(e.end)
	}
}

func (s *server) request(k kind, m keyMsg) error {
	b := s.boxes[m.key.Sandbox]
	if b == nil {
		return notHeld(m.key)
	}
	switch k {
	case kSuspend, kContinue:
		s.suspend(b, k == kSuspend)
		return nil
	case kRearm:
		if m.key.Number == 0 {
			return s.rearmSandbox(b, m.hard)
		}
	}
	e := b.execs[m.key.Number]
	if e == nil {
		return notHeld(m.key)
	}
	switch k {
	case kRearm:
		return s.rearmExec(b, e, m.remaining)
	case kCloseInput:
		closeFD(e.stdin)
		e.stdin = -1
		return nil
	}
	for _, h := range e.streams {
		if h.s.which != m.stream {
			continue
		}
		switch k {
		case kRetain:
			s.tellLater(b.recorder, func() { b.recorder.retainFrom(h.s, m.span.From) })
		case kPin:
			if len(h.pins) >= maxPins {
				return errdefs.New(errdefs.Exhausted, object(m.key), "stream %d has %d pins", m.stream, maxPins)
			}
			h.pins = append(h.pins, m.span)
			s.tellLater(b.recorder, func() { h.s.pins = append(h.s.pins, m.span) })
		}
		return nil
	}
	return errdefs.New(errdefs.NotFound, object(m.key), "it has no recorded stream %d", m.stream)
}

func (s *server) suspend(b *held, on bool) {
	if b.suspended == on {
		return
	}
	b.suspended = on
	now := s.now()
	for _, e := range b.execs {
		if on {
			e.clock.suspend(now)
		} else {
			e.clock.resume(now)
		}
		s.schedule(e)
	}
}

func (s *server) rearmSandbox(b *held, hard time.Time) error {
	switch {
	case b.fired:
		return errdefs.New(errdefs.FailedPrecondition, "sandbox "+b.id, "its hard end has come")
	case !hard.IsZero() && b.kill < 0:
		return errdefs.New(errdefs.Invalid, "sandbox "+b.id, "a hard end needs its cgroup.kill")
	}
	b.hard = hard
	if hard.IsZero() {
		s.sandboxes.remove(b.end)
	} else {
		s.sandboxes.set(b.end, hard)
	}
	return nil
}

func (s *server) rearmExec(b *held, e *heldExec, remaining time.Duration) error {
	switch {
	case e.fired:
		return errdefs.New(errdefs.FailedPrecondition, object(e.key), "its deadline has come")
	case remaining > 0 && e.kill < 0:
		return errdefs.New(errdefs.Invalid, object(e.key), "a deadline needs its cgroup.kill")
	}
	e.clock.arm(remaining, s.now(), b.suspended)
	s.schedule(e)
	return nil
}

func (s *server) release(k Key) {
	b := s.boxes[k.Sandbox]
	if k.Number != 0 {
		if b != nil && b.execs[k.Number] != nil {
			s.releaseExec(b, b.execs[k.Number])
		}
		s.forget(k)
		return
	}
	if b != nil {
		for _, e := range b.execs {
			s.releaseExec(b, e)
		}
		s.sandboxes.remove(b.end)
		s.unwatch(b.pidfd, b.token)
		closeFD(b.control, b.pidfd, b.kill)
		delete(s.boxes, b.id)
	}
	for _, mk := range s.index.keys(k.Sandbox) {
		s.forget(mk)
	}
	s.forget(k)
}

func (s *server) releaseExec(b *held, e *heldExec) {
	s.commands.remove(e.end)
	closeFD(e.stdin, e.kill)
	for _, h := range e.streams {
		s.tellLater(b.recorder, func() { b.recorder.release(h.s) })
	}
	delete(b.execs, e.key.Number)
	s.forgetEvents(e.key)
}

func (s *server) forget(k Key) {
	s.forgetEvents(k)
	if err := s.index.forget(k); err != nil {
		s.log.Warn("forget in index", "err", err)
	}
}

func (s *server) forgetEvents(k Key) {
	left := s.events[:0]
	for _, e := range s.events {
		if e.Key != k {
			left = append(left, e)
		}
	}
	s.events = left
}

// roster sends everything held, each entry as it is when its turn comes.
func (s *server) roster(p *peer, id uint32) {
	for name := range s.boxes {
		s.push(p, func() ([]byte, []int) {
			b := s.boxes[name]
			if b == nil {
				return nil, nil
			}
			return s.describeBox(b, id)
		})
	}
	for name, b := range s.boxes {
		for number := range b.execs {
			s.push(p, func() ([]byte, []int) {
				b := s.boxes[name]
				if b == nil || b.execs[number] == nil {
					return nil, nil
				}
				return s.describe(b.execs[number], id, p.knows)
			})
		}
	}
	s.push(p, func() ([]byte, []int) { return reply{}.encode(id), nil })
}

func (s *server) describeBox(b *held, id uint32) ([]byte, []int) {
	m := sandboxMsg{id: b.id, hard: b.hard, budget: b.budget, suspended: b.suspended, fired: b.fired}
	var fds []int
	for i, fd := range []int{b.control, b.pidfd, b.kill} {
		if m.files[i] = fd >= 0; fd >= 0 {
			fds = append(fds, fd)
		}
	}
	return m.encode(kHeldSandbox, id), fds
}

// describe tells a peer of a command as far as it knows what that means.
func (s *server) describe(e *heldExec, id uint32, knows feature) ([]byte, []int) {
	m := execMsg{key: e.key, caps: e.caps, fired: e.fired, stdin: e.stdin >= 0, kill: e.kill >= 0}
	if b := s.boxes[e.key.Sandbox]; b != nil {
		m.settled = b.settled
	}
	if e.clock.armed && !e.fired {
		m.remaining = max(e.clock.remaining(s.now()), 1)
	}
	var fds []int
	for _, h := range e.streams {
		m.streams = append(m.streams, streamMsg{
			stream: h.s.which, closed: h.closed, pins: h.pins, terminal: h.s.terminal >= 0 && knows&terminals != 0,
		})
		fds = append(fds, h.s.pipe, h.s.file)
	}
	for _, fd := range []int{e.stdin, e.kill} {
		if fd >= 0 {
			fds = append(fds, fd)
		}
	}
	for i, h := range e.streams {
		if m.streams[i].terminal {
			fds = append(fds, h.s.terminal, h.s.feed)
		}
	}
	return m.encode(kHeldExec, id), fds
}

// Events and deadlines.

func (s *server) emit(e Event) {
	s.seq++
	e.Seq = s.seq
	s.events = append(s.events, e)
	if s.edge != nil {
		s.send(s.edge, encodeEvent(e))
	}
}

func (s *server) ack(seq uint64) {
	for i, e := range s.events {
		if e.Seq == seq {
			s.events = append(s.events[:i], s.events[i+1:]...)
			return
		}
	}
}

func (s *server) died(b *held) {
	s.unwatch(b.pidfd, b.token)
	b.token = 0
	s.emit(Event{Kind: Died, Key: Key{Sandbox: b.id}})
}

// recorded is what a recorder told. The key may have been released meanwhile.
func (s *server) recorded(m toServer) {
	e := m.event
	b := s.boxes[e.Key.Sandbox]
	if b == nil {
		return
	}
	if e.Kind == Overflow {
		s.remember(Overflow, e.Key)
		s.kill(e.Key, b.kill)
		s.emit(e)
		return
	}
	x := b.execs[e.Key.Number]
	if x == nil {
		return
	}
	for _, h := range x.streams {
		if h.s.which == e.Stream && !h.closed {
			h.closed = true
			s.emit(e)
		}
	}
}

// expire kills what is due and sets the timers for what comes next.
func (s *server) expire() {
	now := s.now()
	for d := s.commands.next(now); d != nil; d = s.commands.next(now) {
		s.commands.remove(d)
		e := s.boxes[d.key.Sandbox].execs[d.key.Number]
		e.fired = true
		s.fire(d.key, e.kill)
	}
	// Without its monotonic part, so that setting the clock counts.
	wall := now.Round(0)
	for d := s.sandboxes.next(wall); d != nil; d = s.sandboxes.next(wall) {
		s.sandboxes.remove(d)
		b := s.boxes[d.key.Sandbox]
		b.fired = true
		s.fire(d.key, b.kill)
	}
	if len(s.commands) > 0 && !s.commands[0].at.Equal(s.monoAt) {
		s.monoAt = s.commands[0].at
		s.armed(s.mono.After(s.monoAt.Sub(now)))
	}
	if len(s.sandboxes) > 0 && !s.sandboxes[0].at.Equal(s.wallAt) {
		s.wallAt = s.sandboxes[0].at
		s.armed(s.wall.At(s.wallAt))
	}
}

func (s *server) armed(err error) {
	if err != nil {
		s.log.Error("set timer", "err", err)
	}
}

// fire keeps the event, then kills, then tells.
func (s *server) fire(k Key, kill int) {
	s.remember(Fired, k)
	s.kill(k, kill)
	s.emit(Event{Kind: Fired, Key: k})
}

func (s *server) remember(kind EventKind, k Key) {
	if err := s.index.add(kind, k); err != nil {
		// The kill goes on all the same: a deadline must hold also on a broken disk.
		s.log.Error("keep event in index", "sandbox", k.Sandbox, "command", k.Number, "err", err)
	}
}

func (s *server) kill(k Key, fd int) {
	if fd < 0 {
		return
	}
	_, err := syscall.Write(fd, []byte("1"))
	// ENODEV: the cgroup is gone, and with it what was to be killed.
	if err != nil && !errors.Is(err, syscall.ENODEV) {
		s.log.Error("write cgroup.kill", "sandbox", k.Sandbox, "command", k.Number, "err", err)
	}
}
