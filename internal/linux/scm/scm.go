// Package scm sends messages together with open descriptors between processes of one machine, over unix sockets of type
// SOCK_SEQPACKET.
//
// A message is one record: it arrives whole or not at all, with its descriptors, in order. Every descriptor that this
// package makes or receives is close-on-exec. A message that was cut (MSG_TRUNC), or whose descriptors were
// (MSG_CTRUNC), is an error, and what did arrive of it is closed. Empty messages are refused, since they look like
// the end.
//
// A Conn may be used by any number of goroutines: sends are serialised among themselves, receives too, and both may
// go on at once. Event loops that own a bare descriptor use Sendmsg and Recvmsg.
package scm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// MaxFiles is how many descriptors the kernel lets one message carry.
const MaxFiles = 253

// ErrTruncated says that a message or its descriptors did not fit; the descriptors that came are closed.
var ErrTruncated = errors.New("message truncated")

// Cred is who is at the other end: for an accepted connection who connected, for a dialled one who listens.
type Cred struct {
	Pid int
	UID uint32
	GID uint32
}

// Conn is one end of a connection.
type Conn struct {
	f      *os.File
	closed atomic.Bool

	wmu sync.Mutex // held for one Send

	rmu sync.Mutex // held for one Recv
	oob []byte     // guarded by rmu
}

// New makes a Conn of a connected SOCK_SEQPACKET socket and takes f over, also when it fails. The socket becomes
// non-blocking, for every holder of the same end.
func New(f *os.File) (*Conn, error) {
	defer f.Close()
	fd := -1
	err := control(f, func(old int) error {
		var err error
		if fd, err = unix.FcntlInt(uintptr(old), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			return fmt.Errorf("duplicate socket: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if typ, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || typ != unix.SOCK_SEQPACKET {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("not a SOCK_SEQPACKET socket (type %d): %w", typ, errors.Join(err, unix.EPROTOTYPE))
	}
	return newConn(fd)
}

// newConn takes fd over.
func newConn(fd int) (*Conn, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("set socket non-blocking: %w", err)
	}
	return &Conn{f: os.NewFile(uintptr(fd), "seqpacket"), oob: make([]byte, unix.CmsgSpace(4*MaxFiles))}, nil
}

// Socketpair makes two connected ends as plain, blocking, close-on-exec files: to hand to a child, to send on, or to
// New.
func Socketpair() (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "seqpacket"), os.NewFile(uintptr(fds[1]), "seqpacket"), nil
}

// Dial connects to the listener at path. It does not wait for a listener to appear.
func Dial(ctx context.Context, path string) (*Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("connect %s: %w", path, context.Cause(ctx))
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	err = atPath(path, func(p string) error { return unix.Connect(fd, &unix.SockaddrUnix{Name: p}) })
	// A full backlog answers EAGAIN at once for unix sockets: the caller dials again.
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("connect %s: %w", path, err)
	}
	return newConn(fd)
}

// Send sends one message. The files stay the caller's. It waits while the peer's queue is full, at most until ctx
// ends; an error means that nothing of the message was sent.
func (c *Conn) Send(ctx context.Context, payload []byte, files ...*os.File) error {
	if len(payload) == 0 || len(files) > MaxFiles {
		return fmt.Errorf("send %d bytes with %d files: %w", len(payload), len(files), unix.EINVAL)
	}
	return withFDs(files, make([]int, 0, len(files)), func(fds []int) error {
		c.wmu.Lock()
		defer c.wmu.Unlock()
		return c.wait(ctx, c.f.SetWriteDeadline, func() error {
			rc, err := c.f.SyscallConn()
			if err != nil {
				return fmt.Errorf("send: %w", err)
			}
			var serr error
			err = rc.Write(func(fd uintptr) bool {
				serr = Sendmsg(int(fd), payload, fds)
				return !errors.Is(serr, unix.EAGAIN)
			})
			return errors.Join(err, serr)
		})
	})
}

// Recv receives one message into buf; the files are the caller's. It waits at most until ctx ends. io.EOF when the
// other end is closed. With ErrTruncated n is the size of the payload if only the descriptors were cut, as they are when
// this process can hold no more, else 0.
func (c *Conn) Recv(ctx context.Context, buf []byte) (n int, files []*os.File, err error) {
	c.rmu.Lock()
	defer c.rmu.Unlock()
	err = c.wait(ctx, c.f.SetReadDeadline, func() error {
		rc, err := c.f.SyscallConn()
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		var rerr error
		var fds []int
		err = rc.Read(func(fd uintptr) bool {
			n, fds, rerr = Recvmsg(int(fd), buf, c.oob)
			return !errors.Is(rerr, unix.EAGAIN)
		})
		if err == nil {
			err = rerr
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
		return err
	})
	if errors.Is(err, ErrTruncated) {
		return n, nil, err
	}
	if err != nil {
		return 0, nil, err
	}
	return n, files, nil
}

// wait runs op, which blocks in the poller, and ends it by a deadline in the past when ctx ends first.
func (c *Conn) wait(ctx context.Context, set func(time.Time) error, op func() error) error {
	if ctx.Done() == nil {
		return c.seen(op())
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(fired)
		// A closed file has ended op already.
		_ = set(time.Unix(1, 0))
	})
	err := op()
	if !stop() {
		<-fired
		_ = set(time.Time{})
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return context.Cause(ctx)
		}
	}
	return c.seen(err)
}

// seen turns the poller's private error for a file that was closed meanwhile into the public one.
func (c *Conn) seen(err error) error {
	if err != nil && c.closed.Load() {
		return os.ErrClosed
	}
	return err
}

// Peer tells who is at the other end, as the kernel saw it when the connection was made.
func (c *Conn) Peer() (Cred, error) {
	var cred Cred
	err := control(c.f, func(fd int) error {
		var err error
		cred, err = PeerOf(fd)
		return err
	})
	return cred, err
}

// PeerPidfd gives a pidfd of the process at the other end. Without SO_PEERPIDFD (Linux 6.5) it opens the peer's pid,
// which is exact as long as the peer is alive.
func (c *Conn) PeerPidfd() (*os.File, error) {
	pidfd := -1
	err := control(c.f, func(fd int) error {
		var err error
		if pidfd, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD); err == nil {
			return nil
		}
		cred, err := PeerOf(fd)
		if err != nil {
			return err
		}
		if pidfd, err = unix.PidfdOpen(cred.Pid, 0); err != nil {
			return fmt.Errorf("pidfd of peer %d: %w", cred.Pid, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(pidfd), "pidfd"), nil
}

// Close ends the connection for this holder; calls that wait return os.ErrClosed.
func (c *Conn) Close() error {
	c.closed.Store(true)
	return c.f.Close()
}

// Listener accepts connections at a path.
type Listener struct {
	c    Conn // for its waiting only
	path string
}

// Listen makes a socket at path with mode 0600. A socket file left by a dead process is replaced; a living listener
// there is EADDRINUSE.
func Listen(path string) (*Listener, error) {
	fd, err := ListenFD(path)
	if err != nil {
		return nil, err
	}
	return &Listener{c: Conn{f: os.NewFile(uintptr(fd), path)}, path: path}, nil
}

// ListenFD is Listen for event loops: the bare, non-blocking descriptor.
func ListenFD(path string) (int, error) {
	if c, err := Dial(context.Background(), path); err == nil {
		_ = c.Close()
		return -1, fmt.Errorf("listen on %s: %w", path, unix.EADDRINUSE)
	} else if errors.Is(err, unix.ECONNREFUSED) {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return -1, fmt.Errorf("remove dead socket: %w", err)
		}
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	// The mode of the bound file is taken from the socket inode's, so there is no moment in which others could connect.
	err = unix.Fchmod(fd, 0o600)
	if err == nil {
		err = atPath(path, func(p string) error { return unix.Bind(fd, &unix.SockaddrUnix{Name: p}) })
	}
	if err == nil {
		err = unix.Listen(fd, 128)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("listen on %s: %w", path, err)
	}
	return fd, nil
}

// Accept waits for the next connection, at most until ctx ends. One caller at a time.
func (l *Listener) Accept(ctx context.Context) (*Conn, error) {
	fd := -1
	err := l.c.wait(ctx, l.c.f.SetReadDeadline, func() error {
		rc, err := l.c.f.SyscallConn()
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		var aerr error
		err = rc.Read(func(lfd uintptr) bool {
			fd, aerr = AcceptFD(int(lfd))
			return !errors.Is(aerr, unix.EAGAIN)
		})
		return errors.Join(err, aerr)
	})
	if err != nil {
		return nil, err
	}
	return newConn(fd)
}

// Close stops listening and removes the socket file.
func (l *Listener) Close() error {
	err := os.Remove(l.path)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, l.c.Close())
}

// AcceptFD accepts one connection on a listening descriptor: non-blocking, close-on-exec.
func AcceptFD(lfd int) (int, error) {
	for {
		fd, _, err := unix.Accept4(lfd, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
			continue
		default:
			return -1, os.NewSyscallError("accept", err)
		}
	}
}

// PeerOf tells who is at the other end of a bare descriptor.
func PeerOf(fd int) (Cred, error) {
	u, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return Cred{}, fmt.Errorf("peer of socket: %w", err)
	}
	return Cred{Pid: int(u.Pid), UID: u.Uid, GID: u.Gid}, nil
}

// Sendmsg sends one message on a bare descriptor, without a signal if the peer is gone.
func Sendmsg(fd int, payload []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		n, err := unix.SendmsgN(fd, payload, oob, nil, unix.MSG_NOSIGNAL)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return os.NewSyscallError("sendmsg", err)
		case n != len(payload):
			return fmt.Errorf("sendmsg: %d of %d bytes: %w", n, len(payload), io.ErrShortWrite)
		}
		return nil
	}
}

// Recvmsg receives one message on a bare descriptor without waiting; the descriptors are the caller's. oob is scratch
// space of OobSpace bytes. io.EOF when the other end is closed and everything that it sent was received. With ErrTruncated
// n is the size of the payload if only the descriptors were cut, as they are when this process can hold no more, else 0.
func Recvmsg(fd int, buf, oob []byte) (n int, fds []int, err error) {
	n, oobn, flags, err := recvmsg(fd, buf, oob)
	// The kernel tells of the end although messages are queued when the peer closed with some of ours unread, and when the
	// peer sent its last one and closed between the kernel's look into the queue and that at the state. After the end
	// nothing more is queued, so that the second answer is true.
	if errors.Is(err, unix.ECONNRESET) || err == nil && n == 0 && oobn == 0 {
		n, oobn, flags, err = recvmsg(fd, buf, oob)
		if errors.Is(err, unix.EAGAIN) { // no end, but a message of nothing, which looks like it
			return 0, nil, io.EOF
		}
	}
	if err != nil {
		return 0, nil, os.NewSyscallError("recvmsg", err)
	}
	if oobn > 0 {
		if fds, err = rights(oob[:oobn]); err != nil {
			return 0, nil, err
		}
	}
	switch {
	case flags&unix.MSG_TRUNC != 0:
		n, err = 0, ErrTruncated
	case flags&unix.MSG_CTRUNC != 0:
		err = ErrTruncated
	case n == 0 && len(fds) > 0:
		err = fmt.Errorf("empty message with descriptors: %w", unix.EBADMSG)
	case n == 0:
		err = io.EOF
	}
	if err != nil {
		CloseAll(fds)
		return n, nil, err
	}
	return n, fds, nil
}

func recvmsg(fd int, buf, oob []byte) (n, oobn, flags int, err error) {
	for {
		n, oobn, flags, _, err = unix.Recvmsg(fd, buf, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		if !errors.Is(err, unix.EINTR) {
			return n, oobn, flags, err
		}
	}
}

// OobSpace is the scratch space that Recvmsg needs.
func OobSpace() int { return unix.CmsgSpace(4 * MaxFiles) }

// CloseAll closes bare descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// CloseFiles closes files, as received with a message that is not wanted.
func CloseFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func rights(oob []byte) ([]int, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parse control message: %w", err)
	}
	var all []int
	for i := range msgs {
		if msgs[i].Header.Level != unix.SOL_SOCKET || msgs[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			CloseAll(all)
			return nil, fmt.Errorf("parse descriptors: %w", err)
		}
		all = append(all, fds...)
	}
	return all, nil
}

// withFDs runs fn with the descriptors of files, which cannot be closed meanwhile. Unlike File.Fd it leaves their
// blocking mode alone.
func withFDs(files []*os.File, fds []int, fn func([]int) error) error {
	if len(files) == 0 {
		return fn(fds)
	}
	return control(files[0], func(fd int) error { return withFDs(files[1:], append(fds, fd), fn) })
}

func control(f *os.File, fn func(fd int) error) error {
	if f == nil {
		return fmt.Errorf("nil file: %w", unix.EBADF)
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	var ferr error
	if err := rc.Control(func(fd uintptr) { ferr = fn(int(fd)) }); err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	runtime.KeepAlive(f)
	return ferr
}

// atPath runs fn with a name for path that fits in a socket address (107 bytes): through the parent directory's entry
// in /proc/self/fd when path itself is too long.
func atPath(path string, fn func(string) error) error {
	if len(path) < 108 {
		return fn(path)
	}
	dir, base := split(path)
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", dir, err)
	}
	defer func() { _ = unix.Close(fd) }()
	return fn(fmt.Sprintf("/proc/self/fd/%d/%s", fd, base))
}

func split(path string) (dir, base string) {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			return path[:i+1], path[i+1:]
		}
	}
	return ".", path
}
