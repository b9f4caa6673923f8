package debian

import (
	"bufio"
	"compress/bzip2"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/ulikunitz/xz"
)

// Limits of what is read of one index.
const (
	maxIndexText = 2 << 30 // unpacked
	maxListed    = 1_000_000
)

// listed is what the indexes that were seen say of a pool's file.
type listed struct {
	sha256 [sha256.Size]byte
	since  time.Time // of the oldest Release whose index lists it; zero: of none that has a date
}

// table knows the pool's files of all archives by a hash of their addresses.
type table struct {
	max    int    // files
	forget func() // called when the table was emptied, so that indexes that were read are read again

	mu    sync.Mutex
	files map[[16]byte]listed // guarded by mu
}

func newTable(max int, forget func()) *table {
	return &table{max: max, forget: forget, files: map[[16]byte]listed{}}
}

func tableKey(archive, path string) [16]byte {
	sum := sha256.Sum256([]byte(archive + "\x00" + path))
	return [16]byte(sum[:16])
}

func (t *table) find(archive, path string) (listed, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l, ok := t.files[tableKey(archive, path)]
	return l, ok
}

func (t *table) add(archive, path, sum string, since time.Time) {
	raw, err := hex.DecodeString(sum)
	if err != nil || len(raw) != sha256.Size {
		return
	}
	l := listed{sha256: [sha256.Size]byte(raw), since: since}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.files) >= t.max {
		clear(t.files)
		t.forget()
	}
	k := tableKey(archive, path)
	if old, ok := t.files[k]; ok && old.sha256 == l.sha256 && !old.since.IsZero() && (since.IsZero() || old.since.Before(since)) {
		return
	}
	t.files[k] = l
}

// indexKind tells which index a file of a suite is: "Packages", "Sources" or "".
func indexKind(name string) string {
	if base := path.Base(unpacked(name)); base == "Packages" || base == "Sources" {
		return base
	}
	return ""
}

// unpacked is an index's name without the ending of how it is packed.
func unpacked(name string) string {
	for _, ending := range []string{".gz", ".xz", ".bz2"} {
		if base, ok := strings.CutSuffix(name, ending); ok {
			return base
		}
	}
	return name
}

// parseIndex calls add with the path and the SHA-256 of each file that an index lists. name is the index's, whose
// ending tells how it is packed.
func parseIndex(r io.Reader, name string, add func(path, sha256 string)) error {
	var err error
	switch path.Ext(name) {
	case ".gz":
		r, err = gzip.NewReader(r)
	case ".xz":
		r, err = xz.NewReader(r)
	case ".bz2":
		r = bzip2.NewReader(r)
	}
	if err != nil {
		return fmt.Errorf("index %s: %w", name, err)
	}
	lines := bufio.NewScanner(io.LimitReader(r, maxIndexText))
	lines.Buffer(make([]byte, 64<<10), maxLine)
	var s stanza
	for lines.Scan() {
		line := lines.Text()
		if line == "" {
			s.tell(add)
			s = stanza{}
			continue
		}
		s.read(line)
	}
	s.tell(add)
	if err := lines.Err(); err != nil {
		return fmt.Errorf("index %s: %w", name, err)
	}
	return nil
}

// stanza is what is wanted of one entry of an index.
type stanza struct {
	filename, sum string      // of a binary package
	directory     string      // of a source package
	files         [][2]string // name and SHA-256
	inFiles       bool
}

func (s *stanza) read(line string) {
	if line[0] == ' ' || line[0] == '\t' {
		if f := strings.Fields(line); s.inFiles && len(f) == 3 {
			s.files = append(s.files, [2]string{f[2], f[0]})
		}
		return
	}
	field, value, _ := strings.Cut(line, ":")
	value = strings.TrimSpace(value)
	s.inFiles = false
	switch field {
	case "Filename":
		s.filename = value
	case "SHA256":
		s.sum = value
	case "Directory":
		s.directory = value
	case "Checksums-Sha256":
		s.inFiles = true
	}
}

func (s *stanza) tell(add func(path, sha256 string)) {
	if s.filename != "" && isSHA256(s.sum) {
		add(strings.TrimPrefix(s.filename, "./"), s.sum)
	}
	for _, f := range s.files {
		if s.directory != "" && isSHA256(f[1]) {
			add(s.directory+"/"+f[0], f[1])
		}
	}
}
