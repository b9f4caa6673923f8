package files

import (
	"context"
	"errors"
	"math"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/inotify"
)

// place is a watched directory, or the watched file.
type place struct {
	wd    int32
	ino   uint64
	in    *place // nil: the top
	name  string
	below map[string]*place
	// claims are names under which a directory was found that is watched in another place: its move is to be told.
	claims map[string]int32
	untold map[string]struct{} // of these, those that nobody was told of yet
	unseen bool                // what it holds could not be listed under the name that it had
	late   map[string]struct{} // directories that could not be watched under the name that it had
	// told, unless it is nil, is which names were told and are not gone: some by a listing, whose events may still be in
	// the queue. Until is where in the queue that ends.
	told  map[string]struct{}
	until int64
}

// placeName is a name in a watched directory; "" is the place itself.
type placeName struct {
	p    *place
	name string
}

// writing is a file that somebody writes to.
type writing struct {
	due   time.Time // of the next word about it, if it is untold
	news  bool      // written since the last word
	queue bool      // in watcher.due
}

// watcher performs one watch. Everything happens in the goroutine of the caller. Events are taken in the order of the
// kernel's queue; offsets in it, in bytes, tell what came before what.
type watcher struct {
	v         *View
	s         lease
	in        *inotify.Stream
	handle    uint32
	base      uint32 // of the top directory, 0: looked up by its path
	given     string // the path as the caller gave it
	top       string // and absolute
	recursive bool
	tell      func(Event) bool

	root    *place
	byWD    map[int32]*place
	held    int      // directories that count against the sandbox's limit
	outer   int32    // the number of the directory around the top; 0: not watched
	name    string   // of the top in there
	ready   bool     // was told
	closed  []string // directories that the user may not read, to be told once it is not quiet
	quiet   bool     // nothing is told: the tree is being found out
	lost    bool     // events were dropped
	gone    bool     // the top is
	queue   []inotify.Event
	taken   int64    // offset of the first in queue
	arrived int64    // offset after the last
	windows []*place // with told, in the order of until
	toldIn  int      // names in them

	claims  map[int32]placeName // the same by its number
	found   []placeName         // directories whose claim came true without a move that could be told
	written map[placeName]*writing
	due     []placeName // in the order of their time
}

func (w *watcher) run(ctx context.Context) error {
	if err := w.begin(ctx); err != nil {
		return err
	}
	for w.lost = true; !w.gone; {
		if w.lost {
			if err := w.establish(ctx); err != nil {
				return err
			}
			continue
		}
		if err := w.sayWritten(time.Now()); err != nil {
			return err
		}
		if len(w.queue) == 0 {
			if err := w.wait(ctx, w.nextDue()); err != nil {
				return err
			}
			continue
		}
		if err := w.step(ctx); err != nil {
			return err
		}
	}
	if !w.ready {
		return ofErrno(w.given, syscall.ENOENT)
	}
	return w.say(Event{Change: Removed, Path: w.top, Type: w.topType()})
}

func (w *watcher) topType() Type {
	if w.root.below != nil {
		return Directory
	}
	return Regular
}

// begin watches the directory around the top, which alone tells at once that the top is gone: the kernel tells of the
// thing itself only when nobody has it open any more.
func (w *watcher) begin(ctx context.Context) error {
	trimmed := strings.TrimRight(w.top, "/")
	w.name = trimmed[strings.LastIndexByte(trimmed, '/')+1:]
	if w.name == "" || w.name == "." || w.name == ".." {
		return nil
	}
	around := trimmed[:len(trimmed)-len(w.name)]
	info, err := w.v.next(ctx, w.s, w.given, request{op: opStat, path: w.top, flags: flagNoFollow})
	if err != nil {
		return err
	}
	if info.stat.mode&modeType == modeLink {
		// What is watched is what the link leads to, wherever that is.
		return nil
	}
	rep, err := w.v.next(ctx, w.s, w.given,
		request{op: opAdd, handle: w.handle, path: around, flags: flagDirectory | flagNames})
	if errors.Is(err, syscall.EACCES) {
		return nil
	}
	if err != nil {
		return watchError(w.given, err)
	}
	if rep.flags&flagPseudo == 0 {
		w.outer = int32(rep.count)
	}
	if w.outer == 0 {
		return nil
	}
	// An open directory keeps its place whatever is renamed above it. It also keeps the kernel from telling of its end.
	rep, err = w.v.next(ctx, w.s, w.given, request{op: opDir, flags: flagPathOnly, path: w.top})
	switch {
	case err == nil:
		w.base = rep.handle
	case !errors.Is(err, syscall.ENOTDIR):
		return err
	}
	return nil
}

// establish finds out what there is to be watched, after which nothing is missed, and says so. It may end with events
// lost meanwhile: then once more.
func (w *watcher) establish(ctx context.Context) error {
	before := w.byWD
	w.forgetAll()
	w.quiet = true
	defer func() { w.quiet = false }()
	if err := w.plant(ctx); err != nil {
		return err
	}
	for wd := range before {
		if w.byWD[wd] == nil {
			if err := w.unwatch(ctx, wd); err != nil {
				return err
			}
		}
	}
	// What happened meanwhile is part of what was found, or changes the tree; it is not told.
	n, err := w.in.Pending()
	if err != nil {
		return ofOS(w.given, err)
	}
	for end := w.arrived + int64(n); w.taken < end && !w.lost && !w.gone; {
		if len(w.queue) == 0 {
			err = w.wait(ctx, time.Time{})
		} else {
			err = w.step(ctx)
		}
		if err != nil {
			return err
		}
	}
	if w.lost || w.gone {
		return nil
	}
	w.quiet = false
	if w.ready {
		err = w.say(Event{Change: Gap})
	} else {
		err = w.say(Event{Change: Ready, Path: w.top, Type: w.topType()})
	}
	w.ready = true
	for _, dir := range w.closed {
		if err == nil {
			err = w.say(Event{Change: Gap, Path: dir, Type: Directory})
		}
	}
	w.closed = nil
	return err
}

// unreadable tells of a directory that the user may not read.
func (w *watcher) unreadable(dir string) error {
	if w.quiet {
		if len(w.closed) < maxClosed {
			w.closed = append(w.closed, dir)
		}
		return nil
	}
	return w.say(Event{Change: Gap, Path: dir, Type: Directory})
}

func (w *watcher) forgetAll() {
	w.v.h.giveDirs(w.held)
	w.held = 0
	w.root, w.byWD = nil, map[int32]*place{}
	w.taken, w.queue, w.lost = w.arrived, nil, false
	w.windows, w.toldIn = nil, 0
	clear(w.written)
	clear(w.claims)
	w.found = nil
	w.due, w.closed = nil, nil
}

// plant watches the top and what is below it.
func (w *watcher) plant(ctx context.Context) error {
	r := request{op: opAdd, handle: w.handle, base: w.base}
	if w.base == 0 {
		r.path = w.top
	}
	rep, err := w.v.next(ctx, w.s, w.given, r)
	if err != nil {
		return watchError(w.given, err)
	}
	if rep.flags&flagPseudo != 0 {
		return errdefs.New(errdefs.FailedPrecondition, w.given, "the kernel makes it up as it is read and tells no changes").
			WithHint("Read it again instead")
	}
	w.root = &place{wd: int32(rep.count), ino: rep.stat.inode}
	if rep.stat.mode&modeType == modeDir {
		w.root.below = map[string]*place{}
	}
	if err := w.register(w.root); err != nil {
		return err
	}
	if w.root.below == nil || !w.recursive {
		return nil
	}
	return w.look(ctx, w.root)
}

func (w *watcher) register(p *place) error {
	if err := w.v.h.takeDir(w.given); err != nil {
		return err
	}
	w.held++
	w.byWD[p.wd] = p
	return nil
}

// rel is the path of a place below the top, "" for the top.
func (p *place) rel() string {
	if p.in == nil {
		return ""
	}
	var parts []string
	for ; p.in != nil; p = p.in {
		parts = append(parts, p.name)
	}
	var b strings.Builder
	for i := len(parts) - 1; i >= 0; i-- {
		b.WriteString(parts[i])
		if i > 0 {
			b.WriteByte('/')
		}
	}
	return b.String()
}

// at is the path of a name in a place, as it is told.
func (w *watcher) at(p *place, name string) string {
	out := w.top
	for _, part := range []string{p.rel(), name} {
		if part != "" {
			out = strings.TrimRight(out, "/") + "/" + part
		}
	}
	return out
}

// request is one about a place.
func (w *watcher) request(o op, p *place) request {
	r := request{op: o, base: w.base, path: p.rel(), flags: flagNoFollow | flagNoSymlinks | flagDirectory}
	if w.base == 0 {
		r.path, r.flags = w.top, flagDirectory
		if p.in != nil {
			r.path = strings.TrimRight(w.top, "/") + "/" + p.rel()
		}
	}
	return r
}

// look lists what a place holds, tells of it unless it is quiet, and watches its directories and theirs. Who is told of
// a directory may rely on it being watched.
func (w *watcher) look(ctx context.Context, p *place) error {
	todo := []*place{p}
	for len(todo) > 0 {
		p := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		dirs, err := w.list(ctx, p)
		if err != nil {
			return err
		}
		for _, name := range dirs {
			child, what, err := w.add(ctx, p, name)
			if err != nil {
				return err
			}
			if what == elsewhere {
				p.leaveUntold(name)
				continue // it was moved here: the event that tells of that is to come
			}
			if err := w.sayFound(p, name, what); err != nil {
				return err
			}
			if child != nil {
				todo = append(todo, child)
			}
		}
	}
	return nil
}

// list lists a place and gives the names of its directories.
func (w *watcher) list(ctx context.Context, p *place) (dirs []string, err error) {
	rep, err := w.v.next(ctx, w.s, w.given, w.request(opDir, p))
	switch {
	case vanished(err), err == nil && rep.stat.inode != p.ino:
		// It is elsewhere by now: an event tells where.
		p.unseen = true
		if err == nil {
			w.v.undo(ctx, w.s, rep.handle)
		}
		return nil, nil
	case errors.Is(err, syscall.EACCES):
		return nil, w.unreadable(w.at(p, ""))
	case err != nil:
		return nil, err
	}
	p.unseen = false
	for batch, err := range w.v.entries(ctx, w.s, w.given, rep.handle) {
		if vanished(err) {
			break
		}
		if err != nil {
			return nil, err
		}
		for _, e := range batch {
			info := infoOf("", e.stat, "")
			if info.Type == Directory {
				dirs = append(dirs, e.name) // told once it is watched
			} else if err := w.sayCreated(p, e.name, info.Type); err != nil {
				return nil, err
			}
		}
	}
	return dirs, w.window(p)
}

func (p *place) leaveUntold(name string) {
	if _, told := p.told[name]; told || p.told == nil {
		return
	}
	if p.untold == nil {
		p.untold = map[string]struct{}{}
	}
	p.untold[name] = struct{}{}
}

// sayCreated tells of a name, unless it was told already.
func (w *watcher) sayCreated(p *place, name string, typ Type) error {
	if !w.remember(p, name) {
		return nil
	}
	return w.say(Event{Change: Created, Path: w.at(p, name), Type: typ})
}

// remember notes that a name is told, and reports whether it was not yet.
func (w *watcher) remember(p *place, name string) bool {
	delete(p.untold, name)
	if p.told == nil {
		return true
	}
	if _, ok := p.told[name]; ok {
		return false
	}
	p.told[name] = struct{}{}
	if w.toldIn++; w.toldIn > maxTold {
		w.lost = true
	}
	return true
}

// window notes where the events of a listing that just ended end: everything before is in the queue by now.
func (w *watcher) window(p *place) error {
	if p.told == nil {
		return nil
	}
	n, err := w.in.Pending()
	if err != nil {
		return ofOS(w.given, err)
	}
	p.until = w.arrived + int64(n)
	w.windows = append(w.windows, p)
	return nil
}

// finding is what became of a directory that was to be watched.
type finding int

const (
	planted   finding = iota
	missing           // it has gone, is no directory, tells nothing, or was planted there before
	forbidden         // it is not the user's to read
	elsewhere         // it is watched already, in another place
)

// add watches a directory in a place. It gives nil unless it was planted.
func (w *watcher) add(ctx context.Context, p *place, name string) (*place, finding, error) {
	r := w.request(opAdd, p)
	r.handle, r.path2, r.ino = w.handle, name, p.ino
	rep, err := w.v.next(ctx, w.s, w.given, r)
	switch {
	case vanished(err):
		if p.late == nil {
			p.late = map[string]struct{}{}
		}
		p.late[name] = struct{}{}
		return nil, missing, nil
	case errors.Is(err, syscall.EACCES):
		return nil, forbidden, nil
	case err != nil:
		return nil, missing, watchError(w.at(p, name), err)
	case rep.flags&flagPseudo != 0:
		return nil, missing, nil
	}
	wd := int32(rep.count)
	switch known := w.byWD[wd]; {
	case known == nil:
	case known == p.below[name]:
		return nil, missing, nil
	default:
		if p.claims == nil {
			p.claims = map[string]int32{}
		}
		p.claims[name] = wd
		w.claims[wd] = placeName{p, name}
		return nil, elsewhere, nil
	}
	delete(p.late, name)
	// If it left its place before it was looked up, this is another one, and the event about the other is to come.
	if err := w.fetch(ctx); err != nil {
		return nil, missing, err
	}
	for _, e := range w.queue {
		if e.WD == p.wd && e.Name == name && e.Mask&(inotify.Delete|inotify.MovedFrom) != 0 {
			return nil, missing, w.unwatch(ctx, wd)
		}
	}
	if old := p.below[name]; old != nil {
		if err := w.drop(ctx, old); err != nil {
			return nil, missing, err
		}
	}
	child := &place{wd: wd, ino: rep.stat.inode, in: p, name: name, below: map[string]*place{}}
	if !w.quiet {
		child.told, child.until = map[string]struct{}{}, math.MaxInt64
	}
	if err := w.register(child); err != nil {
		return nil, missing, err
	}
	p.below[name] = child
	return child, planted, nil
}

// sayFound tells of a directory.
func (w *watcher) sayFound(p *place, name string, what finding) error {
	if err := w.sayCreated(p, name, Directory); err != nil || what != forbidden {
		return err
	}
	return w.unreadable(w.at(p, name))
}

// grow watches a directory that has appeared, and tells what is in it.
func (w *watcher) grow(ctx context.Context, p *place, name string) error {
	if !w.recursive {
		return nil
	}
	child, what, err := w.add(ctx, p, name)
	switch {
	case err != nil:
		return err
	case what == forbidden:
		return w.unreadable(w.at(p, name))
	case child == nil:
		return nil
	}
	return w.look(ctx, child)
}

// again looks once more for what could not be found below a place under the name that it had.
func (w *watcher) again(ctx context.Context, top *place) error {
	todo := []*place{top}
	for len(todo) > 0 {
		p := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, child := range p.below {
			todo = append(todo, child)
		}
		if p.unseen {
			if err := w.look(ctx, p); err != nil {
				return err
			}
		}
		for name := range p.late {
			delete(p.late, name)
			if err := w.grow(ctx, p, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// drop forgets a place and what is below it.
func (w *watcher) drop(ctx context.Context, top *place) error {
	if top.in != nil && top.in.below[top.name] == top {
		delete(top.in.below, top.name)
	}
	todo := []*place{top}
	for len(todo) > 0 {
		p := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, child := range p.below {
			todo = append(todo, child)
		}
		if w.byWD[p.wd] != p {
			continue
		}
		delete(w.byWD, p.wd)
		if to, name := w.claimed(p.wd); to != nil {
			w.found = append(w.found, placeName{to, name})
		}
		w.held--
		w.v.h.giveDirs(1)
		if err := w.unwatch(ctx, p.wd); err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) unwatch(ctx context.Context, wd int32) error {
	if wd == w.outer {
		return nil
	}
	_, err := w.v.next(ctx, w.s, w.given, request{op: opUnwatch, handle: w.handle, mode: uint32(wd)})
	if errors.Is(err, syscall.EINVAL) {
		return nil // it went with its directory
	}
	return err
}

// wait waits for events, until a time unless that is zero.
func (w *watcher) wait(ctx context.Context, until time.Time) error {
	if err := w.in.SetDeadline(until); err != nil {
		return ofOS(w.given, err)
	}
	// After the call has ended the deadline is the past, unless that was overwritten just now.
	if ctx.Err() != nil {
		return w.ended(ctx)
	}
	had := len(w.queue)
	var err error
	w.queue, err = w.in.Read(w.queue)
	for _, e := range w.queue[had:] {
		w.arrived += int64(e.Size)
	}
	if len(w.queue) > maxQueued {
		w.lost = true
	}
	switch {
	case ctx.Err() != nil:
		return w.ended(ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil
	case err != nil:
		return ofOS(w.given, err)
	}
	return nil
}

func (w *watcher) ended(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), errLost) {
		return errLost
	}
	return ended(ctx, w.given, false)
}

// fetch takes in what waits in the kernel, without waiting.
func (w *watcher) fetch(ctx context.Context) error {
	n, err := w.in.Pending()
	if err != nil {
		return ofOS(w.given, err)
	}
	for end := w.arrived + int64(n); w.arrived < end && !w.lost; {
		if err := w.wait(ctx, time.Time{}); err != nil {
			return err
		}
	}
	return nil
}

// say tells of a change.
func (w *watcher) say(e Event) error {
	if w.quiet {
		return nil
	}
	if !w.tell(e) {
		return errLeft
	}
	return nil
}

// step takes the next event.
func (w *watcher) step(ctx context.Context) error {
	for len(w.windows) > 0 && w.taken >= w.windows[0].until {
		p := w.windows[0]
		w.windows = w.windows[1:]
		if w.taken >= p.until { // else it was listed once more
			w.toldIn -= len(p.told)
			p.told = nil
		}
	}
	e := w.queue[0]
	err := w.take(ctx, e)
	if len(w.queue) > 0 { // else all was dropped
		w.queue = w.queue[1:]
		w.taken += int64(e.Size)
	}
	for err == nil && len(w.found) > 0 {
		at := w.found[0]
		w.found = w.found[1:]
		switch {
		case w.byWD[at.p.wd] != at.p:
		case at.p.isTold(at.name): // as another directory, perhaps, the end of which is to come
			err = w.grow(ctx, at.p, at.name)
		default:
			err = w.appear(ctx, at.p, at.name)
		}
	}
	return err
}

func (w *watcher) take(ctx context.Context, e inotify.Event) error {
	if e.Mask&inotify.Overflow != 0 {
		w.lost = true
		return nil
	}
	if e.Mask == 0 {
		return nil // the second half of a move, told with the first
	}
	if e.WD == w.outer && e.Name == w.name && e.Mask&(inotify.Delete|inotify.MovedFrom) != 0 {
		w.gone = true
		return nil
	}
	if e.WD == w.outer && e.Name == w.name && e.Mask&inotify.MovedTo != 0 {
		return w.replaced(ctx)
	}
	p := w.byWD[e.WD]
	if p == nil {
		return nil
	}
	if e.Name == "" {
		return w.takeSelf(p, e)
	}
	typ := Type(0)
	if e.Mask&inotify.IsDir != 0 {
		typ = Directory
	}
	switch {
	case e.Mask&(inotify.Create|inotify.MovedTo) != 0:
		return w.takeCreated(ctx, p, e, typ)
	case e.Mask&inotify.MovedFrom != 0:
		return w.takeMoved(ctx, p, e, typ)
	case e.Mask&inotify.Delete != 0:
		return w.takeRemoved(ctx, p, e.Name, typ)
	case e.Mask&inotify.Attrib != 0:
		return w.say(Event{Change: Attributes, Path: w.at(p, e.Name), Type: typ})
	default:
		return w.takeWritten(p, e)
	}
}

// replaced: a rename has put something else where the top was. A file has new content then; a directory is gone.
func (w *watcher) replaced(ctx context.Context) error {
	if w.root.below != nil {
		w.gone = true
		return nil
	}
	if err := w.drop(ctx, w.root); err != nil {
		return err
	}
	err := w.plant(ctx)
	if vanished(err) {
		return nil // and the event about that comes
	}
	if err != nil {
		return err
	}
	return w.say(Event{Change: Modified, Path: w.top, Type: Regular})
}

// takeSelf takes what happened to a watched thing itself. Of a directory in another one, that one tells.
func (w *watcher) takeSelf(p *place, e inotify.Event) error {
	switch {
	case e.Mask&inotify.Unmount != 0 && p == w.root:
		// Nobody inside may unmount: the sandbox is being taken down.
		return errdefs.New(errdefs.Unavailable, w.given, "the file system was unmounted").WithHint(hintRetry)
	case e.Mask&(inotify.Ignored|inotify.Unmount) != 0:
		if w.byWD[p.wd] == p {
			delete(w.byWD, p.wd)
			w.held--
			w.v.h.giveDirs(1)
		}
		w.gone = w.gone || p == w.root
	case p != w.root:
	case e.Mask&(inotify.DeleteSelf|inotify.MoveSelf) != 0:
		w.gone = w.gone || w.outer == 0
	case e.Mask&inotify.Attrib != 0:
		return w.say(Event{Change: Attributes, Path: w.top, Type: w.topType()})
	default:
		return w.takeWritten(p, e)
	}
	return nil
}

// appear watches and tells of a directory that is new in its place, and of what is in it. It may be one that a listing
// has found: another may have taken its name since.
func (w *watcher) appear(ctx context.Context, p *place, name string) error {
	var child *place
	what := missing
	if w.recursive {
		var err error
		if child, what, err = w.add(ctx, p, name); err != nil {
			return err
		}
	}
	if err := w.sayFound(p, name, what); err != nil || child == nil {
		return err
	}
	return w.look(ctx, child)
}

func (w *watcher) takeCreated(ctx context.Context, p *place, e inotify.Event, typ Type) error {
	if typ == Directory {
		return w.appear(ctx, p, e.Name)
	}
	if _, told := p.told[e.Name]; told && e.Mask&inotify.MovedTo != 0 {
		// The listing may have seen what the move replaced.
		return w.say(Event{Change: Modified, Path: w.at(p, e.Name)})
	}
	return w.sayCreated(p, e.Name, typ)
}

func (w *watcher) takeRemoved(ctx context.Context, p *place, name string, typ Type) error {
	told := w.unknow(p, name)
	if child := p.below[name]; child != nil {
		if err := w.drop(ctx, child); err != nil {
			return err
		}
	}
	if !told {
		return nil
	}
	return w.say(Event{Change: Removed, Path: w.at(p, name), Type: typ})
}

// unknow forgets what is known of a name, and reports whether it was told.
func (w *watcher) unknow(p *place, name string) bool {
	told := p.isTold(name)
	if _, ok := p.told[name]; ok {
		delete(p.told, name)
		w.toldIn--
	}
	delete(p.late, name)
	delete(p.claims, name)
	delete(w.written, placeName{p, name})
	delete(p.untold, name)
	return told
}

// isTold reports whether a name, which is there or was until an event that is to come, was told.
func (p *place) isTold(name string) bool {
	_, told := p.told[name]
	_, untold := p.untold[name]
	return told || p.told == nil && !untold
}

// takeMoved takes the first half of a move and, if there is one, the second.
func (w *watcher) takeMoved(ctx context.Context, p *place, e inotify.Event, typ Type) error {
	to, second, err := w.partner(ctx, e.Cookie)
	if err != nil {
		return err
	}
	child := p.below[e.Name]
	if to == nil && child != nil {
		to, second = w.claimed(child.wd)
	}
	if w.lost || to == nil {
		return w.takeRemoved(ctx, p, e.Name, typ)
	}
	from := w.at(p, e.Name)
	file, writes := w.written[placeName{p, e.Name}]
	delete(to.claims, second)
	told := w.unknow(p, e.Name)
	if child != nil {
		delete(p.below, e.Name)
	}
	if old := to.below[second]; child != nil && old != nil && old != child {
		if err := w.drop(ctx, old); err != nil {
			return err
		}
	}
	if writes {
		w.written[placeName{to, second}] = file
		file.queue = false
		w.enqueue(placeName{to, second}, file)
	}
	if child != nil {
		child.in, child.name = to, second
		to.below[second] = child
	}
	switch {
	case told && !w.remember(to, second) && child == nil:
		// A listing has told of it there, and of what is in it.
		err = w.say(Event{Change: Removed, Path: from, Type: typ})
	case told:
		err = w.say(Event{Change: Moved, Path: w.at(to, second), From: from, Type: typ})
	default:
		err = w.sayCreated(to, second, typ)
	}
	if err != nil {
		return err
	}
	switch {
	case child != nil:
		return w.again(ctx, child)
	case typ == Directory:
		return w.grow(ctx, to, second)
	}
	return nil
}

// claimed gives the place where a directory was found when its new parent was listed: that was not watched yet when the
// directory came, so that no event tells.
func (w *watcher) claimed(wd int32) (*place, string) {
	c, ok := w.claims[wd]
	delete(w.claims, wd)
	if !ok || w.byWD[c.p.wd] != c.p || c.p.claims[c.name] != wd {
		return nil, ""
	}
	return c.p, c.name
}

// partner finds the second half of a move in the queue and takes it out, if its directory is watched.
func (w *watcher) partner(ctx context.Context, cookie uint32) (*place, string, error) {
	searched := 1
	for try := 0; ; try++ {
		for ; searched < len(w.queue); searched++ {
			e := &w.queue[searched]
			if e.Mask&inotify.MovedTo == 0 || e.Cookie != cookie {
				continue
			}
			to := w.byWD[e.WD]
			if to == nil || e.Name == "" {
				return nil, "", nil
			}
			e.Mask = 0
			return to, e.Name, nil
		}
		if try == 2 || w.lost {
			return nil, "", nil
		}
		var err error
		if try == 0 {
			err = w.fetch(ctx)
		} else {
			err = w.wait(ctx, time.Now().Add(pairLimit))
		}
		if err != nil {
			return nil, "", err
		}
	}
}

// takeWritten takes a write to a file, or its end.
func (w *watcher) takeWritten(p *place, e inotify.Event) error {
	key := placeName{p, e.Name}
	f := w.written[key]
	if e.Mask&inotify.CloseWrite != 0 {
		if f == nil {
			return nil // opened for writing only
		}
		delete(w.written, key)
		return w.say(Event{Change: Modified, Path: w.at(p, e.Name), Type: Regular})
	}
	if e.Mask&inotify.Modify == 0 || w.quiet {
		return nil
	}
	if f == nil {
		if len(w.written) >= maxWritten {
			w.purgeWritten()
		}
		if len(w.written) >= maxWritten {
			return w.say(Event{Change: Modified, Path: w.at(p, e.Name), Type: Regular})
		}
		f = &writing{}
		w.written[key] = f
	}
	if !f.news {
		f.news, f.due = true, time.Now().Add(writtenEvery)
		w.enqueue(key, f)
	}
	return nil
}

func (w *watcher) enqueue(key placeName, f *writing) {
	if f.news && !f.queue {
		f.queue = true
		w.due = append(w.due, key)
	}
}

// purgeWritten forgets the files that are gone with their directory, and those that nobody writes to.
func (w *watcher) purgeWritten() {
	for key, f := range w.written {
		if w.byWD[key.p.wd] != key.p || !f.news {
			delete(w.written, key)
		}
	}
}

func (w *watcher) nextDue() time.Time {
	for len(w.due) > 0 {
		key := w.due[0]
		if f := w.written[key]; f != nil && f.news && w.byWD[key.p.wd] == key.p {
			return f.due
		}
		w.due = w.due[1:]
	}
	return time.Time{}
}

// sayWritten tells of the files that are written to for a second.
func (w *watcher) sayWritten(now time.Time) error {
	for {
		next := w.nextDue()
		if next.IsZero() || next.After(now) {
			return nil
		}
		key := w.due[0]
		w.due = w.due[1:]
		f := w.written[key]
		f.news, f.queue = false, false
		if err := w.say(Event{Change: Modified, Path: w.at(key.p, key.name), Type: Regular}); err != nil {
			return err
		}
	}
}
