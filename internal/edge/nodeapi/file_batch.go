package nodeapi

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/chronus/files"
)

const (
	// maxBatch is how many files one call may read or write.
	maxBatch = 1000
	// maxBatchBytes is how much they may hold in all.
	maxBatchBytes = 64 << 20
	// defaultBatchFile is how much one of them may hold unless the call says more.
	defaultBatchFile = 1 << 20
	// batchesAtOnce bounds the memory of what is read for batches; a call beyond waits.
	batchesAtOnce = 4
	// maxBatchMessage is a batch with its names.
	maxBatchMessage = maxBatchBytes + 8<<20
)

// item is the error of one file of a batch as it travels.
func item(err error) (*sandseav1.ErrorDetail, string) {
	return errwire.Detail(err), errdefs.From(err).Error()
}

func tooMany(field string, n int) error {
	return errdefs.New(errdefs.Invalid, "", "%s: %d of them, at most %d", field, n, maxBatch).
		WithField(field, fmt.Sprint(maxBatch)).WithHint("Make several calls")
}

// absolute refuses a relative path: in a list nobody sees what it begins at.
func absolute(path string) error {
	if strings.HasPrefix(path, "/") {
		return nil
	}
	e := errdefs.New(errdefs.Invalid, path, "the path is not absolute").WithField("path", "").
		WithHint("Begin it with a slash")
	e.Errno, e.ErrnoName = int(syscall.EINVAL), "EINVAL"
	return e
}

// beyond is the error of a file that does not fit into its batch any more.
func beyond(path string, size int64) error {
	e := errdefs.New(errdefs.FailedPrecondition, path, "with its %d bytes the files have more than %d in all", size,
		maxBatchBytes).WithField("", fmt.Sprintf("%d bytes", maxBatchBytes)).WithHint("Make several calls, or read it alone")
	e.Errno, e.ErrnoName = int(syscall.EFBIG), "EFBIG"
	return e
}

func (f fileService) ReadBatch(ctx context.Context, r *connect.Request[sandseav1.ReadBatchRequest],
) (*connect.Response[sandseav1.ReadBatchResponse], error) {
	m := r.Msg
	if n := len(m.GetPaths()); n > maxBatch {
		return nil, tooMany("paths", n)
	}
	most := m.GetMaxBytes()
	if most == 0 {
		most = defaultBatchFile
	}
	if most < 0 || most > maxBatchBytes {
		return nil, errdefs.New(errdefs.Invalid, "", "max_bytes: %d, at most %d", most, maxBatchBytes).
			WithField("max_bytes", fmt.Sprintf("%d bytes", maxBatchBytes)).WithHint("Read larger files one by one")
	}
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), m.GetId(), m.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	select {
	case f.batches <- struct{}{}:
		defer func() { <-f.batches }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	out := &sandseav1.ReadBatchResponse{}
	left := int64(maxBatchBytes)
	for _, path := range m.GetPaths() {
		c := &sandseav1.FileContent{Path: path}
		info, data, err := readWhole(ctx, v, path, most, left)
		if err != nil && ctx.Err() != nil {
			return nil, err
		}
		if err != nil {
			c.Error, c.Message = item(err)
		} else {
			c.Info, c.Data = toInfo(info), data
			left -= int64(len(data))
		}
		out.Files = append(out.Files, c)
	}
	return connect.NewResponse(out), nil
}

// readWhole reads a file of at most most bytes, if it has no more than are left of its batch.
func readWhole(ctx context.Context, v *files.View, path string, most, left int64) (files.Info, []byte, error) {
	if err := absolute(path); err != nil {
		return files.Info{}, nil, err
	}
	rd, err := v.Read(ctx, path, files.Range{MaxBytes: most})
	if err != nil {
		return files.Info{}, nil, err
	}
	defer func() { _ = rd.Close() }()
	info := rd.Info()
	if info.Size > left {
		return files.Info{}, nil, beyond(path, info.Size)
	}
	var b bytes.Buffer
	b.Grow(int(info.Size) + bytes.MinRead) // most is a small number
	n, err := io.Copy(&b, io.LimitReader(rd, left+1))
	if err == nil && n > left {
		err = beyond(path, n)
	}
	return info, b.Bytes(), err
}

func (f fileService) WriteBatch(ctx context.Context, r *connect.Request[sandseav1.WriteBatchRequest],
) (*connect.Response[sandseav1.WriteBatchResponse], error) {
	m := r.Msg
	if n := len(m.GetFiles()); n > maxBatch {
		return nil, tooMany("files", n)
	}
	total := 0
	for _, file := range m.GetFiles() {
		total += len(file.GetData())
	}
	if total > maxBatchBytes {
		return nil, errdefs.New(errdefs.Invalid, "", "files: %d bytes, at most %d in all", total, maxBatchBytes).
			WithField("files", fmt.Sprintf("%d bytes", maxBatchBytes)).WithHint("Make several calls, or upload a tar stream")
	}
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), m.GetId(), m.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	out := &sandseav1.WriteBatchResponse{}
	for _, file := range m.GetFiles() {
		w := &sandseav1.FileWritten{Path: file.GetPath()}
		info, err := writeWhole(ctx, v, file)
		if err != nil && ctx.Err() != nil {
			return nil, err
		}
		if err != nil {
			w.Error, w.Message = item(err)
		} else {
			w.Info = toInfo(info)
		}
		out.Files = append(out.Files, w)
	}
	return connect.NewResponse(out), nil
}

func writeWhole(ctx context.Context, v *files.View, file *sandseav1.FileToWrite) (files.Info, error) {
	if err := absolute(file.GetPath()); err != nil {
		return files.Info{}, err
	}
	return v.Write(ctx, file.GetPath(), file.GetMode(), nil, bytes.NewReader(file.GetData()))
}

// sizes gives WriteBatch the room that its content needs.
func sizes(spec connect.Spec) []connect.HandlerOption {
	if strings.HasSuffix(spec.Procedure, "/WriteBatch") {
		return []connect.HandlerOption{connect.WithReadMaxBytes(maxBatchMessage)}
	}
	return nil
}
