package pypi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/policy"
)

// document answers with /pypi/<name>/json or, if version is set, /pypi/<name>/<version>/json. Which files it shows is
// decided by the project's page, so that all lists agree.
func (s *Service) document(w http.ResponseWriter, r *http.Request, c *mirror.Caller, name, wanted string) {
	p, _ := s.open(w, r, c, "metadata", name)
	if p == nil {
		return
	}
	a := mirror.Artefact{Kind: "metadata", Name: p.name, Version: wanted}
	files, hidden := visible(c, p)
	newest := newestOf(files)
	if wanted != "" {
		v := parseVersion(wanted)
		is := func(f file) bool { return f.version != "" && parseVersion(f.version).compare(v) == 0 }
		newest = ""
		for _, f := range files {
			if is(f) {
				newest = f.version
			}
		}
		if newest == "" {
			for _, f := range p.files {
				if is(f) {
					mirror.Deny(w, c, a, judge(c, p, f))
					return
				}
			}
			mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "project "+p.name, "has no version %q with a file", wanted))
			return
		}
	}
	if newest == "" && !hidden.Allow {
		mirror.Deny(w, c, a, hidden)
		return
	}
	a.Rule = hidden.Rule
	doc, from, err := s.legacy(r.Context(), p.name, wanted)
	if err == nil && c.World.Hides() && wanted == "" && newest != "" && !tellsOf(doc, newest) {
		// What another one tells of the project must not be told, so the newest visible one tells it. The other may be
		// hidden, have no file and so no date, or have come after the page.
		var of map[string]json.RawMessage
		if of, _, err = s.legacy(r.Context(), p.name, newest); err == nil {
			doc["info"], doc["urls"] = of["info"], of["urls"]
		}
	}
	var body []byte
	if err == nil {
		body, err = p.filter(c, doc, files)
	}
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	w.Header().Set("Cache-Control", "no-cache")
	mirror.SendBytes(w, r, c, a, "application/json", body, from)
}

// tellsOf tells whether a document's description of the project comes from a version.
func tellsOf(doc map[string]json.RawMessage, want string) bool {
	var info struct {
		Version string `json:"version"`
	}
	return json.Unmarshal(doc["info"], &info) == nil && parseVersion(info.Version).compare(parseVersion(want)) == 0
}

// newestOf is the version that upstream would call the newest of these files: no pre-release unless there is nothing
// else, and none whose files are all yanked.
func newestOf(files []file) string {
	live := map[string]bool{}
	for _, f := range files {
		if !f.yanked {
			live[f.version] = true
		}
	}
	var best version
	rank := func(v version) int {
		switch {
		case !live[v.text]:
			return 1
		case v.prerelease():
			return 2
		}
		return 3
	}
	for _, name := range versions(files) {
		// They come in order, so at the same rank the later one is newer.
		if v := parseVersion(name); best.text == "" || rank(v) >= rank(best) {
			best = v
		}
	}
	return best.text
}

// legacy fetches upstream's JSON document of a project or of one of its versions.
func (s *Service) legacy(ctx context.Context, name, wanted string) (map[string]json.RawMessage, cache.Source, error) {
	var missing error = errdefs.New(errdefs.NotFound, "pypi", "its upstream has no /pypi/<name>/json, only a simple index")
	for _, index := range s.cfg.Upstream.URLs {
		base, ok := strings.CutSuffix(index, "/simple")
		if !ok {
			continue
		}
		u := base + "/pypi/" + name
		if wanted != "" {
			u += "/" + url.PathEscape(wanted)
		}
		o, from, err := s.fetch(ctx, u+"/json", "application/json", maxPage)
		if err != nil {
			if cache.IsAbsent(err) {
				missing = err
				continue
			}
			return nil, from, err
		}
		defer func() { _ = o.Close() }()
		b, err := o.Bytes(ctx)
		if err != nil {
			return nil, from, err
		}
		var doc map[string]json.RawMessage
		if err := json.Unmarshal(b, &doc); err != nil {
			return nil, from, errdefs.New(errdefs.Unavailable, "upstream's document of "+name, "cannot be read: %v", err).Wrap(err)
		}
		return doc, from, nil
	}
	return nil, "", missing
}

// filter leaves of a document what is true of the visible files, and makes its links lead here.
func (p *project) filter(c *mirror.Caller, doc map[string]json.RawMessage, files []file) ([]byte, error) {
	shown := make(map[string]file, len(files))
	for _, f := range files {
		shown[f.name] = f
	}
	narrow := func(raw json.RawMessage) ([]map[string]json.RawMessage, error) {
		var list []map[string]json.RawMessage
		if len(raw) > 0 {
			if err := json.Unmarshal(raw, &list); err != nil {
				return nil, err
			}
		}
		out := []map[string]json.RawMessage{}
		for _, item := range list {
			var name string
			if json.Unmarshal(item["filename"], &name) != nil {
				continue
			}
			f, ok := shown[name]
			if !ok {
				continue
			}
			link, err := json.Marshal(p.link(c.Base, f))
			if err != nil {
				return nil, err
			}
			item["url"] = link
			out = append(out, item)
		}
		return out, nil
	}
	out := map[string]any{"info": doc["info"], "vulnerabilities": []any{}}
	urls, err := narrow(doc["urls"])
	if err != nil {
		return nil, fmt.Errorf("upstream's document of %s: urls: %w", p.name, err)
	}
	out["urls"] = urls
	if raw := doc["releases"]; len(raw) > 0 {
		var releases map[string]json.RawMessage
		if err := json.Unmarshal(raw, &releases); err != nil {
			return nil, fmt.Errorf("upstream's document of %s: releases: %w", p.name, err)
		}
		kept := map[string]any{}
		for v, raw := range releases {
			list, err := narrow(raw)
			if err != nil {
				return nil, fmt.Errorf("upstream's document of %s: release %s: %w", p.name, v, err)
			}
			// A release without files has no date; where nothing is hidden, it is as upstream has it.
			if len(list) > 0 || c.World.Version(policy.PyPI, p.name, v, time.Time{}).Allow {
				kept[v] = list
			}
		}
		out["releases"] = kept
	}
	if !c.World.Hides() {
		for _, k := range []string{"vulnerabilities", "last_serial", "ownership"} {
			if raw, ok := doc[k]; ok {
				out[k] = raw
			}
		}
	}
	return json.Marshal(out)
}
