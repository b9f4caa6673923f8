package npm

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/policy"
)

// packument is what upstream's says, less what installers do not need.
type packument struct {
	name     string
	versions []entry // in order
	byName   map[string]int
	tags     map[string]string
	modified string // as upstream wrote it
	created  string
	// byFile finds the version of a tarball by the last part of its URL, where that is one version's alone; -1: it is not.
	byFile map[string]int
}

// entry is one version.
type entry struct {
	name      string
	published time.Time // zero: unknown
	text      string    // of published, as upstream wrote it
	doc       document
	tarball   string // URL at upstream
	digests   []cache.Digest
}

// document is a version's, abbreviated.
type document map[string]json.RawMessage

// abbreviated are the fields of a version in an abbreviated packument.
var abbreviated = []string{
	"name", "version", "deprecated", "dependencies", "optionalDependencies", "devDependencies", "bundleDependencies", "bundledDependencies",
	"peerDependencies", "peerDependenciesMeta", "acceptDependencies", "bin", "directories", "dist", "engines", "cpu", "os", "libc", "funding",
	"_hasShrinkwrap", "hasInstallScript",
}

// limits of one packument.
const (
	maxPackument = 512 << 20 // at upstream
	maxVersions  = 100_000
)

// fields calls do for each field of the JSON object that d is at the beginning of, with d at the field's value, which do
// reads to its end.
func fields(d *json.Decoder, do func(key string) error) error {
	t, err := d.Token()
	if err != nil {
		return unexpected(err)
	}
	if t != json.Delim('{') {
		return fmt.Errorf("%v is not an object", t)
	}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return unexpected(err)
		}
		key, ok := t.(string)
		if !ok {
			return fmt.Errorf("%v is not a key", t)
		}
		if err := do(key); err != nil {
			return err
		}
	}
	_, err = d.Token()
	return unexpected(err)
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// skip reads a value and drops it, without holding all of it.
func skip(d *json.Decoder) error {
	depth := 0
	for {
		t, err := d.Token()
		if err != nil {
			return unexpected(err)
		}
		switch t {
		case json.Delim('{'), json.Delim('['):
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		if depth == 0 {
			return nil
		}
	}
}

// parsePackument reads upstream's packument, full or abbreviated.
func parsePackument(name string, r io.Reader) (*packument, error) {
	p := &packument{name: name, byName: map[string]int{}, tags: map[string]string{}, byFile: map[string]int{}}
	times := map[string]string{}
	seen := map[string]bool{}
	d := json.NewDecoder(r)
	err := fields(d, func(key string) error {
		if seen[key] {
			return fmt.Errorf("it has %q twice", key)
		}
		seen[key] = true
		switch key {
		case "versions":
			return fields(d, func(v string) error { return p.readVersion(d, v) })
		case "dist-tags":
			return d.Decode(&p.tags)
		case "modified":
			return d.Decode(&p.modified)
		case "time":
			return fields(d, func(v string) error {
				var raw json.RawMessage
				if err := d.Decode(&raw); err != nil {
					return err
				}
				var s string
				if json.Unmarshal(raw, &s) == nil { // "unpublished" is an object
					times[v] = s
				}
				return nil
			})
		}
		return skip(d)
	})
	if err != nil {
		return nil, errdefs.New(errdefs.Unavailable, "upstream's packument of "+name, "cannot be read: %v", err).Wrap(err)
	}
	for i := range p.versions {
		e := &p.versions[i]
		e.text = times[e.name]
		if t, err := time.Parse(time.RFC3339Nano, e.text); err == nil {
			e.published = t
		}
	}
	p.created = times["created"]
	if m := times["modified"]; m != "" {
		p.modified = m
	}
	slices.SortStableFunc(p.versions, func(a, b entry) int { return parseVersion(a.name).compare(parseVersion(b.name)) })
	for i, e := range p.versions {
		p.byName[e.name] = i
		file := fileOf(e.tarball)
		if _, twice := p.byFile[file]; twice {
			i = -1
		}
		p.byFile[file] = i
	}
	return p, nil
}

func (p *packument) readVersion(d *json.Decoder, name string) error {
	var full document
	if err := d.Decode(&full); err != nil {
		return fmt.Errorf("version %q: %w", name, err)
	}
	if _, twice := p.byName[name]; twice {
		return fmt.Errorf("it has version %q twice", name)
	}
	if len(p.versions) == maxVersions {
		return fmt.Errorf("it has more than %d versions", maxVersions)
	}
	var dist struct {
		Tarball   string `json:"tarball"`
		Integrity string `json:"integrity"`
		Shasum    string `json:"shasum"`
	}
	if err := json.Unmarshal(orNull(full["dist"]), &dist); err != nil {
		return fmt.Errorf("version %q: dist: %w", name, err)
	}
	e := entry{name: name, doc: document{}, digests: digests(dist.Integrity, dist.Shasum)}
	if u, err := url.Parse(dist.Tarball); err == nil && u.Host != "" && (u.Scheme == "https" || u.Scheme == "http") {
		u.User, u.Fragment = nil, ""
		e.tarball = u.String()
	}
	for _, k := range abbreviated {
		if raw, ok := full[k]; ok {
			e.doc[k] = slices.Clone(raw)
		}
	}
	if hasInstallScript(full["scripts"]) {
		e.doc["hasInstallScript"] = json.RawMessage("true")
	}
	p.byName[name] = len(p.versions)
	p.versions = append(p.versions, e)
	return nil
}

func orNull(raw json.RawMessage) json.RawMessage {
	if raw == nil {
		return json.RawMessage("null")
	}
	return raw
}

// hasInstallScript tells whether installing runs a script of the package's, which abbreviated packuments say.
func hasInstallScript(scripts json.RawMessage) bool {
	var s map[string]json.RawMessage
	if json.Unmarshal(orNull(scripts), &s) != nil {
		return false
	}
	return s["preinstall"] != nil || s["install"] != nil || s["postinstall"] != nil
}

// digests are what a tarball is checked by: the strongest of its integrity or, without one, its SHA-1.
func digests(integrity, shasum string) []cache.Digest {
	for _, algorithm := range []string{"sha512", "sha384", "sha256", "sha1"} {
		for token := range strings.FieldsSeq(integrity) {
			token, _, _ = strings.Cut(token, "?")
			b64, ok := strings.CutPrefix(token, algorithm+"-")
			if !ok {
				continue
			}
			raw, err := base64.StdEncoding.DecodeString(b64)
			if d := (cache.Digest{Algorithm: algorithm, Hex: hex.EncodeToString(raw)}); err == nil && d.Validate() == nil {
				return []cache.Digest{d}
			}
		}
	}
	if d := (cache.Digest{Algorithm: "sha1", Hex: strings.ToLower(shasum)}); d.Validate() == nil {
		return []cache.Digest{d}
	}
	return nil
}

// fileOf a URL: the last part of its path.
func fileOf(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return ""
	}
	return path.Base(u.Path)
}

// link of a version's tarball in this mirror. It is named after the version, whatever upstream names it.
func (p *packument) link(base string, e entry) string {
	return base + "/" + p.name + "/-/" + url.PathEscape(p.fileName(e.name))
}

func (p *packument) fileName(version string) string {
	return path.Base(p.name) + "-" + version + ".tgz"
}

// find the version of a tarball by the last part of its path: -1 if there is none.
func (p *packument) find(file string) int {
	if v, ok := strings.CutPrefix(file, path.Base(p.name)+"-"); ok {
		if v, ok = strings.CutSuffix(v, ".tgz"); ok {
			if i, ok := p.byName[v]; ok {
				return i
			}
		}
	}
	if i, ok := p.byFile[file]; ok {
		return i
	}
	return -1
}

// view is what a caller's world shows of a packument.
type view struct {
	*packument
	shown  []bool            // by version
	tags   map[string]string // instead of the packument's
	hidden policy.Verdict    // on the last version that is hidden; allowed: none is
	any    bool              // is shown
}

func (p *packument) view(w policy.World) view {
	v := view{packument: p, shown: make([]bool, len(p.versions)), tags: map[string]string{}, hidden: policy.Verdict{Allow: true}}
	for i, e := range p.versions {
		verdict := w.Version(policy.NPM, p.name, e.name, e.published)
		if v.shown[i] = verdict.Allow; verdict.Allow {
			v.any = true
		} else {
			v.hidden = verdict
		}
	}
	for tag, name := range p.tags {
		if i, ok := p.byName[name]; ok && v.shown[i] {
			v.tags[tag] = name
		}
	}
	if _, ok := v.tags["latest"]; !ok && v.any {
		v.tags["latest"] = v.latest()
	}
	return v
}

// latest is what the tag is taken to have been: the highest version that is no pre-release and not above today's; else
// the highest that is no pre-release; else the one that was published last.
func (v view) latest() string {
	bound := parseVersion(v.packument.tags["latest"])
	var below, above string
	var youngest entry
	for i, e := range v.versions {
		if !v.shown[i] {
			continue
		}
		if youngest.name == "" || !e.published.Before(youngest.published) {
			youngest = e
		}
		// They come in order, so the last one is the highest.
		if n := parseVersion(e.name); !n.prerelease() {
			above = e.name
			if n.compare(bound) <= 0 {
				below = e.name
			}
		}
	}
	switch {
	case below != "":
		return below
	case above != "":
		return above
	}
	return youngest.name
}

// here makes a version's document lead to this mirror.
func (p *packument) here(base string, e entry, doc document) (document, error) {
	out := maps.Clone(doc)
	var dist document
	if err := json.Unmarshal(orNull(doc["dist"]), &dist); err != nil || dist == nil {
		return out, err
	}
	link, err := json.Marshal(p.link(base, e))
	if err != nil {
		return nil, err
	}
	dist["tarball"] = link
	raw, err := json.Marshal(dist)
	if err != nil {
		return nil, err
	}
	out["dist"] = raw
	return out, nil
}

// abbreviate renders what installers ask for.
func (v view) abbreviate(base string) ([]byte, error) {
	versions := map[string]document{}
	modified := v.modified
	for i, e := range v.versions {
		if !v.shown[i] {
			modified = ""
			continue
		}
		doc, err := v.here(base, e, e.doc)
		if err != nil {
			return nil, err
		}
		versions[e.name] = doc
	}
	if modified == "" {
		modified = v.youngest()
	}
	return json.Marshal(struct {
		Name     string              `json:"name"`
		Modified string              `json:"modified,omitempty"`
		Tags     map[string]string   `json:"dist-tags"`
		Versions map[string]document `json:"versions"`
	}{v.name, modified, v.tags, versions})
}

// youngest is the time at which the last visible version was published, as upstream wrote it.
func (v view) youngest() string {
	var last entry
	for i, e := range v.versions {
		if v.shown[i] && e.published.After(last.published) {
			last = e
		}
	}
	return last.text
}

// ofProject are a full packument's own fields that come from its latest version.
var ofProject = []string{
	"description", "homepage", "repository", "author", "bugs", "license", "keywords", "maintainers", "contributors", "readmeFilename",
}

// full renders the whole packument, reading upstream's once more as a stream. Where something is hidden, the project's
// own fields are those of the latest visible version, and the readme is left out.
func (v view) full(base string, r io.Reader, w io.Writer) error {
	hides := !v.hidden.Allow
	latest := v.tags["latest"]
	first := true
	put := func(key string, value []byte) error {
		sep := ","
		if first {
			sep, first = "{", false
		}
		k, err := json.Marshal(key)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "%s%s:%s", sep, k, value)
		return err
	}
	times := map[string]string{}
	if v.created != "" {
		times["created"] = v.created
	}
	if times["modified"] = v.modified; hides {
		times["modified"] = v.youngest()
	}
	for i, e := range v.versions {
		if v.shown[i] && e.text != "" {
			times[e.name] = e.text
		}
	}
	for key, value := range map[string]any{"_id": v.name, "name": v.name, "dist-tags": v.tags, "time": times} {
		raw, err := json.Marshal(value)
		if err == nil {
			err = put(key, raw)
		}
		if err != nil {
			return err
		}
	}
	d := json.NewDecoder(r)
	err := fields(d, func(key string) error {
		switch key {
		case "_id", "name", "dist-tags", "time", "_rev", "_attachments", "modified":
			return skip(d)
		case "versions":
		default:
			if hides {
				return skip(d)
			}
			var raw json.RawMessage
			if err := d.Decode(&raw); err != nil {
				return err
			}
			return put(key, raw)
		}
		if err := put("versions", []byte("{")); err != nil {
			return err
		}
		some := false
		var newest document
		err := fields(d, func(name string) error {
			i, ok := v.byName[name]
			if !ok || !v.shown[i] {
				return skip(d)
			}
			var doc document
			if err := d.Decode(&doc); err != nil {
				return err
			}
			if name == latest {
				newest = doc
			}
			doc, err := v.here(base, v.versions[i], doc)
			if err != nil {
				return err
			}
			raw, err := json.Marshal(doc)
			if err != nil {
				return err
			}
			k, err := json.Marshal(name)
			if err != nil {
				return err
			}
			sep := ""
			if some {
				sep = ","
			}
			some = true
			_, err = fmt.Fprintf(w, "%s%s:%s", sep, k, raw)
			return err
		})
		if err != nil {
			return err
		}
		if _, err := io.WriteString(w, "}"); err != nil {
			return err
		}
		if !hides {
			return nil
		}
		for _, k := range ofProject {
			if raw, ok := newest[k]; ok {
				if err := put(k, raw); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, "}")
	return err
}

// one finds a version's whole document in upstream's packument, as a stream.
func (p *packument) one(name string, r io.Reader) (document, error) {
	var doc document
	d := json.NewDecoder(r)
	err := fields(d, func(key string) error {
		if key != "versions" {
			return skip(d)
		}
		return fields(d, func(v string) error {
			if v != name {
				return skip(d)
			}
			return d.Decode(&doc)
		})
	})
	return doc, err
}

// packageName is what npm takes for one, old ones included.
var packageName = regexp.MustCompile(`^(?:@[A-Za-z0-9~!*'()-][A-Za-z0-9._~!*'()-]*/)?[A-Za-z0-9~!*'()-][A-Za-z0-9._~!*'()-]*$`)

// checkName refuses what is no package's name.
func checkName(name string) error {
	if len(name) > 214 || name == "-" || !packageName.MatchString(name) {
		return errdefs.New(errdefs.Invalid, "package", "%q is not a package's name", name)
	}
	return nil
}
