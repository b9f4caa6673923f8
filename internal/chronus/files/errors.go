package files

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
)

// meaning is what an errno of a file call means to the caller.
type meaning struct {
	name string
	kind errdefs.Kind
	hint string
}

const (
	hintPath  = "Check the path"
	hintUser  = "Act as a user who may, for example root"
	hintRetry = "Try again"
	hintDisk  = "Remove files in the sandbox, or create it with a larger disk limit"
	hintOpen  = "Close files, or raise the sandbox's limits"
)

func meaningOf(errno syscall.Errno) meaning {
	switch errno {
	case syscall.ENOENT:
		return meaning{"ENOENT", errdefs.NotFound, hintPath}
	case syscall.EACCES:
		return meaning{"EACCES", errdefs.Denied, hintUser}
	case syscall.EPERM:
		return meaning{"EPERM", errdefs.Denied, hintUser}
	case syscall.EEXIST:
		return meaning{"EEXIST", errdefs.AlreadyExists, "Choose another path, or remove it first"}
	case syscall.EISDIR:
		return meaning{"EISDIR", errdefs.FailedPrecondition, "Name a file, or a path below the directory"}
	case syscall.ENOTDIR:
		return meaning{"ENOTDIR", errdefs.FailedPrecondition, hintPath}
	case syscall.ENOTEMPTY:
		return meaning{"ENOTEMPTY", errdefs.FailedPrecondition, "Remove it recursively, or what is in it first"}
	case syscall.ELOOP:
		return meaning{"ELOOP", errdefs.FailedPrecondition, "Name the file itself; links of /proc are not followed"}
	case syscall.EXDEV:
		return meaning{"EXDEV", errdefs.FailedPrecondition, "Copy it, then remove the original"}
	case syscall.EBUSY:
		return meaning{"EBUSY", errdefs.FailedPrecondition, "It is mounted, or the root of the sandbox"}
	case syscall.EROFS:
		return meaning{"EROFS", errdefs.FailedPrecondition, "Choose a path that can be written to"}
	case syscall.ETXTBSY:
		return meaning{"ETXTBSY", errdefs.FailedPrecondition, "Stop the program that runs it"}
	case syscall.EMLINK:
		return meaning{"EMLINK", errdefs.FailedPrecondition, "Copy the file instead"}
	case syscall.ENXIO:
		return meaning{"ENXIO", errdefs.FailedPrecondition, "Only regular files can be read and written"}
	case syscall.EFBIG:
		return meaning{"EFBIG", errdefs.FailedPrecondition, "Read a part of it"}
	case syscall.EOPNOTSUPP:
		return meaning{"EOPNOTSUPP", errdefs.FailedPrecondition, "The file system there cannot do this"}
	case syscall.ENAMETOOLONG:
		return meaning{"ENAMETOOLONG", errdefs.Invalid, "Use a shorter path: 255 bytes a name, 4095 in all"}
	case syscall.EINVAL:
		return meaning{"EINVAL", errdefs.Invalid, hintPath}
	case syscall.EOVERFLOW:
		return meaning{"EOVERFLOW", errdefs.Invalid, "Use a number that exists inside the sandbox"}
	case syscall.ENOSPC:
		return meaning{"ENOSPC", errdefs.Exhausted, hintDisk}
	case syscall.EDQUOT:
		return meaning{"EDQUOT", errdefs.Exhausted, hintDisk}
	case syscall.EMFILE:
		return meaning{"EMFILE", errdefs.Exhausted, hintOpen}
	case syscall.ENFILE:
		return meaning{"ENFILE", errdefs.Exhausted, hintOpen}
	case syscall.ENOMEM:
		return meaning{"ENOMEM", errdefs.Exhausted, "Free memory in the sandbox, or raise its memory limit"}
	case syscall.EAGAIN:
		return meaning{"EAGAIN", errdefs.Unavailable, hintRetry}
	case syscall.EINTR:
		return meaning{"EINTR", errdefs.Unavailable, hintRetry}
	case syscall.ESTALE:
		return meaning{"ESTALE", errdefs.Unavailable, hintRetry}
	case syscall.EIO:
		return meaning{"EIO", errdefs.DataLoss, "The disk or layer below it does not answer with its bytes"}
	default:
		return meaning{"E" + strconv.Itoa(int(errno)), errdefs.FailedPrecondition, hintPath}
	}
}

// ofErrno is the error of a call about path that was refused with errno.
func ofErrno(path string, errno syscall.Errno) *errdefs.Error {
	m := meaningOf(errno)
	e := errdefs.New(m.kind, path, "%s", errno.Error()).WithHint("%s", m.hint).Wrap(errno)
	e.Errno, e.ErrnoName = int(errno), m.name
	if errno == syscall.ENOSPC || errno == syscall.EDQUOT {
		e.Limit = "disk"
		e.Msg = "the disk limit of the sandbox is reached (" + errno.Error() + ")"
	}
	return e
}

// ofOS is ofErrno for an error of package os.
func ofOS(path string, err error) error {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return ofErrno(path, errno)
	}
	return errdefs.New(errdefs.Internal, path, "%v", err).Wrap(err)
}

// ofAnswer is the error in an answer, nil if there is none.
func ofAnswer(path string, a answer) error {
	if a.errno == 0 {
		return nil
	}
	e := ofErrno(path, syscall.Errno(a.errno))
	if a.flags&flagNotAFile != 0 {
		e.Msg = "is " + kindName(a.stat.mode) + ", not a regular file"
		e.Hint = "Only regular files can be read and written"
	}
	return e
}

func kindName(mode uint32) string {
	switch mode & modeType {
	case modeRegular:
		return "a regular file"
	case modeDir:
		return "a directory"
	case modeLink:
		return "a symbolic link"
	case 0o010000:
		return "a named pipe"
	case 0o140000:
		return "a socket"
	case 0o020000, 0o060000:
		return "a device"
	default:
		return "of no known kind"
	}
}

func invalidPath(path, format string, args ...any) *errdefs.Error {
	e := errdefs.New(errdefs.Invalid, path, format, args...).WithField("path", "").WithHint(hintPath)
	e.Errno, e.ErrnoName = int(syscall.EINVAL), "EINVAL"
	return e
}

// checkPath refuses what no kernel would take, so that the message can name the field.
func checkPath(path string) error {
	switch {
	case path == "":
		return invalidPath(path, "the path is empty")
	case strings.IndexByte(path, 0) >= 0:
		return invalidPath(strings.ReplaceAll(path, "\x00", `\x00`), "the path has a NUL byte")
	case len(path) > pathMax:
		return ofErrno(path[:80]+"…", syscall.ENAMETOOLONG).WithField("path", fmt.Sprintf("%d bytes", pathMax))
	}
	return nil
}

// isTempName reports whether the name is one of the helper's unfinished files, which it may remove at any time.
func isTempName(name string) bool {
	rest, ok := strings.CutPrefix(name, tempPrefix)
	return ok && len(rest) == 16 && strings.Trim(rest, "0123456789abcdef") == ""
}

const tempPrefix = ".sandsea-"

// checkTarget refuses a last name that is taken by the helper.
func checkTarget(path string) error {
	trimmed := strings.TrimRight(path, "/")
	if isTempName(trimmed[strings.LastIndexByte(trimmed, '/')+1:]) {
		return invalidPath(path, "names of the form %s<16 hex digits> are kept for unfinished files", tempPrefix)
	}
	return nil
}

// ended is the error of a call whose ctx ended. Sent says that a change was under way.
func ended(ctx context.Context, path string, sent bool) error {
	cause := context.Cause(ctx)
	if sent {
		return errdefs.New(errdefs.Unknown, path, "the call ended before its result was known (%v)", cause).
			WithHint("Look at the path before you repeat it").Wrap(cause)
	}
	kind := errdefs.Canceled
	if errors.Is(cause, context.DeadlineExceeded) {
		kind = errdefs.Deadline
	}
	return errdefs.New(kind, path, "%v", cause).Wrap(cause)
}
