package pypi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"html"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/policy"
)

// link of a file in this mirror.
func (p *project) link(base string, f file) string {
	return base + "/files/" + p.name + "/" + url.PathEscape(f.name)
}

// json renders a project's page as PEP 691 has it, and as PEP 700 does if upstream tells enough for it.
func (p *project) json(base string, files []file) ([]byte, error) {
	type meta struct {
		Version string `json:"api-version"`
	}
	page := struct {
		Meta     meta            `json:"meta"`
		Name     string          `json:"name"`
		Status   json.RawMessage `json:"project-status,omitempty"`
		Versions []string        `json:"versions,omitempty"`
		Files    []wireFile      `json:"files"`
	}{Meta: meta{"1.0"}, Name: p.name, Status: p.status, Files: []wireFile{}}
	if p.sized {
		page.Meta.Version = "1.1"
		page.Versions = versions(files)
	}
	for _, f := range files {
		out := wireFile{
			Filename: f.name, URL: p.link(base, f), Hashes: f.hashes, GPGSig: f.gpgSig, Yanked: json.RawMessage("false"), UploadTime: f.uploadedText,
		}
		if out.Hashes == nil {
			out.Hashes = map[string]string{}
		}
		if f.requiresPython != "" {
			out.RequiresPython = &f.requiresPython
		}
		if f.size >= 0 {
			out.Size = &f.size
		}
		if f.metadata {
			raw, err := json.Marshal(f.metadataHashes)
			if err != nil {
				return nil, err
			}
			if len(f.metadataHashes) == 0 {
				raw = []byte("true")
			}
			out.Core, out.DistInfo = raw, raw
		}
		if f.yanked {
			out.Yanked = json.RawMessage("true")
			if f.yankedReason != "" {
				raw, err := json.Marshal(f.yankedReason)
				if err != nil {
					return nil, err
				}
				out.Yanked = raw
			}
		}
		page.Files = append(page.Files, out)
	}
	return json.Marshal(page)
}

// versions of files, each once, in order.
func versions(files []file) []string {
	seen := map[string]bool{}
	var out []version
	for _, f := range files {
		if f.version != "" && !seen[f.version] {
			seen[f.version] = true
			out = append(out, parseVersion(f.version))
		}
	}
	slices.SortFunc(out, version.compare)
	names := make([]string, len(out))
	for i, v := range out {
		names[i] = v.text
	}
	return names
}

// html renders a project's page as PEP 503 has it.
func (p *project) html(base string, files []file) []byte {
	var b bytes.Buffer
	b.WriteString("<!DOCTYPE html>\n<html>\n  <head>\n    <meta name=\"pypi:repository-version\" content=\"1.0\">\n")
	fmt.Fprintf(&b, "    <title>Links for %s</title>\n  </head>\n  <body>\n    <h1>Links for %[1]s</h1>\n", html.EscapeString(p.name))
	for _, f := range files {
		href := p.link(base, f)
		if h := hash(f.hashes); h != "" {
			href += "#" + h
		}
		fmt.Fprintf(&b, "    <a href=\"%s\"", html.EscapeString(href))
		attr := func(name, value string) { fmt.Fprintf(&b, " %s=\"%s\"", name, html.EscapeString(value)) }
		if f.requiresPython != "" {
			attr("data-requires-python", f.requiresPython)
		}
		if f.metadata {
			h := hash(f.metadataHashes)
			if h == "" {
				h = "true"
			}
			attr("data-dist-info-metadata", h)
			attr("data-core-metadata", h)
		}
		if f.yanked {
			attr("data-yanked", f.yankedReason)
		}
		if f.gpgSig != nil {
			attr("data-gpg-sig", strconv.FormatBool(*f.gpgSig))
		}
		fmt.Fprintf(&b, ">%s</a><br>\n", html.EscapeString(f.name))
	}
	b.WriteString("  </body>\n</html>\n")
	return b.Bytes()
}

// hash as it stands in links: SHA-256 if there is one.
func hash(hashes map[string]string) string {
	if sum := hashes["sha256"]; sum != "" {
		return "sha256=" + sum
	}
	for _, a := range slices.Sorted(maps.Keys(hashes)) {
		return a + "=" + hashes[a]
	}
	return ""
}

// negotiate chooses the content type of an answer by Accept and ?format=; "": none that we have.
func negotiate(r *http.Request) string {
	// PEP 691 shows the plus of a media type as it is, which a query takes for a space.
	want := strings.ReplaceAll(r.URL.Query().Get("format"), " ", "+")
	if want == "" {
		want = strings.Join(r.Header.Values("Accept"), ",")
	}
	if strings.TrimSpace(want) == "" {
		return "text/html"
	}
	// At the same weight, the earlier of ours is taken; a wildcard gives what old clients expect.
	ours := map[string]string{
		typeJSON: typeJSON, "application/vnd.pypi.simple.latest+json": typeJSON,
		typeHTML: typeHTML, "application/vnd.pypi.simple.latest+html": typeHTML,
		"text/html": "text/html", "text/*": "text/html", "application/*": typeJSON, "*/*": "text/html",
	}
	rank := []string{typeJSON, typeHTML, "text/html"}
	best, bestQ, bestExact := "", 0.0, false
	for part := range strings.SplitSeq(want, ",") {
		name, params, _ := strings.Cut(part, ";")
		name = strings.ToLower(strings.TrimSpace(name))
		q := 1.0
		for p := range strings.SplitSeq(params, ";") {
			if v, ok := strings.CutPrefix(strings.TrimSpace(p), "q="); ok {
				f, err := strconv.ParseFloat(v, 64)
				if err != nil || !(f >= 0 && f <= 1) {
					f = 0
				}
				q = f
			}
		}
		t, ok := ours[name]
		if !ok || q == 0 {
			continue
		}
		exact := !strings.HasSuffix(name, "*")
		better := q > bestQ || q == bestQ && (exact && !bestExact || exact == bestExact && slices.Index(rank, t) < slices.Index(rank, best))
		if best == "" || better {
			best, bestQ, bestExact = t, q, exact
		}
	}
	return best
}

// list answers with all projects, less those that are denied. Projects have no date, so a world with one has no list.
func (s *Service) list(w http.ResponseWriter, r *http.Request, c *mirror.Caller) {
	a := mirror.Artefact{Kind: "list"}
	if !c.World.AsOf.IsZero() {
		mirror.Deny(w, c, a, policy.Verdict{Rule: policy.RuleUndated, Reason: "nobody says when projects began, so a world with a date has no list of all"})
		return
	}
	if !strings.HasSuffix(r.URL.Path, "/") {
		http.Redirect(w, r, c.Base+"/simple/", http.StatusMovedPermanently)
		return
	}
	w.Header().Set("Vary", "Accept")
	contentType := negotiate(r)
	if contentType == "" {
		s.unacceptable(w, c, a)
		return
	}
	// All are there before the first byte of the answer, which is written as they are read: it is too large to be held for
	// everybody who asks.
	var objects []*cache.Object
	defer func() {
		for _, o := range objects {
			_ = o.Close()
		}
	}()
	for _, base := range s.cfg.Upstream.URLs {
		o, from, err := s.fetch(r.Context(), base+"/", accept, maxList)
		if err == nil {
			objects = append(objects, o)
			a.Source = string(from)
			_, err = o.Wait(r.Context())
		}
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
	}
	w.Header().Set("Cache-Control", "no-cache")
	mirror.SendWritten(w, r, c, a, withCharset(contentType), cache.Source(a.Source), func(out *bufio.Writer) error {
		return s.writeList(r.Context(), out, c, objects, contentType == typeJSON)
	})
}

// writeList writes the projects of upstreams' lists that the caller's world has, each once.
func (s *Service) writeList(ctx context.Context, out *bufio.Writer, c *mirror.Caller, objects []*cache.Object, asJSON bool) error {
	begin, end := "<!DOCTYPE html>\n<html>\n  <head>\n    <meta name=\"pypi:repository-version\" content=\"1.0\">\n    <title>Simple index</title>\n  </head>\n  <body>\n",
		"  </body>\n</html>\n"
	if asJSON {
		begin, end = `{"meta":{"api-version":"1.0"},"projects":[`, "]}"
	}
	_, _ = out.WriteString(begin) // its errors come when it is flushed
	first := true
	seed := maphash.MakeSeed()
	seen := map[uint64]bool{} // of all lists but the last
	for i, o := range objects {
		err := readList(ctx, o, func(name string) {
			n, ok := normalise(name)
			if !ok || !c.World.Package(policy.PyPI, n).Allow {
				return
			}
			if len(objects) > 1 {
				h := maphash.String(seed, n)
				if seen[h] {
					return
				}
				if i < len(objects)-1 {
					seen[h] = true
				}
			}
			if !asJSON {
				fmt.Fprintf(out, "    <a href=\"%s/simple/%s/\">%s</a><br>\n", html.EscapeString(c.Base), n, name)
				return
			}
			if !first {
				_ = out.WriteByte(',')
			}
			first = false
			fmt.Fprintf(out, `{"name":%q}`, name) // a project's name has no character that JSON writes in another way
		})
		if err != nil {
			return err
		}
	}
	_, _ = out.WriteString(end)
	return nil
}

// readList calls do with the name of each project of upstream's list, reading it as a stream.
func readList(ctx context.Context, o *cache.Object, do func(name string)) error {
	m, err := o.Wait(ctx)
	if err != nil {
		return err
	}
	r := o.Reader(ctx)
	if !isJSON(m.ContentType, nil) {
		return anchors(r, func(_ map[string]string, text string) { do(text) })
	}
	d := json.NewDecoder(r)
	for {
		t, err := d.Token()
		if err != nil {
			return fmt.Errorf("upstream's list of projects: %w", unexpected(err))
		}
		if t != "projects" {
			continue
		}
		if t, err := d.Token(); err != nil || t != json.Delim('[') {
			return fmt.Errorf("upstream's list of projects is none: %w", unexpected(err))
		}
		for d.More() {
			var p struct {
				Name string `json:"name"`
			}
			if err := d.Decode(&p); err != nil {
				return fmt.Errorf("upstream's list of projects: %w", err)
			}
			do(p.Name)
		}
		return nil
	}
}

func unexpected(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
