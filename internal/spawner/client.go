package spawner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// Dial connects to the spawner at socket and checks that it serves the data directory with this id. All methods of the
// client may be called at once. A client whose connection broke answers errdefs.Unavailable for ever: dial anew.
func Dial(ctx context.Context, socket, dataID string) (Client, error) {
	conn, err := scm.Dial(ctx, socket)
	if err != nil {
		return nil, unavailable("connect", err)
	}
	c := &client{conn: conn, waiting: map[uint64]chan answer{}, gone: make(chan struct{})}
	if err := c.greet(ctx, dataID); err != nil {
		_ = conn.Close()
		return nil, err
	}
	c.reader.Go(c.read)
	return c, nil
}

func unavailable(what string, err error) error {
	return errdefs.New(errdefs.Unavailable, "spawner", "%s: %v", what, err).Wrap(err)
}

type answer struct {
	reply reply
	files []*os.File
}

type client struct {
	conn   *scm.Conn
	reader sync.WaitGroup
	gone   chan struct{} // closed by read when the connection ended

	mu      sync.Mutex
	seq     uint64                 // guarded by mu
	waiting map[uint64]chan answer // guarded by mu: calls without an answer; nil after the end
	err     error                  // guarded by mu: why the connection ended
}

func (c *client) greet(ctx context.Context, dataID string) error {
	ctx, stop := context.WithTimeoutCause(ctx, 5*greetLimit, errNoGreeting)
	defer stop()
	cred, err := c.conn.Peer()
	if err != nil {
		return unavailable("greet", err)
	}
	if cred.UID != 0 {
		return errdefs.New(errdefs.Denied, "spawner", "the process at its socket has uid %d, not 0", cred.UID).
			WithHint("See who made the socket below the data directory")
	}
	msg, err := request{Kind: kindHello, Name: dataID}.encode()
	if err != nil {
		return err
	}
	if err := c.conn.Send(ctx, msg); err != nil {
		return unavailable("greet", err)
	}
	buf := make([]byte, replySize)
	n, files, err := c.conn.Recv(ctx, buf)
	scm.CloseFiles(files)
	if err != nil {
		return unavailable("greet", err)
	}
	r, err := decodeReply(buf[:n])
	if err != nil {
		return unavailable("greet", err)
	}
	if r.Errno != 0 || r.Text != dataID {
		return errdefs.New(errdefs.FailedPrecondition, "spawner", "it serves another data directory").
			WithHint("End it with sandsea down on that directory")
	}
	return nil
}

// Spawn implements Client.
func (c *client) Spawn(ctx context.Context, s Spec) (Child, error) {
	if s.Cgroup == nil || s.Dev == nil {
		return Child{}, fmt.Errorf("spawn %s: cgroup and dev are needed", s.ID)
	}
	if len(s.Tasks) > maxTasks {
		return Child{}, fmt.Errorf("spawn %s: %d v1 cgroups, at most %d", s.ID, len(s.Tasks), maxTasks)
	}
	files := append(make([]*os.File, 0, maxFiles), s.Cgroup)
	if s.Root != nil {
		files = append(files, s.Root)
	}
	files = append(files, s.Dev)
	if s.Sys != nil {
		files = append(files, s.Sys)
	}
	files = append(files, s.Tasks...)

	ch := make(chan answer, 1)
	c.mu.Lock()
	if c.waiting == nil {
		err := c.err
		c.mu.Unlock()
		return Child{}, unavailable("spawn", err)
	}
	c.seq++
	seq := c.seq
	c.waiting[seq] = ch
	c.mu.Unlock()
	msg, err := request{
		Kind: kindSpawn, Seq: seq, UIDBase: s.UIDBase, Tasks: uint8(len(s.Tasks)), Sys: s.Sys != nil,
		NoRoot: s.Root == nil, Name: s.ID,
	}.encode()
	if err == nil {
		err = c.conn.Send(ctx, msg, files...)
	}
	if err != nil {
		c.forget(seq, ch)
		if ctx.Err() != nil {
			// The caller's own end says nothing of the connection, which others use.
			return Child{}, fmt.Errorf("spawn %s: %w", s.ID, context.Cause(ctx))
		}
		return Child{}, unavailable("spawn", err)
	}
	return c.await(ctx, s.ID, seq, ch)
}

// await gives the child of a call that was sent.
func (c *client) await(ctx context.Context, id string, seq uint64, ch chan answer) (Child, error) {
	select {
	case a := <-ch:
		return child(id, a)
	case <-ctx.Done():
		c.forget(seq, ch)
		return Child{}, fmt.Errorf("spawn %s: %w", id, context.Cause(ctx))
	case <-c.gone:
	}
	select {
	case a := <-ch: // it came before the end
		return child(id, a)
	default:
		c.mu.Lock()
		defer c.mu.Unlock()
		return Child{}, unavailable("spawn", c.err)
	}
}

// forget gives a call up: after that, either read has taken the entry and sent the answer, or nobody ever will.
func (c *client) forget(seq uint64, ch chan answer) {
	c.mu.Lock()
	_, mine := c.waiting[seq]
	delete(c.waiting, seq)
	c.mu.Unlock()
	if mine {
		return
	}
	select {
	case a := <-ch:
		scm.CloseFiles(a.files)
	default:
	}
}

func child(id string, a answer) (Child, error) {
	if a.reply.Text == "" && len(a.files) == 2 && a.reply.Pid > 0 {
		return Child{Pid: int(a.reply.Pid), Pidfd: a.files[0], Control: a.files[1]}, nil
	}
	scm.CloseFiles(a.files)
	text := a.reply.Text
	if text == "" {
		text = fmt.Sprintf("an answer with %d descriptors", len(a.files))
	}
	kind := errdefs.Internal
	switch a.reply.Errno {
	case syscall.EAGAIN, syscall.ENOMEM, syscall.ENOSPC, syscall.EMFILE, syscall.ENFILE:
		// No process, memory, namespace or descriptor left on the machine.
		kind = errdefs.Exhausted
	}
	err := errdefs.New(kind, "sandbox "+id, "the spawner: %s", text)
	if a.reply.Errno != 0 {
		err.Errno = int(a.reply.Errno)
		return Child{}, err.Wrap(a.reply.Errno)
	}
	return Child{}, err
}

// read hands answers to the calls that wait for them until the connection ends.
func (c *client) read() {
	buf := make([]byte, replySize)
	var err error
	for {
		var n int
		var files []*os.File
		n, files, err = c.conn.Recv(context.Background(), buf) // ends with the connection
		var r reply
		if err == nil {
			r, err = decodeReply(buf[:n])
		}
		if err != nil {
			scm.CloseFiles(files)
			break
		}
		c.mu.Lock()
		ch, ok := c.waiting[r.Seq]
		delete(c.waiting, r.Seq)
		if ok {
			ch <- answer{r, files} // has room for one; under mu, so that forget finds it
		}
		c.mu.Unlock()
		if !ok {
			// The call gave up; its caller kills the cgroup by name.
			scm.CloseFiles(files)
		}
	}
	c.mu.Lock()
	c.waiting, c.err = nil, err
	c.mu.Unlock()
	close(c.gone)
	_ = c.conn.Close()
}

// Close ends the connection; calls under way are Unavailable. Idempotent.
func (c *client) Close() error {
	err := c.conn.Close()
	c.reader.Wait()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}
