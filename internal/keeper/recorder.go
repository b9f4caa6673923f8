package keeper

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/linux/epoll"
	"github.com/sandsea/sandsea/internal/linux/eventfd"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/record"
)

// limits are what a keeper goes by; tests choose smaller ones.
type limits struct {
	rate      int64         // bytes per second of a stream past its caps
	maxStream int64         // where a stream overflows
	window    int64         // how far a lossless reader may lag before its writer waits
	patience  time.Duration // how long a writer waits for a lossless reader
	openFiles uint64        // what the process's limit is raised to
}

func defaultLimits() limits {
	return limits{
		rate: 32 << 20, maxStream: record.MaxStream, window: 64 << 20, patience: time.Minute, openFiles: 1 << 20,
	}
}

// pauseAt is by how much a stream must be ahead of its rate before it is put aside: less is not worth the system calls.
const pauseAt = 10 * time.Millisecond

// tally counts what the streams of one sandbox keep. Only its recorder's loop touches it.
type tally struct {
	budget  int64
	used    int64 // by the streams that are held
	settled int64 // by the records of released commands, as the edge says
}

// stream is one recorded stream. After it was handed to its recorder only the loop touches it, but for the descriptors,
// which the server may send on until it has asked for the stream's release.
type stream struct {
	token uint64
	key   Key
	which record.Stream
	pipe  int
	file  int
	// terminal is the master whose output goes through the pipe, of which feed is the write end; -1 for a pipe's own.
	terminal int
	feed     int
	ttyToken uint64
	dry      bool        // the terminal is at its end
	caps     record.Caps // what is in force: shrinks as the sandbox's budget fills, never grows
	pins     []record.Range
	tally    *tally

	size    int64 // of the file, and so of the stream
	holes   int64 // bytes of it that are not kept
	punched int64 // where the hole behind the head ends
	block   int64
	gapTo   int64 // a gap has begun and goes on at least to here, a block's end
	full    int   // bytes in one drain from which on the pipe counts as full; 0 once it has grown
	polled  bool
	ended   bool
	noPunch bool // the file system makes no holes: what comes after the caps is dropped
	over    bool // the overflow was told
	logged  bool

	next   time.Time // when the rate allows more
	retain int64     // a lossless reader's offset, -1 without
	wait   *deadline // when a stream that was put aside is looked at again; index -1: it was not
}

// toServer is what a recorder tells the server's loop.
type toServer struct {
	event Event // without Seq
}

// recorder drains the streams of some sandboxes in one goroutine. Others talk to it through tell.
type recorder struct {
	log    *slog.Logger
	limits limits
	report func(toServer)
	now    func() time.Time

	poll  *epoll.Poll
	null  *os.File
	ends  bool
	bys   map[uint64]*stream
	ttys  map[uint64]*stream // by ttyToken
	waits deadlines
	token uint64

	inbox
}

const tokenWake = 0

// fillSize is what is asked of a terminal at once: more than it ever has ready, less than a pipe holds.
const fillSize = 16 << 10

func newRecorder(log *slog.Logger, l limits, report func(toServer)) (*recorder, error) {
	r := &recorder{
		log: log, limits: l, report: report, now: time.Now, bys: make(map[uint64]*stream),
		ttys: make(map[uint64]*stream), token: tokenWake,
	}
	var err error
	if r.poll, err = epoll.New(64); err != nil {
		return nil, err
	}
	if r.wake, err = eventfd.New(); err != nil {
		return nil, err
	}
	if r.null, err = os.OpenFile(os.DevNull, os.O_WRONLY, 0); err != nil {
		return nil, fmt.Errorf("open null device: %w", err)
	}
	return r, r.poll.Add(r.wake.FD(), epoll.In, tokenWake)
}

// stop ends the loop.
func (r *recorder) stop() { r.tell(func() { r.ends = true }) }

// run is the loop. It closes what it holds when it ends.
func (r *recorder) run() error {
	defer func() {
		for _, s := range r.bys {
			r.drop(s)
		}
		r.null.Close()
		_ = r.wake.Close()
		_ = r.poll.Close()
	}()
	for !r.ends {
		evs, err := r.poll.Wait(r.timeout())
		if err != nil {
			return fmt.Errorf("recorder: %w", err)
		}
		for _, e := range evs {
			if e.Token == tokenWake {
				r.obey()
			} else if s := r.bys[e.Token]; s != nil && s.polled {
				r.drain(s, e.Ready&epoll.Hup != 0)
				r.endIfDry(s)
			} else if s := r.ttys[e.Token]; s != nil && s.polled {
				r.fill(s)
			}
		}
		r.resumeDue()
	}
	return nil
}

// timeout is how long the loop may sleep, in the milliseconds of epoll, rounded up; -1 is for ever.
func (r *recorder) timeout() int {
	if len(r.waits) == 0 {
		return -1
	}
	d := r.waits[0].at.Sub(r.now())
	return max(int((d+time.Millisecond-1)/time.Millisecond), 0)
}

// add takes a stream over and begins to record it at the file's size.
func (r *recorder) add(s *stream) {
	r.token++
	s.token = r.token
	if s.terminal >= 0 {
		r.token++
		s.ttyToken = r.token
		r.ttys[s.ttyToken] = s
	}
	s.retain = -1
	s.full = 48 << 10
	s.wait = &deadline{stream: s, index: -1}
	r.bys[s.token] = s
	if err := s.survey(); err != nil {
		r.complain(s, "look at record", err)
	}
	s.tally.used += s.size - s.holes
	r.watch(s)
}

// survey finds out what an earlier keeper left: where the hole ends, what is kept, and whether a gap is under way.
func (s *stream) survey() error {
	var st syscall.Stat_t
	if err := syscall.Fstat(s.file, &st); err != nil {
		return fmt.Errorf("stat record: %w", err)
	}
	s.size = st.Size
	var err error
	if s.block, err = sparse.Block(s.file); err != nil {
		return err
	}
	for at := int64(0); at < s.size; {
		hole, ok, err := sparse.NextHole(s.file, at)
		if err != nil {
			return err
		}
		if !ok || hole >= s.size {
			break
		}
		data, ok, err := sparse.NextData(s.file, hole)
		if err != nil {
			return err
		}
		if !ok {
			data = s.size
			s.gapTo = roundUp(s.size, s.block)
		}
		s.holes += data - hole
		if s.punched == 0 {
			s.punched = data / record.MinStep * record.MinStep
		}
		at = data
	}
	return nil
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

func (r *recorder) watch(s *stream) {
	if s.polled || s.ended {
		return
	}
	if err := r.poll.Add(s.pipe, epoll.In, s.token); err != nil {
		r.complain(s, "wait for output", err)
		return
	}
	s.polled = true
	if s.terminal >= 0 && !s.dry {
		if err := r.poll.Add(s.terminal, epoll.In, s.ttyToken); err != nil {
			r.complain(s, "wait for a terminal", err)
		}
	}
	r.endIfDry(s)
}

func (r *recorder) unwatch(s *stream) {
	if s.polled {
		s.polled = false
		if err := r.poll.Del(s.pipe); err != nil {
			r.complain(s, "stop waiting for output", err)
		}
		r.unwatchTerminal(s)
	}
}

func (r *recorder) unwatchTerminal(s *stream) {
	if s.terminal < 0 || s.dry {
		return
	}
	if err := r.poll.Del(s.terminal); err != nil {
		r.complain(s, "stop waiting for a terminal", err)
	}
}

// putAside lets a stream be until then.
func (r *recorder) putAside(s *stream, until time.Time) {
	r.unwatch(s)
	r.waits.set(s.wait, until)
}

func (r *recorder) bringBack(s *stream) {
	r.waits.remove(s.wait)
	r.watch(s)
}

func (r *recorder) resumeDue() {
	now := r.now()
	for d := r.waits.next(now); d != nil; d = r.waits.next(now) {
		s := d.stream
		if s.retain >= 0 && s.size-s.retain >= r.limits.window {
			r.log.Info("lossless reader is too slow, its output may get gaps", "sandbox", s.key.Sandbox,
				"command", s.key.Number, "stream", int(s.which))
			s.retain = -1
			r.punch(s)
		}
		r.bringBack(s)
	}
}

// fill moves what the terminal has into the pipe, and on from there.
func (r *recorder) fill(s *stream) {
	_, err := pipe.FromTerminal(s.terminal, s.feed, fillSize)
	if err != nil && !errors.Is(err, syscall.EAGAIN) {
		if !errors.Is(err, syscall.EIO) {
			r.complain(s, "read a terminal, its output ends here", err)
		}
		r.unwatchTerminal(s)
		s.dry = true
	}
	r.drain(s, false)
	r.endIfDry(s)
}

// endIfDry ends the stream of a terminal that is at its end once its pipe, which has no end of its own, is empty.
func (r *recorder) endIfDry(s *stream) {
	if !s.dry || s.ended || !s.polled {
		return
	}
	if n, err := pipe.Buffered(s.pipe); err != nil || n == 0 {
		r.end(s)
	}
}

// drain moves what is in the pipe, at most one pipe full, into the record. hup says that no writer was left when it was
// called.
func (r *recorder) drain(s *stream, hup bool) {
	if s.size < s.gapTo || s.noPunch && s.size >= s.caps.Head+s.caps.Tail {
		r.skip(s, hup)
		return
	}
	if s.caps.Tail == 0 && s.size >= s.caps.Head && s.retain < 0 {
		r.beginGap(s, hup) // nothing from here on is kept
		return
	}
	m, err := pipe.ToFile(s.pipe, s.file, s.size, pipe.MaxSize)
	switch {
	case errors.Is(err, syscall.EAGAIN):
	case err != nil:
		if !s.logged {
			r.complain(s, "write record, output is dropped", err)
		}
		s.logged = true
		r.beginGap(s, hup)
	case m == 0:
		r.end(s)
	default:
		s.size += int64(m)
		s.tally.used += int64(m)
		r.moved(s, m)
	}
}

// moved does what follows when m more bytes of the stream are past.
func (r *recorder) moved(s *stream, m int) {
	if s.full > 0 && m >= s.full {
		// Errors leave it small, which is slower and nothing else: the user's share of pipe pages may be used up.
		_, _ = pipe.Grow(s.pipe, pipe.MaxSize)
		s.full = 0
	}
	r.punch(s)
	if s.size >= r.limits.maxStream && !s.over {
		s.over = true
		r.report(toServer{Event{Kind: Overflow, Key: Key{Sandbox: s.key.Sandbox}, Stream: s.which, Size: s.size}})
	}
	if s.retain >= 0 {
		if s.size-s.retain >= r.limits.window {
			r.putAside(s, r.now().Add(r.limits.patience))
		}
		return
	}
	if s.size <= s.caps.Head+s.caps.Tail {
		return
	}
	now := r.now()
	if s.next.Before(now) {
		s.next = now
	}
	s.next = s.next.Add(time.Duration(int64(m) * int64(time.Second) / r.limits.rate))
	if s.next.Sub(now) > pauseAt {
		r.putAside(s, s.next)
	}
}

// punch makes the hole that the caps ask for now.
func (r *recorder) punch(s *stream) {
	t := s.tally
	share := record.Share(s.caps, t.budget, t.settled+t.used-(s.size-s.holes))
	s.caps = record.Caps{Head: min(s.caps.Head, share.Head), Tail: min(s.caps.Tail, share.Tail)}
	if s.noPunch {
		return
	}
	hole, ok := record.Punch(s.caps, s.size, s.punched, s.retain)
	if !ok {
		return
	}
	for _, h := range record.Without(hole, s.pins) {
		before, err := sparse.Allocated(s.file)
		if err == nil {
			err = sparse.Punch(s.file, h.From, h.Len())
		}
		if err != nil {
			// A file system without holes keeps its bound all the same: what comes after the caps is dropped.
			r.complain(s, "punch record, later output is dropped", err)
			s.noPunch = true
			return
		}
		after, err := sparse.Allocated(s.file)
		freed := h.Len()
		if err == nil {
			// Parts of it may have been a gap before.
			freed = min(freed, max(before-after, 0))
		}
		s.holes += freed
		t.used -= freed
	}
	s.punched = hole.To
}

// beginGap is called when the record cannot take what is in the pipe. The gap must begin where a block does, since a
// block reads as all data or all hole.
func (r *recorder) beginGap(s *stream, hup bool) {
	if rest := s.size % s.block; rest != 0 {
		m, err := pipe.ToFile(s.pipe, s.file, s.size, int(s.block-rest))
		if err == nil && m > 0 {
			// The block was allocated already. If output is left, the next turn meets the error again.
			s.size += int64(m)
			s.tally.used += int64(m)
			r.moved(s, m)
			return
		}
		if err == nil {
			r.end(s)
			return
		}
		if errors.Is(err, syscall.EAGAIN) {
			return
		}
		// A file system that writes every block to a new place: give up the begun block too.
		if err := sparse.Punch(s.file, s.size-rest, s.block); err != nil {
			r.complain(s, "begin gap in record", err)
		}
		s.holes += rest
		s.tally.used -= rest
	}
	r.skip(s, hup)
}

// skip drops what is in the pipe and lengthens the record by as much: a gap. It goes on at least to the
// end of a block. The record is lengthened first: cut by a kill it says that more is missing than is, and shows no
// byte where it does not belong.
func (r *recorder) skip(s *stream, hup bool) {
	n, err := pipe.Buffered(s.pipe)
	switch {
	case err != nil:
		r.complain(s, "look into pipe", err)
		r.end(s)
		return
	case n == 0:
		if hup {
			r.end(s)
		}
		return
	case s.size < s.gapTo:
		// Of a gap that is under way only what it needs: the next turn tries the record again.
		n = min(n, int(s.gapTo-s.size))
	}
	if err := syscall.Ftruncate(s.file, s.size+int64(n)); err != nil {
		r.complain(s, "lengthen record, output is lost without a gap", err)
	} else {
		s.size += int64(n)
		s.holes += int64(n)
		s.gapTo = roundUp(s.size, s.block)
	}
	for left := n; left > 0; {
		m, err := pipe.Discard(s.pipe, int(r.null.Fd()), left)
		if err != nil || m == 0 {
			r.complain(s, "drop output", errors.Join(err, errShort))
			break
		}
		left -= m
	}
	r.moved(s, n)
}

var errShort = errors.New("less output than was there")

func (r *recorder) end(s *stream) {
	r.unwatch(s)
	s.ended = true
	r.report(toServer{Event{Kind: Closed, Key: s.key, Stream: s.which, Size: s.size}})
}

// retainFrom sets or lifts a lossless reader's offset.
func (r *recorder) retainFrom(s *stream, from int64) {
	s.retain = from
	if from < 0 {
		s.retain = -1
	}
	if s.ended {
		return
	}
	r.punch(s)
	if s.retain >= 0 && s.size-s.retain >= r.limits.window {
		r.putAside(s, r.now().Add(r.limits.patience))
		return
	}
	r.bringBack(s)
}

// release forgets a stream and closes its descriptors.
func (r *recorder) release(s *stream) {
	s.tally.used -= s.size - s.holes
	r.unwatch(s)
	r.waits.remove(s.wait)
	delete(r.bys, s.token)
	delete(r.ttys, s.ttyToken)
	r.drop(s)
}

func (r *recorder) drop(s *stream) {
	closeFD(s.pipe, s.file, s.terminal, s.feed)
}

func (r *recorder) complain(s *stream, what string, err error) {
	r.log.Warn("record: "+what, "sandbox", s.key.Sandbox, "command", s.key.Number, "stream", int(s.which), "err", err)
}
