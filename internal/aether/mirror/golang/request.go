package golang

import (
	"fmt"
	"strings"

	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

// endpoint is one of the protocol's.
type endpoint int

const (
	list endpoint = iota
	latest
	info
	goMod
	archive
	sumSupported
	sumLatest
	sumLookup
	sumTile
)

// sumPaths are the words of the checksum database's endpoints.
var sumPaths = map[endpoint]string{sumSupported: "supported", sumLatest: "latest", sumLookup: "lookup", sumTile: "tile"}

// request is what a path of the protocol asks for.
type request struct {
	endpoint endpoint
	// module and version are unescaped; version of list and latest is empty, and that of info may be a branch, a commit
	// or a part of a version.
	module, version string
	// database is the name in a path below /sumdb, and path what follows it, without a slash at the beginning.
	database, path string
}

// canonical tells whether the version is one that a zip can have, not a query for one.
func (r request) canonical() bool { return canonical(r.version) }

func canonical(version string) bool {
	return semver.IsValid(version) && module.CanonicalVersion(version) == version
}

// parsePath reads the path of a request, "/golang.test/x/y/@v/list".
func parsePath(path string) (request, error) {
	path, ok := strings.CutPrefix(path, "/")
	if !ok {
		return request{}, fmt.Errorf("path %q does not begin with a slash", path)
	}
	if rest, ok := strings.CutPrefix(path, "sumdb/"); ok {
		return parseSum(rest)
	}
	if escaped, ok := strings.CutSuffix(path, "/@latest"); ok {
		m, err := module.UnescapePath(escaped)
		return request{endpoint: latest, module: m}, err
	}
	escaped, file, ok := strings.Cut(path, "/@v/")
	if !ok {
		return request{}, fmt.Errorf("path %q is none of the module proxy protocol", path)
	}
	m, err := module.UnescapePath(escaped)
	if err != nil {
		return request{}, err
	}
	if file == "list" {
		return request{endpoint: list, module: m}, nil
	}
	r := request{module: m}
	dot := strings.LastIndexByte(file, '.')
	if dot < 0 {
		return request{}, fmt.Errorf("%q is no file of a module", file)
	}
	switch file[dot:] {
	case ".info":
		r.endpoint = info
	case ".mod":
		r.endpoint = goMod
	case ".zip":
		r.endpoint = archive
	default:
		return request{}, fmt.Errorf("%q is no file of a module", file)
	}
	if r.version, err = module.UnescapeVersion(file[:dot]); err != nil {
		return request{}, err
	}
	switch {
	case r.canonical():
		if err := module.Check(m, r.version); err != nil {
			return request{}, err
		}
	case r.endpoint != info:
		return request{}, fmt.Errorf("%q is no canonical version", r.version)
	}
	return r, nil
}

// parseSum reads what follows /sumdb/: the database's name, which may have slashes, and an endpoint of it.
func parseSum(rest string) (request, error) {
	for _, e := range []endpoint{sumSupported, sumLatest} {
		if database, ok := strings.CutSuffix(rest, "/"+sumPaths[e]); ok {
			return request{endpoint: e, database: database, path: sumPaths[e]}, checkDatabase(database)
		}
	}
	// A module's path may hold the other's word: the first one counts.
	e := sumLookup
	if at := strings.Index(rest, "/tile/"); at >= 0 && !strings.Contains(rest[:at], "/lookup/") {
		e = sumTile
	}
	database, arg, ok := strings.Cut(rest, "/"+sumPaths[e]+"/")
	if !ok {
		return request{}, fmt.Errorf("%q is none of the checksum database's paths", rest)
	}
	r := request{endpoint: e, database: database, path: sumPaths[e] + "/" + arg}
	if err := checkDatabase(database); err != nil {
		return request{}, err
	}
	if e == sumTile {
		if strings.Trim(arg, "abcdefghijklmnopqrstuvwxyz0123456789./") != "" || strings.Contains(arg, "..") {
			return request{}, fmt.Errorf("%q is no tile", arg)
		}
		return r, nil
	}
	escapedModule, escapedVersion, ok := strings.Cut(arg, "@")
	if !ok {
		return request{}, fmt.Errorf("%q names no version", arg)
	}
	var err error
	if r.module, err = module.UnescapePath(escapedModule); err != nil {
		return request{}, err
	}
	if r.version, err = module.UnescapeVersion(escapedVersion); err != nil {
		return request{}, err
	}
	if !r.canonical() {
		return request{}, fmt.Errorf("%q is no canonical version", r.version)
	}
	return r, module.Check(r.module, r.version)
}

// checkDatabase refuses names that are no part of a URL's path: they name a host, and may name a path on it.
func checkDatabase(name string) error {
	if err := module.CheckImportPath(name); err != nil {
		return fmt.Errorf("checksum database %q: %w", name, err)
	}
	return nil
}
