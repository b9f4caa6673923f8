package debian

import (
	"bufio"
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// release is what a suite's Release or InRelease file says.
type release struct {
	Suite, Codename, Version string
	Date, ValidUntil         time.Time // zero: not said
	ByHash                   bool      // files can be had by their hashes
	// Files are those of the suite by name, relative to its folder.
	Files map[string]sum
	// bySum has the names of the files by SHA-256.
	bySum map[string][]string
}

// sum is the SHA-256, in hexadecimal, and size of a file.
type sum struct {
	SHA256 string
	Size   int64
}

const (
	maxRelease = 16 << 20
	maxLine    = 1 << 20
	maxFiles   = 200_000 // of one suite
)

// parseRelease reads a Release file, or what is signed in an InRelease file. Signatures are for clients to verify.
func parseRelease(b []byte) (*release, error) {
	r := &release{Files: map[string]sum{}, bySum: map[string][]string{}}
	if rest, ok := bytes.CutPrefix(b, []byte("-----BEGIN PGP SIGNED MESSAGE-----")); ok {
		head, body, ok := bytes.Cut(rest, []byte("\n\n"))
		if !ok || len(head) > maxLine {
			return nil, fmt.Errorf("signed Release file has no text")
		}
		if b, _, ok = bytes.Cut(body, []byte("\n-----BEGIN PGP SIGNATURE-----")); !ok {
			return nil, fmt.Errorf("signed Release file ends before its signature")
		}
	}
	lines := bufio.NewScanner(bytes.NewReader(b))
	lines.Buffer(nil, maxLine)
	field := ""
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), " \r\t")
		if line == "" {
			continue
		}
		if line[0] == ' ' || line[0] == '\t' {
			if field != "SHA256" {
				continue
			}
			if err := r.addFile(line); err != nil {
				return nil, err
			}
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("a Release file has the line %.100q", line)
		}
		field, value = name, strings.TrimSpace(value)
		switch name {
		case "Suite":
			r.Suite = value
		case "Codename":
			r.Codename = value
		case "Version":
			r.Version = value
		case "Acquire-By-Hash":
			r.ByHash = value == "yes"
		case "Date":
			r.Date = parseDate(value)
		case "Valid-Until":
			if r.ValidUntil = parseDate(value); r.ValidUntil.IsZero() {
				return nil, fmt.Errorf("a Release file is valid until %.100q, which is no date", value)
			}
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("a Release file: %w", err)
	}
	if r.Date.IsZero() && len(r.Files) == 0 {
		return nil, fmt.Errorf("it is no Release file")
	}
	return r, nil
}

func (r *release) addFile(line string) error {
	f := strings.Fields(line)
	if len(f) != 3 || !isSHA256(f[0]) {
		return fmt.Errorf("a Release file lists %.100q", line)
	}
	size, err := strconv.ParseInt(f[1], 10, 64)
	if err != nil || size < 0 {
		return fmt.Errorf("a Release file lists %.100q", line)
	}
	if len(r.Files) == maxFiles {
		return fmt.Errorf("a Release file lists more than %d files", maxFiles)
	}
	r.Files[f[2]] = sum{SHA256: f[0], Size: size}
	r.bySum[f[0]] = append(r.bySum[f[0]], f[2])
	return nil
}

// parseDate reads a date as Release files have it; zero if it is none.
func parseDate(s string) time.Time {
	for _, layout := range []string{"Mon, 2 Jan 2006 15:04:05 MST", "Mon, 2 Jan 2006 15:04:05 -0700"} {
		if t, err := time.Parse(layout, s); err == nil {
			return t.UTC()
		}
	}
	return time.Time{}
}

func isSHA256(s string) bool { return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == "" }
