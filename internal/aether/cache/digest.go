package cache

import (
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Digest is what an object's bytes must hash to.
type Digest struct {
	Algorithm string // sha512, sha384, sha256, sha1, md5
	Hex       string // lower case
}

// SHA256 makes the Digest of a hexadecimal SHA-256 sum.
func SHA256(sum string) Digest { return Digest{Algorithm: "sha256", Hex: strings.ToLower(sum)} }

// Validate tells whether the digest can be checked: errdefs.Invalid if not.
func (d Digest) Validate() error {
	h := newHash(d.Algorithm)
	if h == nil {
		return errdefs.New(errdefs.Invalid, "digest", "of unknown algorithm %q", d.Algorithm)
	}
	if raw, err := hex.DecodeString(d.Hex); err != nil || len(raw) != h.Size() || strings.ToLower(d.Hex) != d.Hex {
		return errdefs.New(errdefs.Invalid, "digest", "%q is not %d bytes in lower-case hexadecimal, as %s has", d.Hex, h.Size(), d.Algorithm)
	}
	return nil
}

// newHash is nil for an unknown algorithm. The weak ones are here because old packages have nothing better.
func newHash(algorithm string) hash.Hash {
	switch algorithm {
	case "sha512":
		return sha512.New()
	case "sha384":
		return sha512.New384()
	case "sha256":
		return sha256.New()
	case "sha1":
		return sha1.New()
	case "md5":
		return md5.New()
	}
	return nil
}

// sums hashes by several algorithms at once.
type sums map[string]hash.Hash

// newSums is of SHA-256 and of what digests need.
func newSums(digests []Digest) (sums, error) {
	s := sums{"sha256": newHash("sha256")}
	for _, d := range digests {
		if err := d.Validate(); err != nil {
			return nil, err
		}
		if s[d.Algorithm] == nil {
			s[d.Algorithm] = newHash(d.Algorithm)
		}
	}
	return s, nil
}

// Write never fails.
func (s sums) Write(p []byte) (int, error) {
	for _, h := range s {
		h.Write(p)
	}
	return len(p), nil
}

// hex sums of all that was written.
func (s sums) hex() map[string]string {
	m := make(map[string]string, len(s))
	for a, h := range s {
		m[a] = hex.EncodeToString(h.Sum(nil))
	}
	return m
}

// DigestError says that upstream sent other bytes than its index promised.
type DigestError struct {
	Key  string
	Want Digest
	Got  string
}

// Error names the object and both sums.
func (e *DigestError) Error() string {
	return fmt.Sprintf("%q has %s %s, not %s: upstream sent wrong bytes, which are not kept", e.Key, e.Want.Algorithm, e.Got, e.Want.Hex)
}

// Unwrap makes a DigestError an errdefs.DataLoss.
func (e *DigestError) Unwrap() error { return errdefs.DataLoss }

// check compares sums with what is expected of the object named key.
func check(key string, got map[string]string, want []Digest) error {
	for _, d := range want {
		if got[d.Algorithm] != d.Hex {
			return &DigestError{Key: key, Want: d, Got: got[d.Algorithm]}
		}
	}
	return nil
}

// verify checks a committed object in r against digests, hashing it only for those that were not taken when it came.
func (m Meta) verify(r io.ReaderAt, want []Digest) error {
	var missing []Digest
	for _, d := range want {
		if m.Digests[d.Algorithm] == "" {
			missing = append(missing, d)
		}
	}
	got := m.Digests
	if len(missing) > 0 {
		s, err := newSums(missing)
		if err != nil {
			return err
		}
		if _, err := io.Copy(s, io.NewSectionReader(r, 0, m.Size)); err != nil {
			return fmt.Errorf("hash it: %w", err)
		}
		got = s.hex()
		for a, sum := range m.Digests {
			got[a] = sum
		}
	}
	return check(m.Key, got, want)
}
