package rubygems

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
)

// gem is one line of an info file: a version for one platform.
type gem struct {
	// Version has the platform behind a dash, if it is not Ruby's own: "1.2.0", "1.2.0-java".
	Version string
	Sum     string // SHA-256 of the .gem, in hexadecimal; "" if it is not told

	line []byte // as upstream sent it, without the newline
}

const (
	maxGems = 50_000 // lines of one info file
	maxLine = 1 << 20
	head    = "---\n"
)

// parseInfo reads the info file of a gem: lines "VERSION DEPENDENCIES|checksum:…,ruby:…" behind "---".
func parseInfo(b []byte, name string) ([]gem, error) {
	var all []gem
	body := b
	if at := bytes.Index(b, []byte(head)); at == 0 || at > 0 && b[at-1] == '\n' {
		body = b[at+len(head):]
	}
	for line := range bytes.Lines(body) {
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			continue
		}
		if len(all) == maxGems {
			return nil, fmt.Errorf("info of gem %s has more than %d versions", name, maxGems)
		}
		version, rest, _ := strings.Cut(string(line), " ")
		if !isVersion(version) {
			return nil, fmt.Errorf("info of gem %s has version %.100q", name, version)
		}
		g := gem{Version: version, line: line}
		_, requirements, _ := strings.Cut(rest, "|")
		for req := range strings.SplitSeq(requirements, ",") {
			if sum, ok := strings.CutPrefix(req, "checksum:"); ok {
				if g.Sum = strings.ToLower(sum); !isSHA256(g.Sum) {
					return nil, fmt.Errorf("info of gem %s %s has checksum %.100q", name, version, sum)
				}
			}
		}
		all = append(all, g)
	}
	return all, nil
}

// parseDates reads when the versions of a gem were published, by version with its platform.
func parseDates(b []byte) (map[string]time.Time, error) {
	var raw []struct {
		Number   string    `json:"number"`
		Platform string    `json:"platform"`
		Created  time.Time `json:"created_at"`
	}
	if err := json.Unmarshal(b, &raw); err != nil {
		return nil, fmt.Errorf("dates of a gem: %w", err)
	}
	dates := map[string]time.Time{}
	for _, v := range raw {
		full := v.Number
		if v.Platform != "" && v.Platform != "ruby" {
			full += "-" + v.Platform
		}
		dates[full] = v.Created
	}
	return dates, nil
}

// rewriteVersions copies the list of all gems ("NAME VERSIONS MD5" behind "---") as line changes them; a line that it
// returns empty is left out.
func rewriteVersions(w io.Writer, r io.Reader, line func(name, versions, sum string) string) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	out := bufio.NewWriter(w)
	inHead := true
	for lines.Scan() {
		l := lines.Text()
		if inHead {
			inHead = l+"\n" != head
			_, _ = out.WriteString(l + "\n")
			continue
		}
		name, rest, ok := strings.Cut(l, " ")
		if !ok {
			continue
		}
		versions, sum, _ := strings.Cut(rest, " ")
		if l := line(name, versions, sum); l != "" {
			_, _ = out.WriteString(l + "\n")
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("list of all gems: %w", err)
	}
	return out.Flush()
}

// rewriteNames is rewriteVersions for the list of names.
func rewriteNames(w io.Writer, r io.Reader, line func(name, versions, sum string) string) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	out := bufio.NewWriter(w)
	for lines.Scan() {
		name := lines.Text()
		if name+"\n" == head {
			_, _ = out.WriteString(head)
		} else if name = strings.TrimSpace(name); isName(name) {
			if l := line(name, "", ""); l != "" {
				_, _ = out.WriteString(l + "\n")
			}
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("list of all names: %w", err)
	}
	return out.Flush()
}

func isName(s string) bool {
	return s != "" && len(s) <= 255 && s[0] != '.' &&
		strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}

func isVersion(s string) bool {
	return s != "" && len(s) <= 255 && s[0] >= '0' && s[0] <= '9' &&
		strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+") == ""
}

func isSHA256(s string) bool { return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == "" }

// splits are the ways in which the name of a file can be a gem's name and a version, the shortest name first.
func splits(full string) [][2]string {
	var all [][2]string
	for i := 1; i+1 < len(full) && len(all) < 16; i++ {
		if full[i] == '-' && isName(full[:i]) && isVersion(full[i+1:]) {
			all = append(all, [2]string{full[:i], full[i+1:]})
		}
	}
	return all
}
