package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/renameio/v2"

	"github.com/sandsea/sandsea/api/errdefs"
)

// JoinSchema is that of the files that this version writes and reads.
const JoinSchema = "sandsea.join/1"

// maxJoin bounds such a file.
const maxJoin = 64 << 10

// Invitation is what makes a machine a node: who it is, and where the store is. It holds the node's key.
type Invitation struct {
	Schema string `json:"schema"`
	// Note tells a person who opens the file what it is.
	Note string `json:"note"`
	Name string `json:"name"`
	// Store is where the server's store answers, HOST:PORT.
	Store string `json:"store"`
	CA    string `json:"ca"`
	Cert  string `json:"certificate"`
	Key   string `json:"key"`
}

// Invite makes a node's key and certificate. store is where the node reaches the store; empty: where the server listens.
func (a *Authority) Invite(name, store string, now time.Time) (Invitation, error) {
	if err := CheckName(name); err != nil {
		return Invitation{}, err
	}
	if store == "" {
		text, err := os.ReadFile(filepath.Join(a.dir, storeFile))
		if err != nil {
			return Invitation{}, fmt.Errorf("read the store's address: %w", err)
		}
		store = strings.TrimSpace(string(text))
	}
	host, _, err := net.SplitHostPort(store)
	if err != nil {
		return Invitation{}, errdefs.New(errdefs.Invalid, "", "store %q: write HOST:PORT", store).WithField("store", "")
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		return Invitation{}, errdefs.New(errdefs.FailedPrecondition, "", "the server listens on every address (%s)", store).
			WithField("store", "").WithHint("Say which one the node reaches: --store HOST:PORT")
	}
	cert, key, err := a.issue(name+nodeSuffix, now)
	if err != nil {
		return Invitation{}, err
	}
	return Invitation{
		Schema: JoinSchema, Name: name, Store: store, CA: string(a.pem), Cert: string(cert), Key: string(key),
		Note: "Secret: who has this file can act as the node " + name + ". Move it by scp to that machine, start " +
			"sandsea edge --join FILE there, then delete every copy of it: the edge keeps its own.",
	}, nil
}

// Encode is the file's text.
func (v Invitation) Encode() ([]byte, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode an invitation: %w", err)
	}
	return append(b, '\n'), nil
}

// Identity is who the invitation makes us.
func (v Invitation) Identity() (*Identity, error) {
	id, err := newIdentity([]byte(v.CA), []byte(v.Cert), []byte(v.Key))
	if err == nil && (id.Role != Node || id.Name != v.Name) {
		err = errors.New("its certificate is for somebody else")
	}
	if err != nil {
		return nil, errdefs.New(errdefs.Invalid, "invitation", "cannot be used: %v", err).
			WithHint("Make another: sandsea node invite NAME").Wrap(err)
	}
	return id, nil
}

// ReadInvitation reads a join file, which nobody but its owner may be able to read; the kind NotFound when there is none.
func ReadInvitation(path string) (v Invitation, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return v, errdefs.New(errdefs.NotFound, path, "is not there").Wrap(err)
	}
	if err != nil {
		return v, fmt.Errorf("read the invitation: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return v, fmt.Errorf("read the invitation: %w", err)
	}
	switch {
	case !fi.Mode().IsRegular() || fi.Size() > maxJoin:
		return v, errdefs.New(errdefs.Invalid, path, "is no join file").WithHint("Make one: sandsea node invite NAME")
	case fi.Mode().Perm()&0o077 != 0:
		return v, errdefs.New(errdefs.Denied, path, "others can read it (mode %04o), and it holds a key", fi.Mode().Perm()).
			WithHint("Make another, since this one may have leaked; or if it cannot: chmod 600 %s", path)
	}
	if err := json.NewDecoder(f).Decode(&v); err != nil || v.Schema != JoinSchema {
		return v, errdefs.New(errdefs.Invalid, path, "is no join file of schema %s", JoinSchema).
			WithHint("Make one: sandsea node invite NAME").Wrap(err)
	}
	_, err = v.Identity()
	return v, err
}

// Keep writes the invitation to path, mode 0600.
func (v Invitation) Keep(path string) error {
	text, err := v.Encode()
	if err != nil {
		return err
	}
	if err := renameio.WriteFile(path, text, 0o600); err != nil {
		return fmt.Errorf("keep the invitation: %w", err)
	}
	return nil
}
