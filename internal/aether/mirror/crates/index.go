package crates

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// release is one line of an index file: a version of a crate.
type release struct {
	Name    string    `json:"name"`
	Version string    `json:"vers"`
	Sum     string    `json:"cksum"` // SHA-256 of the .crate, in hexadecimal
	At      time.Time `json:"pubtime"`

	line []byte // as upstream sent it, without the newline
}

// maxReleases bounds an index file: the longest known ones have a few thousand lines.
const maxReleases = 50_000

// parseIndex reads the index file of a crate. A line that is no release of this crate makes the whole file unusable.
func parseIndex(b []byte, crate string) ([]release, error) {
	var all []release
	for line := range bytes.Lines(b) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			continue
		}
		if len(all) == maxReleases {
			return nil, fmt.Errorf("index of crate %s has more than %d versions", crate, maxReleases)
		}
		var r release
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("index of crate %s, line %d: %w", crate, len(all)+1, err)
		}
		if !strings.EqualFold(r.Name, crate) {
			return nil, fmt.Errorf("index of crate %s, line %d is of crate %q", crate, len(all)+1, r.Name)
		}
		if !isVersion(r.Version) {
			return nil, fmt.Errorf("index of crate %s, line %d has version %q", crate, len(all)+1, r.Version)
		}
		if !isSHA256(r.Sum) {
			return nil, fmt.Errorf("index of crate %s, line %d has checksum %q", crate, len(all)+1, r.Sum)
		}
		r.line = line
		all = append(all, r)
	}
	return all, nil
}

// UnmarshalJSON reads a release whose date, if it has one that nobody understands, is unknown instead of wrong.
func (r *release) UnmarshalJSON(b []byte) error {
	var raw struct {
		Name    string          `json:"name"`
		Version string          `json:"vers"`
		Sum     string          `json:"cksum"`
		At      json.RawMessage `json:"pubtime"`
	}
	if err := json.Unmarshal(b, &raw); err != nil {
		return err
	}
	*r = release{Name: raw.Name, Version: raw.Version, Sum: strings.ToLower(raw.Sum)}
	if err := json.Unmarshal(raw.At, &r.At); err != nil {
		r.At = time.Time{}
	}
	return nil
}

// isName tells whether s can be a crate's.
func isName(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") == ""
}

// isVersion tells whether s has nothing in it that would lead out of its place in a path. Cargo's own check is stricter.
func isVersion(s string) bool {
	if s == "" || len(s) > 256 || s[0] < '0' || s[0] > '9' {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+-") == ""
}

func isSHA256(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}

// indexPath is where an index has the file of a crate.
func indexPath(crate string) string {
	c := strings.ToLower(crate)
	return prefix(c) + "/" + c
}

// prefix is the folder of a crate's index file.
func prefix(crate string) string {
	switch len(crate) {
	case 1, 2:
		return fmt.Sprint(len(crate))
	case 3:
		return "3/" + crate[:1]
	}
	return crate[:2] + "/" + crate[2:4]
}

// registry is the config.json of an index.
type registry struct {
	Download string `json:"dl"`
	API      string `json:"api,omitempty"`
	Auth     bool   `json:"auth-required,omitempty"`
}

func parseRegistry(b []byte) (registry, error) {
	var r registry
	if err := json.Unmarshal(b, &r); err != nil {
		return registry{}, fmt.Errorf("config.json of the index: %w", err)
	}
	if !strings.HasPrefix(r.Download, "https://") && !strings.HasPrefix(r.Download, "http://") {
		return registry{}, fmt.Errorf("config.json of the index has dl %q, which is no address", r.Download)
	}
	return r, nil
}

// crateURL is where upstream has the .crate of a release.
func (r registry) crateURL(rel release) string {
	marks := strings.NewReplacer(
		"{crate}", rel.Name,
		"{version}", rel.Version,
		"{prefix}", prefix(rel.Name),
		"{lowerprefix}", prefix(strings.ToLower(rel.Name)),
		"{sha256-checksum}", rel.Sum,
	)
	if url := marks.Replace(r.Download); url != r.Download {
		return url
	}
	return r.Download + "/" + rel.Name + "/" + rel.Version + "/download"
}
