package pypi

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path"
	"regexp"
	"strings"
	"time"

	"golang.org/x/net/html"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
)

// project is what upstream's index says of one.
type project struct {
	name   string // normalised
	files  []file
	byName map[string]int // of files, by file name; the first one counts
	status json.RawMessage
	// sized: every file has a size, as PEP 700 demands of JSON.
	sized bool
}

type file struct {
	name, version  string
	url            string // absolute, without fragment
	hashes         map[string]string
	requiresPython string
	yanked         bool
	yankedReason   string
	metadata       bool // there is one at url + ".metadata"
	metadataHashes map[string]string
	gpgSig         *bool
	size           int64     // -1: unknown
	uploaded       time.Time // zero: unknown
	uploadedText   string    // as upstream wrote it
}

// digests are what the file's bytes are checked by: the strongest one that upstream gives.
func digests(hashes map[string]string) []cache.Digest {
	for _, a := range []string{"sha256", "sha512", "sha384", "sha1", "md5"} {
		if d := (cache.Digest{Algorithm: a, Hex: strings.ToLower(hashes[a])}); hashes[a] != "" && d.Validate() == nil {
			return []cache.Digest{d}
		}
	}
	return nil
}

// wireFile is a file of the JSON index.
type wireFile struct {
	Filename       string            `json:"filename"`
	URL            string            `json:"url"`
	Hashes         map[string]string `json:"hashes"`
	RequiresPython *string           `json:"requires-python,omitempty"`
	DistInfo       json.RawMessage   `json:"dist-info-metadata,omitempty"`
	Core           json.RawMessage   `json:"core-metadata,omitempty"`
	DataDist       json.RawMessage   `json:"data-dist-info-metadata,omitempty"`
	GPGSig         *bool             `json:"gpg-sig,omitempty"`
	Yanked         json.RawMessage   `json:"yanked,omitempty"`
	Size           *int64            `json:"size,omitempty"`
	UploadTime     string            `json:"upload-time,omitempty"`
}

// parsePage reads a project's page of upstream's index, JSON or HTML.
func parsePage(name, contentType, base string, body []byte) (*project, error) {
	at, err := url.Parse(base)
	if err != nil {
		return nil, fmt.Errorf("page of %s: %w", name, err)
	}
	p := &project{name: name, byName: map[string]int{}}
	if isJSON(contentType, body) {
		err = p.readJSON(at, body)
	} else {
		err = p.readHTML(at, body)
	}
	if err != nil {
		return nil, errdefs.New(errdefs.Unavailable, "upstream's page of "+name, "cannot be read: %v", err).Wrap(err)
	}
	return p, nil
}

func isJSON(contentType string, body []byte) bool {
	if strings.Contains(contentType, "json") {
		return true
	}
	return !strings.Contains(contentType, "html") && bytes.HasPrefix(bytes.TrimSpace(body), []byte("{"))
}

func (p *project) readJSON(at *url.URL, body []byte) error {
	var w struct {
		Meta struct {
			Version string `json:"api-version"`
		} `json:"meta"`
		Status   json.RawMessage `json:"project-status"`
		Versions []string        `json:"versions"`
		Files    []wireFile      `json:"files"`
	}
	if err := json.Unmarshal(body, &w); err != nil {
		return err
	}
	if major, _, _ := strings.Cut(w.Meta.Version, "."); major != "1" {
		return fmt.Errorf("it is of version %q, and only 1.x is understood", w.Meta.Version)
	}
	p.status, p.sized = w.Status, true
	known := map[string]bool{}
	for _, v := range w.Versions {
		known[strings.ToLower(v)] = true
	}
	for _, f := range w.Files {
		out := file{
			name: f.Filename, hashes: f.Hashes, gpgSig: f.GPGSig, size: -1, uploadedText: f.UploadTime,
			version: fileVersion(p.name, f.Filename, known),
		}
		if f.RequiresPython != nil {
			out.requiresPython = *f.RequiresPython
		}
		if f.Size != nil && *f.Size >= 0 {
			out.size = *f.Size
		} else {
			p.sized = false
		}
		if t, err := time.Parse(time.RFC3339Nano, f.UploadTime); err == nil {
			out.uploaded = t
		}
		for _, raw := range []json.RawMessage{f.Core, f.DistInfo, f.DataDist} {
			if len(raw) == 0 {
				continue
			}
			out.metadata, out.metadataHashes = readMetadata(raw)
			break
		}
		out.yanked, out.yankedReason = readYanked(f.Yanked)
		p.add(at, f.URL, out)
	}
	return nil
}

// readMetadata reads true, false or {"sha256": "..."}.
func readMetadata(raw json.RawMessage) (bool, map[string]string) {
	var there bool
	if json.Unmarshal(raw, &there) == nil {
		return there, nil
	}
	var hashes map[string]string
	if json.Unmarshal(raw, &hashes) != nil {
		return false, nil
	}
	return true, hashes
}

// readYanked reads true, false or a reason.
func readYanked(raw json.RawMessage) (bool, string) {
	var yanked bool
	if len(raw) == 0 || json.Unmarshal(raw, &yanked) == nil {
		return yanked, ""
	}
	var reason string
	if json.Unmarshal(raw, &reason) != nil {
		return true, ""
	}
	return true, reason
}

// fileName is what files of packages are called: nothing that means something in a path, a URL or HTML.
var fileName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._+!~@=, ()-]*$`)

// add takes a file whose URL is a web address and whose name is one.
func (p *project) add(at *url.URL, ref string, f file) {
	u, err := at.Parse(ref)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" {
		return
	}
	if !fileName.MatchString(f.name) {
		return
	}
	u.Fragment, u.RawFragment, u.User = "", "", nil
	f.url = u.String()
	if _, ok := p.byName[f.name]; ok {
		return
	}
	p.byName[f.name] = len(p.files)
	p.files = append(p.files, f)
}

// anchors calls do for each link of an HTML page with its attributes and its text.
func anchors(r io.Reader, do func(attr map[string]string, text string)) error {
	z := html.NewTokenizer(r)
	z.SetMaxBuf(1 << 20)
	var attr map[string]string
	var text strings.Builder
	for {
		switch z.Next() {
		case html.ErrorToken:
			if errors.Is(z.Err(), io.EOF) {
				return nil
			}
			return z.Err()
		case html.StartTagToken:
			t := z.Token()
			if t.Data == "base" {
				return errors.New("it moves its base, which is not supported")
			}
			if t.Data == "a" {
				attr = map[string]string{}
				for _, a := range t.Attr {
					if _, twice := attr[a.Key]; !twice {
						attr[a.Key] = a.Val
					}
				}
				text.Reset()
			}
		case html.TextToken:
			if attr != nil {
				text.Write(z.Text())
			}
		case html.EndTagToken:
			if t := z.Token(); t.Data == "a" && attr != nil {
				do(attr, strings.TrimSpace(html.UnescapeString(text.String())))
				attr = nil
			}
		}
	}
}

func (p *project) readHTML(at *url.URL, body []byte) error {
	return anchors(bytes.NewReader(body), func(attr map[string]string, _ string) {
		ref, err := at.Parse(attr["href"])
		if err != nil {
			return
		}
		name := path.Base(ref.Path)
		f := file{name: name, size: -1, hashes: readFragment(ref.Fragment), version: fileVersion(p.name, name, nil), requiresPython: attr["data-requires-python"]}
		f.yankedReason, f.yanked = attr["data-yanked"]
		if raw, ok := attr["data-core-metadata"]; ok {
			f.metadata, f.metadataHashes = raw != "false", readFragment(raw)
		} else if raw, ok := attr["data-dist-info-metadata"]; ok {
			f.metadata, f.metadataHashes = raw != "false", readFragment(raw)
		}
		if raw, ok := attr["data-gpg-sig"]; ok {
			sig := raw == "true"
			f.gpgSig = &sig
		}
		p.add(at, attr["href"], f)
	})
}

// readFragment reads "sha256=...", as it stands behind a file's URL.
func readFragment(s string) map[string]string {
	algorithm, sum, ok := strings.Cut(s, "=")
	sum, _, _ = strings.Cut(sum, "&")
	if _, err := hex.DecodeString(sum); !ok || err != nil || sum == "" {
		return nil
	}
	return map[string]string{algorithm: sum}
}

var separators = regexp.MustCompile(`[-_.]+`)

// normalise gives a project's name as PEP 503 does; ok: it is one.
func normalise(name string) (string, bool) {
	n := strings.ToLower(separators.ReplaceAllString(name, "-"))
	return n, projectName.MatchString(name)
}

var projectName = regexp.MustCompile(`^(?i:[a-z0-9]|[a-z0-9][a-z0-9._-]{0,253}[a-z0-9])$`)

var (
	extensions = []string{".whl", ".egg", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.Z", ".tar", ".zip", ".exe", ".msi", ".rpm", ".deb", ".dmg"}
	platforms  = regexp.MustCompile(`(?i)[-.](?:win32|win-amd64|win-arm64|linux-[a-z0-9_]+|macosx-[0-9.]+-[a-z0-9_]+)(?:[-.].*)?$|-py\d(?:\.\d+)?(?:-.*)?$|-\d+\.(?:src|noarch|x86_64|i[3-6]86)$`)
)

// stem of a file's name: without its extension; false: it is no package's file.
func stem(name string) (string, bool) {
	for _, ext := range extensions {
		if len(name) > len(ext) && strings.EqualFold(name[len(name)-len(ext):], ext) {
			return name[:len(name)-len(ext)], true
		}
	}
	return "", false
}

// fileVersion finds the version in the name of a project's file, as one of known if it can. "": there is none.
func fileVersion(projectName, name string, known map[string]bool) string {
	base, ok := stem(name)
	if !ok {
		return ""
	}
	if strings.HasSuffix(strings.ToLower(name), ".whl") {
		parts := strings.Split(base, "-")
		if len(parts) < 5 {
			return ""
		}
		return strings.ReplaceAll(parts[1], "_", "-")
	}
	for i := range len(base) {
		if base[i] != '-' {
			continue
		}
		if n, ok := normalise(base[:i]); !ok || n != projectName {
			continue
		}
		rest := base[i+1:]
		// The longest version of upstream's list that the rest is, or begins with.
		for end := len(rest); end > 0; end-- {
			if end < len(rest) && rest[end] != '-' && rest[end] != '.' {
				continue
			}
			if v := strings.ToLower(rest[:end]); known[v] || known[strings.ReplaceAll(v, "_", "+")] {
				return rest[:end]
			}
		}
		return platforms.ReplaceAllString(rest, "")
	}
	return ""
}

// candidates are the projects that a file may belong to by its name, the likeliest first.
func candidates(name string) []string {
	base, ok := stem(name)
	if !ok {
		return nil
	}
	if strings.HasSuffix(strings.ToLower(name), ".whl") {
		first, _, _ := strings.Cut(base, "-")
		if n, ok := normalise(first); ok {
			return []string{n}
		}
		return nil
	}
	var likely, rest []string
	for i := len(base) - 1; i > 0; i-- {
		if base[i] != '-' {
			continue
		}
		n, ok := normalise(base[:i])
		if !ok {
			continue
		}
		if i+1 < len(base) && '0' <= base[i+1] && base[i+1] <= '9' {
			likely = append(likely, n)
		} else {
			rest = append(rest, n)
		}
	}
	likely = append(likely, rest...)
	return likely[:min(len(likely), maxCandidates)]
}

// maxCandidates bounds what upstream is asked about one file.
const maxCandidates = 6
