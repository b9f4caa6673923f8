package iam

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/renameio/v2"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// Admin is the principal of the first-run token.
const Admin = "user:admin"

// marker says which token is the first-run admin's. Written is set once the file is on disk: before that a missing file
// means a crash, after it a lost file.
type marker struct {
	Token   string `json:"token"`
	Written bool   `json:"written"`
}

// FirstRun tells what Bootstrap did.
type FirstRun struct {
	// File is the token file.
	File string
	// New: the file was written by this call.
	New bool
	// Lost is a sentence when the file is gone and its token lives: how to make a new one. Empty otherwise.
	Lost string
}

// Bootstrap sees to it that the admin's token exists: its hash is written to the store, durably, then the token to
// file, mode 0600, in one rename. A crash in between leaves a hash whose token nobody has; the next start replaces it.
// An empty token file asks for a new token. A token file that others can read is refused.
func Bootstrap(ctx context.Context, s store.Store, file string) (FirstRun, error) {
	out := FirstRun{File: file}
	token, found, err := readFile(file)
	if err != nil {
		return out, err
	}
	res, err := s.Txn(ctx, nil, []store.Op{store.Get(keys.Bootstrap)}, nil)
	if err != nil {
		return out, fmt.Errorf("read the first-run token: %w", err)
	}
	var m marker
	cond := store.Cond{Key: keys.Bootstrap, Absent: true}
	if len(res.Pairs) == 1 {
		if err := json.Unmarshal(res.Pairs[0].Value, &m); err != nil {
			return out, errdefs.New(errdefs.DataLoss, "store", "%s cannot be read", keys.Bootstrap).Wrap(err)
		}
		cond = store.Cond{Key: keys.Bootstrap, ModRev: res.Pairs[0].ModRev}
	}
	switch {
	case m.Token == "": // a new store; a token file from an older one is worth nothing
	case found && token == "": // an empty file asks for a new token
	case found:
		return out, checkFile(ctx, s, m, file, token, cond)
	case m.Written:
		out.Lost = fmt.Sprintf("%s is missing and only its hash is kept. "+
			"For a new token: install -m 600 /dev/null %s, then start again",
			file, file)
		return out, nil
	}
	return out, write(ctx, s, &out, m, cond)
}

// write makes a token in the place of m's and puts it into the file.
func write(ctx context.Context, s store.Store, out *FirstRun, m marker, cond store.Cond) error {
	token, r := mint(Request{
		Principal: Admin, Project: DefaultProject, Covers: []string{DefaultProject}, May: []string{"*"},
	}, time.Now())
	value, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode the first-run token: %w", err)
	}
	next := marker{Token: r.ID}
	ops := []store.Op{store.Put(keys.Token(r.ID), value), store.Put(keys.Bootstrap, encode(next))}
	if m.Token != "" {
		ops = append(ops, store.Delete(keys.Token(m.Token)))
	}
	res, err := s.Txn(ctx, []store.Cond{cond}, ops, nil)
	if err != nil {
		return fmt.Errorf("write the hash of the first-run token: %w", err)
	}
	if !res.Succeeded {
		return errdefs.New(errdefs.Unavailable, "first-run token", "another server makes it at this moment")
	}
	if err := os.MkdirAll(filepath.Dir(out.File), 0o700); err != nil {
		return fmt.Errorf("make the folder of the token file: %w", err)
	}
	if err := renameio.WriteFile(out.File, []byte(token+"\n"), 0o600, renameio.WithStaticPermissions(0o600)); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, out.File, "cannot be written: %v", err).
			WithHint("Choose another: --data DIR").Wrap(err)
	}
	out.New = true
	return written(ctx, s, next, store.Cond{Key: keys.Bootstrap, ModRev: res.Revision})
}

// checkFile compares the file with the store, and finishes a first run that crashed after the rename.
func checkFile(ctx context.Context, s store.Store, m marker, file, token string, cond store.Cond) error {
	mismatch := errdefs.New(errdefs.FailedPrecondition, file, "holds another token than the store knows").
		WithHint("Put the right one back, or for a new one: install -m 600 /dev/null %s, then start again", file)
	id, secret, err := split(token)
	if err != nil || id != m.Token {
		return mismatch
	}
	res, err := s.Txn(ctx, nil, []store.Op{store.Get(keys.Token(id))}, nil)
	if err != nil {
		return fmt.Errorf("read the first-run token: %w", err)
	}
	if len(res.Pairs) == 0 {
		return nil // revoked on purpose; it stays so
	}
	r, err := decode(res.Pairs[0])
	if err != nil || !matches(r, secret) {
		return mismatch
	}
	if m.Written {
		return nil
	}
	return written(ctx, s, m, cond)
}

func written(ctx context.Context, s store.Store, m marker, cond store.Cond) error {
	m.Written = true
	// Not succeeding means that another start did the same.
	if _, err := s.Txn(ctx, []store.Cond{cond}, []store.Op{store.Put(keys.Bootstrap, encode(m))}, nil); err != nil {
		return fmt.Errorf("note that the token file is written: %w", err)
	}
	return nil
}

func encode(m marker) []byte {
	b, err := json.Marshal(m)
	if err != nil {
		panic("iam: a plain struct does not encode: " + err.Error())
	}
	return b
}

// readFile reads a token file that nobody else can read.
func readFile(file string) (token string, found bool, err error) {
	info, err := os.Lstat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("token file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return "", false, errdefs.New(errdefs.FailedPrecondition, file, "is no regular file").
			WithHint("Move it away and start again")
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 {
		return "", false, errdefs.New(errdefs.FailedPrecondition, file, "others can read it (%04o)", perm).
			WithHint("Run: chmod 600 %s", file)
	}
	if info.Size() > 4096 {
		return "", false, errdefs.New(errdefs.FailedPrecondition, file, "is no token file, %d bytes", info.Size()).
			WithHint("Move it away and start again")
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return "", false, fmt.Errorf("token file: %w", err)
	}
	return strings.TrimSpace(string(b)), true, nil
}
